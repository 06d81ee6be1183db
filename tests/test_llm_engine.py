"""`LLMEngine`: in any company, at any chunk size, whatever breaks, each request gets the answer it gets alone.

Over slots and over pages alike: what is special to pages is in test_paged_engine.py.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from engines import (
    ANSWERS,
    KINDS,
    LONGEST,
    MIX,
    acting,
    alone,
    answers,
    assert_idle,
    break_forward,
    by_id,
    each,
    free,
    raising,
    run,
    skip_without_backend,
    tokens,
    watched,
)
from families import PROMPTS, hf_generate, saying

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, SamplingParams, StreamPiece, load_model
from minfer_lib.attention import support
from minfer_lib.errors import (
    GenerationFailed,
    InvalidParameter,
    InvalidPrompt,
    ModelNotFound,
    PromptTooLong,
    UnsupportedModel,
)
from minfer_lib.generation.request import Request
from minfer_lib.models import hf_compat

Family = Callable[[str], LanguageModel]
Make = Callable[..., LLMEngine]

FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def maker(kind: str) -> Make:
    """make(lm, ...): a watched engine of a kind."""
    skip_without_backend(KINDS[kind])
    return lambda lm, **options: watched(lm, **(KINDS[kind] | options))


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return maker(request.param)


@pytest.fixture(params=["slots", "pages, compiled"])
def make_roomy(request: pytest.FixtureRequest) -> Make:
    """Engines that have room for all, for tests that say who runs when."""
    return maker(request.param)


# -- the same tokens in any mix ---------------------------------------------------------------------------------------


def test_the_mix_is_worth_testing(family: Family):
    for name in FAMILIES:
        expected = answers(family(name))
        assert len({tuple(answer[:5]) for answer in expected}) == len(MIX)  # else a mix-up could hide
        assert all(len(answer) == count >= 6 for answer, count in zip(expected, ANSWERS, strict=True))


BUDGETS = [(1, 1), (1, 5), (3, 2), (3, 8), (16, 3), (16, 8), (1000, 1), (1000, 8)]


@pytest.mark.parametrize(("budget", "seqs"), BUDGETS)
def test_any_budget_and_any_number_at_once(family: Family, budget: int, seqs: int, make: Make):
    lm = family("llama")
    engine = make(lm, max_num_seqs=seqs, max_num_batched_tokens=budget)
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert tokens(engine.generate(MIX[::-1], each()[::-1])) == answers(lm)[::-1]  # slots are used again, by others
    assert_idle(engine)


@pytest.mark.parametrize(
    ("kind", "budget", "seqs"),
    [
        ("slots", 1, 3),
        ("slots", 1000, 8),
        ("slots, compiled", 3, 8),
        ("slots, compiled", 16, 3),
        ("pages", 16, 3),
        ("pages, compiled", 3, 8),
        ("pages, compiled", 1000, 8),
        ("few pages", 11, 5),
    ],
)
@pytest.mark.parametrize("name", FAMILIES[1:])
def test_families(family: Family, name: str, kind: str, budget: int, seqs: int):
    lm = family(name)
    engine = maker(kind)(lm, max_num_seqs=seqs, max_num_batched_tokens=budget)
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert_idle(engine)


@pytest.mark.parametrize("blocks", [1, 2, 3, 9])
def test_slots_and_requests_at_once_may_differ(family: Family, blocks: int):
    lm = family("mistral")
    engine = watched(lm, num_blocks=blocks, max_num_seqs=4, max_num_batched_tokens=9)
    engine.add_request(MIX[4], free(6), request_id="first", priority=9)
    engine.step()
    engine.add_request(MIX[0], free(6), request_id="urgent", priority=-3)  # may find no slot: must wait, not block
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert by_id(run(engine)) == {"first": alone(lm, MIX[4], 6), "urgent": alone(lm, MIX[0], 6)}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("budget", "seqs"), [(4, 3), (32, 8)])
def test_requests_join_while_others_decode(family: Family, name: str, budget: int, seqs: int, make: Make):
    lm = family(name)
    engine = make(lm, max_num_seqs=seqs, max_num_batched_tokens=budget, trace=True)
    outputs, waiting = [], list(range(len(MIX)))
    while waiting or engine.has_unfinished():
        if waiting and len(engine.steps) % 3 == 0:
            index = waiting.pop(0)
            engine.add_request(MIX[index], each()[index], request_id=f"r{index}")
        outputs += engine.step()
    assert by_id(outputs) == {f"r{i}": answer for i, answer in enumerate(answers(lm))}
    mixed = [step for step in engine.steps if 0 < step.num_decodes < len(step.chunks)]
    assert len(mixed) >= 5  # prompts were computed beside decodes, in the same step
    assert_idle(engine)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_early_eos(family: Family, name: str, make: Make):
    lm = family(name)
    said = answers(lm)
    eos_ids = frozenset({said[0][5], said[4][3], said[6][6]})
    expected = [alone(lm, prompt, 12, eos_ids)[:count] for prompt, count in zip(MIX, ANSWERS, strict=True)]
    assert sum(len(short) < len(long) for short, long in zip(expected, said, strict=True)) >= 3
    engine = make(dataclasses.replace(lm, eos_ids=eos_ids), max_num_seqs=3, max_num_batched_tokens=11)
    outputs = engine.generate(MIX, [free(count, ignore_eos=False) for count in ANSWERS])
    assert tokens(outputs) == expected
    assert [o.finish_reason for o in outputs] == ["stop" if o.token_ids[-1] in eos_ids else "length" for o in outputs]


def test_priorities_change_the_order_and_no_token(family: Family, make: Make):
    lm = family("llama")
    engine = make(lm, max_num_seqs=2, max_num_batched_tokens=6)
    for i, (prompt, params) in enumerate(zip(MIX, each(), strict=True)):
        engine.add_request(prompt, params, request_id=str(i), priority=-i / 2)
    outputs = run(engine)
    assert by_id(outputs) == {str(i): answer for i, answer in enumerate(answers(lm))}
    first = {int(o.request_id): o.metrics.first_token for o in outputs}
    assert sorted(first, key=first.__getitem__) == list(range(len(MIX)))[::-1]


@pytest.mark.parametrize("step", [0, 1, 4, 9])
@pytest.mark.parametrize("budget", [3, 100])
def test_aborts_leave_the_others_as_they_were(family: Family, step: int, budget: int, make: Make):
    """At every moment somebody waits, somebody is in the middle of his prompt, and somebody decodes."""
    lm = family("mistral")
    engine = make(lm, max_num_seqs=4, max_num_batched_tokens=budget)
    ids = [engine.add_request(prompt, params) for prompt, params in zip(MIX, each(), strict=True)]
    outputs = [o for _ in range(step) for o in engine.step()]
    victims = ids[1::2]
    for victim in victims:
        engine.abort(victim)
        engine.abort(victim)  # without effect
    engine.abort("nobody")
    assert engine.has_unfinished()
    outputs += run(engine)
    assert sorted(by_id(outputs)) == sorted(ids)
    for output in outputs:
        expected = answers(lm)[int(output.request_id)]
        if output.finish_reason == "abort":
            assert output.request_id in victims
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected and output.finish_reason == "length"


def test_where_an_abort_finds_a_request(family: Family, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=2, max_num_batched_tokens=4)
    for name, prompt in [("decodes", MIX[1]), ("prefills", MIX[4]), ("waits", MIX[0])]:
        engine.add_request(prompt, free(10), request_id=name)
    for _ in range(4):
        assert engine.step() == []
    states = {r.request_id: (r.num_computed, len(r.token_ids)) for r in engine.scheduler.running}
    assert states == {"decodes": (6, 4), "prefills": (10, 0)} and len(engine.scheduler.waiting) == 1
    for name in ("decodes", "prefills", "waits"):
        engine.abort(name)
    outputs = engine.step()
    assert by_id(outputs) == {"decodes": alone(lm, MIX[1], 4), "prefills": [], "waits": []}
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert outputs[0].metrics.finished is not None and not engine.has_unfinished()
    assert_idle(engine)


def test_time_limits_by_an_injected_clock(family: Family, make_roomy: Make):
    lm, now = family("llama"), [100.0]
    engine = make_roomy(lm, max_num_seqs=2, max_num_batched_tokens=4, clock=lambda: now[0])
    limits = {"decodes": 3.5, "prefills": 2.0, "waits": 1.0, "at once": 0, "has time": 1e9, "has more": None}
    prompts = [MIX[1], MIX[4], MIX[0], MIX[3], MIX[2], MIX[5]]
    for (name, limit), prompt in zip(limits.items(), prompts, strict=True):
        engine.add_request(prompt, free(10), request_id=name, timeout_s=limit)
    ended: dict[str, float] = {}
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        ended |= {o.request_id: now[0] for o in outputs if o.request_id not in ended}
        now[0] += 1.0
    assert {o.request_id for o in outputs if o.finish_reason == "timeout"} == set(list(limits)[:4])
    # seen at the beginning of the first step after it
    assert [ended[name] for name in list(limits)[:4]] == [104.0, 102.0, 101.0, 100.0]
    said = by_id(outputs)
    assert said["decodes"] == alone(lm, MIX[1], 4) and said["prefills"] == said["waits"] == said["at once"] == []
    assert said["has time"] == alone(lm, MIX[2], 10) and said["has more"] == alone(lm, MIX[5], 10)
    assert_idle(engine)


def test_time_limits_in_a_mix(family: Family, make: Make):
    lm, now = family("llama"), [0.0]
    engine = make(lm, max_num_seqs=4, max_num_batched_tokens=30, clock=lambda: now[0])
    for i, prompt in enumerate(MIX):
        engine.add_request(prompt, free(ANSWERS[i]), request_id=str(i), timeout_s=[None, 2, 4, 6][i % 4])
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        now[0] += 1
    assert_idle(engine)
    assert {o.finish_reason for o in outputs} == {"length", "timeout"} and len(outputs) == 8
    for output in outputs:
        assert output.token_ids == answers(lm)[int(output.request_id)][: len(output.token_ids)]


def test_smollm2(smollm2: LanguageModel, make: Make):
    prompts = [smollm2.chat_ids("What is the capital of France?"), smollm2.encode("The three primary colours are red,")]
    engine = make(smollm2, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=128)
    stream = engine.stream(prompts[0], SamplingParams(max_tokens=12))
    said = list(next(stream).token_ids)
    engine.add_request(prompts[1], SamplingParams(max_tokens=8))
    for piece in stream:
        said += piece.token_ids
    assert said == alone(smollm2, prompts[0], 12, smollm2.eos_ids)
    assert tokens(run(engine)) == [alone(smollm2, prompts[1], 8, smollm2.eos_ids)]


def test_inside_and_outside_of_inference_mode(tiny: LanguageModel, make: Make):
    with torch.inference_mode():
        engine = make(tiny)
        stream = engine.stream("ab", free())
        said = list(next(stream).token_ids)
    said += next(stream).token_ids
    with torch.inference_mode():
        said += [t for piece in stream for t in piece.token_ids]
    assert said == engine.generate("ab", free())[0].token_ids == hf_generate(tiny, [97, 98], 8)


@pytest.mark.parametrize("seqs", [1, 3])
def test_bfloat16_stays_close_whatever_shares_the_row(seqs: int, make_roomy: Make):
    """Tokens may differ there; logits of the same tokens, fed step by step, must not differ by more than rounding."""
    lm = load_model("tiny-random", dtype="bfloat16", device="cpu")
    wide = copy.deepcopy(lm.model).float()
    sequences = [list(range(40, 62)), list(range(90, 120)), [5, 200, 7] * 4]
    engine = make_roomy(lm, max_num_seqs=seqs, max_num_batched_tokens=7)
    launch, compared = engine.runner.sampler.launch, 0

    def compare(logits: torch.Tensor, requests: list[Request]) -> object:
        nonlocal compared
        for row, request in enumerate(requests):
            ids = request.prompt_token_ids + request.token_ids
            with torch.no_grad():
                exact = wide(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert (logits[row].float() - exact).abs().max() < 0.15 * exact.abs().max()
            compared += 1
        return launch(logits, requests)

    engine.runner.sampler.launch = compare
    outputs = engine.generate([ids[:-8] for ids in sequences], [saying(ids[-8:]) for ids in sequences])
    assert tokens(outputs) == [ids[-8:] for ids in sequences] and compared == 24


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2, 500])
def test_seeded_sampling_is_the_same_alone_and_in_company(tiny: LanguageModel, budget: int, make: Make):
    prompts = ["one", "another one", "x", "a fourth that is longer"]
    params = [SamplingParams(temperature=1.3, top_p=0.9, seed=s, max_tokens=9, ignore_eos=True) for s in range(4)]
    engine = make(tiny, max_num_seqs=3, max_num_batched_tokens=budget)
    single = [
        LLMEngine(tiny, max_model_len=64).generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]
    assert tokens(engine.generate(prompts, params)) == single
    assert tokens(engine.generate(prompts[::-1], params[::-1])) == single[::-1]
    mixed = engine.generate([*prompts, "greedy"], [*params, free(9)])
    assert tokens(mixed[:4]) == single and mixed[4].token_ids == hf_generate(tiny, list(b"greedy"), 9)


def test_logprobs_are_the_same_alone_and_in_company(family: Family, make: Make):
    lm = family("llama")
    params = [free(count, logprobs=k) for count, k in zip(ANSWERS, [0, 3, None, 1, 5, 2, None, 4], strict=True)]
    together = make(lm, max_num_seqs=5, max_num_batched_tokens=9).generate(MIX, params)
    engine = make(lm)
    for output, prompt, one in zip(together, MIX, params, strict=True):
        single = engine.generate(prompt, one)[0]
        assert output.token_ids == single.token_ids
        if one.logprobs is None:
            assert output.logprobs is single.logprobs is None
            continue
        assert len(output.logprobs) == len(output.token_ids)
        for token, mine, its in zip(output.token_ids, output.logprobs, single.logprobs, strict=True):
            assert token in mine and len(mine) == max(1, one.logprobs) and mine == pytest.approx(its, abs=1e-4)


def test_n_answers(tiny: LanguageModel, make_roomy: Make):
    hot = dict(temperature=2.0, seed=7)
    engine = make_roomy(tiny, max_num_seqs=4, max_num_batched_tokens=5)
    outputs = engine.generate(["ab", "c"], free(n=3, **hot))
    assert [(o.request_id, o.index) for o in outputs] == [(r, i) for r in "01" for i in range(3)]
    single = tokens(CachedEngine(tiny).generate(["ab", "c"], free(n=3, **hot)))  # one after the other
    assert tokens(outputs) == single and len({tuple(t) for t in single}) == 6
    assert engine.generate("ab", free(**hot))[0].token_ids == single[0]  # the first is what one answer would be

    name = engine.add_request("ab", free(n=3, **hot))
    outputs = run(engine)
    assert {o.index: o.token_ids for o in outputs} == dict(enumerate(single[:3]))
    assert {o.request_id for o in outputs} == {name}

    pieces = list(engine.stream("ab", free(n=3, **hot)))
    assert [[t for p in pieces if p.index == i for t in p.token_ids] for i in range(3)] == single[:3]
    assert [p.index for p in pieces] != sorted(p.index for p in pieces)  # they run at the same time

    name = engine.add_request("ab", free(n=3, **hot))
    engine.step(), engine.step()
    engine.abort(name)  # all three
    assert [o.finish_reason for o in engine.step()] == ["abort"] * 3
    assert_idle(engine)


def test_equal_prompts_do_not_disturb_each_other(family: Family, make: Make):
    lm = family("gpt_oss")
    engine = make(lm, max_num_seqs=3)
    assert tokens(engine.generate([MIX[0]] * 5, free(10))) == [alone(lm, MIX[0], 10)] * 5


# -- streams ----------------------------------------------------------------------------------------------------------


class Reader:
    """What one stream says."""

    def __init__(self, stream: Iterator[StreamPiece]) -> None:
        self.stream, self.token_ids, self.text, self.reasons = stream, [], "", []

    def read(self) -> bool:
        piece = next(self.stream, None)
        if piece is None:
            return False
        assert not self.reasons, "a piece after the last"
        assert piece.token_ids or piece.text or piece.finish_reason
        self.token_ids += piece.token_ids
        self.text += piece.text
        self.reasons += [piece.finish_reason] if piece.finish_reason else []
        return True


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 3, 3, 1, 0, 2], [2, 0]])
def test_streams_read_in_any_order(family: Family, order: list[int], make: Make):
    lm = family("mistral")
    engine = make(lm, max_num_seqs=3, max_num_batched_tokens=8)
    readers = [Reader(engine.stream(prompt, free(10))) for prompt in PROMPTS]
    for i in itertools.islice(itertools.cycle(order), 40):
        readers[i].read()
    for reader in readers:
        while reader.read():
            pass
    assert [reader.token_ids for reader in readers] == [alone(lm, prompt, 10) for prompt in PROMPTS]
    assert [reader.reasons for reader in readers] == [["length"]] * 4
    assert_idle(engine)


def test_a_stream_is_generate_in_pieces(tiny: LanguageModel, make: Make):
    engine = make(tiny, max_num_batched_tokens=2)
    hot = free(temperature=1.0, seed=3)
    whole = engine.generate("abcde", hot)[0]
    pieces = list(engine.stream("abcde", hot))
    assert [p.token_ids for p in pieces] == [[t] for t in whole.token_ids]
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.finish_reason for p in pieces] == [None] * 7 + ["length"]
    assert {(p.request_id, p.index) for p in pieces} == {("1", 0)}


def test_somebody_elses_steps_lose_nothing_of_a_stream(family: Family, make: Make):
    lm = family("llama")
    engine = make(lm, max_num_seqs=4, max_num_batched_tokens=16)
    reader, ended = Reader(engine.stream(MIX[0], free(12))), Reader(engine.stream(MIX[1], free(6)))
    engine.add_request(MIX[2], free(9), request_id="mine")
    reader.read()
    outputs = [o for _ in range(3) for o in engine.step()]
    reader.read()
    assert len(reader.token_ids) > (3 if engine.ahead is None else 2)  # one piece holds what the steps of others added
    assert tokens(engine.generate([MIX[4], MIX[5]], free(6))) == [alone(lm, MIX[4], 6), alone(lm, MIX[5], 6)]
    while reader.read():
        pass
    assert reader.token_ids == alone(lm, MIX[0], 12) and reader.reasons == ["length"]
    outputs += run(engine)
    assert by_id(outputs) == {"mine": alone(lm, MIX[2], 9)}  # and nothing of the streams
    assert ended.read() and not ended.read()  # it ended long ago, unread
    assert ended.token_ids == alone(lm, MIX[1], 6) and ended.reasons == ["length"]


@pytest.mark.parametrize(
    "how", ["closed", "forgotten", "forgotten in a cycle", "never started", "never started, forgotten"]
)
def test_a_stream_that_is_left_leaves_nothing(family: Family, how: str, make: Make):
    lm = family("llama")
    engine = make(lm, max_num_seqs=2)
    engine.add_request(MIX[1], free(8), request_id="other")
    stream = engine.stream(MIX[0], free(12, n=2))
    if "never" not in how:
        next(stream), next(stream)
    if "cycle" in how:
        stream.myself = stream
    if "forgotten" in how:
        del stream
        gc.collect()
    else:
        stream.close()
        stream.close()
        assert list(stream) == []
    outputs = engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["other"] and engine.stats()["finished_abort"] == 2
    assert by_id(outputs + run(engine)) == {"other": alone(lm, MIX[1], 8)}


def test_a_stream_whose_request_is_aborted_says_so(family: Family, make: Make):
    lm = family("llama")
    engine = make(lm)
    stream = engine.stream(MIX[0], free(12))
    said = next(stream).token_ids + next(stream).token_ids
    engine.abort(stream.request_id)
    rest = list(stream)
    assert [p.finish_reason for p in rest] == ["abort"] and said == alone(lm, MIX[0], 2)
    assert run(engine) == []


def test_a_stream_is_checked_and_joins_when_it_is_called(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny)
    for prompt in ("", ["a", "b"], []):
        with pytest.raises(InvalidPrompt):
            engine.stream(prompt)
    with pytest.raises(PromptTooLong):
        engine.stream("x" * LONGEST)
    assert not engine.has_unfinished()
    stream = engine.stream("abc", free())
    assert engine.has_unfinished()
    while engine.has_unfinished():
        assert engine.step() == []
    assert [t for p in stream for t in p.token_ids] == hf_generate(tiny, list(b"abc"), 8)


def test_stop_strings_and_held_back_text(tiny: LanguageModel, make: Make):
    engine = make(tiny, max_num_seqs=2)
    params = saying(list(b"one STOP two"), stop=["STOP", "never"])
    output, other = engine.generate(["say: ", "b"], [params, free()])
    assert (output.text, output.stop_reason, output.token_ids) == ("one ", "STOP", list(b"one STOP"))
    assert "".join(p.text for p in engine.stream("say: ", params)) == "one " and len(other.token_ids) == 8
    output = engine.generate("say: ", saying(list("né".encode())[:-1]))[0]  # ends in the middle of a character
    assert output.text == "n" and output.finish_reason == "length"


# -- when something breaks --------------------------------------------------------------------------------------------


def test_a_processor_that_raises_ends_its_own_request_alone(family: Family, make: Make):
    lm = family("llama")
    engine = make(lm, max_num_seqs=3, max_num_batched_tokens=9)
    params = each()
    params[2] = free(7, logits_processors=[raising(RuntimeError("enough"), 3)])
    params[5] = free(9, logits_processors=[raising(ValueError("never"), 0)])
    outputs = engine.generate(MIX, params)
    for i, (output, expected) in enumerate(zip(outputs, answers(lm), strict=True)):
        said = {2: 3, 5: 0}.get(i, len(expected))
        assert output.token_ids == expected[:said]
        assert output.finish_reason == ("error" if i in (2, 5) else "length")
    assert outputs[2].error == "RuntimeError: enough" and outputs[5].error == "ValueError: never"
    assert_idle(engine)


@pytest.mark.parametrize("victim", ["itself", "another"])
def test_a_processor_that_aborts(family: Family, victim: str, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=3)
    processor = acting(lambda: engine.abort("b" if victim == "another" else "a"), 4)
    engine.add_request(MIX[0], free(10, logits_processors=[processor]), request_id="a")
    engine.add_request(MIX[1], free(10), request_id="b")
    outputs = {o.request_id: o for o in run(engine)}
    ended, other = ("b", "a") if victim == "another" else ("a", "b")
    assert outputs[ended].finish_reason == "abort" and outputs[other].finish_reason == "length"
    prompts = {"a": MIX[0], "b": MIX[1]}
    assert outputs[ended].token_ids == alone(lm, prompts[ended], 5)  # the step it came in is finished first
    assert outputs[other].token_ids == alone(lm, prompts[other], 10)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_processor_that_leaves_a_stream_in_the_middle_of_a_step(family: Family, how: str, make_roomy: Make):
    """Its request takes part in the step: it may only be taken out when the step is over."""
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=3, trace=True)
    streams = [engine.stream(MIX[1], free(10))]

    def leave() -> None:
        stream = streams.pop()
        if how == "close":
            stream.close()

    engine.add_request(MIX[0], free(10, logits_processors=[acting(leave, 4)]), request_id="a")
    assert by_id(run(engine)) == {"a": alone(lm, MIX[0], 10)}
    assert not streams and engine.stats()["finished_abort"] == 1


def test_a_processor_that_adds_a_request(family: Family, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=2)
    more = acting(lambda: engine.add_request(MIX[1], free(9), request_id="b"), 2)
    engine.add_request(MIX[0], free(10, logits_processors=[more]), request_id="a")
    assert by_id(run(engine)) == {"a": alone(lm, MIX[0], 10), "b": alone(lm, MIX[1], 9)}


@pytest.mark.parametrize("how", ["step", "generate", "stream"])
def test_a_step_inside_a_step_is_refused(family: Family, how: str, make_roomy: Make):
    """It would append the token of the same position twice."""
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=3)
    calls = {
        "step": engine.step,
        "generate": lambda: engine.generate(MIX[2], free()),
        "stream": lambda: next(engine.stream(MIX[2], free())),
    }
    engine.add_request(MIX[0], free(10, logits_processors=[acting(calls[how], 4)]), request_id="a")
    engine.add_request(MIX[1], free(10), request_id="b")
    outputs = {o.request_id: o for o in run(engine)}
    assert outputs["a"].finish_reason == "error" and "in the middle of a step" in outputs["a"].error
    assert outputs["a"].token_ids == alone(lm, MIX[0], 4) and outputs["b"].token_ids == alone(lm, MIX[1], 10)
    assert len(outputs) == 2


class Stop(BaseException):
    """Of a kind that nobody catches."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), Stop()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["processor", "hook", "forward", "forward, keys written"])
