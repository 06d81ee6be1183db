"""Who runs in the next step, and with how many tokens: scheduling at the level of iterations (Orca, Yu et al. 2022).

A step has a budget of tokens. A decoding request asks for one of it, a request whose prompt is not yet computed for as
much as is left: a long prompt is taken in chunks, so that those who decode need not wait for it (chunked prefill,
Agrawal et al. 2024). Requests join and leave between any two steps.

Invariant, after every call: a request is waiting, running, or gone; running ones, and only they, own room in the cache;
at most `max_num_seqs` run; no schedule exceeds the budget, has a request twice or is empty while anybody could run.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .errors import InvariantBroken
from .request import Request


class Cache(Protocol):
    """What the scheduler has to know of a KV cache."""

    def allocate(self, owner: Hashable, tokens: int) -> bool: ...

    def free(self, owner: Hashable) -> None: ...

    def check_invariants(self, computed: Mapping[Hashable, int]) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` tokens of a request, to be computed in one step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the newest one, so that the step gives the request a new token."""
        return self.num_tokens == self.request.num_to_compute


class Scheduler:
    """The queues of an engine.

    cache: asked for room for each chunk. max_num_seqs: requests that run at most. max_num_batched_tokens: tokens that a
    step computes at most.

    Lower priority numbers run first. Among equals, requests that decode go before those that still prefill, and these
    in order of arrival; if the budget does not reach for all that decode, they take turns. Nobody overtakes a request
    of his own priority in the queue, so each gets its turn.
    """

    def __init__(self, cache: Cache, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # in the order in which they will be admitted
        self.running: list[Request] = []
        self._arrivals: dict[Request, int] = {}  # of all that wait or run
        self._served: dict[Request, int] = {}  # of all that run: which of all chunks was their last
        self._count = 0  # of arrivals
        self._chunks = 0

    def add(self, request: Request) -> None:
        """Puts a request into the queue, behind those of its priority."""
        self._arrivals[request] = self._count
        self._count += 1
        bisect.insort(self.waiting, request, key=self._order)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; requests are admitted as far as budget, slots and cache reach."""
        budget, chunks = self.max_num_batched_tokens, []
        full = False  # somebody found no room, and who comes behind must not overtake; those that have room go on
        queue = sorted([*self.running, *self.waiting[: self.max_num_seqs]], key=self._urgency)
        for request in queue:
            if not budget:
                break
            tokens = min(budget, request.num_to_compute)
            new = request not in self._served
            if new and (full or len(self.running) >= self.max_num_seqs):
                continue
            if not self.cache.allocate(request, request.num_computed + tokens):
                full = True
                continue
            if new:
                self.waiting.remove(request)
                self.running.append(request)
            self._chunks += 1
            self._served[request] = self._chunks
            budget -= tokens
            chunks.append(Chunk(request, tokens))
        return chunks

    def remove_finished(self) -> list[Request]:
        """Takes out every request that has a finish reason, gives its room back, and returns them."""
        done = [request for request in (*self.waiting, *self.running) if request.finished]
        for request in done:
            self.cache.free(request)
            self._arrivals.pop(request)
            self._served.pop(request, None)
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
        for request in self.running:
            if not 0 <= request.num_computed <= request.num_tokens:
                raise InvariantBroken(f"{request.num_computed} of {request.num_tokens} tokens computed")
