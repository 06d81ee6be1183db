"""Keys and values in blocks of fixed size, given to a request as its tokens arrive (PagedAttention, Kwon et al. 2023).

A request's tokens are contiguous in its block table and lie anywhere in memory, as pages of a process do. So no room
has to be kept for an answer whose length nobody knows, and two requests can hold the same block: answers to one prompt
share it until one of them writes to it (copy-on-write), and so do requests that begin alike (prefix cache).

Invariant: a block table has as many blocks as its tokens need, so that of what a request owns only the end of its last
block is unfilled. What is written goes to a block that nobody else holds.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..errors import InvariantBroken
from ..generation.request import Request
from .blocks import BlockAllocator
from .pool import NO_PREFIX, BlockStore, BlockTable, LayerShape, Prefix

__all__ = ["BlockTable", "PagedKVCache", "block_key"]


def block_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """A key for the contents of a full block: its tokens, and through `before`, the key of the block in front of it,
    all earlier ones, because keys and values depend on them. SHA-256: two contents never get one key by accident."""
    return hashlib.sha256(before + array("q", token_ids).tobytes()).digest()


class PagedKVCache(BlockStore):
    """`num_blocks` blocks of `block_size` tokens, for any number of requests; see `pool.BlockStore`.

    allocator_type: the class that hands out blocks; another one is another eviction policy (`BlockAllocator`).
    """

    allocator_type = BlockAllocator
    shares_prompts = True  # `fork` works

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
    ) -> None:
        self.allocator = self.allocator_type(num_blocks)
        super().__init__(layers, num_blocks, block_size, device, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.enable_prefix_caching = enable_prefix_caching
        self.bytes_copied = 0  # by copy-on-write
        self._generation = 0  # of contents: how often they were given up
        self._keys: dict[Request, list[bytes]] = {}  # of the full blocks of each request that was looked up

    # -- what a new request can take over -------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> Prefix:
        """The longest beginning of a new request that the cache holds in full blocks, but never all of it: a model has
        to see at least one token to say what comes next. Nothing changes; `allocate` takes it."""
        blocks: list[int] = []
        size = self.block_size
        while self.enable_prefix_caching and (len(blocks) + 1) * size < request.num_tokens:
            block = self.allocator.find(self._key(request, len(blocks)))
            if block is None:
                break
            blocks.append(block)
        return Prefix(len(blocks) * size, tuple(blocks), tuple(self._keys.get(request, ())[: len(blocks)]))

    def fork(self, request: Request, tokens: int) -> Prefix:
        """The first `tokens` tokens of a request that runs, its last and unfilled block included."""
        table, full = request.table, tokens // self.block_size
        blocks, keys = table.blocks[: self.blocks_for(tokens)], table.keys[:full]
        return Prefix(tokens, tuple(blocks), tuple(keys), forked=True, generation=table.generation)

    def _key(self, request: Request, index: int) -> bytes:
        """The key of a full block of a request. Computed once: a request that waits is looked up in every step."""
        keys, size = self._keys.setdefault(request, []), self.block_size
        for begin in range(len(keys) * size, (index + 1) * size, size):
            keys.append(block_key(keys[-1] if keys else b"", request.tokens(begin, begin + size)))
        return keys[index]

    # -- room -----------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, tokens: int, *, prefix: Prefix = NO_PREFIX, reserve: int = 0) -> bool:
        """Sees to room for the first `tokens` tokens of a request. False if there is none, and then nothing changed.

        A request that has no table yet begins with `prefix`. reserve: blocks that must stay free.
        """
        if request.table is not None:
            missing = self.blocks_for(tokens) - len(request.table.blocks)
            if missing + reserve > self.allocator.num_free:
                return False
            self._add_blocks(request.table, [self.allocator.allocate() for _ in range(missing)])
            return True
        blocks, allocator = list(prefix.blocks), self.allocator
        revived = sum(allocator.references(block) == 0 for block in blocks)
        filled = prefix.tokens % self.block_size  # rows of the last shared block that the request begins with
        missing = self.blocks_for(tokens) - len(blocks) + (filled > 0)
        if revived + missing + reserve > allocator.num_free:
            return False
        for block in blocks:
            allocator.share(block)
        if filled:  # it will write to this one
            blocks[-1] = self._copy_on_write(blocks[-1], filled)
            missing -= 1
        request.table = self._new_table()
        request.table.keys = list(prefix.keys)
        request.table.generation = prefix.generation if prefix.forked else self._generation
        self._add_blocks(request.table, blocks + [allocator.allocate() for _ in range(missing)])
        return True

    def _copy_on_write(self, shared: int, rows: int) -> int:
        """A copy of the first `rows` rows of a block that others hold too, in place of it."""
        own = self.allocator.allocate()
        to, source = own * self.block_size, shared * self.block_size
        for store in self._stores:
            store[:, to : to + rows] = store[:, source : source + rows]
        self.bytes_copied += rows * self.bytes_per_token
        self.allocator.free(shared)
        return own

    def cache_blocks(self, request: Request) -> None:
        """Lets the full blocks of a request be found by others, once their tokens have been computed."""
        table = request.table
        if self.enable_prefix_caching and table.generation == self._generation:
            for index in range(len(table.keys), request.num_computed // self.block_size):
                table.keys.append(self._key(request, index))
                self.allocator.register(table.blocks[index], table.keys[-1])

    def free(self, request: Request) -> None:
        """Gives a request's blocks back; without effect for one that has none.

        The last one first, since of a text its beginning is the most likely to be asked for again.
        """
        self._keys.pop(request, None)
        if request.table is not None:
            for block in reversed(request.table.blocks):
                self.allocator.free(block)
            self._give_row_back(request.table)
            request.table = None

    def forget_blocks(self, request: Request) -> None:
        """Lets nothing of a request be found by others any more: what it computed was not finite."""
        for block in request.table.blocks:
            self.allocator.unregister(block)

    def reset(self) -> None:
        """Makes every block free and empty, whoever had it."""
        self.allocator = self.allocator_type(self.num_blocks)
        self._keys.clear()
        self._reset_tables()

    def reset_prefix_cache(self) -> None:
        """Gives up the contents of cached blocks; nothing of the requests that run now will be found by others."""
        self._generation += 1
        self.allocator.forget()

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def blocks_used(self) -> int:
        return self.allocator.num_used

    def tail_tokens(self, running: Iterable[Request]) -> int:
        """Rows of these requests' blocks that hold no token: the ends of last blocks. All the waste there is."""
        return sum(request.table.capacity - request.num_computed for request in running)

    def tokens_used(self, running: Iterable[Request]) -> int:
        """Rows that hold a token of some of these requests, which are all that have blocks; shared ones once."""
        return self.allocator.num_used * self.block_size - self.tail_tokens(running)

    def report(self, running: Iterable[Request]) -> dict[str, int]:
        """Blocks in use, free (cached ones included), cached, shared; unfilled rows of last blocks; bytes that
        copy-on-write copied, and cached blocks that were given to another request."""
        return {
            "blocks_used": self.allocator.num_used,
            "blocks_free": self.allocator.num_free,
            "blocks_cached": self.allocator.num_cached,
            "blocks_shared": self.allocator.num_shared,
            "kv_tail_tokens": self.tail_tokens(running),
            "kv_bytes_copied": self.bytes_copied,
            "prefix_evictions": self.allocator.evictions,
        }

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Raises `InvariantBroken` unless block tables, reference counts and free blocks agree."""
        tables = [request.table for request in running]
        self.allocator.check_invariants(table.blocks for table in tables)
        self._check_tables(tables)
        for request, table in zip(running, tables, strict=True):
            if len(set(table.blocks)) != len(table.blocks) or table.capacity != len(table.blocks) * self.block_size:
                raise InvariantBroken(f"room for {table.capacity} tokens in blocks {table.blocks}")
            if not len(table.keys) * self.block_size <= request.num_computed <= table.capacity:
                raise InvariantBroken(f"{request.num_computed} tokens computed in {len(table.blocks)} blocks")