def test_an_interrupt_in_a_step_loses_nothing(family: Family, where: str, error: BaseException, make: Make):
    """`step` lets it through; with the next one everybody goes on as if it had not been."""
    lm = family("mistral")
    for at in (1, 3, 6):
        engine = make(lm, max_num_seqs=3, max_num_batched_tokens=10)
        params = each()
        if where == "processor":
            params[1] = free(12, logits_processors=[raising(error, at, once=True)])
        elif where == "hook":
            calls = itertools.count(1)
            hook = lm.model.model.layers[1].mlp.down_proj.register_forward_pre_hook(
                lambda *_, calls=calls, at=at: (_ for _ in ()).throw(error) if next(calls) == at else None
            )
        else:
            break_forward(engine, at, error, after_it="," in where)
        for i, prompt in enumerate(MIX):
            engine.add_request(prompt, params[i], request_id=str(i))
        outputs, interrupts = [], 0
        while engine.has_unfinished():
            try:
                outputs += engine.step()
            except type(error):
                interrupts += 1
        if where == "hook":
            hook.remove()
        assert interrupts == 1
        assert by_id(outputs) == {str(i): answer for i, answer in enumerate(answers(lm))}
        assert_idle(engine)


@pytest.mark.parametrize("where", ["processor", "forward"])
def test_an_interrupted_generate_returns_what_there_is(family: Family, where: str, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=2, max_num_batched_tokens=100)
    params = [free(3), free(8), free(8)]
    if where == "processor":
        params[1] = free(8, logits_processors=[raising(KeyboardInterrupt(), 5)])
    else:
        break_forward(engine, 6, KeyboardInterrupt())
    engine.add_request(MIX[3], free(9), request_id="waits")
    reader = Reader(engine.stream(MIX[5], free(9)))
    with pytest.warns(UserWarning, match="of 3 answers are complete, the rest is cut"):
        outputs = engine.generate(MIX[:3], params)
    for output, prompt in zip(outputs, MIX, strict=False):
        assert output.finish_reason in ("length", "abort") and output.metrics.finished is not None
        assert output.token_ids == alone(lm, prompt, len(output.token_ids))
    assert "abort" in [o.finish_reason for o in outputs]
    while reader.read():
        pass
    assert reader.token_ids == alone(lm, MIX[5], 9)  # others go on
    assert by_id(run(engine)) == {"waits": alone(lm, MIX[3], 9)}
    assert tokens(engine.generate(MIX, each())) == answers(lm)


