"""Requests that decode, as rows of arrays, and the steps that are launched before the last one's tokens are known.

While the GPU computes a step, the host could prepare the next; what keeps it is that it does not know the tokens yet.
It does not need them: they stay on the device, where the next step takes them from, and whether a request has ended
with one of them is found out a step late. Such a request has computed a token too many, which nobody sees.

Invariant: at most one step is in flight, and only where the scheduler has nothing to decide (`schedule_ahead`): nobody
may join, no prompt goes on, nobody has to be preempted, and no row needs the host to choose its token. Everything else
first waits for the step in flight. The tokens of the requests stay the truth: a step in flight that is forgotten is
computed again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine.runner import ModelRunner, NothingSampled, ViewDecoder
from ..engine.scheduler import Plan
from ..generation.request import Request
from ..generation.sampling import (
    MIN_TEMPERATURE,
    Download,
    PendingSamples,
    Samples,
    edits,
    numbers_of,
    streams,
    undefined,
)
from ..models.memory import GIB
from ..models.weights import Surroundings
from .graphs import RowNumbers, StepGraphs
from .sampling import sample_filtered


def needs_host(request: Request) -> bool:
    """Whether this row's token is chosen by `Sampler`: something edits its logits, or their values are wanted."""
    return edits(request) or request.params.logprobs is not None


@dataclass
class PendingTokens:
    """A step whose tokens the device chooses itself; `rows` says at which row of it each request stands."""

    rows: dict[Request, int]
    tokens: Download

    def result(self) -> Samples:
        """Waits for the device. A row without a finite logit has token -1, and an error."""
        chosen = self.tokens.wait().tolist()
        errors = {i: undefined("not finite") for i, token in enumerate(chosen) if token < 0}
        return Samples(chosen, [None] * len(chosen), errors)


class DecodeRows:
    """The numbers of a decode step, kept from one to the next: while the same requests go on, little changes."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def fill(self, numbers: RowNumbers, requests: list[Request], before: PendingTokens | None) -> None:
        """Writes a step's numbers. before: the step in flight, whose tokens the requests of this one go on from."""
        count = len(requests)
        if before is not None and requests == self.requests:
            self.position += 1
            numbers.source[:count] = np.arange(count, dtype=np.int32)
        else:
            ahead = before is not None
            self.position = np.fromiter((request.num_computed for request in requests), np.int32, count) + ahead
            numbers.source[:count] = [before.rows[request] for request in requests] if ahead else -1
            numbers.token[:count] = 0 if ahead else [_last_token(request) for request in requests]
            self.table = np.fromiter((request.table.index for request in requests), np.int32, count)
        numbers.position[:count] = self.position
        numbers.table[:count] = self.table
        self.sampling(numbers, requests, before is not None)

    def sampling(self, numbers: RowNumbers, requests: list[Request], ahead: bool = False) -> None:
        """Writes what the rows' tokens are chosen by."""
        count = len(requests)
        if ahead and requests == self.requests:
            self.drawn += 1
        else:
            self._take(requests)
            self.drawn = np.fromiter((len(request.token_ids) for request in requests), np.int64, count) + ahead
        numbers.temperature[:count] = self.temperature
        if self.random:
            numbers.uniform[:count] = numbers_of(self.streams, torch.from_numpy(self.drawn)).numpy()

    def _take(self, requests: list[Request]) -> None:
        self.requests = requests
        self.params = [request.params for request in requests]
        temperature = [max(p.temperature, MIN_TEMPERATURE) if p.temperature else 0.0 for p in self.params]
        self.temperature = np.array(temperature, np.float32)
        self.random = any(temperature)
        self.filtered = any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in self.params)
        self.streams = streams([request.seed for request in requests], [request.index for request in requests])


