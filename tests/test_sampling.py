"""The sampler against distributions worked out by hand, itself row by row, and its own probabilities."""

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import SamplingParams
from minfer_lib.generation import sampling
from minfer_lib.generation.sampling import (
    SORT_FIRST,
    Sampler,
    TokenCounts,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    filtered_logits,
    inverse_cdf,
    penalised,
    processed,
    uniform,
)
from minfer_lib.models.memory import PeakMemory

INF, NAN = math.inf, math.nan


FREE = SamplingParams()


@dataclass(eq=False)
class Row:
    params: SamplingParams
    prompt_token_ids: list[int] = field(default_factory=lambda: [0])
    token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    index: int = 0


def distribution(probs: list[float] | torch.Tensor, **params: object) -> list[float]:
    """What is drawn from, when the model says `probs`."""
    logits = torch.as_tensor(probs, dtype=torch.float64).log().float()[None]
    parameters = SamplingParams(**(dict(temperature=1.0) | params))
    return filtered_logits(logits, [parameters]).softmax(-1)[0].tolist()


def kept(probs: list[float] | torch.Tensor, **params: object) -> set[int]:
    return {i for i, p in enumerate(distribution(probs, **params)) if p > 0}


def adjusted(logits: list[float], prompt: list[int] = (), output: list[int] = (), eos: set[int] = (), **params) -> list:
    row = Row(SamplingParams(**params), list(prompt), list(output))
    return Sampler(eos).edited(torch.tensor(logits), row).tolist()


# -- filters, by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probs", "p", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.6, {3, 2}),  # .4 is not enough, so the token that crosses .6 stays
        ([0.5, 0.41, 0.09], 0.9, {0, 1}),
        ([0.5, 0.41, 0.09], 0.92, {0, 1, 2}),
        ([0.5, 0.3, 0.2], 0.5, {0}),  # reached exactly
        ([0.5, 0.3, 0.2], 0.8, {0, 1}),  # .5 + .3 is not quite .8 in floating point
        ([0.5, 0.3, 0.2], 0.81, {0, 1, 2}),
        ([0.1, 0.2, 0.3, 0.4], 1e-12, {3}),
        ([0.1, 0.2, 0.3, 0.4], 1.0, {0, 1, 2, 3}),
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),  # ties: the lowest ids, and no more than are needed
        ([0.25, 0.25, 0.25, 0.25], 0.51, {0, 1, 2}),
        ([0.2, 0.4, 0.4], 0.3, {1}),
        ([0.0, 1.0, 0.0], 0.99, {1}),
    ],
)
def test_top_p(probs: list[float], p: float, expected: set[int]):
    assert kept(probs, top_p=p) == expected


def test_top_p_rescales_what_it_keeps():
    assert distribution([0.1, 0.2, 0.3, 0.4], top_p=0.6) == pytest.approx([0, 0, 3 / 7, 4 / 7])


def test_top_p_of_one_keeps_even_what_is_below_rounding():
    assert kept([1 - 1e-12, 1e-12], top_p=1.0) == {0, 1}


@pytest.mark.parametrize(
    ("k", "expected"), [(1, {3}), (2, {3, 1}), (3, {3, 1, 2}), *[(k, {0, 1, 2, 3}) for k in (4, 99, 2**70, 0)]]
)
def test_top_k(k: int, expected: set[int]):
    assert kept([0.1, 0.25, 0.2, 0.45], top_k=k) == expected


def test_top_k_with_ties_keeps_k_and_the_lowest_ids():
    assert kept([0.2, 0.2, 0.2, 0.4], top_k=2) == {3, 0}
    assert kept([0.25] * 4, top_k=3) == {0, 1, 2}


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.5, {2, 3}), (0.51, {3}), (0.25, {1, 2, 3}), (1.0, {3}), (0.0, {0, 1, 2, 3})]
)
def test_min_p(min_p: float, expected: set[int]):
    assert kept([0.05, 0.125, 0.25, 0.5], min_p=min_p) == expected


def test_min_p_of_one_keeps_all_that_are_most_likely():
    assert kept([0.4, 0.4, 0.2], min_p=1.0) == {0, 1}


def test_min_p_keeps_what_is_exactly_at_the_threshold():
    """Weights whole and min_p their ratio: rounding in the logarithms must not decide."""
    pairs = [(largest, other) for largest in range(2, 40) for other in range(1, largest)]
    params = [SamplingParams(temperature=1.0, min_p=other / largest) for largest, other in pairs]
    assert torch.isfinite(filtered_logits(torch.tensor(pairs).log(), params)).all()


