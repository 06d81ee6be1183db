"""Arrivals are a function of their numbers, and a trace that cannot be run is refused with the entry at fault."""

import itertools
import json
import math
import statistics

import pytest

from minfer_lib.bench import all_at_once, fixed_lengths, mixed_lengths, poisson_arrivals, read_trace, write_trace
from minfer_lib.errors import InvalidParameter
from minfer_lib.generation.params import SamplingParams
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
    with pytest.raises(InvalidParameter, match="1 or more"):
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


def test_a_trace_comes_back_as_it_was_written(lm, tmp_path):
    work = mixed_lengths(lm, 4, (3, 20), (2, 9)).arriving((0.0, 0.5, 0.25, 3.0))
    exact = read_trace(write_trace(tmp_path / "exact.json", work, token_ids=True), lm)
    assert (exact.prompts, exact.params, exact.arrivals) == (work.prompts, work.params, work.arrivals)
    lengths = read_trace(write_trace(tmp_path / "lengths.json", work), lm)
    assert lengths.prompt_lens == work.prompt_lens and lengths.output_lens == work.output_lens
    assert lengths.arrivals == work.arrivals and "4 requests of the trace lengths" in lengths.description
    assert json.loads((tmp_path / "lengths.json").read_text())[2] == {
        "arrival_s": 0.25, "prompt_len": work.prompt_lens[2], "output_len": work.output_lens[2]
    }  # fmt: skip
    at_once = read_trace(write_trace(tmp_path / "once.json", work.arriving(None)), lm)
    assert at_once.arrivals == all_at_once(4)


def test_a_trace_may_mix_lengths_and_prompts(lm, tmp_path):
    path = tmp_path / "mixed.json"
    path.write_text('[{"arrival_s": 1, "prompt_len": 7, "output_len": 3}, '
                    '{"arrival_s": 0, "prompt_token_ids": [5, 6], "output_len": 2}]')  # fmt: skip
    work = read_trace(path, lm)
    assert work.prompt_lens == [7, 2] and work.prompts[1] == [5, 6] and work.arrivals == (1.0, 0.0)
    assert [params.max_tokens for params in work.params] == [3, 2] and all(p.ignore_eos for p in work.params)


def test_fast_mode_shortens_a_trace_and_says_so(lm, tmp_path, monkeypatch):
    path = tmp_path / "long.json"
    path.write_text(json.dumps([{"arrival_s": 2.0, "prompt_len": 80, "output_len": 40}]))
    assert not read_trace(path, lm).fast
    monkeypatch.setenv("MINFER_FAST", "1")
    work = read_trace(path, lm)
    assert work.fast and work.prompt_lens == [10] and work.output_lens == [5] and work.arrivals == (2.0,)


GOOD = {"arrival_s": 0.0, "prompt_len": 3, "output_len": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arrival_s": -1}, "arrival_s must be seconds"),
        ({"arrival_s": "now"}, "arrival_s must be seconds"),
        ({"arrival_s": None}, "arrival_s must be seconds"),
        ({"arrival_s": True}, "arrival_s must be seconds"),
        ({"arrival_s": 10**400}, "arrival_s must be seconds"),
        ({"prompt_len": 0}, "prompt_len must be an integer of 1 or more, not 0"),
        ({"prompt_len": 2.5}, "prompt_len must be"),
        ({"output_len": 0}, "output_len must be"),
        ({"output_len": None}, "output_len must be"),
        ({"prompt_token_ids": [1]}, "one of prompt_len and prompt_token_ids"),
        ({"prompt_len": ...}, "one of prompt_len and prompt_token_ids"),
        ({"prompt_len": ..., "prompt_token_ids": []}, "at least one"),
        ({"prompt_len": ..., "prompt_token_ids": "abc"}, "list of token ids"),
        ({"prompt_len": ..., "prompt_token_ids": [1, -1]}, "list of token ids"),
        ({"prompt_len": ..., "prompt_token_ids": [1, True]}, "list of token ids"),
        ({"prompt_len": ..., "prompt_token_ids": [10**6]}, "token id 1000000 is not in the vocabulary"),
        ({"prompt_len": 10**6}, "tokens are more than"),
        ({"output_length": 3}, "there is no field 'output_length'"),
    ],
)
def test_a_malformed_entry_is_refused_by_its_number(lm, tmp_path, change, said):
    entry = {key: value for key, value in {**GOOD, **change}.items() if value is not ...}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([GOOD, entry]))
    with pytest.raises(InvalidParameter, match=r"trace\.json, entry 1: ") as caught:
        read_trace(path, lm)
    assert said in str(caught.value) and "arrival_s (seconds from the start)" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "{", "{}", "[]", "3", "[7]", '[{"arrival_s": NaN, "prompt_len": 1}]']
)
def test_what_is_no_trace_is_refused(lm, tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InvalidParameter, match="A trace is a JSON list"):
        read_trace(path, lm)


def test_a_missing_trace_and_one_of_open_ends(lm, tmp_path):
    with pytest.raises(InvalidParameter, match="which is not there"):
        read_trace(tmp_path / "none.json", lm)
    work = fixed_lengths(lm, 1, 3, 4)
    open_ended = type(work)(work.name, work.prompts, [SamplingParams(max_tokens=4)], "")
    with pytest.raises(InvalidParameter, match="ignore_eos=True"):
        write_trace(tmp_path / "open.json", open_ended)


def test_a_rate_beyond_all_floats_is_refused():
    with pytest.raises(InvalidParameter, match="rate="):
        poisson_arrivals(3, 10**400)
