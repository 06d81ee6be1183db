"""Checks of chapter 3, KV cache: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch03_attention import CAUSAL_MASK, DECODE_STEP
from .ch03_shapes import EMPTY_BYTES, KV_HEAD_OF

EXERCISES = (DECODE_STEP, CAUSAL_MASK, KV_HEAD_OF, EMPTY_BYTES)


def check_decode_step(decode_step: Function) -> bool:
    """Checks `decode_step(keys, values, length, query, key, value) -> output`, one head; all but `length` are tensors.

    keys, values: [max_len, head_dim], rows [0, length) hold the tokens so far. query, key, value, output: [head_dim].
    """
    return DECODE_STEP.check(decode_step)


def check_causal_mask(causal_mask: Function) -> bool:
    """Checks `causal_mask(q_len, kv_len) -> bools [q_len, kv_len]`, True where a new token may look at a key."""
    return CAUSAL_MASK.check(causal_mask)


def check_kv_head_of(kv_head_of: Function) -> bool:
    """Checks `kv_head_of(query_head, query_heads, kv_heads) -> int`, the KV head that a query head reads."""
    return KV_HEAD_OF.check(kv_head_of)


def check_empty_bytes(empty_bytes: Function) -> bool:
    """Checks `empty_bytes(lengths, max_len, bytes_per_token) -> (bytes, share)` of a preallocated cache."""
    return EMPTY_BYTES.check(empty_bytes)
