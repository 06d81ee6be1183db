"""One slot for each running request: the simplest KV cache for many requests at once.

Invariant: each slot is free or owned by exactly one request, and a free one holds zeros, so that nobody can read what
another request left.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping

import torch

from ..errors import InvariantBroken
from .pool import NO_PREFIX, KVPool, LayerShape, Prefix


class SlotKVCache:
    """One slot of `max_len` tokens for each of at most `num_slots` running requests.

    A slot is a block of max_len rows, so that a request's block table has one entry and never grows. The price is that
    every slot is as long as the longest request may become.

    layers: {layer index: its shape}. Memory is reserved at once: `nbytes_reserved`.
    """

    shares_prompts = False  # a slot has one owner

    def __init__(self, layers: Mapping[int, LayerShape], num_slots: int, max_len: int, device: torch.device) -> None:
        self.block_size, self.num_blocks = max_len, num_slots
        self.bytes_per_token = sum(shape.bytes_per_token for shape in layers.values())
        self.pools = {index: KVPool.of(shape, num_slots * max_len, device) for index, shape in layers.items()}
        self._free = list(range(num_slots))  # a heap: the lowest first keeps the slots in use close together
        self._slots: dict[Hashable, int] = {}
        self._written: dict[Hashable, int] = {}  # rows of its slot that a request may have written

    def match(self, owner: Hashable) -> Prefix:
        """What the cache holds of a new request: nothing, a slot begins empty."""
        return NO_PREFIX

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need: the one slot."""
        return 1

    def allocate(
        self, owner: Hashable, tokens: int, computed: int = 0, *, prefix: Prefix = NO_PREFIX, reserve: int = 0
    ) -> bool:
        """Sees to room for the first `tokens` tokens of a request; False if there is none, and then nothing changed.

        reserve: slots that must stay free. The rest matters to caches that give out less than a slot at a time.
        """
        new = owner not in self._slots
        if tokens > self.block_size or (new and len(self._free) <= reserve):
            return False
        if new:
            self._slots[owner] = heapq.heappop(self._free)
        self._written[owner] = max(tokens, self._written.get(owner, 0))
        return True

    def free(self, owner: Hashable) -> None:
        """Takes a request's slot back and wipes it; without effect for a request that has none.

        Masked keys get the weight 0, but 0 times a NaN that somebody left there would still be NaN.
        """
        if owner not in self._slots:
            return
        slot = self._slots[owner]
        begin = slot * self.block_size
        for pool in self.pools.values():
            pool.keys[begin : begin + self._written[owner]] = 0
            pool.values[begin : begin + self._written[owner]] = 0
        del self._slots[owner], self._written[owner]
        heapq.heappush(self._free, slot)

    def commit(self, owner: Hashable, computed: int) -> None:
        """Hears of each request's tokens that are in the cache now; nobody else can use them here."""

    def block_table(self, owner: Hashable) -> list[int]:
        """The blocks that hold a request's tokens, in order: here the one slot."""
        return [self._slots[owner]]

    @property
    def blocks_used(self) -> int:
        return len(self._slots)

    @property
    def tokens_used(self) -> int:
        """Rows that hold a token, or will after the step under way."""
        return sum(self._written.values())

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of all slots, used or not."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def nbytes_held(self) -> int:
        """Bytes of the slots that requests have."""
        return self.blocks_used * self.block_size * self.bytes_per_token

    @property
    def nbytes_used(self) -> int:
        return self.tokens_used * self.bytes_per_token

    def report(self) -> dict[str, int]:
        """Slots in use, and free."""
        return {"blocks_used": self.blocks_used, "blocks_free": self.num_blocks - self.blocks_used}

    def check_invariants(self, computed: Mapping[Hashable, int] | None = None) -> None:
        """Raises `InvariantBroken` unless every slot is free or owned by exactly one request.

        computed: tokens that the cache holds of each request that runs; they, and nobody else, must own a slot then.
        """
        seen = sorted([*self._free, *self._slots.values()])
        if seen != list(range(self.num_blocks)):
            raise InvariantBroken(f"slots free {sorted(self._free)} and owned {sorted(self._slots.values())}")
        if self._slots.keys() != self._written.keys() or any(n > self.block_size for n in self._written.values()):
            raise InvariantBroken(f"rows written {list(self._written.values())} in slots of {self.block_size}")
        if computed is not None and computed.keys() != self._slots.keys():
            raise InvariantBroken(f"{len(computed)} requests run, and {len(self._slots)} own a slot, not the same ones")
        if computed is not None and any(tokens > self._written[owner] for owner, tokens in computed.items()):
            raise InvariantBroken("more tokens computed than rows written")