def test_an_interrupted_stream_ends_and_the_others_go_on(family: Family, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm)
    stream, other = engine.stream(MIX[0], free(9)), Reader(engine.stream(MIX[1], free(9)))
    next(stream)
    break_forward(engine, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert list(stream) == []
    while other.read():
        pass
    assert other.token_ids == alone(lm, MIX[1], 9)
    assert_idle(engine)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate 5 GiB"), MemoryError("no more")])
@pytest.mark.parametrize("after_it", [False, True])
def test_out_of_memory_ends_the_requests_of_its_step(
    family: Family, error: Exception, after_it: bool, make_roomy: Make
):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=2, max_num_batched_tokens=100)
    break_forward(engine, 4, error, after_it)
    outputs = engine.generate(MIX[:4], free(8))
    assert [o.finish_reason for o in outputs] == ["error", "error", "length", "length"]
    assert tokens(outputs) == [alone(lm, p, n) for p, n in zip(MIX, [3, 3, 8, 8], strict=False)]
    for output in outputs[:2]:
        assert "out of memory" in output.error and str(error) in output.error
    assert_idle(engine)
    assert tokens(engine.generate(MIX, each())) == answers(lm)


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), InvalidParameter("a kernel's refusal")])
def test_a_model_that_breaks(family: Family, make: Make, error: Exception):
    lm = family("llama")
    engine = make(lm, max_num_seqs=2, max_num_batched_tokens=100)
    break_forward(engine, 5, error)
    with pytest.raises(GenerationFailed, match=rf"llama failed.*{type(error).__name__}: {error}") as caught:
        engine.generate(MIX[:4], [free(2), free(8), free(8), free(8)])
    assert caught.value.__cause__ is error
    assert [o.finish_reason for o in caught.value.outputs] == ["length", "error", "error", "length"]
    assert tokens(caught.value.outputs) == [alone(lm, p, n) for p, n in zip(MIX, [2, 4, 2, 8], strict=False)]
    assert_idle(engine)
    assert tokens(engine.generate(MIX, each())) == answers(lm)


