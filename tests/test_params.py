"""`SamplingParams`: what it refuses, that it says why, and what it makes of what it accepts."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from minfer_lib import MinferError, SamplingParams
from minfer_lib.errors import InvalidParameter, integer, number, shown
from minfer_lib.generation.params import MAX_N

NAN, INF = math.nan, math.inf

REFUSED = [
    *[("max_tokens", bad) for bad in (0, -1, 1.5, 3.0, "3", None, True, NAN)],
    *[("min_tokens", bad) for bad in (-1, 0.5, None, "0", True)],
    *[("temperature", bad) for bad in (-0.1, NAN, INF, "0.7", None, True, 10**400, torch.tensor([1.0, 2.0]))],
    *[("top_k", bad) for bad in (-1, 1.5, "5", None, True)],
    *[("top_p", bad) for bad in (0, 0.0, -0.5, 1.0001, NAN, INF, "0.9", None)],
    *[("min_p", bad) for bad in (-0.1, 1.1, NAN, "0.1", None)],
    *[("repetition_penalty", bad) for bad in (0, -1.0, NAN, INF, None)],
    *[("presence_penalty", bad) for bad in (NAN, INF, -INF, "1", None)],
    *[("frequency_penalty", bad) for bad in (NAN, INF, -INF, "1", None)],
    *[("logit_bias", bad) for bad in (5, {"a": 1}, {-1: 1.0}, {1.5: 1.0}, {1: NAN}, {1: INF}, {1: None}, {True: 1.0})],
    *[("logit_bias", bad) for bad in ({1: 10**400}, {1: 1e39}, {1: -1e39}, {1: "1"})],
    *[(name, bad) for name in ("presence_penalty", "frequency_penalty") for bad in (1e39, -1e39)],
    *[("temperature", bad) for bad in (1e39, 1e300)],
    ("repetition_penalty", 1e39),
    *[("stop", bad) for bad in ("", [""], ["a", ""], 5, ["a", 5], [None], b"a", [b"a"])],
    *[("stop_token_ids", bad) for bad in (5, [-1], ["a"], "ab", [1.0], [None], [True])],
    *[("ignore_eos", bad) for bad in (1, 0, None, "yes")],
    *[("seed", bad) for bad in (1.5, "1", True, NAN)],
    *[("logprobs", bad) for bad in (-1, 1.5, True, "5")],
    *[("n", bad) for bad in (0, -1, 1.5, None, True, MAX_N + 1, 10**9)],
    *[("logits_processors", bad) for bad in (5, [5], ["f"], len, {1: len}, 0, False)],
    *[("logit_bias", bad) for bad in (0, False)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}-{value!r:.20}" for name, value in REFUSED])
def test_refuses(name: str, value: object):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} must be ")
    assert isinstance(caught.value, MinferError) and isinstance(caught.value, ValueError)


def test_refuses_min_tokens_over_max_tokens():
    with pytest.raises(InvalidParameter, match="min_tokens must be at most max_tokens, which is 4; it is 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


def test_the_message_repeats_what_was_asked():
    with pytest.raises(InvalidParameter, match=r"^temperature must be 0 \(greedy\) or more; it is -1\.0\.$"):
        SamplingParams(temperature=-1.0)
    with pytest.raises(InvalidParameter, match=r"it is \['a', ''\]"):
        SamplingParams(stop=["a", ""])
    with pytest.raises(InvalidParameter, match=r"it is \{1: nan\}"):
        SamplingParams(logit_bias={1: NAN})
    with pytest.raises(InvalidParameter, match=r"an integer from 1 to 1024; it is 1000000000\."):
        SamplingParams(n=10**9)
    with pytest.raises(InvalidParameter, match=r"float32, up to 3\.4e\+38; it is 1e\+39"):
        SamplingParams(presence_penalty=1e39)


LONG = [list(range(10**6)), "x" * 10**6, 10**4000, 10**5000, torch.zeros(10**4)]


@pytest.mark.parametrize("value", LONG, ids=["list", "text", "digits", "too many digits", "tensor"])
def test_a_message_holds_no_more_than_a_line_of_a_value(value: object):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(temperature=value)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_a_value_is_shown_on_one_line_and_cut():
    assert shown([1, 2]) == "[1, 2]" and shown("a\nb") == r"'a\nb'"
    assert shown("x" * 100, limit=10) == "'xxxxxxxxx... (102 characters)"
    assert shown(10**5000) == "a value of type int"  # of more digits than Python writes


def test_numbers_of_other_libraries_and_none_else():
    for value in (3, np.int64(3), np.int32(3), torch.tensor(3)):
        assert integer("x", value) == 3 and type(integer("x", value)) is int
    for value in (0.5, np.float32(0.5), torch.tensor(0.5)):
        assert number("x", value) == 0.5 and type(number("x", value)) is float
    assert number("x", np.int64(2)) == 2.0
    for bad in (True, 3.0, "3", None, [3], np.float32(3)):
        with pytest.raises(InvalidParameter, match=r"^x must be an integer; it is "):
            integer("x", bad)
    for bad in (True, "3", b"3", None, [3], NAN, INF, 10**400, 3j, torch.zeros(2)):
        with pytest.raises(InvalidParameter, match=r"^x must be a finite number; it is "):
            number("x", bad)
    with pytest.raises(InvalidParameter, match=r"^x must be an integer of 1 or more \(blocks\); it is 0\.$"):
        integer("x", 0, 1, hint="blocks")


def test_defaults_are_greedy_and_change_nothing():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.n, params.seed, params.logprobs) == (128, 0.0, 1, None, None)
    assert not params.edits_logits and not params.penalises
    assert params.stop == params.stop_token_ids == params.logits_processors == () and params.logit_bias == {}


@pytest.mark.parametrize(
    "edits",
    [
        dict(repetition_penalty=1.1), dict(presence_penalty=-1), dict(frequency_penalty=0.1), dict(logit_bias={0: 1}),
        dict(logits_processors=[lambda ids, logits: logits]),
    ],
)  # fmt: skip
def test_whatever_touches_logits_counts_as_an_edit(edits: dict):
    assert SamplingParams(**edits).edits_logits
    assert SamplingParams(**edits).penalises == any("penalty" in name for name in edits)


@pytest.mark.parametrize(
    "limit",
    [dict(temperature=0), dict(temperature=3e38), dict(top_p=1), dict(top_p=1e-9), dict(min_p=0), dict(min_p=1),
     dict(presence_penalty=-3e38)],
)  # fmt: skip
def test_limits_of_ranges_are_inside(limit: dict):
    (name, value), params = next(iter(limit.items())), SamplingParams(**limit)
    assert getattr(params, name) == value and isinstance(getattr(params, name), float)


def test_takes_numbers_of_other_libraries():
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=torch.tensor(7), top_k=np.int32(2),
        stop_token_ids=np.array([4, 5]), logit_bias={np.int64(1): np.float32(2.0)},
    )  # fmt: skip
    assert (params.max_tokens, params.temperature, params.seed, params.top_k) == (3, 0.5, 7, 2)
    assert params.stop_token_ids == (4, 5) and params.logit_bias == {1: 2.0}
    plain = [params.max_tokens, params.seed, params.top_k, *params.stop_token_ids, *params.logit_bias]
    assert all(type(value) is int for value in plain) and type(params.temperature) is float


def test_one_stop_string_or_several():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert set(SamplingParams(stop={"a", "b"}).stop) == {"a", "b"}
    assert SamplingParams(stop=[]).stop == SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == (3, 1)


def test_a_bias_may_ban():
    assert SamplingParams(logit_bias={3: -INF}).logit_bias == {3: -INF}


def test_never_changes():
    bias, stop, ids = {1: 1.0}, ["a"], [2]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[2], stop[0], ids[0] = 5.0, "b", 3
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 1.0}, ("a",), (2,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = -1.0
    assert dataclasses.replace(params, temperature=0.5).stop == ("a",)
    with pytest.raises(InvalidParameter):
        dataclasses.replace(params, temperature=-0.5)


def test_equal_parameters_are_one_key():
    one = SamplingParams(logit_bias={1: 1.0, 2: 2.0}, stop=["a"], stop_token_ids=[3], temperature=0.5)
    same = SamplingParams(logit_bias={2: 2, 1: 1}, stop="a", stop_token_ids=[3], temperature=0.5)
    other = SamplingParams(logit_bias={1: 1.0}, stop="a", stop_token_ids=[3], temperature=0.5)
    assert one == same != other and hash(one) == hash(same) and len({one, same, other}) == 2
    assert one.edits_logits and hash(one) == hash(same)  # what was asked of one of them makes no difference
    assert hash(SamplingParams()) == hash(SamplingParams())


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), lambda p: dataclasses.replace(p, n=1),
     lambda p: SamplingParams(**dataclasses.asdict(p))],
)  # fmt: skip
def test_parameters_can_be_copied_and_sent_to_another_process(copied):
    params = SamplingParams(logit_bias={1: 1.0, 2: -INF}, stop=["a"], seed=3)
    again = copied(params)
    assert again == params and hash(again) == hash(params) and again.logit_bias == {1: 1.0, 2: -INF}
