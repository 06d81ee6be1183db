"""The exercises of chapter 7: stubs fail, solutions pass, every typical mistake is told apart from the others."""

import math
import random
import statistics
from typing import ClassVar

import pytest
from exercise_checks import ExerciseChecks

from minfer_lib.bench.metrics import percentile as percentile_of_the_package
from minfer_lib.learn.checks import ch07
from minfer_lib.learn.checks.ch07 import KV_7B
from minfer_lib.models.memory import ModelShape, kv_bytes_per_token
from minfer_lib.models.shapes import shape_config

# -- how a learner might solve them ---------------------------------------------------------------------------------


def gain(measurements, engine, baseline):
    ours = {(machine, work): speed for name, machine, work, speed in measurements if name == engine}
    theirs = {(machine, work): speed for name, machine, work, speed in measurements if name == baseline}
    return min((ours[both] / theirs[both] for both in ours.keys() & theirs.keys()), default=None)


def percentile(values, percent):
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below, above = math.floor(place), math.ceil(place)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def cache_for_load(rate, prompt, output, tpot_ms, block_size, bytes_per_token):
    in_flight = rate * output * tpot_ms / 1000
    return in_flight * (prompt + output / 2 + block_size / 2) * bytes_per_token


class TestExercises(ExerciseChecks):
    chapter = ch07
    solutions: ClassVar = {f.__name__: f for f in (gain, percentile, cache_for_load)}


# -- the solutions against the package --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("percent", [0, 5, 50, 95, 100])
def test_a_percentile_is_that_of_the_benchmarks(count, percent):
    values = [random.Random(count).uniform(0, 100) for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(percentile_of_the_package(values, percent))
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_the_7b_of_the_exercise_is_the_shape_of_that_name():
    assert kv_bytes_per_token(ModelShape.from_config(shape_config("qwen2.5-7b"), "qwen2.5-7b")) == KV_7B


def test_answers_may_be_written_in_other_ways(capsys):
    import numpy as np

    def in_loops(measurements, engine, baseline):
        best = None
        for name, machine, work, speed in measurements:
            for other, its_machine, its_work, its_speed in measurements:
                if (name, other, machine, work) == (engine, baseline, its_machine, its_work):
                    factor = speed / its_speed
                    best = factor if best is None else min(best, factor)
        return best

    assert ch07.check_gain.check(in_loops)
    assert ch07.check_percentile.check(lambda values, percent: np.percentile(values, percent))
    assert ch07.check_cache_for_load.check(lambda r, p, o, t, b, each: r * (o * t * 1e-3) * each * (p + (o + b) / 2))
    capsys.readouterr()
