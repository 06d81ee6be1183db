"""What is special to `LLMEngine` over pages: with any block size, however small the pool, whatever is shared, the same
tokens. What holds for slots and pages alike is in test_llm_engine.py."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from engines import (
    ANSWERS,
    LONGEST,
    MIX,
    alone,
    answers,
    assert_idle,
    by_id,
    each,
    free,
    run,
    skip_without_backend,
    tokens,
    watched,
)
from families import PROMPTS, hf_generate, saying

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, SamplingParams, load_model
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.errors import PromptTooLong

Family = Callable[[str], LanguageModel]

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]  # plain, window, softcap, sinks, latent attention
TIGHT = dict(block_size=2, num_blocks=26, max_num_batched_tokens=30)


def paged(lm: LanguageModel, **options: object) -> LLMEngine:
    skip_without_backend(options)
    return watched(lm, **(dict(kv_cache="paged", trace=True) | options))


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
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_lengths_around_every_block_boundary(family: Family, size: int, backend: str):
    lm = family("mistral")
    around = sorted({b * size + d for b in (1, 2, 3) for d in (-1, 0, 1)})
    prompts = [[(3 + 7 * i + length) % 190 + 3 for i in range(length)] for length in around]
    counts = [size - 1, size, size + 1]
    engine = paged(lm, block_size=size, max_num_batched_tokens=50, backend=backend, max_model_len=80)
    pairs = [(p, counts[i % 3]) for i, p in enumerate(prompts)] + [(prompts[i], counts[i]) for i in range(3)]
    outputs = engine.generate([p for p, _ in pairs], [free(n) for _, n in pairs])
    assert tokens(outputs) == [alone(lm, p, n) for p, n in pairs]
    assert_idle(engine)


@pytest.mark.parametrize("backend", ["torch", "compiled", "auto"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_backends_agree(family: Family, name: str, backend: str):
    lm = family(name)
    engine = paged(lm, backend=backend, block_size=7, num_blocks=16)
    if backend != "auto":
        assert engine.backend.name == backend
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert_idle(engine)


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
    engine = paged(lm, block_size=2, num_blocks=22)
    for i, prompt in enumerate(MIX):
        engine.add_request(prompt, free(ANSWERS[i]), request_id=str(i), priority=-i)
    outputs = run(engine)
    assert by_id(outputs) == {str(i): answer for i, answer in enumerate(answers(lm))}
    assert engine.stats()["preemptions"] > 0
    assert [o.metrics.preemptions for o in outputs if o.request_id == "7"] == [0]


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


@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("bad_step", [1, 3, 5, 7])
@pytest.mark.parametrize("n", [1, 3])
def test_what_was_not_a_number_is_not_found_again(budget: int, bad_step: int, n: int):
    """A hook makes one step's keys NaN, in a prompt or behind it; whoever begins alike afterwards computes his own."""
    lm, prompt, steps = load_model("tiny-random", device="cpu"), list(range(3, 43)), itertools.count(1)
    expected = hf_generate(lm, prompt, 8)

    def poison(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * math.nan if next(steps) == bad_step else output

    engine = paged(lm, block_size=4, max_num_batched_tokens=budget)
    lm.model.model.layers[0].mlp.down_proj.register_forward_hook(poison)
    first = engine.generate(prompt, free(8, n=n))
    assert "error" in {output.finish_reason for output in first}
    for output in first:
        assert output.token_ids == expected[: len(output.token_ids)]
    assert next(steps) > bad_step
    for _ in range(2):
        assert tokens(engine.generate(prompt, free(8, n=n))) == [expected] * n
    assert_idle(engine)


# -- several answers to one prompt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_four_answers_share_their_prompt(family: Family, name: str, caching: bool):
    lm = family(name)
    prompt = list(range(40, 62))  # 22 tokens: 2 blocks of 8, and 6 more, of which 5 are copied
    params = free(12, n=4, temperature=1.5, seed=11)
    single = CachedEngine(lm).generate([prompt], params)
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
    params = free(12, n=4, temperature=1.5, seed=2)
    outputs = engine.generate(prompts, params)
    assert tokens(outputs) == tokens(CachedEngine(lm).generate(prompts, params))
    assert engine.stats()["preemptions"] > 0 and engine.stats()["forked_tokens"] > 0
    assert_idle(engine)


def test_answers_of_one_token_do_not_queue_for_each_other(tiny: LanguageModel):
    engine = paged(tiny, max_num_seqs=50)
    outputs = engine.generate("ab", free(1, n=200))
    assert tokens(outputs) == [hf_generate(tiny, [97, 98], 1)] * 200
    assert engine.stats()["steps"] < 3 * 200 / 50


class FirstCopyFails:
    """A logits processor, of which each answer has a copy; that of the first one raises."""

    def __init__(self) -> None:
        self.copies, self.fails = itertools.count(), False

    def __deepcopy__(self, memo: dict) -> "FirstCopyFails":
        twin = FirstCopyFails()
        twin.fails = next(self.copies) == 0
        return twin

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if self.fails and len(token_ids) == 2:
            raise RuntimeError("enough")
        return logits


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
        params = free(9, n=3, temperature=1.5, seed=1)
        whole = tokens(CachedEngine(lm).generate([MIX[0]], params))
        outputs = engine.generate([MIX[0]], dataclasses.replace(params, logits_processors=[FirstCopyFails()]))
        assert tokens(outputs) == [whole[0][:2], *whole[1:]]
        assert [o.finish_reason for o in outputs] == ["error", "length", "length"]
    assert_idle(engine)


# -- who may join ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "joins"), [(15, True), (23, False)])
def test_each_that_runs_keeps_room_to_grow_by_half_a_block(tiny: LanguageModel, length: int, joins: bool):
    """The engine's own watermark, of 8 tokens for each that runs, which `paged` above turns off."""
    engine = LLMEngine(tiny, "paged", block_size=8, num_blocks=4, max_model_len=32)
    engine.add_request([5] * 6, free(2), request_id="runs")
    engine.step()
    engine.add_request([7] * length, free(1), request_id="newcomer")
    assert [output.request_id for output in engine.step()] == (["runs", "newcomer"] if joins else ["runs"])
    assert_idle(engine) if joins else run(engine)


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
