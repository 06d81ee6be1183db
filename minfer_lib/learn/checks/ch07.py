"""Exercises of chapter 7, the comparison: a factor between equal conditions, a percentile, the cache that a load needs.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package or the solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

Measurement = tuple[str, str, str, float]

# -- the right baseline -----------------------------------------------------------------------------------------------


def gain(measurements: Sequence[Measurement], engine: str, baseline: str) -> float | None:
    """By what factor an engine is faster than another under equal conditions.

    measurements: tuples (engine, machine, workload, tokens/s). The result is the smallest tokens/s of `engine` over
    that of `baseline` among the pairs that share machine and workload; None if there is no such pair.
    """
    ours = {(machine, work): speed for name, machine, work, speed in measurements if name == engine}
    theirs = {(machine, work): speed for name, machine, work, speed in measurements if name == baseline}
    return min((ours[both] / theirs[both] for both in ours.keys() & theirs.keys()), default=None)


def _gain(
    alike: Callable[[Measurement, Measurement], bool] = lambda a, b: a[1:3] == b[1:3],
    choose: Callable[[list[float]], float | None] = lambda factors: min(factors, default=None),
) -> Function:
    """Wrong factors. alike: which two measurements are divided; choose: which of the factors is returned."""

    def wrong(measurements: Sequence[Measurement], engine: str, baseline: str) -> float | None:
        pairs = [(a, b) for a in measurements for b in measurements if (a[0], b[0]) == (engine, baseline)]
        return choose([a[3] / b[3] for a, b in pairs if alike(a, b)])

    return wrong


def _draw_gain(gain: Function) -> Any:
    from .. import plots

    table = [
        ("naive", "M", "x", 4), ("cached", "M", "x", 12), ("slots", "M", "x", 30), ("slots", "N", "x", 300),
        ("naive", "M", "y", 5), ("cached", "M", "y", 10), ("paged", "N", "x", 310),
    ]  # fmt: skip
    factors = {name: gain(table, name, "naive") or 0 for name in ("cached", "slots", "paged")}
    return plots.bars_by_engine(factors, unit="times naive", title="What can be said of each engine, by your function")


PAIR = [("a", "M", "x", 6), ("b", "M", "x", 2)]  # engines a and b, a machine, a workload, tokens/s

check_gain = Exercise(
    gain,
    cases=(
        # 6 / 2
        Case((PAIR, "a", "b"), 3.0, "one pair"),
        # on machine N a alone was measured: 4 / 2
        Case(([("a", "N", "x", 1), *PAIR[1:], ("a", "M", "x", 4)], "a", "b"), 2.0, "two machines"),
        # of the two workloads b has y alone: 3 / 2
        Case(([("a", "M", "x", 1), ("a", "M", "y", 3), ("b", "M", "y", 2)], "a", "b"), 1.5, "two workloads"),
        # 6 / 2 and 5 / 4: the smaller one
        Case(([*PAIR, ("a", "M", "y", 5), ("b", "M", "y", 4)], "a", "b"), 1.25, "two pairs"),
        Case(([("a", "N", "x", 9), ("b", "M", "x", 2)], "a", "b"), None, "no pair"),
    ),
    mistakes=(
        Mistake(
            "You divided figures of two machines. That factor is the machines', not the engine's.",
            _gain(alike=lambda a, b: a[2] == b[2]),
        ),
        Mistake(
            "You divided figures of two workloads: other lengths, other tokens/s, same engine.",
            _gain(alike=lambda a, b: a[1] == b[1]),
        ),
        Mistake(
            "You took any two figures with the right names. Machine and workload both have to be the same.",
            _gain(alike=lambda a, b: True),
            _gain(alike=lambda a, b: True, choose=lambda factors: factors[0]),  # the first two
        ),
        Mistake(
            "With several pairs you did not take the smallest factor. Advertisements take the largest; only the "
            "smallest can be promised.",
            _gain(choose=lambda factors: max(factors, default=None)),
            _gain(choose=lambda factors: sum(factors) / len(factors) if factors else None),
        ),
        Mistake(
            "Without a common machine and workload there is no factor. Return None there.",
            _gain(choose=min),
            _gain(choose=lambda factors: min(factors, default=0.0)),
        ),
    ),
    hints=(
        "Which two rows of the table may be divided at all? What is left if there are none, and if there are several?",
        "Collect tokens/s by (machine, workload), in one dict for `engine` and one for `baseline`. Divide where a key "
        "is in both, and take the smallest.",
    ),
    solved="A factor that this function gives can be defended; most factors in titles cannot.",
    draw=_draw_gain,
)


# -- a percentile -----------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of some numbers.

    With n sorted values at the places 0 to n - 1, it is the value at place (n - 1) * percent / 100, interpolated
    between neighbours.
    """
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def _rounded(rounding: Callable[[float], int]) -> Function:
    return lambda values, percent: sorted(values)[rounding((len(values) - 1) * percent / 100)]


def _at(ranked: Sequence[float], place: float) -> float:
    """The interpolated value at a place, by which wrong percentiles are made."""
    near = ranked[int(place) :][:2]
    return near[0] + (near[-1] - near[0]) * (place - int(place))


def _draw_percentile(percentile: Function) -> Any:
    from .. import plots

    percents = list(range(0, 101, 5))
    values = [percentile(LATENCIES, percent) for percent in percents]
    return plots.curves(percents, {"by your function": values}, xlabel="per cent of the requests", ylabel="ms",
                        title="Latencies of eleven requests, one of them slow")  # fmt: skip


LATENCIES = [40, 60, 50, 70, 90, 80, 100, 120, 110, 400, 130]  # ms; sorted: 40, 50, ... 130, 400