@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("at", [1, 3, 8])
def test_failures_leave_nothing_wrong_to_find(family: Family, at: int, after_it: bool, make: Make):
    """What a failed step wrote stays in memory; nobody may be given it, by the prefix cache least of all."""
    lm = family("mistral")
    engine = make(lm, max_num_batched_tokens=30)
    break_forward(engine, at, RuntimeError("a shape is wrong"), after_it)
    with pytest.raises(GenerationFailed, match="a shape is wrong"):
        engine.generate(MIX, each())
    assert_idle(engine)
    break_forward(engine, 2, torch.OutOfMemoryError("none left"), after_it)
    outputs = engine.generate(MIX, each())
    assert "error" in {o.finish_reason for o in outputs}
    for output, expected in zip(outputs, answers(lm), strict=True):
        assert output.token_ids == expected[: len(output.token_ids)]
    assert_idle(engine)
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert_idle(engine)


def test_a_model_that_breaks_in_a_step_of_somebody_else(family: Family, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=3, max_num_batched_tokens=100)
    reader = Reader(engine.stream(MIX[0], free(9)))
    for i in (1, 2, 3):
        engine.add_request(MIX[i], free(9), request_id=str(i))
    engine.step(), engine.step()
    break_forward(engine, 1, RuntimeError("a shape is wrong"))
    with pytest.raises(GenerationFailed) as caught:
        engine.step()
    assert by_id(caught.value.outputs) == {"1": alone(lm, MIX[1], 2), "2": alone(lm, MIX[2], 2)}
    assert {o.finish_reason for o in caught.value.outputs} == {"error"}
    assert by_id(run(engine)) == {"3": alone(lm, MIX[3], 9)}  # it was not in that step
    with pytest.raises(GenerationFailed) as caught:
        reader.read()
    assert tokens(caught.value.outputs) == [alone(lm, MIX[0], 2)] and not reader.read()


