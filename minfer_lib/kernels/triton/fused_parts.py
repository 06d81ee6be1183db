"""The parts of a decoder layer between attention and products, a kernel each, in Triton.

transformers computes a norm in five kernels and a rotary embedding in ten, each of which reads and writes what the one
before wrote. For one token that is a few kilobytes, so that starting them is all they take: as one kernel a part costs
a tenth.

Invariant: the results are those of `reference_parts`, roundings included, in float32 sums of fixed order: equal inputs
give equal bits. Nothing is written but what is asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, gain_ptr, out_ptr, n, eps, BLOCK: tl.constexpr) -> None:
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    gain = tl.load(gain_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * n + at, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * n + at, (normed * gain).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """As `reference_parts.rms_norm`, for x [T, n]."""
    rows, n = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    rms_norm_kernel[(rows,)](x, gain, out, n, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * n + at, mask=at < n, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * n + n + at, mask=at < n, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * n + at, (silu * up).to(out_ptr.dtype.element_ty), mask=at < n)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """As `reference_parts.silu_mul`."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, n)
    silu_mul_kernel[(rows, triton.cdiv(n, 1024))](x, out, n, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def rope_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, slots_ptr, query_ptr, keys_ptr, values_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK heads of one token, the halves of each side by side: queries to query, keys and values to their pools."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, PADDED)
    half: tl.constexpr = DIM // 2
    in_half = dims < half
    inside = (heads < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    is_query, is_value = (heads < HEADS)[:, None], (heads >= HEADS + KV_HEADS)[:, None]
    at = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + heads[:, None] * DIM + dims[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * DIM + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * DIM + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slots_ptr + token)
    kind = query_ptr.dtype.element_ty
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        q_low = tl.load(q_gain_ptr + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_gain_ptr + half + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_gain_ptr + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_gain_ptr + half + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        normed_low = (low * scale).to(kind).to(tl.float32) * tl.where(is_query, q_low, k_low)
        normed_high = (high * scale).to(kind).to(tl.float32) * tl.where(is_query, q_high, k_high)
        low, high = tl.where(is_value, low, normed_low), tl.where(is_value, high, normed_high)
    turned_low = (low * cos - high * sin).to(kind)
    turned_high = (high * cos + low * sin).to(kind)
    query_at = query_ptr + token * (HEADS * DIM) + heads[:, None] * DIM + dims[None, :]
    tl.store(query_at, turned_low, mask=inside & is_query)
    tl.store(query_at + half, turned_high, mask=inside & is_query)
    key_at = keys_ptr + slot * (KV_HEADS * DIM) + (heads - HEADS)[:, None] * DIM + dims[None, :]
    is_key = inside & (heads >= HEADS)[:, None] & (heads < HEADS + KV_HEADS)[:, None]
    tl.store(key_at, turned_low, mask=is_key)
    tl.store(key_at + half, turned_high, mask=is_key)
    value_at = values_ptr + slot * (KV_HEADS * DIM) + (heads - HEADS - KV_HEADS)[:, None] * DIM + dims[None, :]
    tl.store(value_at, low.to(kind), mask=inside & is_value)
    tl.store(value_at + half, high.to(kind), mask=inside & is_value)


def rope_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_gain: torch.Tensor | None, k_gain: torch.Tensor | None,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, eps: float, heads: int, kv_heads: int,
) -> torch.Tensor:  # fmt: skip
    """As `reference_parts.rope_cache`; all of qkv's dtype but slots, and contiguous."""
    tokens, dim = qkv.shape[0], keys.shape[2]
    query = qkv.new_empty(tokens, heads, dim)
    total = heads + 2 * kv_heads
    # Few tokens: more programs with less each, or most of the GPU idles.
    block = 4 if tokens < 64 else min(32, triton.next_power_of_2(total))
    rope_cache_kernel[(tokens, triton.cdiv(total, block))](
        qkv, cos, sin, q_gain, k_gain, slots, query, keys, values, eps, HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        PADDED=triton.next_power_of_2(dim // 2), BLOCK=block, NORM=q_gain is not None,
        num_warps=1 if block <= 4 else 4,
    )  # fmt: skip
    return query


@triton.jit(do_not_specialize=["key_token", "key_head", "value_token", "value_head"])
def write_cache_kernel(
    key_ptr, value_ptr, slots_ptr, keys_ptr, values_ptr, key_token, key_head, value_token, value_head,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The keys and values of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    i = tl.arange(0, BLOCK)
    key = tl.load(
        key_ptr + token * key_token + i // KEY_DIM * key_head + i % KEY_DIM, mask=i < KV_HEADS * KEY_DIM, other=0.0
    )
    value = tl.load(
        value_ptr + token * value_token + i // VALUE_DIM * value_head + i % VALUE_DIM,
        mask=i < KV_HEADS * VALUE_DIM, other=0.0,
    )  # fmt: skip
    tl.store(keys_ptr + slot * (KV_HEADS * KEY_DIM) + i, key, mask=i < KV_HEADS * KEY_DIM)
    tl.store(values_ptr + slot * (KV_HEADS * VALUE_DIM) + i, value, mask=i < KV_HEADS * VALUE_DIM)


def write_cache(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """As `KVPool.write`, both in one launch: key [T, kv_heads, key_dim] and value, of any strides but the last one, to
    rows slots int64 [T] of keys [rows, kv_heads, key_dim] and values."""
    tokens, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    write_cache_kernel[(tokens,)](
        key, value, slots, keys, values, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK=triton.next_power_of_2(kv_heads * max(key_dim, value_dim)), num_warps=4,
    )  # fmt: skip
