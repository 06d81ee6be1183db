"""One slot for each running request: the simplest KV cache for many requests at once.

A slot is a block as long as the longest request may become, so that a request's block table has one entry and never
grows. The price is that every slot is that long, whatever comes of its request.

Invariant: each slot is free or owned by exactly one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..errors import InvariantBroken
from ..generation.request import Request
from .pool import NO_PREFIX, BlockStore, LayerShape, Prefix


class SlotKVCache(BlockStore):
    """One slot of `max_len` tokens for each of at most `num_slots` running requests."""

    shares_prompts = False  # a slot has one owner
    enable_prefix_caching = False

    def __init__(self, layers: Mapping[int, LayerShape], num_slots: int, max_len: int, device: torch.device) -> None:
        super().__init__(layers, num_slots, max_len, device, max_num_seqs=num_slots, max_model_len=max_len)
        self._free = list(range(num_slots - 1, -1, -1))

    def find_prefix(self, request: Request) -> Prefix:
        """What the cache holds of a new request: nothing, a slot begins empty."""
        return NO_PREFIX

    def allocate(self, request: Request, tokens: int, *, prefix: Prefix = NO_PREFIX, reserve: int = 0) -> bool:
        """Sees to room for the first `tokens` tokens of a request; False if there is none, and then nothing changed.

        reserve: slots that must stay free.
        """
        if request.table is not None:
            return tokens <= request.table.capacity
        if tokens > self.block_size or len(self._free) <= reserve:
            return False
        table = self._new_table()
        self._add_blocks(table, [self._free.pop()])
        request.table = table
        return True

    def cache_blocks(self, request: Request) -> None:
        """Is told when tokens of a request have been computed; nobody else can use them here."""

    def free(self, request: Request) -> None:
        """Takes a request's slot back; without effect for a request that has none."""
        if request.table is not None:
            self._free += request.table.blocks
            self._give_row_back(request.table)
            request.table = None

    def forget_blocks(self, request: Request) -> None:
        """Nothing of a request can be found by others here."""

    def reset(self) -> None:
        """Makes every slot free, whoever had it."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._reset_tables()

    def reset_prefix_cache(self) -> None:
        """There is none."""

    @property
    def blocks_used(self) -> int:
        return self.num_blocks - len(self._free)

    def tokens_used(self, running: Iterable[Request]) -> int:
        """Rows that hold a token of these requests."""
        return sum(request.num_computed for request in running)

    def report(self, running: Iterable[Request]) -> dict[str, int]:
        """Slots in use, and free."""
        return {"blocks_used": self.blocks_used, "blocks_free": len(self._free)}

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Raises `InvariantBroken` unless every slot is free or owned by exactly one of the running requests."""
        self._check_tables([request.table for request in running])
        owned = [request.table.blocks[0] for request in running]
        if sorted([*self._free, *owned]) != list(range(self.num_blocks)):
            raise InvariantBroken(f"slots free {sorted(self._free)} and owned {sorted(owned)}")
