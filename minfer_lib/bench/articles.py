"""Figures that others reported, on their machines, to stand beside ours in a table: never mixed with them.

Invariant: a reported row says where it comes from and on which hardware, and has no ratio, no floor and no share,
since those would compare two machines.
"""

from __future__ import annotations

from ..errors import InvalidParameter, one_of
from .results import Row


def reported(
    engine: str,
    source: str,
    *,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    tokens_per_s: float | None = None,
    peak_gb: float | None = None,
) -> Row:
    """A row of somebody else's figures; `source` names who says so, the hardware and the model. peak_gb as reported."""
    if not source.strip():
        raise InvalidParameter(f"Reported figures of {engine!r} need a source: who measured them, on which hardware.")
    peak = None if peak_gb is None else round(peak_gb * 1e9)
    told = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "tokens_per_s": tokens_per_s}
    told = {name: value for name, value in told.items() if value is not None}
    return Row(engine, kind="reported", source=source, told=told, peak_bytes=peak)


_MINI_INFER = (
    "project mini-infer, phase 1: Qwen2.5-7B-Instruct in float16 on an RTX 4090, greedy, prompts of 10 to 15 tokens, "
    "128 new tokens, batch {}"
)
_SERIES = (
    'the series "an inference engine from scratch": a 7B model, 100 tokens in 14.2 s and in 2.1 s, from which tokens/s '
    "are computed; hardware not stated"
)

_NANO_README = (
    "README of nano-vllm: Qwen3-0.6B on an RTX 4070 Laptop with 8 GB, where not all requests fit at once; 256 "
    "requests, 133,966 output tokens"
)
_NANO_H200 = (
    "their own code on the workload of nano-vllm's bench.py, run by us on another H200 before this run: shape of "
    "Qwen3-0.6B, torch 2.11; vLLM 0.24.0 without prefix caching and with at most 256 running (22,200 to 23,000 in "
    "several runs); nano-vllm on FlashAttention 3; transformers 5.17 on torch's attention"
)

REPORTED: dict[str, list[Row]] = {
    f"mini-infer, batch {batch}": [
        reported(
            f"HF generate, batch {batch}",
            _MINI_INFER.format(batch),
            ttft_ms=ttft,
            tpot_ms=tpot,
            tokens_per_s=throughput,
            peak_gb=peak,
        ),
        reported(f"serial engine, batch {batch}", _MINI_INFER.format(batch), tokens_per_s=serial, peak_gb=serial_peak),
    ]
    for batch, ttft, tpot, throughput, peak, serial, serial_peak in [
        (1, 19.0, 17.78, 56.2, 15.78, 56.4, 15.78),
        (4, 20.8, 18.99, 210.4, 15.81, 56.4, 15.81),
        (8, 23.6, 19.53, 408.9, 15.88, 56.3, 15.84),
    ]
} | {
    "series, kv cache": [
        reported("naive loop", _SERIES, ttft_ms=350, tpot_ms=140, tokens_per_s=100 / 14.2, peak_gb=14.5),
        reported("with a KV cache", _SERIES, ttft_ms=350, tpot_ms=18, tokens_per_s=100 / 2.1, peak_gb=15.2),
    ],
    "nano-vllm, README": [
        reported("vLLM, RTX 4070", _NANO_README, tokens_per_s=1361.84),
        reported("nano-vllm, RTX 4070", _NANO_README, tokens_per_s=1434.13),
    ],
    "nano-vllm, H200": [
        reported("HF continuous, H200", _NANO_H200, tokens_per_s=635),
        reported("nano-vllm, H200", _NANO_H200, tokens_per_s=19373),
        reported("vLLM 0.24.0, H200", _NANO_H200, tokens_per_s=22200),
    ],
}


def reported_rows(name: str) -> list[Row]:
    """Rows by the name of the table they come from: "mini-infer, batch 1" (4, 8), "series, kv cache",
    "nano-vllm, README", "nano-vllm, H200"."""
    if name not in REPORTED:
        raise InvalidParameter(f"No reported figures are kept under {name!r}; there are {one_of(list(REPORTED))}.")
    return list(REPORTED[name])
