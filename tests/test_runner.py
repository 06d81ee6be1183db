"""The row that a step is computed from, against one put together from lists; and what goes to the device for it."""

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import one

from minfer_lib import LanguageModel
from minfer_lib.attention.support import packed_layers
from minfer_lib.attention.torch_backend import TorchBackend
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import BlockStore
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine.runner import ModelInput, ModelRunner
from minfer_lib.engine.scheduler import Plan, Scheduler
from minfer_lib.generation.sampling import Sampler
from minfer_lib.models.hf_compat import TorchDispatchMode, tree_leaves

CPU, META = torch.device("cpu"), torch.device("meta")
LONGEST = 32


class FarTables:
    """A device that shares no memory with the host, as far as block tables are concerned."""

    type = "far"


def make_cache(kind: str, size: int, device: Any = CPU, layers: Any = None, seqs: int = 3) -> BlockStore:
    if kind == "slots":
        return SlotKVCache(layers or {}, 8, LONGEST, device)
    return PagedKVCache(layers or {}, 8 * LONGEST // size, size, device, max_num_seqs=seqs, max_model_len=LONGEST)


def make_far(cache: BlockStore) -> None:
    """From now on what changes in the tables has to be copied."""
    cache.device, cache.device_tables = FarTables(), cache.device_tables.clone()


def runner_of(lm: LanguageModel, cache: BlockStore) -> ModelRunner:
    return ModelRunner(lm, cache, Sampler(), TorchBackend())


def check(inputs: ModelInput, plan: Plan, cache: BlockStore) -> None:
    """Decoding requests first, the others behind them, each as the plan names them."""
    row = [request for request in plan if plan[request] == 1] + [request for request in plan if plan[request] > 1]
    ids, positions, rows, ends = [], [], [], {}
    for request in row:
        tokens = request.prompt_token_ids + request.token_ids
        for position in range(request.num_computed, request.num_computed + plan[request]):
            ids.append(tokens[position])
            positions.append(position)
            rows.append(request.table.row(position))
        ends[request] = len(ids) - 1
    sampled = [request for request in plan if request.num_computed + plan[request] == request.num_tokens]
    batch = inputs.batch
    assert inputs.input_ids.tolist() == ids and inputs.position_ids.tolist() == positions
    assert batch.slot_mapping.tolist() == rows and len(set(rows)) == len(rows)
    assert inputs.sampled == sampled
    assert inputs.logits_rows.tolist() == ([ends[request] for request in sampled] or [0])
    assert batch.q_lens == [plan[request] for request in row]
    assert batch.kv_lens == batch.lengths.tolist() == [request.num_computed + plan[request] for request in row]
    assert batch.num_decodes == sum(tokens == 1 for tokens in plan.values())
    others = batch.q_lens[batch.num_decodes :]
    assert batch.starts.tolist() == [sum(others[:i]) for i in range(len(others) + 1)]
    for table, request, length in zip(batch.block_tables.tolist(), row, batch.kv_lens, strict=True):
        needed = cache.blocks_for(length)
        assert table[:needed] == request.table.blocks[:needed]
    assert (batch.block_size, batch.trash_row) == (cache.block_size, cache.num_blocks * cache.block_size)
    kinds = inputs.input_ids, inputs.position_ids, batch.slot_mapping, batch.block_tables, batch.lengths, batch.starts
    assert [tensor.dtype for tensor in kinds] == [torch.int64] * 3 + [torch.int32] * 3


sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=8)


