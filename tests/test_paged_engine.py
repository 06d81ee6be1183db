"""`LLMEngine` over a paged cache: with any block size, however small the pool, whatever is shared, the same tokens."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breaking import break_forward
from families import PROMPTS, hf_generate, saying

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, RequestOutput, SamplingParams, load_model
from minfer_lib.attention.support import supported_layers
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.engine import cache_size
from minfer_lib.errors import GenerationFailed, InvalidParameter, PromptTooLong, UnsupportedModel
from minfer_lib.kernels import compiled_attention as compiled_paged

Family = Callable[[str], LanguageModel]

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]  # plain, window, softcap, sinks, latent attention
MIX = [*PROMPTS, list(range(20, 57)), [7, 7], list(range(100, 119)), [11, 3, 11, 3, 5]]
ANSWERS = [10, 12, 7, 9, 6, 11, 8, 10]
LONGEST = 64

_oracles: dict[tuple, list[int]] = {}


def alone(lm: LanguageModel, prompt: Sequence[int], count: int) -> list[int]:
    """What `model.generate` says."""
    key = (lm.name, tuple(prompt))
    if len(_oracles.get(key, [])) < count:
        _oracles[key] = hf_generate(lm, prompt, max(count, 12))
    return _oracles[key][:count]


def answers(lm: LanguageModel) -> list[list[int]]:
    return [alone(lm, prompt, count) for prompt, count in zip(MIX, ANSWERS, strict=True)]


def free(count: int = 8, **others: object) -> SamplingParams:
    """Greedy, EOS ignored."""
    return SamplingParams(**(dict(max_tokens=count, ignore_eos=True) | others))


def each(**others: object) -> list[SamplingParams]:
    return [free(count, **others) for count in ANSWERS]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def paged(lm: LanguageModel, **options: object) -> LLMEngine:
    """An engine looked at after each step, also after one that raised; requests join it until it bursts."""
    engine = LLMEngine(lm, **(dict(kv_cache="paged", max_model_len=LONGEST, trace=True) | options))
    engine.scheduler.watermark = 0
    advance, cache, steps = engine._advance, engine.cache, itertools.count(1)

    def checked() -> None:
        assert next(steps) < 2000, "does not end"
        try:
            advance()
        finally:
            engine.check_invariants()
            stats, running = engine.stats(), engine.scheduler.running
            assert stats["blocks_used"] + stats["blocks_free"] == cache.num_blocks
            assert 0 <= stats["kv_tail_tokens"] <= len(running) * (cache.block_size - 1)
            assert stats["kv_bytes_used"] == cache.tokens_used * cache.bytes_per_token
            assert stats["kv_bytes_held"] - stats["kv_bytes_used"] == stats["kv_tail_tokens"] * cache.bytes_per_token

    engine._advance = checked
    return engine


def run(engine: LLMEngine, most: int = 1000) -> dict[str, RequestOutput]:
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        most -= 1
        assert most, "does not end"
    assert_idle(engine)
    return {o.request_id: o for o in outputs}


def assert_idle(engine: LLMEngine) -> None:
    """Every block has come back."""
    engine.check_invariants()
    stats = engine.stats()
    assert stats["waiting"] == stats["running"] == stats["blocks_used"] == stats["kv_bytes_used"] == 0
    assert stats["blocks_free"] == engine.cache.num_blocks and stats["blocks_shared"] == stats["kv_tail_tokens"] == 0
    assert engine.cache.tables == {} and not engine._owned


# -- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_and_block_sizes(family: Family, name: str, size: int):
    lm = family(name)
    engine = paged(lm, block_size=size, max_num_seqs=5, max_num_batched_tokens=11)
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert_idle(engine)
    if size in (2, 16):
        again = engine.generate(MIX[::-1], each()[::-1])  # blocks are used again, by others, and found again
        assert tokens(again) == answers(lm)[::-1] and engine.stats()["hit_tokens"] > 0
        assert_idle(engine)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("backend", ["gather", "auto"])
def test_lengths_around_every_block_boundary(family: Family, size: int, backend: str):
    lm = family("mistral")
    around = sorted({b * size + d for b in (1, 2, 3) for d in (-1, 0, 1)})
    prompts = [[(3 + 7 * i + length) % 190 + 3 for i in range(length)] for length in around]
    counts = [size - 1, size, size + 1]
    engine = paged(lm, block_size=size, max_num_batched_tokens=50, attention_backend=backend, max_model_len=80)
    pairs = [(p, counts[i % 3]) for i, p in enumerate(prompts)] + [(prompts[i], counts[i]) for i in range(3)]
    outputs = engine.generate([p for p, _ in pairs], [free(n) for _, n in pairs])
    assert tokens(outputs) == [alone(lm, p, n) for p, n in pairs]
    assert_idle(engine)


@pytest.mark.parametrize("size", [1, 7, 10, 20, 64])
def test_answers_that_reach_the_limit(family: Family, size: int):
    lm = family("llama")
    prompts = [list(range(30, 30 + length)) for length in (19, 18, 10, 14, 1)]
    engine = paged(lm, max_model_len=20, block_size=size, max_num_batched_tokens=9)
    outputs = engine.generate(prompts, free(1000))
    assert tokens(outputs) == [alone(lm, p, 20 - len(p)) for p in prompts]
    assert all(o.finish_reason == "length" and o.stop_reason is None for o in outputs)
    with pytest.raises(PromptTooLong, match="limit is 20"):
        engine.generate([[5] * 20])


@pytest.mark.parametrize("backend", ["gather", "compiled", "auto"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_backends_agree(family: Family, name: str, backend: str):
    lm = family(name)
    if backend == "compiled" and compiled_paged.why_not(lm.dtype) is not None:
        pytest.skip(f"no kernel here: {compiled_paged.why_not(lm.dtype)}")
    engine = paged(lm, attention_backend=backend, block_size=7, num_blocks=16)
    if backend != "auto":
        assert engine.runner.kernels.name == backend
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert_idle(engine)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_budget_smaller_than_the_number_at_once(family: Family, budget: int):
    lm = family("llama")
    engine = paged(lm, max_num_seqs=8, max_num_batched_tokens=budget, block_size=3, num_blocks=25)
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert all(step.num_tokens <= budget for step in engine.steps)


# -- too little memory ------------------------------------------------------------------------------------------------


def differently(lm: LanguageModel) -> list[SamplingParams]:
    """Every way in which what was said before matters for what comes next."""
    hot = dict(temperature=1.2, seed=5)
    return [
        free(10), free(12, logprobs=3), free(7, temperature=1.5, seed=3), free(9, repetition_penalty=1.7),
        free(6, presence_penalty=1.1, frequency_penalty=0.7), free(11, logprobs=2, top_p=0.8, **hot),
        free(8, min_p=0.05, logit_bias={5: 2.0}, **hot), free(10, repetition_penalty=1.3, logprobs=0, **hot),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_say_what_they_would_have_said(family: Family, name: str, caching: bool):
    lm = family(name)
    prompts = [prompt[:6] for prompt in MIX]
    single = [CachedEngine(lm).generate(p, s)[0] for p, s in zip(prompts, differently(lm), strict=True)]
    engine = paged(lm, block_size=2, num_blocks=12, enable_prefix_caching=caching)
    outputs = engine.generate(prompts, differently(lm))
    assert tokens(outputs) == tokens(single)
    stats = engine.stats()
    assert stats["preemptions"] >= 3 and stats["preemptions"] == sum(o.metrics.preemptions for o in outputs)
    assert stats["recomputed_tokens"] > 0 and outputs[0].metrics.preemptions == 0
    for mine, its in zip(outputs, single, strict=True):
        assert (mine.logprobs is None) == (its.logprobs is None)
        for one, other in zip(mine.logprobs or (), its.logprobs or (), strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    once = sum(map(len, prompts)) + sum(ANSWERS) - len(prompts) - stats["hit_tokens"]
    assert stats["computed_tokens"] == once + stats["recomputed_tokens"]
    assert_idle(engine)


def test_preempted_streams_and_stop_strings(tiny: LanguageModel):
    texts = ["one STOP two", "a longer one, without", "né ü", "xSTO and STOP"]
    params = [saying(list(text.encode()), stop=["STOP"]) for text in texts]
    prompts = ["say: ", "b" * 9, "c", "d" * 5]
    engine = paged(tiny, block_size=2, num_blocks=17)
    streams = [engine.stream(p, s) for p, s in zip(prompts, params, strict=True)]
    said, text = [[] for _ in texts], [""] * len(texts)
    for i in itertools.islice(itertools.cycle(range(4)), 120):
        if piece := next(streams[i], None):
            said[i] += piece.token_ids
            text[i] += piece.text
    assert engine.stats()["preemptions"] > 0
    assert text == ["one ", "a longer one, without", "né ü", "xSTO and "]
    whole = LLMEngine(tiny, max_model_len=LONGEST).generate(prompts, params)
    assert said == tokens(whole) and text == [o.text for o in whole]
    assert [next(stream, None) for stream in streams] == [None] * 4
    assert_idle(engine)


def test_priorities_in_a_pool_that_is_too_small(family: Family):
    lm = family("llama")
    engine = paged(lm, block_size=4, num_blocks=13)
    for i, prompt in enumerate(MIX):
        engine.add_request(prompt, free(ANSWERS[i]), request_id=str(i), priority=-i)
    outputs = run(engine)
    assert [outputs[str(i)].token_ids for i in range(8)] == answers(lm)
    assert outputs["7"].metrics.preemptions == 0


def test_the_pool_may_be_smaller_than_the_longest_request(family: Family):
    lm = family("mistral")
    engine = paged(lm, block_size=4, num_blocks=5)
    assert engine.max_model_len == LONGEST and engine.kv_tokens == 20
    for prompt in (list(range(30, 51)), [9] * 40):
        for call in (engine.add_request, engine.generate, engine.stream):
            with pytest.raises(PromptTooLong, match=rf"{len(prompt)} tokens can never run.*room for 20\."):
                call(prompt)
    assert not engine.has_unfinished()
    prompts = [list(range(30, 30 + length)) for length in (20, 19, 10, 3)]
    outputs = engine.generate(prompts, [free(30), free(2), free(30), free(5)])
    assert [(len(o.token_ids), o.finish_reason, o.stop_reason) for o in outputs] == [
        (1, "length", "kv_cache_full"),
        (2, "length", None),  # its last token needs no room
        (11, "length", "kv_cache_full"),
        (5, "length", None),
    ]
    assert tokens(outputs) == [alone(lm, p, len(o.token_ids)) for p, o in zip(prompts, outputs, strict=True)]
    assert_idle(engine)


def test_a_single_block_of_a_single_token(family: Family):
    lm = family("llama")
    engine = paged(lm, block_size=1, num_blocks=1)
    outputs = engine.generate([[5], [6], [7]], free(3))
    assert tokens(outputs) == [alone(lm, [t], 1) for t in (5, 6, 7)]
    assert {o.stop_reason for o in outputs} == {"kv_cache_full"}


# -- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
def test_prefix_caching_changes_no_token(family: Family, size: int):
    lm = family("gpt_oss")
    system = list(range(60, 93))
    prompts = [[*system, *prompt] for prompt in PROMPTS] + [system, system[:-1], system[:17]]
    expected = [alone(lm, p, 6) for p in prompts]
    for caching in (False, True):
        engine = paged(lm, block_size=size, enable_prefix_caching=caching, max_num_batched_tokens=24)
        assert tokens(engine.generate(prompts, free(6))) == expected
        first = engine.stats()["computed_tokens"]
        assert tokens(engine.generate(prompts, free(6))) == expected
        stats = engine.stats()
        assert_idle(engine)
        if not caching:
            assert stats["hit_tokens"] == stats["blocks_cached"] == 0 and stats["computed_tokens"] == 2 * first
        else:
            found = sum((len(p) - 1) // size * size for p in prompts)  # all but what is left of the last block
            assert stats["computed_tokens"] == 2 * first - found + (stats["hit_tokens"] - found)
            assert stats["asked_tokens"] == 2 * sum(map(len, prompts)) and stats["blocks_cached"] > 0


def test_a_second_turn_finds_the_answer_of_the_first(tiny: LanguageModel):
    engine = paged(tiny, block_size=4)
    first = engine.generate("Tell me", free(9))[0]
    turn = [*first.prompt_token_ids, *first.token_ids, *b" and then?"]
    second = engine.generate([turn], free(6))[0]
    assert second.token_ids == hf_generate(tiny, turn, 6)
    # 7 tokens of prompt and 8 of the answer were computed, its last never: 3 full blocks
    assert engine.stats()["hit_tokens"] == 12
    assert engine.stats()["computed_tokens"] == 7 + 8 + len(turn) - 12 + 5


def test_what_was_evicted_is_computed_again(family: Family):
    lm = family("llama")
    engine = paged(lm, block_size=4, num_blocks=12)
    prompts = [[i, *range(50, 70)] for i in range(5, 8)]
    expected = [alone(lm, p, 5) for p in prompts]
    for _ in range(2):  # 12 blocks: of the two before it, one is still there
        for prompt, said in zip(prompts, expected, strict=True):
            assert engine.generate(prompt, free(5))[0].token_ids == said
            assert engine.generate(prompt, free(5))[0].token_ids == said
    stats = engine.stats()
    assert stats["prefix_evictions"] > 10 and stats["hit_tokens"] == 6 * 20
    assert tokens(engine.generate(prompts * 2, free(5))) == expected * 2
    assert_idle(engine)


def test_a_prompt_that_begins_differently_finds_nothing(family: Family):
    lm = family("llama")
    engine = paged(lm, block_size=4)
    for first in (5, 6):
        prompt = [first, *range(50, 66)]
        assert engine.generate(prompt, free(5))[0].token_ids == alone(lm, prompt, 5)
    assert engine.stats()["hit_tokens"] == 0


# -- several answers to one prompt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_four_answers_share_their_prompt(family: Family, name: str, caching: bool):
    lm = family(name)
    prompt = list(range(40, 62))  # 22 tokens: 2 blocks of 8, and 6 more, of which 5 are copied
    params = free(12, n=4, temperature=1.5, seed=11)
    single = [CachedEngine(lm).generate(prompt, free(12, temperature=1.5, seed=11 + i))[0] for i in range(4)]
    assert len({tuple(t) for t in tokens(single)}) == 4
    engine = paged(lm, block_size=8, enable_prefix_caching=caching)
    outputs = engine.generate([prompt], params)
    assert tokens(outputs) == tokens(single) and [o.index for o in outputs] == [0, 1, 2, 3]
    stats, per_token = engine.stats(), engine.cache.bytes_per_token
    assert (stats["forked_tokens"], stats["hit_tokens"], stats["asked_tokens"]) == (3 * 21, 0, 4 * 22)
    assert stats["kv_bytes_copied"] == 3 * 5 * per_token
    assert stats["computed_tokens"] == 22 + 3 + 4 * 11
    maps = [step.blocks for step in engine.steps]
    assert max(len(m.tables) for m in maps) == 4
    together = next(m for m in maps if len(m.tables) == 4)
    assert len(set.intersection(*(set(t.blocks) for t in together.tables))) == 2
    assert len({b for t in together.tables for b in t.blocks}) == 2 + 4
    assert [m.bytes_copied for m in maps] == sorted(m.bytes_copied for m in maps)
    assert maps[-1].forked_tokens == 63 and maps[-1].bytes_copied == 15 * per_token
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_answers_in_a_pool_that_is_too_small_for_all_of_them(family: Family, caching: bool):
    lm = family("mistral")
    engine = paged(lm, block_size=2, num_blocks=22, enable_prefix_caching=caching)
    prompts = [list(range(40, 52)), [9, 8, 7, 6]]
    outputs = engine.generate(prompts, free(12, n=4, temperature=1.5, seed=2))
    for output in outputs:
        one = free(12, temperature=1.5, seed=2 + output.index)
        assert output.token_ids == CachedEngine(lm).generate(output.prompt_token_ids, one)[0].token_ids
    assert engine.stats()["preemptions"] > 0 and engine.stats()["forked_tokens"] > 0
    assert_idle(engine)


@pytest.mark.parametrize("victims", ["all", "the first"])
def test_answers_whose_siblings_are_ended(family: Family, victims: str):
    lm = family("llama")
    engine = paged(lm, block_size=4)
    if victims == "all":
        name = engine.add_request(MIX[0], free(9, n=3, temperature=1.5, seed=1))
        engine.step(), engine.step()
        assert engine.stats()["blocks_shared"] == 3
        engine.abort(name)
        assert [o.finish_reason for o in engine.step()] == ["abort"] * 3
    else:
        stream = engine.stream(MIX[0], free(9, n=3, temperature=1.5, seed=1))
        next(stream), next(stream)
        stream.requests[0].finish("abort", 0.0)
        said = {i: list(r.token_ids) for i, r in enumerate(stream.requests)}
        list(stream)
        for i in (1, 2):
            one = CachedEngine(lm).generate(MIX[0], free(9, temperature=1.5, seed=1 + i))[0].token_ids
            assert stream.requests[i].token_ids == one and said[i] == one[: len(said[i])]
    assert_idle(engine)


# -- when something ends before its time ------------------------------------------------------------------------------


def failing(error: BaseException, after: int, once: bool = False) -> SamplingParams:
    left = [1 if once else 10**9]

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == after and left[0]:
            left[0] -= 1
            raise error
        return logits

    return free(12, logits_processors=[processor])


TIGHT = dict(block_size=2, num_blocks=26, max_num_batched_tokens=30)


@pytest.mark.parametrize("step", [1, 4, 9])
def test_aborts_return_every_block(family: Family, step: int):
    lm = family("mistral")
    engine = paged(lm, **TIGHT)
    ids = [engine.add_request(p, s) for p, s in zip(MIX, each(), strict=True)]
    outputs = [o for _ in range(step) for o in engine.step()]
    for victim in ids[::2]:
        engine.abort(victim)
    outputs += run(engine).values()
    for output in outputs:
        expected = answers(lm)[int(output.request_id)]
        whole = output.finish_reason == "length"
        assert output.token_ids == (expected if whole else expected[: len(output.token_ids)])
        assert whole or output.request_id in ids[::2]
    for victim in ids:
        engine.abort(victim)
    engine.add_request(MIX[0], free()), engine.step(), engine.abort("8")
    run(engine)


def test_time_limits_return_every_block(family: Family):
    lm, now = family("llama"), [0.0]
    engine = paged(lm, clock=lambda: now[0], **TIGHT)
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


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_streams_that_are_left_return_every_block(family: Family, how: str):
    lm = family("llama")
    engine = paged(lm, **TIGHT)
    engine.add_request(MIX[1], free(12), request_id="other")
    streams = [engine.stream(prompt, free(12, n=2)) for prompt in (MIX[0], MIX[4])]
    next(streams[0]), next(streams[0])
    while streams:
        stream = streams.pop()
        if how == "closed":
            stream.close()
    del stream
    assert run(engine)["other"].token_ids == alone(lm, MIX[1], 12)


def test_errors_in_a_logits_processor_return_every_block(family: Family):
    lm = family("llama")
    engine = paged(lm, **TIGHT)
    params = each()
    params[2], params[5] = failing(RuntimeError("enough"), 3), failing(ValueError("never"), 0)
    outputs = engine.generate(MIX, params)
    for i, (output, expected) in enumerate(zip(outputs, answers(lm), strict=True)):
        assert output.token_ids == expected[: {2: 3, 5: 0}.get(i)]
        assert output.finish_reason == ("error" if i in (2, 5) else "length")
    assert_idle(engine)


@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("at", [1, 3, 8])
def test_model_failures_return_every_block_and_leave_nothing_wrong_to_find(family: Family, at: int, after_it: bool):
    lm = family("mistral")
    engine = paged(lm, block_size=2, max_num_batched_tokens=30)  # so large that nothing is evicted meanwhile
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


@pytest.mark.parametrize("where", ["processor", "forward", "forward, keys written"])
def test_interrupts_lose_nothing(family: Family, where: str):
    lm = family("mistral")
    for at in (1, 5):
        engine = paged(lm, **TIGHT)
        params = each()
        if where == "processor":
            params[1] = failing(KeyboardInterrupt(), at, once=True)
        else:
            break_forward(engine, at, KeyboardInterrupt(), after_it="," in where)
        for i, prompt in enumerate(MIX):
            engine.add_request(prompt, params[i], request_id=str(i))
        outputs, interrupts = [], 0
        while engine.has_unfinished():
            try:
                outputs += engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
        assert {o.request_id: o.token_ids for o in outputs} == {str(i): a for i, a in enumerate(answers(lm))}
        assert_idle(engine)


def test_an_interrupted_generate_returns_what_there_is_and_every_block(family: Family):
    lm = family("llama")
    engine = paged(lm, **TIGHT)
    break_forward(engine, 5, KeyboardInterrupt(), after_it=False)
    with pytest.warns(UserWarning, match="of 8 answers are complete"):
        outputs = engine.generate(MIX, each())
    assert [o.token_ids for o in outputs] == [a[: len(o.token_ids)] for a, o in zip(answers(lm), outputs, strict=True)]
    assert_idle(engine)


def test_what_is_not_a_number_stays_in_its_own_blocks():
    lm = load_model("tiny-random", device="cpu")
    prompts = [[1, 2], [3], [5] * 20, [4] * 9]
    expected = [hf_generate(lm, prompt, 8) for prompt in prompts]
    lm.model.get_input_embeddings().weight.data[7] = math.nan
    for size, backend in ((1, "gather"), (32, "gather"), (4, "auto")):
        engine = paged(lm, block_size=size, num_blocks=-(-40 // size), attention_backend=backend)
        for _ in range(2):  # the second time in blocks that may hold NaN
            bad = [*[6] * 10, *[7] * 19]
            outputs = engine.generate([prompts[0], bad, *prompts[1:]], free())
            assert [o.finish_reason for o in outputs] == ["length", "error", "length", "length", "length"]
            assert tokens(outputs)[:1] + tokens(outputs)[2:] == expected
            assert_idle(engine)


# -- one model, several users -----------------------------------------------------------------------------------------


def test_two_engines_on_one_model(family: Family):
    lm = family("gemma2")
    engines = [paged(lm, **TIGHT), paged(lm, block_size=5), LLMEngine(lm, max_model_len=LONGEST, max_num_seqs=3)]
    for engine in engines:
        for i, prompt in enumerate(MIX):
            engine.add_request(prompt, each()[i], request_id=str(i))
    said: list[dict[str, list[int]]] = [{} for _ in engines]
    while any(engine.has_unfinished() for engine in engines):
        for engine, mine in zip(engines, said, strict=True):
            mine |= {o.request_id: o.token_ids for o in engine.step()}
    assert said == [{str(i): a for i, a in enumerate(answers(lm))}] * 3
    assert_idle(engines[0]), assert_idle(engines[1])


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[(dict(num_blocks=bad), "num_blocks") for bad in (0, -1, 4.0, True, False, "8")],
        *[(dict(block_size=bad), "block_size") for bad in (0, -16, 16.0, True, None)],
        *[(dict(attention_backend=bad), "attention_backend") for bad in ("", "cuda", None, 3)],
        (dict(kv_cache="slots", attention_backend="cuda"), "attention_backend"),
        (dict(kv_cache="pages"), "kv_cache='pages' is not possible"),
    ],
)
def test_options_that_are_not_possible(tiny: LanguageModel, options: dict[str, object], words: str):
    with pytest.raises(InvalidParameter, match=words):
        paged(tiny, **options)


def test_numbers_of_numpy_will_do(tiny: LanguageModel):
    engine = paged(tiny, num_blocks=np.int64(9), block_size=np.int32(4))
    assert (engine.cache.num_blocks, engine.cache.block_size, engine.kv_tokens) == (9, 4, 36)
    assert engine.generate("ab", free())[0].token_ids == hf_generate(tiny, [97, 98], 8)


def test_a_backend_that_cannot_run_here_is_refused(tiny: LanguageModel):
    with pytest.raises(UnsupportedModel, match=r"'triton'.*float32 on cpu.*CUDA.*auto"):
        paged(tiny, attention_backend="triton")


# -- how large the cache becomes --------------------------------------------------------------------------------------

PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers x keys and values x heads x head size x bytes: tiny-random


def with_memory(monkeypatch: pytest.MonkeyPatch, blocks: int, step: int = 10**6) -> None:
    """So much memory that so many blocks of 16 tokens fit beside a step."""
    total = math.ceil(blocks * 16 * PER_TOKEN / 0.9) + 8 + step
    monkeypatch.setattr(cache_size, "available_bytes", lambda device: total)
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: step)


def test_a_cache_takes_what_all_could_fill(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, recwarn):
    with_memory(monkeypatch, 10**5)
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: 1 / 0)  # nothing to find out
    engine = LLMEngine(tiny, kv_cache="paged", max_num_seqs=3, max_model_len=50)
    assert engine.cache.num_blocks == 3 * 4 and not recwarn.list
    assert engine.kv_bytes() == 12 * 16 * PER_TOKEN == engine.stats()["kv_bytes_reserved"]
    assert engine.kv_bytes() == sum(t.nbytes for p in engine.cache.pools.values() for t in (p.keys, p.values))
    assert LLMEngine(tiny, kv_cache="paged", num_blocks=7).cache.num_blocks == 7


def test_a_cache_is_cut_to_what_fits_beside_a_step(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    with_memory(monkeypatch, 200)
    engine = LLMEngine(tiny, kv_cache="paged")
    assert engine.cache.num_blocks == 200 and engine.max_model_len == 2048
    assert LLMEngine(tiny, kv_cache="paged", num_blocks=200).cache.num_blocks == 200
    assert tokens(engine.generate(["ab"] * 3, free(6))) == [hf_generate(tiny, [97, 98], 6)] * 3


def test_a_cache_too_small_for_the_longest_request_says_so(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    with_memory(monkeypatch, 100)
    with pytest.warns(UserWarning, match=r"100 blocks of 16 tokens.*max_model_len=2,048.*kv_cache_full") as caught:
        engine = LLMEngine(tiny, kv_cache="paged")
    assert caught[0].filename == __file__ and engine.cache.num_blocks == 100
    with pytest.warns(UserWarning, match="kv_cache_full"):
        LLMEngine(tiny, kv_cache="paged", max_model_len=1601)


@pytest.mark.parametrize(
    ("fits", "options"), [(0, {}), (200, dict(num_blocks=201)), (200, dict(num_blocks=10**9)), (0, dict(num_blocks=60))]
)
def test_a_cache_that_cannot_be_is_refused(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, fits: int, options: dict[str, int]
):
    with_memory(monkeypatch, fits, step=10**5)
    with pytest.raises(InvalidParameter, match=rf"{fits} such blocks fit.*smaller"):
        LLMEngine(tiny, kv_cache="paged", **options)


def test_a_step_takes_memory_and_a_longer_one_more(tiny: LanguageModel):
    layers = supported_layers(tiny.model, tiny.name)
    one, short, long, longer = (cache_size.step_bytes(tiny, layers, 2048, tokens, 1) for tokens in (1, 16, 256, 1024))
    assert 0 < one < short < long < longer
    many = cache_size.step_bytes(tiny, layers, 16, 250, 1)  # of 16 short prompts, the last cut
    assert many > 8 * short


# -- what it tells of itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_statistics_and_traces_add_up(family: Family, caching: bool):
    lm = family("llama")
    engine = paged(lm, enable_prefix_caching=caching, **TIGHT)
    prompts = [*MIX, MIX[4], MIX[4]]
    outputs = engine.generate(prompts, [*each(), free(6), free(6, n=2, temperature=1.0, seed=1)])
    stats, steps, size = engine.stats(), engine.steps, engine.cache.block_size
    assert len(steps) == stats["steps"]
    for step in steps:
        blocks = step.blocks
        assert (blocks.block_size, blocks.num_blocks) == (2, 26) and step.kv_capacity == 52
        used = {b for table in blocks.tables for b in table.blocks}
        assert not used & set(blocks.cached) and len(set(blocks.cached)) == len(blocks.cached)
        assert used | set(blocks.cached) <= set(range(26))
        assert step.kv_held == len(used) * size and 0 <= step.kv_held - step.kv_tokens < len(blocks.tables) * size
        for table in blocks.tables:
            assert len(table.blocks) == -(-table.tokens // size)
        of = {(table.request_id, table.index): table for table in blocks.tables}
        for chunk in step.chunks:
            table = of[chunk.request_id, chunk.index]
            assert chunk.begin + chunk.num_tokens == table.tokens and chunk.block == table.blocks[0]
    last = steps[-1].blocks
    assert (last.preemptions, last.hit_tokens, last.forked_tokens, last.bytes_copied) == (
        stats["preemptions"], stats["hit_tokens"], stats["forked_tokens"], stats["kv_bytes_copied"]
    )  # fmt: skip
    assert stats["preemptions"] > 0 and (stats["hit_tokens"] > 0) == caching
    sums = [(s.blocks.preemptions, s.blocks.hit_tokens, s.blocks.forked_tokens) for s in steps]
    assert all(a <= b for one, other in itertools.pairwise(sums) for a, b in zip(one, other, strict=True))
    assert stats["output_tokens"] == sum(len(o.token_ids) for o in outputs)
    decoded = sum(chunk.decodes for step in steps for chunk in step.chunks)
    assert decoded <= stats["output_tokens"]
    assert all(chunk.samples for step in steps for chunk in step.chunks if chunk.decodes)


def test_a_map_of_blocks_is_for_those_who_ask(tiny: LanguageModel):
    assert isinstance(paged(tiny).cache, PagedKVCache)
    engine = paged(tiny, trace=False)
    engine.generate("ab", free(2))
    assert engine.steps == []
    slots = LLMEngine(tiny, max_model_len=LONGEST, trace=True)
    slots.generate("ab", free(2))
    assert [step.blocks for step in slots.steps] == [None, None]


# -- weights, options, and failures between the engine and its kernels ------------------------------------------------


def test_cached_prefixes_do_not_outlive_the_weights_they_came_from(folder: Path):
    lm = load_model(folder, device="cpu")
    engine, prompt = paged(lm, block_size=2), list(range(5, 25))
    engine.generate(prompt, free(4))
    engine.generate(prompt, free(4))
    assert engine.stats()["hit_tokens"] > 0
    with torch.no_grad():
        for weight in lm.model.model.layers[0].self_attn.parameters():
            weight.mul_(-1.5)
    before = engine.stats()["hit_tokens"]
    changed = engine.generate(prompt, free(8))
    assert engine.stats()["hit_tokens"] == before
    assert tokens(changed) == tokens(CachedEngine(lm).generate(prompt, free(8)))


@pytest.mark.parametrize("error", [InvalidParameter("refused"), RuntimeError("broken")])
def test_a_kernel_that_fails_loses_nothing(family: Family, error: Exception):
    lm, calls = family("llama"), itertools.count(1)
    engine = paged(lm, attention_backend="gather")
    inner = engine.runner.forward

    def forward(inputs: Any) -> torch.Tensor:
        if next(calls) == 5:
            raise error
        return inner(inputs)

    engine.runner.forward = forward
    with pytest.raises(GenerationFailed) as caught:
        engine.generate([[5, 6, 7], [8, 9]], free(20))
    assert [len(out.token_ids) for out in caught.value.outputs] == [4, 4] and caught.value.__cause__ is error
    assert engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize(
    "options",
    [
        dict(enable_prefix_caching="no"),
        dict(enable_prefix_caching=1),
        dict(kv_cache="slots", attention_backend="triton"),
        dict(kv_cache="slots", attention_backend="compiled"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(tiny: LanguageModel, options: dict[str, Any]):
    with pytest.raises(InvalidParameter, match="is not possible"):
        LLMEngine(tiny, **({"kv_cache": "paged"} | options))
