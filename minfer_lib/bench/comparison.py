"""Several engines on one workload in one run: the measurement behind every table of the ladder.

Invariant: all rows of a comparison come from the same workload in the same process, run in turns, so that their ratios
mean something even on a machine whose speed drifts. Nothing is compared silently that is not equal: lengths and tokens
are checked, and what does not agree is said in the row.

How a row is measured: one run to warm up at the same shapes (or only its beginning, if asked), then `repeats` runs, in
each of which every engine has its turn, the order moving on by one; prefixes that an engine has cached in earlier runs
are forgotten; the device is synchronised before and after; the row is the field-by-field median. An interrupt ends the
comparison with `Interrupted`, which carries the rounds that are done.
"""

from __future__ import annotations

import dataclasses
import gc
import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from ..attention.support import rounds_activations
from ..errors import InvalidParameter, integer, must_be, shown
from ..generation.params import SamplingParams
from ..generation.request import RequestOutput
from ..models.load import LanguageModel
from ..models.memory import measured_weight_bytes
from ..quant.quantize import describe_int8
from .machine import provenance_of, read_bandwidth, synchronize, weights_name
from .metrics import RunMetrics, measure, median
from .peaks import probed_rows, with_peak
from .results import Comparison, Row
from .roofline import floor_ms
from .settings import FAST_LABEL, fast_mode
from .usage import KVMemory, begin, computed_tokens, held_between_runs, kv_memory, padding_share
from .verify import SAME, judge_lengths, judge_tokens
from .workloads import Workload, fixed_lengths


class Engine(Protocol):
    """What can be compared: our engines and the baselines.

    Optional: `kv_bytes()`, reserved or (reserved, used); `reset_stats()` with `stats()`, as `LLMEngine` has them;
    `aside_s`, seconds of the last `generate` that a server would spend once and that are not counted; what
    `usage.computed_tokens` reads.
    """

    lm: LanguageModel
    name: str

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]: ...


@dataclasses.dataclass
class Measured:
    """An engine under measurement, with all that its runs gave."""

    name: str
    engine: Engine
    runs: list[RunMetrics] = dataclasses.field(default_factory=list)
    tokens: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [run][request] -> token ids
    kv: list[KVMemory] = dataclasses.field(default_factory=list)  # of each run
    cuda_peak: int = 0
    aside_s: float = 0.0
    warnings: list[str] = dataclasses.field(default_factory=list)


