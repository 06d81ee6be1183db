"""Measuring: the same workload, the same definitions and the same table for every engine and every baseline.

Reading order: metrics (what the numbers mean), workloads, machine (what they were measured on), roofline (what they
could be), baselines, hf_continuous, usage, verify, comparison, results, draw, wide_table, cheaper, rungs, articles; for
requests that come over time arrivals, serving, latency; for what a cheaper model gets wrong quality_scores,
quality_table; for products with int8 weights that are not ours other_int8; for small tables of other numbers
measurements. The engine imports none of this.

Names are looked up when they are first used, so that the command line does not wait for torch to explain itself. No
module has the name of a function here, which would hide it.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "arrivals": ("all_at_once", "poisson_arrivals", "read_trace", "write_trace"),
    "articles": ("reported", "reported_rows"),
    "baselines": ("HFSerial", "HFStaticBatch"),
    "comparison": ("compare",),
    "hf_continuous": ("HFContinuousBatch",),
    "latency": ("LatencyCurve", "LatencyPoint", "latency_curve"),
    "machine": ("peak_flops", "provenance", "read_bandwidth"),
    "metrics": ("RunMetrics", "measure"),
    "probe_memory": ("PeakMemory", "peak_memory"),
    "quality_scores": ("perplexity",),
    "quality_table": ("QualityRow", "QualityTable", "quality"),
    "results": ("Comparison", "Row", "load", "load_recorded"),
    "roofline": (
        "Roofline",
        "decode_step_bytes",
        "decode_step_flops",
        "floor_ms",
        "machine_roofline",
        "weight_bytes_read",
    ),
    "rungs": ("ladder", "make_engine"),
    "serving": ("Served", "capacity", "serve"),
    "settings": ("fast_mode",),
    "usage": ("Occupancy", "occupancy", "occupancy_of", "padding_share"),
    "wide_table": ("Scoreboard", "scoreboard"),
    "workloads": (
        "Workload",
        "english_text",
        "fixed_lengths",
        "mixed_lengths",
        "nano_vllm",
        "prompts_of",
        "shared_prefix",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
