"""From the outputs of one run to one record of numbers.

Invariant: every number is computed from the outputs' own time stamps and lengths and from the wall time of the run,
in one place, so that it means the same for every engine and every baseline. What was measured of each request is kept;
medians and percentiles are computed from it when somebody asks.

The definitions are those of the field (vLLM's and SGLang's serving benchmarks use them too):

- TTFT, time to first token: from a request's arrival to its first token. Waiting in a queue is part of it.
- TPOT, time per output token: the mean time between a request's later tokens, (last - first) / (tokens - 1). The first
  token is not in it, since it pays for the whole prompt; a request of one token has none.
- Queue time: from arrival to the moment when some of the prompt is first computed; it is the first part of TTFT.
- End to end: from arrival to the moment the answer is handed over. In a padded batch that is when the longest ends.
- Throughput: output tokens of all requests / wall time of the whole run. Prompt tokens do not count, and neither does
  anything that was computed and thrown away (padding, tokens past a row's end).
- Goodput: requests answered within a limit on TTFT and one on TPOT, per second of wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidParameter
from .watch import Disturbance

if TYPE_CHECKING:
    from ..generation.request import RequestOutput

Milliseconds = tuple[float | None, ...]  # one a request; None where a request has no such time
ENOUGH = 20  # requests: of fewer, a 95th percentile is an interpolation between the two slowest


@dataclass(frozen=True)
class Run:
    """One timed run of a workload. A figure that is not known is None."""

    requests: int
    failed: int  # requests that ended with an error, were aborted or ran out of time
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    ttft: Milliseconds = ()
    tpot: Milliseconds = ()
    e2e: Milliseconds = ()
    queue: Milliseconds = ()
    concurrency: float = 1.0  # requests that were decoding at once, on average over the time when any was
    kv_tokens: float = 0.0  # tokens that one decode step had to look back at, per request, on average
    kv_peak_tokens: int = 0  # tokens of all running requests at the moment when they were most
    preemptions: int = 0
    steps: int | None = None  # calls of the model
    padding_share: float | None = None  # of all computed token rows those that no request needed
    others_cpus: float = 0.0  # CPUs that other programs kept busy meanwhile
    throttled_s: float = 0.0  # in which a container's quota held this process back
    disturbed: bool = False  # by others or by a quota, as `watch` judges it

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests answered in full, per second of wall time."""
        return (self.requests - self.failed) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per call of the model: what batching raises, and padding does not."""
        return self.output_tokens / self.steps if self.steps else None

    @property
    def ttft_ms(self) -> float | None:
        """The median over requests, as are the other times; `*_p95_ms` is the 95th percentile of 20 or more."""
        return percentile(self.ttft, 50)

    @property
    def ttft_p95_ms(self) -> float | None:
        return _tail(self.ttft)

    @property
    def tpot_ms(self) -> float | None:
        return percentile(self.tpot, 50)

    @property
    def tpot_p95_ms(self) -> float | None:
        return _tail(self.tpot)

    @property
    def e2e_ms(self) -> float | None:
        return percentile(self.e2e, 50)

    @property
    def e2e_p95_ms(self) -> float | None:
        return _tail(self.e2e)

    @property
    def queue_ms(self) -> float | None:
        return percentile(self.queue, 50)

    @property
    def queue_p95_ms(self) -> float | None:
        return _tail(self.queue)

    def goodput(self, ttft_ms: float, tpot_ms: float) -> float:
        """Requests per second whose TTFT and TPOT stayed within these limits. One of a single token has no TPOT."""
        good = sum(
            first is not None and first <= ttft_ms and (later is None or later <= tpot_ms)
            for first, later in zip(self.ttft, self.tpot, strict=True)
        )
        return min(good, self.requests - self.failed) / self.wall_s if self.wall_s > 0 else 0.0


def measure(
    outputs: Sequence[RequestOutput],
    wall_s: float,
    *,
    steps: int | None = None,
    padding_share: float | None = None,
    disturbance: Disturbance | None = None,
) -> Run:
    """The record of one run: `outputs` as `generate` returned them, `wall_s` seconds from call to return.

    steps, padding_share: as `usage` counts them, for an engine that tells. disturbance: as `watch` saw it.
    Raises `InvalidParameter` for no outputs at all: there is nothing to measure.
    """
    if not outputs:
        raise InvalidParameter("A run without any output was to be measured; give the workload at least one prompt.")
    times = [out.metrics for out in outputs]
    later = [out for out in outputs if out.metrics.tpot_s is not None]
    return Run(
        requests=len(outputs),
        failed=sum(out.finish_reason not in ("stop", "length") for out in outputs),
        prompt_tokens=sum(len(out.prompt_token_ids) for out in outputs),
        output_tokens=sum(len(out.token_ids) for out in outputs),
        wall_s=wall_s,
        ttft=_ms([t.ttft_s for t in times]),
        tpot=_ms([t.tpot_s for t in times]),
        e2e=_ms([t.e2e_s if t.first_token is not None else None for t in times]),
        queue=_ms([t.queue_s for t in times]),
        concurrency=mean_concurrency([(out.metrics.first_token, out.metrics.last_token) for out in later]),
        kv_tokens=mean_kv_tokens([(len(out.prompt_token_ids), len(out.token_ids)) for out in later]),
        kv_peak_tokens=peak_kv_tokens(outputs),
        preemptions=sum(t.preemptions for t in times),
        steps=steps,
        padding_share=padding_share,
        **(disturbance or Disturbance()).figures(),
    )


def _ms(seconds: Sequence[float | None]) -> Milliseconds:
    return tuple(None if value is None else round(1e3 * value, 4) for value in seconds)


def percentile(values: Sequence[float | None], percent: float) -> float | None:
    """The value below which so many per cent of the known ones lie, interpolated between neighbours; None of none."""
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if known else None


def _tail(values: Sequence[float | None]) -> float | None:
    """The 95th percentile, where there are requests enough to have one."""
    return percentile(values, 95) if sum(value is not None for value in values) >= ENOUGH else None


def mean_concurrency(spans: Sequence[tuple[float, float]]) -> float:
    """How many of the time spans (start, end) overlap, averaged over the time that at least one covers; 1 for none.

    It is measured rather than asked of the engine, so that it holds for a serial engine (1), a padded batch (its
    size) and a continuous batch (whatever its scheduler reached) alike.
    """
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    total = sum(end - start for start, end in spans)
    return total / covered if covered > 0 else 1.0


def mean_kv_tokens(lengths: Sequence[tuple[int, int]]) -> float:
    """Tokens in the cache that a decode step reads for one request, averaged over the decode steps of all requests.

    `lengths` are pairs (prompt tokens p, output tokens n). The step that makes token k + 1 reads p + k entries, its own
    included, for k = 1 .. n - 1: p + n / 2 on average. 0 when there is no decode step.
    """
    steps = sum(n - 1 for _, n in lengths)
    return sum((n - 1) * (p + n / 2) for p, n in lengths) / steps if steps else 0.0


def peak_kv_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Tokens that a cache has to hold for all running requests together, at the moment when that is most.

    A request holds its prompt from its first token on, and one more with each later token (the last one is chosen,
    never fed back); between its first and its last token its growth is taken as even. The most is reached when one
    of them is about to end.
    """
    spans = [
        (t.first_token, t.last_token, len(out.prompt_token_ids), len(out.token_ids) - 1)
        for out in outputs
        if (t := out.metrics).first_token is not None
    ]

    def held(moment: float) -> float:
        total = 0.0
        for begin, end, prompt, grown in spans:
            if begin <= moment <= end:
                total += prompt + grown * ((moment - begin) / (end - begin) if end > begin else 1)
        return total

    return round(max((held(end) for _, end, _, _ in spans), default=0))
