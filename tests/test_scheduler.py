"""The scheduler against a plain model of what it should do, with a mock in place of the language model."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import SamplingParams
from minfer_lib.cache.pool import LayerShape
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine.scheduler import Chunk, Scheduler
from minfer_lib.errors import InvariantBroken
from minfer_lib.generation.request import Request, RequestMetrics
from minfer_lib.models.tokenizer import StreamDecoder

SLOT = 40  # tokens


def request(name: str, prompt: int = 3, answer: int = 4, priority: float = 0, deadline: float | None = None) -> Request:
    """Asks for an answer of exactly `answer` tokens to a prompt of `prompt` tokens."""
    ids = list(range(prompt))
    return Request(
        name, 0, ids, SamplingParams(max_tokens=answer, ignore_eos=True), 0, answer, frozenset(),
        StreamDecoder(None, ids), RequestMetrics(0.0), priority=priority, deadline=deadline,
    )  # fmt: skip


class Loop:
    """An engine without a model: schedules, pretends to compute, and watches what the scheduler does.

    What the scheduler should do is worked out by `expected` from what can be seen from outside, request by request.
    """

    def __init__(self, *, slots: int = 3, max_num_seqs: int = 3, budget: int = 8) -> None:
        self.slots, self.max_num_seqs, self.budget = slots, max_num_seqs, budget
        self.cache = SlotKVCache({}, slots, SLOT, torch.device("cpu"))
        self.scheduler = Scheduler(self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.alive: list[Request] = []  # in order of arrival
        self.last: dict[Request, tuple[int, int]] = {}  # (step, place in it) that a request was last served at
        self.ended: list[Request] = []
        self.step_number = 0

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)
            self.alive.append(each)

    def admitted(self) -> list[Request]:
        return [each for each in self.alive if each in self.last]

    def expected(self) -> dict[Request, int]:
        """Tokens for each request: pick whoever comes first, again and again."""
        budget, picked = self.budget, {}
        running = self.admitted()
        closed = False  # to those who wait
        while budget:
            candidates = [
                (each.priority, not decodes(each), self.last[each] if decodes(each) else (0, 0), arrival, each)
                for arrival, each in enumerate(self.alive)
                if each not in picked and (each in running or not closed)
            ]
            if not candidates:
                break
            best = min(candidates, key=lambda c: c[:4])[4]
            if best not in running:
                if len(running) == min(self.slots, self.max_num_seqs):
                    closed = True
                    continue
                running.append(best)
            picked[best] = min(budget, left(best))
            budget -= picked[best]
        return picked

    def step(self, interrupted: bool = False, failed: bool = False) -> list[Chunk]:
        for each in self.scheduler.remove_finished():
            assert each.finished and each in self.alive
            self.alive.remove(each)
            self.ended.append(each)
        assert not any(each.finished for each in self.alive)
        self.check()
        self.step_number += 1
        expected = self.expected()
        chunks = self.scheduler.schedule()
        self.check()

        assert len({chunk.request for chunk in chunks}) == len(chunks), "a request twice"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert all(1 <= chunk.num_tokens <= left(chunk.request) for chunk in chunks)
        assert bool(chunks) == bool(self.alive), "idle while somebody could run"
        assert {chunk.request: chunk.num_tokens for chunk in chunks} == expected
        for place, chunk in enumerate(chunks):
            assert chunk.samples == (chunk.num_tokens == left(chunk.request))
            self.last[chunk.request] = self.step_number, place
        assert set(self.scheduler.running) == set(self.admitted())
        if interrupted:
            return chunks
        for chunk in chunks:
            if failed:
                chunk.request.finish("error", float(self.step_number), error="made to")
            else:
                samples = chunk.samples
                chunk.request.num_computed += chunk.num_tokens
                if samples:
                    chunk.request.append(7, None, float(self.step_number))
        return chunks

    def check(self) -> None:
        self.scheduler.check_invariants()
        assert self.cache.blocks_used == len(self.scheduler.running)
        assert {*self.scheduler.waiting, *self.scheduler.running} == set(self.alive)

    def run(self) -> list[list[tuple[str, int]]]:
        """Until all has ended: names and numbers of tokens, step by step."""
        work = sum(left(each) + each.max_new_tokens - len(each.token_ids) for each in self.alive)
        steps = []
        while chunks := self.step():
            steps.append([(chunk.request.request_id, chunk.num_tokens) for chunk in chunks])
            assert len(steps) <= work, "does not end"
        assert not self.alive and not self.scheduler.waiting and not self.scheduler.running
        assert self.cache.blocks_used == self.cache.tokens_used == 0
        return steps


def left(each: Request) -> int:
    return len(each.prompt_token_ids) + len(each.token_ids) - each.num_computed


def decodes(each: Request) -> bool:
    return each.num_computed > 0 and left(each) == 1


# -- any course of events ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Event:
    """What happens before a step, and to it."""

    arrivals: list[tuple[int, int, float, int | None]]  # prompt, answer, priority, time limit in steps
    aborts: list[int]  # which of those alive
    outcome: str


arrivals = st.tuples(st.integers(1, 12), st.integers(1, 6), st.sampled_from([0, 0, 0, -1, 2.5]),
                     st.none() | st.none() | st.integers(0, 12))  # fmt: skip
events = st.builds(
    Event,
    st.lists(arrivals, max_size=4),
    st.lists(st.integers(0, 9), max_size=2) | st.just([]),
    st.sampled_from(["", "", "", "", "interrupted", "failed"]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(events, min_size=1, max_size=25), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 3, 7, 100])
)
def test_any_course_of_events(course: list[Event], slots: int, max_num_seqs: int, budget: int):
    loop, names = Loop(slots=slots, max_num_seqs=max_num_seqs, budget=budget), iter(range(1000))
    everybody = []
    for now, event in enumerate(course):
        for prompt, answer, priority, limit in event.arrivals:
            deadline = None if limit is None else now + limit
            everybody.append(request(str(next(names)), prompt, answer, priority, deadline))
            loop.add(everybody[-1])
        for index in event.aborts:
            if loop.alive:
                loop.alive[index % len(loop.alive)].finish("abort", now)
        for each in loop.alive:
            if each.deadline is not None and now >= each.deadline:
                each.finish("timeout", now)
        loop.step(interrupted=event.outcome == "interrupted", failed=event.outcome == "failed")
    loop.run()
    assert sorted(loop.ended, key=everybody.index) == everybody  # each once
    for each in everybody:
        assert len(each.token_ids) == each.max_new_tokens if each.finish_reason == "length" else True
        assert each.num_computed <= len(each.prompt_token_ids) + len(each.token_ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=9), st.integers(1, 4))
def test_equals_are_admitted_and_get_their_first_token_in_order_of_arrival(sizes: list[tuple[int, int]], seqs: int):
    loop = Loop(slots=seqs, max_num_seqs=seqs, budget=5)
    everybody = [request(str(i), *size) for i, size in enumerate(sizes)]
    loop.add(*everybody)
    admitted: list[str] = []
    for step in loop.run():
        admitted += [name for name, _ in step if name not in admitted]
    assert admitted == [each.request_id for each in everybody]
    first = [each.metrics.first_token for each in everybody]
    assert first == sorted(first)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(2, 12))
def test_decodes_take_turns_when_the_budget_is_smaller_than_their_number(count: int, budget: int, answer: int):
    loop = Loop(slots=count, max_num_seqs=count, budget=100)
    everybody = [request(str(i), 2, answer) for i in range(count)]
    loop.add(*everybody)
    loop.step()
    loop.budget = loop.scheduler.max_num_batched_tokens = budget
    while loop.step():
        said = [len(each.token_ids) for each in everybody]
        assert max(said) - min(said) <= 1
    assert loop.step_number == 2 + -(-count * (answer - 1) // min(count, budget))  # no token of it is left unused


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_taken_in_chunks_beside_those_who_decode():
    loop = Loop(budget=4)
    loop.add(request("short", 2, 5), request("long", 9, 2))
    assert loop.run() == [
        [("short", 2), ("long", 2)],
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 1)],
        [("short", 1), ("long", 1)],
    ]


def test_one_token_a_step():
    loop = Loop(budget=1)
    loop.add(request("a", 2, 2), request("b", 1, 3))
    assert loop.run() == [[("a", 1)], [("a", 1)], [("a", 1)], [("b", 1)], [("b", 1)], [("b", 1)]]


def test_what_an_urgent_request_leaves_of_the_budget_goes_round():
    loop = Loop(slots=4, max_num_seqs=4, budget=3)
    loop.add(*[request(name, 1, 9) for name in "abc"])
    loop.step()
    loop.add(request("urgent", 1, 6, priority=-1))
    steps = [[name for name, _ in step] for step in loop.run()]
    assert steps[:6] == [["urgent", *pair] for pair in ("ab", "ca", "bc", "ab", "ca", "bc")]
    assert steps[6] == ["a", "b", "c"]


def test_a_lower_number_runs_first_and_does_not_wait_for_the_others_to_end():
    loop = Loop(slots=2, max_num_seqs=2, budget=3)
    loop.add(request("later", 3, 3), request("first", 4, 2, priority=-1))
    assert loop.run() == [
        [("first", 3)],
        [("first", 1), ("later", 2)],
        [("first", 1), ("later", 1)],
        [("later", 1)],
        [("later", 1)],
    ]


def test_an_urgent_request_without_room_keeps_nobody_from_running():
    """With fewer slots than may run, it waits for one; those that have one must go on, or it would wait for ever."""
    for slots, seqs in [(1, 2), (2, 1), (1, 1)]:
        loop = Loop(slots=slots, max_num_seqs=seqs)
        loop.add(request("runs", 2, 3, priority=5))
        loop.step()
        loop.add(request("urgent", 2, 2, priority=0), request("patient", 1, 1, priority=9))
        assert loop.run() == [[("runs", 1)], [("runs", 1)], [("urgent", 2)], [("urgent", 1)], [("patient", 1)]]


def test_nobody_overtakes_in_the_queue():
    loop = Loop(slots=1, max_num_seqs=3, budget=100)
    loop.add(request("a", 2, 2), request("big", 30, 1), request("small", 1, 1))
    assert loop.run() == [[("a", 2)], [("a", 1)], [("big", 30)], [("small", 1)]]


def test_a_freed_slot_is_given_on_in_the_next_step():
    loop = Loop(slots=1, max_num_seqs=1)
    one, two = request("one", 2, 9), request("two", 2, 1)
    loop.add(one, two)
    loop.step(), loop.step()
    one.finish("abort", 0.0)
    assert [chunk.request for chunk in loop.step()] == [two]
    assert loop.ended == [one] and len(one.token_ids) == 2


@pytest.mark.parametrize("computed", [0, 2, 6], ids=["waiting", "in the middle of its prompt", "decoding"])
def test_what_has_ended_is_taken_out_wherever_it_stands(computed: int):
    loop = Loop(slots=2, max_num_seqs=1 if not computed else 2, budget=3)
    victim = request("victim", 5, 9)
    loop.add(request("other", 1, 9), victim)
    loop.step()
    while victim.num_computed < computed:
        loop.step()
    assert (victim in loop.scheduler.waiting) == (not computed)
    victim.finish("abort", 0.0)
    assert loop.scheduler.remove_finished() == [victim] and loop.scheduler.remove_finished() == []
    loop.scheduler.check_invariants()
    assert loop.cache.blocks_used == 1 and victim not in [*loop.scheduler.waiting, *loop.scheduler.running]


# -- what `check_invariants` finds ------------------------------------------------------------------------------------


def busy() -> Loop:
    loop = Loop(slots=2, max_num_seqs=2, budget=4)
    loop.add(*[request(name, 3, 9) for name in "abcd"])
    loop.step()
    loop.check()
    assert [len(loop.scheduler.running), len(loop.scheduler.waiting)] == [2, 2]
    return loop


BREAKS: dict[str, Callable[[Scheduler], object]] = {
    "in both queues": lambda s: s.waiting.append(s.running[0]),
    "twice in a queue": lambda s: s.running.append(s.running[0]),
    "lost from the waiting": lambda s: s.waiting.pop(),
    "lost from the running": lambda s: s.running.pop(),
    "never arrived": lambda s: s.waiting.append(request("stranger")),
    "waiting out of order": lambda s: s.waiting.reverse(),
    "runs without having been admitted": lambda s: s.running.append(s.waiting.pop()),
    "waits and was admitted": lambda s: s.waiting.insert(0, s.running.pop(0)),
    "more than may run": lambda s: setattr(s, "max_num_seqs", 1),
    "more computed than there is": lambda s: setattr(s.running[0], "num_computed", 99),
    "less than nothing computed": lambda s: setattr(s.running[0], "num_computed", -1),
    "runs without room": lambda s: s.cache.free(s.running[0]),
    "waits with room": lambda s: (s.cache.free(s.running[0]), s.cache.allocate(s.waiting[0], 1)),
    "a slot that is free and owned": lambda s: s.cache._free.append(s.cache._slots[s.running[0]]),
    "a slot that is neither": lambda s: s.cache._slots.pop(s.running[0]),
    "a slot with two owners": lambda s: s.cache._slots.update({s.running[0]: s.cache._slots[s.running[1]]}),
    "more rows than a slot has": lambda s: s.cache._written.update({s.running[0]: SLOT + 1}),
    "fewer rows than were computed": lambda s: s.cache._written.update({s.running[0]: 0}),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_state_is_found(how: str):
    loop = busy()
    BREAKS[how](loop.scheduler)
    with pytest.raises(InvariantBroken):
        loop.scheduler.check_invariants()


# -- the cache of slots -----------------------------------------------------------------------------------------------


def cache(slots: int = 3, length: int = 4) -> SlotKVCache:
    return SlotKVCache({0: LayerShape(1, 2, 3, torch.float32)}, slots, length, torch.device("cpu"))


def filled(each: SlotKVCache) -> Iterator[int]:
    """Slots that hold anything but zeros."""
    pool = each.pools[0]
    for slot in range(each.num_blocks):
        rows = slice(slot * each.block_size, (slot + 1) * each.block_size)
        if pool.keys[rows].any() or pool.values[rows].any():
            yield slot


def test_slots_are_given_out_lowest_first_and_wiped_when_they_come_back():
    slots = cache()
    assert [slots.allocate(name, 2) for name in "abc"] == [True] * 3 and not slots.allocate("d", 1)
    assert [slots.block_table(name) for name in "abc"] == [[0], [1], [2]]
    for slot in range(3):
        slots.pools[0].write(torch.tensor([4 * slot, 4 * slot + 1]), torch.full((2, 1, 2), torch.nan),
                             torch.full((2, 1, 3), torch.inf))  # fmt: skip
    slots.free("b"), slots.free("a"), slots.free("a"), slots.free("nobody")
    assert list(filled(slots)) == [2]
    assert slots.allocate("d", 1) and slots.block_table("d") == [0]
    slots.check_invariants()


def test_a_refusal_changes_nothing():
    slots = cache(slots=1)
    assert slots.allocate("a", 3) and not slots.allocate("a", 5) and not slots.allocate("b", 1)
    assert (slots.blocks_used, slots.tokens_used) == (1, 3)
    assert slots.allocate("a", 4) and slots.allocate("a", 2) and slots.tokens_used == 4  # what was written stays so
    slots.check_invariants()


def test_bytes_by_hand():
    slots = cache()
    assert slots.bytes_per_token == (2 + 3) * 4
    assert slots.nbytes_reserved == 3 * 4 * 20 == sum(t.nbytes for p in slots.pools.values() for t in all_of(p))
    slots.allocate("a", 3)
    assert slots.nbytes_used == 3 * 20


def all_of(pool: object) -> Iterable[torch.Tensor]:
    return pool.keys, pool.values
