"""How large an engine's KV cache may be: what was asked for, and what fits in memory beside a step.

Invariant: a cache that is returned fits, or there is an exception; if a request may come to less than was asked for,
that is said in a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch

from ..attention.interface import NAME
from ..attention.support import batch_of, packed_layers
from ..attention.view import view_of
from ..cache.paged import PagedKVCache
from ..cache.pool import KVPool, LayerShape
from ..cache.slots import SlotKVCache
from ..errors import InvalidParameter, integer, must_be
from ..generation.prompts import resolve_max_model_len
from ..generation.sampling import Sampler
from ..models import hf_compat, host
from ..models.load import LanguageModel
from ..models.memory import GIB, PeakMemory

SHARE = 0.9  # of the memory that is left; what an allocator cannot use well needs some too
GRAPH_BYTES = 5 * GIB // 4  # a process's first CUDA graphs took 0.6 to 1.2 GiB on an H200, cuBLAS's workspaces included
SHORTEST = 256  # tokens; below it rather fewer slots than shorter ones


def make_cache(
    lm: LanguageModel,
    kv_cache: str | type | Any,
    *,
    max_num_seqs: int,
    num_blocks: int | None,
    block_size: int,
    max_model_len: int | None,
    step_tokens: int,
    enable_prefix_caching: bool,
    kv_cache_dtype: str | None = None,
    graphs: bool = False,
) -> tuple[Any, int]:
    """(the cache of an engine, its max_model_len). The arguments are those of `LLMEngine`; step_tokens is its
    max_num_batched_tokens; graphs: CUDA graphs will need room too.

    Raises `UnsupportedModel` for a model that a packed row cannot serve, `InvalidParameter` if what was asked for in so
    many words does not fit.
    """
    length = resolve_max_model_len(lm, max_model_len)
    num_blocks = None if num_blocks is None else integer("num_blocks", num_blocks, at_least=1)
    block_size = integer("block_size", block_size, at_least=1, at_most=2**20)
    is_class = isinstance(kv_cache, type)
    if is_class:
        known = issubclass(kv_cache, PagedKVCache)
    else:
        known = kv_cache in ("slots", "paged") if isinstance(kv_cache, str) else hasattr(kv_cache, "allocate")
    if not known:
        raise must_be("kv_cache", '"slots", "paged", a subclass of PagedKVCache or a cache', kv_cache)
    if kv_cache_dtype is not None and not (isinstance(kv_cache_dtype, str) and kv_cache_dtype == "int8"):
        raise must_be("kv_cache_dtype", 'None or "int8"', kv_cache_dtype)
    layers = packed_layers(lm) if kv_cache_dtype is None else in_int8(packed_layers(lm))
    if kv_cache == "slots":
        cut = max_model_len is None
        cache = make_slots(lm, layers, max_num_seqs, num_blocks, length, step_tokens, cut=cut, graphs=graphs)
        return cache, cache.block_size
    if not isinstance(kv_cache, str) and not is_class:
        if kv_cache_dtype is not None:
            raise InvalidParameter(
                f"kv_cache_dtype={kv_cache_dtype!r} was given with a cache that exists already, whose dtype is that of "
                "its layers. Make that cache over cache_size.in_int8(packed_layers(lm)), or leave kv_cache_dtype out."
            )
        return kv_cache, min(length, kv_cache.tables.shape[1] * kv_cache.block_size)
    blocks = count_blocks(lm, layers, max_num_seqs, num_blocks, length, block_size, step_tokens, graphs)
    cache = (kv_cache if is_class else PagedKVCache)(
        layers, blocks, block_size, lm.device, enable_prefix_caching=enable_prefix_caching, max_num_seqs=max_num_seqs,
        max_model_len=length,
    )  # fmt: skip
    return cache, length


def in_int8(layers: Mapping[int, LayerShape]) -> dict[int, LayerShape]:
    """The same layers with keys and values in 8 bits."""
    return {index: replace(shape, dtype=torch.int8) for index, shape in layers.items()}


def make_slots(
    lm: LanguageModel, layers: dict[int, LayerShape], max_num_seqs: int, num_blocks: int | None, length: int,
    step_tokens: int, cut: bool, graphs: bool = False,
) -> SlotKVCache:  # fmt: skip
    """A cache with a slot of `length` tokens for each of max_num_seqs requests, or num_blocks slots.

    cut: whether a length may be shortened to what fits, because nobody asked for it; otherwise there are fewer slots.
    """
    slots = num_blocks or max_num_seqs
    per_token = sum(shape.bytes_per_token for shape in layers.values())
    left = bytes_left(lm, layers, slots * length * per_token, length, step_tokens, max_num_seqs, graphs)
    fits = int(SHARE * left) // max(1, per_token)  # tokens
    if slots * length > fits:
        asked = f"{slots} slots of {length:,} tokens ({slots * length * per_token / GIB:.1f} GiB)"
        if cut:
            length = max(min(length, SHORTEST), min(length, fits // slots))
        if num_blocks is None:
            slots = min(slots, fits // length)
        if slots < 1 or slots * length > fits:
            raise InvalidParameter(
                f"A KV cache of {asked} was asked for, and beside a step {left / GIB:.1f} GiB of memory are free: at "
                f"{per_token:,} bytes a token, {fits:,} tokens fit. Pass a smaller max_model_len, max_num_seqs or "
                "num_blocks."
            )
        warnings.warn(
            f"A KV cache of {asked} does not fit in the {left / GIB:.1f} GiB of memory that are free beside a step; "
            f"this engine has {slots} slots of {length:,} tokens. Pass max_model_len or max_num_seqs to choose "
            "yourself.",
            stacklevel=4,
        )
    return SlotKVCache(layers, slots, length, lm.device)


def count_blocks(
    lm: LanguageModel, layers: dict[int, LayerShape], max_num_seqs: int, num_blocks: int | None, length: int,
    block_size: int, step_tokens: int, graphs: bool = False,
) -> int:  # fmt: skip
    """Blocks of block_size tokens: num_blocks, or as many as max_num_seqs requests of `length` tokens could ever fill,
    or as fit."""
    per_block = block_size * sum(shape.bytes_per_token for shape in layers.values())
    wanted = num_blocks or max_num_seqs * -(-length // block_size)
    left = bytes_left(lm, layers, wanted * per_block, length, step_tokens, max_num_seqs, graphs)
    fits = int(SHARE * left) // max(1, per_block)
    if fits < 1 or (num_blocks is not None and num_blocks > fits):
        least = num_blocks or 1
        raise InvalidParameter(
            f"A KV cache of {least:,} blocks of {block_size} tokens ({least * per_block / GIB:.1f} GiB) was asked "
            f"for, and beside a step {left / GIB:.1f} GiB of memory are free: {fits:,} such blocks fit. Pass a "
            + ("smaller num_blocks, or leave it out." if fits else "smaller block_size or max_num_batched_tokens.")
        )
    if num_blocks is None and fits * block_size < length:
        warnings.warn(
            f"{fits:,} blocks of {block_size} tokens fit in the {left / GIB:.1f} GiB of memory that are free beside a "
            f"step, less than one request of max_model_len={length:,} tokens may need: it would end with stop_reason "
            '"kv_cache_full".',
            stacklevel=4,
        )
    return min(wanted, fits)


def bytes_left(
    lm: LanguageModel, layers: dict[int, LayerShape], wanted: int, length: int, step_tokens: int, max_num_seqs: int,
    graphs: bool = False,
) -> int:  # fmt: skip
    """Bytes for a cache that is to have `wanted` ones: what is free, less what a step takes where that matters."""
    free = available_bytes(lm.device) - graphs * GRAPH_BYTES
    if wanted <= SHARE * free / 2:
        return free  # there is plenty of room for both, and nothing to find out
    return max(0, free - step_bytes(lm, layers, length, step_tokens, min(step_tokens, max_num_seqs)))


def step_bytes(lm: LanguageModel, layers: dict[int, LayerShape], length: int, tokens: int, samples: int) -> int:
    """Most bytes of intermediate tensors alive in a step over `tokens` tokens that takes `samples` rows of logits.

    Measured, by running one with prompts of `length` tokens, and what the dearest way of sampling takes. The KV cache
    it needs is not counted.
    """
    lens = [tokens % length] * (tokens % length > 0) + [length] * (tokens // length)
    positions = [position for new in lens for position in range(new)]
    rows = [row * length + position for row, new in enumerate(lens) for position in range(new)]
    pools = {index: KVPool.of(shape, (len(lens) + 1) * length, lm.device) for index, shape in layers.items()}
    batch = batch_of(pools, length, [[row] for row in range(len(lens))], lens, lens, rows, lm.device)
    ids = torch.tensor([positions], device=lm.device)
    keep = {}
    if hf_compat.supports_logits_to_keep(lm.model):
        keep["logits_to_keep"] = torch.arange(samples, device=lm.device)
    view = view_of(lm.model, NAME)
    with PeakMemory() as peak, torch.no_grad():
        view(input_ids=ids % lm.vocab_size, position_ids=ids, use_cache=False, minfer=batch, **keep)
    return max(peak.peak_bytes, Sampler.peak_bytes(samples, lm.vocab_size))


def available_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on a device now, memory that torch holds without using it included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, left = psutil.virtual_memory().available, host.memory_left()
    return free if left is None else min(free, left)
