"""Attention over block tables with torch alone: the rows that are needed are copied together, then torch attends.

Invariant: a row that is not among the tokens of a request is never read for it; where requests of different lengths
stand in one tensor, the places behind the shorter ones hold the zeros of the trash row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cache.pool import KVPool
from .batch import PackedBatch

# All but cuDNN's, which compiles a plan for each new shape of its inputs: here every step has one, 37 ms on an H200.
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TorchBackend:
    """Runs anywhere, with any dtype; see `backends.AttentionBackend`."""

    name = "torch"
    graph_safe = False  # the shapes depend on the lengths of a step
    reads_int8 = True

    def attend(
        self, query: torch.Tensor, pool: KVPool, batch: PackedBatch, *, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """query [T, heads, key_dim] -> [T, heads, value_dim]."""
        options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
        decodes = batch.num_decodes
        with _kernels(query):
            if not decodes:
                return self.attend_chunks(query, pool, batch, **options)
            out = attend_decodes(query[:decodes], pool, batch, **options)
            if decodes == len(batch.q_lens):
                return out
            return torch.cat([out, self.attend_chunks(query[decodes:], pool, batch, **options)])

    def attend_chunks(self, query: torch.Tensor, pool: KVPool, batch: PackedBatch, **options: Any) -> torch.Tensor:
        """The same for the tokens of the requests that have several, one request after the other."""
        queries = query.split(batch.q_lens[batch.num_decodes :])
        chunks = [attend_chunk(part, pool, batch, batch.num_decodes + i, **options) for i, part in enumerate(queries)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def attend_decodes(
    query: torch.Tensor, pool: KVPool, batch: PackedBatch, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One new token of each of R requests, all in one operation: query [R, heads, dim] -> [R, heads, value_dim].

    The query heads that share a key head stand where an ordinary attention has several queries, so that keys are read
    once for the group and never repeated.
    """
    requests, (kv_heads, heads) = len(query), (pool.keys.shape[1], query.shape[1])
    rows, mask = _decode_rows(batch, window, query.dtype)  # [R * longest], [R, 1, 1, longest]
    kept = pool.read(rows, query.dtype)
    keys, values = (part.unflatten(0, (requests, -1)).transpose(1, 2) for part in kept)  # [R, kv_heads, longest, dim]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [R, kv_heads, group, dim]
    return softmax_attention(grouped, keys, values, mask, scale, softcap, sinks).flatten(1, 2)


def attend_chunk(
    query: torch.Tensor, pool: KVPool, batch: PackedBatch, row: int, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A part of one request's prompt, query [new, heads, dim], over all of it so far -> [new, heads, value_dim]."""
    new, heads, _ = query.shape
    total, kv_heads = batch.kv_lens[row], pool.keys.shape[1]
    rows = _chunk_rows(batch, row)  # [total]
    keys, values = (part.transpose(0, 1)[None] for part in pool.read(rows, query.dtype))  # [1, kv_heads, total, dim]
    if new == total and (window is None or total <= window) and softcap is None and sinks is None:
        by_head = query.transpose(0, 1)[None]  # [1, heads, new, dim]; nothing before it: no mask to write out
        out = F.scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=scale, enable_gqa=heads > kv_heads
        )
        return out[0].transpose(0, 1)
    group = heads // kv_heads
    grouped = query.transpose(0, 1).reshape(1, kv_heads, group * new, -1)  # queries of all heads of a group in a row
    mask = _chunk_mask(batch, row, window, query.dtype, group)  # [group * new, total]
    out = softmax_attention(grouped, keys, values, mask[None, None], scale, softcap, sinks)
    return out.reshape(heads, new, -1).transpose(0, 1)


def softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(query keys^T * scale + mask) values, with softcap and sinks where a layer has them.

    query [B, kv_heads, group * n, dim], keys [B, kv_heads, L, dim], values [B, kv_heads, L, value_dim], mask
    broadcastable to [B, kv_heads, group * n, L]. PyTorch's fused attention knows neither softcap nor sinks, so these
    are written out; the softmax is in float32 then.
    """
    if softcap is None and sinks is None:
        mask = mask.expand(-1, -1, query.shape[2], -1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = (query @ keys.transpose(-1, -2)).float() * scale  # [B, kv_heads, group * n, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask.float()
    if sinks is not None:
        kv_heads, queries = query.shape[1:3]
        sinks = sinks.float().view(kv_heads, -1, 1)  # [kv_heads, group, 1]
        sinks = sinks.expand(-1, -1, queries // sinks.shape[1]).reshape(1, kv_heads, queries, 1)
        scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, -1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return weights.to(values.dtype) @ values


# -- worked out once a step, by the first layer ------------------------------------------------------------------------


def _decode_rows(batch: PackedBatch, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the pool [R * longest] of the decoding requests' tokens, and who sees which: [R, 1, 1, longest]."""
    key = "decodes", window, dtype
    if key not in batch.derived:
        decodes, longest = batch.num_decodes, max(batch.kv_lens[: batch.num_decodes])
        if "decode rows" not in batch.derived:
            rows = _rows(batch.block_tables[:decodes], longest, batch.block_size)
            hidden = torch.arange(longest, device=batch.device) >= batch.lengths[:decodes, None]  # [R, longest]
            batch.derived["decode rows"] = rows.masked_fill_(hidden, batch.trash_row).flatten(), hidden
        rows, hidden = batch.derived["decode rows"]
        if window is not None:
            begin = batch.lengths[:decodes, None] - window
            hidden = hidden | (torch.arange(longest, device=batch.device) < begin)
        batch.derived[key] = rows, _additive(hidden, dtype)[:, None, None]
    return batch.derived[key]


def _chunk_rows(batch: PackedBatch, row: int) -> torch.Tensor:
    """Rows of the pool [total] of one request's tokens."""
    key = "chunk rows", row
    if key not in batch.derived:
        batch.derived[key] = _rows(batch.block_tables[row : row + 1], batch.kv_lens[row], batch.block_size)[0]
    return batch.derived[key]


def _chunk_mask(batch: PackedBatch, row: int, window: int | None, dtype: torch.dtype, group: int) -> torch.Tensor:
    """[group * new, total]: causal, aligned at the bottom right since the new tokens come last."""
    key = "chunk mask", row, window, dtype, group
    if key not in batch.derived:
        total = batch.kv_lens[row]
        position = torch.arange(total, device=batch.device)
        query = torch.arange(total - batch.q_lens[row], total, device=batch.device)[:, None]
        hidden = position > query
        if window is not None:
            hidden |= position <= query - window
        batch.derived[key] = _additive(hidden, dtype).repeat(group, 1)
    return batch.derived[key]


def _rows(tables: torch.Tensor, tokens: int, block_size: int) -> torch.Tensor:
    """Block tables [R, blocks] -> rows of the pool [R, tokens], int64: the translation of addresses, all at once."""
    blocks = tables[:, : -(-tokens // block_size)].long()
    offsets = torch.arange(min(block_size, tokens), device=tables.device)
    return (blocks[:, :, None] * block_size + offsets).flatten(1)[:, :tokens].contiguous()


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bool -> -inf where True, 0 where False."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _kernels(query: torch.Tensor) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPA_BACKENDS) if query.is_cuda else nullcontext()
