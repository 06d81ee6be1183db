"""What may happen while a step of a fast engine is in flight, or between two of them: found by looking for it."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from engines import LONGEST, MIX, alone, answers, each, free, tokens
from torch import nn

from minfer_lib import LanguageModel, LLMEngine
from minfer_lib.attention.support import packed_layers
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.engine.scheduler import Scheduler
from minfer_lib.fast.graphs import StepGraphs
from minfer_lib.generation.request import Request

Family = Callable[[str], LanguageModel]
PROMPT = [5, 6, 7]
WAYS = pytest.mark.parametrize("fast", [False, "graph", "fused"])


def engine(lm: LanguageModel, **options: object) -> LLMEngine:
    given = dict(kv_cache="paged", block_size=4, max_model_len=LONGEST, fast="fused", backend="torch")
    return LLMEngine(lm, **(given | options))


def own(family: Family) -> LanguageModel:
    """A model that may be changed."""
    return LanguageModel.of(copy.deepcopy(family("llama").model), None, "llama of its own")


def run(engine: LLMEngine) -> list:
    found = []
    while engine.has_unfinished():
        found += engine.step()
    return found


@WAYS
def test_a_trace_of_requests_that_end_in_flight(family: Family, fast: bool | str):
    lm = family("llama")
    traced = engine(lm, fast=fast, trace=True)
    stop = alone(lm, PROMPT, 5)[-1]
    for _ in range(2):
        outputs = traced.generate([PROMPT, [5, 6, 8]], free(12, stop_token_ids=[stop]))
        assert outputs[0].finish_reason == "stop"
    ids = [traced.add_request([5, 6, end], free(20)) for end in (7, 8)]
    for _ in range(3):
        traced.step()
    traced.abort(ids[0])
    assert {output.finish_reason for output in run(traced)} == {"abort", "length"}
    assert sum(chunk.samples for step in traced.steps for chunk in step.chunks) == traced.stats()["output_tokens"]


@WAYS
def test_statistics_count_what_requests_got_and_no_time_twice(family: Family, fast: bool | str):
    lm, now = family("llama"), [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    counted = engine(lm, fast=fast, clock=clock)
    stop = alone(lm, PROMPT, 5)[-1]
    for turn in range(1, 4):
        outputs = counted.generate(PROMPT, free(30, stop_token_ids=[stop]))
        stats = counted.stats()
        assert len(outputs[0].token_ids) == 5
        assert (stats["output_tokens"], stats["steps"]) == (5 * turn, 5 * turn)
        now[0] += 100  # nothing to do: no part of any step
    assert stats["schedule_s"] + stats["model_s"] + stats["postprocess_s"] < 1.5 * (now[0] - 300)


def test_a_projection_that_cannot_be_merged_any_more_makes_it_slower_and_not_broken(family: Family):
    lm = own(family)
    fast = engine(lm)
    fast.generate(PROMPT, free())
    attention = lm.model.model.layers[0].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight.detach() * 1.5)  # which requires gradients
    for _ in range(2):
        wanted = LLMEngine(lm, max_model_len=LONGEST, fast=False).generate(MIX, each())
        assert tokens(fast.generate(MIX, each())) == tokens(wanted)
    assert "but for now the model's own modules: UnsupportedModel" in fast.fast_path and "merged" in fast.fast_path


@WAYS
def test_a_bias_that_was_not_there_is_seen(family: Family, fast: bool | str):
    lm = own(family)
    followed = engine(lm, fast=fast)
    before = tokens(followed.generate(MIX, each()))
    lm.model.model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.ones(64), requires_grad=False)
    after = tokens(followed.generate(MIX, each()))
    assert after != before and after == tokens(engine(lm, fast=False).generate(MIX, each()))


@pytest.mark.parametrize("fast", ["graph", "fused"])
def test_a_hook_set_while_the_engine_is_full_is_called_from_then_on(family: Family, fast: str):
    lm = own(family)
    full, seen = engine(lm, fast=fast, max_num_seqs=1), []
    stream = full.stream(PROMPT, free(20))
    got = [next(stream) for _ in range(4)]
    lm.model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    full.add_request([9, 8], free(3))  # waits, and is what makes the engine look
    got += list(stream)
    assert sum(len(piece.token_ids) for piece in got) == 20 and len(seen) >= 15


def test_new_graphs_do_not_change_the_tokens_that_a_step_goes_on_from(family: Family, monkeypatch: pytest.MonkeyPatch):
    """On a GPU capturing runs a step, which writes tokens of its own."""
    capture = StepGraphs.capture

    def as_on_a_gpu(self: StepGraphs) -> None:
        capture(self)
        self.tokens.fill_(5)

    monkeypatch.setattr(StepGraphs, "capture", as_on_a_gpu)
    lm = own(family)
    full = engine(lm, max_num_seqs=1)
    stream = full.stream(PROMPT, free(16))
    got = [next(stream) for _ in range(5)]
    weight = lm.model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.clone()  # the same elsewhere
    full.add_request([9, 8], free(3))
    got += list(stream)
    assert [token for piece in got for token in piece.token_ids] == alone(lm, PROMPT, 16)


def test_block_tables_that_grow_are_followed(family: Family):
    lm = family("llama")
    cache = PagedKVCache(packed_layers(lm), 128, 4, lm.device, max_num_seqs=2, max_model_len=LONGEST)
    assert tokens(LLMEngine(lm, cache, max_num_seqs=8, fast="fused").generate(MIX, each())) == answers(lm)


def test_a_schedule_of_an_object_is_asked_for_every_step(family: Family):
    lm, calls = family("llama"), []
    cache = PagedKVCache(packed_layers(lm), 128, 4, lm.device, max_num_seqs=8, max_model_len=LONGEST)
    scheduler = Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=64)
    schedule = scheduler.schedule
    scheduler.schedule = lambda: calls.append(1) or schedule()
    asked = LLMEngine(lm, cache, scheduler=scheduler, fast="fused")
    asked.generate(PROMPT, free(12))
    assert len(calls) >= 12


@WAYS
def test_an_engine_is_gone_when_nobody_has_it_any_more(family: Family, fast: bool | str):
    gone = engine(family("llama"), fast=fast)
    gone.generate(PROMPT, free())
    watch, cache = weakref.ref(gone), weakref.ref(gone.cache)
    gc.collect()
    gc.disable()
    try:
        del gone
        assert watch() is None and cache() is None
    finally:
        gc.enable()


@WAYS
def test_an_interrupt_at_the_token_that_fills_the_cache(
    family: Family, fast: bool | str, monkeypatch: pytest.MonkeyPatch
):
    lm = family("llama")
    small = engine(lm, fast=fast, num_blocks=3)
    append = Request.append

    def interrupted(self: Request, *args: object) -> None:
        append(self, *args)
        if self.num_tokens == 13:
            raise KeyboardInterrupt

    monkeypatch.setattr(Request, "append", interrupted)
    small.add_request([5, 6, 7, 8, 9], free(30))
    small.add_request([4, 3], free(2))
    with pytest.raises(KeyboardInterrupt):
        run(small)
    monkeypatch.undo()
    ended = {len(output.prompt_token_ids): output for output in run(small)}
    assert (ended[5].finish_reason, ended[5].stop_reason) == ("length", "kv_cache_full")
    assert ended[5].token_ids == alone(lm, [5, 6, 7, 8, 9], 8) and ended[2].token_ids == alone(lm, [4, 3], 2)


def test_a_host_copy_is_rewritten_once_the_device_has_read_it(family: Family):
    """Chunks of a prompt sample nothing and so wait for nothing: only this keeps the host from running away."""
    graphs, waited = engine(family("llama")).runner.graphs, []

    class Event:
        def __init__(self, turn: int) -> None:
            self.turn = turn

        def synchronize(self) -> None:
            waited.append(self.turn)

    graphs.sent = [Event(turn) for turn in range(len(graphs.ring))]
    for _ in range(4):
        graphs.next_host()
        assert waited[-1] == graphs.turn
