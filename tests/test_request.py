"""From what a caller passes to requests, and a request's life from token to token, without a model."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import LanguageModel, SamplingParams
from minfer_lib.errors import InvalidParameter, InvalidPrompt, PromptTooLong
from minfer_lib.generation.prompts import make_requests, request_ids, resolve_max_model_len
from minfer_lib.generation.request import Request, RequestMetrics

LIMIT = 20


def make(lm: LanguageModel, prompts, params=None, max_model_len: int = LIMIT) -> list[Request]:
    return make_requests(lm, prompts, params, max_model_len=max_model_len, now=1.0, ids=request_ids())


def ids_of(requests: list[Request]) -> list[list[int]]:
    return [request.prompt_token_ids for request in requests]


@pytest.fixture(scope="module")
def without_tokenizer(tiny: LanguageModel) -> LanguageModel:
    return dataclasses.replace(tiny, tokenizer=None)


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hi", [[104, 105]]),
        (["hi", "a"], [[104, 105], [97]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1, 2]], [[97], [1, 2]]),
        ((p for p in ["a", "b"]), [[97], [98]]),
        (range(3), [[0, 1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
        ([torch.tensor([1, 2]), torch.tensor([3])], [[1, 2], [3]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (list(torch.tensor([1, 2])), [[1, 2]]),
        ([], []),
        ([258], [[258]]),
    ],
)
def test_prompts_that_are_taken(tiny: LanguageModel, prompts, expected):
    result = ids_of(make(tiny, prompts))
    assert result == expected and all(type(i) is int for ids in result for i in ids)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "no tokens"),
        (["a", ""], "no tokens"),
        ([[]], "no tokens"),
        ([[1], []], "no tokens"),
        (5, "neither"),
        (None, "neither"),
        ([None], "neither"),
        (["a", 5], "neither"),
        ([1.5, 2], "neither"),
        ([[1, "a"]], "neither"),
        ([True, False], "neither"),
        (np.array([1.5]), "neither"),
        (b"ab", "neither"),
        ([b"ab"], "neither"),
        (bytearray(b"ab"), "neither"),
        ({"input_ids": [1, 2]}, "neither"),  # what a tokenizer returns: its keys are texts, but no prompts
        ([{"input_ids": [1, 2]}], "neither"),
        (torch.tensor(5), "neither"),
        ([[[1, 2]]], "neither"),
        ([259], "ids go from 0 to 258"),
        ([-1], "ids go from 0 to 258"),
        ([[0], [1, 2**70]], "ids go from 0 to 258"),
        ("half a pair \ud83d", "not valid Unicode"),
    ],
)
def test_prompts_that_are_refused(tiny: LanguageModel, prompts, message: str):
    with pytest.raises(InvalidPrompt, match=message) as caught:
        make(tiny, prompts)
    assert isinstance(caught.value, ValueError)


def test_limit_of_a_prompt(tiny: LanguageModel):
    assert [r.max_new_tokens for r in make(tiny, [[1] * (LIMIT - 2), [1] * (LIMIT - 1)])] == [2, 1]
    for length in (LIMIT, LIMIT + 1):
        with pytest.raises(PromptTooLong, match=rf"{length} tokens.* {LIMIT} tokens.* {LIMIT - 1}\. .*at most 2048"):
            make(tiny, [1] * length)


def test_text_for_a_model_without_a_tokenizer(without_tokenizer: LanguageModel):
    with pytest.raises(InvalidPrompt, match=r"no tokenizer.*0 to 258"):
        make(without_tokenizer, "hi")
    with pytest.raises(InvalidPrompt, match="no tokenizer"):
        without_tokenizer.chat_ids("hi")
    with pytest.raises(InvalidParameter, match="stop_token_ids"):
        make(without_tokenizer, [1], SamplingParams(stop="a"))
    assert without_tokenizer.decode([104]) == "" and ids_of(make(without_tokenizer, [104])) == [[104]]


# -- parameters -------------------------------------------------------------------------------------------------------


def test_one_set_of_parameters_for_all_or_one_each(tiny: LanguageModel):
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert [r.params for r in make(tiny, ["a", "b"], one)] == [one, one]
    assert [r.params for r in make(tiny, ["a", "b"], [one, two])] == [one, two]
    assert [r.params for r in make(tiny, "a", [two])] == [two]
    assert make(tiny, "a")[0].params == SamplingParams()
    assert [r.max_new_tokens for r in make(tiny, ["a", "bcd"], SamplingParams(max_tokens=18))] == [18, 17]


@pytest.mark.parametrize("params", [[SamplingParams()], [SamplingParams()] * 3, []])
def test_a_wrong_number_of_parameters(tiny: LanguageModel, params):
    with pytest.raises(InvalidParameter, match=f"{len(params)} SamplingParams were given for 2 prompts"):
        make(tiny, ["a", "b"], params)


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 1}, [None, None], [SamplingParams(), 0.7]])
def test_parameters_of_another_type(tiny: LanguageModel, params):
    with pytest.raises(InvalidParameter, match="SamplingParams"):
        make(tiny, ["a", "b"], params)


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={259: 1.0}), SamplingParams(stop_token_ids=[0, 259])])
def test_ids_that_the_model_does_not_have(tiny: LanguageModel, params: SamplingParams):
    with pytest.raises(InvalidParameter, match="names token 259, but ids of tiny-random go from 0 to 258"):
        make(tiny, "a", params)
    make(tiny, "a", SamplingParams(logit_bias={258: 1.0}, stop_token_ids=[258]))


def test_n_answers_are_consecutive_with_seeds_one_apart(tiny: LanguageModel):
    requests = make(tiny, ["a", "b"], [SamplingParams(n=3, seed=10), SamplingParams(n=2)])
    assert [(r.request_id, r.index) for r in requests] == [("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1)]
    assert [r.seed for r in requests[:3]] == [10, 11, 12] and requests[4].seed == requests[3].seed + 1
    requests[0].prompt_token_ids.append(5)  # each has lists of its own
    assert requests[1].prompt_token_ids == [97]


def test_without_a_seed_each_request_draws_one(tiny: LanguageModel):
    assert len({r.seed for r in make(tiny, ["a"] * 20)}) == 20


@pytest.mark.parametrize("limit", [1, 0, -5, 2049, 3.0, "20", True])
def test_engine_limits_that_are_refused(tiny: LanguageModel, limit):
    with pytest.raises(InvalidParameter, match="integer from 2 to 2048"):
        resolve_max_model_len(tiny, limit)


def test_engine_limits(tiny: LanguageModel):
    assert resolve_max_model_len(tiny, 2) == 2 and resolve_max_model_len(tiny, np.int64(2048)) == 2048
    assert resolve_max_model_len(dataclasses.replace(tiny, max_model_len=8192), None) == 2048
    assert resolve_max_model_len(dataclasses.replace(tiny, max_model_len=100), None) == 100
    assert resolve_max_model_len(dataclasses.replace(tiny, max_model_len=8192), 8192) == 8192


# -- a request's life -------------------------------------------------------------------------------------------------


def live(lm: LanguageModel, text: str | list[int], prompt: str | list[int] = "p", **params) -> tuple[Request, list]:
    """Feeds tokens to a request until it ends, one a second from 2.0 on; the request and its pieces."""
    params = dict(max_tokens=LIMIT) | params
    request = make(lm, prompt, SamplingParams(**params))[0]
    pieces = []
    tokens = lm.encode(text) if isinstance(text, str) else text
    for now, token in zip(itertools.count(2.0), tokens, strict=False):
        request.append(token, None, now)
        pieces.append(request.take_piece())
        if request.finished:
            break
    return request, pieces


def test_length(tiny: LanguageModel):
    request, pieces = live(tiny, "abcdef", max_tokens=3)
    assert (request.text, request.finish_reason, request.stop_reason) == ("abc", "length", None)
    assert [(p.text, p.token_ids, p.finish_reason) for p in pieces] == [
        ("a", [97], None), ("b", [98], None), ("c", [99], "length")
    ]  # fmt: skip


def test_eos_is_in_the_tokens_and_not_in_the_text(tiny: LanguageModel):
    request, pieces = live(tiny, [97, 258, 98])
    assert (request.text, request.token_ids) == ("a", [97, 258])
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert (pieces[-1].text, pieces[-1].token_ids, pieces[-1].finish_reason) == ("", [258], "stop")


def test_stop_id_is_named_and_not_in_the_text(tiny: LanguageModel):
    request, _ = live(tiny, "abc", stop_token_ids=[98])
    assert (request.text, request.token_ids, request.stop_reason) == ("a", [97, 98], 98)


@pytest.mark.parametrize("eos", [frozenset({0}), frozenset({0, 1, 2}), frozenset()])
def test_eos_may_be_zero_several_or_none(tiny: LanguageModel, eos: frozenset[int]):
    lm = dataclasses.replace(tiny, eos_ids=eos)
    for ending in (0, 1, 2, 258):
        request, _ = live(lm, [97, ending, 98], max_tokens=3)
        assert request.finish_reason == ("stop" if ending in eos else "length")
        assert request.token_ids == ([97, ending] if ending in eos else [97, ending, 98])


def test_ignored_eos(tiny: LanguageModel):
    request, _ = live(tiny, [97, 258, 98], ignore_eos=True, max_tokens=3)
    assert (request.text, request.finish_reason) == ("ab", "length")
    request, _ = live(tiny, [97, 258, 98], ignore_eos=True, stop_token_ids=[258])
    assert (request.finish_reason, request.stop_reason) == ("stop", 258)


def test_stop_string_over_tokens(tiny: LanguageModel):
    """vllm#3574 again, through a request: its tokens stay, its text never shows."""
    request, pieces = live(tiny, "abSTOPcd", stop=["STOP", "SX"])
    assert (request.text, request.stop_reason, request.finish_reason) == ("ab", "STOP", "stop")
    assert request.token_ids == list(b"abSTOP") and [p.text for p in pieces] == ["a", "b", "", "", "", ""]


