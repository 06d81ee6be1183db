"""Memory for keys and values that many requests share: blocks of rows, and block tables that say whose they are.

A row holds the key and the value of one token in one layer. `block_size` rows make a block. What a block holds, and
which blocks a request has, is decided by the cache that builds on `BlockStore`: one long block a request
(`slots.SlotKVCache`), or many short ones (`paged.PagedKVCache`). Attention reads both in the same way.

Invariant: nobody reads a row that is not among the tokens of their request, so that nothing is ever wiped. Behind the
blocks one more row, the trash row, holds zeros and stands wherever an index has to point at something to read; and
another one, the spare row, where it has to point at something to write to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import InvariantBroken
from ..kernels.reference_parts import write_cache


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of a token: kv_heads keys of key_dim and as many values of value_dim numbers.

    dtype: of the pool. In int8 each key and each value has a float32 scale beside it.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        scales = 2 * torch.float32.itemsize if self.dtype == torch.int8 else 0
        return self.kv_heads * ((self.key_dim + self.value_dim) * self.dtype.itemsize + scales)

    def stores(self, *rows: int, device: torch.device) -> list[torch.Tensor]:
        """Zeros for keys [*rows, kv_heads, key_dim] and values; in int8 for their scales [*rows, kv_heads] too."""
        room = *rows, self.kv_heads
        stores = [zeros((*room, dim), self.dtype, device) for dim in (self.key_dim, self.value_dim)]
        if self.dtype == torch.int8:
            stores += [zeros(room, torch.float32, device) for _ in range(2)]
        return stores


@dataclass
class KVPool:
    """Keys and values of one layer: keys [rows, kv_heads, key_dim], values [rows, kv_heads, value_dim].

    A pool of int8 holds codes, each key and value with a scale of its own: key_scales and value_scales float32 [rows,
    kv_heads]. They are made once, where a token is written (`kernels.reference_parts.quantize_rows`), and everybody
    reads the same, the step that writes included: what a token's keys are does not depend on who asks, and when.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @classmethod
    def of(cls, shape: LayerShape, rows: int, device: torch.device) -> KVPool:
        """A pool of zeros."""
        return cls(*shape.stores(rows, device=device))

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts new keys [new, kv_heads, key_dim] and values into the given rows [new] of the pool."""
        write_cache(keys, values, rows, self.keys, self.values, self.key_scales, self.value_scales)

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [n, kv_heads, key_dim] and values of the given rows [n]; codes become numbers of `dtype`."""
        keys, values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        if self.key_scales is not None:
            keys = (keys * self.key_scales.index_select(0, rows)[..., None]).to(dtype)
            values = (values * self.value_scales.index_select(0, rows)[..., None]).to(dtype)
        return keys, values


@dataclass(frozen=True)
class Prefix:
    """The first `tokens` tokens of a request, where a cache holds them already: in these blocks.

    keys: of its full blocks, for a cache that finds blocks by what they hold. forked: whether another answer to the
    same prompt, which is running, computed them; generation: of the cache's contents, when that one joined.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    forked: bool = False
    generation: int = 0


NO_PREFIX = Prefix()


@dataclass(eq=False)
class BlockTable:
    """Where the tokens of one request are: block i of `blocks` holds positions i * block_size and following.

    keys: of the full blocks at the beginning that other requests can find. index: its row among the store's `tables`.
    """

    block_size: int
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    index: int = -1
    capacity: int = 0  # tokens that its blocks have room for
    generation: int = 0  # of the cache's contents, when its request joined

    def row(self, position: int) -> int:
        """The row of the pools that a position's key and value are in: the translation of an address."""
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size


