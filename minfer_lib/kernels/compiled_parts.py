"""The parts of a fused decoder layer on a CPU by our own kernels in C (parts.c, products.c).

Invariant: they compute what `reference_parts` computes but for rounding, for float32 and bfloat16; whatever they do not
take is left to `reference_parts`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch

from ..models.host import instruction_sets
from . import compiled, reference_parts
from .compiled_products import compiled_product

KINDS = {torch.float32: 0, torch.bfloat16: 1}
NORM = struct.Struct("@3P2qfi")  # `norm_call` in parts.c: 3 pointers, 2 sizes, eps, kind
ROPE = struct.Struct("@11P4qf2i")  # `rope_call`: 11 pointers, 4 sizes, eps, kinds of the rows and of the pools
MOST = 1024  # numbers of a head
# Rows of floats up to which our products are the faster ones: while reading the weights decides. With more rows the
# arithmetic does, which torch is better at, sooner where the CPU multiplies bfloat16 itself.
FEW = {torch.float32: 64, torch.bfloat16: 8 if {"avx512_bf16", "amx_bf16", "bf16"} & set(instruction_sets()) else 64}


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    sums: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `products.product`."""
    few = weight.dtype in FEW and len(x) <= FEW[weight.dtype] and weight.is_contiguous()
    if x.dtype in KINDS and (few or scale is not None):
        return compiled_product(x, weight, scale, bias, sums=sums, smoothing=smoothing, gated=gated, add_to=add_to)
    if sums is None:
        return reference_parts.product(x, weight, scale, bias, gated=gated, add_to=add_to)
    y = compiled_product(x.float(), weight, scale, bias, sums=sums, smoothing=smoothing, gated=gated).to(x.dtype)
    return y if add_to is None else add_to.add_(y)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """As `triton.fused_parts.rms_norm`."""
    if x.dtype not in KINDS or gain.dtype != x.dtype:
        return reference_parts.rms_norm(x, gain, eps)
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    _function("rms_norm")(
        NORM.pack(x.data_ptr(), gain.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, KINDS[x.dtype])
    )
    return out


def rope_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_gain: torch.Tensor | None, k_gain: torch.Tensor | None,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, eps: float, heads: int, kv_heads: int,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `triton.fused_parts.rope_cache`."""
    reference_parts.check_rope_cache(qkv, cos, sin, slots, keys, values, heads, kv_heads)
    tokens, dim = len(qkv), keys.shape[2]
    given = [part.dtype for part in (cos, sin, q_gain, k_gain) if part is not None]
    if set(given) != {qkv.dtype} or qkv.dtype not in KINDS or keys.dtype not in (qkv.dtype, torch.int8) or dim > MOST:
        return reference_parts.rope_cache(
            qkv, cos, sin, q_gain, k_gain, slots, keys, values, eps, heads, kv_heads, key_scales, value_scales
        )
    query = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
    tensors = (qkv, cos, sin, q_gain, k_gain, slots, query, keys, values, key_scales, value_scales)
    _function("rope_cache")(
        ROPE.pack(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors), tokens, heads, kv_heads, dim, eps,
            KINDS[qkv.dtype], 3 if keys.dtype == torch.int8 else KINDS[keys.dtype],
        )
    )  # fmt: skip
    return query


@cache
def _function(name: str) -> Callable[[bytes], None]:
    function = getattr(compiled.library("parts"), name)
    function.argtypes, function.restype = [ctypes.c_char_p], None
    return function


@cache
def why_not() -> str | None:
    """Why these kernels are not usable here; None if they are. That they are right, `fast.proof` finds out."""
    try:
        for name in ("rms_norm", "rope_cache"):
            _function(name)
        compiled.library("products")
    except compiled.CannotCompile as error:
        return str(error)
    return None