def test_a_model_that_breaks_in_a_stream(family: Family, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm)
    engine.add_request(MIX[1], free(9), request_id="mine")
    break_forward(engine, 4, RuntimeError("a shape is wrong"))
    said = []
    with pytest.raises(GenerationFailed, match="a shape is wrong") as caught:
        for piece in engine.stream(MIX[0], free(9)):
            said += piece.token_ids
    assert tokens(caught.value.outputs) == [said] == [alone(lm, MIX[0], 3)]
    with pytest.raises(GenerationFailed, match="a shape is wrong") as caught:
        engine.step()
    assert by_id(caught.value.outputs) == {"mine": alone(lm, MIX[1], 3)}
    assert_idle(engine)


def test_a_model_in_training_mode_is_refused_when_a_request_is_made(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny)
    tiny.model.train()
    try:
        with pytest.raises(InvalidParameter, match=r"eval\(\)"):
            engine.add_request("a")
    finally:
        tiny.model.eval()
    assert not engine.has_unfinished()


def test_what_is_not_a_number_ends_one_answer_and_stays_in_its_rows(make: Make):
    lm = load_model("tiny-random", device="cpu")
    expected = {prompt: hf_generate(lm, prompt, 8) for prompt in [(1, 2), (3,), (5,) * 20]}
    lm.packed_layers = support.packed_layers(lm)  # found out while it was in order
    lm.model.get_input_embeddings().weight.data[7] = math.nan
    for seqs, budget in [(1, 100), (3, 100), (2, 4)]:
        engine = make(lm, max_num_seqs=seqs, max_num_batched_tokens=budget)
        bad = [*[6] * 5, *[7] * 25]  # leaves NaN in 25 rows, which others get after it
        for _ in range(2):
            outputs = engine.generate([[1, 2], bad, [3], bad, [5] * 20], free())
            assert [o.finish_reason for o in outputs] == ["length", "error", "length", "error", "length"]
            assert "nan" in outputs[1].error and outputs[1].token_ids == []
            assert tokens(outputs[::2]) == list(expected.values())
            assert_idle(engine)


