"""The block allocator against a plain model of it, and by hand."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minfer_lib.cache.blocks import BlockAllocator
from minfer_lib.errors import InvalidParameter, InvariantBroken, NoFreeBlock

KEYS = [bytes([i]) for i in range(6)]


class Blocks(RuleBasedStateMachine):
    """Any course of operations. The model is lists that are searched from one end to the other."""

    @initialize(count=st.integers(1, 6))
    def make(self, count: int) -> None:
        self.count, self.blocks = count, BlockAllocator(count)
        self.empty = list(range(count))[::-1]  # the next to be handed out last
        self.cached: list[int] = []  # the next to be evicted first
        self.held: list[int] = []  # one entry for each reference
        self.keys: dict[bytes, int] = {}
        self.evictions = 0

    def key_of(self, block: int) -> bytes | None:
        return next((key for key, other in self.keys.items() if other == block), None)

    @rule()
    def allocate(self) -> None:
        if not self.empty and not self.cached:
            with pytest.raises(NoFreeBlock, match=f"all {self.count} are in use"):
                self.blocks.allocate()
            return
        if self.empty:
            expected = self.empty.pop()
        else:
            expected = self.cached.pop(0)
            del self.keys[self.key_of(expected)]
            self.evictions += 1
        assert self.blocks.allocate() == expected
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.blocks.share(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.blocks.free(block)
        self.held.remove(block)
        if block not in self.held:
            (self.empty if self.key_of(block) is None else self.cached).append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def register(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(self.held))
        if key not in self.keys and self.key_of(block) is not None:
            return  # a second key: see below
        self.blocks.register(block, key)
        self.keys.setdefault(key, block)

    @rule(key=st.sampled_from(KEYS))
    def find_and_share(self, key: bytes) -> None:
        block = self.blocks.find(key)
        assert block == self.keys.get(key)
        if block is not None:
            self.blocks.share(block)
            self.held.append(block)
            if block in self.cached:
                self.cached.remove(block)

    @precondition(lambda self: len(self.keys) > 2)
    @rule()
    def forget(self) -> None:
        self.blocks.forget()
        self.empty += self.cached[::-1]
        self.cached, self.keys = [], {}

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.count - 1))
        self.blocks.unregister(block)
        if (key := self.key_of(block)) is not None:
            del self.keys[key]
        if block in self.cached:
            self.cached.remove(block)
            self.empty.append(block)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Refused, and nothing has changed."""
        if idle := sorted({*self.empty, *self.cached}):
            block = data.draw(st.sampled_from(idle))
            with pytest.raises(InvariantBroken):
                self.blocks.free(block)
            with pytest.raises(InvariantBroken):
                self.blocks.register(block, b"new")
            if block in self.empty:
                with pytest.raises(InvariantBroken):
                    self.blocks.share(block)

    @invariant()
    def agrees(self) -> None:
        blocks = self.blocks
        blocks.check_invariants([[block] for block in self.held])
        assert blocks.num_free == len(self.empty) + len(self.cached)
        assert blocks.num_used == len(set(self.held)) == self.count - blocks.num_free
        assert blocks.cached == tuple(self.cached) and blocks.num_cached == len(self.cached)
        assert blocks.num_shared == sum(self.held.count(block) > 1 for block in set(self.held))
        assert all(blocks.references(block) == self.held.count(block) for block in range(self.count))
        assert [blocks.find(key) for key in KEYS] == [self.keys.get(key) for key in KEYS]
        assert blocks.evictions == self.evictions


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_the_lowest_numbers_first_and_what_comes_back_first_of_all():
    blocks = BlockAllocator(4)
    assert [blocks.allocate() for _ in range(3)] == [0, 1, 2]
    blocks.free(0), blocks.free(1)
    assert [blocks.allocate() for _ in range(3)] == [1, 0, 3]  # few blocks are touched in all
    with pytest.raises(NoFreeBlock, match="all 4 are in use"):
        blocks.allocate()
    assert blocks.num_used == 4


def test_an_empty_block_is_taken_before_a_cached_one_and_then_the_one_unused_for_longest():
    blocks = BlockAllocator(4)
    for i in range(3):
        blocks.register(blocks.allocate(), KEYS[i])
    for block in (1, 0, 2):
        blocks.free(block)
    assert blocks.cached == (1, 0, 2) and blocks.num_free == 4 and blocks.num_used == 0
    assert blocks.allocate() == 3 and blocks.evictions == 0
    blocks.share(blocks.find(KEYS[1])), blocks.free(1)  # used again: now it is the youngest
    assert [blocks.allocate(), blocks.allocate()] == [0, 2]
    assert [blocks.find(key) for key in KEYS[:3]] == [None, 1, None] and blocks.evictions == 2
    assert blocks.allocate() == 1 and blocks.find(KEYS[1]) is None and blocks.evictions == 3


