"""The pictures of the chapters: data in, figure out, no model inside.

Invariant: a function takes plain numbers and strings and returns a `style.Picture` that displays itself once as the
last line of a cell. A headline states a finding only if it was computed from the data that was drawn.
"""

from .attention import attention_mask, attention_weights, causal_mask, head_groups
from .caches import cache_fill, recomputed_keys
from .memory import kv_growth, memory_stack, roofline
from .profile import TimelineStep, prefill_decode_timeline, time_by_operator
from .steps import bars_by_engine, curves, gain_vs_length, step_times
from .tokens import filtered_bars, token_boxes, top_tokens, unit_line

__all__ = [
    "TimelineStep",
    "attention_mask",
    "attention_weights",
    "bars_by_engine",
    "cache_fill",
    "causal_mask",
    "curves",
    "filtered_bars",
    "gain_vs_length",
    "head_groups",
    "kv_growth",
    "memory_stack",
    "prefill_decode_timeline",
    "recomputed_keys",
    "roofline",
    "step_times",
    "time_by_operator",
    "token_boxes",
    "top_tokens",
    "unit_line",
]
