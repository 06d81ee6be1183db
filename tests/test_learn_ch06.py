"""The exercises of chapter 6: stubs fail, solutions pass, every typical mistake is told apart from the others."""

import math
import random
from typing import ClassVar

import pytest
import torch
from exercise_checks import ExerciseChecks

from minfer_lib.cache.blocks import BlockAllocator
from minfer_lib.cache.paged import BlockTable, PagedKVCache, block_key
from minfer_lib.learn.checks import ch06

# -- how a learner might solve them ---------------------------------------------------------------------------------


def row_of(table, block_size, position):
    return table[position // block_size] * block_size + position % block_size


def merge(first, second):
    maximum_1, total_1, weighted_1 = first
    maximum_2, total_2, weighted_2 = second
    maximum = max(maximum_1, maximum_2)
    if maximum == -math.inf:
        return first
    factor_1, factor_2 = math.exp(maximum_1 - maximum), math.exp(maximum_2 - maximum)
    return maximum, factor_1 * total_1 + factor_2 * total_2, factor_1 * weighted_1 + factor_2 * weighted_2


def append(table, token, pool, references, free):
    blocks, slot = table["blocks"], table["tokens"] % len(pool[0])
    if slot == 0:
        blocks.append(free.pop())
        references[blocks[-1]] = 1
    elif references[blocks[-1]] > 1:
        old, new = blocks[-1], free.pop()
        pool[new] = list(pool[old])
        references[old] -= 1
        references[new] = 1
        blocks[-1] = new
    pool[blocks[-1]][slot] = token
    table["tokens"] += 1


def matched(prompt, cached, block_size, key_of):
    key, tokens = None, 0
    while tokens + block_size < len(prompt):
        key = key_of(key, tuple(prompt[tokens : tokens + block_size]))
        if key not in cached:
            break
        tokens += block_size
    return tokens


def choose_victim(running, needed_by):
    last = max(running, key=lambda request: (request["priority"], request["arrival"]))
    return None if last == needed_by else last


class TestExercises(ExerciseChecks):
    chapter = ch06
    solutions: ClassVar = {f.__name__: f for f in (row_of, merge, append, matched, choose_victim)}


# -- the solutions against the package --------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
def test_rows_are_those_of_a_block_table(block_size):
    blocks = random.Random(block_size).sample(range(40), 5)
    table = BlockTable(block_size, blocks)
    positions = range(5 * block_size)
    rows = [row_of(blocks, block_size, position) for position in positions]
    assert rows == [table.row(position) for position in positions] and len(set(rows)) == len(positions)


def test_merged_parts_are_the_softmax_in_any_order():
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(20, generator=generator).double() * 5, torch.randn(20, 3, generator=generator).double()
    parts = []
    for begin, end in ((0, 3), (3, 3), (3, 11), (11, 20)):
        s, v = scores[begin:end], values[begin:end]
        top = s.max() if len(s) else torch.tensor(-math.inf).double()
        weights = torch.exp(s - top)
        parts.append((top, weights.sum(), weights @ v))
    expected = scores.softmax(0) @ values
    for order in ([0, 1, 2, 3], [1, 3, 0, 2]):
        state = parts[order[0]]
        for n in order[1:]:
            state = merge(state, parts[n])
        assert torch.allclose(state[2] / state[1], expected)
    assert state[0] == scores.max()


class Tokens(list):
    """A list of token ids as a request is to the cache."""

    table = None
    num_computed = 0
    __hash__ = object.__hash__
    num_tokens = property(len)

    def tokens(self, begin, end):
        return self[begin:end]


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_appending_takes_and_copies_the_blocks_that_the_cache_does(block_size):
    """Two tables fork and grow in turn; the paged cache, forked and grown alike, must hold as many of everything."""
    count = 12
    cache = PagedKVCache({}, count, block_size, torch.device("cpu"), enable_prefix_caching=False)
    pool, references, free = [[None] * block_size for _ in range(count)], [0] * count, list(reversed(range(count)))
    first = {"blocks": [], "tokens": 0}
    for n in range(4):
        append(first, n, pool, references, free)
    one, two = Tokens(range(7)), Tokens([0, 1, 2, 3, "b"])
    assert cache.allocate(one, 4)
    second = {"blocks": list(first["blocks"]), "tokens": 4}
    for block in second["blocks"]:
        references[block] += 1
    assert cache.allocate(two, 5, prefix=cache.fork(one, 4))
    append(second, "b", pool, references, free)
    for n in range(3):
        append(first, f"a{n}", pool, references, free)
        assert cache.allocate(one, 5 + n)
    one.num_computed, two.num_computed = 7, 5
    cache.check_invariants([one, two])
    allocator: BlockAllocator = cache.allocator
    assert len(free) == allocator.num_free
    assert sorted(references) == sorted(allocator.references(block) for block in range(count))
    read = [pool[first["blocks"][n // block_size]][n % block_size] for n in range(7)]
    assert read == [0, 1, 2, 3, "a0", "a1", "a2"]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 12])
def test_what_matches_is_what_the_cache_finds(length):
    cache = PagedKVCache({}, 8, 4, torch.device("cpu"))
    owner = Tokens(range(10))
    assert cache.allocate(owner, 10)
    owner.num_computed = 10
    cache.cache_blocks(owner)
    known, key = {}, b""
    for begin in (0, 4):
        key = block_key(key, owner[begin : begin + 4])
        known[key] = begin // 4
    for prompt in (Tokens(range(length)), Tokens([*range(5), 9, 9, 9, 9][:length])):
        expected = cache.find_prefix(prompt).tokens
        assert matched(prompt, known, 4, lambda before, tokens: block_key(before or b"", tokens)) == expected


def test_the_victim_is_the_one_that_the_scheduler_takes():
    """Small pools: whenever the scheduler preempts, the exercise's rule names the same request."""
    from minfer_lib.learn.paged_replay import ReplayRequest, Scheduler, replay

    seen, preempt = [], Scheduler._preempt

    def spy(scheduler, request):
        running = [
            {"name": r.request_id, "priority": r.priority, "arrival": r.arrival, "blocks": 0,
             "generated": len(r.token_ids)}
            for r in scheduler.running
        ]  # fmt: skip
        first = min(running, key=lambda r: (r["priority"], r["arrival"]))
        seen.append((choose_victim(running, first)["name"], request.request_id))
        preempt(scheduler, request)

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(Scheduler, "_preempt", spy)
        replay([ReplayRequest(6, 20, priority=n % 2, arrives=n) for n in range(6)], num_blocks=10)
    assert len(seen) > 2 and all(mine == taken for mine, taken in seen)


def test_answers_may_be_written_in_other_ways(capsys):
    def merge_with_torch(first, second):
        tops = torch.stack([first[0], second[0]])
        top = tops.max()
        factors = torch.exp(tops - top).nan_to_num(0.0)
        return top, factors @ torch.stack([first[1], second[1]]), factors @ torch.stack([first[2], second[2]])

    def append_from_the_front(table, token, pool, references, free):
        size = len(pool[0])
        full = table["tokens"] == len(table["blocks"]) * size
        last = None if not table["blocks"] else table["blocks"][-1]
        if full or references[last] > 1:
            new = free.pop(0)
            references[new] += 1
            if full:
                table["blocks"].append(new)
            else:
                pool[new][:] = pool[last]
                references[last] -= 1
                table["blocks"][-1] = new
        pool[table["blocks"][-1]][table["tokens"] % size] = token
        table["tokens"] += 1

    def matched_by_slices(prompt, cached, block_size, key_of):
        key, count = None, 0
        for n in range((len(prompt) - 1) // block_size):
            key = key_of(key, tuple(prompt[n * block_size :][:block_size]))
            if key not in cached:
                return count
            count += block_size
        return count

    def choose_by_sorting(running, needed_by):
        last = sorted(running, key=lambda r: (r["priority"], r["arrival"]))[-1]
        return last if last is not needed_by else None

    assert ch06.check_merge.check(merge_with_torch) and ch06.check_append.check(append_from_the_front)
    assert ch06.check_matched.check(matched_by_slices) and ch06.check_choose_victim.check(choose_by_sorting)
    assert "not right" not in capsys.readouterr().out


def test_a_diagnosis_shows_structures_by_what_matters(capsys):
    def wipes(table, token, pool, references, free):
        table.clear()

    assert ch06.check_append.check(wipes) is False
    out = capsys.readouterr().out
    assert "    before   blocks [], 0 tokens; pool _ _ | _ _; references [0, 0]; free [1, 0]\n" in out
    assert "At key 'table': a dict with the keys ['blocks', 'tokens'] was expected." in out
    assert ch06.check_choose_victim.check(lambda running, needed_by: running[0]["name"]) is False
    out = capsys.readouterr().out
    assert "        a: priority 0, arrival 0, 9 blocks, 5 generated\n" in out and "    expected c\n" in out
    assert ch06.check_append.check(lambda *args: args[9]) is False and "IndexError" in capsys.readouterr().out
