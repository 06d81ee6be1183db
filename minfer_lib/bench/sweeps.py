"""Engines under more and more load: over rates at which requests arrive, and over numbers of requests at once.

Invariant: the points of one rate (or number) come from one workload with one pattern of arrivals, so that they differ
in nothing but the engine; throughput is what was achieved, never the rate that was offered. Beyond an engine's capacity
its queue grows for as long as requests come, so that latencies there say how long the run was; such points are told by
a throughput that stays below the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ..engine.serial import SerialEngine
from ..errors import InvalidParameter, integer
from .arrivals import poisson_arrivals
from .comparison import FEWEST, Engine, Measured, checked_repeats, doubts_of, failures, named, run_workload, timed_run
from .draw import progress_bar
from .machine import provenance_of
from .results import Result, Row
from .serving import serve
from .settings import FAST_LABEL, fast_mode
from .usage import begin
from .workloads import Workload, fixed_lengths

AT_ONCE = (1, 2, 4, 8, 16, 32)


def latency_curve(
    engines: Sequence[Engine | tuple[str, Engine]],
    workload: Workload,
    rates: Sequence[float],
    *,
    seed: int = 0,
    repeats: int = FEWEST,
    progress: bool = True,
) -> Result:
    """Serve the workload at each of `rates` requests a second (Poisson arrivals) with each engine in turn.

    engines: engines and baselines, or pairs (label, engine). seed: of the arrivals; each repeat has the next one, so
    that the median is not that of one pattern, and the spread is that of patterns too. Each engine runs the workload
    once before, all at once.

    Raises `InvalidParameter` for no engine, two of one name, no rates or one that is not positive, repeats under 1.
    """
    measured = named(engines)
    repeats = checked_repeats(integer("repeats", repeats, at_least=1))
    rates = list(rates)  # of an array, whose truth is not whether it is empty
    if not rates or len(set(rates)) != len(rates):
        raise InvalidParameter(f"rates={rates!r} is not possible: at least one rate, and each of them once.")
    count = len(workload.prompts)
    patterns = {rate: [poisson_arrivals(count, rate, seed + turn) for turn in range(repeats)] for rate in rates}

    def run(each: Measured, rate: float, turn: int) -> None:
        begin(each.engine)
        served = serve(each.engine, workload, patterns[rate][turn])
        each.runs.append(served.metrics)
        each.tokens.append([out.token_ids for out in served.outputs])
        each.warnings += failures(served.outputs)

    warm_up = workload.warm_up() if fast_mode() else workload
    rows = _swept(measured, rates, repeats, lambda x: workload, lambda e, x: run_workload(e, warm_up), run, progress)
    notes = (f"Poisson arrivals, seed {seed} and following; times from a request's arrival, queue included",)
    return _result("latency", rows, workload, measured, repeats, notes)


def frontier(
    engines: Sequence[Engine | tuple[str, Engine]],
    at_once: Sequence[int] = AT_ONCE,
    *,
    prompt_len: int = 32,
    output_len: int = 32,
    repeats: int = FEWEST,
    progress: bool = True,
) -> Result:
    """Each engine with 1, 2, 4 and more requests of equal lengths at once: tokens/s of all against those of one user.

    A point for each engine and number; an engine has to be made to run as many at once as the largest. One that takes
    requests one after the other is a single point: with more of them it is as fast, and they wait. Raises
    `InvalidParameter` for no engine, two of one name, no numbers or one under 1, repeats under 1.
    """
    measured = named(engines)
    repeats = checked_repeats(integer("repeats", repeats, at_least=1))
    numbers = [integer("at_once", n, at_least=1) for n in at_once]
    if not numbers or len(set(numbers)) != len(numbers):
        raise InvalidParameter(f"at_once={numbers!r} is not possible: at least one number, and each of them once.")
    lm = measured[0].engine.lm
    works = {n: fixed_lengths(lm, n, prompt_len, output_len) for n in numbers}
    rows = _swept(
        measured,
        numbers,
        repeats,
        works.__getitem__,
        lambda engine, n: run_workload(engine, works[n].warm_up() if fast_mode() else works[n]),
        lambda each, n, turn: timed_run(each, works[n]),
        progress,
        {each.name: [min(numbers)] for each in measured if _is_serial(each.engine)},
    )
    notes = tuple(f"{each.name}: {each.engine.settings}" for each in measured if hasattr(each.engine, "settings"))
    return _result("frontier", rows, works[max(numbers)], measured, repeats, notes)


def _is_serial(engine: Engine) -> bool:
    return isinstance(engine, SerialEngine) or getattr(engine, "batch_size", 0) == 1


def _swept(
    measured: list[Measured],
    xs: Sequence[float],
    repeats: int,
    work: Callable[[float], Workload],
    warm_up: Callable[[Engine, float], object],
    run: Callable[[Measured, float, int], object],
    progress: bool,
    only: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> list[Row]:
    """A row for each engine and x, measured in turns; `only` names those of an engine that is not measured at all."""
    rows = []
    with progress_bar(len(xs) * len(measured) * repeats, "run", progress) as bar:
        for x in xs:
            here = [each for each in measured if x in only.get(each.name, xs)]
            for each in here:
                each.runs, each.tokens, each.warnings = [], [], []
                warm_up(each.engine, x)
            for turn in range(repeats):
                first = turn % max(1, len(here))
                for each in here[first:] + here[:first]:
                    bar.set_description(f"{each.name} at {x:g}", refresh=False)
                    run(each, x, turn)
                    bar.update()
            for each in here:
                warnings = doubts_of(each, here[0], work(x))[1]
                rows.append(Row(each.name, tuple(each.runs), x=float(x), warnings=tuple(warnings)))
    return rows


def _result(
    kind: str, rows: list[Row], work: Workload, measured: list[Measured], repeats: int, notes: tuple[str, ...]
) -> Result:
    notes += (f"medians of {repeats} runs" if repeats > 1 else "one run each",)
    notes += (FAST_LABEL,) if work.fast or fast_mode() else ()
    return Result(kind, rows, work.record(), provenance_of(measured[0].engine.lm), notes)
