"""Several engines on one workload in one run: the measurement behind every table of the ladder.

Invariant: all rows of a comparison come from the same workload in the same process, run in turns, so that their ratios
mean something even on a machine whose speed drifts. Every run is kept. Nothing is compared silently that is not equal:
lengths and tokens are checked, and what does not agree is said in the row.

How a row is measured: one run to warm up at the same shapes, then round after round, in each of which every engine has
its turn, the order moving on by one; prefixes that an engine has cached in earlier runs are forgotten; the device is
synchronised before and after. Rounds go on until the tokens/s of every row have their quartiles within 10 %, or ten
are done. A run that other programs disturbed is made again. An interrupt ends the comparison with `Interrupted`, which
carries the rounds that are done.
"""

from __future__ import annotations

import dataclasses
import gc
import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from ..attention.support import rounds_activations
from ..errors import InvalidParameter, integer, must_be, number, shown
from ..generation.params import SamplingParams
from ..generation.request import RequestOutput
from ..models.load import LanguageModel
from ..models.memory import measured_weight_bytes
from ..quant.quantize import describe_int8
from .draw import progress_bar
from .machine import measure_bandwidth, provenance_of, synchronize, weights_name
from .metrics import Run, measure
from .peaks import probed_rows, with_peak
from .results import Result, Row
from .roofline import floor_ms
from .settings import FAST_LABEL, fast_mode
from .usage import Counting, KVMemory, begin, held_between_runs, kv_memory
from .verify import SAME, judge_lengths, judge_tokens
from .watch import Watch
from .workloads import Workload, fixed_lengths

FEWEST, MOST = 3, 10  # rounds
AGAIN = 3  # times in all that a row's disturbed runs are made again


class Engine(Protocol):
    """What can be compared: our engines and the baselines.

    Optional: `kv_bytes()`, reserved or (reserved, used); `reset_stats()` with `stats()`, as `LLMEngine` has them;
    `num_steps`, calls of its model so far; `computed_tokens`; `aside_s`, seconds of the last `generate` that a server
    would spend once and that are not counted; `settings`, a line about how it was set.
    """

    lm: LanguageModel
    name: str

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]: ...


@dataclasses.dataclass
class Measured:
    """An engine under measurement, with all that its runs gave."""

    name: str
    engine: Engine
    once: bool = False
    runs: list[Run] = dataclasses.field(default_factory=list)
    tokens: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [run][request] -> token ids
    kv: list[KVMemory] = dataclasses.field(default_factory=list)  # of each run
    cuda_peak: int = 0
    aside_s: float = 0.0
    again: int = 0  # disturbed runs that were made again
    warnings: list[str] = dataclasses.field(default_factory=list)


class Interrupted(KeyboardInterrupt):
    """An interrupt from the keyboard; `comparison` has the rows of what was measured until then."""

    def __init__(self, comparison: Result) -> None:
        super().__init__("The comparison was interrupted; what was measured until then is in `comparison`.")
        self.comparison = comparison


