"""Which fast path a model can go on a device: the first that it proves to be right on.

Invariant: nothing is fast that was not compared with the model's own modules; whoever asked for a way by name gets it,
or the reason why not.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..attention.backends import AttentionBackend
from ..cache.pool import BlockStore
from ..engine.runner import ModelRunner, ViewDecoder
from ..engine.scheduler import Scheduler
from ..errors import MinferError, UnsupportedModel
from ..generation.sampling import Sampler
from ..models.load import LanguageModel
from .compiled import CompiledDecoder
from .decode_rows import Ahead, FastRunner
from .fused import FusedDecoder
from .graphs import MOST_ROWS
from .proof import prove

WAYS = ("fused", "compiled", "graph")


def make_runner(
    lm: LanguageModel, cache: BlockStore, sampler: Sampler, backend: AttentionBackend, fast: bool | str, *,
    max_num_seqs: int, max_model_len: int,
) -> ModelRunner:  # fmt: skip
    """The runner of an engine; the arguments are those of `LLMEngine`.

    fast: True and "auto" take the first way that works, and a plain runner if none does, True with a warning. Raises
    `UnsupportedModel` where the way that was asked for by name does not work.
    """
    reasons: list[str] = []
    for way in WAYS if fast in (True, "auto") else (fast,):
        try:
            runner = _runner(way, lm, cache, sampler, backend, max_num_seqs, max_model_len)
            runner.reasons = reasons
            return runner
        except (UnsupportedModel, torch.OutOfMemoryError) as error:
            reasons.append(f"{way}: {error}")
            if fast == way:
                raise
    if fast is True:
        warnings.warn(f"There is no fast path for {lm.name}: {' '.join(reasons)}", stacklevel=4)
    runner = ModelRunner(lm, cache, sampler, backend)
    runner.description = f"none: {' '.join(reasons)}"
    return runner


def _runner(
    way: str, lm: LanguageModel, cache: BlockStore, sampler: Sampler, backend: AttentionBackend, rows: int, longest: int
) -> FastRunner:
    if lm.device.type == "cuda" and not backend.graph_safe:
        raise UnsupportedModel(
            f"The attention backend {backend.name!r} cannot stand in a CUDA graph: its work depends on the lengths of "
            "a step. Triton's can."
        )
    modules = ViewDecoder(lm)
    try:
        decoder: Any = modules
        if way != "graph":
            decoder = FusedDecoder(lm) if way == "fused" else CompiledDecoder(lm)
            prove(lm, decoder, modules, backend, cache.layers)
        rows = min(rows, MOST_ROWS)
        return FastRunner(lm, cache, sampler, backend, decoder, modules=modules, rows=rows, longest=longest)
    except (MinferError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a compiler says, or a capture to a model that asks the device in between
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedModel(f"{lm.name} cannot go this way ({type(error).__name__}: {reason})") from error


def make_ahead(engine: Any) -> Ahead | None:
    """Steps that are launched ahead, where the scheduler is ours in what it decides about a step."""
    scheduler = engine.scheduler
    ours = isinstance(scheduler, Scheduler) and type(scheduler).schedule is Scheduler.schedule
    ours = ours and "schedule" not in vars(scheduler)
    return Ahead(engine) if ours and isinstance(engine.runner, FastRunner) else None
