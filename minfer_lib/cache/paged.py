"""Keys and values in blocks of fixed size, given to a request as its tokens arrive (PagedAttention, Kwon et al. 2023).

A request's tokens are contiguous in its block table and lie anywhere in memory, as pages of a process do. So no room
has to be kept for an answer whose length nobody knows, and two requests can hold the same block: answers to one prompt
share it (copy-on-write), and so do requests that begin alike (prefix cache).

Invariant: a block table has as many blocks as its tokens need, so that of what a request owns only the end of its last
block is unfilled. What is written goes to a block that nobody else holds. Rows behind a request's tokens, in its last
block, hold zeros: nothing of another request can be read through a table.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..errors import InvalidParameter, InvariantBroken
from .blocks import BlockAllocator
from .pool import NO_PREFIX, KVPool, LayerShape, Prefix, zeros


class TokenSource(Protocol):
    """A request, as far as the prefix cache is concerned: something with token ids."""

    @property
    def num_tokens(self) -> int: ...

    def tokens(self, begin: int, end: int) -> Sequence[int]: ...


@dataclass
class BlockTable:
    """Where the tokens of one request are: block i of `blocks` holds positions i * block_size and following.

    tokens: positions that hold a token, or will after the step under way. keys: of the full blocks at the beginning
    that can be found by other requests.
    """

    block_size: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    keys: list[bytes] = field(default_factory=list)

    def row(self, position: int) -> int:
        """The row of the pools that a position's key and value are in: the translation of an address."""
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size

    @property
    def unfilled(self) -> int:
        """Rows at the end of the last block that hold no token."""
        return len(self.blocks) * self.block_size - self.tokens


def block_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """A key for the contents of a full block: its tokens, and through `before`, the key of the block in front of it,
    all earlier ones, because keys and values depend on them. SHA-256: two contents never get one key by accident."""
    return hashlib.sha256(before + array("q", token_ids).tobytes()).digest()


