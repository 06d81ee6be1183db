"""Attention for tokens of many requests in one row, without padding.

From here on there is one way to call a model: the new tokens of all requests of a step stand side by side in a single
row, and a `PackedBatch` that travels along says which belong together and where their keys and values are kept. The
model's layers run unmodified; transformers lets us register the function that they call, and that function reads the
batch.

Invariant: a token attends to the tokens of its own request up to itself (and within the layer's window), and to nothing
else; what a layer asks for beside that (scaling, softcap, sinks) is honoured or the model is refused (`support`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

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
    Raises `UnsupportedModel` when it is called without a batch, or with a mask, which a batch has no place for.
    """
    if minfer is None:
        raise UnsupportedModel(
            f"The attention function `{NAME}` was called without a PackedBatch. It serves the engine alone, which "
            "passes one; for other uses set another implementation, model.set_attn_implementation('sdpa')."
        )
    if attention_mask is not None:
        raise UnsupportedModel(
            f"The attention function `{NAME}` was given a mask. The batch says who sees whom, so a mask would be "
            "ignored. Use a version of transformers that this package was tested with."
        )
    minfer.attended += 1
    pool = minfer.pools[module.layer_idx]
    query = query[0].transpose(0, 1)  # [T, heads, head_dim]
    write = getattr(minfer.backend, "write", KVPool.write)
    write(pool, minfer.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = minfer.backend.attend(
        query, pool, minfer, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
    )  # [T, heads, value_dim]
    return out[None], None


# The one registration. Without an entry of this name for masks, transformers builds none.
AttentionInterface.register(NAME, packed_attention)
