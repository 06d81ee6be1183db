"""Checks of chapter 7, the comparison: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch07_load import CACHE_FOR_LOAD
from .ch07_numbers import GAIN, PERCENTILE

EXERCISES = (GAIN, PERCENTILE, CACHE_FOR_LOAD)


def check_gain(gain: Function) -> bool:
    """Checks `gain(measurements, engine, baseline) -> float | None`: a factor between equal conditions.

    measurements: tuples (engine, machine, workload, tokens/s). The result is the smallest tokens/s of `engine` over
    that of `baseline` among the pairs that share machine and workload; None if there is no such pair.
    """
    return GAIN.check(gain)


def check_percentile(percentile: Function) -> bool:
    """Checks `percentile(values, percent) -> float`: with n sorted values at the places 0 to n - 1, the value at place
    (n - 1) * percent / 100, interpolated between neighbours.
    """
    return PERCENTILE.check(percentile)


def check_cache_for_load(cache_for_load: Function) -> bool:
    """Checks `cache_for_load(rate, prompt, output, tpot_ms, block_size, bytes_per_token) -> bytes` of paged cache.

    rate: requests a second. Each stays for `output` tokens of `tpot_ms` milliseconds, and holds on average its prompt,
    half of its output and half a block beside them.
    """
    return CACHE_FOR_LOAD.check(cache_for_load)
