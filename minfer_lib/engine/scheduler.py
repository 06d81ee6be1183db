"""Who runs in the next step, and with how many tokens: scheduling at the level of iterations (Orca, Yu et al. 2022).

A step has a budget of tokens. A decoding request asks for one of it, a request whose prompt is not yet computed for as
much as is left: a long prompt is taken in chunks, so that those who decode need not wait for it (chunked prefill,
Agrawal et al. 2024). Requests join and leave between any two steps.

A cache that gives out memory as it is used can run out of it. Then the request that would have been served last gives
its room back and waits again, with all that it has generated (preemption by recomputation, Kwon et al. 2023).

Invariant, after every call: a request is waiting, running, or gone; running ones, and only they, own room in the cache;
at most `max_num_seqs` run; no schedule exceeds the budget, has a request twice or is empty while anybody could run. The
first of all, by priority and arrival, never gives way, so that somebody always gets on.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..cache.pool import NO_PREFIX, Prefix
from ..errors import InvariantBroken
from ..generation.request import Request

# Tokens. Without any, whoever joins is soon preempted; with many, memory lies idle. Over mixed lengths in a pool that
# is too small for all, work done twice and idle memory together cost least at about half a block of 16 tokens.
WATERMARK = 8


class Cache(Protocol):
    """What the scheduler has to know of a KV cache."""

    shares_prompts: bool

    def match(self, request: Request) -> Prefix: ...

    def fork(self, owner: Request, tokens: int) -> Prefix: ...  # where it shares prompts

    def blocks_for(self, tokens: int) -> int: ...

    def block_table(self, owner: Request) -> Sequence[int]: ...

    def allocate(
        self, owner: Request, tokens: int, computed: int, *, prefix: Prefix = NO_PREFIX, reserve: int = 0
    ) -> bool: ...

    def commit(self, owner: Request, computed: int) -> None: ...

    def free(self, owner: Request) -> None: ...

    def check_invariants(self, computed: Mapping[Request, int]) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` tokens of a request, to be computed in one step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the newest one, so that the step gives the request a new token."""
        return self.num_tokens == self.request.num_to_compute


@dataclass
class Sharing:
    """What requests gained from each other's keys and values, and lost to each other.

    asked_tokens: tokens of all requests that joined; hit_tokens: those of them that were found in the cache, by what
    they are; forked_tokens: those that another answer to the same prompt had. preemptions: how often a request gave
    way; recomputed_tokens: tokens that were, or are about to be, computed again for that.
    """

    asked_tokens: int = 0
    hit_tokens: int = 0
    forked_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0

    def count(self, request: Request, prefix: Prefix, lost: int | None) -> None:
        """A request joins with this prefix; after a preemption that lost so many tokens, else None."""
        if lost is not None:
            self.recomputed_tokens += max(0, lost - prefix.tokens)
            return
        self.asked_tokens += request.num_tokens
        if prefix.forked:
            self.forked_tokens += prefix.tokens
        else:
            self.hit_tokens += prefix.tokens


