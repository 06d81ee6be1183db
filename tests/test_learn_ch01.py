"""The exercises of chapter 1: stubs fail, solutions pass, every typical mistake is told apart from the others."""

import math

import pytest
import torch

from minfer_lib.learn.checks import ch01
from minfer_lib.learn.exercises import Exercise, Outcome
from minfer_lib.learn.style import Picture
from minfer_lib.memory import ModelShape, kv_bytes_per_token
from minfer_lib.request import RequestMetrics
from minfer_lib.shapes import SHAPES, shape_config

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


SOLUTIONS = {f.__name__: f for f in (kv_bytes, first_token, split_latency, tokens_that_fit, step_time)}
CHECKS = {exercise.name: getattr(ch01, f"check_{exercise.name}") for exercise in ch01.EXERCISES}
MISTAKES = [
    pytest.param(exercise, mistake, function, id=f"{exercise.name}: {mistake.name} {n}")
    for exercise in ch01.EXERCISES
    for mistake in exercise.mistakes
    for n, function in enumerate(mistake.made_by)
]


def test_there_are_three_to_five():
    assert 3 <= len(ch01.EXERCISES) <= 5 and set(CHECKS) == set(SOLUTIONS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_stub_fails_and_the_solution_passes(name, capsys):
    def stub(*args): ...

    assert CHECKS[name](stub) is False
    assert capsys.readouterr().out == f"{name}: not solved yet. Replace the ... in it, then run the cell again.\n"
    assert CHECKS[name](SOLUTIONS[name]) is True
    assert capsys.readouterr().out.startswith(f"{name}: right, in all ")


@pytest.mark.parametrize(("exercise", "mistake", "function"), MISTAKES)
def test_each_typical_mistake_fails_with_its_own_hint(exercise, mistake, function, capsys):
    assert CHECKS[exercise.name](function) is False
    assert capsys.readouterr().out.rstrip().endswith(f"Hint: {mistake.hint}")


@pytest.mark.parametrize("exercise", ch01.EXERCISES, ids=lambda e: e.name)
def test_hints_are_different_and_lines_are_not_too_long(exercise: Exercise, capsys):
    hints = [mistake.hint for mistake in exercise.mistakes]
    assert len(set(hints)) == len(hints) >= 3 and exercise.hint not in hints
    for mistake in exercise.mistakes:
        exercise.check(mistake.made_by[0])
        first_lines = capsys.readouterr().out.splitlines()[:4]
        assert max(map(len, first_lines)) <= 130


@pytest.mark.parametrize("exercise", ch01.EXERCISES, ids=lambda e: e.name)
def test_pictures_can_be_drawn_for_right_and_for_wrong_answers(exercise: Exercise):
    picture = exercise.draw(SOLUTIONS[exercise.name])
    assert isinstance(picture, Picture) and len(picture.png()) < 60_000
    drawn = 0
    for mistake in exercise.mistakes:
        for function in mistake.made_by:
            if all(Outcome.of(function, case.args).error is None for case in exercise.cases):
                try:
                    drawn += isinstance(exercise.draw(function), Picture)
                except Exception:  # the check reports it; most must be drawable all the same
                    continue
    assert drawn >= 2


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
    for case in ch01.FIRST_TOKEN.cases:
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

    assert ch01.check_first_token(with_lists) and ch01.check_first_token(with_torch)