def test_stop_string_that_comes_to_nothing(tiny: LanguageModel):
    request, pieces = live(tiny, "aSTxSTO", stop="STOP", max_tokens=7)
    assert request.text == "aSTxSTO" and [p.text for p in pieces] == ["a", "", "", "STx", "", "", "STO"]


def test_held_text_is_released_at_eos_and_stop_ids(tiny: LanguageModel):
    for last, params in ((258, {}), (33, dict(stop_token_ids=[33]))):
        request, pieces = live(tiny, [*b"aST", last], stop="STOP", **params)
        assert request.text == "aST" and pieces[-1].text == "ST" and request.stop_reason in (None, 33)


def test_held_text_is_released_on_abort_but_nothing_after_a_stop_string(tiny: LanguageModel):
    request, _ = live(tiny, "aST", stop="STOP")
    request.finish("abort", 9.0)
    assert (request.text, request.finish_reason) == ("aST", "abort")
    request, _ = live(tiny, "aSTOP", stop="STOP")
    request.finish("abort", 9.0)
    assert (request.text, request.finish_reason) == ("a", "stop")


def test_stop_string_inside_of_a_multibyte_text(tiny: LanguageModel):
    request, _ = live(tiny, "né你好", stop="你")
    assert (request.text, request.stop_reason, request.token_ids) == ("né", "你", list("né你".encode()))


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 5, 6])
def test_min_tokens_and_stop_strings(tiny: LanguageModel, min_tokens: int):
    """ "x" at tokens 2 and 5: one that completes within the first min_tokens tokens does not count."""
    request, _ = live(tiny, "axbbx", stop="x", min_tokens=min_tokens, max_tokens=6)
    expected = {0: "a", 1: "a", 2: "axbb", 3: "axbb", 4: "axbb"}.get(min_tokens)
    if expected is None:
        assert not request.finished and request.text == "axbbx"
    else:
        assert (request.text, request.stop_reason) == (expected, "x")


