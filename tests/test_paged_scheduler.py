"""The scheduler over pages: who gives way when they run out, who may join, and who shares; see `scheduling.Loop`."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Loop, alone, named, names, one, requests

from minfer_lib.cache.blocks import BlockAllocator
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import Prefix
from minfer_lib.engine.scheduler import PrefixStats, Scheduler
from minfer_lib.generation.request import Request
from minfer_lib.generation.sampling import Samples

# -- other policies ---------------------------------------------------------------------------------------------------


class LeastComputed(Scheduler):
    def choose_victim(self, running: Sequence[Request]) -> Request:
        return min(running, key=lambda request: request.num_computed)


class ShortestFirst(Scheduler):
    def order(self, request: Request) -> tuple[int, int]:
        return request.max_new_tokens, request.arrival


class MostRecent(BlockAllocator):
    def choose_evicted(self, cached: Sequence[int]) -> int:
        return next(reversed(cached))


class OtherEviction(PagedKVCache):
    allocator_type = MostRecent


def test_the_one_that_loses_least_gives_way():
    """b, which came last, has computed most when a needs a third block."""
    for policy, victim in ((Scheduler, "b"), (LeastComputed, "a")):
        loop = Loop(blocks=6, size=2, caching=False, policy=policy)
        a, b = one("a", 2, 9), one("b", 5, 9)
        loop.add([a, b])
        while not (a.metrics.preemptions or b.metrics.preemptions):
            loop.step()
        assert names(loop.scheduler.waiting) == [victim]
        loop.run()
        assert (a.token_ids, b.token_ids) == (alone(a), alone(b)[: len(b.token_ids)])


class FirstGivesWay(Scheduler):
    def choose_victim(self, running: Sequence[Request]) -> Request:
        return min(running, key=self.order)


def test_the_budget_of_one_who_gives_way_goes_to_those_behind():
    """a is in the step already when b needs its room."""
    loop = Loop(blocks=3, size=2, caching=False, policy=FirstGivesWay)
    loop.add([one("a", 1, 3), one("b", 2, 3), one("c", 1, 3)])
    loop.step()
    loop.budget = loop.scheduler.max_num_batched_tokens = 2
    assert named(loop.step()) == [("b", 1), ("c", 1)] and names(loop.scheduler.waiting) == ["a"]
    loop.run()


def test_the_last_of_an_order_of_ones_own_gives_way():
    loop = Loop(blocks=4, size=2, caching=False, policy=ShortestFirst)
    long, short = one("long", 2, 6), one("short", 2, 5)
    loop.add([long, short])
    loop.run()
    assert (long.metrics.preemptions, short.metrics.preemptions) == (1, 0)


def test_another_eviction_policy():
    for cache_type, stays in ((PagedKVCache, "second"), (OtherEviction, "first")):
        loop = Loop(blocks=4, size=2, cache_type=cache_type)
        texts = {"first": [1, 1, 1], "second": [2, 2, 2]}
        for name, ids in texts.items():
            loop.add([one(name, ids, 1)])
            loop.run()
        loop.add([one("large", 5, 1)])  # two blocks are empty, it needs three
        loop.run()
        kept = [name for name, ids in texts.items() if loop.cache.find_prefix(one(name, ids)).tokens]
        assert kept == [stays] and loop.cache.allocator.evictions == 1


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


OUTCOMES = [*[""] * 8, "interrupted", "written", "torn", "failed", "undefined", "forget"]
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
    st.sampled_from(OUTCOMES),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    course=st.lists(events, min_size=1, max_size=25),
    blocks=st.integers(1, 14),
    size=st.sampled_from([1, 2, 3, 7]),
    seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 3, 5, 7, 100]),
    watermark=st.integers(0, 2),
    caching=st.booleans(),
    policy=st.sampled_from([Scheduler, Scheduler, LeastComputed, ShortestFirst]),
    cache_type=st.sampled_from([PagedKVCache, PagedKVCache, OtherEviction]),
)
def test_any_course_of_events(course: list[Event], blocks: int, size: int, **options: object):
    loop = Loop(blocks=blocks, size=size, **options)
    everybody, ids = [], map(str, itertools.count())
    for event in course:
        for a in event.arrivals:
            text = [1000 + a.text] + [a.text] * 3 + list(range(20))
            group = requests(next(ids), text[: min(a.prompt, blocks * size)], a.answer, a.priority, a.n)
            loop.add(group)
            everybody += group
        for index in event.aborts:
            if loop.alive:
                loop.abort(loop.alive[index % len(loop.alive)])
        if event.outcome == "forget":
            loop.cache.reset_prefix_cache()
        loop.step(event.outcome)
    loop.run()
    assert sorted(loop.ended, key=everybody.index) == everybody  # each once
    for request in everybody[:8]:
        expected = alone(request)
        assert request.token_ids == expected[: len(request.token_ids)]
        if request.finish_reason == "length":
            full = request.stop_reason == "kv_cache_full"
            assert request.num_tokens == blocks * size + 1 if full else request.token_ids == expected


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
    everybody = [one(chr(97 + i), *lengths) for i, lengths in enumerate(sizes)]
    loop.add(everybody)
    loop.run()
    first = [request.metrics.first_token for request in everybody]
    assert first == sorted(first) and everybody[0].metrics.preemptions == 0
    prompt, answer = len(everybody[0].prompt_token_ids), len(everybody[0].token_ids)
    if budget >= len(everybody) + prompt:
        assert everybody[0].metrics.finished == answer  # a token in every step, as if it were alone


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
            loop.abort(draw.choice(loop.alive))
        loop.step(draw.choice([""] * 12 + ["interrupted", "written", "torn"]))
    loop.run()
    for request in loop.ended[:6]:
        assert request.token_ids == alone(request)[: len(request.token_ids)]


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
    stats = loop.scheduler.stats
    assert (stats.preemptions, stats.recomputed_tokens, stats.hit_tokens) == (1, 4, 0)
    assert a.token_ids == alone(a) and b.token_ids == alone(b)


def test_who_is_last_itself_waits_and_keeps_what_it_has():
    loop = Loop(blocks=3, size=2, caching=False)
    a, b = one("a", 2, 3), one("b", 1, 6)
    loop.add([a, b])
    steps = loop.run()
    # in the third step b needs a second block, a has two: b waits for its end
    assert steps == [[("a", 2), ("b", 1)], [("a", 1), ("b", 1)], [("a", 1)], *[[("b", 1)]] * 4]
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
        assert names(loop.scheduler.running) == ["a"]
        loop.step()
    assert room == 2  # c would have fitted
    assert names(loop.scheduler.waiting) == ["b", "c"]  # where it stood
    assert [name for name, _ in loop.run()[0]] == ["b", "c"]


def test_an_end_lets_others_join_while_the_rest_runs_on():
    loop = Loop(blocks=8, size=2, caching=False)
    a, b, c, d = one("a", 2, 12), one("b", 2, 6), one("c", 2, 9), one("d", 1, 1)
    loop.add([a, b, c, d])
    while not c.metrics.preemptions:
        loop.step()
    while not b.finished:
        assert names(loop.scheduler.running) == ["a", "b"]
        loop.step()
    assert names(loop.step()) == ["a", "c"]
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
    assert named(loop.step()) == [("t", 1), ("u", 1), ("s0", 2), ("x", 1)]
    assert named(loop.step()) == [("t", 1), ("u", 1), ("s0", 1), ("x", 1), ("s1", 5)]
    assert named(loop.step()) == [("t", 1), ("u", 1), ("s0", 1)] and x.metrics.preemptions == 1
    assert names(loop.scheduler.running) == ["t", "u", "s0", "s1"] and r.num_computed == 7
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
    assert loop.scheduler.stats.recomputed_tokens == 2
    assert loop.scheduler.stats.hit_tokens == 0  # that is for those who join for the first time
    loop.run()
    assert b.token_ids == alone(b)


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
    assert names(loop.scheduler.running) == ["x"]
    loop.run()


def test_when_the_preempted_one_is_gone_others_join_at_once():
    loop, y = preempting()
    loop.abort(y)
    loop.add([one("z", 2, 1)])
    assert names(loop.step()) == ["x", "z"]
    loop.run()


def test_who_is_more_urgent_than_the_preempted_one_joins_at_once():
    loop, _ = preempting()
    loop.add([one("urgent", 2, 1, priority=-1)])
    assert set(names(loop.step())) == {"x", "urgent"}
    loop.run()


# -- by hand: admission -----------------------------------------------------------------------------------------------


def test_all_tokens_of_a_prompt_must_fit_though_it_comes_in_chunks():
    loop = Loop(blocks=6, size=2, budget=3, caching=False)
    a, b, c = one("a", 5, 4), one("b", 8, 1), one("c", 1, 1)
    loop.add([a, b, c])
    loop.step()
    assert loop.cache.blocks_used == 2  # a has 3 of its 5 tokens, and needs one block more
    loop.step()
    # 3 are free, b needs 4: it waits though its first chunk would fit, and c must not overtake
    assert names(loop.scheduler.running) == ["a"] and names(loop.scheduler.waiting) == ["b", "c"]
    steps = loop.run()
    assert [name for step in steps for name, _ in step if name != "a"] == ["b", "b", "b", "c"]
    assert loop.scheduler.stats.preemptions == 0


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
    loop.add([one("urgent", 3, 1, priority=-1)])
    assert [name for step in loop.run() for name, _ in step] == ["a", "a", "a", "urgent", "urgent"]
    assert loop.scheduler.stats.preemptions == 0


def test_a_prompt_that_fills_the_pool_and_an_answer_that_does_not_fit():
    loop = Loop(blocks=3, size=2)
    full, other = one("full", 6, 4), one("other", 5, 9)
    loop.add([full, other])
    loop.run()
    ends = [(len(request.token_ids), request.finish_reason, request.stop_reason) for request in (full, other)]
    assert ends == [(1, "length", "kv_cache_full"), (2, "length", "kv_cache_full")]
    assert full.metrics.finished == 1.0 < other.metrics.finished  # by the loop's clock, which counts steps


def test_a_request_joins_where_there_is_just_enough_for_it_and_those_that_must_grow():
    loop = Loop(blocks=4, size=2, caching=False)
    loop.add([one("grows", 2, 3)])
    loop.step()  # its newest token needs another block
    loop.add([one("urgent", 4, 2, priority=-1)])
    assert named(loop.step()) == [("urgent", 4), ("grows", 1)]
    assert loop.cache.blocks_used == 4


# -- by hand: sharing -------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_wait_until_the_first_has_computed_it_and_then_share_it():
    loop = Loop(blocks=20, size=2, budget=4, seqs=8, caching=False)
    group, other = requests("s", 7, 2, n=3), one("o", 1, 1)
    loop.add(group, [other])
    # the second step has a token left: who stands behind those that wait gets it
    assert [named(loop.step()) for _ in range(2)] == [[("s0", 4)], [("s0", 3), ("o", 1)]]
    assert named(loop.step()) == [("s0", 1), ("s1", 1), ("s2", 1)]
    # 6 of 7 tokens are taken over; the seventh is computed, to know what comes next: it begins a block
    assert loop.cache.bytes_copied == 0 and loop.cache.allocator.num_shared == 3
    assert (loop.scheduler.stats.forked_tokens, loop.scheduler.stats.hit_tokens) == (12, 0)
    loop.run()
    assert [request.token_ids for request in group] == [alone(request) for request in group]
    assert len({tuple(request.token_ids) for request in group}) == 3


def test_a_fork_copies_the_rows_of_the_unfilled_block():
    loop = Loop(blocks=20, size=4, budget=100, caching=False)
    group = requests("s", 7, 3, n=4)
    loop.add(group)
    loop.step(), loop.step()
    assert loop.cache.bytes_copied == 3 * 2 * loop.cache.bytes_per_token  # tokens 5 and 6, three times
    assert loop.cache.blocks_used == 1 + 4 and loop.cache.allocator.num_shared == 1
    loop.run()
    assert [request.token_ids for request in group] == [alone(request) for request in group]


@pytest.mark.parametrize("caching", [True, False])
def test_answers_of_one_token_do_not_wait_for_each_other(caching: bool):
    """The sibling that computes the prompt ends with it, and has nothing to share then."""
    loop = Loop(blocks=20, size=2, budget=100, caching=caching)
    loop.add(requests("s", 5, 1, n=3))
    assert loop.run() == [[("s0", 5), ("s1", 5), ("s2", 5)]]


def test_a_prompt_that_was_computed_before_is_not_computed_again():
    loop = Loop(blocks=20, size=2, budget=100)
    loop.add([one("a", [1, 2, 3, 4, 5], 4)])
    loop.run()
    said = alone(one("a", [1, 2, 3, 4, 5], 4))
    loop.add([one("b", [1, 2, 3, 4, 5, *said, 9], 1), one("c", [1, 2, 3, 9, 5], 1)])
    assert loop.run() == [[("b", 2), ("c", 3)]]  # 8 tokens of a's: prompt and answer, in full blocks; and 2
    assert loop.scheduler.stats.hit_tokens == 8 + 2 and loop.scheduler.stats.asked_tokens == 5 + 10 + 5


def test_what_others_computed_meanwhile_is_no_less_than_nothing_to_compute_again():
    scheduler, a = Loop().scheduler, one("a", 7)
    for lost, prefix in ((3, Prefix(8)), (5, Prefix(2))):  # had computed 3 tokens, and comes back to find 8
        scheduler._lost[a] = lost
        scheduler._count(a, prefix)
    assert scheduler.stats == PrefixStats(recomputed_tokens=3)
    scheduler._count(a, Prefix(4)), scheduler._count(a, Prefix(6, forked=True))
    assert scheduler.stats == PrefixStats(asked_tokens=14, hit_tokens=4, forked_tokens=6, recomputed_tokens=3)


def test_keys_that_are_not_numbers_are_found_by_nobody():
    """A row whose logits are undefined has such keys, perhaps in blocks that were registered before: they go too."""
    loop = Loop(blocks=20, size=2)
    broken, same = one("broken", [1, 2, 3, 4, 5], 4), one("same", [1, 2, 3, 4, 5], 1)
    loop.add([broken])
    loop.step()
    assert loop.cache.find_prefix(same).tokens == 4
    plan = loop.scheduler.schedule()
    assert loop.scheduler.update(plan, Samples([0], [None], {0: ValueError("nan")}), 2.0) == [broken]
    assert loop.cache.find_prefix(same).tokens == 0 and loop.cache.allocator.num_cached == 0
    loop.scheduler.check_invariants()
