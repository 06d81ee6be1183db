"""Where the memory of inference goes: weights, KV cache, activations. Each as a formula, and each measured.

Invariant: a formula here and the measurement of the same name answer the same question in bytes, so that one can be
checked against the other. GB stands for 10^9 bytes and GiB for 2^30 everywhere in this package.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InvalidParameter
from .hf_compat import TorchDispatchMode, cache_argument, storage_key, tree_leaves
from .load import LanguageModel

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that its memory depends on.

    heads: query heads; kv_heads: heads of keys and values, fewer with grouped-query attention (Ainslie et al. 2023).
    tied: whether the output layer is the embedding itself. biases: values that one layer adds beside its matrices.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    biases: int = 0

    @classmethod
    def from_config(cls, config: PreTrainedConfig, name: str | None = None) -> ModelShape:
        """Reads a transformers config; what a config leaves out has the usual default."""
        text = config.get_text_config()
        hidden, heads = text.hidden_size, text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        # biases of q, k and v; norms of q and k; norms behind attention and feed-forward layer
        biases = {"qwen2": (heads + 2 * kv_heads) * head_dim, "qwen3": 2 * head_dim, "gemma2": 2 * hidden}
        return cls(
            name or text.model_type, text.num_hidden_layers, hidden,
            getattr(text, "intermediate_size", None) or 4 * hidden, heads, kv_heads, head_dim, text.vocab_size,
            bool(text.tie_word_embeddings), biases.get(text.model_type, 0),
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Weights of a decoder with gated feed-forward layers (Llama, Qwen, Mistral), counted matrix by matrix."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)  # q and o, k and v
        feed_forward = 3 * self.hidden * self.intermediate  # gate, up, down
        norms = 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + feed_forward + norms + self.biases) + self.hidden


# -- formulas -------------------------------------------------------------------------------------------------------


def weight_bytes(shape: ModelShape, bits: float = 16) -> float:
    """Bytes of the weights at `bits` per weight; scales that a quantised format adds are not counted."""
    return shape.parameters * bits / 8


def kv_bytes_per_token(shape: ModelShape, bytes_per_value: int = 2) -> int:
    """Bytes that one token adds to the KV cache: 2 (keys and values) x layers x kv_heads x head_dim x bytes.

    Exact where every layer keeps its own keys and values, as in nearly all decoders; `measured_kv_bytes_per_token`
    looks.
    """
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_per_value


def activation_bytes(shape: ModelShape, tokens: int, bytes_per_value: int = 2) -> int:
    """Most bytes of intermediate results alive at once in a forward pass over `tokens` new tokens.

    The widest moment is inside a feed-forward layer of a Llama-like model: the embedded tokens, the layer's input, the
    residual stream and its normalised copy (hidden each), gate, up and their product (intermediate each), and the
    rotary tables (head_dim each). For a few tokens the row of logits may be larger, and is taken then. Attention is
    assumed to be fused: written out, its scores would add heads x tokens x tokens.
    """
    feed_forward = tokens * (4 * shape.hidden + 3 * shape.intermediate + 2 * shape.head_dim)
    return max(feed_forward, shape.vocab + 2 * tokens * shape.hidden) * bytes_per_value


# -- measurements ---------------------------------------------------------------------------------------------------


def measured_weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers, those shared by two layers (a tied output layer) counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def measured_kv_bytes_per_token(lm: LanguageModel, tokens: int = 16) -> float:
    """Bytes per token that a real prompt of `tokens` tokens leaves in a `KVCache`."""
    from ..cache.contiguous import KVCache  # of a later chapter

    cache = KVCache(lm.model.config.get_text_config().num_hidden_layers, max_len=tokens)
    lm.next_token_logits(_some_ids(lm, tokens), use_cache=True, **{cache_argument(lm.model): cache})
    return cache.nbytes_used / tokens


def measured_activation_bytes(lm: LanguageModel, tokens: int) -> int:
    """Most bytes of intermediate tensors alive at once in a forward pass without a cache over `tokens` tokens."""
    ids = _some_ids(lm, tokens)
    with PeakMemory() as peak:
        lm.next_token_logits(ids, use_cache=False)
    return peak.peak_bytes


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made inside a `with` block: `live_bytes` now, `peak_bytes` at most.

    It sees every operation on its way to the kernel, on any device, and hears of each storage's end. What an operation
    allocates and frees inside itself stays unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # views and in-place results allocate nothing
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in before | self._known:
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_key(tensor), storage.nbytes()
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def _some_ids(lm: LanguageModel, tokens: int) -> torch.Tensor:
    """Token ids [1, tokens]; which ones does not matter for memory."""
    if not 1 <= tokens <= lm.max_model_len:
        raise InvalidParameter(
            f"tokens={tokens} is not possible: {lm.name} takes 1 to {lm.max_model_len} tokens at once."
        )
    return (torch.arange(tokens, device=lm.device) % lm.vocab_size)[None]