def test_filters_in_order():
    probs = [0.4, 0.3, 0.2, 0.1]
    # top_p works on what top_k left: .4/.7 alone reaches .57; on the whole distribution two tokens would be needed
    assert kept(probs, top_k=2, top_p=0.57) == {0}
    assert kept(probs, top_p=0.57) == {0, 1}
    # top_p comes before min_p: after it, .3/.4 of the largest is in reach, .2/.4 has gone
    assert kept(probs, top_p=0.7, min_p=0.5) == {0, 1}
    # temperature comes first: squared probabilities .533, .3, .133, .033
    assert distribution(probs, temperature=0.5) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    assert kept(probs, temperature=0.5, top_p=0.53) == {0}
    assert kept(probs, temperature=0.5, min_p=0.3) == {0, 1}
    assert kept(probs, temperature=2.0, min_p=0.3) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float):
    assert distribution([0.3, 0.31, 0.39], temperature=temperature) == [0, 0, 1]


@pytest.mark.parametrize("temperature", [1e6, 1e30, 3e38])
def test_huge_temperature_is_uniform_and_revives_nothing_banned(temperature: float):
    assert distribution([0.3, 0.0, 0.7], temperature=temperature) == pytest.approx([0.5, 0, 0.5], abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
def test_huge_logits_do_not_overflow(temperature: float):
    rows = filtered_logits(torch.tensor([[1e4, 1e4, -1e4], [3e38, 0.0, -3e38]]), [SamplingParams(
        temperature=temperature, top_p=0.999999, top_k=3, min_p=1e-9)] * 2).softmax(-1)  # fmt: skip
    assert torch.isfinite(rows).all() and torch.allclose(rows.sum(-1), torch.ones(2))
    assert rows[0].tolist() == pytest.approx([0.5, 0.5, 0.0]) and rows[1].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("vocab", [SORT_FIRST - 1, SORT_FIRST, SORT_FIRST + 1, 5 * SORT_FIRST])
@pytest.mark.parametrize("p", [0.001, 0.3, 0.5, 0.95])
def test_top_p_on_flat_distributions_sorts_as_much_as_it_must(vocab: int, p: float):
    """Every token equally likely: the nucleus is p of the vocabulary, for a large one beyond what is sorted first."""
    probs = distribution(torch.full((vocab,), 1 / vocab), top_p=p)
    count = sum(q > 0 for q in probs)
    assert count == pytest.approx(p * vocab, abs=1 + 2e-6 * vocab) and count >= p * vocab - 1e-2
    assert all(q > 0 for q in probs[:count]) and max(probs) == pytest.approx(1 / count, rel=1e-4)


def test_one_flat_row_among_peaked_ones():
    """One row that needs the full sort must not change the others."""
    vocab = 3 * SORT_FIRST
    flat, peaked = torch.zeros(vocab), torch.zeros(vocab)
    peaked[7], peaked[2000] = 30.0, 29.0
    p = torch.tensor([0.9, 0.6, 0.9], dtype=torch.float64)
    together = filter_top_p(torch.stack([peaked, peaked, flat]), p)
    assert (together > -INF).sum(-1).tolist()[:2] == [2, 1]
    assert (together[2] > -INF).sum().item() == pytest.approx(0.9 * vocab, abs=1)
    for row in range(3):
        alone = filter_top_p(torch.stack([peaked, peaked, flat])[row : row + 1], p[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_a_row_without_a_filter_among_rows_that_have_one():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(4, -1)
    params = [dict(top_k=1), dict(), dict(top_p=0.5), dict(top_k=3, top_p=0.7)]
    rows = filtered_logits(logits, [SamplingParams(temperature=1.0, **p) for p in params])
    assert (rows > -INF).tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    k = torch.tensor([1, 0, 0, 3])
    assert torch.equal(filter_top_k(logits, k), filter_top_k(logits, k, most=3))


# -- what edits logits ----------------------------------------------------------------------------------------------


def test_repetition_penalty_over_prompt_and_output():
    # token 0 in the prompt, 1 in the output, 2 in both (penalised once), 3 in neither; a negative logit gets smaller
    logits = [2.0, -2.0, 4.0, 3.0, 0.0]
    assert adjusted(logits, [0, 2, 4], [1, 2], repetition_penalty=2.0) == [1.0, -4.0, 2.0, 3.0, 0.0]
    assert adjusted(logits, [0, 2], [1, 2, 2, 2], repetition_penalty=0.5) == [4.0, -1.0, 8.0, 3.0, 0.0]


def test_presence_and_frequency_penalty_over_output_alone():
    logits = [1.0, 1.0, 1.0, 1.0]
    output = [1, 2, 2, 2]
    assert adjusted(logits, [0, 0], output, presence_penalty=0.5) == [1.0, 0.5, 0.5, 1.0]
    assert adjusted(logits, [0, 0], output, frequency_penalty=0.5) == [1.0, 0.5, -0.5, 1.0]
    assert adjusted(logits, [0, 0], output, presence_penalty=1.0, frequency_penalty=-0.5) == [1.0, 0.5, 1.5, 1.0]
    assert adjusted(logits, [0, 1], [], presence_penalty=9.0, frequency_penalty=9.0) == logits


def test_order_of_penalties_bias_processors_and_min_tokens():
    """Each step sees the result of the one before: (4 / 2 - 1 + 10) * 3, and EOS held back after all."""
    seen = []

    def triple(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((ids, logits.tolist()))
        return logits * 3

    result = adjusted(
        [4.0, 1.0, 5.0], [0], [0], {2}, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 10.0},
        logits_processors=[triple], min_tokens=5,
    )  # fmt: skip
    assert result == [33.0, 3.0, -INF]
    assert seen == [([0], [11.0, 1.0, 5.0])]


def test_processors_run_in_order_and_cannot_touch_the_models_logits():
    def in_place(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        ids.append(99)
        return logits.add_(1)

    row = Row(SamplingParams(logits_processors=[in_place, lambda ids, x: x * 10]), token_ids=[1])
    logits = torch.tensor([1.0, 2.0])
    assert Sampler().edited(logits, row).tolist() == [20.0, 30.0]
    assert logits.tolist() == [1.0, 2.0] and row.token_ids == [1]


@pytest.mark.parametrize("produced", [0, 1, 2, 3])
def test_min_tokens_holds_back_eos_and_stop_ids(produced: int):
    result = adjusted([1.0] * 4, [0], [0] * produced, {1}, min_tokens=2, stop_token_ids=[2], max_tokens=9)
    assert result == ([1.0, -INF, -INF, 1.0] if produced < 2 else [1.0] * 4)


def test_min_tokens_holds_back_no_ignored_eos_and_nothing_where_nothing_ends():
    assert adjusted([1.0] * 4, eos={1}, min_tokens=2, stop_token_ids=[2], ignore_eos=True) == [1.0, 1.0, -INF, 1.0]
    assert adjusted([1.0] * 4, eos=set(), min_tokens=2) == [1.0] * 4
    beyond = {0, 77, -1}  # ids that the logits do not have; -1 is what some configs write for "none"
    assert adjusted([1.0] * 4, eos=beyond, min_tokens=2) == [-INF, 1.0, 1.0, 1.0]


PENALTIES = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3)


def from_nothing(logits: torch.Tensor, row: Row) -> torch.Tensor:
    return penalised(logits, TokenCounts.of_prompt(row.prompt_token_ids, logits).after(row.token_ids), row.params)


def test_penalties_count_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    """Over an answer each token goes to the device once, and the result is that of counting all of them anew."""
    uploads, upload = [], sampling.upload
    generator = torch.Generator().manual_seed(3)
    row, sampler = Row(PENALTIES, prompt_token_ids=[1, 2, 2], token_ids=[]), Sampler()
    for step in range(200):
        logits = torch.randn(1, 12, generator=generator) * 3
        expected = [from_nothing(logits[0], row).argmax().item()]
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "upload", lambda ids, *rest: uploads.append(len(ids)) or upload(ids, *rest))
            assert sampler(logits, [row]).token_ids == expected
            assert sampler(logits, [row]).token_ids == expected  # a step that is computed again
        row.token_ids.append(step * step % 12)
    assert sum(uploads) == 3 + 199  # the prompt once, and every token but the last
    assert torch.equal(sampler.edited(logits[0], row), from_nothing(logits[0], row))


def test_penalties_of_rows_that_come_and_go():
    rows = [Row(PENALTIES, prompt_token_ids=[i], token_ids=[]) for i in range(5)]
    sampler = Sampler()
    for step in range(30):
        present = [row for i, row in enumerate(rows) if (step + i) % 3]
        logits = torch.randn(len(present), 6, generator=torch.Generator().manual_seed(step))
        expected = [from_nothing(logits[i], row).argmax().item() for i, row in enumerate(present)]
        assert sampler(logits, present).token_ids == expected
        assert len(sampler._counts) == len(present)  # nothing is kept of those that are gone
        for row, token in zip(present, expected, strict=True):
            row.token_ids.append(token)


def test_an_interrupt_while_penalties_are_counted_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch):
    row, sampler, logits = Row(PENALTIES, [0], [1, 1]), Sampler(), torch.tensor([[3.0, 4.0, 3.5]])
    expected, after = sampler(logits, [row]).token_ids, TokenCounts.after
    row.token_ids += [2, 1]

    def interrupted(counts: TokenCounts, output_ids: list[int]) -> TokenCounts:
        after(counts, output_ids)
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenCounts, "after", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler(logits, [row])
    monkeypatch.setattr(TokenCounts, "after", after)
    assert torch.equal(sampler.edited(logits[0], row), from_nothing(logits[0], row)) and expected == [2]


def test_bias_decides_for_greedy_too():
    sampler, logits = Sampler(), torch.tensor([[1.0, 2.0, 3.0]] * 3)
    biases = [{0: 5.0}, {2: -INF}, None]
    rows = [Row(SamplingParams(logit_bias=bias)) for bias in biases]
    assert sampler(logits, rows).token_ids == [0, 1, 2]


# -- rows that cannot be sampled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_of_the_model_that_is_not_a_number(bad: float, temperature: float):
    logits = torch.tensor([[0.0, 1.0, 9.0], [0.0, bad, 9.0], [9.0, 1.0, 0.0]])
    rows = [Row(SamplingParams(temperature=temperature, top_p=0.9, top_k=2)) for _ in range(3)]
    samples = Sampler()(logits, rows)
    assert set(samples.errors) == {1} and "the model's largest logit" in str(samples.errors[1])
    assert samples.token_ids[0] == 2 and samples.token_ids[2] == 0


@pytest.mark.parametrize(
    "params",
    [dict(repetition_penalty=1e-38), dict(frequency_penalty=-3e38), dict(logit_bias={1: 3e38}, presence_penalty=-3e38)],
)
def test_parameters_that_leave_float32_are_not_taken_for_the_models_overflow(params: dict):
    samples = Sampler()(torch.tensor([[0.0, 9.0, 1.0]] * 2), [Row(SamplingParams(**params), [1], [1, 1]), Row(FREE)])
    assert set(samples.errors) == {0} and samples.token_ids[1] == 1
    assert "penalties" in str(samples.errors[0]) and "the model" not in str(samples.errors[0])


def test_a_processor_cannot_hide_that_the_model_overflowed():
    row = Row(SamplingParams(logits_processors=[lambda ids, logits: torch.nan_to_num(logits)]))
    samples = Sampler()(torch.tensor([[NAN, 1.0]]), [row])
    assert "the model overflowed" in str(samples.errors[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_where_everything_is_banned(temperature: float):
    banned = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(3), -INF), top_p=0.5, min_p=0.1)
    free = SamplingParams(temperature=temperature)
    samples = Sampler()(torch.tensor([[0.0, 1.0, 99.0]] * 3), [Row(free), Row(banned), Row(free)])
    assert set(samples.errors) == {1} and "banned" in str(samples.errors[1])
    assert samples.token_ids[0] == samples.token_ids[2] == 2


def test_banned_tokens_are_never_drawn():
    logits = torch.tensor([[50.0, -INF, 0.0, 50.0]] * 200)
    params = SamplingParams(temperature=5.0, logit_bias={0: -INF})
    assert set(Sampler()(logits, [Row(params, seed=s) for s in range(200)]).token_ids) <= {2, 3}


def raising(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("the caller's own mistake")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raising, "own mistake"),
        (lambda ids, x: None, "returned None"),
        (lambda ids, x: x[:1], r"shape \[1\]"),  # would broadcast
        (lambda ids, x: x.tolist(), "must return the logits"),
        (lambda ids, x: x * NAN, "largest logit"),
    ],
)
def test_a_processor_that_fails_ends_its_own_row(processor, message: str):
    rows = [Row(SamplingParams()), Row(SamplingParams(logits_processors=[processor])), Row(SamplingParams())]
    samples = Sampler()(torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), rows)
    assert set(samples.errors) == {1} and (samples.token_ids[0], samples.token_ids[2]) == (1, 0)
    with pytest.raises(type(samples.errors[1]), match=message):
        raise samples.errors[1]


