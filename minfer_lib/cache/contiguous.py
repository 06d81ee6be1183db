"""The simplest KV cache: for each layer one buffer for keys and one for values, filled from the left.

The buffers are as long as the longest request may become. They plug into unmodified models of transformers, which call
`update` in every attention layer with the new keys and values and attend to what it returns.

Invariant: after a forward pass over n tokens every layer holds the same number of tokens, rows [0, length) are their
keys in order of position, and nothing behind `length` is ever read.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..errors import UnsupportedModel
from ..models import hf_compat

CACHEABLE_LAYERS = {"full_attention", "sliding_attention"}


class KVCacheLayer(hf_compat.CacheLayerMixin):
    """Keys and values of one layer for one request: two buffers [1, kv_heads, max_len, head_dim].

    Grouped-query attention is why it is kv_heads and not heads: several query heads read the same keys.
    """

    is_sliding = False  # a model with a window gets the whole history too; its mask hides what is too old
    is_compileable = False  # the view that `update` returns grows with each step

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates at the first key, when heads, head size, dtype and device are known."""
        batch, heads, _, _ = key_states.shape
        with torch.inference_mode(False):  # a buffer made inside a caller's inference mode could not be used outside
            self.keys = key_states.new_empty(batch, heads, self.max_len, key_states.shape[-1])
            self.values = value_states.new_empty(batch, heads, self.max_len, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new rows [1, kv_heads, new, head_dim] and returns all rows so far, as views: nothing is copied."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, end = self.length, self.length + key_states.shape[-2]
        if end > self.max_len:
            raise IndexError(f"the KV cache has room for {self.max_len} tokens, and token {end} was to be written")
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reset(self) -> None:
        """Makes room for the next request; the buffers stay."""
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How wide the causal mask must be, and where it begins; asked before the update."""
        return self.length + query_length, 0


class KVCache(Cache):
    """One `KVCacheLayer` for each layer of a model, with room for `max_len` tokens of one request."""

    def __init__(self, num_layers: int, max_len: int) -> None:
        super().__init__(layers=[KVCacheLayer(max_len) for _ in range(num_layers)])
        self.max_len = max_len

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of all buffers, used or not; 0 before the first token."""
        return sum(t.nbytes for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values))

    @property
    def nbytes_used(self) -> int:
        """Bytes of the rows that hold a token."""
        return sum(
            t[:, :, : layer.length].nbytes
            for layer in self.layers
            if layer.is_initialized
            for t in (layer.keys, layer.values)
        )

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()


# -- which models can use one -------------------------------------------------------------------------------------


def check_cacheable(model: PreTrainedModel, name: str) -> None:
    """Raises `UnsupportedModel` if any layer keeps something else than keys and values from token to token."""
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - CACHEABLE_LAYERS
    if other or hf_compat.is_stateful(model):
        kinds = f" ({', '.join(sorted(other))})" if other else ""
        raise UnsupportedModel(
            f"{name} ({config.model_type}) has layers that keep a state of their own between tokens{kinds}, which a "
            "cache of keys and values does not hold. NaiveEngine runs it; so does a model whose layers are all "
            "attention."
        )


def check_filled(cache: Cache, tokens: int, name: str) -> None:
    """Raises `UnsupportedModel` unless the first forward pass over `tokens` tokens went through the cache."""
    if cache.get_seq_length() != tokens:
        raise UnsupportedModel(
            f"{name} left the cache with {cache.get_seq_length()} tokens after a prompt of {tokens}: its code does "
            "not use the cache that it is given, and would answer without its past. NaiveEngine runs it."
        )
