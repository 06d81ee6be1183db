"""The scheduler over both caches, against a plain model of what it should do; see `scheduling.Loop`.

What only a cache of pages can do (preempting, sharing) is in test_paged_scheduler.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import CPU, LONGEST, Loop, alone, named, names, one, requests

from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine.scheduler import Scheduler
from minfer_lib.errors import InvariantBroken
from minfer_lib.generation.request import Request
from minfer_lib.generation.sampling import Samples

KINDS = ["slots", "paged"]
kinds = pytest.mark.parametrize("kind", KINDS)

# -- any course of events ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Event:
    """What happens before a step, and to it."""

    arrivals: list[tuple[int, int, float]]  # prompt, answer, priority
    aborts: list[int]  # which of those alive
    outcome: str


arrivals = st.tuples(st.integers(1, 12), st.integers(1, 6), st.sampled_from([0, 0, 0, -1, 2.5]))
OUTCOMES = [*[""] * 8, "interrupted", "written", "torn", "failed", "undefined"]
events = st.builds(
    Event,
    st.lists(arrivals, max_size=4),
    st.lists(st.integers(0, 9), max_size=2) | st.just([]),
    st.sampled_from(OUTCOMES),
)


@kinds
@settings(max_examples=80, deadline=None)
@given(course=st.lists(events, min_size=1, max_size=25), slots=st.integers(1, 5), seqs=st.integers(1, 5),
       budget=st.sampled_from([1, 2, 3, 5, 7, 100]))  # fmt: skip
def test_any_course_of_events(kind: str, course: list[Event], slots: int, seqs: int, budget: int):
    loop = Loop.ample(kind, seqs=seqs, budget=budget) if kind == "paged" else (
        Loop(kind, blocks=slots, seqs=seqs, budget=budget, exact=True)
    )  # fmt: skip
    everybody, ids = [], map(str, itertools.count())
    for event in course:
        group = [one(next(ids), *arrival) for arrival in event.arrivals]
        loop.add(group)
        everybody += group
        for index in event.aborts:
            if loop.alive:
                loop.abort(loop.alive[index % len(loop.alive)])
        loop.step(event.outcome)
    loop.run()
    assert sorted(loop.ended, key=everybody.index) == everybody  # each once
    for request in everybody[:8]:
        expected = alone(request)
        said = len(expected) if request.finish_reason == "length" else len(request.token_ids)
        assert request.token_ids == expected[:said]


@kinds
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=9), seqs=st.integers(1, 4))
def test_equals_are_admitted_and_get_their_first_token_in_order_of_arrival(
    kind: str, sizes: list[tuple[int, int]], seqs: int
):
    loop = Loop.ample(kind, seqs=seqs, budget=5)
    everybody = [one(str(i), *size) for i, size in enumerate(sizes)]
    loop.add(everybody)
    admitted: list[str] = []
    for step in loop.run():
        admitted += [name for name, _ in step if name not in admitted]
    assert admitted == names(everybody)
    first = [request.metrics.first_token for request in everybody]
    assert first == sorted(first)


@kinds
@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), budget=st.integers(1, 9), answer=st.integers(2, 12))
def test_decodes_take_turns_when_the_budget_is_smaller_than_their_number(
    kind: str, count: int, budget: int, answer: int
):
    loop = Loop.ample(kind, seqs=count, budget=100)
    everybody = [one(str(i), 2, answer) for i in range(count)]
    loop.add(everybody)
    loop.step()
    loop.budget = loop.scheduler.max_num_batched_tokens = budget
    while loop.step():
        said = [len(request.token_ids) for request in everybody]
        assert max(said) - min(said) <= 1
    assert loop.clock == 2 + -(-count * (answer - 1) // min(count, budget))  # no token of it is left unused


# -- by hand ----------------------------------------------------------------------------------------------------------


@kinds
def test_a_long_prompt_is_taken_in_chunks_beside_those_who_decode(kind: str):
    loop = Loop.ample(kind, budget=4)
    loop.add([one("short", 2, 5), one("long", 9, 2)])
    assert loop.run() == [
        [("short", 2), ("long", 2)],
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 1)],
        [("short", 1), ("long", 1)],
    ]


@kinds
def test_one_token_a_step(kind: str):
    loop = Loop.ample(kind, budget=1)
    loop.add([one("a", 2, 2), one("b", 1, 3)])
    assert loop.run() == [[("a", 1)], [("a", 1)], [("a", 1)], [("b", 1)], [("b", 1)], [("b", 1)]]


@kinds
def test_what_an_urgent_request_leaves_of_the_budget_goes_round(kind: str):
    loop = Loop.ample(kind, seqs=4, budget=3)
    loop.add([one(name, 1, 9) for name in "abc"])
    loop.step()
    loop.add([one("urgent", 1, 6, priority=-1)])
    steps = [[name for name, _ in step] for step in loop.run()]
    assert [set(step) for step in steps[:6]] == [{"urgent", *pair} for pair in ("ab", "ca", "bc", "ab", "ca", "bc")]
    assert steps[6] == ["a", "b", "c"]


@kinds
def test_a_lower_number_runs_first_and_does_not_wait_for_the_others_to_end(kind: str):
    loop = Loop.ample(kind, seqs=2, budget=3)
    loop.add([one("later", 3, 3), one("first", 4, 2, priority=-1)])
    assert loop.run() == [
        [("first", 3)],
        [("first", 1), ("later", 2)],
        [("first", 1), ("later", 1)],
        [("later", 1)],
        [("later", 1)],
    ]


@kinds
def test_a_run_of_mixed_priorities(kind: str):
    """Who is more urgent joins first, is served first, and never waits for the others to end."""
    loop = Loop.ample(kind, seqs=2, budget=2)
    loop.add([one("c", 1, 2, priority=7.5), one("b", 2, 2), one("a", 1, 3, priority=-1), one("b2", 1, 1)])
    assert loop.run() == [
        [("a", 1), ("b", 1)],
        [("a", 1), ("b", 1)],
        [("a", 1), ("b", 1)],
        [("b2", 1), ("c", 1)],
        [("c", 1)],
    ]


@pytest.mark.parametrize(
    ("kind", "places", "seqs"), [("slots", 1, 2), ("slots", 2, 1), ("slots", 1, 1), ("paged", 60, 1)]
)
def test_an_urgent_request_without_room_keeps_nobody_from_running(kind: str, places: int, seqs: int):
    """It waits for a place; those that have one must go on, or it would wait for ever."""
    loop = Loop(kind, blocks=places, seqs=seqs, exact=True, caching=False)
    loop.add([one("runs", 2, 3, priority=5)])
    loop.step()
    loop.add([one("urgent", 2, 2, priority=0), one("patient", 1, 1, priority=9)])
    assert loop.run() == [[("runs", 1)], [("runs", 1)], [("urgent", 2)], [("urgent", 1)], [("patient", 1)]]


@kinds
def test_nobody_overtakes_in_the_queue(kind: str):
    loop = Loop(kind, blocks=1 if kind == "slots" else 15, size=2, seqs=3, budget=100, caching=False)
    loop.add([one("a", 2, 2), one("big", 30, 1), one("small", 1, 1)])
    assert loop.run() == [[("a", 2)], [("a", 1)], [("big", 30)], [("small", 1)]]


@kinds
def test_a_freed_place_is_given_on_in_the_next_step(kind: str):
    loop = Loop.ample(kind, seqs=1)
    first, second = one("first", 2, 9), one("second", 2, 1)
    loop.add([first, second])
    loop.step(), loop.step()
    loop.abort(first)
    assert names(loop.step()) == ["second"]
    assert loop.ended == [first, second] and len(first.token_ids) == 2


@kinds
@pytest.mark.parametrize("computed", [0, 2, 6], ids=["waiting", "in the middle of its prompt", "decoding"])
def test_what_has_ended_is_taken_out_wherever_it_stands(kind: str, computed: int):
    loop = Loop.ample(kind, seqs=2 if computed else 1, budget=3)
    victim = one("victim", 5, 9)
    loop.add([one("other", 1, 9), victim])
    loop.step()
    while victim.num_computed < computed:
        loop.step()
    assert (victim in loop.scheduler.waiting) == (not computed)
    loop.abort(victim)
    loop.look()
    assert names(loop.scheduler.running) == ["other"] and not loop.scheduler.waiting


# -- what comes of a step ---------------------------------------------------------------------------------------------


@kinds
def test_an_error_of_a_sample_ends_its_request_alone(kind: str):
    loop = Loop.ample(kind)
    a, b, c = everybody = [one(name, 2, 3) for name in "abc"]
    loop.add(everybody)
    plan = loop.scheduler.schedule()
    samples = Samples([1, 2, 3], [None] * 3, {1: ValueError("the largest logit is nan")})
    assert loop.scheduler.update(plan, samples, 5.0) == [b]
    assert (b.finish_reason, b.error, b.token_ids) == ("error", "ValueError: the largest logit is nan", [])
    assert (a.token_ids, c.token_ids, b.table) == ([1], [3], None)
    assert loop.scheduler.running == [a, c] and b.metrics.finished == 5.0
    loop.scheduler.check_invariants()


class Tokenizer:
    """It cannot decode."""

    is_fast = False

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("no such token")


@kinds
def test_a_tokenizer_that_cannot_decode_ends_only_the_request_that_needs_its_text(kind: str):
    loop = Loop.ample(kind)
    broken, fine = one("broken", 2, 3, tokenizer=Tokenizer(), stop=["x"]), one("fine", 2, 3, tokenizer=Tokenizer())
    loop.add([broken, fine])
    plan = loop.scheduler.schedule()
    assert loop.scheduler.update(plan, Samples([1, 2], [None] * 2), 5.0) == [broken]
    assert broken.finish_reason == "error" and "no such token" in broken.error
    assert (broken.token_ids, broken.table, fine.token_ids, fine.finish_reason) == ([1], None, [2], None)
    loop.scheduler.check_invariants()


@kinds
def test_samples_are_those_of_the_requests_whose_tokens_are_all_computed(kind: str):
    """In the plan's order; a chunk that is not a prompt's last has none."""
    loop = Loop.ample(kind, budget=6)
    a, b, c = everybody = [one("a", 1, 3), one("b", 9, 1), one("c", 1, 3)]
    loop.add(everybody)
    assert named(loop.step()) == [("a", 1), ("b", 5)]
    plan = loop.scheduler.schedule()
    assert named(plan) == [("a", 1), ("b", 4), ("c", 1)]
    assert loop.scheduler.update(plan, Samples([11, 12, 13], [{1: 0.5}, None, None]), 7.0) == [b]
    assert (a.token_ids[1], b.token_ids, c.token_ids, a.logprobs) == (11, [12], [13], [{1: 0.5}])
    assert (b.finish_reason, b.metrics.first_token, c.metrics.first_token) == ("length", 7.0, 7.0)


@kinds
def test_nothing_is_left_of_requests_when_all_begin_anew(kind: str):
    loop = Loop.ample(kind, seqs=2)
    loop.add([one(name, 3, 9) for name in "abc"])
    loop.step(), loop.step()
    loop.recover()
    assert names(loop.scheduler.waiting) == ["a", "b", "c"] and not loop.scheduler.running
    assert [(request.table, request.num_computed) for request in loop.alive] == [(None, 0)] * 3
    loop.look()
    assert named(loop.step()) == [("a", 5), ("b", 3)]  # with what they had said
    loop.run()


# -- other policies ---------------------------------------------------------------------------------------------------


class ShortestFirst(Scheduler):
    def order(self, request: Request) -> tuple[int, int]:
        return request.max_new_tokens, request.arrival


class Indifferent(Scheduler):
    """All are equal: whoever came first is first."""

    def order(self, request: Request) -> int:
        return 0


@kinds
def test_the_shortest_first(kind: str):
    loop = Loop.ample(kind, seqs=1, policy=ShortestFirst)
    loop.exact = False
    loop.add([one("long", 2, 5), one("middle", 2, 3), one("short", 2, 1), one("also short", 2, 1)])
    assert [name for step in loop.run() for name, tokens in step if tokens == 2] == [
        "short", "also short", "middle", "long"
    ]  # fmt: skip


@kinds
def test_an_order_of_ones_own_goes_before_priorities(kind: str):
    loop = Loop.ample(kind, seqs=2, policy=ShortestFirst)
    loop.exact = False
    loop.add([one("long", 2, 5, priority=-1), one("short", 2, 1, priority=1), one("middle", 2, 3)])
    assert names(loop.step()) == ["short", "middle"]


@kinds
def test_of_equals_the_first_to_come_joins_first_and_each_can_leave(kind: str):
    loop = Loop.ample(kind, seqs=1, policy=Indifferent)
    loop.exact = False
    everybody = [one(name, 1, 1) for name in "abcdef"]
    loop.add(everybody)
    for request in (everybody[2], everybody[0], everybody[5]):
        loop.abort(request)
        loop.scheduler.check_invariants()
    assert loop.run() == [[("b", 1)], [("d", 1)], [("e", 1)]]


@pytest.mark.parametrize("policy", [Scheduler, ShortestFirst, Indifferent])
@settings(max_examples=30, deadline=None)
@given(arrivals=st.lists(arrivals, max_size=30), leaves=st.lists(st.integers(0, 29)))
def test_the_queue_stays_in_order_whoever_comes_and_leaves(
    policy: type[Scheduler], arrivals: list[tuple[int, int, float]], leaves: list[int]
):
    loop = Loop("slots", policy=policy)
    loop.add([one(str(i), *arrival) for i, arrival in enumerate(arrivals)])
    for index in leaves:
        if loop.alive:
            loop.abort(loop.alive[index % len(loop.alive)])
    assert loop.scheduler.waiting == sorted(loop.alive, key=loop.scheduler.order)


# -- what it costs ----------------------------------------------------------------------------------------------------


class Counting(Scheduler):
    calls = 0

    def order(self, request: Request) -> tuple[float, int]:
        self.calls += 1
        return super().order(request)

    def _candidates(self) -> Sequence[Request]:
        candidates = super()._candidates()
        assert len(candidates) <= len(self.running) + self.max_num_seqs
        return candidates


def counting(count: int, priorities: int) -> tuple[Counting, list[Request]]:
    scheduler = Counting(SlotKVCache({}, 4, LONGEST, CPU), max_num_seqs=4, max_num_batched_tokens=8)
    everybody = [one(str(i), 1, 1, priority=i * 7919 % priorities) for i in range(count)]
    for arrival, request in enumerate(everybody, 1):
        request.arrival = arrival
    return scheduler, everybody


@pytest.mark.parametrize("priorities", [1, 100])
def test_adding_and_ending_ask_for_the_order_of_a_logarithm_of_the_queue(priorities: int):
    for count in (100, 3000):
        scheduler, everybody = counting(count, priorities)
        most = 5 + math.ceil(math.log2(count))
        for request in everybody:
            scheduler.add(request)
        assert scheduler.calls <= count * (most if priorities > 1 else 2)
        scheduler.calls = 0
        for request in everybody[::-2] + everybody[::-1][1::2]:
            scheduler.remove(request)
        assert scheduler.calls <= count * most and not scheduler.waiting


def test_a_step_costs_the_same_however_many_wait():
    calls = []
    for count in (50, 5000):
        scheduler, everybody = counting(count, 1)
        for request in [one("runs on", 1, 99), *everybody]:
            scheduler.add(request)
        scheduler.calls = 0
        for _ in range(5):
            plan = scheduler.schedule()
            assert len(plan) == 4
            scheduler.update(plan, Samples([1] * 4, [None] * 4), 0.0)
        assert names(scheduler.running) == ["runs on"]
        calls.append(scheduler.calls)
    assert calls[1] <= calls[0] + 5 * 4 * 10  # but for the depth of a search in the queue


def test_answers_to_one_prompt_have_a_slot_each():
    loop = Loop("slots", blocks=3, seqs=3)
    answers = requests("r", 3, 4, n=3)
    loop.add(answers)
    loop.run()
    assert [len(answer.token_ids) for answer in answers] == [4, 4, 4] and loop.scheduler.stats.forked_tokens == 0


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_all_that_are_more_urgent_join_before_who_runs(kind: str):
    loop = Loop.ample(kind, seqs=4)
    loop.add([one("runs", 2, 9, priority=9)])
    loop.step()
    loop.add([one(name, 2, 2) for name in "abc"])
    assert names(loop.step()) == ["a", "b", "c", "runs"]


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_a_prompt_in_progress_does_not_count_as_one_that_decodes(kind: str):
    """It waits for those that decode however long that takes, though it was served long ago."""
    loop = Loop.ample(kind, seqs=4, budget=3)
    loop.add([one("a", 1, 9), one("b", 1, 9), one("prompt", 9, 1)])
    assert named(loop.step()) == [("a", 1), ("b", 1), ("prompt", 1)]
    loop.add([one("urgent", 1, 4, priority=-1)])
    for _ in range(4):
        assert sorted(names(loop.step())) == ["a", "b", "urgent"]
    assert named(loop.step()) == [("a", 1), ("b", 1), ("prompt", 1)]


# -- what `check_invariants` finds ------------------------------------------------------------------------------------


def busy(kind: str) -> Scheduler:
    loop = Loop.ample(kind, seqs=2, budget=4)
    loop.add([one(name, 3, 9) for name in "abcd"])
    loop.step()
    assert [len(loop.scheduler.running), len(loop.scheduler.waiting)] == [2, 2]
    return loop.scheduler


BREAKS: dict[str, Callable[[Scheduler], object]] = {
    "in both queues": lambda s: s.waiting.append(s.running[0]),
    "twice in a queue": lambda s: s.running.append(s.running[0]),
    "lost from the running": lambda s: s.running.pop(),
    "waiting out of order": lambda s: s.waiting.reverse(),
    "runs without having been admitted": lambda s: s.running.append(s.waiting.pop()),
    "waits and was admitted": lambda s: s.waiting.insert(0, s.running.pop(0)),
    "more than may run": lambda s: setattr(s, "max_num_seqs", 1),
    "more computed than there is": lambda s: setattr(s.running[0], "num_computed", 99),
    "less than nothing computed": lambda s: setattr(s.running[0], "num_computed", -1),
    "runs without room": lambda s: s.cache.free(s.running[0]),
    "waits with room": lambda s: (s.cache.free(s.running[0]), s.cache.allocate(s.waiting[0], 1)),
    "waits with tokens": lambda s: setattr(s.waiting[0], "num_computed", 1),
    "two with one row of the tables": lambda s: setattr(s.running[0].table, "index", s.running[1].table.index),
    "a row of the tables that says otherwise": lambda s: s.cache.tables.__setitem__((s.running[0].table.index, 0), 2),
}
ONLY_SLOTS: dict[str, Callable[[Scheduler], object]] = {
    "a slot that is free and owned": lambda s: s.cache._free.append(s.running[0].table.blocks[0]),
    "a slot that is neither": lambda s: s.cache._free.clear() or s.running[0].table.blocks.__setitem__(0, 9),
    "a slot with two owners": lambda s: s.running[0].table.blocks.__setitem__(0, s.running[1].table.blocks[0]),
}


@pytest.mark.parametrize(
    ("kind", "how"), [*itertools.product(KINDS, BREAKS), *itertools.product(["slots"], ONLY_SLOTS)]
)
def test_a_broken_state_is_found(kind: str, how: str):
    scheduler = busy(kind)
    (BREAKS | ONLY_SLOTS)[how](scheduler)
    with pytest.raises(InvariantBroken):
        scheduler.check_invariants()


# -- the cache of slots -----------------------------------------------------------------------------------------------


def slots(count: int = 3, length: int = 4) -> tuple[SlotKVCache, list[Request]]:
    return SlotKVCache({}, count, length, CPU), requests("r", 2, n=5)


def test_slots_are_given_out_lowest_first_and_last_in_first_out():
    cache, (a, b, c, d, e) = slots()
    assert [cache.allocate(request, 2) for request in (a, b, c)] == [True] * 3 and not cache.allocate(d, 1)
    assert [request.table.blocks for request in (a, b, c)] == [[0], [1], [2]]
    assert [request.table.row(3) for request in (a, b, c)] == [3, 7, 11]
    cache.check_invariants([a, b, c])
    cache.free(b), cache.free(a), cache.free(a), cache.free(e)
    assert cache.allocate(d, 1) and d.table.blocks == [0] and a.table is None
    cache.check_invariants([c, d])
    cache.reset()
    assert cache.blocks_used == 0 and cache.allocate(e, 4) and e.table.blocks == [0]


def test_a_refusal_changes_nothing():
    cache, (a, b, *_) = slots(count=2)
    assert cache.allocate(a, 3) and not cache.allocate(a, 5) and not cache.allocate(b, 5)
    assert not cache.allocate(b, 1, reserve=1) and b.table is None
    assert cache.blocks_used == 1 and cache.report([a]) == {"blocks_used": 1, "blocks_free": 1}
    assert cache.allocate(a, 4) and cache.allocate(a, 2) and a.table.capacity == 4
    cache.check_invariants([a])
    assert cache.allocate(b, 4)


def test_bytes_of_slots_by_hand():
    loop = Loop("slots", blocks=3)
    cache, (a, *_) = loop.cache, requests("r", 2)
    assert cache.bytes_per_token == 2 * 8 and cache.nbytes_reserved == 3 * LONGEST * 16
    reserved = sum(t.nbytes for t in (cache.pools[0].keys, cache.pools[0].values))
    assert reserved == (3 * LONGEST + 2) * 16  # and the trash and the spare row
    cache.allocate(a, 3)
    a.num_computed = 3
    assert (cache.nbytes_held, cache.tokens_used([a]), cache.trash_row) == (LONGEST * 16, 3, 3 * LONGEST)
