"""What stands between the products of a decoder layer: norms, SiLU times up, rotary embedding, the write to the cache.

transformers computes each of them in three to ten kernels, and at one token a kernel does little more than start. Here
each is one: numbers are read once, what would go from one kernel to the next through memory stays in registers.

Invariant: sums are float32 and run in a fixed order, so equal inputs give equal bits; each token is computed by itself,
whatever its company; of the cache nothing is touched but the rows that `slots` names. A normalised value is rounded to
the model's dtype before it meets the gain, as transformers does. The oracle of all four is `kernels.reference_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference_parts import CODES, check_rope_cache

LARGEST_CODE = tl.constexpr(float(CODES))
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 x 2^23: added and taken off, it rounds what follows the point, ties to even


@triton.jit
def silu(gate: tl.tensor) -> tl.tensor:
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def rms_norm_kernel(x_ptr, gain_ptr, out_ptr, n, eps, BLOCK: tl.constexpr) -> None:
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * n + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * n + columns, (normed * gain).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, n] divided by the root of its mean square, times gain [n] -> [T, n]; contiguous.

    Source: Zhang and Sennrich 2019 (RMSNorm, arXiv:1910.07467).
    """
    rows, n = x.shape
    assert x.is_contiguous() and gain.shape == (n,) and gain.is_contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        rms_norm_kernel[(rows,)](x, gain, out, n, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr) -> None:
    """BLOCK outputs of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    gate = tl.load(x_ptr + row * 2 * n + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * n + n + columns, mask=inside, other=0.0).to(tl.float32)
    gate = silu(gate).to(out_ptr.dtype.element_ty).to(tl.float32)  # rounded here too, as transformers does
    tl.store(out_ptr + row * n + columns, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2n], the gates in front and contiguous, -> silu(gate) * up [T, n].

    Source: Shazeer 2020 (SwiGLU, arXiv:2002.05202).
    """
    rows, n = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = x.new_empty(rows, n)
    with torch.cuda.device_of(x):
        silu_mul_kernel[(rows, triton.cdiv(n, 1024))](x, out, n, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _gain(gain_ptr, dims, inside):
    return tl.load(gain_ptr + dims, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _scales(x):
    """Of rows [rows, dim] float32, as `reference_parts.quantize_rows`, bit by bit."""
    peak = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(peak, tl.full(peak.shape, LARGEST_CODE, tl.float32))
    has_nan = tl.max((x != x).to(tl.int32), 1)  # asked of each: a maximum may leave NaN out
    return tl.where(has_nan == 1, float("nan"), scale)


@triton.jit
def _codes(x, scale):
    """x [rows, dim] float32 by its scales [rows], as codes."""
    codes = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    codes = tl.where(codes != codes, 0.0, tl.minimum(tl.maximum(codes, -LARGEST_CODE), LARGEST_CODE))
    return (codes + TO_INTEGER - TO_INTEGER).to(tl.int8)


@triton.jit
def rope_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr, key_scales_ptr,
    value_scales_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_H of the heads of one token, of whichever kind: queries go to q, keys and values to the token's cache row.

    The two numbers that a rotation mixes lie half a head apart: so a head is loaded as its two halves.
    """
    token = tl.program_id(0).to(tl.int64)
    head, dims = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, PADDED_HALF)
    half: tl.constexpr = DIM // 2
    in_half = dims < half
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    place = head[:, None] * DIM + dims[None, :]
    qkv_at = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + place
    low = tl.load(qkv_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_at + half, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token).to(tl.int64)

    normed_low, normed_high = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        gain_low = tl.where(is_query, _gain(q_gain_ptr, dims, in_half), _gain(k_gain_ptr, dims, in_half))
        gain_high = tl.where(is_query, _gain(q_gain_ptr + half, dims, in_half), _gain(k_gain_ptr + half, dims, in_half))
        normed_low = (low * scale).to(q_ptr.dtype.element_ty).to(tl.float32) * gain_low
        normed_high = (high * scale).to(q_ptr.dtype.element_ty).to(tl.float32) * gain_high

    # Both halves turn by the same angles, so of cos and sin, which hold every angle twice, the first half will do.
    cos = tl.load(cos_ptr + token * DIM + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * DIM + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned_low = normed_low * cos - normed_high * sin
    turned_high = normed_high * cos + normed_low * sin

    turned_low, turned_high = turned_low.to(q_ptr.dtype.element_ty), turned_high.to(q_ptr.dtype.element_ty)
    q_at = q_ptr + token * (HEADS * DIM) + place
    tl.store(q_at, turned_low, mask=inside & is_query)
    tl.store(q_at + half, turned_high, mask=inside & is_query)
    if key_scales_ptr is not None:  # of what a cache in the model's dtype would keep
        low = tl.where(is_value, low, turned_low.to(tl.float32))
        high = tl.where(is_value, high, turned_high.to(tl.float32))
        scale = tl.maximum(_scales(low), _scales(high), propagate_nan=tl.PropagateNan.ALL)
        low, high = _codes(low, scale), _codes(high, scale)
        turned_low, turned_high = low, high
        kv_head = head - HEADS
        scale_at = key_scales_ptr + slot * KV_HEADS + kv_head
        tl.store(scale_at, scale, mask=(kv_head >= 0) & (kv_head < KV_HEADS))
        scale_at = value_scales_ptr + slot * KV_HEADS + kv_head - KV_HEADS
        tl.store(scale_at, scale, mask=(kv_head >= KV_HEADS) & (kv_head < 2 * KV_HEADS))
    is_key = inside & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    key_at = keys_ptr + slot * (KV_HEADS * DIM) + place - HEADS * DIM
    tl.store(key_at, turned_low.to(keys_ptr.dtype.element_ty), mask=is_key)
    tl.store(key_at + half, turned_high.to(keys_ptr.dtype.element_ty), mask=is_key)
    value_at = values_ptr + slot * (KV_HEADS * DIM) + place - (HEADS + KV_HEADS) * DIM
    tl.store(value_at, low.to(values_ptr.dtype.element_ty), mask=inside & is_value)
    tl.store(value_at + half, high.to(values_ptr.dtype.element_ty), mask=inside & is_value)


def rope_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_gain: torch.Tensor | None, k_gain: torch.Tensor | None,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, eps: float, heads: int, kv_heads: int,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """qkv [T, (heads + 2 kv_heads) * dim] -> the queries [T, heads, dim], turned; turned keys and values to the cache.

    cos, sin [T, dim] as transformers' rotary embeddings give them, the same angles in both halves; q_gain, k_gain
    [dim] of RMSNorms with `eps` over each query and key, or None twice; slots [T] int64 or int32: the row of keys and
    values [rows, kv_heads, dim] that a token's go to; of int8 codes with key_scales and value_scales [rows, kv_heads]
    float32, which are made here. All contiguous. Rotation and norms are float32; transformers rounds in between. Raises
    UnsupportedModel for an embedding that turns only a part of a head, or an odd head.

    Source: Su et al. 2021 (RoFormer, arXiv:2104.09864), with the halves of a head as pairs, as in GPT-NeoX.
    """
    check_rope_cache(qkv, cos, sin, slots, keys, values, heads, kv_heads)
    tokens, dim, total = len(qkv), keys.shape[2], heads + 2 * kv_heads
    q = qkv.new_empty(tokens, heads, dim)
    # One token spreads over several SMs; many tokens fill them by themselves.
    block = 4 if tokens < 64 else min(32, triton.next_power_of_2(total))
    with torch.cuda.device_of(qkv):
        rope_cache_kernel[(tokens, triton.cdiv(total, block))](
            qkv, cos, sin, q_gain, k_gain, slots, q, keys, values, key_scales, value_scales, eps,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED_HALF=triton.next_power_of_2(dim // 2), BLOCK_H=block,
            NORM=q_gain is not None, num_warps=1 if block <= 4 else 4,
        )  # fmt: skip
    return q


@triton.jit
def _write(
    from_ptr, head_stride, store_ptr, scales_ptr, slot, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The heads of one token to a row of the store."""
    head, dims = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED)
    inside = (head < KV_HEADS)[:, None] & (dims < DIM)[None, :]
    x = tl.load(from_ptr + head.to(tl.int64)[:, None] * head_stride + dims[None, :], mask=inside, other=0.0)
    if scales_ptr is not None:
        x = x.to(tl.float32)
        scale = _scales(x)
        tl.store(scales_ptr + slot * KV_HEADS + head, scale, mask=head < KV_HEADS)
        x = _codes(x, scale)
    store_at = store_ptr + slot * (KV_HEADS * DIM) + head[:, None] * DIM + dims[None, :]
    tl.store(store_at, x.to(store_ptr.dtype.element_ty), mask=inside)


# The strides of keys that stand heads first grow with the number of tokens.
@triton.jit(do_not_specialize=["k_token", "k_head", "v_token", "v_head"])
def write_cache_kernel(
    k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_KEY: tl.constexpr, PADDED_VALUE: tl.constexpr,
) -> None:  # fmt: skip
    """Key and value of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    _write(
        k_ptr + token * k_token, k_head, keys_ptr, key_scales_ptr, slot, KV_HEADS, KEY_DIM, PADDED_HEADS, PADDED_KEY,
    )  # fmt: skip
    _write(
        v_ptr + token * v_token, v_head, values_ptr, value_scales_ptr, slot, KV_HEADS, VALUE_DIM, PADDED_HEADS,
        PADDED_VALUE,
    )  # fmt: skip


def write_cache(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """k [T, kv_heads, key_dim] and v [T, kv_heads, value_dim] to rows `slots` [T] of keys and values, in one launch.

    keys [rows, kv_heads, key_dim] and values [rows, kv_heads, value_dim] are contiguous; tokens and heads of k and
    v may have any strides. key_scales and value_scales as in `rope_cache`.
    """
    tokens, kv_heads, key_dim = k.shape
    value_dim = v.shape[2]
    assert v.shape[:2] == k.shape[:2] and slots.shape == (tokens,) and slots.is_contiguous()
    assert keys.shape[1:] == k.shape[1:] and values.shape[1:] == v.shape[1:]
    assert keys.is_contiguous() and values.is_contiguous()
    k, v = (part if part.stride(2) == 1 else part.contiguous() for part in (k, v))
    with torch.cuda.device_of(k):
        write_cache_kernel[(tokens,)](
            k, v, slots, keys, values, key_scales, value_scales, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            KV_HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, PADDED_HEADS=triton.next_power_of_2(kv_heads),
            PADDED_KEY=triton.next_power_of_2(key_dim), PADDED_VALUE=triton.next_power_of_2(value_dim),
            num_warps=4,
        )  # fmt: skip