class PagedKVCache:
    """`num_blocks` blocks of `block_size` tokens, for any number of requests.

    layers: {layer index: its shape}. Memory is reserved at once: `nbytes_reserved`. All layers of a shape lie in one
    tensor, keys [layers, num_blocks, block_size, kv_heads, key_dim] and values alike, so that a block is copied in one
    operation; `pools` has the view of each layer that attention reads and writes.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise InvalidParameter(f"block_size={block_size!r} is not possible: it must be an integer of 1 or more.")
        self.allocator = BlockAllocator(num_blocks)
        self.shares_prompts = True  # `fork` works
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.bytes_per_token = sum(shape.bytes_per_token for shape in layers.values())
        self.pools: dict[int, KVPool] = {}
        self._stores: list[torch.Tensor] = []  # [layers of a shape, num_blocks, block_size, kv_heads, dim]
        for shape in dict.fromkeys(layers.values()):
            alike = [index for index, other in layers.items() if other == shape]
            room = len(alike), num_blocks, block_size, shape.kv_heads
            keys, values = (zeros((*room, dim), shape.dtype, device) for dim in (shape.key_dim, shape.value_dim))
            self._stores += [keys, values]
            for i, index in enumerate(alike):
                self.pools[index] = KVPool(keys[i].flatten(0, 1), values[i].flatten(0, 1))
        self._tables: dict[Hashable, BlockTable] = {}
        self._keys: dict[Hashable, list[bytes]] = {}  # of the full blocks of all that were looked up
        self.bytes_copied = 0  # by copy-on-write

    # -- what a new request can take over ---------------------------------------------------------------------------

    def match(self, owner: TokenSource) -> Prefix:
        """The longest beginning of a new request that the cache holds in full blocks, but never all of it: a model has
        to see at least one token to say what comes next. Nothing changes; `allocate` takes it."""
        blocks: list[int] = []
        size = self.block_size
        while self.enable_prefix_caching and (len(blocks) + 1) * size < owner.num_tokens:
            block = self.allocator.find(self._key(owner, len(blocks)))
            if block is None:
                break
            blocks.append(block)
        return Prefix(len(blocks) * size, tuple(blocks), tuple(self._keys.get(owner, ())[: len(blocks)]))

    def fork(self, owner: Hashable, tokens: int) -> Prefix:
        """The first `tokens` tokens of a request that runs, its last and unfilled block included."""
        table = self._tables[owner]
        full = tokens // self.block_size
        return Prefix(tokens, tuple(table.blocks[: self.blocks_for(tokens)]), tuple(table.keys[:full]), forked=True)

    # -- room -------------------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_size)

    def allocate(
        self, owner: Hashable, tokens: int, computed: int = 0, *, prefix: Prefix = NO_PREFIX, reserve: int = 0
    ) -> bool:
        """Sees to room for the first `tokens` tokens of a request, of which `computed` are in the cache, the others
        about to be written. False if there is none, and then nothing changed.

        A request that has no table yet begins with `prefix`. reserve: blocks that must stay free.
        """
        table = self._tables.get(owner) or BlockTable(self.block_size)
        if new := owner not in self._tables:
            computed = prefix.tokens
        held = prefix.blocks if new else table.blocks
        writes_to = computed // self.block_size  # the block that the next token goes into
        copies = writes_to < len(held) and self.allocator.references(held[writes_to]) + new > 1
        revived = sum(self.allocator.references(block) == 0 for block in prefix.blocks) if new else 0
        missing = max(0, self.blocks_for(tokens) - len(held))
        if copies + revived + missing + reserve > self.allocator.num_free:
            return False
        if new:
            for block in prefix.blocks:
                self.allocator.share(block)
            table.blocks, table.keys = list(prefix.blocks), list(prefix.keys)
            self._tables[owner] = table
        if copies:
            self._copy_on_write(table, writes_to, computed % self.block_size)
        for _ in range(missing):
            table.blocks.append(self.allocator.allocate())
        for block in reversed(table.blocks[self.blocks_for(tokens) :]):  # left by a step that was broken off
            table.blocks.pop()
            self.allocator.free(block)
        if missing or tokens < table.tokens:
            self._wipe(table.blocks[-1], tokens - (len(table.blocks) - 1) * self.block_size)
        table.tokens = tokens
        return True

    def commit(self, owner: TokenSource, computed: int) -> None:
        """Lets full blocks be found by other requests, once their `computed` tokens are in the cache."""
        if not self.enable_prefix_caching:
            return
        table = self._tables[owner]
        for index in range(len(table.keys), computed // self.block_size):
            table.keys.append(self._key(owner, index))
            self.allocator.register(table.blocks[index], table.keys[-1])

    def _key(self, owner: TokenSource, index: int) -> bytes:
        """The key of a full block of a request. Computed once: a request that waits is looked up in every step."""
        keys, size = self._keys.setdefault(owner, []), self.block_size
        for begin in range(len(keys) * size, (index + 1) * size, size):
            keys.append(block_key(keys[-1] if keys else b"", owner.tokens(begin, begin + size)))
        return keys[index]

    def free(self, owner: Hashable) -> None:
        """Gives a request's blocks back; without effect for one that has none.

        The last one first, since of a text its beginning is the most likely to be asked for again.
        """
        self._keys.pop(owner, None)
        if owner in self._tables:
            for block in reversed(self._tables.pop(owner).blocks):
                self.allocator.free(block)

    def _copy_on_write(self, table: BlockTable, at: int, rows: int) -> None:
        """Gives a table a copy of its own of a block that others hold too; the first `rows` rows of it are its own."""
        shared, own = table.blocks[at], self.allocator.allocate()
        for store in self._stores:
            store[:, own, :rows] = store[:, shared, :rows]
        self._wipe(own, rows)
        self.bytes_copied += rows * self.bytes_per_token
        self.allocator.free(shared)
        table.blocks[at] = own

    def _wipe(self, block: int, begin: int) -> None:
        """Masked keys get the weight 0, but 0 times a NaN that somebody left there would still be NaN."""
        if begin < self.block_size:
            for store in self._stores:
                store[:, block, begin:] = 0

    def block_table(self, owner: Hashable) -> list[int]:
        """The blocks that hold a request's tokens, in order of position."""
        return self._tables[owner].blocks

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Mapping[Hashable, BlockTable]:
        """The block table of each request that has one."""
        return self._tables

    @property
    def blocks_used(self) -> int:
        return self.allocator.num_used

    @property
    def tail_tokens(self) -> int:
        """Rows of blocks in use that hold no token: the ends of last blocks. All the waste there is."""
        tails: dict[int, int] = {}  # a last block may be shared, until its holders write to it
        for table in self._tables.values():
            if table.unfilled:
                tails[table.blocks[-1]] = min(table.unfilled, tails.get(table.blocks[-1], self.block_size))
        return sum(tails.values())

    @property
    def tokens_used(self) -> int:
        """Rows that hold a token of some request, or will after the step under way; shared ones once."""
        return self.allocator.num_used * self.block_size - self.tail_tokens

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of all blocks, used or not."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def nbytes_held(self) -> int:
        """Bytes of the blocks that requests have."""
        return self.allocator.num_used * self.block_size * self.bytes_per_token

    @property
    def nbytes_used(self) -> int:
        return self.tokens_used * self.bytes_per_token

    def report(self) -> dict[str, int]:
        """Blocks in use, free (cached ones included), cached, shared; unfilled rows of last blocks; bytes that
        copy-on-write copied, and cached blocks that were given to somebody else."""
        return {
            "blocks_used": self.allocator.num_used,
            "blocks_free": self.allocator.num_free,
            "blocks_cached": self.allocator.num_cached,
            "blocks_shared": self.allocator.num_shared,
            "kv_tail_tokens": self.tail_tokens,
            "kv_bytes_copied": self.bytes_copied,
            "prefix_evictions": self.allocator.evictions,
        }

    def check_invariants(self, computed: Mapping[Hashable, int] | None = None) -> None:
        """Raises `InvariantBroken` unless block tables, reference counts and free blocks agree.

        computed: tokens that the cache holds of each request that runs; they, and nobody else, must have a table then.
        """
        self.allocator.check_invariants(table.blocks for table in self._tables.values())
        for table in self._tables.values():
            if len(set(table.blocks)) != len(table.blocks) or not 0 <= table.unfilled < self.block_size:
                raise InvariantBroken(f"{table.tokens} tokens in blocks {table.blocks} of {self.block_size}")
            if len(table.keys) * self.block_size > table.tokens:
                raise InvariantBroken(f"{len(table.keys)} full blocks can be found of {table.tokens} tokens")
        if computed is not None and computed.keys() != self._tables.keys():
            raise InvariantBroken(f"{len(computed)} requests run, and {len(self._tables)} have a block table")
        if computed is not None and any(tokens > self._tables[owner].tokens for owner, tokens in computed.items()):
            raise InvariantBroken("more tokens computed than there is room for")