def test_weights_that_are_not_numbers_are_named():
    """It is the file that is damaged, and not a model that cannot be run with many requests in one row."""
    lm = load_model("tiny-random", device="cpu")
    lm.model.model.layers[1].mlp.up_proj.weight.data[3, 5] = math.inf
    for kv_cache in ("slots", "paged"):
        with pytest.raises(
            ModelNotFound, match=r"tiny-random are damaged: `model.layers.1.mlp.up_proj.weight` holds NaN"
        ):
            LLMEngine(lm, kv_cache)


def test_adding_takes_the_same_time_however_many_wait(tiny: LanguageModel):
    engine, params, times = LLMEngine(tiny, max_model_len=64), free(1), []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(2000):
            engine.add_request([3, 4, 5], params)
        times.append(time.perf_counter() - began)
    assert min(times[-2:]) < 3 * max(times[:2]) + 0.5  # whatever else the machine does meanwhile
    engine.step(), engine.step()
    assert engine.stats()["finished_length"] == 2 * 64


def test_many_answers_to_one_prompt(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny, max_num_seqs=200)
    outputs = engine.generate("ab", free(2, n=1024))
    assert tokens(outputs) == [hf_generate(tiny, [97, 98], 2)] * 1024
    assert [output.index for output in outputs] == list(range(1024))
    assert engine.stats()["steps"] < 30


# -- one model, several users -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_engines_and_generate_take_turns_on_one_model(family: Family, name: str):
    lm = family(name)
    engines = [watched(lm, **options) for options in KINDS.values() if options["backend"] != "compiled"]
    said: list[dict[str, list[int]]] = [{} for _ in engines]
    for engine in engines:
        for i, prompt in enumerate(MIX):
            engine.add_request(prompt, each()[i], request_id=str(i))
    for step in itertools.count():
        if not any(engine.has_unfinished() for engine in engines):
            break
        for engine, outputs in zip(engines, said, strict=True):
            outputs |= by_id(engine.step())
        if step in (2, 7):
            assert hf_generate(lm, MIX[4], 6) == alone(lm, MIX[4], 6)
            with torch.no_grad():  # a padded batch, with a mask, beside the engines
                ids = torch.tensor([MIX[0], [0] * (len(MIX[0]) - 3) + MIX[1]])
                mask = torch.ones_like(ids)
                mask[1, : len(MIX[0]) - 3] = 0
                first = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1].argmax(-1)
            assert first.tolist()[0] == alone(lm, MIX[0], 1)[0]
    assert said == [{str(i): answer for i, answer in enumerate(answers(lm))}] * len(engines)


def test_an_implementation_that_somebody_chose_is_respected(family: Family, make_roomy: Make):
    lm = family("llama")
    own = hf_compat.attention_of(lm.model.config)
    lm.model.set_attn_implementation("eager")
    try:
        engine = make_roomy(lm)
        assert tokens(engine.generate(MIX, each())) == answers(lm)
        for error in (KeyboardInterrupt(), torch.OutOfMemoryError("none left"), RuntimeError("broken")):
            layer = lm.model.model.layers[1].mlp.down_proj
            hook = layer.register_forward_pre_hook(lambda *_, error=error: (_ for _ in ()).throw(error))
            engine.add_request(MIX[0], free())
            with contextlib.suppress(KeyboardInterrupt, GenerationFailed):
                assert engine.step()[0].finish_reason == "error"
            hook.remove()
            assert hf_compat.attention_of(lm.model.config) == "eager"
            run(engine)
    finally:
        lm.model.set_attn_implementation(own)


# -- ids --------------------------------------------------------------------------------------------------------------


def test_ids_given_and_made(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny, max_num_seqs=2)
    assert engine.add_request("a", free(2), request_id="0") == "0"
    assert engine.add_request("a", free(2)) == "1"  # "0" is taken
    assert engine.add_request("a", free(2), request_id="mine") == "mine"
    for taken in ("0", "1", "mine"):
        with pytest.raises(InvalidParameter, match="in use"):
            engine.add_request("b", free(2), request_id=taken)
    assert engine.add_request("a", free(2), request_id="3") == "3"
    outputs = engine.generate(["x", "y", "z"], free(2))
    assert [o.request_id for o in outputs] == ["2", "4", "5"]
    with pytest.raises(InvalidParameter, match="in use"):  # it has ended, and its output has not been read
        engine.add_request("b", free(2), request_id="0")
    assert sorted(by_id(run(engine))) == ["0", "1", "3", "mine"]
    for again in ("0", "1", "mine"):
        assert engine.add_request("b", free(2), request_id=again) == again
    assert sorted(by_id(run(engine))) == ["0", "1", "mine"]
    with pytest.raises(InvalidPrompt):
        engine.add_request("", request_id="refused")
    assert engine.add_request("b", free(2), request_id="refused") == "refused"
    run(engine)


