"""How the recorded runs were made: `python -m minfer_lib.bench.record NAME...` makes them again, on your machine.

Invariant: what this file records comes from a function in it and from a clean commit, so that it can be tied to the
code that made it and made again; older files beside it go as their chapters are recorded anew. A tree with changes is
refused. Runs named cpu_... belong on a CPU, h200_... on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..engine.llm_engine import LLMEngine
from ..engine.serial import CachedEngine, NaiveEngine
from ..errors import BadEnvironment, MinferError, one_of
from ..models import packaged
from ..models.load import LanguageModel, load_model
from . import cheaper, machine
from .baselines import HFSerial, HFStaticBatch
from .comparison import compare
from .decomposition import decompose
from .peers.llama_cpp import LlamaCpp
from .results import RECORDED, Result
from .rungs import ladder
from .settings import fast_mode
from .sweeps import frontier, latency_curve
from .workloads import fixed_lengths, mixed_lengths, nano_vllm

SHAPE = "shape:qwen2.5-7b"


def cpu_course() -> Result:
    """Every engine of the course on the course workload."""
    return ladder(load_model(device="cpu", dtype="float32"), show=False)


def cpu_frontier() -> Result:
    """Tokens/s of all against those of one user, from 1 request at once to 32."""
    lm = load_model(device="cpu", dtype="float32")
    return frontier(_frontier_engines(lm))


def cpu_arrivals() -> Result:
    """Requests that come over time, at rates from far below to beyond what each engine can take."""
    lm = load_model(device="cpu", dtype="float32")
    work = mixed_lengths(lm, n=24, prompt=(16, 48), output=(8, 32), seed=3)
    engines = [
        ("HF padded batch", HFStaticBatch(lm, batch_size=8)),
        ("slots", LLMEngine(lm, max_num_seqs=8, max_model_len=96, backend="torch", fast=False)),
    ]
    return latency_curve(engines, work, [0.5, 1, 1.5, 2, 3, 4])


def cpu_decomposition() -> Result:
    """What a decode step of each engine spends its time on, for one request and for eight."""
    return _decomposition(load_model(device="cpu", dtype="float32"))


def h200_decomposition() -> Result:
    """The same for a 7B model."""
    return _decomposition(load_model(SHAPE, device="cuda", dtype="bfloat16"))


def _decomposition(lm: LanguageModel) -> Result:
    limits = {"max_num_seqs": 8, "max_model_len": 256, "backend": "torch", "fast": False}
    paged = {"kv_cache": "paged", "enable_prefix_caching": False, **limits}
    int8 = cheaper.int8(lm)
    found = [
        decompose(NaiveEngine(lm), 1, name="naive, 1 request"),
        decompose(CachedEngine(lm), 1, name="cached, 1 request"),
        decompose(LLMEngine(lm, **limits), 8, name="slots, 8 requests"),
        decompose(LLMEngine(lm, **paged), 8, name="paged, 8 requests"),
        decompose(LLMEngine(int8, **paged), 1, name="paged + int8, 1 request"),
        decompose(LLMEngine(int8, **paged), 8, name="paged + int8, 8 requests"),
    ]
    notes = [f"{each.engine}: {each.disturbed}" for each in found if each.disturbed]
    cells = [cell for each in found for cell in each.cells()]
    return Result("table", cells, {}, machine.provenance_of(lm), (f"context of {found[0].context} tokens", *notes))


def cpu_fast() -> Result:
    """The fast path of a CPU beside plain engines, in three kinds of weights, and llama.cpp where it is installed."""
    whole = load_model(device="cpu", dtype="float32")
    half = load_model(device="cpu", dtype="bfloat16")
    int8 = cheaper.int8(half, skip=(), embedding=True)
    limits = {"kv_cache": "paged", "max_num_seqs": 32, "max_model_len": 128, "enable_prefix_caching": False}
    engines = [
        (f"{name}, fast" if fast else name, LLMEngine(lm, fast=fast, **limits))
        for name, lm in (("float32", whole), ("bfloat16", half), ("int8", int8))
        for fast in (False, True)
    ]
    if importlib.util.find_spec("llama_cpp"):
        gguf = str(packaged.find_gguf())
        engines += [LlamaCpp(half, gguf, kind, slots=32, longest=128) for kind in ("q8_0", "bf16")]
    return frontier(engines, at_once=(1, 8, 32), prompt_len=16, output_len=64, repeats=5)


def h200_ladder(batch: int) -> Result:
    """The first article's table: prompts of 15 tokens, 128 new tokens, a 7B model in bfloat16."""
    lm = load_model(SHAPE, device="cuda", dtype="bfloat16")
    return ladder(
        lm,
        workload=fixed_lengths(lm, batch, 15, 128),
        max_running=batch,
        max_model_len=2048,
        once=("naive", "HF generate", "cached") if batch > 1 else ("naive",),
        seconds=60,
        show=False,
    )