def test_a_shared_block_is_free_when_the_last_holder_gives_it_back():
    blocks = BlockAllocator(2)
    block = blocks.allocate()
    blocks.share(block), blocks.share(block)
    assert (blocks.references(block), blocks.num_shared, blocks.num_used) == (3, 1, 1)
    blocks.free(block)
    assert blocks.num_shared == 1
    blocks.free(block)
    assert (blocks.references(block), blocks.num_shared, blocks.num_used) == (1, 0, 1)
    blocks.free(block)
    assert blocks.num_used == 0


def test_the_first_block_of_a_key_stays_the_one_that_is_found():
    blocks = BlockAllocator(3)
    first, second = blocks.allocate(), blocks.allocate()
    blocks.register(first, b"k"), blocks.register(first, b"k"), blocks.register(second, b"k")
    assert blocks.find(b"k") == first
    blocks.free(second)
    assert blocks.num_cached == 0  # nobody could find it
    blocks.free(first)
    assert blocks.cached == (first,)


def test_what_is_forgotten_in_use_is_empty_when_it_is_freed():
    blocks = BlockAllocator(3)
    for i in range(3):
        blocks.register(blocks.allocate(), KEYS[i])
    blocks.free(2), blocks.free(0)
    blocks.forget()
    assert blocks.num_cached == 0 and blocks.num_free == 2 and [blocks.find(key) for key in KEYS] == [None] * 6
    blocks.free(1)
    assert blocks.num_cached == 0 and blocks.num_free == 3 and blocks.evictions == 0
    blocks.check_invariants([])


def test_a_second_key_is_refused():
    blocks = BlockAllocator(2)
    block = blocks.allocate()
    blocks.register(block, b"one")
    with pytest.raises(InvariantBroken, match="second key"):
        blocks.register(block, b"two")


def test_another_eviction_policy():
    class MostRecent(BlockAllocator):
        def choose_evicted(self, cached: OrderedDict[int, None]) -> int:
            return next(reversed(cached))

    blocks = MostRecent(3)
    for key in KEYS[:3]:
        blocks.register(blocks.allocate(), key)
    for block in (1, 0, 2):
        blocks.free(block)
    assert [blocks.allocate(), blocks.allocate()] == [2, 0] and blocks.evictions == 2
    assert [blocks.find(key) for key in KEYS[:3]] == [None, 1, None]
    blocks.check_invariants([[2, 0]])


def test_one_block_can_be_made_unfindable():
    blocks = BlockAllocator(3)
    for key in KEYS[:2]:
        blocks.register(blocks.allocate(), key)
    blocks.free(0)
    for block in (0, 1, 2):  # cached, in use, empty
        blocks.unregister(block)
    assert [blocks.find(key) for key in KEYS[:2]] == [None, None]
    assert (blocks.num_cached, blocks.num_free, blocks.evictions) == (0, 2, 0)
    blocks.check_invariants([[1]])


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3", None])
def test_numbers_of_blocks_that_are_not_possible(count: object):
    with pytest.raises(InvalidParameter, match="num_blocks"):
        BlockAllocator(count)


@pytest.mark.parametrize("block", [-1, 3, 99])
def test_blocks_that_do_not_exist(block: int):
    """A negative number would lead to another block."""
    blocks = BlockAllocator(3)
    for _ in range(3):
        blocks.allocate()
    for call in (blocks.references, blocks.share, blocks.free, lambda b: blocks.register(b, b"k")):
        with pytest.raises(InvalidParameter, match="0 to 2"):
            call(block)


# -- what `check_invariants` finds ------------------------------------------------------------------------------------


def busy() -> tuple[BlockAllocator, list[list[int]]]:
    """0 shared and with a key, 1 in use, 2 cached, 3 empty."""
    blocks = BlockAllocator(4)
    tables = [[blocks.allocate(), blocks.allocate()], [0]]
    blocks.share(0)
    blocks.register(0, b"0")
    blocks.register(blocks.allocate(), b"2")
    blocks.free(2)
    blocks.check_invariants(tables)
    return blocks, tables


BREAKS: dict[str, Callable[[BlockAllocator, list[list[int]]], object]] = {
    "free and in use": lambda b, t: b._empty.append(1),
    "neither free nor in use": lambda b, t: b._empty.pop(),
    "twice free": lambda b, t: b._empty.append(2),
    "a reference too many": lambda b, t: b._references.__setitem__(1, 2),
    "fewer than none": lambda b, t: b._references.__setitem__(3, -1),
    "shared and not counted": lambda b, t: setattr(b, "_shared", 0),
    "a key that leads elsewhere": lambda b, t: b._block_of.update({b"0": 1}),
    "a key that leads nowhere": lambda b, t: b._block_of.pop(b"0"),
    "cached without a key": lambda b, t: (b._block_of.pop(b"2"), b._key_of.pop(2)),
    "empty with a key": lambda b, t: (b._key_of.update({3: b"3"}), b._block_of.update({b"3": 3})),
    "held by nobody": lambda b, t: t[0].pop(),
    "held by somebody who was not counted": lambda b, t: t[1].append(1),
    "a free one held": lambda b, t: t[1].append(3),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_state_is_found(how: str):
    blocks, tables = busy()
    BREAKS[how](blocks, tables)
    with pytest.raises(InvariantBroken):
        blocks.check_invariants(tables)