# -- random numbers ---------------------------------------------------------------------------------------------------


def largest_gap(sample: torch.Tensor) -> float:
    """Kolmogorov-Smirnov: the largest distance of the sample's distribution from the uniform one."""
    ordered, n = sample.sort().values, len(sample)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())


N = 20_000
BOUND = 1.95 / math.sqrt(N)  # exceeded by one uniform sample in a thousand (Kolmogorov's distribution)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (range(N), [0] * N),  # neighbouring seeds
        ([7] * N, range(N)),  # one request's positions
        (range(0, 1024 * N, 1024), [3] * N),
        ([-s for s in range(N)], [1] * N),
        ([s << 40 for s in range(N)], [0] * N),
    ],
)
def test_uniform_numbers_are_uniform(seeds, positions):
    sample = uniform(list(seeds), [0] * N, list(positions))
    assert sample.dtype == torch.float64 and sample.min() >= 0 and sample.max() < 1
    assert largest_gap(sample) < BOUND
    assert len(set(sample.tolist())) == N


STEPS = [(0, 0, 1), (1, 0, 0), (1, 0, -1), (1, 0, 1), (0, 1, 0), (1, -1, 0), (0, 1, -1), (-1, 1, 1)]


@pytest.mark.parametrize("step", STEPS)
def test_neighbours_are_independent(step: tuple[int, int, int]):
    """Of (seed, index, position) and its neighbour: pairs fill the square evenly, chi-squared over 8 x 8 cells."""
    seeds, positions = range(1000, 1000 + N), [50] * N
    first = uniform(list(seeds), [2] * N, positions)
    second = uniform([s + step[0] for s in seeds], [2 + step[1]] * N, [p + step[2] for p in positions])
    cells = torch.bincount((first * 8).long() * 8 + (second * 8).long(), minlength=64).double()
    assert ((cells - N / 64) ** 2 / (N / 64)).sum().item() < 103.4  # 63 degrees of freedom, one in a thousand