def compare(
    *engines: Engine | tuple[str, Engine],
    workload: Workload | None = None,
    repeats: int | None = None,
    seconds: float | None = None,
    once: Collection[str] = (),
    memory: bool | Collection[str] = False,
    reported: Sequence[Row] = (),
    notes: Sequence[str] = (),
    progress: bool = True,
    show: bool = True,
) -> Result:
    """Measure engines and baselines against each other, draw the table and the bars, and return them as data.

    engines: objects with `lm`, `name` and `generate`; a pair (label, engine) gives a row another name. The first is the
      one that ratios refer to.
    workload: None is 4 prompts of 64 tokens with 64 new tokens each.
    repeats: timed runs of each. None: from three on as many as it takes until the quartiles of every row lie within
      10 %, at most ten. Fast mode makes one.
    seconds: no further round begins after so many; there is always one.
    once: names of rows that run once, after a warm-up of two tokens a request, because a run of theirs takes too long.
    memory: also measure peak resident memory on a CPU, which starts a fresh process for each engine, or for each row
      that is named. On CUDA the peak is always there: what torch's counter rose by during a run, and the row's own
      weights and cache.
    reported: rows of figures from elsewhere (see `reported_rows`), marked in the table.
    notes: lines to stand below the table.
    progress: show a bar with the row that is being measured, on standard error, from the sixth second on.
    show: draw; in a notebook as HTML and a figure, elsewhere as text.

    Raises `InvalidParameter` for no engine, two of one name, repeats under 1, or a row that is not there in `memory` or
    `once`; `Interrupted` once a row has been measured; what an engine raises passes through.
    """
    measured = named(engines, once)
    repeats = checked_repeats(repeats)
    seconds = None if seconds is None else number("seconds", seconds, "seconds, 0 or more", lambda x: x >= 0)
    reported, notes = _checked("reported", reported, Row), _checked("notes", notes, str)
    probed = probed_rows(memory, [each.name for each in measured])
    lm = measured[0].engine.lm
    workload = workload or fixed_lengths(lm)
    bandwidth = [measure_bandwidth(lm.device)]
    everything, interrupted = measured, False
    bar = progress_bar(len(measured) * (1 + (repeats or FEWEST)), "run", progress)
    with bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Interrupted:")  # an engine says it of its answers, a note of the rows
        try:
            for each in measured:
                bar.set_description(f"{each.name}, warming up", refresh=False)
                run_workload(each.engine, workload.warm_up() if each.once or fast_mode() else workload)
                bar.update()
            _rounds(measured, workload, repeats, seconds, bar)
        except KeyboardInterrupt:
            interrupted = True
            measured = [each for each in everything if each.runs]
            if not measured:
                raise
            missing = [each.name for each in everything if each not in measured]
            notes += (f"interrupted; not measured: {', '.join(missing)}" if missing else "interrupted",)
    bandwidth.append(measure_bandwidth(lm.device))
    rows = [_row(each, measured, workload) for each in measured]
    if lm.device.type == "cpu" and not interrupted:
        try:
            for i, each in enumerate(measured):
                if each.name in probed:
                    rows[i] = with_peak(rows[i], each.engine, workload)
        except KeyboardInterrupt:
            interrupted, notes = True, (*notes, "interrupted; peak memory is not known of all rows")
    found = Result(
        kind="ladder",
        rows=[*rows, *reported],
        workload=workload.record(),
        provenance={**provenance_of(lm), "bandwidth_gb_per_s": [round(value / 1e9, 2) for value in bandwidth]},
        notes=(*_notes(measured), *notes),
    )
    if show:
        from .draw import show as draw

        draw(found)
    if interrupted:
        raise Interrupted(found)
    return found


def _rounds(measured: list[Measured], workload: Workload, repeats: int | None, seconds: float | None, bar: Any) -> None:
    """Rounds in which every engine has its turn, until there are enough."""
    began, turn = time.perf_counter(), 0
    while turn < (repeats or MOST):
        if turn and seconds is not None and time.perf_counter() - began > seconds:
            break
        if repeats is None and turn >= FEWEST and all(m.once or Row(m.name, tuple(m.runs)).steady for m in measured):
            break
        first = turn % len(measured)
        for each in measured[first:] + measured[:first]:
            if each.once and each.runs:
                continue
            bar.set_description(f"{each.name}, round {turn + 1}", refresh=False)
            while timed_run(each, workload).disturbed and each.again < AGAIN:
                each.again += 1
            bar.update()
        turn += 1
        if turn >= FEWEST and repeats is None:
            bar.total += len(measured)


def named(engines: Sequence[Engine | tuple[str, Engine]], once: Collection[str] = ()) -> list[Measured]:
    """Engines with the names of their rows. Raises `InvalidParameter` for none, no engine, or two of one name."""
    if not engines:
        raise InvalidParameter("A comparison of nothing was asked for; give it at least one engine or baseline.")
    for pair in engines:
        right = len(pair) == 2 and isinstance(pair[0], str) if isinstance(pair, tuple) else True
        if not right or not hasattr(pair[1] if isinstance(pair, tuple) else pair, "generate"):
            raise InvalidParameter(f"{shown(pair)} was to be compared: it must be an engine, or ('its name', engine).")
    pairs = [each if isinstance(each, tuple) else (each.name, each) for each in engines]
    labels = [label for label, _ in pairs]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise InvalidParameter(
            f"Two engines of the name {sorted(twice)[0]!r} were to be compared. "
            "Give one of them another: compare(first, ('its name', second))."
        )
    if unknown := set(once) - set(labels):
        raise InvalidParameter(f"{sorted(unknown)[0]!r} was to run once, and there is no such row.")
    return [Measured(label, engine, once=label in once) for label, engine in pairs]


