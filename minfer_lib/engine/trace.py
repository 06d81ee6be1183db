"""What the steps of an engine did: one by one for plots and widgets, and in all for statistics."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cache.slots import SlotKVCache
from ..generation.request import Request
from .scheduler import Chunk, Scheduler

if TYPE_CHECKING:
    from ..cache.paged import PagedKVCache


@dataclass(frozen=True)
class TracedChunk:
    """A request's part of a step: `num_tokens` tokens from position `begin` on.

    decodes: whether it was the one token that was sampled last; else a part of the prompt. samples: whether the step
    gave it a new token. block: the first block of its block table.
    """

    request_id: str
    index: int
    begin: int
    num_tokens: int
    decodes: bool
    samples: bool
    block: int


@dataclass(frozen=True)
class TracedTable:
    """The block table of a running request, and how many tokens it covers after the step."""

    request_id: str
    index: int
    blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class BlockMap:
    """What the blocks of a paged cache held in a step; those in neither list are empty.

    tables: of all running requests; a block in two of them is shared. cached: free blocks whose contents can still be
    found, the next to be evicted first. preemptions, bytes_copied, hit_tokens, forked_tokens: sums up to here.
    """

    block_size: int
    num_blocks: int
    tables: tuple[TracedTable, ...]
    cached: tuple[int, ...]
    preemptions: int = 0
    bytes_copied: int = 0
    hit_tokens: int = 0
    forked_tokens: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, cache: PagedKVCache) -> BlockMap:
        sharing = scheduler.sharing
        return cls(
            cache.block_size, cache.num_blocks,
            tuple(
                TracedTable(request.request_id, request.index, tuple(table.blocks), table.tokens)
                for request, table in cache.tables.items()
            ),
            cache.allocator.cached, sharing.preemptions, cache.bytes_copied, sharing.hit_tokens, sharing.forked_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class StepTrace:
    """One step. Moments in seconds of the engine's clock; the model's part, sampling included, is built..computed.

    waiting: (request_id, index) of those still in the queue. kv_tokens: tokens in the cache after the step. kv_held:
    rows that belong to requests, filled or not. kv_capacity: rows that the cache has. blocks: of a paged cache.
    """

    chunks: tuple[TracedChunk, ...]
    waiting: tuple[tuple[str, int], ...]
    kv_tokens: int
    kv_capacity: int
    kv_held: int = 0
    blocks: BlockMap | None = None
    began: float = 0.0
    scheduled: float = 0.0
    built: float = 0.0
    computed: float = 0.0
    ended: float = 0.0

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        gained: Collection[Request],
        scheduler: Scheduler,
        cache: SlotKVCache | PagedKVCache,
        in_full: bool = True,
    ) -> StepTrace:
        """Taken after the forward pass, before anything is appended. gained: the requests that get a new token.

        in_full: with the queue and the blocks, which takes a while where there are many.
        """
        return cls(
            tuple(
                TracedChunk(
                    chunk.request.request_id, chunk.request.index, chunk.request.num_computed, chunk.num_tokens,
                    chunk.request.num_to_compute == 1
                    and chunk.request.num_computed >= len(chunk.request.prompt_token_ids),
                    chunk.request in gained,
                    cache.block_table(chunk.request)[0],
                )
                for chunk in chunks
            ),
            tuple((request.request_id, request.index) for request in scheduler.waiting) if in_full else (),
            cache.tokens_used,
            cache.num_blocks * cache.block_size,
            cache.blocks_used * cache.block_size,
            BlockMap.of(scheduler, cache) if in_full and hasattr(cache, "tables") else None,
        )  # fmt: skip

    def timed(self, began: float, scheduled: float, built: float, computed: float, ended: float) -> StepTrace:
        return dataclasses.replace(self, began=began, scheduled=scheduled, built=built, computed=computed, ended=ended)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        return sum(chunk.decodes for chunk in self.chunks)

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Totals:
    """Sums over all steps of an engine.

    computed_tokens: tokens that went through the model, prompts included; output_tokens: tokens that were sampled.
    *_s: seconds of each part of the steps; model_s includes sampling. finished: requests by finish reason.
    kv_peak_used_tokens: rows of the cache that held a token in the step when they were most, and kv_peak_held_tokens:
    rows that requests had in that step; both since the engine was made, or since its `forget()`.
    """

    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    scheduled_requests: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    model_s: float = 0.0
    postprocess_s: float = 0.0
    kv_peak_used_tokens: int = 0
    kv_peak_held_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)

    def add(self, step: StepTrace) -> None:
        self.steps += 1
        self.computed_tokens += step.num_tokens
        self.output_tokens += sum(chunk.samples for chunk in step.chunks)
        self.scheduled_requests += len(step.chunks)
        self.schedule_s += step.scheduled - step.began
        self.build_s += step.built - step.scheduled
        self.model_s += step.computed - step.built
        self.postprocess_s += step.ended - step.computed
        now, peak = (step.kv_tokens, step.kv_held), (self.kv_peak_used_tokens, self.kv_peak_held_tokens)
        self.kv_peak_used_tokens, self.kv_peak_held_tokens = max(now, peak)

    def report(self, scheduler: Scheduler, cache: SlotKVCache | PagedKVCache) -> dict[str, float]:
        """The sums, and where the engine stands now: waiting and running requests, bytes of cache.

        mean_batch: requests in a step, on average. kv_bytes_held: of blocks that requests have; kv_bytes_used: of rows
        that hold a token. The rest is named by `scheduler.Sharing` and by the cache's own `report`.
        """
        sums = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "finished"}
        batch = sums.pop("scheduled_requests") / max(1, self.steps)
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            **sums,
            "mean_batch": batch,
            **{f"finished_{reason}": count for reason, count in sorted(self.finished.items())},
            "kv_bytes_reserved": cache.nbytes_reserved,
            "kv_bytes_held": cache.nbytes_held,
            "kv_bytes_used": cache.nbytes_used,
            **cache.report(),
            **dataclasses.asdict(scheduler.sharing),
        }