def test_a_number_is_the_same_in_any_company():
    seeds, indices, positions = [3, 2**63 + 5, -1, 2**64 - 1, 2**70], [0, 1, 2, 2, 1023], [0, 5, 9, 9, 1]
    together = uniform(seeds, indices, positions).tolist()
    assert together == [uniform([s], [i], [p]).item() for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together[2] == together[3]  # seeds are taken modulo 2**64
    assert len(set(together)) == 4


def test_seeds_and_indices_share_no_numbers():
    """Four answers with seed 7 and four with seed 8, over 2,000 positions: all of their numbers differ."""
    streams = [(seed, index) for seed in (7, 8) for index in range(4)]
    numbers = [uniform([s] * 2000, [i] * 2000, range(2000)).tolist() for s, i in streams]
    assert len({u for stream in numbers for u in stream}) == 8 * 2000
    rows = [Row(SamplingParams(temperature=1.5), token_ids=[0], seed=s, index=i) for s, i in streams]
    answers = [Sampler()(torch.zeros(1, 50_000), [row]).token_ids[0] for row in rows]
    assert answers == [int(50_000 * stream[1]) for stream in numbers] and len(set(answers)) == 8


def test_mixing_function_is_splitmix64():
    """The first outputs of the published generator from state 0: mix(0 + golden), mix(2 golden + ...)."""
    from minfer_lib.generation.sampling import _mix64

    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    states = [(i * golden) & mask for i in range(3)]
    signed = torch.tensor([s - (1 << 64) if s >> 63 else s for s in states])
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [x & mask for x in _mix64(signed).tolist()] == published


def test_inverse_cdf_by_hand():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.5, 3), (1 - 2**-53, 3)]:
        assert inverse_cdf(probs, torch.tensor([u], dtype=torch.float64)).item() == token
    never_behind = torch.tensor([[1e-8, 1.0, 0.0]])  # rounding must not reach the impossible last token
    assert inverse_cdf(never_behind, torch.tensor([1.0], dtype=torch.float64)).item() == 1