class FastRunner(ModelRunner):
    """Steps of decoding requests, and of short prompts, as CUDA graphs; all others through the same decoder."""

    def __init__(self, *args: Any, modules: ViewDecoder, rows: int, longest: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fast_decoder, self.modules = self.decoder, modules
        self._around = Surroundings(self.lm.model)
        self._calls = self._around.calls()
        self.reasons: list[str] = []  # why no faster way
        self.left = ""  # why the fast decoder does not run for now
        self.captures = 1  # how often graphs were made
        self.rows = DecodeRows()
        self.graphs = StepGraphs(self.lm, self.cache, self.backend, self.decoder, rows, longest)
        self._captured = self._around.addresses()
        self._seen = self._captured, self._calls

    @property
    def description(self) -> str:
        """Which decoder and whose kernels, what its graphs cost, and why no way before it."""
        cost, told = self.graphs.cost, self.fast_decoder.name
        if kernels := getattr(self.fast_decoder, "kernels", None):
            told += f", kernels in {kernels}"
        if cost.graphs:
            told += f"; {cost.graphs} graphs, made in {cost.seconds:.1f} s, {cost.bytes / GIB:.2f} GiB"
        told = f"{told}, but for now the model's own modules: {self.left}" if self.left else told
        return "; not ".join([told, *self.reasons])

    @property
    def runs_fast(self) -> bool:
        return self.decoder is self.fast_decoder

    def can_follow(self, captures: int) -> bool:
        """Whether a step may go on from the tokens of one that was launched when there were so many captures."""
        return self.runs_fast and self.captures == captures and self.graphs.tables is self.cache.device_tables

    def launch(self, plan: Plan) -> PendingTokens | PendingSamples | NothingSampled:
        """Starts a step."""
        if not self.runs_fast:
            return super().launch(plan)
        if self.is_decode(plan):
            return self.launch_decode(plan)
        size = self.graphs.prompt_size(sum(plan.values()), len(plan))
        return super().launch(plan) if size is None else self._launch_prompts(plan, size)

    def _launch_prompts(self, plan: Plan, size: int) -> PendingTokens | PendingSamples | NothingSampled:
        """Starts a step with prompts as a graph over `size` tokens."""
        self._send_tables()
        step = self.numbers(plan)
        self.rows.sampling(self.graphs.next_host(), step.sampled)
        ends = np.cumsum([0, *step.q_lens])
        logits = self.graphs.prompt(
            size, step.ids, step.positions, step.slots, step.rows, step.kv_lens, ends, step.table_rows
        )
        if not step.sampled:
            return NothingSampled()
        logits = logits[: len(step.sampled)]
        if any(map(needs_host, step.sampled)):
            return self.sampler.launch(logits, step.sampled)
        return self._sampled(logits, step.sampled)

    def is_decode(self, plan: Plan) -> bool:
        """Whether each request of a step computes the one token that it had last: what there are graphs for."""
        fits = self.runs_fast and len(plan) <= self.graphs.rows
        return fits and all(request.num_computed + 1 == request.num_tokens for request in plan)

    def launch_decode(self, plan: Plan, before: PendingTokens | None = None) -> PendingTokens | PendingSamples:
        """Starts a decode step; before: the one in flight, if it goes ahead."""
        self._send_tables()
        requests = list(plan)
        self.rows.fill(self.graphs.next_host(), requests, before)
        logits = self.graphs.decode(len(requests))
        # rows that go ahead need no host: the step before did not
        if before is None and any(map(needs_host, requests)):
            return self.sampler.launch(logits, requests)
        return self._sampled(logits, requests)

    def _sampled(self, logits: torch.Tensor, requests: list[Request]) -> PendingTokens:
        """The tokens of a replayed step, which has chosen them itself unless there are filters."""
        graphs, count = self.graphs, len(requests)
        tokens = graphs.tokens[:count]
        if self.rows.filtered:
            sample_filtered(logits, self.rows.params, graphs.numbers.uniform[:count], tokens)
        if not graphs.on_gpu:  # a download is a copy, which on a CPU it need not be
            tokens = tokens.clone()
        return PendingTokens({request: i for i, request in enumerate(requests)}, Download(tokens))

    def _send_tables(self) -> None:
        """Brings the device's block tables up to date."""
        if self.graphs.tables is not self.cache.device_tables:  # there are more of them now
            self._capture()
        if self.cache.changes:
            self._to_device()

    def refresh(self) -> None:
        """Follows the model: weights that moved, and hooks around its layers, which only modules call."""
        if (self._around.addresses(), self._around.calls()) == self._seen:
            return
        self.modules.refresh()
        self.left = self._why_not_fast()
        self.decoder = self.modules if self.left else self.fast_decoder
        self._seen = self._around.addresses(), self._around.calls()

    def _why_not_fast(self) -> str:
        """Why the fast decoder cannot go on with the model as it is now; else it does, over new graphs if need be."""
        if self._around.calls() != self._calls:
            return "a hook, or a forward of its own, which only modules call"
        try:
            self.fast_decoder.refresh()
            if self._around.addresses() != self._captured:
                self._capture()
        except Exception as error:  # weights that cannot be merged any more, no memory for graphs: slower, not broken
            return f"{type(error).__name__}: {error}"
        return ""

    def _capture(self) -> None:
        self.graphs.capture()
        self._captured = self._around.addresses()
        self.captures += 1


@dataclass
class Flight:
    plan: Plan
    pending: PendingTokens
    began: float
    scheduled: float
    captures: int  # of the runner, when it was launched: its graphs know the tokens, later ones do not


class Ahead:
    """The step in flight of an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = weakref.proxy(engine)  # which has this one: else the cache of both would outlive them
        self.flight: Flight | None = None
        self.landed = 0.0  # when the device was done with the step before

    def begin(self, plan: Plan, began: float) -> bool:
        """Launches a step and leaves it in flight, if the next may be launched before its tokens are known."""
        runner: FastRunner = self.engine.runner
        if not runner.is_decode(plan) or any(map(needs_host, plan)):
            return False
        scheduled = self.engine.clock()
        plan = dict(sorted(plan.items(), key=_length, reverse=True))  # long contexts first: they are over last
        self.engine._mark_scheduled(plan, scheduled)
        try:
            pending = runner.launch_decode(plan)
        except Exception as error:
            self.engine._fail(plan, error)
            return True
        self.flight = Flight(plan, pending, began, scheduled, runner.captures)
        return True

    def step(self, began: float) -> bool:
        """Goes on from the step in flight, if there is one: launches the next where it can be, then reads this one.

        Returns whether a step was launched.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return False
        engine, runner = self.engine, self.engine.runner
        plan = engine.scheduler.schedule_ahead(flight.plan) if runner.can_follow(flight.captures) else {}
        scheduled, failure, pending = engine.clock(), None, None
        if plan:
            try:
                pending = engine.runner.launch_decode(plan, flight.pending)
            except Exception as error:
                failure = error
        self._land(flight)
        if failure is not None:
            engine._fail(plan, failure)
        elif pending is not None:
            self.flight = Flight(plan, pending, began, scheduled, runner.captures)
        return bool(plan)

    def _land(self, flight: Flight) -> None:
        """Reads a step. Rows of requests that ended while it was in flight are none of it, and of no statistics."""
        try:
            samples = flight.pending.result()
        except Exception as error:
            self.engine._fail(flight.plan, error)
            return
        scheduled, self.landed = max(flight.scheduled, self.landed), self.engine.clock()
        going_on = [row for row, request in enumerate(flight.plan) if not request.finished]
        plan = {request: tokens for request, tokens in flight.plan.items() if not request.finished}
        if plan:
            began = scheduled - (flight.scheduled - flight.began)  # the step before was still being computed
            self.engine._take_out(plan, samples.of_rows(going_on), began, scheduled)

    def forget(self) -> None:
        """After a step that was broken off: what is in flight is computed again from the tokens there are."""
        self.flight = None


def _length(item: tuple[Request, int]) -> int:
    return item[0].num_computed


def _last_token(request: Request) -> int:
    return request.token_ids[-1] if request.token_ids else request.prompt_token_ids[-1]