def test_min_tokens_and_stop_ids(tiny: LanguageModel):
    """The sampler holds them back; a caller's processor may force them all the same, and they do not end the answer."""
    request, _ = live(tiny, [97, 258, 98, 98], min_tokens=2, stop_token_ids=[98])
    assert request.token_ids == [97, 258, 98] and request.stop_reason == 98


def test_an_answer_that_ends_inside_a_character(tiny: LanguageModel):
    request, pieces = live(tiny, list("é你".encode())[:-1], max_tokens=4)
    assert request.text == "é" == "".join(p.text for p in pieces) and len(request.token_ids) == 4
    request, _ = live(tiny, [*"你".encode()[:2], 258])
    assert (request.text, request.finish_reason) == ("", "stop")


def test_a_finished_request_never_changes(tiny: LanguageModel):
    request, _ = live(tiny, [97, 258])
    before = dataclasses.replace(request.metrics), request.text, list(request.token_ids)
    for reason in ("abort", "timeout", "error", "length"):
        request.finish(reason, 99.0, error="late")
    assert (request.finish_reason, request.error) == ("stop", None)
    assert before == (request.metrics, request.text, request.token_ids)


def test_an_error_keeps_its_message(tiny: LanguageModel):
    request, _ = live(tiny, "ab")
    request.finish("error", 9.0, error="it broke")
    output = request.output()
    assert (output.finish_reason, output.error, output.text, output.token_ids) == ("error", "it broke", "ab", [97, 98])