# -- whole sampler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=5),
        dict(temperature=1.5, top_p=0.8),
        dict(temperature=1.2, min_p=0.2),
        dict(temperature=0.9, top_k=7, top_p=0.9, min_p=0.05, repetition_penalty=1.3, logit_bias={2: 1.0}),
    ],
)
def test_frequencies_of_tokens_match_their_probabilities(params: dict):
    """Bernstein's inequality: a count strays further than this from its mean once in 10^6, for each of 12 tokens."""
    logits = torch.linspace(-1.5, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    row = Row(SamplingParams(**params), prompt_token_ids=[2, 5])
    edited = Sampler().edited(logits, row)
    probs = filtered_logits(edited[None], [row.params]).softmax(-1)[0]
    draws = 8000
    rows = [Row(row.params, [2, 5], seed=seed) for seed in range(draws)]
    counts = Counter(Sampler()(logits.expand(draws, -1), rows).token_ids)
    for token, p in enumerate(probs.tolist()):
        log = math.log(2e6)
        allowed = math.sqrt(2 * draws * p * (1 - p) * log) + log
        assert abs(counts[token] - draws * p) <= (allowed if p > 0 else 0)


def test_every_position_draws_a_number_of_its_own():
    """One request over 400 positions of a flat distribution of 10: each token comes, about as often as the others."""
    rows = [Row(SamplingParams(temperature=1.0), token_ids=[0] * position, seed=5) for position in range(400)]
    drawn = Sampler()(torch.zeros(400, 10), rows).token_ids
    assert drawn == [int(u * 10) for u in uniform([5] * 400, [0] * 400, range(400)).tolist()]
    counts = torch.bincount(torch.tensor(drawn), minlength=10)
    assert ((counts - 40.0) ** 2 / 40).sum() < 27.9  # chi-squared of 9 degrees of freedom, one in a thousand


parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-7, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-INF, -2.0, 3.0]), max_size=4),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3, 99]),
)
tokens = st.lists(st.integers(0, 9), max_size=5)
rows_of_a_batch = st.lists(
    st.builds(Row, parameters, tokens.filter(bool), tokens, st.integers(-(2**70), 2**70), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


# -- to the last bit --------------------------------------------------------------------------------------------------


def test_uniform_numbers_are_those_of_splitmix64():
    """Against the published algorithm in whole numbers of Python: what a seed has drawn once, it draws for ever."""
    mask = 2**64 - 1

    def mixed(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    assert mixed(0) == 0xE220A8397B1DCDAF  # the first number of its reference implementation
    seeds, indices, positions = [0, 1, -1, 2**63, 2**70 + 5, 3], [0, 0, 1, 2, 7, 1], [0, 9, 3, 1000, 0, 2]
    right = [
        (mixed((mixed((mixed(seed & mask) + index) & mask) + position) & mask) >> 11) / 2**53
        for seed, index, position in zip(seeds, indices, positions, strict=True)
    ]
    assert uniform(seeds, indices, positions).tolist() == right


def test_sums_over_a_large_vocabulary_are_exact_enough():
    """In float32 the running sum of 300,001 equal probabilities would be off by many tokens."""
    vocab = 300_001
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    drawn = inverse_cdf(torch.full((3, vocab), 1 / vocab), u)
    assert (drawn - u * vocab).abs().max() <= 1
    kept = filter_top_p(torch.zeros(1, vocab), torch.tensor([0.5], dtype=torch.float64)).isfinite().sum()
    assert abs(int(kept) - 0.5 * vocab) <= 2


def test_probabilities_need_not_add_up_to_one():
    assert inverse_cdf(torch.tensor([[0.25, 0.25]] * 2), torch.tensor([0.4, 0.6], dtype=torch.float64)).tolist() == [
        0,
        1,
    ]
    assert inverse_cdf(torch.full((1, 3), torch.nan), torch.tensor([0.5], dtype=torch.float64)).item() < 3


def test_rows_do_not_share_their_maximum():
    logits = torch.tensor([[0.0, -3.0], [9.0, 8.5]])
    assert filter_min_p(logits, torch.tensor([0.5, 0.5])).tolist() == [[0.0, -INF], [9.0, 8.5]]


def test_a_row_without_top_p_keeps_all_beside_one_that_has_it():
    logits = torch.tensor([[0.0, -30.0], [0.0, -30.0]])
    assert filter_top_p(logits, torch.tensor([1.0, 0.9], dtype=torch.float64)).tolist() == [[0.0, -30.0], [0.0, -INF]]


def test_small_logits_are_divided_by_the_repetition_penalty():
    logits = torch.tensor([0.5, -0.5, 0.5])
    counts = TokenCounts.of_prompt([0, 1], logits)
    assert penalised(logits, counts, SamplingParams(repetition_penalty=2.0)).tolist() == [0.25, -1.0, 0.5]


def test_a_processor_may_compute_in_another_precision():
    logits = torch.tensor([1.0, 2.0])
    for dtype in (torch.float64, torch.float16):
        assert processed(lambda ids, row, dtype=dtype: row.to(dtype), [], logits).dtype == torch.float32


@settings(max_examples=150, deadline=None)
@given(rows=rows_of_a_batch, weights_seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 1.0, 1e4]))
def test_a_batch_gives_each_row_what_it_gets_alone(rows: list[Row], weights_seed: int, scale: float):
    generator = torch.Generator().manual_seed(weights_seed)
    logits = torch.randint(-4, 5, (len(rows), 10), generator=generator) * scale / 4  # whole numbers: many ties
    before, sampler = logits.clone(), Sampler({0, 3})
    together = sampler(logits, rows)
    assert torch.equal(logits, before)
    for i, row in enumerate(rows):
        alone = sampler(logits[i : i + 1], [row])
        assert (i in together.errors) == (0 in alone.errors)
        if i not in together.errors:
            assert together.token_ids[i] == alone.token_ids[0]
            assert together.logprobs[i] == alone.logprobs[0]


@settings(max_examples=100, deadline=None)
@given(
    probs=st.lists(st.integers(1, 50), min_size=2, max_size=12),
    p=st.floats(0.001, 0.999),
    k=st.integers(0, 12),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_equal_the_definitions(probs: list[int], p: float, k: int, min_p: float):
    """Against loops over sorted (probability, id) pairs in exact fractions, as the papers define the filters."""
    from fractions import Fraction

    weights = {i: Fraction(w, sum(probs)) for i, w in enumerate(probs)}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))[: k or None]
    total, mass, nucleus = sum(weights[i] for i in ranked), Fraction(0), []
    for i in ranked:
        if mass / total >= Fraction(p) - Fraction(1, 10**5):
            if mass / total < Fraction(p) + Fraction(1, 10**5):
                return  # too close to the edge for float32 to be held to it
            break
        nucleus.append(i)
        mass += weights[i]
    threshold = Fraction(min_p) * weights[ranked[0]]
    if any(abs(weights[i] - threshold) < Fraction(1, 10**5) * weights[ranked[0]] for i in nucleus):
        return
    expected = {i for i in nucleus if weights[i] >= threshold}
    assert kept([float(w) for w in weights.values()], top_k=k, top_p=p, min_p=min_p) == expected


