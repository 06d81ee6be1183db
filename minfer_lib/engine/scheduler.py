"""Who runs in the next step, and with how many tokens: scheduling at the level of iterations (Orca, Yu et al. 2022).

A step has a budget of tokens. A decoding request asks for one of it, a request whose prompt is not yet computed for as
much as is left: a long prompt is taken in chunks, so that those who decode need not wait for it (chunked prefill,
Agrawal et al. 2024). Requests join and leave between any two steps.

A cache that gives out memory as it is used can run out of it. Then the request that would have been served last is
preempted: it gives its room back and waits again, with all that it has generated, and is computed again later
(preemption by recomputation, Kwon et al. 2023).

Invariant, after every call: a request is waiting, running, or gone; running ones, and only they, have room in the
cache; at most `max_num_seqs` run; no plan exceeds the budget or is empty while a request could run. The first of all,
by priority and arrival, is never preempted, so that there is always progress.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..cache.pool import NO_PREFIX, Prefix
from ..errors import InvariantBroken
from ..generation.request import Request
from ..generation.sampling import Samples

# Tokens by which each running request must be able to grow when another one joins. Without any, a request that joins is
# soon preempted; with many, memory lies idle. Half a block of 16 tokens cost least over mixed lengths in a small pool.
WATERMARK = 8

Plan = dict[Request, int]
"""A step: how many of its next tokens each request computes."""


class Cache(Protocol):
    """What the scheduler asks of a KV cache. `Request.table` is the cache's: None means that a request has no room."""

    block_size: int  # tokens
    num_blocks: int
    shares_prompts: bool  # whether `fork` works

    def find_prefix(self, request: Request) -> Prefix: ...

    def fork(self, request: Request, tokens: int) -> Prefix: ...

    def blocks_for(self, tokens: int) -> int: ...

    def allocate(self, request: Request, tokens: int, *, prefix: Prefix = NO_PREFIX, reserve: int = 0) -> bool: ...

    def cache_blocks(self, request: Request) -> None: ...

    def forget_blocks(self, request: Request) -> None: ...

    def free(self, request: Request) -> None: ...

    def reset(self) -> None: ...

    def check_invariants(self, running: Iterable[Request]) -> None: ...


@dataclass
class PrefixStats:
    """What requests gained from each other's keys and values, and lost to each other.

    asked_tokens: tokens of all requests that joined; hit_tokens: those of them that the prefix cache had;
    forked_tokens: those that another answer to the same prompt had. preemptions: how many there were;
    recomputed_tokens: tokens that were, or are about to be, computed again for that.
    """

    asked_tokens: int = 0
    hit_tokens: int = 0
    forked_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


