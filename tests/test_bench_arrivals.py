"""Arrivals are a function of their numbers."""

import itertools
import math
import statistics

import pytest

from minfer_lib.bench import all_at_once, fixed_lengths, poisson_arrivals
from minfer_lib.errors import InvalidParameter
from minfer_lib.models.load import load_model


@pytest.fixture(autouse=True)
def full_length(monkeypatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


def gaps(moments):
    return [b - a for a, b in itertools.pairwise((0.0, *moments))]


def test_all_at_once():
    assert all_at_once(3) == (0.0, 0.0, 0.0)


def test_gaps_of_poisson_arrivals_are_exponential():
    found = gaps(poisson_arrivals(5000, rate=4.0, seed=1))
    assert min(found) > 0
    assert statistics.mean(found) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(found) == pytest.approx(0.25, rel=0.05)  # of an exponential as large as its mean
    assert sum(gap > 0.25 for gap in found) / 5000 == pytest.approx(math.exp(-1), abs=0.02)
    # without memory: how long the last gap was says nothing of the next
    after_long = [b for a, b in itertools.pairwise(found) if a > 0.25]
    assert statistics.mean(after_long) == pytest.approx(0.25, rel=0.1)


def test_a_seed_is_one_pattern_at_every_rate():
    slow, fast = poisson_arrivals(20, 1.0, seed=3), poisson_arrivals(20, 8.0, seed=3)
    assert slow == poisson_arrivals(20, 1.0, seed=3) != poisson_arrivals(20, 1.0, seed=4)
    assert fast == pytest.approx([moment / 8 for moment in slow])
    assert poisson_arrivals(3, math.inf) == all_at_once(3)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, "fast", True])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(InvalidParameter, match="requests a second"):
        poisson_arrivals(3, rate)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_impossible_counts_are_refused(n):
    with pytest.raises(InvalidParameter, match="n must be an integer of 1 or more"):
        poisson_arrivals(n, 1.0)


def test_a_workload_takes_arrivals_that_fit(lm):
    work = fixed_lengths(lm, 3, 5, 4)
    assert work.arrivals is None and work.arriving([0, 2.5, 1]).arrivals == (0, 2.5, 1)
    assert work.arriving([0, 1, 2]).warm_up().arrivals == (0, 1, 2)
    assert work.arriving([0, 1, 2]).arriving(None) == work
    with pytest.raises(InvalidParameter, match="2 arrivals were given for 3 requests"):
        work.arriving([0, 1])
    for wrong in (-1.0, math.inf, math.nan, "soon", True):
        with pytest.raises(InvalidParameter, match="Request 2 is to arrive at"):
            work.arriving([0, 1, wrong])
    for wrong in (3, "012", 0.5):
        with pytest.raises(InvalidParameter, match="arrivals must be a list of seconds"):
            work.arriving(wrong)


def test_a_rate_beyond_all_floats_is_refused():
    with pytest.raises(InvalidParameter, match="rate="):
        poisson_arrivals(3, 10**400)