def test_greedy_takes_the_first_of_equals_with_and_without_edits():
    logits = torch.tensor([[1.0, 5.0, 5.0]])
    assert Sampler()(logits, [Row(SamplingParams())]).token_ids == [1]
    assert Sampler()(logits, [Row(SamplingParams(min_tokens=1))]).token_ids == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_and_logits_are_left_alone(dtype: torch.dtype):
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.25, 0.5, 4.0]], dtype=dtype)
    before = logits.clone()
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.5, logit_bias={0: 2.0}, logprobs=2)
    samples = Sampler()(logits, [Row(params, [1], [2])] * 2)
    assert torch.equal(logits, before) and logits.dtype == dtype and samples.errors == {}
    reference = Sampler()(before.float(), [Row(params, [1], [2])] * 2)
    assert samples == reference


DEAREST = dict(
    temperature=1.0, top_p=0.9, min_p=0.001, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1,
    logit_bias={3: 1.0}, min_tokens=9, logprobs=5,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_torchs_default_dtype_makes_no_difference(dtype: torch.dtype):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 3

    def draw() -> sampling.Samples:
        rows = [Row(SamplingParams(**DEAREST, top_k=k), [1, 2], [3, 4, 3], seed=k) for k in (0, 5, 50, 7)]
        return Sampler({0})(logits, rows)

    expected = draw()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert draw() == expected
    finally:
        torch.set_default_dtype(before)


def test_many_rows_are_drawn_slice_by_slice(monkeypatch: pytest.MonkeyPatch):
    def draw() -> sampling.Samples:
        banned = SamplingParams(logit_bias=dict.fromkeys(range(50), -INF))
        kinds = [SamplingParams(**DEAREST), FREE, SamplingParams(temperature=2.0), banned]
        rows = [Row(kinds[i % 4], [i], [i + 1], seed=i) for i in range(23)]
        return Sampler({0})(torch.randn(23, 50, generator=torch.Generator().manual_seed(1)), rows)

    at_once = draw()
    assert set(at_once.errors) == set(range(3, 23, 4))
    for values in (1, 100, 390, 1150):  # slices of 1, 2, 7 and 23 rows
        monkeypatch.setattr(sampling, "SLICE_VALUES", values)
        slices = draw()
        assert (slices.token_ids, slices.logprobs) == (at_once.token_ids, at_once.logprobs)
        assert slices.errors.keys() == at_once.errors.keys()


# -- one copy a step ------------------------------------------------------------------------------------------------


MIXES = {
    "greedy": ([FREE] * 3, 1),
    "sampling": ([SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1)], 1),
    "both": ([FREE, SamplingParams(temperature=1.0, top_p=0.5), FREE, SamplingParams(temperature=1.0, top_k=3)], 1),
    "all": ([FREE, SamplingParams(**DEAREST), SamplingParams(**DEAREST, top_k=4)], 2),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_step_asks_the_device_once(mix: str, monkeypatch: pytest.MonkeyPatch):
    """On the meta device nothing can be looked at: whatever decided by a value of a tensor would raise."""
    copies = []

    class Recorder:
        def __init__(self, tensor: torch.Tensor) -> None:
            assert tensor.device.type == "meta"
            copies.append(tuple(tensor.shape))

    monkeypatch.setattr(sampling, "Download", Recorder)
    params, expected = MIXES[mix]
    Sampler({0}).launch(torch.zeros(len(params), 50, device="meta"), [Row(p, [1], [2, 3]) for p in params])
    assert len(copies) == expected and copies[0] == (len(params), 3)


def test_a_launched_step_can_be_read_later():
    """Two steps are launched before either is read; rows that have gone on meanwhile do not change the first."""
    sampler, row = Sampler(), Row(SamplingParams(temperature=1.0, logprobs=1), seed=4)
    logits = torch.randn(2, 1, 30, generator=torch.Generator().manual_seed(0))
    alone = [Sampler()(logits[i], [Row(row.params, token_ids=[0] * i, seed=4)]) for i in range(2)]
    first = sampler.launch(logits[0], [row])
    row.token_ids.append(0)
    second = sampler.launch(logits[1], [row])
    assert [second.result(), first.result()] == alone[::-1] and first.result() == alone[0]


@pytest.mark.parametrize(("rows", "vocab"), [(16, 64_000), (90, 64_000), (1, 250_000), (300, 500), (2, 20)])
@pytest.mark.parametrize("top_k", [0, 50, 10**6])
def test_the_sampler_needs_no_more_memory_than_it_says(rows: int, vocab: int, top_k: int):
    params = SamplingParams(**DEAREST, top_k=top_k)
    batch = [Row(params, [1, 2], [3, 4], seed=i) for i in range(rows)]
    logits = torch.zeros(rows, vocab)  # flat, so that top_p has to sort all of it
    with PeakMemory() as peak:
        Sampler({0})(logits, batch)
    assert 0.05 * Sampler.peak_bytes(rows, vocab) < peak.peak_bytes <= Sampler.peak_bytes(rows, vocab) or vocab < 100
    with PeakMemory() as greedy:
        Sampler({0})(logits, [Row(FREE)] * rows)
    assert greedy.peak_bytes < 100 * rows + 1000  # no copy of the logits


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own():
    probs = [0.1, 0.2, 0.3, 0.4]
    params = SamplingParams(temperature=1e-9, logit_bias={0: 50.0}, top_k=1, repetition_penalty=3.0, logprobs=2)
    samples = Sampler()(torch.tensor([probs]).log(), [Row(params, [3])])
    assert samples.token_ids == [0]  # by the bias, and reported although it is not among the two most likely
    assert list(samples.logprobs[0]) == [3, 2, 0]
    assert list(samples.logprobs[0].values()) == pytest.approx([math.log(0.4), math.log(0.3), math.log(0.1)], abs=1e-6)


def test_logprobs_of_none_of_the_chosen_alone_and_of_all():
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().expand(4, -1)
    rows = [Row(SamplingParams(logprobs=k)) for k in (None, 0, 1, 99)]
    none, zero, one, everything = Sampler()(logits, rows).logprobs
    assert none is None and list(zero) == [2] and list(one) == [2] and list(everything) == [2, 1, 0]
    assert sum(map(math.exp, everything.values())) == pytest.approx(1.0, abs=1e-6)


# -- where the rows are drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "place"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu"), ("mps:0", "cpu")])
def test_apples_gpus_have_no_float64(device: str, place: str):
    assert sampling.sampling_device(torch.device(device)) == torch.device(place)


def test_the_sampler_moves_the_logits_there(monkeypatch: pytest.MonkeyPatch):
    """The meta device in the place of one that cannot compute: nothing could be drawn on it."""
    asked = []

    def elsewhere(device: torch.device) -> torch.device:
        asked.append(device)
        return torch.device("meta")

    monkeypatch.setattr(sampling, "sampling_device", elsewhere)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        Sampler()(torch.zeros(1, 4), [Row(SamplingParams())])
    assert asked == [torch.device("cpu")]
