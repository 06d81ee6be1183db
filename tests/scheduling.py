"""An engine without a model: it schedules, pretends to compute, and watches what scheduler and cache do.

The mock's key of a token is a fingerprint of all tokens up to it. So after every step each row of each request can be
compared with what must lie there: a block shared wrongly, not copied or not computed again is seen at once. Every row
that is nobody's, the ends of last blocks included, is NaN when a step begins.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from minfer_lib import SamplingParams
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import LayerShape
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine.scheduler import Plan, Scheduler
from minfer_lib.generation.request import Request, RequestMetrics
from minfer_lib.generation.sampling import Samples

CPU = torch.device("cpu")
PRIME = 2**31 - 1  # fingerprints are exact in float64
LONGEST = 40  # tokens of a slot


def requests(
    name: str,
    prompt: Sequence[int] | int = 3,
    answer: int = 4,
    priority: float = 0,
    n: int = 1,
    tokenizer: object = None,
    **params: object,
) -> list[Request]:
    """n answers of exactly `answer` tokens to a prompt, or to one of `prompt` tokens that begins as no other does."""
    ids = [1000 + sum(map(ord, name)), *range(1, prompt)] if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, n=n, **params)
    answers = [
        Request(
            name, index, list(ids), params, 0, answer, frozenset(), tokenizer, RequestMetrics(0.0), priority=priority
        )
        for index in range(n)
    ]
    for request in answers if n > 1 else ():
        request.siblings = answers
    return answers


def one(*args: object, **options: object) -> Request:
    return requests(*args, **options)[0]


def name_of(request: Request) -> str:
    return request.request_id if request.params.n == 1 else f"{request.request_id}{request.index}"


def left(request: Request) -> int:
    return request.num_tokens - request.num_computed


def decodes(request: Request) -> bool:
    return request.num_computed > 0 and left(request) == 1


class Torn(list):
    """Sampled tokens, of which the last cannot be read: somebody presses Ctrl-C before it is appended."""

    def __getitem__(self, row: int) -> int:
        if row == len(self) - 1:
            raise KeyboardInterrupt
        return super().__getitem__(row)


class Loop:
    """blocks of `size` tokens, or slots of LONGEST with kind="slots".

    exact: compare each plan with `expected`, which is right where the cache never refuses and shares nothing.
    """

    def __init__(
        self,
        kind: str = "paged",
        *,
        blocks: int = 8,
        size: int = 2,
        seqs: int = 4,
        budget: int = 8,
        watermark: int = 0,
        caching: bool = True,
        exact: bool = False,
        policy: type[Scheduler] = Scheduler,
        cache_type: type[PagedKVCache] = PagedKVCache,
    ) -> None:
        self.seqs, self.budget, self.exact = seqs, budget, exact
        self.places = min(seqs, blocks) if kind == "slots" else seqs
        layers = {0: LayerShape(1, 1, 1, torch.float64)}
        self.paged = kind == "paged"
        if self.paged:
            self.cache = cache_type(layers, blocks, size, CPU, enable_prefix_caching=caching, max_num_seqs=2)
        else:
            self.cache = SlotKVCache(layers, blocks, LONGEST, CPU)
        self.keys = self.cache.pools[0].keys.numpy().reshape(-1)  # the same memory
        self.values = self.cache.pools[0].values.numpy().reshape(-1)
        self.scheduler = policy(self.cache, max_num_seqs=seqs, max_num_batched_tokens=budget, watermark=watermark)
        self.usual_victims = policy.choose_victim is Scheduler.choose_victim
        self.alive: list[Request] = []  # in order of arrival
        self.ended: list[Request] = []
        self.arrivals = itertools.count(1)
        self.prints: dict[Request, list[float]] = {}  # of each token of a request
        self.last: dict[Request, int] = {}  # the step in which a request was served last
        self.ended_running = self.recoveries = 0
        self.closed = False  # somebody was preempted, and nobody has ended since
        self.newcomers = 0  # who joined all the same: more urgent, or not behind anybody who was preempted
        self.lost: dict[Request, int] = {}  # what those who were preempted had computed
        self.asked = self.reused = self.recomputed = 0
        self.clock = 0

    @classmethod
    def ample(cls, kind: str, seqs: int = 3, budget: int = 8, **options: object) -> "Loop":
        """With room for `seqs` requests of LONGEST tokens, whatever kind of cache it is."""
        blocks, size = (seqs, LONGEST) if kind == "slots" else (seqs * LONGEST // 2, 2)
        return cls(kind, blocks=blocks, size=size, seqs=seqs, budget=budget, caching=False, exact=True, **options)

    # -- what happens to it -------------------------------------------------------------------------------------------

    def add(self, *groups: Iterable[Request]) -> None:
        for request in itertools.chain(*groups):
            request.arrival = next(self.arrivals)
            self.alive.append(request)
            self.prints[request] = []
            self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        ran = request.table is not None
        request.finish("abort", float(self.clock))
        self.scheduler.remove(request)
        self._bury([request], ran)

    def recover(self) -> None:
        """What an engine does after a step that was broken off."""
        self.scheduler.reset()
        assert self.cache.blocks_used == 0
        for request in list(self.alive):
            request.restore(float(self.clock))
            if request.finished:
                self._bury([request], True)
            else:
                self.scheduler.add(request)
        self.lost.clear(), self.last.clear()
        self.closed = False
        self.recoveries += 1

    def step(self, outcome: str = "") -> Plan:
        """outcome: "", "failed" (the model raised), "undefined" (one row's logits are NaN), or broken off:
        "interrupted" before the model wrote anything, "written" after it had, "torn" while tokens were appended."""
        self.clock += 1
        self._spoil()
        plan = self._schedule()
        size = self.cache.block_size
        for request, tokens in plan.items():
            begin, end = request.num_computed, request.num_computed + tokens
            rows = self.rows(request, begin, end)
            for block in set((rows // size).tolist()) if self.paged else ():
                assert self.cache.allocator.references(block) == 1, "it would write to what others read"
            if outcome != "interrupted":
                self.keys[rows] = self.fingerprints(request, end)[begin:]
                self.values[rows] = -self.keys[rows]
        if outcome in ("interrupted", "written"):
            self.recover()
        elif outcome == "failed":
            for request in plan:
                request.finish("error", float(self.clock), error="made to")
                self.scheduler.remove(request)
            self._bury(plan, True)
        else:
            self._update(plan, outcome)
        self.look()
        return plan

    def _update(self, plan: Plan, outcome: str) -> None:
        sampled = [request for request, tokens in plan.items() if tokens == left(request)]
        tokens, errors = [self.says(request) for request in sampled], {}
        if outcome == "undefined" and sampled:
            row = self.clock % len(sampled)
            errors[row] = ValueError("the largest logit is nan")
            mine = self.rows(sampled[row], sampled[row].num_computed, sampled[row].num_tokens)
            self.keys[mine] = self.values[mine] = np.nan  # what nobody may ever find
        samples = Samples(Torn(tokens) if outcome == "torn" else tokens, [None] * len(tokens), errors)
        if outcome == "torn" and sampled:
            try:
                self.scheduler.update(plan, samples, float(self.clock))
            except KeyboardInterrupt:
                self.recover()
            return
        ended = self.scheduler.update(plan, samples, float(self.clock))
        assert ended == [request for request in plan if request.finished]
        assert [request for request in ended if request.finish_reason == "error"] == [sampled[row] for row in errors]
        self._bury(ended, True)

    def _bury(self, requests: Iterable[Request], ran: bool) -> None:
        for request in requests:
            assert request.finished and request.table is None
            self.alive.remove(request)
            self.ended.append(request)
            self.ended_running += ran
            self.closed &= not ran

    def run(self, most: int = 3000) -> list[list[tuple[str, int]]]:
        """Until all has ended: names and numbers of tokens, step by step."""
        steps = []
        while plan := self.step():
            steps.append(named(plan))
            assert len(steps) <= most, "does not end"
        assert not self.alive and not self.scheduler.waiting and not self.scheduler.running
        assert self.cache.blocks_used == self.cache.tokens_used([]) == 0
        return steps

    # -- the mock -----------------------------------------------------------------------------------------------------

    def rows(self, request: Request, begin: int, end: int) -> np.ndarray:
        position, size = np.arange(begin, end), self.cache.block_size
        return np.asarray(request.table.blocks)[position // size] * size + position % size

    def fingerprints(self, request: Request, count: int) -> list[float]:
        mine = self.prints[request]
        for token in request.tokens(len(mine), count):
            mine.append(((mine[-1] if mine else 7.0) * 48271 + token + 1) % PRIME)
        return mine[:count]

    def says(self, request: Request) -> int:
        """Depends on what the cache holds of the request, and on which of n answers it is."""
        return int(self.keys[self.rows(request, 0, request.num_tokens)].sum() + 3 * request.index) % 5

    def _spoil(self) -> None:
        """What nobody can find any more may be anything."""
        nobodys = np.ones(len(self.keys), dtype=bool)
        for request in self.scheduler.running:
            nobodys[self.rows(request, 0, request.num_computed)] = False
        for block in self.cache.allocator.cached if self.paged else ():
            nobodys[block * self.cache.block_size : (block + 1) * self.cache.block_size] = False
        self.keys[nobodys] = self.values[nobodys] = np.nan

    # -- what must be so ----------------------------------------------------------------------------------------------

    def _schedule(self) -> Plan:
        scheduler, order = self.scheduler, self.scheduler.order
        before = {request: (request.metrics.preemptions, request.num_computed) for request in self.alive}
        were_running = set(scheduler.running)
        plan = scheduler.schedule()
        scheduler.check_invariants()
        running = scheduler.running
        preempted = [request for request in self.alive if request.metrics.preemptions > before[request][0]]
        joined = [request for request in running if request not in were_running]

        assert sum(plan.values()) <= self.budget
        assert all(request in running for request in plan)
        assert all(1 <= tokens <= left(request) for request, tokens in plan.items())
        assert all(request.num_computed + tokens <= request.table.capacity for request, tokens in plan.items())
        assert bool(plan) == bool(self.alive), "idle while somebody could run"
        if self.exact:
            assert plan == self.expected(were_running, plan)
        self.last |= dict.fromkeys(plan, self.clock)

        if self.usual_victims:
            assert min(self.alive, key=order, default=None) not in preempted, "the first gave way"
        for request in preempted:
            if self.usual_victims:  # the last gives way
                assert all(order(other) < order(request) for other in running)
            assert request.metrics.preemptions == before[request][0] + 1
            self.lost[request] = before[request][1] if request in were_running else 0
        if self.closed and were_running & set(running):  # nobody at or behind one who was preempted, before an end
            behind = min((order(request) for request in self.lost if request in self.alive), default=None)
            assert behind is None or all(order(request) < behind for request in joined)
            self.newcomers += len(joined)
        self.closed |= bool(preempted)
        most = (self.ended_running + self.recoveries + 1) * self.seqs + self.newcomers
        assert scheduler.stats.preemptions <= most
        for request in joined:
            for other in scheduler.waiting:  # whom it overtook waits for a sibling
                assert order(other) >= order(request) or any(s in running for s in other.siblings)
            if request in self.lost:
                lost = self.lost.pop(request)
                self.recomputed += lost - min(lost, request.num_computed)
            elif request not in preempted:
                self.asked += request.num_tokens
                self.reused += request.num_computed
        stats = scheduler.stats
        assert (stats.asked_tokens, stats.hit_tokens + stats.forked_tokens) == (self.asked, self.reused)
        assert stats.recomputed_tokens == self.recomputed
        return plan

    def expected(self, were_running: Iterable[Request], plan: Plan) -> Plan:
        """Tokens for each request: pick whoever comes first, again and again.

        Of those that decode, who was served longest ago comes first; of two served in one step, whom the plan chose.
        """
        budget, picked, running = self.budget, {}, set(were_running)
        closed = False  # to those who wait
        while budget:
            candidates = [
                (r.priority, not decodes(r), (self.last[r], r not in plan) if decodes(r) else (0, False), r.arrival, r)
                for r in self.alive
                if r not in picked and (r in running or not closed)
            ]
            if not candidates:
                break
            best = min(candidates, key=lambda candidate: candidate[:4])[4]
            if best not in running:
                if len(running) == self.places:
                    closed = True
                    continue
                running.add(best)
            picked[best] = min(budget, left(best))
            budget -= picked[best]
        return picked

    def look(self) -> None:
        """All that must be so at any time."""
        self.scheduler.check_invariants()
        cache, running = self.cache, self.scheduler.running
        everybody = [*self.alive, *self.ended]
        assert self.scheduler.stats.preemptions == sum(request.metrics.preemptions for request in everybody)
        assert all(request.num_computed == 0 for request in self.scheduler.waiting)
        assert {*self.scheduler.waiting, *running} == set(self.alive)
        rows = set()
        for request in running:
            mine = self.rows(request, 0, request.num_computed)
            expected = np.asarray(self.fingerprints(request, request.num_computed))
            assert (self.keys[mine] == expected).all() and (self.values[mine] == -expected).all()
            rows.update(mine.tolist())
        report = cache.report(running)
        assert report["blocks_used"] + report["blocks_free"] == cache.num_blocks
        assert report["blocks_used"] == cache.blocks_used == len({b for r in running for b in r.table.blocks})
        assert cache.tokens_used(running) == len(rows)
        if self.paged:
            tails = sum(r.table.capacity - r.num_computed for r in running)
            assert report["kv_tail_tokens"] == cache.tail_tokens(running) == tails


def named(plan: Plan) -> list[tuple[str, int]]:
    return [(name_of(request), tokens) for request, tokens in plan.items()]


def names(which: Iterable[Request]) -> list[str]:
    return [name_of(request) for request in which]


def alone(request: Request) -> list[int]:
    """What the mock says to a prompt when nobody else is there."""
    loop = Loop(blocks=200, size=1, budget=1000, caching=False)
    twin = one("twin", request.prompt_token_ids, request.max_new_tokens)
    twin.index = request.index
    loop.add([twin])
    loop.run()
    return twin.token_ids
