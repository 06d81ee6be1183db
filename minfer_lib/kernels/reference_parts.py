"""The parts of a decoder layer between attention and products, in plain torch: what `triton.fused_parts` computes.

Invariant: each does what transformers' modules do, with their roundings: a norm is computed in float32 and rounded to
the dtype of its input before the gain is multiplied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] over the root of the mean of its squares, times gain [n] (Zhang and Sennrich 2019)."""
    floats = x.float()
    normed = floats * torch.rsqrt(floats.square().mean(-1, keepdim=True) + eps)
    return gain * normed.to(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 n], gates in front: silu(gate) * up [T, n] (Shazeer 2020)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_gain: torch.Tensor | None, k_gain: torch.Tensor | None,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, eps: float, heads: int, kv_heads: int,
) -> torch.Tensor:  # fmt: skip
    """Queries [T, heads, dim], turned by their positions; turned keys and values go to rows `slots` of the pools.

    qkv [T, (heads + 2 kv_heads) * dim]; cos and sin [T, dim], both halves alike, as transformers' rotary embedding (Su
    et al. 2021) gives them; q_gain and k_gain [dim] of norms of each head, or None; slots int64 [T]; keys and values
    [rows, kv_heads, dim].
    """
    heads_of = qkv.view(len(qkv), heads + 2 * kv_heads, -1)  # [T, heads, dim]
    query, key, value = heads_of.split([heads, kv_heads, kv_heads], 1)
    if q_gain is not None:
        query, key = rms_norm(query, q_gain, eps), rms_norm(key, k_gain, eps)
    keys.index_copy_(0, slots, _turned(key, cos, sin))
    values.index_copy_(0, slots, value)
    return _turned(query, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
