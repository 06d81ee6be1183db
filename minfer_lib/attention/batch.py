"""The new tokens of a step, side by side in one row, and where the keys and values of their requests are kept.

Invariant: token t of the row belongs to exactly one request; a request's tokens are neighbours and follow each other in
position, and its block table covers all of its tokens, the new ones included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..cache.pool import KVPool

MOST_IDLE = 2  # blocks looked at for each block that is needed, before copying the needed ones together is cheaper


@dataclass(frozen=True)
class AttentionKernels:
    """Functions that attend over block tables in one go; without one, blocks are gathered and torch attends.

    name: for people. decode: `kernels.paged_attention.paged_decode`, or another of the same arguments, for requests
    with one new token. prefill: `paged_prefill`, for those with more.
    """

    name: str
    decode: Callable[..., torch.Tensor] | None = None
    prefill: Callable[..., torch.Tensor] | None = None


GATHER = AttentionKernels("gather")


@dataclass
class PackedBatch:
    """The new tokens of one step: T tokens of R requests, those of a request side by side.

    Requests with a single new token, the decoding ones, come first. All tensors are int64 on the model's device.

    pools: for each layer index the pool that keys and values of this step are written to and read from.
    block_size: tokens in a block of the pools. block_tables: [R][blocks] numbers of the blocks that hold a request's
      tokens, in order of position.
    q_lens: [R] new tokens of each request. kv_lens: [R] tokens of each request in the cache once the new ones are.
    slot_mapping: [T] row of the pools that each new token's key and value go to.
    kernels: what attends.
    """

    pools: dict[int, KVPool]
    block_size: int
    block_tables: list[list[int]]
    q_lens: list[int]
    kv_lens: list[int]
    slot_mapping: torch.Tensor
    kernels: AttentionKernels = GATHER
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)  # by the first layer, for all that follow

    @cached_property
    def num_decodes(self) -> int:
        """Requests at the beginning of the batch that have a single new token."""
        return next((i for i, n in enumerate(self.q_lens) if n > 1), len(self.q_lens))

    @property
    def device(self) -> torch.device:
        return self.slot_mapping.device

    @cached_property
    def longest_decode(self) -> int:
        """Tokens in the cache of the longest decoding request."""
        return max(self.kv_lens[: self.num_decodes])

    @cached_property
    def most_new(self) -> int:
        """New tokens of the request that has most."""
        return max(self.q_lens)

    @cached_property
    def decode_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For kernels: block tables [decodes, most blocks] and kv_lens [decodes], int32."""
        tables, kv_lens, _ = self._numbers
        return tables[: self.num_decodes], kv_lens[: self.num_decodes]

    @cached_property
    def chunk_numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of the other requests, and where the tokens of each begin among those of all of them, with the end
        of the last [chunks + 1]."""
        tables, kv_lens, starts = self._numbers
        return tables[self.num_decodes :], kv_lens[self.num_decodes :], starts

    @cached_property
    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, width = len(self.block_tables), max(map(len, self.block_tables))
        tables = np.zeros((rows, width), dtype=np.int32)
        for row, table in zip(tables, self.block_tables, strict=True):
            row[: len(table)] = table
        starts = np.cumsum([0, *self.q_lens[self.num_decodes :]], dtype=np.int32)
        flat = np.concatenate([tables.ravel(), np.asarray(self.kv_lens, dtype=np.int32), starts])
        moved = torch.from_numpy(flat).to(self.device, non_blocking=True)  # one copy to the device for all of them
        tables, kv_lens, starts = moved.split([rows * width, rows, len(starts)])
        return tables.view(rows, width), kv_lens, starts

    @cached_property
    def decode_context(self) -> Context:
        """Where the decoding requests' keys are, for all of them at once."""
        return Context.of(self.block_tables[: self.num_decodes], self.kv_lens[: self.num_decodes], self)

    def chunk_context(self, row: int) -> Context:
        """Where one request's keys are."""
        return self._once(row, lambda: Context.of([self.block_tables[row]], [self.kv_lens[row]], self))

    def decode_mask(self, window: int | None, dtype: torch.dtype, group: int = 1) -> torch.Tensor:
        """[rows, 1, group, longest] of 0 and -inf: a decoding request sees its own tokens, the last `window` of them.

        group: query heads that share a key head, and with it a mask.
        """

        def make() -> torch.Tensor:
            length = torch.tensor(self.decode_context.kv_lens, device=self.device)[:, None]  # [rows, 1]
            position = torch.arange(self.decode_context.longest, device=self.device)  # [longest]
            seen = position < length
            if window is not None:
                seen &= position >= length - window
            return additive(seen, dtype)[:, None, None].expand(-1, -1, group, -1)

        return self._once(("decodes", window, dtype, group), make)

    def chunk_mask(self, row: int, window: int | None, dtype: torch.dtype, group: int = 1) -> torch.Tensor:
        """[group * new, total] of 0 and -inf: causal, aligned at the bottom right since the new tokens come last."""

        def make() -> torch.Tensor:
            total = self.kv_lens[row]
            key = torch.arange(total, device=self.device)
            query = torch.arange(total - self.q_lens[row], total, device=self.device)[:, None]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            return additive(seen, dtype).repeat(group, 1)

        return self._once((row, window, dtype, group), make)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclass
class Context:
    """Which part of a pool holds the tokens of several requests, to be read as one tensor [rows, longest, ...].

    Where every request has one block and these lie close together, `span` (first, last + 1) is read in place, idle
    blocks between them included: reading past them costs less than copying the others together. Otherwise `index`
    [rows, blocks] picks the blocks, which copies them.
    """

    longest: int
    kv_lens: list[int]  # of each row; 1 for an idle block, so that its softmax is defined
    span: tuple[int, int] | None = None
    rows: torch.Tensor | None = None  # [requests] each one's row, where idle blocks stand between them
    index: torch.Tensor | None = None

    @classmethod
    def of(cls, tables: list[list[int]], kv_lens: list[int], batch: PackedBatch) -> Context:
        longest = max(kv_lens)
        blocks = [table[0] for table in tables]
        first, last = min(blocks), max(blocks)
        if longest > batch.block_size or last - first >= MOST_IDLE * len(blocks):
            width = -(-longest // batch.block_size)
            # filled up with a block of one's own: a NaN in another's would get through the mask (NaN - inf is NaN)
            index = torch.tensor([(table + table[-1:] * width)[:width] for table in tables], device=batch.device)
            return cls(longest, kv_lens, index=index)
        if blocks == list(range(first, last + 1)):
            return cls(longest, kv_lens, span=(first, last + 1))
        spread = [1] * (last - first + 1)
        for block, length in zip(blocks, kv_lens, strict=True):
            spread[block - first] = length
        rows = torch.tensor([block - first for block in blocks], device=batch.device)
        return cls(longest, spread, span=(first, last + 1), rows=rows)

    def read(self, pool: torch.Tensor, block_size: int) -> torch.Tensor:
        """[tokens, kv_heads, dim] of a pool -> [rows, kv_heads, longest, dim]."""
        blocks = pool.unflatten(0, (-1, block_size))  # [blocks, block_size, kv_heads, dim]
        if self.span is not None:
            return blocks[self.span[0] : self.span[1], : self.longest].transpose(1, 2)
        return blocks[self.index].flatten(1, 2)[:, : self.longest].transpose(1, 2)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bool -> 0 where True, -inf where False."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
