"""Exercises of chapter 7 about reading tables: a factor between equal conditions, and a percentile.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

# -- the right baseline --------------------------------------------------------------------------------------------

PAIR = [("a", "M", "x", 6), ("b", "M", "x", 2)]  # engines a and b, a machine, a workload, tokens/s
Measurements = Sequence[tuple[str, str, str, float]]


def _gain(
    *, machine: bool = True, workload: bool = True, choose: Callable[[list[float]], float] = min, none: Any = None,
    upside_down: bool = False,
) -> Function:  # fmt: skip
    """The right answer, and with other options the wrong ones."""

    def gain(measurements: Measurements, engine: str, baseline: str) -> Any:
        factors = [
            theirs[3] / ours[3] if upside_down else ours[3] / theirs[3]
            for ours in measurements
            for theirs in measurements
            if ours[0] == engine and theirs[0] == baseline
            and (not machine or ours[1] == theirs[1]) and (not workload or ours[2] == theirs[2])
        ]  # fmt: skip
        return choose(factors) if factors else none

    return gain


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _without_guard(measurements: Measurements, engine: str, baseline: str) -> float:
    return min(
        a[3] / b[3]
        for a in measurements
        for b in measurements
        if a[0] == engine and b[0] == baseline and a[1:3] == b[1:3]
    )


def _draw_gain(gain: Function) -> Any:
    from .. import plots

    table = [
        ("naive", "M", "x", 4), ("cached", "M", "x", 12), ("slots", "M", "x", 30), ("slots", "N", "x", 300),
        ("naive", "M", "y", 5), ("cached", "M", "y", 10), ("paged", "N", "x", 310),
    ]  # fmt: skip
    factors = {name: gain(table, name, "naive") or 0 for name in ("cached", "slots", "paged")}
    return plots.bars_by_engine(factors, unit="times naive", title="What can be said of each engine, by your function")


GAIN = Exercise(
    name="gain",
    parameters=("measurements", "engine", "baseline"),
    cases=(
        # 6 / 2
        Case((PAIR, "a", "b"), 3.0, "one pair"),
        # on machine N a alone was measured: 4 / 2
        Case(([("a", "N", "x", 9), *PAIR[1:], ("a", "M", "x", 4)], "a", "b"), 2.0, "two machines"),
        # of the two workloads b has y alone: 3 / 2
        Case(([("a", "M", "x", 1), ("a", "M", "y", 3), ("b", "M", "y", 2)], "a", "b"), 1.5, "two workloads"),
        # 6 / 2 and 5 / 4: the smaller one
        Case(([*PAIR, ("a", "M", "y", 5), ("b", "M", "y", 4)], "a", "b"), 1.25, "two pairs"),
        Case(([("a", "N", "x", 9), ("b", "M", "x", 2)], "a", "b"), None, "no pair"),
    ),
    mistakes=(
        Mistake("upside down", "The other way round: tokens/s of `engine` over those of `baseline`.",
                (_gain(upside_down=True),)),
        Mistake("any machine", "You divided figures of two machines. That factor is the machines', not the engine's.",
                (_gain(machine=False),)),
        Mistake("any workload", "You divided figures of two workloads: other lengths, other tokens/s, same engine.",
                (_gain(workload=False),)),
        Mistake("any conditions", "You took any two figures. Machine and workload both have to be the same.",
                (_gain(machine=False, workload=False),)),
        Mistake("the largest", "With several pairs you took the largest factor, as advertisements do.",
                (_gain(choose=max),)),
        Mistake("the mean", "With several pairs you averaged factors; the smallest is what can be promised.",
                (_gain(choose=_mean),)),
        Mistake("a number for nothing", "Without a common machine and workload there is no factor: return None.",
                (_gain(none=0.0), _gain(none=1.0), _gain(none=math.nan))),
        Mistake("an error for nothing", "Without any pair your function fails. Return None there.", (_without_guard,)),
    ),
    hint="Go over all pairs of a measurement of `engine` and one of `baseline` with equal machine and workload.",
    solved="A factor that this function gives can be defended; most factors in titles cannot.",
    draw=_draw_gain,
)  # fmt: skip


# -- a percentile --------------------------------------------------------------------------------------------------


def _percentile(
    *, order: bool = True, count: int = 1, between: Callable[[float], float] | None = None, share: float = 100
) -> Function:
    """The right answer, and with other options the wrong ones. between: how a place between two is rounded."""

    def percentile(values: Sequence[float], percent: float) -> float:
        ranked = sorted(values) if order else list(values)
        place = (len(ranked) - count) * percent / share
        if between is not None:
            return ranked[min(int(between(place)), len(ranked) - 1)]
        below = int(place)
        above = min(below + 1, len(ranked) - 1)
        return ranked[below] + (ranked[above] - ranked[below]) * (place - below)

    return percentile


def _halves_up(place: float) -> float:
    return math.floor(place + 0.5)


LATENCIES = [40, 60, 50, 70, 90, 80, 100, 120, 110, 400, 130]  # ms; sorted: 40, 50, ... 130, 400


def _draw_percentile(percentile: Function) -> Any:
    from .. import plots

    percents = list(range(0, 101, 5))
    values = [percentile(LATENCIES, percent) for percent in percents]
    return plots.curves(percents, {"by your function": values}, xlabel="per cent of the requests", ylabel="ms",
                        title="Latencies of eleven requests, one of them slow")  # fmt: skip


PERCENTILE = Exercise(
    name="percentile",
    parameters=("values", "percent"),
    cases=(
        Case(([1, 2, 3, 4, 5], 50), 3.0, "the middle one"),
        # place (4 - 1) / 2 = 1.5 of 1, 2, 3, 8
        Case(([8, 1, 3, 2], 50), 2.5, "between two, out of order"),
        # place 10 * 0.95 = 9.5 of eleven: half way from 130 to 400
        Case((LATENCIES, 95), 265.0, "p95 of eleven"),
        # place 3 * 0.1 = 0.3 of 10, 20, 30, 40
        Case(([10, 20, 30, 40], 10), 13.0, "p10"),
        Case(([5, 9, 7], 100), 9.0, "the largest"),
        Case(([7], 95), 7.0, "a single value"),
    ),
    mistakes=(
        Mistake("not sorted", "The values have no order yet: sort them first.", (_percentile(order=False),)),
        Mistake("rounded down", "You round the place down to the value below. Between two values, interpolate.",
                (_percentile(between=math.floor),)),
        Mistake("rounded up", "You round the place up to the value above. Between two values, interpolate.",
                (_percentile(between=math.ceil),)),
        Mistake("the nearest", "You take the nearest value. Between two values, interpolate.",
                (_percentile(between=_halves_up), _percentile(between=round))),
        Mistake("n places", "The last of n values stands at place n - 1, since the first stands at 0.",
                (_percentile(count=0),)),
        Mistake("a share", "percent=95 means 95 of 100: divide by 100.", (_percentile(share=1),)),
        Mistake("the mean", "That is the mean, whatever percent says.", (lambda values, percent: _mean(list(values)),)),
        Mistake("the median", "That is the median, whatever percent says.",
                (lambda values, percent: _percentile()(values, 50),)),
    ),
    hint="sorted(values), place = (n - 1) * percent / 100, then a weighted mean of the values on both sides of it.",
    draw=_draw_percentile,
    solved="One slow request of eleven moved p95 to more than twice what nine of ten have. A median would not show it.",
)  # fmt: skip