def test_an_id_is_free_again_after_an_abort(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny)
    engine.add_request("a", request_id="x")
    engine.abort("x")
    assert [o.finish_reason for o in engine.step()] == ["abort"]
    engine.add_request("a", free(3), request_id="x")
    assert [len(o.token_ids) for o in run(engine)] == [3]


# -- refusals and limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(kv_cache="contiguous"), "kv_cache must be .* it is 'contiguous'"),
        *[(dict(max_num_seqs=bad), "max_num_seqs") for bad in (0, -1, 2.0, True, "4", None)],
        *[(dict(max_num_batched_tokens=bad), "max_num_batched_tokens") for bad in (0, -5, 1.5, False, None)],
        *[(dict(num_blocks=bad), "num_blocks") for bad in (0, -1, 1.0, True)],
        *[(dict(max_model_len=bad), "max_model_len") for bad in (0, 1, 2049, "all", True)],
        *[(dict(block_size=bad), "block_size") for bad in (0, -16, 16.0, True, None)],
        *[(dict(backend=bad), "backend") for bad in ("", "cuda", "gather", None, 3)],
        *[(dict(enable_prefix_caching=bad), "enable_prefix_caching") for bad in ("no", 1, None)],
        *[(dict(fast=bad), "fast") for bad in (2, "yes", None)],
        *[
            ({name: bad}, name)
            for name, bad in (("block_size", 10**400), ("clock", 3), ("scheduler", 3), ("scheduler", "shortest"))
        ],
    ],
)
@pytest.mark.parametrize("kv_cache", ["slots", "paged"])
def test_options_that_are_not_possible(tiny: LanguageModel, kv_cache: str, options: dict[str, object], words: str):
    with pytest.raises(InvalidParameter, match=words) as caught:
        LLMEngine(tiny, **({"kv_cache": kv_cache} | options))
    assert len(str(caught.value)) < 400


def test_numbers_of_other_libraries_will_do(tiny: LanguageModel):
    engine = LLMEngine(tiny, "paged", num_blocks=np.int64(9), block_size=np.int32(4), max_model_len=np.int64(30))
    assert (engine.cache.num_blocks, engine.cache.block_size, engine.kv_tokens) == (9, 4, 36)
    name = engine.add_request("ab", free(), priority=np.int64(3), timeout_s=np.float32(1000))
    engine.add_request("c", free(1), priority=np.float32(0.5), timeout_s=torch.tensor(1000.0))
    assert by_id(run(engine))[name] == hf_generate(tiny, [97, 98], 8)


def test_a_backend_that_cannot_run_here_is_refused(tiny: LanguageModel):
    for kv_cache in ("slots", "paged"):
        with pytest.raises(UnsupportedModel, match=r"'triton'.*float32 on cpu.*CUDA.*auto"):
            LLMEngine(tiny, kv_cache, backend="triton")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[(dict(request_id=bad), "request_id") for bad in ("", 3, b"x")],
        *[(dict(priority=bad), "priority") for bad in ("high", None, math.nan, True)],
        *[(dict(timeout_s=bad), "timeout_s") for bad in (-1, "soon", math.nan, True, 10**400)],
        (dict(params=[free(), free()]), "2 SamplingParams"),
        (dict(params="greedy"), "SamplingParams"),
        (dict(params=free(stop_token_ids=[300])), "token 300"),
    ],
)
def test_requests_that_are_not_possible(tiny: LanguageModel, options: dict[str, object], words: str, make_roomy: Make):
    engine = make_roomy(tiny)
    with pytest.raises(InvalidParameter, match=words):
        engine.add_request("a", **options)
    assert not engine.has_unfinished()


def test_prompts_that_are_not_possible(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny)
    for prompt in ("", [], [999], [-1], ["a", "b"], [1.5], None, 3, [[1], [2]], [torch.tensor(3.0)]):
        with pytest.raises(InvalidPrompt):
            engine.add_request(prompt)
    for call in (engine.add_request, engine.generate, engine.stream):
        for length in (LONGEST, LONGEST + 1):
            with pytest.raises(PromptTooLong, match=f"{length} tokens.*limit is {LONGEST}"):
                call([97] * length)
    with pytest.raises(InvalidPrompt):
        engine.generate(["fine", ""])  # all are checked before the first joins
    assert not engine.has_unfinished() and engine.generate([]) == []


@pytest.mark.parametrize("budget", [1, 7, 100])
@pytest.mark.parametrize("options", [{}, *[dict(kv_cache="paged", block_size=size) for size in (1, 7, 10, 20, 64)]])
def test_answers_that_reach_the_limit(family: Family, budget: int, options: dict[str, object]):
    lm = family("mistral")
    engine = watched(lm, max_model_len=20, max_num_seqs=3, max_num_batched_tokens=budget, **options)
    prompts = [list(range(30, 30 + length)) for length in (19, 18, 10, 14, 1)]
    outputs = engine.generate(prompts, free(1000))
    assert [len(o.token_ids) for o in outputs] == [1, 2, 10, 6, 19]
    assert tokens(outputs) == [alone(lm, p, 20 - len(p)) for p in prompts]
    assert all(o.finish_reason == "length" and o.stop_reason is None for o in outputs)
    with pytest.raises(PromptTooLong, match="limit is 20"):
        engine.generate([[5] * 20])


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_models_own_limit(family: Family, name: str):
    """Learned positions end there: one token more would be an index error, or a wrong embedding."""
    lm = family(name)
    prompt = [i % 190 + 3 for i in range(250)]
    engine = LLMEngine(lm, max_num_batched_tokens=100)
    assert engine.max_model_len == 256
    output = engine.generate(prompt, free(99))[0]
    assert len(output.token_ids) == 6 and output.token_ids == hf_generate(lm, prompt, 6)