class Scheduler:
    """The queues of an engine.

    cache: asked for room for each chunk. max_num_seqs: requests that run at most. max_num_batched_tokens: tokens that a
    step computes at most. watermark: tokens by which each running request must be able to grow when another one joins.

    Lower priority numbers run first. Among equals, requests that decode go before those that still prefill, and these
    in order of arrival; if the budget does not reach for all that decode, they take turns. Nobody overtakes a request
    of his own priority in the queue, so each gets its turn; only an answer whose prompt a sibling is computing at that
    moment lets others pass until it can share it.
    """

    def __init__(self, cache: Cache, *, max_num_seqs: int, max_num_batched_tokens: int, watermark: int = 0) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.watermark = watermark
        self.waiting: list[Request] = []  # in the order in which they will be admitted
        self.running: list[Request] = []
        self.sharing = Sharing()
        self._arrivals: dict[Request, int] = {}  # of all that wait or run
        self._served: dict[Request, int] = {}  # of all that run: which of all chunks was their last
        self._lost: dict[Request, int] = {}  # of the preempted: tokens that the cache held of them
        self._count = 0  # of arrivals
        self._chunks = 0
        self._closed = False  # to some: somebody was preempted, and nobody that ran has ended since

    def add(self, request: Request) -> None:
        """Puts a request into the queue, behind those of its priority."""
        self._arrivals[request] = self._count
        self._count += 1
        bisect.insort(self.waiting, request, key=self._order)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; requests are admitted as far as budget, places and cache reach."""
        plan: dict[Request, int] = {}  # tokens of each
        budget = self.max_num_batched_tokens
        full = False  # nobody joins; those that have room go on
        for request in sorted([*self.running, *self.waiting[: self.max_num_seqs]], key=self._urgency):
            if not budget:
                break
            if request in self._served:
                tokens = min(budget, request.num_to_compute)
                fits, preempted = self._make_room(request, request.num_computed + tokens)
                budget += sum(plan.pop(each, 0) for each in preempted)
                full |= not fits or len(preempted) > 0
                if not fits:  # it waits for one of those before it to end, and keeps what it has
                    continue
            elif full or self._closed_to(request):
                full = True  # who comes behind must not overtake
                continue
            elif len(self.running) >= self.max_num_seqs or (prefix := self._prefix(request)) is None:
                continue
            else:
                tokens = min(budget, request.num_tokens - prefix.tokens)
                if not self._admit(request, tokens, prefix):
                    full = True
                    continue
            self._chunks += 1
            self._served[request] = self._chunks
            budget -= tokens
            plan[request] = tokens
        return [Chunk(request, tokens) for request, tokens in plan.items()]

    def _make_room(self, request: Request, tokens: int) -> tuple[bool, list[Request]]:
        """Room for a running request's tokens, taken from those that come after it if need be: these, too. False if it
        would have to be taken from those before it."""
        preempted: list[Request] = []
        while not self.cache.allocate(request, tokens, request.num_computed):
            last = max(self.running, key=self._order)
            if last is request:
                return False, preempted
            self._preempt(last)
            preempted.append(last)
        return True, preempted

    def _preempt(self, request: Request) -> None:
        """Back to the queue, where it stood; its tokens stay, what the cache held of them is computed again.

        Neither it nor anybody behind it joins until a request has ended: who joined at once would be the next to go.
        """
        self.cache.free(request)
        self.running.remove(request)
        del self._served[request]
        self.sharing.preemptions += 1
        self._lost[request] = request.num_computed
        request.metrics.preemptions += 1
        request.num_computed = 0
        bisect.insort(self.waiting, request, key=self._order)
        self._closed = True

    def _closed_to(self, request: Request) -> bool:
        """Whether a request has to wait because it, or somebody before it, was preempted and nobody has ended since."""
        return (
            self._closed
            and bool(self.running)
            and any(self._order(lost) <= self._order(request) for lost in self._lost)
        )

    def _prefix(self, request: Request) -> Prefix | None:
        """What a new request need not compute; None if it had better wait for a sibling that is computing it."""
        found = self.cache.match(request)
        shared = min(len(request.prompt_token_ids), request.num_tokens - 1)  # tokens that a sibling may have
        for other in request.siblings if self.cache.shares_prompts and shared > found.tokens else ():
            if other in self._served:
                return self.cache.fork(other, shared) if other.num_computed >= shared else None
        return found

    def _admit(self, request: Request, tokens: int, prefix: Prefix) -> bool:
        """Lets a request join with its next `tokens` tokens, if all of its tokens will fit beside what others need for
        theirs; False if not, and then nothing changed."""
        end = prefix.tokens + tokens
        reserve = self.cache.blocks_for(request.num_tokens) - self.cache.blocks_for(end)
        if self.running:
            reserve += self.cache.blocks_for(self.watermark * len(self.running)) if self.watermark else 0
            reserve += sum(
                self.cache.blocks_for(other.num_tokens) - len(self.cache.block_table(other)) for other in self.running
            )
        if not self.cache.allocate(request, end, prefix.tokens, prefix=prefix, reserve=reserve):
            return False
        self.sharing.count(request, prefix, self._lost.pop(request, None))
        request.num_computed = prefix.tokens
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def computed(self, chunk: Chunk) -> None:
        """A chunk has been computed, and lies in the cache."""
        request = chunk.request
        request.num_computed += chunk.num_tokens
        self.cache.commit(request, request.num_computed)

    def remove_finished(self) -> list[Request]:
        """Takes out every request that has a finish reason, gives its room back, and returns them."""
        done = [request for request in (*self.waiting, *self.running) if request.finished]
        self._closed = self._closed and not any(request in self._served for request in done)
        for request in done:
            self.cache.free(request)
            self._arrivals.pop(request)
            self._served.pop(request, None)
            self._lost.pop(request, None)
        if done:  # those, and not who may have ended meanwhile
            self.waiting = [request for request in self.waiting if request in self._arrivals]
            self.running = [request for request in self.running if request in self._arrivals]
        return done

    def _order(self, request: Request) -> tuple[float, int]:
        return request.priority, self._arrivals[request]

    def _urgency(self, request: Request) -> tuple[float, bool, int, int]:
        decodes = request.num_to_compute == 1 and request.num_computed > 0
        turn = self._served.get(request, 0) if decodes else 0
        return request.priority, not decodes, turn, self._arrivals[request]

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if the queues contradict themselves or the cache."""
        self.cache.check_invariants({request: request.num_computed for request in self.running})
        everybody = [*self.waiting, *self.running]
        if len(set(everybody)) != len(everybody) or set(everybody) != self._arrivals.keys():
            raise InvariantBroken("a request stands in two queues, or in none")
        if self.waiting != sorted(self.waiting, key=self._order):
            raise InvariantBroken("the waiting queue is out of order")
        if set(self.running) != self._served.keys() or len(self.running) > self.max_num_seqs:
            raise InvariantBroken(f"{len(self.running)} requests run, {len(self._served)} were admitted")
        if any(request.num_computed for request in self.waiting):
            raise InvariantBroken("a request that waits has tokens in the cache")
        for request in self.running:
            if not 0 <= request.num_computed <= request.num_tokens:
                raise InvariantBroken(f"{request.num_computed} of {request.num_tokens} tokens computed")
