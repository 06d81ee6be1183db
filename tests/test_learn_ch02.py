"""The exercises of chapter 2, and their expected values against the package."""

from typing import ClassVar

import pytest
import torch
from exercise_checks import ExerciseChecks

from minfer_lib import LanguageModel, NaiveEngine, SamplingParams
from minfer_lib.generation.sampling import TokenCounts, filter_top_p, filtered_logits, penalised
from minfer_lib.generation.stopping import StopStrings
from minfer_lib.learn.checks import ch02

# -- how a learner might solve them ---------------------------------------------------------------------------------


def distribution(logits, temperature):
    if temperature == 0:
        probs = torch.zeros_like(logits)
        probs[logits.argmax()] = 1.0
        return probs
    exps = ((logits - logits.max()) / temperature).exp()
    return exps / exps.sum()


def top_p_filter(probs, p):
    kept, total = [], 0.0
    for token in probs.argsort(descending=True).tolist():
        kept.append(token)
        total += float(probs[token])
        if total >= p:
            break
    return kept


def penalise(logits, seen, penalty):
    logits = logits.clone()
    for token in set(seen):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


def hold_back(text, stops):
    for length in range(max(len(stop) for stop in stops) - 1, 0, -1):
        if any(length < len(stop) and text.endswith(stop[:length]) for stop in stops):
            return text[-length:]
    return ""


def total_tokens(prompt, new):
    return sum(prompt + step for step in range(new))


class TestExercises(ExerciseChecks):
    chapter = ch02
    solutions: ClassVar = {f.__name__: f for f in (distribution, top_p_filter, penalise, hold_back, total_tokens)}


def test_an_answer_that_changes_the_callers_logits_is_told_so(capsys: pytest.CaptureFixture[str]):
    def in_place(logits, seen, penalty):
        for token in set(seen):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        return logits

    def in_place_with_numpy(logits, seen, penalty):
        return in_place(logits.numpy(), seen, penalty)

    def in_place_and_wrong(logits, seen, penalty):
        for token in set(seen):
            logits[token] /= penalty
        return logits

    for answer in (in_place, in_place_with_numpy):
        assert ch02.check_penalise.check(answer) is False
        assert "logits.clone()" in capsys.readouterr().out
    assert ch02.check_penalise.check(in_place_and_wrong) is False
    assert "Multiply where the logit is negative" in capsys.readouterr().out


# -- the expected values against the package ------------------------------------------------------------------------


def test_distribution_is_the_samplers():
    for case in ch02.check_distribution.cases:
        logits, temperature = case.args
        if temperature > 0:
            ours = filtered_logits(logits[None], [SamplingParams(temperature=temperature)])[0].softmax(-1)
            assert torch.allclose(ours, torch.tensor(case.expected), atol=1e-6)


def test_top_p_is_the_samplers():
    for case in ch02.check_top_p_filter.cases:
        probs, p = case.args
        kept = filter_top_p(probs.log()[None], torch.tensor([p], dtype=torch.float64))[0].isfinite()
        assert kept.nonzero().flatten().tolist() == sorted(case.expected)


def test_the_penalty_is_the_samplers():
    for case in ch02.check_penalise.cases:
        logits, seen, penalty = case.args
        params = SamplingParams(repetition_penalty=penalty)
        assert penalised(logits, TokenCounts.of_prompt(seen, logits), params).tolist() == pytest.approx(case.expected)


def test_what_is_held_back_is_what_the_engine_holds_back():
    for case in ch02.check_hold_back.cases:
        text, stops = case.args
        watched = StopStrings(stops)
        assert text == watched.feed(text) + case.expected
        assert watched.hit is None and watched.flush() == case.expected


def test_tokens_are_what_the_engine_runs(tiny: LanguageModel):
    lengths, engine = [], NaiveEngine(tiny)
    hook = tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for prompt, new in ((5, 1), (5, 3), (7, 20)):
            lengths.clear()
            engine.generate([list(range(5, 5 + prompt))], SamplingParams(max_tokens=new, ignore_eos=True))
            assert sum(lengths) == total_tokens(prompt, new)
    finally:
        hook.remove()