def with_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Views of models say something else than the models."""
    view_of = support.view_of

    def changed(model: torch.nn.Module, attention: str) -> torch.nn.Module:
        view = view_of(model, attention)
        forward = view.forward

        @functools.wraps(forward)
        def changed_forward(**kwargs: object) -> object:
            output = forward(**kwargs)
            output.logits = change(output.logits)
            return output

        view.forward = changed_forward
        return view

    monkeypatch.setattr(support, "view_of", changed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x + 0.1 * x.abs().max(), "logits change"),
        (lambda x: x * math.nan, "logits change"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_model_that_changes_in_company_is_refused(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, change: Callable, reason: str
):
    layers = support.packed_layers(dataclasses.replace(tiny))
    assert {(s.kv_heads, s.key_dim, s.value_dim, s.dtype) for s in layers.values()} == {(2, 16, 16, torch.float32)}
    assert list(layers) == [0, 1]
    with_logits(monkeypatch, change)
    lm = dataclasses.replace(tiny)
    with pytest.raises(UnsupportedModel, match=rf"tiny-random \(llama\).*{reason}.*CachedEngine or NaiveEngine"):
        LLMEngine(lm)
    assert lm.packed_layers is None and hf_compat.attention_of(tiny.model.config) == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_rounding_in_half_precision_is_not_taken_for_a_fault(
    family: Family, name: str, monkeypatch: pytest.MonkeyPatch
):
    """In a mixture of experts it may send a token to another expert, whose logits are others; a real fault is more."""
    half = LanguageModel.of(copy.deepcopy(family(name).model).bfloat16(), None, name)
    assert support.packed_layers(half)
    half.packed_layers = None
    # each token's logits taken for its neighbour's, as where requests of a row are mixed up
    with_logits(monkeypatch, lambda logits: logits.roll(1, 1))
    with pytest.raises(UnsupportedModel, match="logits change"):
        support.packed_layers(half)


# -- what it tells of itself ------------------------------------------------------------------------------------------


def test_statistics_and_traces_add_up(family: Family):
    lm, ticks = family("llama"), itertools.count()
    engine = watched(lm, max_num_seqs=3, max_num_batched_tokens=7, trace=True, clock=lambda: float(next(ticks)))
    outputs = engine.generate(MIX, each())
    steps, stats = engine.steps, engine.stats()

    for i, prompt in enumerate(MIX):  # each token of each request went through the model once, in order
        mine = [chunk for step in steps for chunk in step.chunks if chunk.request_id == str(i)]
        assert [c.begin for c in mine] == [sum(c.num_tokens for c in mine[:j]) for j in range(len(mine))]
        assert sum(c.num_tokens for c in mine) == len(prompt) + ANSWERS[i] - 1
        assert sum(c.samples for c in mine) == ANSWERS[i] and sum(c.decodes for c in mine) == ANSWERS[i] - 1
        assert len({c.block for c in mine}) == 1
    for step in steps:
        assert 0 < step.num_tokens <= 7 and len(step.chunks) <= 3
        assert len({(c.request_id, c.index) for c in step.chunks}) == len(step.chunks)
        assert len({c.block for c in step.chunks}) == len(step.chunks)
        assert step.num_decodes == sum(c.num_tokens for c in step.chunks if c.decodes)
        assert step.began < step.scheduled < step.computed < step.ended
        assert step.seconds == step.ended - step.began
        assert step.kv_capacity == 3 * LONGEST and sum(c.begin + c.num_tokens for c in step.chunks) <= step.kv_tokens
    assert steps[0].waiting == tuple((str(i), 0) for i in range(1, 8)) and steps[-1].waiting == ()
    assert all(earlier.ended <= later.began for earlier, later in itertools.pairwise(steps))

    assert stats["steps"] == len(steps)
    assert stats["computed_tokens"] == sum(s.num_tokens for s in steps)
    assert stats["computed_tokens"] == sum(map(len, MIX)) + sum(ANSWERS) - len(MIX)
    assert stats["output_tokens"] == sum(ANSWERS) == sum(len(o.token_ids) for o in outputs)
    assert stats["mean_batch"] == pytest.approx(sum(len(s.chunks) for s in steps) / len(steps))
    parts = stats["schedule_s"] + stats["model_s"] + stats["postprocess_s"]
    assert parts == sum(s.seconds for s in steps)
    assert stats["finished_length"] == len(MIX) and "finished_abort" not in stats
    assert stats["kv_bytes_reserved"] == engine.kv_bytes() and stats["kv_bytes_used"] == 0


def test_statistics_in_the_middle(family: Family, make_roomy: Make):
    lm = family("llama")
    engine = make_roomy(lm, max_num_seqs=2)
    for prompt in MIX[:4]:
        engine.add_request(prompt, free())
    assert engine.stats()["mean_batch"] == 0
    engine.step(), engine.step()
    stats = engine.stats()
    assert (stats["waiting"], stats["running"]) == (2, 2)
    assert stats["kv_bytes_used"] == (len(MIX[0]) + len(MIX[1]) + 2) * engine.cache.bytes_per_token
    assert engine.steps == []  # kept only if asked for
    run(engine)


def test_tokens_that_nobody_got_are_not_counted(tiny: LanguageModel, make_roomy: Make):
    engine = make_roomy(tiny, trace=True)
    bad = free(8, logits_processors=[raising(RuntimeError("enough"), 3)])
    outputs = engine.generate(["a", "b"], [bad, free(8)])
    assert engine.stats()["output_tokens"] == sum(len(o.token_ids) for o in outputs) == 11
    assert sum(chunk.samples for step in engine.steps for chunk in step.chunks) == 11


def test_metrics_by_a_clock_that_ticks_when_it_is_read(family: Family, make_roomy: Make):
    ticks = itertools.count()
    engine = make_roomy(family("llama"), max_num_seqs=2, max_num_batched_tokens=6, clock=lambda: float(next(ticks)))
    outputs = engine.generate(MIX, each())
    for m, count in zip((o.metrics for o in outputs), ANSWERS, strict=True):
        assert m.arrival < m.first_scheduled < m.first_token < m.last_token <= m.finished
        assert m.num_tokens == count and m.preemptions == 0
        assert m.queue_s + (m.first_token - m.first_scheduled) == m.ttft_s
        assert m.tpot_s == (m.last_token - m.first_token) / (count - 1)
        assert m.ttft_s + (count - 1) * m.tpot_s <= m.e2e_s
    assert outputs[7].metrics.queue_s > outputs[0].metrics.queue_s


def test_progress_is_shown_when_asked_for(tiny: LanguageModel, capsys: pytest.CaptureFixture[str]):
    engine = watched(tiny)
    engine.generate(["a", "b"], free(2))
    assert capsys.readouterr() == ("", "")
    engine.generate(["a", "b"], free(2), progress=True)
    assert "slots: 100%" in capsys.readouterr().err


def test_how_it_looks(tiny: LanguageModel):
    assert repr(LLMEngine(tiny, max_model_len=99)) == (
        "LLMEngine(LanguageModel(tiny-random, float32 on cpu), kv_cache='slots', max_num_seqs=64, "
        "max_num_batched_tokens=512, max_model_len=99)"
    )
    assert [LLMEngine(tiny, cache).name for cache in ("slots", "paged")] == ["slots", "paged"]
