"""The exercises of chapter 1: stubs fail, solutions pass, every typical mistake is told apart from the others."""

import math
from typing import ClassVar

import pytest
import torch
from exercise_checks import ExerciseChecks

from minfer_lib.generation.request import RequestMetrics
from minfer_lib.learn.checks import ch01
from minfer_lib.models.memory import ModelShape, kv_bytes_per_token
from minfer_lib.models.shapes import SHAPES, shape_config

# -- how a learner might solve them ---------------------------------------------------------------------------------


def kv_bytes(layers, query_heads, kv_heads, head_dim, tokens, bytes_per_value):
    return 2 * layers * kv_heads * head_dim * tokens * bytes_per_value


def first_token(logits):
    probs = (logits - logits.max()).exp()
    probs = probs / probs.sum()
    token = int(probs.argmax())
    return token, probs[token]


def split_latency(arrival, token_times):
    ttft = token_times[0] - arrival
    if len(token_times) == 1:
        return ttft, None
    return ttft, (token_times[-1] - token_times[0]) / (len(token_times) - 1)


def tokens_that_fit(budget_gib, parameters, bits, kv_bytes_per_token):
    left = budget_gib * 2**30 - parameters * bits / 8
    return max(0, int(left // kv_bytes_per_token))


def step_time(flops, bytes_moved, peak_flops, bandwidth):
    computing, reading = flops / peak_flops, bytes_moved / bandwidth
    return max(computing, reading), "memory" if reading > computing else "compute"


class TestExercises(ExerciseChecks):
    chapter = ch01
    solutions: ClassVar = {f.__name__: f for f in (kv_bytes, first_token, split_latency, tokens_that_fit, step_time)}


# -- the expected values against the package ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_kv_bytes_is_the_packages_formula(name):
    shape = ModelShape.from_config(shape_config(name))
    learner = kv_bytes(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, 1, 2)
    assert learner == kv_bytes_per_token(shape, 2)


def test_latency_is_what_the_engine_reports():
    times = [10.25, 10.35, 10.75]
    metrics = RequestMetrics(arrival=10.0, first_token=times[0], last_token=times[-1], num_tokens=3)
    assert split_latency(10.0, times) == (metrics.ttft_s, metrics.tpot_s)
    assert split_latency(5.0, [5.2])[1] is RequestMetrics(arrival=5.0, first_token=5.2, num_tokens=1).tpot_s


def test_first_token_is_torchs_softmax():
    for case in ch01.check_first_token.cases:
        token, probability = case.expected
        probs = case.args[0].double().softmax(-1)
        assert token == int(probs.argmax()) and math.isclose(probability, float(probs.max()), rel_tol=1e-5)


def test_an_answer_may_be_written_with_numpy_or_lists():
    def with_lists(logits):
        values = logits.tolist()
        exps = [math.exp(v - max(values)) for v in values]
        return values.index(max(values)), max(exps) / sum(exps)

    def with_torch(logits):
        best = torch.softmax(logits, -1).max(-1)
        return best.indices, best.values

    assert ch01.check_first_token.check(with_lists) and ch01.check_first_token.check(with_torch)
