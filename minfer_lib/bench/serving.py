"""Requests that come over time: what a server would see, for every engine and every baseline.

Invariant: a request's times count from the moment it was meant to arrive, whether the system was free to notice it then
or not. A driver that starts the clock when it gets round to a request leaves out the very queue that a slow system
makes (coordinated omission). The moments are fixed beforehand, and the same for all.

How a system is driven depends on what it offers:

- `add_request` and `step` (our engine): a request is added as soon as a step ends after its arrival.
- `serve_arrivals` (transformers' continuous batching, which runs in a thread of its own): it is added when it arrives.
- `generate` alone: as soon as the system is free it gets those that have arrived, in order of arrival, at most
  `batch_size` of them; one by one where there is no `batch_size`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.trace import StepTrace
from ..errors import InvalidParameter
from ..generation.request import RequestOutput
from .arrivals import all_at_once
from .machine import synchronize
from .metrics import Run, measure
from .usage import Counting
from .watch import Watch
from .workloads import Workload


@dataclass(frozen=True)
class Served:
    """One run of a workload with arrivals.

    outputs: in the order of the workload; `metrics.arrival` of each is the intended one. began: time zero of the
    arrivals, in seconds of the engine's clock, which all time stamps are in. steps: what an `LLMEngine` traced of this
    run; empty without trace=True.
    """

    engine: str
    outputs: list[RequestOutput] = field(repr=False)
    metrics: Run
    began: float
    steps: list[StepTrace] = field(default_factory=list, repr=False)

    @property
    def requests_per_s(self) -> float:
        """Requests that were answered in full, by the seconds from time zero to the last answer."""
        return self.metrics.requests_per_s


def serve(
    engine: Any,
    workload: Workload,
    arrivals: Sequence[float] | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Run a workload whose requests arrive over time, on an engine or a baseline, and measure it from the arrivals.

    arrivals: seconds from the start, one a request, in any order; None takes those of the workload, else all at once.
    sleep: waits when there is nothing to do; tests pass their own, with a clock of their own in the engine.

    Throughput is over the time from the start to the last answer, pauses without requests included. Raises
    `InvalidParameter` for arrivals that do not fit or n > 1, and what the engine raises; Ctrl-C ends it.
    """
    if arrivals is None:
        arrivals = workload.arrivals or all_at_once(len(workload.prompts))
    workload = workload.arriving(arrivals)
    if any(params.n > 1 for params in workload.params):
        raise InvalidParameter("A served request has one answer, and n > 1 was asked for. Repeat the prompt instead.")
    order = sorted(range(len(workload.prompts)), key=lambda i: workload.arrivals[i])  # stable: equal ones as they stand
    clock = getattr(engine, "clock", time.perf_counter)
    traced, counting = len(getattr(engine, "steps", ())), Counting(engine)
    gc.collect()  # now rather than in the middle of the run
    synchronize(engine.lm.device)
    watch = Watch()
    if hasattr(engine, "add_request"):
        outputs, began = _by_steps(engine, workload, order, clock, sleep)
    elif hasattr(engine, "serve_arrivals"):
        outputs, began = engine.serve_arrivals(workload.prompts, workload.params, workload.arrivals)
    else:
        outputs, began = _by_batches(engine, workload, order, clock, sleep)
    if any(out.finish_reason == "abort" for out in outputs):
        raise KeyboardInterrupt  # an engine answers an interrupt by returning early; here it must end the run
    for out, moment in zip(outputs, workload.arrivals, strict=True):
        out.metrics.arrival = began + moment
    ended = max(out.metrics.finished for out in outputs)
    disturbance = watch.seen()
    return Served(
        engine.name,
        outputs,
        measure(outputs, ended - began, disturbance=disturbance, **counting.since(outputs)),
        began,
        list(getattr(engine, "steps", ()))[traced:],
    )


Driven = tuple[list[RequestOutput], float]  # outputs in the workload's order, and time zero


def _by_steps(
    engine: Any, workload: Workload, order: list[int], clock: Callable[[], float], sleep: Callable[[float], None]
) -> Driven:
    place: dict[str, int] = {}  # request id -> place in the workload
    outputs: dict[int, RequestOutput] = {}
    began, queue = clock(), list(reversed(order))
    try:
        while queue or len(outputs) < len(order):
            while queue and began + workload.arrivals[queue[-1]] <= clock():
                at = queue.pop()
                place[engine.add_request(workload.prompts[at], workload.params[at])] = at
            if len(outputs) < len(place):
                for out in engine.step():
                    if out.request_id in place:  # not what somebody else left in the engine
                        outputs[place[out.request_id]] = out
            else:
                _wait(began + workload.arrivals[queue[-1]], clock, sleep)
    except BaseException:
        for request_id in place:
            engine.abort(request_id)
        engine.step()  # takes the aborted ones out, so that nothing is left behind in an engine that goes on
        raise
    return [outputs[at] for at in range(len(order))], began


def _by_batches(
    engine: Any, workload: Workload, order: list[int], clock: Callable[[], float], sleep: Callable[[float], None]
) -> Driven:
    batch_size = getattr(engine, "batch_size", 1)
    outputs: dict[int, RequestOutput] = {}
    began, queue = clock(), list(order)
    while queue:
        _wait(began + workload.arrivals[queue[0]], clock, sleep)
        now = clock()
        batch = [at for at in queue[:batch_size] if began + workload.arrivals[at] <= now]
        del queue[: len(batch)]
        answers = engine.generate([workload.prompts[at] for at in batch], [workload.params[at] for at in batch])
        outputs.update(zip(batch, answers, strict=True))
        if any(out.finish_reason == "abort" for out in answers):
            raise KeyboardInterrupt
    return [outputs[at] for at in range(len(order))], began


def _wait(until: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    while (left := until - clock()) > 0:  # a sleep may end early
        sleep(left)
