"""Parts of an engine that a reader writes in a few lines: a policy, a cache, a backend. The tokens stay the same."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import (
    ANSWERS,
    KINDS,
    MIX,
    alone,
    answers,
    assert_idle,
    each,
    free,
    run,
    skip_without_backend,
    tokens,
    watched,
)

from minfer_lib import LanguageModel, LLMEngine, NaiveEngine
from minfer_lib.attention.support import packed_layers
from minfer_lib.attention.torch_backend import TorchBackend
from minfer_lib.cache.blocks import BlockAllocator
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import KVPool
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine.scheduler import Scheduler
from minfer_lib.errors import InvalidParameter, InvariantBroken

Family = Callable[[str], LanguageModel]


def example(documented: object, **names: object) -> dict[str, Any]:
    """What the code in a docstring defines, where it is indented as code."""
    lines = inspect.getdoc(documented).splitlines()
    code = "\n".join(line[4:] for line in lines if not line or re.match(" {4}", line))
    assert 0 < len(code.split()) < 100
    exec(code, names)
    return names


def order_of_ends(engine: LLMEngine) -> list[str]:
    return [output.request_id for output in run(engine)]


# -- a scheduler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_answer_first(family: Family, kind: str):
    skip_without_backend(KINDS[kind])
    lm, shortest = family("llama"), example(Scheduler, Scheduler=Scheduler)["ShortestFirst"]
    ends = {}
    for scheduler in (Scheduler, shortest):
        engine = watched(lm, **KINDS[kind], scheduler=scheduler, max_num_seqs=1)
        outputs = []
        for i, (prompt, params) in enumerate(zip(MIX, each(), strict=True)):
            engine.add_request(prompt, params, request_id=str(i))
        outputs = run(engine)
        assert {o.request_id: o.token_ids for o in outputs} == {str(i): a for i, a in enumerate(answers(lm))}
        ends[scheduler] = [ANSWERS[int(output.request_id)] for output in outputs]
    assert ends[Scheduler] == ANSWERS and ends[shortest] == sorted(ANSWERS)


def test_a_victim_policy(family: Family):
    """By default the one who came last is preempted, here who would lose least; who that is, the counts show."""
    lm, policy = family("llama"), example(Scheduler, Scheduler=Scheduler)["LeastComputed"]
    lost = {}

    class Noted(policy):
        def choose_victim(self, running: list) -> Any:
            victim = super().choose_victim(running)
            assert victim.num_computed == min(request.num_computed for request in running)
            return victim

    for scheduler in (Scheduler, Noted):
        engine = watched(lm, kv_cache="paged", block_size=2, num_blocks=24, scheduler=scheduler)
        prompts = [MIX[3], MIX[5], MIX[0], MIX[2]]  # short ones first, so that the last have most to lose
        outputs = engine.generate(prompts, free(18))
        assert tokens(outputs) == [alone(lm, prompt, 18) for prompt in prompts]
        lost[scheduler] = [output.metrics.preemptions for output in outputs]
        assert_idle(engine)
    assert lost[Scheduler][0] == 0 and sum(lost[Scheduler]) > 0
    assert lost[Noted][0] > 0 and lost[Noted][2] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_lets_nobody_run_raises_instead_of_hanging(tiny: LanguageModel, kind: str):
    skip_without_backend(KINDS[kind])

    class Nobody(Scheduler):
        def schedule(self) -> dict:
            return {}

    engine = LLMEngine(tiny, **KINDS[kind], scheduler=Nobody, max_model_len=64)
    with pytest.raises(InvariantBroken, match=r"1 wait.*must let one of them run"):
        engine.generate("ab", free(3))
    engine.add_request("ab", free(3))
    for _ in range(3):
        with pytest.raises(InvariantBroken, match=r"must let one of them run"):
            engine.step()


def test_a_scheduler_and_a_cache_that_were_made_before(family: Family):
    lm = family("mistral")
    cache = PagedKVCache(packed_layers(lm), 40, 4, lm.device)
    scheduler = Scheduler(cache, max_num_seqs=2, max_num_batched_tokens=8)
    engine = watched(lm, kv_cache=cache, scheduler=scheduler, trace=True)
    assert engine.cache is cache and engine.scheduler is scheduler
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert max(len(step.chunks) for step in engine.steps) == 2
    assert max(step.num_tokens for step in engine.steps) == 8


# -- a cache ----------------------------------------------------------------------------------------------------------


def test_an_eviction_policy(family: Family):
    """Asked for again is the prompt that was there first: an engine that evicts the most recent one still has it."""
    lm = family("llama")
    names = example(
        BlockAllocator.choose_evicted, BlockAllocator=BlockAllocator, PagedKVCache=PagedKVCache, LLMEngine=LLMEngine,
        lm=lm,
    )  # fmt: skip
    assert isinstance(names["engine"].cache, names["MyCache"])
    prompts = [[i, *range(50, 70)] for i in range(5, 10)]
    found = {}
    for cache in ("paged", names["MyCache"]):
        engine = watched(lm, kv_cache=cache, block_size=4, num_blocks=16)
        for prompt in (*prompts, prompts[0]):
            before = engine.stats()["hit_tokens"]
            assert engine.generate(prompt, free(5))[0].token_ids == alone(lm, prompt, 5)
        found[cache] = engine.stats()["hit_tokens"] - before
        assert engine.stats()["prefix_evictions"] > 0
        assert_idle(engine)
    assert found["paged"] == 0 and found[names["MyCache"]] == 20


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_caches_that_were_made_before(family: Family, backend: str):
    skip_without_backend({"backend": backend})
    lm = family("gemma2")
    layers = packed_layers(lm)
    for cache in (SlotKVCache(layers, 3, 64, lm.device), PagedKVCache(layers, 30, 3, lm.device, max_num_seqs=2)):
        engine = LLMEngine(lm, kv_cache=cache, backend=backend)
        assert engine.cache is cache
        assert tokens(engine.generate(MIX, each())) == answers(lm)
        assert engine.max_model_len == (64 if isinstance(cache, SlotKVCache) else 90)
        engine.check_invariants()
        assert cache.blocks_used == 0


# -- a backend --------------------------------------------------------------------------------------------------------


class Plain:
    """Attention as in a textbook, one request after the other."""

    name, graph_safe, calls = "plain", False, 0

    def attend(self, query: torch.Tensor, pool: KVPool, batch: Any, *, scale: float, **others: Any) -> torch.Tensor:
        self.calls += 1
        group, size = query.shape[1] // pool.keys.shape[1], batch.block_size
        parts = []
        for new, total, table, part in zip(
            batch.q_lens, batch.kv_lens, batch.block_tables, query.split(batch.q_lens), strict=True
        ):
            rows = (table[:, None] * size + torch.arange(size)).flatten()[:total]
            keys, values = (kept[rows].repeat_interleave(group, 1) for kept in (pool.keys, pool.values))
            scores = torch.einsum("qhd,khd->hqk", part, keys) * scale
            scores += torch.full((new, total), -torch.inf).triu(total - new + 1)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat(parts)


@pytest.mark.parametrize("options", [dict(kv_cache="slots"), dict(kv_cache="paged", block_size=2, num_blocks=26)])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_backend_of_ones_own(family: Family, name: str, options: dict[str, Any]):
    lm, backend = family(name), Plain()
    engine = watched(lm, backend=backend, max_num_batched_tokens=20, **options)
    assert engine.backend is backend
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    assert backend.calls == 2 * engine.stats()["steps"]  # two layers


def test_a_scheduler_over_another_cache_and_a_class_for_a_backend_are_refused(tiny: LanguageModel):
    other = LLMEngine(tiny, kv_cache="paged", num_blocks=9)
    theirs = Scheduler(other.cache, max_num_seqs=3, max_num_batched_tokens=64)
    with pytest.raises(InvalidParameter, match="another"):
        LLMEngine(tiny, kv_cache="paged", num_blocks=9, scheduler=theirs)
    for options in (dict(backend=TorchBackend), dict(scheduler=int), dict(trace="x"), dict(max_num_seqs=10**12)):
        with pytest.raises(InvalidParameter, match=next(iter(options))):
            LLMEngine(tiny, **options)
    with pytest.raises(InvalidParameter, match="clock"):
        NaiveEngine(tiny, clock=5)
    other.abort([])  # no id of any request


def test_the_default_device_of_torch_does_not_matter(tiny: LanguageModel):
    engine = LLMEngine(tiny, kv_cache="paged")
    expected = engine.generate([[3, 4, 5]])[0].token_ids
    with torch.device("meta"):
        assert engine.generate([[3, 4, 5]])[0].token_ids == expected