def _checked(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """A sequence of one kind as a tuple; a mistake is told before anything is measured."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise must_be(name, f"a list of {kind.__name__}", values)
    return tuple(values)


def checked_repeats(repeats: int | None) -> int | None:
    """How often to measure; once in fast mode, and None is "until it is steady"."""
    if repeats is not None:
        repeats = integer("repeats", repeats, at_least=1, hint="3 or more are better")
    return 1 if fast_mode() else repeats


def doubts_of(each: Measured, first: Measured, workload: Workload) -> tuple[str, list[str]]:
    """How the tokens of one engine compare with the first one's: (a word for the table, warnings)."""
    lm = each.engine.lm
    greedy = all(p.temperature == 0 for p in workload.params)
    exact = lm is first.engine.lm and lm.dtype == torch.float32 and greedy and not _rounds_activations(lm)
    verdict, doubts = judge_tokens(each.tokens, first.tokens[0], exact=exact)
    doubts += judge_lengths(each.tokens, workload.output_lens)
    disturbed = [run for run in each.runs if run.disturbed]
    if disturbed:
        cpus, held = max(run.others_cpus for run in disturbed), max(run.throttled_s for run in disturbed)
        what = f"other programs took up to {cpus:.1f} CPUs" if cpus >= held else f"a quota stopped it for {held:.1f} s"
        left = "left out" if len(disturbed) < len(each.runs) else "there is no better one, so do not trust the figures"
        doubts.append(f"{len(disturbed)} of {len(each.runs)} runs were disturbed, {what}: {left}")
    return "" if verdict == SAME and each is first else verdict, list(dict.fromkeys(each.warnings + doubts))


def _rounds_activations(lm: LanguageModel) -> bool:
    """Whether activations are rounded to codes, so that a difference in the last digit may become one of a step."""
    return rounds_activations(lm.model) and (lm.quantization or {}).get("activations") != "none"


def run_workload(engine: Engine, workload: Workload) -> list[RequestOutput]:
    """One run. An engine answers an interrupt by returning early; here it must end the comparison, not spoil a row."""
    outputs = engine.generate(workload.prompts, workload.params)
    if any(out.finish_reason == "abort" for out in outputs):
        raise KeyboardInterrupt
    return outputs


def timed_run(each: Measured, workload: Workload) -> Run:
    """One run, timed and kept."""
    engine, device = each.engine, each.engine.lm.device
    gc.collect()  # now rather than in the middle of the run
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin(engine)
    counting, watch = Counting(engine), Watch()
    synchronize(device)
    began = time.perf_counter()
    outputs = run_workload(engine, workload)
    synchronize(device)
    wall = time.perf_counter() - began
    disturbance = watch.seen()
    aside = getattr(engine, "aside_s", 0.0)
    each.aside_s = max(each.aside_s, aside)
    run = measure(outputs, wall - aside, disturbance=disturbance, **counting.since(outputs))
    each.runs.append(run)
    each.kv.append(kv_memory(engine, run))
    each.tokens.append([out.token_ids for out in outputs])
    if device.type == "cuda":
        own = measured_weight_bytes(engine.lm.model) + held_between_runs(engine)
        each.cuda_peak = max(each.cuda_peak, torch.cuda.max_memory_allocated(device) - before + own)
    each.warnings += failures(outputs)
    return run


def failures(outputs: Sequence[RequestOutput]) -> list[str]:
    """A warning if any request ended with an error."""
    broken = [out for out in outputs if out.error]
    return [f"{len(broken)} of {len(outputs)} requests failed: {broken[0].error}"] if broken else []


def _row(each: Measured, all_measured: Sequence[Measured], workload: Workload) -> Row:
    """The row of one engine: its runs, what they are measured against, and what is doubtful about them."""
    lm = each.engine.lm
    verdict, doubts = doubts_of(each, all_measured[0], workload)
    kv = max(each.kv, key=lambda run: (run.used or 0, run.held or 0))  # the fullest moment of all runs
    row = Row(
        each.name,
        tuple(each.runs),
        kv_reserved=kv.reserved,
        kv_held=kv.held,
        kv_used=kv.used,
        peak_bytes=each.cuda_peak or None,
        tokens=verdict,
        warnings=tuple(doubts),
        weights=weights_name(lm),
        weight_bytes=measured_weight_bytes(lm.model),
    )
    token_bytes = getattr(getattr(each.engine, "cache", None), "bytes_per_token", None)
    floor = floor_ms(lm, row.concurrency, row.kv_tokens, token_bytes) if row.tpot_ms else None
    return dataclasses.replace(row, floor_ms=floor)


def _notes(measured: Sequence[Measured]) -> list[str]:
    counts = sorted({len(Row(each.name, tuple(each.runs)).counted) for each in measured if not each.once})
    runs = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "1"
    notes = [f"medians of {runs} runs" if runs != "1" else "one run each"]
    notes += [f"{each.name}: one run, after a short warm-up" for each in measured if each.once]
    if fast_mode():
        notes.append(FAST_LABEL)
    lms = {id(each.engine.lm): each.engine.lm for each in measured}
    for lm in lms.values():
        rows = ", ".join(each.name for each in measured if each.engine.lm is lm)
        if lm.quantization is not None:
            notes.append(f"{rows}: {describe_int8(lm)}")
        elif lm is not measured[0].engine.lm:
            notes.append(f"{rows}: runs {lm!r}")
    notes += [f"{each.name}: {said}" for each in measured if (said := getattr(each.engine, "settings", ""))]
    notes += [
        f"{each.name}: up to {each.aside_s:.1f} s a run for starting and stopping are not counted"
        for each in measured
        if each.aside_s
    ]
    return notes