@pytest.mark.parametrize("far", [False, True], ids=["tables on the host", "tables on a device"])
@pytest.mark.parametrize("kind", ["slots", "paged"])
@settings(max_examples=40, deadline=None)
@given(sizes=sizes, size=st.sampled_from([1, 2, 3, 16]), budget=st.integers(1, 20), seqs=st.integers(1, 8))
def test_a_row_is_that_of_a_naive_construction(
    tiny: LanguageModel, kind: str, far: bool, sizes: list[tuple[int, int]], size: int, budget: int, seqs: int
):
    """In every step of a run: prompts in chunks, decoding requests, some that end and give their blocks to others."""
    cache = make_cache(kind, size, seqs=8)
    if far:
        make_far(cache)
    runner = runner_of(tiny, cache)
    scheduler = Scheduler(cache, max_num_seqs=seqs, max_num_batched_tokens=budget)
    for i, (prompt, answer) in enumerate(sizes):
        request = one(str(i), [(7 * i + position) % 250 for position in range(prompt)], answer)
        request.arrival = i + 1
        scheduler.add(request)
    while plan := scheduler.schedule():
        inputs = runner.build(plan)
        check(inputs, plan, cache)
        assert not cache.changes
        scheduler.update(plan, sampled_of(len(inputs.sampled)), 0.0)
    assert not scheduler.waiting and not scheduler.running


def sampled_of(count: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=list(range(count)), logprobs=[None] * count, errors={})


def test_a_request_that_comes_back_is_computed_over_its_answer_too(tiny: LanguageModel):
    cache, request = make_cache("paged", 4), one("a", [1, 2, 3], 9)
    for token in (11, 12, 13):
        request.append(token, None, 0.0)
    assert cache.allocate(request, 6)
    runner = runner_of(tiny, cache)
    for computed, tokens, ids in ((0, 5, [1, 2, 3, 11, 12]), (5, 1, [13]), (2, 1, [3]), (2, 3, [3, 11, 12])):
        request.num_computed = computed
        inputs = runner.build({request: tokens})
        assert inputs.input_ids.tolist() == ids
        check(inputs, {request: tokens}, cache)


# -- what goes to the device ------------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Notes how many numbers each operation moves between host and device, which here is "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device: list[int] = []
        self.to_host: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and inputs and tensor.is_meta != inputs[-1].is_meta:
                (self.to_device if tensor.is_meta else self.to_host).append(tensor.numel())
        return result


@pytest.fixture()
def meta(tiny: LanguageModel) -> Callable[[str], tuple[ModelRunner, BlockStore]]:
    """A runner on a device that computes nothing, and from which nothing can be read back."""
    layers = packed_layers(tiny)
    lm = dataclasses.replace(tiny, model=copy.deepcopy(tiny.model).to(META), device=META)
    lm.packed_layers, lm.input_groups = layers, tiny.input_groups  # what it cannot be asked

    def make(kind: str) -> tuple[ModelRunner, BlockStore]:
        cache = make_cache(kind, 4, META, layers)
        return runner_of(lm, cache), cache

    return make


def joined(cache: BlockStore, *sizes: tuple[int, int]) -> Plan:
    """A plan of (tokens that are computed, tokens to compute)."""
    plan = {}
    for i, (computed, tokens) in enumerate(sizes):
        request = one(str(i), [5] * (computed + tokens), 9)
        assert cache.allocate(request, computed + tokens)
        request.num_computed = computed
        plan[request] = tokens
    return plan


@pytest.mark.parametrize("kind", ["slots", "paged"])
@pytest.mark.parametrize("plan", [[(3, 1)], [(3, 1), (0, 1), (9, 1)], [(0, 5), (6, 1), (2, 7)], [(0, 3)]])
def test_a_step_copies_once_to_the_device_and_waits_for_nothing(meta: Any, kind: str, plan: list[tuple[int, int]]):
    runner, cache = meta(kind)
    requests = joined(cache, *plan)
    for _ in range(2):  # with tables that have changed, and without
        changed = len(cache.changes)
        with Copies() as copies:
            inputs = runner.build(requests)
            logits = runner.forward(inputs)  # reading anything would raise
        assert copies.to_host == [] and len(copies.to_device) == 1
        rows = sum(tokens for _, tokens in plan)
        starts = 1 + sum(tokens > 1 for _, tokens in plan)
        assert copies.to_device[0] == 3 * rows + 3 * len(plan) + starts + 2 * changed
        assert logits.is_meta and logits.shape == (len(plan), runner.lm.vocab_size)
        assert not cache.changes


def test_copies_are_seen():
    with Copies() as copies:
        torch.ones(3).to(META), torch.ones(2).to(META) + 1
    assert copies.to_device == [3, 2] and copies.to_host == []
