"""How large an engine's KV cache may be: what was asked for, and what fits in memory.

Invariant: a cache that is returned fits, or there is an exception; if a request may come to less than was asked for,
that is said in a warning.
"""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch

from ..attention.batch import PackedBatch
from ..attention.support import supported_layers
from ..cache.pool import LayerShape
from ..cache.slots import SlotKVCache
from ..errors import InvalidParameter
from ..generation.prompts import resolve_max_model_len
from ..generation.sampling import Sampler
from ..models.load import LanguageModel
from ..models.memory import GIB, PeakMemory
from .runner import ModelInput, ModelRunner

if TYPE_CHECKING:
    from ..cache.paged import PagedKVCache

SHARE = 0.9  # of the free memory; a forward pass needs some too
SHORTEST = 256  # tokens; below it rather fewer slots than shorter ones


def make_cache(
    lm: LanguageModel,
    kv_cache: Literal["slots", "paged"],
    *,
    max_num_seqs: int,
    num_blocks: int | None,
    block_size: int,
    max_model_len: int | None,
    step_tokens: int,
    enable_prefix_caching: bool,
) -> SlotKVCache | PagedKVCache:
    """The cache of an engine; the arguments are those of `LLMEngine`, step_tokens is its max_num_batched_tokens."""
    length = resolve_max_model_len(lm, max_model_len)
    num_blocks = None if num_blocks is None else check_count("num_blocks", num_blocks)
    block_size = check_count("block_size", block_size)
    if kv_cache == "slots":
        return make_slots(lm, max_num_seqs, num_blocks, length, cut=max_model_len is None)
    return make_pages(
        lm, max_num_seqs, num_blocks, length, block_size=block_size, step_tokens=step_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip


def make_slots(lm: LanguageModel, max_num_seqs: int, num_blocks: int | None, length: int, cut: bool) -> SlotKVCache:
    """A cache with a slot of `length` tokens for each of max_num_seqs requests, or num_blocks slots.

    cut: whether a length may be shortened to what fits, because nobody asked for it; otherwise there are fewer slots.
    Raises `UnsupportedModel` for a model that a packed row cannot serve, `InvalidParameter` if what was asked for in so
    many words does not fit.
    """
    layers = supported_layers(lm.model, lm.name)
    slots = num_blocks or max_num_seqs
    per_token = sum(shape.bytes_per_token for shape in layers.values())
    free = available_bytes(lm.device)
    fits = int(SHARE * free) // per_token  # tokens
    if slots * length > fits:
        asked = f"{slots} slots of {length:,} tokens ({slots * length * per_token / GIB:.1f} GiB)"
        if cut:
            length = max(min(length, SHORTEST), min(length, fits // slots))
        if num_blocks is None:
            slots = min(slots, fits // length)
        if slots < 1 or slots * length > fits:
            raise InvalidParameter(
                f"A KV cache of {asked} was asked for, and {free / GIB:.1f} GiB of memory are free: at "
                f"{per_token:,} bytes a token, {fits:,} tokens fit. Pass a smaller max_model_len, max_num_seqs or "
                "num_blocks."
            )
        warnings.warn(
            f"A KV cache of {asked} does not fit in the {free / GIB:.1f} GiB of memory that are free; this engine has "
            f"{slots} slots of {length:,} tokens. Pass max_model_len or max_num_seqs to choose yourself.",
            stacklevel=4,
        )
    return SlotKVCache(layers, slots, length, lm.device)


def make_pages(
    lm: LanguageModel,
    max_num_seqs: int,
    num_blocks: int | None,
    length: int,
    *,
    block_size: int,
    step_tokens: int,
    enable_prefix_caching: bool,
) -> PagedKVCache:
    """A cache of num_blocks blocks of block_size tokens.

    None takes as many as max_num_seqs requests of `length` tokens could ever fill, or as many as fit beside a step of
    step_tokens tokens. Raises what `make_slots` raises.
    """
    from ..cache.paged import PagedKVCache  # of a later chapter

    layers = supported_layers(lm.model, lm.name)
    per_block = block_size * sum(shape.bytes_per_token for shape in layers.values())
    free = available_bytes(lm.device)
    wanted = num_blocks or max_num_seqs * -(-length // block_size)
    if wanted * per_block > SHARE * free / 2:  # or there is plenty of room for both, and nothing to find out
        left = max(0, free - step_bytes(lm, layers, length, step_tokens, min(step_tokens, max_num_seqs)))
        fits = int(SHARE * left) // per_block
        if fits < 1 or (num_blocks is not None and num_blocks > fits):
            least = num_blocks or 1
            raise InvalidParameter(
                f"A KV cache of {least:,} blocks of {block_size} tokens ({least * per_block / GIB:.1f} GiB) was asked "
                f"for, and beside a step {left / GIB:.1f} GiB of memory are free: {fits:,} such blocks fit. Pass a "
                + ("smaller num_blocks, or leave it out." if fits else "smaller block_size or max_num_batched_tokens.")
            )
        if num_blocks is None and fits * block_size < length:
            warnings.warn(
                f"{fits:,} blocks of {block_size} tokens fit in the {left / GIB:.1f} GiB of memory that are free "
                f"beside a step, less than one request of max_model_len={length:,} tokens may need: it would end with "
                'stop_reason "kv_cache_full".',
                stacklevel=4,
            )
        wanted = min(wanted, fits)
    return PagedKVCache(layers, wanted, block_size, lm.device, enable_prefix_caching=enable_prefix_caching)


def step_bytes(lm: LanguageModel, layers: dict[int, LayerShape], length: int, tokens: int, samples: int) -> int:
    """Most bytes of intermediate tensors alive in a step over `tokens` tokens that takes `samples` rows of logits.

    Measured, by running one: a profile run, with prompts of `length` tokens. The KV cache it needs is not counted.
    """
    lens = [tokens % length] * (tokens % length > 0) + [length] * (tokens // length)
    cache = SlotKVCache(layers, len(lens), length, lm.device)
    positions = torch.cat([torch.arange(new, device=lm.device) for new in lens])
    slots = torch.arange(len(lens), device=lm.device).repeat_interleave(torch.tensor(lens, device=lm.device))
    batch = PackedBatch(
        cache.pools, length, [[slot] for slot in range(len(lens))], lens, lens, slots * length + positions
    )  # fmt: skip
    inputs = ModelInput(
        positions[None] % lm.vocab_size, positions[None], batch, positions.new_tensor(range(samples)), []
    )
    with PeakMemory() as peak:
        ModelRunner(lm, cache, Sampler(lm.eos_ids)).forward(inputs)
    return peak.peak_bytes


def available_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on a device now, memory that torch holds without using it included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def check_count(name: str, value: Any) -> int:
    """The value as an integer of 1 or more; numpy's will do. Raises `InvalidParameter` for anything else."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise InvalidParameter(f"{name}={value!r} is not possible: it must be an integer of 1 or more.")
    return count
