"""Checks of chapter 1, What an engine does: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch01_memory import KV_BYTES, TOKENS_THAT_FIT
from .ch01_steps import FIRST_TOKEN, SPLIT_LATENCY, STEP_TIME

EXERCISES = (KV_BYTES, FIRST_TOKEN, SPLIT_LATENCY, TOKENS_THAT_FIT, STEP_TIME)


def check_kv_bytes(kv_bytes: Function) -> bool:
    """Checks `kv_bytes(layers, query_heads, kv_heads, head_dim, tokens, bytes_per_value) -> bytes`."""
    return KV_BYTES.check(kv_bytes)


def check_first_token(first_token: Function) -> bool:
    """Checks `first_token(logits) -> (id, probability)` for greedy decoding; `logits` is a tensor [vocab] of floats."""
    return FIRST_TOKEN.check(first_token)


def check_split_latency(split_latency: Function) -> bool:
    """Checks `split_latency(arrival, token_times) -> (TTFT, TPOT)`, all in seconds; TPOT is None with one token."""
    return SPLIT_LATENCY.check(split_latency)


def check_tokens_that_fit(tokens_that_fit: Function) -> bool:
    """Checks `tokens_that_fit(budget_gib, parameters, bits, kv_bytes_per_token) -> int` (0: the weights do not fit)."""
    return TOKENS_THAT_FIT.check(tokens_that_fit)


def check_step_time(step_time: Function) -> bool:
    """Checks `step_time(flops, bytes_moved, peak_flops, bandwidth) -> (seconds, "memory" or "compute")`."""
    return STEP_TIME.check(step_time)
