"""How large an engine's KV cache may be: what was asked for, and what fits in memory.

Invariant: a cache that is returned fits, or there is an exception; whatever was cut on the way is said in a warning.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import psutil
import torch

from .errors import InvalidParameter
from .kv_cache import SlotKVCache
from .loading import LanguageModel
from .memory import GIB
from .prompts import resolve_max_model_len
from .support import supported_layers

SHARE = 0.9  # of the free memory; a forward pass needs some too
SHORTEST = 256  # tokens; below it rather fewer slots than shorter ones


def make_cache(lm: LanguageModel, max_num_seqs: int, num_blocks: int | None, max_model_len: int | None) -> SlotKVCache:
    """A cache with a slot of max_model_len tokens for each of max_num_seqs requests, or num_blocks slots.

    A max_model_len that nobody asked for is shortened to what fits; otherwise there are fewer slots. Raises
    `UnsupportedModel` for a model that a packed row cannot serve, `InvalidParameter` if what was asked for in so many
    words does not fit.
    """
    num_blocks = None if num_blocks is None else check_count("num_blocks", num_blocks)
    layers = supported_layers(lm.model, lm.name)
    length, slots = resolve_max_model_len(lm, max_model_len), num_blocks or max_num_seqs
    per_token = sum(shape.bytes_per_token for shape in layers.values())
    free = available_bytes(lm.device)
    fits = int(SHARE * free) // per_token  # tokens
    if slots * length > fits:
        asked = f"{slots} slots of {length:,} tokens ({slots * length * per_token / GIB:.1f} GiB)"
        if max_model_len is None:
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
            stacklevel=3,
        )
    return SlotKVCache(layers, slots, length, lm.device)


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
