"""Attention for tokens of many requests in one row, without padding.

From here on there is one way to call a model: the new tokens of all requests of a step stand side by side in a single
row, and a `PackedBatch` that travels along says which belong together and where their keys and values are kept. The
model runs unmodified; transformers lets us register the function that its attention layers call, and that function
reads the batch.

Invariant: a token attends to the tokens of its own request up to itself (and within the layer's window), and to nothing
else; what a layer asks for beside that (scaling, softcap, sinks) is honoured or the model is refused (`support`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..cache.pool import KVPool
from ..errors import UnsupportedModel
from .batch import PackedBatch

NAME = "minfer"  # what the function is registered as


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    minfer: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer calls: keeps the new keys and values, then attends request by request.

    query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim], rotary embedding applied, not yet repeated
    for grouped-query heads. Returns ([1, T, heads, value_dim], None), as transformers wants it.

    scaling: factor of the scores. sliding_window: a token sees so many, itself included. softcap: scores become
    softcap * tanh(scores / softcap). s_aux [heads]: attention sinks, a score that takes part in the softmax and
    carries no value (Xiao et al. 2023; gpt-oss learns it).
    """
    if minfer is None:
        raise UnsupportedModel(
            f"The attention function `{NAME}` was called without a PackedBatch. It serves the engine alone, which "
            "passes one; for other uses set another implementation, model.set_attn_implementation('sdpa')."
        )
    pool = minfer.pools[module.layer_idx]
    query = query[0].transpose(0, 1)  # [T, heads, head_dim]
    pool.write(minfer.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    special = {"scale": scale, "softcap": softcap, "sinks": s_aux}

    decodes = minfer.num_decodes
    if decodes == len(minfer.q_lens):  # the usual step: no copy into a common result
        return attend_decodes(query, pool, minfer, sliding_window, special)[None], None
    out = query.new_empty(*query.shape[:2], value.shape[-1])  # [T, heads, value_dim]
    if decodes:
        out[:decodes] = attend_decodes(query[:decodes], pool, minfer, sliding_window, special)
    start = decodes
    if minfer.kernels.prefill is not None:
        out[start:] = kernel_prefill(query[start:], pool, minfer, sliding_window, special)
        return out[None], None
    for row in range(decodes, len(minfer.q_lens)):
        end = start + minfer.q_lens[row]
        out[start:end] = attend_chunk(query[start:end], pool, minfer, row, sliding_window, special)
        start = end
    return out[None], None


def attend_decodes(
    query: torch.Tensor, pool: KVPool, batch: PackedBatch, window: int | None, special: dict[str, Any]
) -> torch.Tensor:
    """One new token of each of R requests, all in one operation: query [R, heads, dim] -> [R, heads, value_dim].

    The query heads that share a key head stand where an ordinary attention has several queries, so that keys are read
    once for the group and never repeated.
    """
    if batch.kernels.decode is not None:
        return kernel_decode(query, pool, batch, window, special)
    context, (kv_heads, heads) = batch.decode_context, (pool.keys.shape[1], query.shape[1])
    if context.rows is not None:
        spread = query.new_zeros(len(context.kv_lens), *query.shape[1:])
        spread[context.rows] = query
        query = spread
    keys = context.read(pool.keys, batch.block_size)  # [rows, kv_heads, longest, dim]
    values = context.read(pool.values, batch.block_size)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [rows, kv_heads, group, dim]
    mask = batch.decode_mask(window, query.dtype, heads // kv_heads)
    out = attend(grouped, keys, values, mask, **special).flatten(1, 2)
    return out if context.rows is None else out[context.rows]


def kernel_decode(
    query: torch.Tensor, pool: KVPool, batch: PackedBatch, window: int | None, special: dict[str, Any]
) -> torch.Tensor:
    """`attend_decodes` by a kernel that follows the block tables, where the batch has one."""
    return batch.kernels.decode(
        query, pool.keys, pool.values, *batch.decode_numbers, block_size=batch.block_size,
        longest=batch.longest_decode, window=window, **special,
    )  # fmt: skip


def kernel_prefill(
    query: torch.Tensor, pool: KVPool, batch: PackedBatch, window: int | None, special: dict[str, Any]
) -> torch.Tensor:
    """`attend_chunk` for all requests with several new tokens, query [T, heads, dim] -> [T, heads, value_dim]."""
    return batch.kernels.prefill(
        query, pool.keys, pool.values, *batch.chunk_numbers, block_size=batch.block_size, most_new=batch.most_new,
        window=window, **special,
    )  # fmt: skip


def attend_chunk(
    query: torch.Tensor, pool: KVPool, batch: PackedBatch, row: int, window: int | None, special: dict[str, Any]
) -> torch.Tensor:
    """A part of one request's prompt, query [new, heads, dim], over all of it so far -> [new, heads, value_dim]."""
    new, heads, _ = query.shape
    total, kv_heads = batch.kv_lens[row], pool.keys.shape[1]
    context = batch.chunk_context(row)
    keys = context.read(pool.keys, batch.block_size)  # [1, kv_heads, total, dim]
    values = context.read(pool.values, batch.block_size)
    whole = new == total and (window is None or total <= window)
    if whole and special["softcap"] is None and special["sinks"] is None:  # nothing before it: no mask to write out
        by_head = query.transpose(0, 1)[None]  # [1, heads, new, dim]
        out = F.scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=special["scale"], enable_gqa=heads > kv_heads
        )
        return out[0].transpose(0, 1)
    group = heads // kv_heads
    grouped = query.transpose(0, 1).reshape(1, kv_heads, group * new, -1)  # queries of all heads of a group in a row
    mask = batch.chunk_mask(row, window, query.dtype, group)  # [group * new, total]
    out = attend(grouped, keys, values, mask[None, None], **special)
    return out.reshape(heads, new, -1).transpose(0, 1)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
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


def attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that name a model's attention function: its own, and those of parts that have another one."""
    found = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    return list({id(config): config for config in found}.values())


@contextmanager
def implementation(configs: Sequence[PreTrainedConfig], name: str) -> Iterator[None]:
    """Sets the attention function of a model, given by its `attention_configs`, for the time of the block.

    It is a state of the model, which others use too: what was found is put back, whatever happens. Putting "sdpa" back
    blindly would be wrong, since some models run with another one for a reason. Layers look the name up in each call,
    so writing it is enough; `model.set_attn_implementation` walks through all modules: a millisecond a step.
    """
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation = old


# The one registration. Without an entry of this name for masks, transformers builds none: the batch says who sees whom.
AttentionInterface.register(NAME, packed_attention)
