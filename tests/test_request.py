"""A request's life from token to token, without a model."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import LanguageModel, SamplingParams
from minfer_lib.errors import InvalidParameter
from minfer_lib.generation.prompts import make_requests
from minfer_lib.generation.request import PieceReader, Request, RequestMetrics

LIMIT = 20


def make(lm: LanguageModel, prompts, params=None, max_model_len: int = LIMIT) -> list[Request]:
    return make_requests(lm, prompts, params, max_model_len=max_model_len, now=1.0, ids=map(str, itertools.count()))


# -- a request's life -------------------------------------------------------------------------------------------------


def live(lm: LanguageModel, text: str | list[int], prompt: str | list[int] = "p", **params) -> tuple[Request, list]:
    """Feeds tokens to a request until it ends, one a second from 2.0 on; the request and its pieces."""
    params = dict(max_tokens=LIMIT) | params
    request = make(lm, prompt, SamplingParams(**params))[0]
    reader, pieces = PieceReader(request), []
    tokens = lm.encode(text) if isinstance(text, str) else text
    for now, token in zip(itertools.count(2.0), tokens, strict=False):
        request.append(token, None, now)
        pieces.append(reader.take())
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
    reader, pieces = PieceReader(request), []
    for token in [*text.encode(), 258]:
        if not request.finished:
            request.append(token, None, 0.0)
            pieces.append(reader.take())
    if not request.finished:  # EOS came before min_tokens
        request.finish("abort", 0.0)
        pieces.append(reader.take())
    assert "".join(p.text for p in pieces) == request.text
    assert [t for p in pieces for t in p.token_ids] == request.token_ids
    assert [p.finish_reason is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
    shown = bytes(t for t in request.token_ids if t < 256).decode(errors="ignore")
    assert (
        shown == request.text if request.stop_reason is None else shown.startswith(request.text + request.stop_reason)
    )


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("abSTOP é你", max_size=12),
    stop=st.lists(st.sampled_from(["STOP", "TO", "b", "é你", "P ", "OP"]), max_size=3),
    min_tokens=st.integers(0, 6),
    broken=st.sets(st.integers(0, 40)),
)
def test_what_is_derived_from_the_tokens_again_is_the_same(
    tiny, text, stop: list[str], min_tokens: int, broken: set[int]
):
    """After a step that was broken off just behind its token, whatever else it had done by then."""
    params = SamplingParams(stop=stop, max_tokens=40, min_tokens=min_tokens)
    whole, restored = (make(tiny, "p", params, max_model_len=60)[0] for _ in range(2))
    readers = [PieceReader(whole), PieceReader(restored)]
    for position, token in enumerate([*text.encode(), 258]):
        if whole.finished:
            break
        whole.append(token, None, 0.0)
        if position in broken:
            restored.token_ids.append(token)
            restored.restore(0.0)
        else:
            restored.append(token, None, 0.0)
        assert (whole.finish_reason, whole.stop_reason) == (restored.finish_reason, restored.stop_reason)
        assert whole.text == restored.text and readers[0].take() == readers[1].take()


def test_every_reader_has_a_place_of_its_own(tiny: LanguageModel):
    request = make(tiny, "p", SamplingParams(max_tokens=3))[0]
    first, second = PieceReader(request), PieceReader(request)
    request.append(97, None, 0.0), request.append(98, None, 0.0)
    assert first.take().text == "ab" and not first.ended
    request.append(99, None, 0.0)
    assert (first.take().text, second.take().text) == ("c", "abc") and first.ended and second.ended


def test_tokens_of_prompt_and_answer(tiny: LanguageModel):
    request = make(tiny, [1, 2, 3], SamplingParams(max_tokens=9))[0]
    for token in (4, 5, 6):
        request.append(token, None, 0.0)
    assert request.num_tokens == 6
    for begin, end in itertools.combinations(range(7), 2):
        assert request.tokens(begin, end) == [1, 2, 3, 4, 5, 6][begin:end]


def test_many_answers_cost_no_square(tiny: LanguageModel):
    """All answers to a prompt hold one and the same list of each other."""
    few, many = (make(tiny, "p", SamplingParams(n=n)) for n in (8, 1024))
    assert len(many) == 1024 and all(request.siblings is many[0].siblings for request in many)
    assert len(many[0].siblings) == 1024 and few[0].siblings is not many[0].siblings
    with pytest.raises(InvalidParameter, match=r"n must be .* from 1 to 1024"):
        SamplingParams(n=10**9)