class BlockStore:
    """`num_blocks` blocks of `block_size` tokens on a device, and the block table of each request that has some.

    layers: {layer index: its shape}. Memory is reserved at once: `nbytes_reserved`. All layers of a shape lie in one
    tensor, keys [layers, num_blocks * block_size + 2, kv_heads, key_dim], values and scales alike, so that a block is
    copied in one operation; `pools` has the view of each layer that attention reads and writes.

    tables: int32 [requests, blocks], a row for each block table, on the host. Entries behind a request's own blocks
    mean nothing. `device_tables` is the same where the model is; on a CPU it is the same memory, elsewhere `changes`
    holds what has to be copied there: {place in the flat table: block}.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
    ) -> None:
        self.layers, self.num_blocks, self.block_size, self.device = dict(layers), num_blocks, block_size, device
        self.bytes_per_token = sum(shape.bytes_per_token for shape in layers.values())
        self.pools: dict[int, KVPool] = {}
        self._stores: list[torch.Tensor] = []  # [layers of a shape, rows, kv_heads, ...]
        for shape in dict.fromkeys(layers.values()):
            alike = [index for index, other in layers.items() if other == shape]
            stores = shape.stores(len(alike), num_blocks * block_size + 2, device=device)
            self._stores += stores
            for i, index in enumerate(alike):
                self.pools[index] = KVPool(*(store[i] for store in stores))
        width = num_blocks if max_model_len is None else min(num_blocks, -(-max_model_len // block_size))
        self._make_tables(np.zeros((max_num_seqs, width), dtype=np.int32))

    @property
    def trash_row(self) -> int:
        """The row behind all blocks, which holds zeros."""
        return self.num_blocks * self.block_size

    @property
    def spare_row(self) -> int:
        """The row behind that, which rows of a batch that do nothing write to, and nobody reads."""
        return self.trash_row + 1

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_size)

    # -- block tables -------------------------------------------------------------------------------------------------

    def _make_tables(self, tables: np.ndarray) -> None:
        self.tables = tables
        on_host = torch.from_numpy(tables)
        self.device_tables = on_host if self.device.type == "cpu" else on_host.to(self.device)
        self.changes: dict[int, int] = {}
        self._free_rows = list(range(len(tables) - 1, -1, -1))

    def _new_table(self) -> BlockTable:
        if not self._free_rows:  # more requests than was said: twice the rows
            before, free = self.tables, range(2 * len(self.tables) - 1, len(self.tables) - 1, -1)
            self._make_tables(np.concatenate([before, np.zeros_like(before)]))
            self._free_rows = list(free)
        return BlockTable(self.block_size, index=self._free_rows.pop())

    def _add_blocks(self, table: BlockTable, blocks: Sequence[int]) -> None:
        begin, end = len(table.blocks), len(table.blocks) + len(blocks)
        self.tables[table.index, begin:end] = blocks
        table.blocks += blocks
        table.capacity = end * self.block_size
        if self.device.type != "cpu":
            place = table.index * self.tables.shape[1] + begin
            self.changes.update(zip(range(place, place + len(blocks)), blocks, strict=True))

    def _give_row_back(self, table: BlockTable) -> None:
        self._free_rows.append(table.index)

    def _reset_tables(self) -> None:
        self._free_rows = list(range(len(self.tables) - 1, -1, -1))

    def _check_tables(self, tables: Sequence[BlockTable]) -> None:
        """Raises `InvariantBroken` unless each block table stands in a row of its own."""
        if len({table.index for table in tables}) != len(tables):
            raise InvariantBroken("two requests have one row of the block tables")
        for table in tables:
            if list(self.tables[table.index, : len(table.blocks)]) != table.blocks:
                raise InvariantBroken(f"blocks {table.blocks} are not those of row {table.index} of the tables")

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def blocks_used(self) -> int:
        raise NotImplementedError

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of all blocks that can be given out, used or not."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def nbytes_held(self) -> int:
        """Bytes of the blocks that requests have."""
        return self.blocks_used * self.block_size * self.bytes_per_token


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros, which on a CPU costs no memory before it is written to.

    NumPy asks the system for zeroed pages, which exist once they are touched; torch would write every zero itself.
    """
    with torch.inference_mode(False):  # a tensor made inside a caller's inference mode could not be written outside
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