def h200_frontier() -> Result:
    """The same as `cpu_frontier` for a 7B model."""
    lm = load_model(SHAPE, device="cuda", dtype="bfloat16")
    return frontier(_frontier_engines(lm), prompt_len=15, output_len=64)


def h200_fast() -> Result:
    """Every way of the fast path, in bfloat16 and with weights in int8: prompts of 15 tokens, 1, 8 and 64 at once."""
    lm = load_model(SHAPE, device="cuda", dtype="bfloat16")
    int8 = cheaper.int8_weight_only(lm)
    limits = {"kv_cache": "paged", "max_num_seqs": 64, "max_num_batched_tokens": 4096, "enable_prefix_caching": False}
    engines = [
        ("modules", LLMEngine(lm, fast=False, **limits)),
        *((f"fast, {way}", LLMEngine(lm, fast=way, **limits)) for way in ("graph", "compiled", "fused")),
        *((f"fast, {way} + int8", LLMEngine(int8, fast=way, **limits)) for way in ("compiled", "fused")),
    ]
    return frontier(engines, at_once=(1, 8, 64), prompt_len=15, output_len=128, repeats=5)


def h200_nano() -> Result:
    """nano-vllm's own workload on the shape that it is published for."""
    lm = load_model("shape:qwen3-0.6b", device="cuda", dtype="bfloat16")
    limits = {"kv_cache": "paged", "max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_model_len": 2048}
    engines = [(f"fast, {way}", LLMEngine(lm, fast=way, **limits)) for way in ("compiled", "fused")]
    return compare(*engines, workload=nano_vllm(lm.vocab_size), repeats=5, show=False)


def h200_families() -> Result:
    """Families that are not fused: their own layers, as they are and compiled, one request."""
    rows, notes = [], []
    for name in ("gemma-2-2b", "phi-3-mini"):
        lm = load_model(f"shape:{name}", device="cuda", dtype="bfloat16")
        limits = {"kv_cache": "paged", "max_num_seqs": 8, "enable_prefix_caching": False}
        engines = [(f"{name}, {way}", LLMEngine(lm, fast=way, **limits)) for way in ("graph", "compiled")]
        found = frontier(engines, at_once=(1,), prompt_len=15, output_len=128, repeats=5)
        rows, notes = rows + found.rows, [*notes, *found.notes]
    return dataclasses.replace(found, rows=rows, notes=tuple(dict.fromkeys(notes)))


def _frontier_engines(lm: LanguageModel) -> list[tuple[str, object]]:
    limits = {"max_num_seqs": 32, "max_model_len": 128, "backend": "torch", "fast": False}
    return [
        ("HF generate", HFSerial(lm)),
        ("HF padded batch", HFStaticBatch(lm, batch_size=32)),
        ("cached", CachedEngine(lm)),
        ("slots", LLMEngine(lm, **limits)),
        ("paged", LLMEngine(lm, kv_cache="paged", enable_prefix_caching=False, **limits)),
        ("paged + int8", LLMEngine(cheaper.int8(lm), kv_cache="paged", enable_prefix_caching=False, **limits)),
    ]


RECIPES: dict[str, Callable[[], Result]] = {
    "cpu_course": cpu_course,
    "cpu_frontier": cpu_frontier,
    "cpu_arrivals": cpu_arrivals,
    "cpu_decomposition": cpu_decomposition,
    "cpu_fast": cpu_fast,
    **{f"h200_batch{batch}": (lambda batch=batch: h200_ladder(batch)) for batch in (1, 4, 8)},
    "h200_frontier": h200_frontier,
    "h200_fast": h200_fast,
    "h200_nano": h200_nano,
    "h200_families": h200_families,
    "h200_decomposition": h200_decomposition,
}


def record(name: str, folder: Path = RECORDED) -> Path:
    """Makes one run and writes it to `folder`. Raises `BadEnvironment` where its figures could not be trusted later:
    from a tree with changes or without a commit, or on the wrong kind of machine."""
    commit = machine.commit()
    if commit is None or commit.endswith("-dirty"):
        raise BadEnvironment(
            f"{name} was to be recorded from {commit or 'no commit'}, which does not tell what code was run. "
            "Commit first, so that the figures can be tied to the code that made them."
        )
    if fast_mode():
        raise BadEnvironment(f"{name} was to be recorded with MINFER_FAST, which shortens it. Unset it.")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise BadEnvironment(f"{name} was to be kept in {str(folder)!r}, which may not be written to.")
    if name.startswith("h200") and not torch.cuda.is_available():
        raise BadEnvironment(f"{name} needs an NVIDIA GPU, and there is none.")
    result = RECIPES[name]()
    if machine.commit() != commit:
        raise BadEnvironment(f"The code changed while {name} was measured. Record it again.")
    print(result)
    return result.save(folder / f"{name}.json")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minfer_lib.bench.record", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--folder", type=Path, default=RECORDED, help="where to write (default: the package's own)")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in RECIPES]:
        parser.error(f"there is no run {unknown[0]!r}; there are {one_of(list(RECIPES))}")
    for name in args.names:
        try:
            record(name, args.folder)
        except (MinferError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
