"""The scheduler over a paged cache, with a mock in place of the language model, whose keys and values are looked at.

The mock's key of a token is a fingerprint of all tokens up to it. So after every step each row of each table can be
compared with what must lie there: a block shared wrongly, not copied, not computed again or not wiped is seen at once.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import SamplingParams
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import LayerShape, Prefix
from minfer_lib.engine.scheduler import Chunk, Scheduler, Sharing
from minfer_lib.generation.request import Request, RequestMetrics
from minfer_lib.models.tokenizer import StreamDecoder

PRIME = 2**31 - 1  # fingerprints are exact in float64


def requests(
    name: str, prompt: Sequence[int] | int = 3, answer: int = 4, priority: float = 0, n: int = 1
) -> list[Request]:
    """n answers of exactly `answer` tokens to a prompt, or to one of `prompt` tokens that begins as no other does."""
    ids = [1000 + sum(map(ord, name)), *range(1, prompt)] if isinstance(prompt, int) else list(prompt)
    made = [
        Request(
            name, index, list(ids), SamplingParams(max_tokens=answer, ignore_eos=True, n=n), 0, answer, frozenset(),
            StreamDecoder(None, ids), RequestMetrics(0.0), priority=priority,
        )
        for index in range(n)
    ]  # fmt: skip
    for each in made if n > 1 else ():
        each.siblings = tuple(other for other in made if other is not each)
    return made


def one(*args, **options) -> Request:
    return requests(*args, **options)[0]


def name_of(each: Request) -> str:
    return each.request_id if each.params.n == 1 else f"{each.request_id}{each.index}"


class Loop:
    """An engine without a model: schedules, pretends to compute, and watches what scheduler and cache do."""

    def __init__(
        self,
        *,
        blocks: int = 8,
        size: int = 2,
        seqs: int = 4,
        budget: int = 8,
        watermark: int = 0,
        caching: bool = True,
    ) -> None:
        self.seqs, self.budget = seqs, budget
        layers = {0: LayerShape(1, 1, 1, torch.float64)}
        self.cache = PagedKVCache(layers, blocks, size, torch.device("cpu"), enable_prefix_caching=caching)
        self.keys = self.cache.pools[0].keys.numpy().reshape(-1)  # the same memory
        self.values = self.cache.pools[0].values.numpy().reshape(-1)
        self.scheduler = Scheduler(self.cache, max_num_seqs=seqs, max_num_batched_tokens=budget, watermark=watermark)
        self.alive: list[Request] = []  # in order of arrival
        self.arrivals: dict[Request, int] = {}
        self.prints: dict[Request, list[float]] = {}  # of each token of a request
        self.ended: list[Request] = []
        self.ended_running = 0
        self.closed = False  # somebody was preempted, and nobody has ended since
        self.newcomers = 0  # who joined all the same: more urgent, or not behind anybody who was preempted
        self.lost: dict[Request, int] = {}  # what those who were preempted had computed
        self.asked = self.found = self.recomputed = 0
        self.clock = 0

    def add(self, *groups: list[Request]) -> None:
        for each in itertools.chain(*groups):
            self.arrivals[each] = len(self.arrivals)
            self.alive.append(each)
            self.prints[each] = []
            self.scheduler.add(each)

    def order(self, each: Request) -> tuple[float, int]:
        return each.priority, self.arrivals[each]

    def fingerprints(self, each: Request, count: int) -> list[float]:
        mine = self.prints[each]
        for token in each.tokens(len(mine), count):
            mine.append(((mine[-1] if mine else 7.0) * 48271 + token + 1) % PRIME)
        return mine[:count]

    def rows(self, each: Request, begin: int, end: int) -> np.ndarray:
        position = np.arange(begin, end)
        size = self.cache.block_size
        return np.asarray(self.cache.block_table(each))[position // size] * size + position % size

    def step(self, outcome: str = "") -> list[Chunk]:
        """outcome: "", "failed", "interrupted" before the model wrote anything, or "written", after it had."""
        self.clock += 1
        self._reap()
        chunks = self._schedule()
        size, tables = self.cache.block_size, self.cache.tables
        for chunk in chunks:
            each = chunk.request
            begin, end = each.num_computed, each.num_computed + chunk.num_tokens
            assert tables[each].tokens == end
            rows = self.rows(each, begin, end)
            for block in set((rows // size).tolist()):
                assert self.cache.allocator.references(block) == 1, "it would write to what others read"
            if outcome != "interrupted":
                self.keys[rows] = self.fingerprints(each, end)[begin:]
                self.values[rows] = -self.keys[rows]
        if outcome in ("interrupted", "written"):
            self.look()
            return chunks
        for chunk in chunks:
            each = chunk.request
            if outcome == "failed":
                each.finish("error", float(self.clock), error="made to")
                continue
            if chunk.samples:
                each.append(self.says(each), None, float(self.clock))
                if each.num_tokens > self.cache.num_blocks * size:
                    each.finish("length", float(self.clock), stop_reason="kv_cache_full")
            self.scheduler.computed(chunk)
        self.look()
        return chunks

    def says(self, each: Request) -> int:
        """Depends on what the cache holds of the request, and on which of n answers it is."""
        rows = self.rows(each, 0, each.num_tokens)
        return int(self.keys[rows].sum() + 3 * each.index) % 5

    def _reap(self) -> None:
        running = set(self.scheduler.running)
        for each in self.scheduler.remove_finished():
            assert each.finished
            self.alive.remove(each)
            self.ended.append(each)
            self.ended_running += each in running
            self.closed &= each not in running
        assert not any(each.finished for each in self.alive)
        self.scheduler.check_invariants()
        # what nobody can find any more may be anything
        empty = [b for b in range(self.cache.num_blocks) if not self.cache.allocator.references(b)]
        empty = sorted(set(empty) - set(self.cache.allocator.cached))
        for store in (self.keys, self.values):
            store.reshape(self.cache.num_blocks, -1)[empty] = np.nan

    def _schedule(self) -> list[Chunk]:
        before = {each: (each.metrics.preemptions, each.num_computed) for each in self.alive}
        were_running = set(self.scheduler.running)
        chunks = self.scheduler.schedule()
        self.scheduler.check_invariants()
        running = self.scheduler.running
        preempted = [each for each in self.alive if each.metrics.preemptions > before[each][0]]
        admitted = [each for each in running if each not in were_running]

        assert len({chunk.request for chunk in chunks}) == len(chunks), "a request twice"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert all(chunk.request in running for chunk in chunks)
        assert all(1 <= chunk.num_tokens <= chunk.request.num_to_compute for chunk in chunks)
        assert bool(chunks) == bool(self.alive), "idle while somebody could run"

        first = min(self.alive, key=self.order, default=None)
        assert first not in preempted, "the first gave way"
        for each in preempted:  # the last gives way
            assert all(self.order(other) < self.order(each) for other in running)
            assert each.metrics.preemptions == before[each][0] + 1
            self.lost[each] = before[each][1] if each in were_running else 0
        if self.closed and were_running & set(running):  # nobody at or behind one who was preempted, before an end
            behind = min((self.order(each) for each in self.lost if each in self.alive), default=None)
            assert behind is None or all(self.order(each) < behind for each in admitted)
            self.newcomers += len(admitted)
        self.closed |= bool(preempted)
        assert self.scheduler.sharing.preemptions <= (self.ended_running + 1) * self.seqs + self.newcomers
        for each in admitted:
            for other in self.scheduler.waiting:  # whom it overtook waits for a sibling
                assert self.order(other) > self.order(each) or any(s in running for s in other.siblings)
            if each in self.lost:
                lost = self.lost.pop(each)
                self.recomputed += lost - min(lost, each.num_computed)
            elif each not in preempted:
                self.asked += each.num_tokens
                self.found += each.num_computed
        sharing = self.scheduler.sharing
        assert (sharing.asked_tokens, sharing.hit_tokens + sharing.forked_tokens) == (self.asked, self.found)
        assert sharing.recomputed_tokens == self.recomputed
        assert self.cache.allocator.num_free >= 0 and (self.cache.enable_prefix_caching or not sharing.hit_tokens)
        return chunks

    def look(self) -> None:
        """All that must be so at any time."""
        self.scheduler.check_invariants()
        cache, running = self.cache, self.scheduler.running
        assert {*self.scheduler.waiting, *running} == set(self.alive)
        for each in running:
            rows = self.rows(each, 0, each.num_computed)
            expected = np.asarray(self.fingerprints(each, each.num_computed))
            assert (self.keys[rows] == expected).all() and (self.values[rows] == -expected).all()
            table = cache.tables[each]
            end = (table.blocks[-1] + 1) * cache.block_size
            assert not self.keys[end - table.unfilled : end].any() and not self.values[end - table.unfilled : end].any()
        report = cache.report()
        assert report["blocks_used"] + report["blocks_free"] == cache.num_blocks
        assert report["kv_tail_tokens"] <= len(running) * (cache.block_size - 1)
        rows = {row for each in running for row in self.rows(each, 0, cache.tables[each].tokens).tolist()}
        assert cache.tokens_used == len(rows)

    def run(self, most: int = 3000) -> list[list[tuple[str, int]]]:
        """Until all has ended: names and numbers of tokens, step by step."""
        steps = []
        while chunks := self.step():
            steps.append([(name_of(chunk.request), chunk.num_tokens) for chunk in chunks])
            assert len(steps) <= most, "does not end"
        assert not self.alive and not self.scheduler.waiting and not self.scheduler.running
        assert self.cache.blocks_used == self.cache.tokens_used == 0
        return steps

    def names(self, which: Sequence[Request]) -> list[str]:
        return [name_of(each) for each in which]


def alone(each: Request) -> list[int]:
    """What the mock says to a prompt when nobody else is there."""
    loop = Loop(blocks=200, size=1, budget=1000, caching=False)
    twin = one("twin", each.prompt_token_ids, each.max_new_tokens)
    twin.index = each.index
    loop.add([twin])
    loop.run()
    return twin.token_ids


# -- any course of events ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Arrival:
    text: int  # prompts of one text begin alike
    prompt: int
    answer: int
    priority: float
    n: int


@dataclasses.dataclass
class Event:
    """What happens before a step, and to it."""

    arrivals: list[Arrival]
    aborts: list[int]  # which of those alive
    outcome: str


events = st.builds(
    Event,
    st.lists(
        st.builds(
            Arrival, st.integers(0, 2), st.integers(1, 14), st.integers(1, 9),
            st.sampled_from([0, 0, 0, -1, 2.5]), st.sampled_from([1, 1, 1, 2, 4]),
        ),
        max_size=3,
    ),
    st.lists(st.integers(0, 9), max_size=1) | st.just([]),
    st.sampled_from(["", "", "", "", "", "interrupted", "written", "failed"]),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    course=st.lists(events, min_size=1, max_size=25),
    blocks=st.integers(1, 14),
    size=st.sampled_from([1, 2, 3, 7]),
    seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 3, 7, 100]),
    watermark=st.integers(0, 2),
    caching=st.booleans(),
)
def test_any_course_of_events(
    course: list[Event], blocks: int, size: int, seqs: int, budget: int, watermark: int, caching: bool
):
    loop = Loop(blocks=blocks, size=size, seqs=seqs, budget=budget, watermark=watermark, caching=caching)
    everybody, names = [], map(str, itertools.count())
    for now, event in enumerate(course):
        for a in event.arrivals:
            text = [1000 + a.text] + [a.text] * 3 + list(range(20))
            group = requests(next(names), text[: min(a.prompt, blocks * size)], a.answer, a.priority, a.n)
            loop.add(group)
            everybody += group
        for index in event.aborts:
            if loop.alive:
                loop.alive[index % len(loop.alive)].finish("abort", now)
        loop.step(event.outcome)
    loop.run()
    assert sorted(loop.ended, key=everybody.index) == everybody  # each once
    for each in everybody[:8]:
        expected = alone(each)
        assert each.token_ids == expected[: len(each.token_ids)]
        if each.finish_reason == "length":
            full = each.stop_reason == "kv_cache_full"
            assert each.num_tokens == blocks * size + 1 if full else each.token_ids == expected


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=2, max_size=8),
    blocks=st.integers(6, 12),
    size=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([1, 3, 100]),
)
def test_equals_end_their_first_token_in_order_of_arrival_and_the_first_of_all_never_waits(
    sizes: list[tuple[int, int]], blocks: int, size: int, budget: int
):
    """In a pool that is too small for all of them."""
    sizes = [(min(prompt, blocks * size), answer) for prompt, answer in sizes]
    loop = Loop(blocks=blocks, size=size, seqs=8, budget=budget, caching=False)
    everybody = [one(chr(97 + i), *each) for i, each in enumerate(sizes)]
    loop.add(everybody)
    loop.run()
    first = [each.metrics.first_token for each in everybody]
    assert first == sorted(first) and everybody[0].metrics.preemptions == 0
    prompt, answer = len(everybody[0].prompt_token_ids), len(everybody[0].token_ids)
    if budget >= len(everybody) + prompt:
        assert everybody[0].metrics.finished == answer  # a token in every step, as if it were alone


# -- by hand: preemption ----------------------------------------------------------------------------------------------


def test_who_came_last_gives_way_and_comes_back_when_somebody_has_ended():
    loop = Loop(blocks=4, size=2, caching=False)
    a, b = one("a", 2, 6), one("b", 2, 4)
    loop.add([a, b])
    assert loop.run() == [
        [("a", 2), ("b", 2)],  # a block each
        [("a", 1), ("b", 1)],  # two each
        [("a", 1), ("b", 1)],
        [("a", 1)],  # a third for a: b gives way
        [("a", 1)],
        [("a", 1)],
        [("b", 5)],  # its prompt, and what it had said
    ]
    assert (a.metrics.preemptions, b.metrics.preemptions) == (0, 1)
    sharing = loop.scheduler.sharing
    assert (sharing.preemptions, sharing.recomputed_tokens, sharing.hit_tokens) == (1, 4, 0)
    assert a.token_ids == alone(a) and b.token_ids == alone(b)


def test_who_is_last_itself_waits_and_keeps_what_it_has():
    loop = Loop(blocks=3, size=2, caching=False)
    a, b = one("a", 2, 3), one("b", 1, 6)
    loop.add([a, b])
    steps = loop.run()
    # in the third step b needs a second block, a has two: b waits for its end
    assert steps == [
        [("a", 2), ("b", 1)],
        [("a", 1), ("b", 1)],
        [("a", 1)],
        [("b", 1)],
        [("b", 1)],
        [("b", 1)],
        [("b", 1)],
    ]
    assert b.metrics.preemptions == 0


def test_a_less_urgent_request_gives_way_though_it_came_first():
    loop = Loop(blocks=4, size=2, caching=False)
    later, urgent = one("later", 2, 9, priority=1), one("urgent", 2, 5, priority=-1)
    loop.add([later])
    loop.step()
    loop.add([urgent])
    loop.run()
    assert (later.metrics.preemptions, urgent.metrics.preemptions) == (1, 0)
    assert later.stop_reason == "kv_cache_full" and later.num_tokens == 9


def test_nobody_joins_between_a_preemption_and_an_end():
    """Who joined at once would be the next to be preempted."""
    loop = Loop(blocks=7, size=2, seqs=3, caching=False)
    a, b, c = one("a", 4, 11), one("b", 4, 9), one("c", 4, 1)
    loop.add([a, b])
    while not b.metrics.preemptions:
        loop.step()
    loop.add([c])
    room = 0
    while not a.finished:
        room = max(room, loop.cache.allocator.num_free)
        assert loop.names(loop.scheduler.running) == ["a"]
        loop.step()
    assert room == 2  # c would have fitted
    assert loop.names(loop.scheduler.waiting) == ["b", "c"]  # where it stood
    assert [name for name, _ in loop.run()[0]] == ["b", "c"]


def test_an_end_lets_others_join_while_the_rest_runs_on():
    loop = Loop(blocks=8, size=2, caching=False)
    a, b, c, d = one("a", 2, 12), one("b", 2, 6), one("c", 2, 9), one("d", 1, 1)
    loop.add([a, b, c, d])
    while not c.metrics.preemptions:
        loop.step()
    while not b.finished:
        assert loop.names(loop.scheduler.running) == ["a", "b"]
        loop.step()
    assert [name_of(chunk.request) for chunk in loop.step()] == ["a", "c"]
    loop.run()


def test_a_request_for_which_all_that_give_way_is_too_little_leaves_none_of_them_in_the_step():
    """r, an answer that comes back with ten tokens said, waits for its sibling s, so that x gets past it. Later it is
    to compute five, x gives way for it, and that is not enough: r waits, and x must not be computed without a table."""
    loop = Loop(blocks=19, size=1, seqs=8, budget=9, caching=False)
    t, u, x = one("t", 1, 20), one("u", 1, 20), one("x", 1, 20)
    s, r = requests("s", 2, 20, n=2)
    for token in range(10):
        r.append(token, None, 0.0)
    loop.add([t, u], [s, r], [x])
    assert [(name_of(c.request), c.num_tokens) for c in loop.step()] == [("t", 1), ("u", 1), ("s0", 2), ("x", 1)]
    second = [(name_of(c.request), c.num_tokens) for c in loop.step()]
    assert second == [("t", 1), ("u", 1), ("s0", 1), ("x", 1), ("s1", 5)]
    third = [(name_of(c.request), c.num_tokens) for c in loop.step()]
    assert third == [("t", 1), ("u", 1), ("s0", 1)] and x.metrics.preemptions == 1
    assert loop.names(loop.scheduler.running) == ["t", "u", "s0", "s1"] and r.num_computed == 7
    loop.run()


def test_a_preempted_request_finds_again_what_nobody_took():
    loop = Loop(blocks=6, size=2, budget=100)
    a, b = one("a", 2, 5), one("b", 6, 6)
    loop.add([a, b])
    while not b.metrics.preemptions:
        loop.step()
    while b in loop.scheduler.waiting:
        loop.step()
    # b had 8 tokens in 4 full blocks; a took the one that is evicted first, its end
    assert loop.scheduler.sharing.recomputed_tokens == 2
    assert loop.scheduler.sharing.hit_tokens == 0  # that is for those who join for the first time
    loop.run()
    assert b.token_ids == alone(b)


# -- by hand: admission -----------------------------------------------------------------------------------------------


def test_all_tokens_of_a_prompt_must_fit_though_it_comes_in_chunks():
    loop = Loop(blocks=6, size=2, budget=3, caching=False)
    a, b, c = one("a", 5, 4), one("b", 8, 1), one("c", 1, 1)
    loop.add([a, b, c])
    loop.step()
    assert loop.cache.blocks_used == 2  # a has 3 of its 5 tokens, and needs one block more
    loop.step()
    # 3 are free, b needs 4: it waits though its first chunk would fit, and c must not overtake
    assert loop.names(loop.scheduler.running) == ["a"] and loop.names(loop.scheduler.waiting) == ["b", "c"]
    steps = loop.run()
    assert [name for step in steps for name, _ in step if name != "a"] == ["b", "b", "b", "c"]
    assert loop.scheduler.sharing.preemptions == 0


@pytest.mark.parametrize(("watermark", "together"), [(0, 2), (2, 2), (3, 1), (18, 1)])
def test_who_joins_others_leaves_room_for_them_to_grow(watermark: int, together: int):
    loop = Loop(blocks=5, size=2, watermark=watermark)
    loop.add([one("a", 4, 2), one("b", 4, 2)])
    assert len(loop.step()) == together
    loop.run()  # one that is alone needs to leave none: nobody waits for ever


@pytest.mark.parametrize(("blocks", "together"), [(8, 3), (7, 2)])
def test_the_more_run_the_more_room_is_left(blocks: int, together: int):
    """a and b take four blocks; c, which needs two, has to leave two more, one for each of them."""
    loop = Loop(blocks=blocks, size=1, watermark=1)
    loop.add([one("a", 2, 2), one("b", 2, 2), one("c", 2, 2)])
    assert len(loop.step()) == together
    loop.run()


def test_what_waits_for_its_last_tokens_is_kept_free_for_who_runs():
    """a has 2 of 8 tokens: b finds four blocks free, three of which a will need."""
    loop = Loop(blocks=5, size=2, budget=2, caching=False)
    loop.add([one("a", 8, 1, priority=0)])
    loop.step()
    urgent = one("urgent", 3, 1, priority=-1)
    loop.add([urgent])
    assert [name for step in loop.run() for name, _ in step] == ["a", "a", "a", "urgent", "urgent"]
    assert loop.scheduler.sharing.preemptions == 0


def test_a_prompt_that_fills_the_pool_and_an_answer_that_does_not_fit():
    loop = Loop(blocks=3, size=2)
    full, other = one("full", 6, 4), one("other", 5, 9)
    loop.add([full, other])
    loop.run()
    assert [(len(r.token_ids), r.stop_reason) for r in (full, other)] == [(1, "kv_cache_full"), (2, "kv_cache_full")]


# -- by hand: sharing -------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_wait_until_the_first_has_computed_it_and_then_share_it():
    loop = Loop(blocks=20, size=2, budget=4, seqs=8, caching=False)
    group, other = requests("s", 7, 2, n=3), one("o", 1, 1)
    loop.add(group, [other])
    steps = [[(name_of(c.request), c.num_tokens) for c in loop.step()] for _ in range(2)]
    # the second step has a token left: who stands behind those that wait gets it
    assert steps == [[("s0", 4)], [("s0", 3), ("o", 1)]]
    assert [(name_of(c.request), c.num_tokens) for c in loop.step()] == [("s0", 1), ("s1", 1), ("s2", 1)]
    # 6 of 7 tokens are taken over; the seventh is computed, to know what comes next: it begins a block
    assert loop.cache.bytes_copied == 0 and loop.cache.allocator.num_shared == 3
    assert (loop.scheduler.sharing.forked_tokens, loop.scheduler.sharing.hit_tokens) == (12, 0)
    loop.run()
    assert [each.token_ids for each in group] == [alone(each) for each in group]
    assert len({tuple(each.token_ids) for each in group}) == 3


def test_a_fork_copies_the_rows_of_the_unfilled_block():
    loop = Loop(blocks=20, size=4, budget=100, caching=False)
    group = requests("s", 7, 3, n=4)
    loop.add(group)
    loop.step(), loop.step()
    assert loop.cache.bytes_copied == 3 * 2 * loop.cache.bytes_per_token  # tokens 5 and 6, three times
    assert loop.cache.blocks_used == 1 + 4 and loop.cache.allocator.num_shared == 1
    loop.run()
    assert [each.token_ids for each in group] == [alone(each) for each in group]


def test_answers_of_which_the_first_ended_with_the_prompt():
    """It has nothing to share any more: the next one computes the prompt, or finds it."""
    for caching in (True, False):
        loop = Loop(blocks=20, size=2, budget=100, caching=caching)
        loop.add(requests("s", 5, 1, n=3))
        later = [[("s1", 1), ("s2", 1)]] if caching else [[("s1", 5)], [("s2", 5)]]
        assert loop.run() == [[("s0", 5)], *later]


def test_a_prompt_that_was_computed_before_is_not_computed_again():
    loop = Loop(blocks=20, size=2, budget=100)
    loop.add([one("a", [1, 2, 3, 4, 5], 4)])
    loop.run()
    said = alone(one("a", [1, 2, 3, 4, 5], 4))
    loop.add([one("b", [1, 2, 3, 4, 5, *said, 9], 1), one("c", [1, 2, 3, 9, 5], 1)])
    assert loop.run() == [[("b", 2), ("c", 3)]]  # 8 tokens of a's: prompt and answer, in full blocks; and 2
    assert loop.scheduler.sharing.hit_tokens == 8 + 2 and loop.scheduler.sharing.asked_tokens == 5 + 10 + 5


def test_what_others_computed_meanwhile_is_no_less_than_nothing_to_compute_again():
    sharing = Sharing()
    sharing.count(one("a"), Prefix(8), 3)  # had computed 3 tokens, and comes back to find 8
    assert sharing == Sharing()
    sharing.count(one("a"), Prefix(2), 5)
    assert sharing == Sharing(recomputed_tokens=3)
    sharing.count(one("a", 7), Prefix(4), None), sharing.count(one("a", 7), Prefix(6, forked=True), None)
    assert sharing == Sharing(asked_tokens=14, hit_tokens=4, forked_tokens=6, recomputed_tokens=3)


# -- under pressure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_many_in_a_pool_that_is_too_small(seed: int):
    draw = random.Random(seed)
    blocks, size = draw.randint(3, 24), draw.choice([1, 1, 2, 3])
    loop = Loop(
        blocks=blocks, size=size, seqs=draw.randint(2, 8), budget=draw.choice([1, 2, 3, 4, 5, 7, 100]),
        watermark=draw.randint(0, 1), caching=draw.random() < 0.5,
    )  # fmt: skip
    for now in range(30):
        if draw.random() < 0.4:
            ids = [1000 + draw.randint(0, 1), 1, 1, 1, *range(40)][: min(draw.randint(1, 12), blocks * size)]
            n, priority = draw.choice([1, 1, 2, 3, 4]), draw.choice([0, 0, 0, 0, -1, 2])
            loop.add(requests(str(now), ids, draw.randint(1, 14), priority, n))
        if draw.random() < 0.05 and loop.alive:
            draw.choice(loop.alive).finish("abort", now)
        loop.step(draw.choice([""] * 12 + ["interrupted", "written"]))
    loop.run()
    for each in loop.ended[:6]:
        assert each.token_ids == alone(each)[: len(each.token_ids)]


# -- by hand: who may join after a preemption -------------------------------------------------------------------------


def preempting() -> tuple[Loop, Request]:
    """x decodes on and on; y, behind it with a long prompt, has just given way: nearly all of the pool is empty."""
    loop = Loop(blocks=10, size=2, budget=32, caching=False)
    x, y = one("x", 2, 14), one("y", 15, 5)
    loop.add([x, y])
    while not y.metrics.preemptions:
        loop.step()
    return loop, y


def test_nobody_passes_one_who_was_preempted():
    loop, _ = preempting()
    loop.add([one("z", 2, 1)])
    loop.step()
    assert loop.names(loop.scheduler.running) == ["x"]
    loop.run()


def test_when_the_preempted_one_is_gone_others_join_at_once():
    loop, y = preempting()
    y.finish("abort", 0.0)
    loop.add([one("z", 2, 1)])
    loop.step()
    assert loop.names(loop.scheduler.running) == ["x", "z"]
    loop.run()


def test_who_is_more_urgent_than_the_preempted_one_joins_at_once():
    loop, _ = preempting()
    loop.add([one("urgent", 2, 1, priority=-1)])
    loop.step()
    assert set(loop.names(loop.scheduler.running)) == {"x", "urgent"}
    loop.run()
