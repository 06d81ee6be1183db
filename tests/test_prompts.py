"""From what a caller passes to checked requests, without running a model."""

import copy
import dataclasses
import itertools
import threading

import numpy as np
import pytest
import torch

from minfer_lib import LanguageModel, SamplingParams
from minfer_lib.errors import InvalidParameter, InvalidPrompt, PromptTooLong
from minfer_lib.generation.prompts import conversations, make_requests, one_prompt, resolve_max_model_len
from minfer_lib.generation.request import Request
from minfer_lib.generation.sampling import Sampler

LIMIT = 20


def make(lm: LanguageModel, prompts, params=None, max_model_len: int = LIMIT) -> list[Request]:
    ids = map(str, itertools.count())
    return make_requests(lm, prompts, params, max_model_len=max_model_len, now=1.0, ids=ids)


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
        ([torch.tensor([1]), torch.tensor([3])], [[1], [3]]),
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
        ({1, 2}, "neither"),  # in no order
        ([{1, 2}], "neither"),
        ([[True]], "neither"),
        (torch.tensor([True]), "neither"),
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


def test_n_answers_are_consecutive_and_have_one_seed(tiny: LanguageModel):
    requests = make(tiny, ["a", "b"], [SamplingParams(n=3, seed=10), SamplingParams(n=2)])
    assert [(r.request_id, r.index) for r in requests] == [("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1)]
    assert [r.seed for r in requests[:3]] == [10, 10, 10] and requests[4].seed == requests[3].seed != 10
    requests[0].prompt_token_ids.append(5)  # each has lists of its own
    assert requests[1].prompt_token_ids == [97]


def test_the_answers_to_one_prompt_share_the_list_of_themselves(tiny: LanguageModel):
    """8,000 answers that each listed the others took half a gigabyte."""
    requests = make(tiny, ["a", "b", "c"], [SamplingParams(n=3), SamplingParams(n=2), SamplingParams()])
    assert requests[0].siblings == requests[:3] and requests[3].siblings == requests[3:5] and not requests[5].siblings
    assert requests[0].siblings is requests[1].siblings is requests[2].siblings


def test_without_a_seed_each_request_draws_one(tiny: LanguageModel):
    assert len({r.seed for r in make(tiny, ["a"] * 20)}) == 20


@pytest.mark.parametrize("limit", [1, 0, -5, 2049, 3.0, "20", True])
def test_engine_limits_that_are_refused(tiny: LanguageModel, limit):
    with pytest.raises(InvalidParameter, match=r"^max_model_len must be an integer from 2 to 2048"):
        resolve_max_model_len(tiny, limit)


def test_engine_limits(tiny: LanguageModel):
    assert resolve_max_model_len(tiny, 2) == 2 and resolve_max_model_len(tiny, np.int64(2048)) == 2048
    assert resolve_max_model_len(dataclasses.replace(tiny, max_model_len=8192), None) == 2048
    assert resolve_max_model_len(dataclasses.replace(tiny, max_model_len=100), None) == 100
    assert resolve_max_model_len(dataclasses.replace(tiny, max_model_len=8192), 8192) == 8192


# -- special tokens as stop strings ---------------------------------------------------------------------------------


def test_a_stop_string_that_is_a_special_token_is_a_stop_id_too(tiny: LanguageModel):
    params = SamplingParams(stop=["<|im_start|>", "x"], stop_token_ids=[7])
    request = make(tiny, "a", params)[0]
    assert request.params.stop_token_ids == (7, 257) and request.params.stop == ("<|im_start|>", "x")
    assert params.stop_token_ids == (7,)
    both = SamplingParams(stop="<|im_end|>", stop_token_ids=[258])
    assert make(tiny, "a", both)[0].params.stop_token_ids == (258,)
    held_back = SamplingParams(stop="<|im_start|>", min_tokens=2)
    logits = Sampler({258}).edited(torch.zeros(259), make(tiny, "a", held_back)[0])
    assert logits.isinf().nonzero().flatten().tolist() == [257, 258]


@pytest.mark.parametrize("stop", ["<|im_start|>user", "\n<|im_start|>", "<|im_start|><|im_end|>"])
def test_a_stop_string_with_a_special_token_inside_is_refused_with_the_id_to_use(tiny: LanguageModel, stop: str):
    with pytest.raises(InvalidParameter, match=r"^stop must .*'<\|im_start\|>', which .*stop_token_ids=\[257\]"):
        make(tiny, "a", SamplingParams(stop=["x", stop]))


def test_a_part_of_a_special_token_is_text_like_any_other(tiny: LanguageModel):
    params = SamplingParams(stop=["<|im_", "im_start"])
    assert make(tiny, "a", params)[0].params is params


# -- processors -------------------------------------------------------------------------------------------------------


class Letters:
    """Forces "A", then "B", and so on: by counting its own calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[65 + self.calls] = 0.0
        self.calls += 1
        return forced


class Locked(Letters):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_each_answer_has_processors_of_its_own(tiny: LanguageModel):
    """n = 2 gave "ABDF" and "CEGH", two prompts "ACEG" and "BDFH"."""
    letters = Letters()
    params = SamplingParams(n=2, logits_processors=[letters], max_tokens=4)
    requests, sampler = make(tiny, ["a", "b"], params), Sampler()
    for _ in range(4):
        samples = sampler(torch.zeros(len(requests), 259), requests)
        for request, token in zip(requests, samples.token_ids, strict=True):
            request.token_ids.append(token)
    assert [bytes(request.token_ids) for request in requests] == [b"ABCD"] * 4
    assert letters.calls == 0 and params.logits_processors == (letters,)


def test_two_processors_of_one_answer_may_share_a_state(tiny: LanguageModel):
    class Sharing(Letters):
        def __init__(self, state: list[int]) -> None:
            self.state = state

    state: list[int] = []
    first, second = make(tiny, "a", SamplingParams(n=2, logits_processors=[Sharing(state), Sharing(state)]))
    states = [p.state for request in (first, second) for p in request.params.logits_processors]
    assert states[0] is states[1] and states[2] is states[3] and len({id(s) for s in (state, *states)}) == 3


def test_functions_are_not_copied_and_nothing_is_without_processors(tiny: LanguageModel):
    def same(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    assert make(tiny, "a", SamplingParams(n=2, logits_processors=[same]))[1].params.logits_processors == (same,)
    params = SamplingParams(n=2)
    assert [r.params is params for r in make(tiny, ["a", "b"], params)] == [True] * 4


def test_a_processor_that_cannot_be_copied_is_refused(tiny: LanguageModel):
    with pytest.raises(InvalidParameter, match=r"^logits_processors must be .*copied.*Locked.*TypeError.*lock"):
        make(tiny, "a", SamplingParams(logits_processors=[Locked()]))
    Locked.__deepcopy__ = lambda self, memo: Locked()
    try:
        assert make(tiny, "a", SamplingParams(logits_processors=[Locked()]))
    finally:
        del Locked.__deepcopy__


# -- all or nothing -------------------------------------------------------------------------------------------------


def test_nothing_is_made_before_all_is_checked(tiny: LanguageModel):
    taken = []
    ids = (taken.append(i) or str(i) for i in itertools.count())
    for prompts, params in (
        (["a", [259]], None),
        (["a", "b" * 30], None),
        (["a", "b"], [SamplingParams(), SamplingParams(stop_token_ids=[259])]),
        (["a", "b"], [SamplingParams(), SamplingParams(logits_processors=[Locked()])]),
    ):
        with pytest.raises((InvalidPrompt, InvalidParameter)):
            make_requests(tiny, prompts, params, max_model_len=LIMIT, now=0.0, ids=ids)
    assert not taken


def test_a_huge_text_is_refused_before_it_is_tokenised(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    tokenised = []
    monkeypatch.setattr(LanguageModel, "encode", lambda self, text: tokenised.append(text) or [0] * len(text))
    with pytest.raises(PromptTooLong, match=r"20,000,000 characters \(the longest token has 13\).* 20 tokens"):
        make(tiny, "x" * 20_000_000)
    assert not tokenised
    with pytest.raises(PromptTooLong, match="1280 tokens"):  # it could be 20 tokens of 64 characters
        make(tiny, "x" * 64 * LIMIT)
    assert len(tokenised) == 1


def test_one_prompt():
    assert one_prompt("ab", "f()", "") == ["ab"] and one_prompt([1, 2], "f()", "") == one_prompt([[1, 2]], "f()", "")
    for several in (["a", "b"], [[1], [2]], []):
        with pytest.raises(InvalidPrompt, match=rf"f\(\) takes one prompt; {len(several)} were given. Do so."):
            one_prompt(several, "f()", "Do so.")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        ([USER], [[USER]]),
        ((USER, USER), [[USER, USER]]),
        ([[USER], [USER, USER]], [[USER], [USER, USER]]),
        (([USER], "hi"), [[USER], "hi"]),
        ([], []),
        (USER, [USER]),
        (None, [None]),
        ([USER, None], [[USER, None]]),
    ],
)
def test_one_conversation_or_several(messages, expected):
    before = copy.deepcopy(messages)
    assert conversations(messages) == expected and messages == before


def test_a_model_in_training_mode_is_refused(tiny):
    tiny.model.train()
    try:
        with pytest.raises(InvalidParameter, match=r"lm\.model\.eval\(\)"):
            make(tiny, [1, 2])
    finally:
        tiny.model.eval()
    assert make(tiny, [1, 2])