check_percentile = Exercise(
    percentile,
    cases=(
        Case(([1, 2, 3, 4, 5], 50), 3.0, "the middle one"),
        # place (4 - 1) / 2 = 1.5 of 1, 2, 3, 8
        Case(([8, 1, 3, 2], 50), 2.5, "between two, out of order"),
        # place 10 * 0.95 = 9.5 of eleven: half way from 130 to 400
        Case((LATENCIES, 95), 265.0, "p95 of eleven"),
        # place 3 * 0.1 = 0.3 of 10, 20, 30, 40
        Case(([10, 20, 30, 40], 10), 13.0, "p10"),
        Case(([7], 95), 7.0, "a single value"),
    ),
    mistakes=(
        Mistake(
            "The values have no order yet: sort them first.",
            lambda values, percent: _at(values, (len(values) - 1) * percent / 100),
        ),
        Mistake(
            "You rounded the place to that of one value. Between two values, interpolate.",
            _rounded(math.floor),
            _rounded(math.ceil),
            _rounded(round),
        ),
        Mistake(
            "The last of n values stands at place n - 1, since the first stands at 0.",
            lambda values, percent: _at(sorted(values), len(values) * percent / 100),
        ),
        Mistake(
            "percent=95 means 95 of 100: divide by 100.", lambda values, percent: percentile(values, 100 * percent)
        ),
    ),
    hints=(
        "At which place does the percentile stand, if the smallest value stands at 0? What if it falls between two?",
        "Sort the values. place = (n - 1) * percent / 100; with below = int(place), go the fraction place - below of "
        "the way from that value to the next.",
    ),
    solved="One slow request of eleven moved p95 to more than twice what nine of ten have. A median would not show it.",
    draw=_draw_percentile,
)


# -- the cache for a load ---------------------------------------------------------------------------------------------


def cache_for_load(
    rate: float, prompt: int, output: int, tpot_ms: float, block_size: int, bytes_per_token: int
) -> float:
    """The bytes of paged cache that a load holds on average, by Little's law: requests in flight = rate x time.

    rate: requests per second. Each stays for `output` tokens of `tpot_ms` milliseconds, and holds on average its
    prompt, half of its output and half a block beside them.
    """
    in_flight = rate * output * tpot_ms / 1000
    return in_flight * (prompt + output / 2 + block_size / 2) * bytes_per_token


def _draw_cache_for_load(cache_for_load: Function) -> Any:
    from .. import plots

    rates = [0, 2, 4, 8, 16, 32]
    curves = {
        f"TPOT {tpot} ms, by your function": [cache_for_load(rate, 500, 300, tpot, 16, KV_7B) / 1e9 for rate in rates]
        for tpot in (30, 60)
    }
    return plots.curves(
        rates, curves, xlabel="requests per second", ylabel="GB of cache",
        title="Twice the step time holds twice the memory: 500 tokens in, 300 out, a 7B",
    )  # fmt: skip


KV_7B = 28 * 2 * 4 * 128 * 2  # Qwen2.5-7B: layers, keys and values, heads, dim, bytes

check_cache_for_load = Exercise(
    cache_for_load,
    cases=(
        # 1 * 10 * 0.1 s = 1 in flight; 10 + 5 + 1 = 16 tokens
        Case((1, 10, 10, 100, 2, 1), 16.0, "one in flight"),
        # 2 * 50 * 0.04 s = 4 in flight; 100 + 25 + 8 = 133 tokens; * 1,000
        Case((2, 100, 50, 40, 16, 1000), 532_000.0, "four in flight"),
        # 0.5 * 20 * 0.05 s = 0.5 in flight; 6 + 10 + 4 = 20 tokens; * 100
        Case((0.5, 6, 20, 50, 8, 100), 1000.0, "half a request, on average"),
        # 10 * 200 * 0.03 s = 60 in flight; 200 + 100 + 8 = 308 tokens; 60 * 308 * 57,344
        Case((10, 200, 200, 30, 16, KV_7B), 1_059_717_120.0, "a 7B at ten requests per second"),
    ),
    mistakes=(
        Mistake(
            "rate alone is no number of requests: multiply by the seconds that each of them stays.",
            lambda rate, p, o, tpot, block, each: rate * (p + o / 2 + block / 2) * each,
        ),
        Mistake(
            "tpot_ms is in milliseconds and rate in seconds: a factor of 1,000.",
            lambda rate, p, o, tpot, block, each: cache_for_load(rate, p, o, tpot * 1000, block, each),
            lambda rate, p, o, tpot, block, each: cache_for_load(rate, p, o, tpot / 1000, block, each),
        ),
        Mistake(
            "The prompt is computed in one go; only tokens of the output take a step each.",
            lambda rate, p, o, tpot, block, each: (p + o) / o * cache_for_load(rate, p, o, tpot, block, each),
        ),
        Mistake(
            "On average a request has half of its output in the cache: none at first, all of it at the end.",
            lambda rate, p, o, tpot, block, each: rate * o * tpot / 1000 * (p + o + block / 2) * each,
        ),
        Mistake(
            "The last block of each request is half empty on average: block_size / 2 tokens more.",
            lambda rate, p, o, tpot, block, each: cache_for_load(rate, p, o, tpot, 0, each),
            lambda rate, p, o, tpot, block, each: cache_for_load(rate, p, o, tpot, 2 * block, each),
        ),
    ),
    hints=(
        "How many requests are in flight at once, if `rate` arrive each second? How many tokens does each hold?",
        "In flight: rate * output * tpot_ms / 1000. Each holds prompt + output / 2 + block_size / 2 tokens.",
    ),
    solved="Slower steps need more memory for the same load, since requests stay longer: Little's law.",
    draw=_draw_cache_for_load,
)


EXERCISES = (check_gain, check_percentile, check_cache_for_load)