class Interrupted(KeyboardInterrupt):
    """An interrupt from the keyboard; `comparison` has the rows of what was measured until then."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__("The comparison was interrupted; what was measured until then is in `comparison`.")
        self.comparison = comparison


def compare(
    *engines: Engine | tuple[str, Engine],
    workload: Workload | None = None,
    repeats: int = 3,
    short_warm_up: bool = False,
    memory: bool | Collection[str] = False,
    reported: Sequence[Row] = (),
    notes: Sequence[str] = (),
    progress: bool = False,
    show: bool = True,
) -> Comparison:
    """Measure engines and baselines against each other, draw the table and the bars, and return them as data.

    engines: objects with `lm`, `name` and `generate`; a pair (label, engine) gives a row another name. The first is the
      one that ratios refer to.
    workload: None is 4 prompts of 64 tokens with 64 new tokens each.
    repeats: timed runs of each (fast mode makes one). Odd numbers have a median that is one of the runs.
    short_warm_up: warm up with two tokens a request (the prompts, one decode step) in place of the whole workload, for
      engines of which one run takes a minute on a CPU. Fast mode always does. A note below the table says so.
    memory: also measure peak resident memory on a CPU, which starts a fresh process for each engine, or for each row
      that is named. On CUDA the peak is always there: torch's counter over the run, less the caches of the other
      engines in this comparison and the weights of models that only they run.
    reported: rows of somebody else's figures (see `articles.py`), set apart in the table.
    notes: lines to stand below the table.
    progress: show a bar with the row that is being measured, on standard error.
    show: draw; in a notebook as HTML and a figure, elsewhere as text.

    Raises `InvalidParameter` for no engine, two of one name, repeats under 1, or memory of a row that is not there;
    `Interrupted` once a row has been measured; what an engine raises passes through.
    """
    measured = named(engines)
    repeats = checked_repeats(repeats)
    reported, notes = _checked("reported", reported, Row), _checked("notes", notes, str)
    probed = probed_rows(memory, [each.name for each in measured])
    lm = measured[0].engine.lm
    workload = workload or fixed_lengths(lm)
    warm_up = workload.warm_up() if short_warm_up or fast_mode() else workload
    interrupted = False
    bar = tqdm(total=len(measured) * (1 + repeats), unit="run", leave=False, disable=not progress)
    with bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Interrupted:")  # an engine says it of its answers, a note of the rows
        try:
            for each in measured:
                bar.set_description(f"{each.name}, warming up")
                _generate(each.engine, warm_up)
                bar.update()
            for turn in range(repeats):
                for each in measured[turn % len(measured) :] + measured[: turn % len(measured)]:
                    bar.set_description(f"{each.name}, run {turn + 1} of {repeats}")
                    _timed_run(each, workload)
                    bar.update()
        except KeyboardInterrupt:
            interrupted, everything = True, measured
            measured = _done(everything)
            if not measured:
                raise
            repeats = len(measured[0].tokens)
            missing = [each.name for each in everything if each not in measured]
            notes += (f"interrupted; not measured: {', '.join(missing)}" if missing else "interrupted",)
    rows = [_row(each, measured, workload) for each in measured]
    if lm.device.type == "cpu" and not interrupted:
        try:
            for i, each in enumerate(measured):
                if each.name in probed:
                    rows[i] = with_peak(rows[i], each.engine, workload)
        except KeyboardInterrupt:
            interrupted, notes = True, (*notes, "interrupted; peak memory is not known of all rows")
    base = rows[0].tokens_per_s
    rows = [dataclasses.replace(row, ratio=row.tokens_per_s / base if base else None) for row in rows]
    found = Comparison(
        rows=[*rows, *reported],
        workload=workload.record(),
        provenance={
            **provenance_of(lm),
            "repeats": repeats,
            "bandwidth_gb_per_s": round(read_bandwidth(lm.device) / 1e9, 2),
        },
        notes=(*_notes(measured, repeats, short_warm_up), *notes),
    )
    if show:
        from .draw import show as draw

        draw(found)
    if interrupted:
        raise Interrupted(found)
    return found


def named(engines: Sequence[Engine | tuple[str, Engine]]) -> list[Measured]:
    """Engines with the names of their rows. Raises `InvalidParameter` for none, no engine, or two of one name."""
    if not engines:
        raise InvalidParameter("A comparison of nothing was asked for; give it at least one engine or baseline.")
    for pair in engines:
        if isinstance(pair, tuple) and not (len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidParameter(f"{shown(pair)} was to be compared: it must be an engine, or ('its name', engine).")
    pairs = [each if isinstance(each, tuple) else (each.name, each) for each in engines]
    labels = [label for label, _ in pairs]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise InvalidParameter(
            f"Two engines of the name {sorted(twice)[0]!r} were to be compared. "
            "Give one of them another: compare(first, ('its name', second))."
        )
    return [Measured(label, engine) for label, engine in pairs]


def _checked(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """A sequence of one kind as a tuple; a mistake is told before anything is measured."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise must_be(name, f"a list of {kind.__name__}", values)
    return tuple(values)


def _done(measured: Sequence[Measured]) -> list[Measured]:
    """What an interrupted comparison can show: whole rounds, or else the engines that had their turn in the first."""
    rounds = max(1, min(len(each.tokens) for each in measured))
    done = [each for each in measured if each.tokens]
    for each in done:
        del each.runs[rounds:], each.kv[rounds:], each.tokens[rounds:]
    return done


def checked_repeats(repeats: int) -> int:
    """How often to measure; once in fast mode."""
    repeats = integer("repeats", repeats, at_least=1, hint="3 or more are better")
    return 1 if fast_mode() else repeats


def doubts_of(each: Measured, first: Measured, workload: Workload) -> tuple[str, list[str]]:
    """How the tokens of one engine compare with the first one's: (a word for the table, warnings)."""
    lm = each.engine.lm
    greedy = all(p.temperature == 0 for p in workload.params)
    exact = lm is first.engine.lm and lm.dtype == torch.float32 and greedy and not _rounds(lm)
    verdict, doubts = judge_tokens(each.tokens, first.tokens[0], exact=exact)
    doubts += judge_lengths(each.tokens, workload.output_lens)
    return "" if verdict == SAME and each is first else verdict, list(dict.fromkeys(each.warnings + doubts))


