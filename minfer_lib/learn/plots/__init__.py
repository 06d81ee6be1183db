"""The pictures of the chapters: data in, figure out, no model inside.

Invariant: a function takes plain numbers and strings and returns a `style.Picture` that displays itself once as the
last line of a cell. A headline states a finding only if it was computed from the data that was drawn.
"""

from .attention import attention_mask, attention_weights, cache_fill, causal_mask, head_groups, recomputed_keys
from .batching import packed_row, static_batch_waste
from .block_life import block_life, kv_waste
from .block_tables import block_table
from .blocks import block_map
from .channels import channel_ranges, feature_peaks, smoothing_effect
from .comparison import latency_spread, memory_of_engines, throughput_ladder
from .decomposition import decomposition
from .frontier import frontier
from .gains import gains_and_costs, step_factors
from .life import request_life
from .load import step_composition
from .maps import decoder_layer, engine_map
from .memory import kv_growth, memory_stack, roofline
from .numbers import matrix_steps, quantization_grid
from .precision import bytes_moved, memory_budget, step_times_by_batch, ways_timed
from .profile import TimelineStep, prefill_decode_timeline, time_by_operator
from .quality import quality_map
from .saturation import goodput, saturation
from .softmax import merged_softmax
from .steps import bars_by_engine, curves, gain_vs_length, step_times
from .timelines import gantt, iteration_timeline
from .tokens import filtered_bars, token_boxes, top_tokens, unit_line

__all__ = [
    "TimelineStep", "attention_mask", "attention_weights", "bars_by_engine", "block_life", "block_map",
    "block_table", "bytes_moved", "cache_fill", "causal_mask", "channel_ranges", "curves", "decoder_layer",
    "decomposition", "engine_map", "feature_peaks", "filtered_bars", "frontier", "gain_vs_length",
    "gains_and_costs", "gantt", "goodput", "head_groups", "iteration_timeline", "kv_growth", "kv_waste",
    "latency_spread", "matrix_steps", "memory_budget", "memory_of_engines", "memory_stack", "merged_softmax",
    "packed_row", "prefill_decode_timeline", "quality_map", "quantization_grid", "recomputed_keys", "request_life",
    "roofline", "saturation", "smoothing_effect", "static_batch_waste", "step_composition", "step_factors",
    "step_times", "step_times_by_batch", "throughput_ladder", "time_by_operator", "token_boxes", "top_tokens",
    "unit_line", "ways_timed",
]  # fmt: skip
