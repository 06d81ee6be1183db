"""Hands out the blocks of a KV cache: which are free, who shares which, and whose contents can be found again.

A block is a number from 0 to num_blocks - 1; what it holds is kept elsewhere (`paged`). The idea is the page frame
allocator of an operating system (PagedAttention, Kwon et al. 2023).

Invariant: a block is free or in use, and in use exactly as long as its reference count is above zero. A key leads to at
most one block and a block has at most one key; a free block with a key keeps its contents until nothing else is free.
Every operation takes constant time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ..errors import InvalidParameter, InvariantBroken, NoFreeBlock


class BlockAllocator:
    """The free list of `num_blocks` blocks, and a reference count for each that is in use.

    Free blocks come in two kinds: empty ones, handed out first, and cached ones, whose contents somebody may ask for
    by key (`find`). When no empty one is left, the cached block that has been unused for longest is evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise InvalidParameter(f"num_blocks={num_blocks!r} is not possible: it must be an integer of 1 or more.")
        self.num_blocks = num_blocks
        self.evictions = 0  # cached blocks whose contents were given up
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack; the lowest numbers first, so that few are touched
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one unused for longest first
        self._references = [0] * num_blocks
        self._shared = 0  # blocks with more than one reference
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be found."""
        return len(self._cached)

    @property
    def num_shared(self) -> int:
        """Blocks in use with more than one reference."""
        return self._shared

    @property
    def cached(self) -> tuple[int, ...]:
        """The free blocks whose contents can still be found, in the order in which they will be evicted."""
        return tuple(self._cached)

    def references(self, block: int) -> int:
        """How many hold this block; 0 for a free one."""
        if not 0 <= block < self.num_blocks:  # a negative index would lead to another block
            raise InvalidParameter(f"block {block} does not exist: there are 0 to {self.num_blocks - 1}.")
        return self._references[block]

    def allocate(self) -> int:
        """A block with one reference. Raises `NoFreeBlock` if all are in use."""
        if self._empty:
            block = self._empty.pop()
        elif self._cached:
            block = self.choose_evicted(self._cached)
            del self._cached[block]
            del self._block_of[self._key_of.pop(block)]
            self.evictions += 1
        else:
            raise NoFreeBlock(
                f"A block was asked for, and all {self.num_blocks} are in use. Free one first, or make a larger pool."
            )
        self._references[block] = 1
        return block

    def choose_evicted(self, cached: OrderedDict[int, None]) -> int:
        """The eviction policy: which of the cached blocks, the one unused for longest first, gives up its contents.

        Another policy is a subclass, as in

            class MostRecent(BlockAllocator):
                def choose_evicted(self, cached):
                    return next(reversed(cached))

            class MyCache(PagedKVCache):
                allocator_type = MostRecent

            engine = LLMEngine(lm, kv_cache=MyCache)
        """
        return next(iter(cached))

    def share(self, block: int) -> None:
        """One more reference to a block that is in use, or that `find` has found."""
        if self.references(block) == 0:
            if block not in self._cached:
                raise InvariantBroken(f"block {block} was to be shared, and it is free and empty")
            del self._cached[block]
        self._references[block] += 1
        self._shared += self._references[block] == 2

    def free(self, block: int) -> None:
        """Gives one reference back; with the last one the block becomes free, cached if it has a key."""
        if self.references(block) == 0:
            raise InvariantBroken(f"block {block} was to be freed, and it is free")
        self._shared -= self._references[block] == 2
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Lets a block that is in use be found by what it holds; without effect if another one is found by that key."""
        if self.references(block) == 0:
            raise InvariantBroken(f"block {block} was to be registered, and it is free")
        if self._block_of.get(key, block) != block:
            return
        if self._key_of.get(block, key) != key:
            raise InvariantBroken(f"block {block} was to get a second key")
        self._key_of[block], self._block_of[key] = key, block

    def find(self, key: bytes) -> int | None:
        """The block that was registered under a key, in use or cached; None if there is none."""
        return self._block_of.get(key)

    def unregister(self, block: int) -> None:
        """Makes a block unfindable, whatever it holds."""
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
            if block in self._cached:
                del self._cached[block]
                self._empty.append(block)

    def forget(self) -> None:
        """Gives up the contents of every cached block, and makes those in use unfindable."""
        self._empty += reversed(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()

    def check_invariants(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raises `InvariantBroken` if the lists contradict each other, or the block tables of all owners."""
        used = [block for block, count in enumerate(self._references) if count > 0]
        if sorted([*self._empty, *self._cached, *used]) != list(range(self.num_blocks)):
            raise InvariantBroken(f"blocks free {sorted([*self._empty, *self._cached])} and in use {used}")
        if min(self._references, default=0) < 0 or self._shared != sum(count > 1 for count in self._references):
            raise InvariantBroken(f"reference counts {self._references}, of which {self._shared} are said to be shared")
        if self._block_of != {key: block for block, key in self._key_of.items()}:
            raise InvariantBroken("a key leads to a block that has another one")
        if set(self._cached) != {block for block in self._key_of if self._references[block] == 0}:
            raise InvariantBroken("a free block with a key is not cached, or a cached one has none")
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            if held != Counter({block: self._references[block] for block in used}):
                raise InvariantBroken(f"block tables hold {dict(held)}, reference counts are {self._references}")
