"""Measuring: the same workload, the same definitions and the same table for every engine and every baseline.

Reading order: metrics (what the numbers mean), workloads, machine and watch (what they were measured on, and whether it
was ours alone), roofline (what they could be), baselines, hf_continuous, usage, verify, comparison, results, tables,
cheaper, rungs; for requests that come over time arrivals and serving, and for more and more of them sweeps; for what a
step is made of decomposition; for what a cheaper model gets wrong quality_scores, quality_table; for systems and
products that are not ours articles, peers, other_int8. record is how the recorded runs were made, gpu_selftest what to
run first on a GPU, and lm_harness lets `lm-eval` run on an engine. The engine imports none of this.

Names are looked up when they are first used, so that the command line does not wait for torch to explain itself. No
module has the name of a function here, which would hide it.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "arrivals": ("all_at_once", "poisson_arrivals"),
    "articles": ("reported", "reported_rows"),
    "baselines": ("HFSerial", "HFStaticBatch"),
    "comparison": ("compare",),
    "decomposition": ("Decomposition", "decompose"),
    "hf_continuous": ("HFContinuousBatch",),
    "machine": ("measure_bandwidth", "peak_flops", "provenance", "read_bandwidth"),
    "metrics": ("Run", "measure"),
    "probe_memory": ("PeakMemory", "peak_memory"),
    "quality_scores": ("kv_int8_perplexity", "perplexity"),
    "quality_table": ("quality",),
    "results": ("Cells", "QualityRow", "Result", "Row", "load", "load_recorded"),
    "roofline": (
        "Roofline",
        "decode_step_bytes",
        "decode_step_flops",
        "floor_ms",
        "machine_roofline",
        "points",
        "weight_bytes_read",
    ),
    "rungs": ("ladder", "make_engine"),
    "serving": ("Served", "serve"),
    "settings": ("fast_mode",),
    "sweeps": ("frontier", "latency_curve"),
    "usage": ("padding_share",),
    "watch": ("Watch",),
    "workloads": ("Workload", "course", "english_text", "fixed_lengths", "mixed_lengths", "nano_vllm", "prompts_of"),
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
