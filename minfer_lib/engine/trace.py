"""What the steps of an engine did: in all for statistics, and one by one for plots and widgets.

Invariant: an engine that is not traced pays for the sums alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..generation.sampling import Samples
from .scheduler import Plan, Scheduler

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
    def of(cls, plan: Plan, scheduler: Scheduler, cache: PagedKVCache) -> BlockMap:
        stats = scheduler.stats
        tables = tuple(
            TracedTable(
                request.request_id, request.index, tuple(request.table.blocks),
                request.num_computed + plan.get(request, 0),
            )
            for request in scheduler.running
        )  # fmt: skip
        return cls(
            cache.block_size, cache.num_blocks, tables, cache.allocator.cached, stats.preemptions, cache.bytes_copied,
            stats.hit_tokens, stats.forked_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class StepTrace:
    """One step. Moments in seconds of the engine's clock; the model's part, sampling included, is scheduled..computed.

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
    computed: float = 0.0
    ended: float = 0.0

    @classmethod
    def of(cls, plan: Plan, samples: Samples, scheduler: Scheduler, cache: Any) -> StepTrace:
        """Taken after the forward pass, before anything is appended."""
        chunks, row = [], 0
        for request, tokens in plan.items():
            last = request.num_computed + tokens == request.num_tokens
            decodes = last and tokens == 1 and request.num_computed >= len(request.prompt_token_ids)
            chunks.append(
                TracedChunk(
                    request.request_id, request.index, request.num_computed, tokens, decodes,
                    last and row not in samples.errors, request.table.blocks[0],
                )
            )  # fmt: skip
            row += last
        return cls(
            tuple(chunks), tuple((request.request_id, request.index) for request in scheduler.waiting),
            cache.tokens_used(scheduler.running) + sum(plan.values()), cache.num_blocks * cache.block_size,
            cache.blocks_used * cache.block_size,
            BlockMap.of(plan, scheduler, cache) if hasattr(cache, "allocator") else None,
        )  # fmt: skip

    def timed(self, began: float, scheduled: float, computed: float, ended: float) -> StepTrace:
        return dataclasses.replace(self, began=began, scheduled=scheduled, computed=computed, ended=ended)

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
    *_s: seconds of each part of the steps; model_s includes building the row and sampling. finished: requests by finish
    reason. kv_peak_used_tokens: rows of the cache that held a token in the step when they were most, and
    kv_peak_held_tokens: rows that requests had in that step; both since the engine was made or `reset_stats()`.
    """

    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    scheduled_requests: int = 0
    schedule_s: float = 0.0
    model_s: float = 0.0
    postprocess_s: float = 0.0
    kv_peak_used_tokens: int = 0
    kv_peak_held_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)

    def count(self, plan: Plan, samples: Samples, scheduler: Scheduler, cache: Any) -> None:
        """A step that was computed, before anything is appended."""
        tokens = sum(plan.values())
        self.steps += 1
        self.computed_tokens += tokens
        self.output_tokens += len(samples.token_ids) - len(samples.errors)
        self.scheduled_requests += len(plan)
        now = cache.tokens_used(scheduler.running) + tokens, cache.blocks_used * cache.block_size
        if now > (self.kv_peak_used_tokens, self.kv_peak_held_tokens):
            self.kv_peak_used_tokens, self.kv_peak_held_tokens = now

    def time(self, began: float, scheduled: float, computed: float, ended: float) -> None:
        """When the parts of that step were over."""
        self.schedule_s += scheduled - began
        self.model_s += computed - scheduled
        self.postprocess_s += ended - computed

    def report(self, scheduler: Scheduler, cache: Any) -> dict[str, float]:
        """The sums, and where the engine stands now: waiting and running requests, bytes of cache.

        mean_batch: requests in a step, on average. kv_bytes_held: of blocks that requests have; kv_bytes_used: of rows
        that hold a token. The rest is named by `scheduler.PrefixStats` and by the cache's own `report`.
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
            "kv_bytes_used": cache.tokens_used(scheduler.running) * cache.bytes_per_token,
            **cache.report(scheduler.running),
            **dataclasses.asdict(scheduler.stats),
        }
