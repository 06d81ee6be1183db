"""The parts of a fused decoder layer in plain torch, for any device: what the kernels in Triton must agree with.

Invariant: the operations and their order are those of transformers' modules, rounding included, so that on a CPU, where
the fused decoder runs on these, its numbers are the model's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import UnsupportedModel

BLOCK = 2**20  # int8 weights that are floats at a time
CODES = 127  # the largest code: -128 is left out, so that both signs reach equally far


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `products.product`, and the oracle of `triton.matvec` and `triton.few_rows`, which compute parts of it."""
    y = F.linear(x, weight, bias) if scale is None else _int8_product(x, weight, scale, bias)
    y = silu_mul(y) if gated else y
    return y if add_to is None else add_to.add_(y)


def _int8_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Sums in float32 (of float64 in float64), the scales on the finished sums; some rows of weights at a time."""
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = weight.split(max(1, BLOCK // weight.shape[1]))
    y = torch.cat([F.linear(rows, block.to(rows.dtype)) for block in blocks], -1) * scale
    return (y if bias is None else y + bias).to(x.dtype)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """As `triton.fused_parts.rms_norm`; of x with more dimensions over the last one."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (gain * normed.to(x.dtype)).to(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """As `triton.fused_parts.silu_mul`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_gain: torch.Tensor | None, k_gain: torch.Tensor | None,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, eps: float, heads: int, kv_heads: int,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `triton.fused_parts.rope_cache`."""
    check_rope_cache(qkv, cos, sin, slots, keys, values, heads, kv_heads)
    q, k, v = qkv.unflatten(1, (-1, keys.shape[2])).split([heads, kv_heads, kv_heads], 1)
    if q_gain is not None:
        q, k = rms_norm(q, q_gain, eps), rms_norm(k, k_gain, eps)
    write_cache(_turned(k, cos, sin), v, slots, keys, values, key_scales, value_scales)
    return _turned(q, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim], each pair (i, i + dim / 2) of a head turned by its angle."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]


def write_cache(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """As `triton.fused_parts.write_cache`."""
    for new, store, scales in ((k, keys, key_scales), (v, values, value_scales)):
        if scales is not None:
            new, scale = quantize_rows(new)
            scales.index_copy_(0, slots.long(), scale)
        store.index_copy_(0, slots.long(), new.to(store.dtype))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of x [..., dim] in 8 bits: codes int8 [..., dim], and scales float32 [...] that they are multiplied by.

    scale = the row's largest magnitude / 127, code = x / scale rounded to the nearest, ties to even. Computed in
    float32, of a row alone: the same wherever it stands. A row of zeros has scale 0. NaN or infinity makes its row's
    scale NaN or infinity and all codes 0: nothing but NaN can be read from such a row, and nothing passes for a number.
    """
    x = x.float()
    peak = x.abs().amax(-1)
    scale = peak / torch.full_like(peak, CODES)  # by a number, CUDA would multiply by a rounded 1 / 127
    codes = (x / scale[..., None]).nan_to_num_().clamp_(-CODES, CODES)  # numbers next to 0 have scales without digits
    return codes.round_().to(torch.int8), scale


def check_rope_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, heads: int, kv_heads: int,
) -> None:  # fmt: skip
    """Raises UnsupportedModel for what `rope_cache` does not compute; asserts what it would write beyond an end for."""
    tokens, dim = len(qkv), keys.shape[2]
    if values.shape[2] != dim or dim % 2 or cos.shape[1] != dim:
        raise UnsupportedModel(
            f"The rotary embedding turns {cos.shape[1]} of {dim} numbers of a key beside values of {values.shape[2]}: "
            "the fused layer takes heads of one even size, turned as a whole. Run the model's own layers."
        )
    assert qkv.shape == (tokens, (heads + 2 * kv_heads) * dim) and cos.shape == sin.shape == (tokens, dim)
    assert slots.shape == (tokens,) and keys.shape[1] == values.shape[1] == kv_heads
    assert all(part.is_contiguous() for part in (qkv, cos, sin, slots, keys, values))