def _rounds(lm: LanguageModel) -> bool:
    """Whether activations are rounded to codes, so that a difference in the last digit may become one of a step."""
    return rounds_activations(lm.model) and (lm.quantization or {}).get("activations") != "none"


def _generate(engine: Engine, workload: Workload) -> list[RequestOutput]:
    """One run. An engine answers an interrupt by returning early; here it must end the comparison, not spoil a row."""
    outputs = engine.generate(workload.prompts, workload.params)
    if any(out.finish_reason == "abort" for out in outputs):
        raise KeyboardInterrupt
    return outputs


def _timed_run(each: Measured, workload: Workload) -> None:
    device = each.engine.lm.device
    gc.collect()  # now rather than in the middle of the run
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    begin(each.engine)
    counted = computed_tokens(each.engine)
    began = time.perf_counter()
    outputs = _generate(each.engine, workload)
    synchronize(device)
    wall = time.perf_counter() - began
    aside = getattr(each.engine, "aside_s", 0.0)
    each.aside_s = max(each.aside_s, aside)
    padding = None if counted is None else padding_share(computed_tokens(each.engine) - counted, outputs)
    each.runs.append(measure(outputs, wall - aside, padding))
    each.kv.append(kv_memory(each.engine, each.runs[-1]))
    each.tokens.append([out.token_ids for out in outputs])
    if device.type == "cuda":
        each.cuda_peak = max(each.cuda_peak, torch.cuda.max_memory_allocated(device))
    each.warnings += failures(outputs)


def failures(outputs: Sequence[RequestOutput]) -> list[str]:
    """A warning if any request ended with an error."""
    broken = [out for out in outputs if out.error]
    return [f"{len(broken)} of {len(outputs)} requests failed: {broken[0].error}"] if broken else []


def _row(each: Measured, all_measured: Sequence[Measured], workload: Workload) -> Row:
    """The row of one engine: medians, what they are measured against, and what is doubtful about them."""
    lm = each.engine.lm
    metrics = median(each.runs)
    floor = floor_ms(lm, metrics.concurrency, metrics.kv_tokens) if metrics.tpot_ms else None
    runs = each.kv or [kv_memory(each.engine, metrics)]
    kv = max(runs, key=lambda run: (run.used or 0, run.held or 0))  # the fullest moment of all runs
    others = sum(held_between_runs(other.engine) for other in all_measured if other is not each)
    models = {id(other.engine.lm.model): other.engine.lm.model for other in all_measured}
    others += sum(measured_weight_bytes(model) for model in models.values() if model is not lm.model)
    verdict, warnings = doubts_of(each, all_measured[0], workload)
    return Row(
        engine=each.name,
        ttft_ms=metrics.ttft_ms,
        tpot_ms=metrics.tpot_ms,
        tokens_per_s=metrics.tokens_per_s,
        tokens_per_s_range=(min(r.tokens_per_s for r in each.runs), max(r.tokens_per_s for r in each.runs)),
        floor_ms=floor,
        share=floor / metrics.tpot_ms if floor and metrics.tpot_ms else None,
        kv_reserved=kv.reserved,
        kv_held=kv.held,
        kv_used=kv.used,
        peak_bytes=max(0, each.cuda_peak - others) or None,
        tokens=verdict,
        warnings=tuple(warnings),
        metrics=metrics,
        weights=weights_name(lm),
        weight_bytes=measured_weight_bytes(lm.model),
    )


def _notes(measured: Sequence[Measured], repeats: int, short_warm_up: bool) -> list[str]:
    first = measured[0]
    runs = f"median of {repeats} runs" if repeats > 1 else "one run each"
    notes = [f"ratio: tokens/s over {first.name}; {runs}"]
    if short_warm_up and not fast_mode():
        notes.append("warmed up with two tokens a request")
    if fast_mode():
        notes.append(FAST_LABEL)
    notes += [
        f"{each.name} runs {each.engine.lm!r}: other weights than {first.name}"
        for each in measured
        if each.engine.lm is not first.engine.lm
    ]
    quantised = {id(each.engine.lm): each.engine.lm for each in measured if each.engine.lm.quantization is not None}
    for lm in quantised.values():
        rows = ", ".join(each.name for each in measured if each.engine.lm is lm)
        notes.append(f"{rows}: {describe_int8(lm)}")
    notes += [
        f"{each.name}: up to {each.aside_s:.1f} s a run for starting and stopping are not counted"
        for each in measured
        if each.aside_s
    ]
    return notes