def test_metrics(tiny: LanguageModel):
    request, _ = live(tiny, [97, 98, 99, 258])  # tokens at 2, 3, 4 and 5; it arrived at 1
    metrics = request.output().metrics
    metrics.first_scheduled = 1.25
    assert (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.e2e_s) == (0.25, 1.0, 1.0, 4.0)
    assert metrics.num_tokens == 4 and metrics.preemptions == 0
    request, _ = live(tiny, "a", max_tokens=1)
    assert request.metrics.tpot_s is None and request.metrics.ttft_s == 1.0
    nothing = RequestMetrics(arrival=0.0)
    assert nothing.queue_s is nothing.ttft_s is nothing.tpot_s is nothing.e2e_s is None


def test_logprobs_only_if_asked_for(tiny: LanguageModel):
    request = make(tiny, "a", SamplingParams(logprobs=1))[0]
    request.append(98, {98: -0.5}, 1.0)
    assert request.output().logprobs == [{98: -0.5}]
    assert live(tiny, "ab")[0].output().logprobs is None


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("abSTOP é你", max_size=12),
    stop=st.lists(st.sampled_from(["STOP", "TO", "b", "é你", "P ", "OP"]), max_size=3),
    min_tokens=st.integers(0, 6),
    limit=st.integers(6, 40),
)
def test_pieces_always_join_to_the_text(tiny, text: str, stop: list[str], min_tokens: int, limit: int):
    request = make(tiny, "p", SamplingParams(stop=stop, max_tokens=limit, min_tokens=min_tokens), max_model_len=60)[0]
    pieces = []
    for token in [*text.encode(), 258]:
        if not request.finished:
            request.append(token, None, 0.0)
            pieces.append(request.take_piece())
    if not request.finished:  # EOS came before min_tokens
        request.finish("abort", 0.0)
        pieces.append(request.take_piece())
    assert "".join(p.text for p in pieces) == request.text
    assert [t for p in pieces for t in p.token_ids] == request.token_ids
    assert [p.finish_reason is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
    shown = bytes(t for t in request.token_ids if t < 256).decode(errors="ignore")
    assert (
        shown == request.text if request.stop_reason is None else shown.startswith(request.text + request.stop_reason)
    )


def test_a_model_in_training_mode_is_refused(tiny):
    tiny.model.train()
    try:
        with pytest.raises(InvalidParameter, match=r"lm\.model\.eval\(\)"):
            make(tiny, [1, 2])
    finally:
        tiny.model.eval()
    assert make(tiny, [1, 2])