class Scheduler:
    """The queues of an engine.

    cache: asked for room for each request. max_num_seqs: requests that run at most. max_num_batched_tokens: tokens that
    a step computes at most. watermark: tokens by which each running request must be able to grow when another joins.

    Lower priority numbers run first. Among equals, requests that decode go before those that still prefill, and these
    in order of arrival; if the budget does not reach for all that decode, they take turns. No request overtakes another
    of its priority in the queue, except that an answer waits for the prompt that a sibling is computing.

    Another policy is a subclass that the engine is given, `LLMEngine(lm, scheduler=ShortestFirst)`. `order` decides who
    joins first, and with `choose_victim` who is preempted:

        class ShortestFirst(Scheduler):
            def order(self, request):
                return request.max_new_tokens, request.arrival

        class LeastComputed(Scheduler):
            def choose_victim(self, running):
                return min(running, key=lambda request: request.num_computed)
    """

    def __init__(self, cache: Cache, *, max_num_seqs: int, max_num_batched_tokens: int, watermark: int = 0) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.watermark = watermark
        self.waiting: list[Request] = []  # in the order in which they will join
        self.running: list[Request] = []
        self.stats = PrefixStats()
        self._lost: dict[Request, int] = {}  # of preempted requests: tokens that the cache held of them
        self._closed = False  # a request was preempted, and none that ran has ended since
        self._turns = 0

    # -- policy -------------------------------------------------------------------------------------------------------

    def order(self, request: Request) -> Any:
        """Sorts requests: the smallest joins first and is preempted last. It must not change while a request waits."""
        return request.priority, request.arrival

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Which running request is preempted when the cache is full."""
        return max(running, key=self.order)

    # -- what the engine calls ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Puts a request into the queue, behind those that go before it."""
        if self.waiting and self.order(self.waiting[-1]) > self.order(request):
            bisect.insort(self.waiting, request, key=self.order)
        else:
            self.waiting.append(request)

    def schedule(self) -> Plan:
        """The next step; requests join as far as budget, places and cache reach."""
        plan: Plan = {}
        budget = self.max_num_batched_tokens
        full = False  # no request joins; those that run go on
        for request in self._candidates():
            if not budget:
                break
            if request.table is not None:
                end = min(request.num_tokens, request.num_computed + budget)
                if end > request.table.capacity:
                    fits, preempted = self._make_room(request, end)
                    budget += sum(plan.pop(victim, 0) for victim in preempted)
                    full |= not fits or len(preempted) > 0
                    if not fits:  # it waits for one of those before it to end, and keeps what it has
                        continue
                    end = min(request.num_tokens, request.num_computed + budget, request.table.capacity)
            elif full or self._is_closed_to(request):
                full = True  # no request behind it may overtake it
                continue
            elif len(self.running) >= self.max_num_seqs or (prefix := self._prefix(request)) is None:
                continue
            else:
                end = min(request.num_tokens, prefix.tokens + budget)
                if not self._join(request, end, prefix):
                    full = True
                    continue
            tokens = end - request.num_computed
            self._turns += 1
            request.turn = self._turns
            budget -= tokens
            plan[request] = tokens
        return plan

    def schedule_ahead(self, plan: Plan) -> Plan:
        """The step after `plan`, whose tokens nobody has seen yet: all that run decode on. Empty where more is to be
        decided, or where nobody is left to go on: then `plan` has to be over first.

        A request that ends with the token that is on its way, and whose length does not tell, computes one token more,
        which `update` drops.
        """
        room, ahead = self.cache.block_size * self.cache.num_blocks, {}
        if len(self.running) > self.max_num_batched_tokens or (self.waiting and len(self.running) < self.max_num_seqs):
            return {}
        going_on = [request for request in plan if not request.finished]
        if len(going_on) != len(self.running):
            return {}
        for request in going_on:
            end = request.num_computed + 2  # with the token of `plan`, and the one after it
            if len(request.token_ids) + 1 >= request.max_new_tokens or end > room:
                if self.waiting:
                    return {}  # somebody takes its place
                continue  # its last token is on its way
            if end > request.table.capacity and not self.cache.allocate(request, end):
                return {}  # somebody has to be preempted
            ahead[request] = 1
        return ahead

    def update(self, plan: Plan, samples: Samples, now: float) -> list[Request]:
        """Appends the new tokens of a step that was computed, and takes out the requests that they end."""
        size, room = self.cache.block_size, self.cache.block_size * self.cache.num_blocks
        ended, row = [], 0
        for request, tokens in plan.items():
            if request.finished:  # while the step was in flight; it had one token, and so a sample
                row += 1
                continue
            request.num_computed += tokens
            if request.num_computed < request.num_tokens:
                continue  # a chunk of a prompt that is not the last
            if row in samples.errors:
                self.cache.forget_blocks(request)
                error = samples.errors[row]
                request.finish("error", now, error=f"{type(error).__name__}: {error}")
            else:
                if request.num_computed // size > len(request.table.keys):
                    self.cache.cache_blocks(request)
                request.append(samples.token_ids[row], samples.logprobs[row], now)
                if request.num_computed == room:  # its newest token is an answer, but finds no room any more
                    request.finish("length", now, stop_reason="kv_cache_full")
            row += 1
            if request.finish_reason is not None:
                ended.append(request)
        for request in ended:
            self.remove(request)
        return ended

    def remove(self, request: Request) -> None:
        """Takes a request out of its queue and gives its room back."""
        if request.table is not None:
            self.running.remove(request)
            self._closed = False
        else:
            self._leave_queue(request)
        self._lost.pop(request, None)
        self.cache.free(request)

    def reset(self) -> None:
        """Forgets all requests, and makes the whole cache free."""
        self.waiting, self.running, self._lost, self._closed = [], [], {}, False
        self.cache.reset()

    # -- how it decides -----------------------------------------------------------------------------------------------

    def _candidates(self) -> Sequence[Request]:
        """Running requests, and those that may join, the most urgent first where there is not enough for all."""
        joining = self.waiting[: self.max_num_seqs] if len(self.running) < self.max_num_seqs else []
        wanted = sum([request.num_tokens - request.num_computed for request in self.running])
        if not joining and wanted <= self.max_num_batched_tokens:
            return list(self.running)  # a copy: those that are preempted leave it
        candidates, begin = [], 0
        for request in sorted(self.running, key=self._urgency):
            while begin < len(joining) and joining[begin].priority < request.priority:
                candidates.append(joining[begin])
                begin += 1
            candidates.append(request)
        return candidates + joining[begin:]

    def _urgency(self, request: Request) -> Any:
        """Sorts running requests: by priority, those that decode first, of these the one that waited for longest."""
        decodes = request.num_computed > 0 and request.num_tokens - request.num_computed == 1
        return request.priority, not decodes, request.turn if decodes else 0, self.order(request)

    def _make_room(self, request: Request, tokens: int) -> tuple[bool, list[Request]]:
        """Room for the first `tokens` tokens of a running request. Preempts later requests if needed; returns whether
        there is room now, and who was preempted."""
        preempted: list[Request] = []
        while not self.cache.allocate(request, tokens):
            victim = self.choose_victim(self.running)
            if victim is request:
                return False, preempted
            self._preempt(victim)
            preempted.append(victim)
        return True, preempted

    def _preempt(self, request: Request) -> None:
        """Puts a running request back into the queue; its tokens stay, its keys and values are computed again.

        Neither it nor a request behind it joins until one has ended: it would be the next to be preempted.
        """
        self.cache.free(request)
        self.running.remove(request)
        self.stats.preemptions += 1
        self._lost[request] = request.num_computed
        request.metrics.preemptions += 1
        request.num_computed = 0
        bisect.insort(self.waiting, request, key=self.order)
        self._closed = True

    def _is_closed_to(self, request: Request) -> bool:
        if not (self._closed and self.running):
            return False
        return any(self.order(lost) <= self.order(request) for lost in self._lost)

    def _prefix(self, request: Request) -> Prefix | None:
        """What a new request need not compute; None if it had better wait for a sibling that is computing it."""
        prefix = self.cache.find_prefix(request)
        shared = min(len(request.prompt_token_ids), request.num_tokens - 1)  # tokens that a sibling may have
        if self.cache.shares_prompts and shared > prefix.tokens:
            for sibling in request.siblings:
                if sibling.table is not None and sibling.max_new_tokens > 1:  # else it is gone before it can share
                    return self.cache.fork(sibling, shared) if sibling.num_computed >= shared else None
        return prefix

    def _join(self, request: Request, tokens: int, prefix: Prefix) -> bool:
        """Lets a request run with its first `tokens` tokens, if all of its tokens will fit beside what the others need
        for theirs; False if not, and then nothing changed."""
        blocks_for, running = self.cache.blocks_for, self.running
        reserve = blocks_for(request.num_tokens) - blocks_for(tokens)
        if running:
            reserve += blocks_for(self.watermark * len(running)) if self.watermark else 0
            reserve += sum(
                [
                    blocks_for(other.num_tokens) - len(other.table.blocks)
                    for other in running
                    if other.num_tokens > other.table.capacity
                ]
            )
        if not self.cache.allocate(request, tokens, prefix=prefix, reserve=reserve):
            return False
        self._count(request, prefix)
        request.num_computed = prefix.tokens
        self._leave_queue(request)
        running.append(request)
        return True

    def _leave_queue(self, request: Request) -> None:
        at = bisect.bisect_left(self.waiting, self.order(request), key=self.order)
        while self.waiting[at] is not request:
            at += 1
        del self.waiting[at]

    def _count(self, request: Request, prefix: Prefix) -> None:
        stats = self.stats
        if request in self._lost:
            stats.recomputed_tokens += max(0, self._lost.pop(request) - prefix.tokens)
            return
        stats.asked_tokens += request.num_tokens
        if prefix.forked:
            stats.forked_tokens += prefix.tokens
        else:
            stats.hit_tokens += prefix.tokens

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if the queues contradict themselves or the cache."""
        requests = [*self.waiting, *self.running]
        if len(set(requests)) != len(requests):
            raise InvariantBroken("a request stands in two queues")
        if self.waiting != sorted(self.waiting, key=self.order):
            raise InvariantBroken("the waiting queue is out of order")
        if len(self.running) > self.max_num_seqs or any(request.table is None for request in self.running):
            raise InvariantBroken(f"{len(self.running)} requests run, and some have no room in the cache")
        if any(request.num_computed or request.table is not None for request in self.waiting):
            raise InvariantBroken("a request that waits has tokens in the cache")
        for request in self.running:
            if not 0 <= request.num_computed <= request.num_tokens:
                raise InvariantBroken(f"{request.num_computed} of {request.num_tokens} tokens computed")
        self.cache.check_invariants(self.running)
