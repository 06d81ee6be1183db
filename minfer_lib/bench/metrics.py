"""From the outputs of one run to one record of numbers.

Invariant: every number is computed from the outputs' own time stamps and lengths and from the wall time of the run,
in one place, so that it means the same for every engine and every baseline.

The definitions are those of the field (vLLM's and SGLang's serving benchmarks use them too):

- TTFT, time to first token: from a request's arrival to its first token. Waiting in a queue is part of it.
- TPOT, time per output token: the mean time between a request's later tokens, (last - first) / (tokens - 1). The first
  token is not in it, since it pays for the whole prompt; a request of one token has none.
- Queue time: from arrival to the moment when some of the prompt is first computed; it is the first part of TTFT.
- End to end: from arrival to the moment the answer is handed over. In a padded batch that is when the longest ends.
- Throughput: output tokens of all requests / wall time of the whole run. Prompt tokens do not count, and neither does
  anything that was computed and thrown away (padding, tokens past a row's end).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidParameter

if TYPE_CHECKING:
    from ..generation.request import RequestOutput


@dataclass(frozen=True)
class RunMetrics:
    """One run of a workload, or the median of several. Times in milliseconds unless the name says seconds.

    A time is None where no request has it: `tpot_ms` when every request made one token, all of them when all failed.
    """

    requests: int
    failed: int  # requests that ended with an error, were aborted or ran out of time
    prompt_tokens: int
    output_tokens: int
    prompt_len: tuple[int, int]  # shortest, longest
    output_len: tuple[int, int]
    wall_s: float
    tokens_per_s: float  # output tokens / wall time
    ttft_ms: float | None  # the median over requests; *_p95_ms is the 95th percentile
    ttft_p95_ms: float | None
    tpot_ms: float | None
    tpot_p95_ms: float | None
    e2e_ms: float | None
    e2e_p95_ms: float | None
    concurrency: float  # requests that were decoding at once, on average over the time when any was
    kv_tokens: float  # tokens that one decode step had to look back at, per request, on average
    kv_peak_tokens: int  # tokens of all running requests at the moment when they were most
    preemptions: int
    queue_ms: float | None = None
    queue_p95_ms: float | None = None
    padding_share: float | None = None  # of all computed token rows those that no request needed; None: not known


def measure(outputs: Sequence[RequestOutput], wall_s: float, padding_share: float | None = None) -> RunMetrics:
    """The record of one run: `outputs` as `generate` returned them, `wall_s` seconds from call to return.

    padding_share: as `usage.padding_share` computes it, for an engine that counts what it computes.
    Raises `InvalidParameter` for no outputs at all: there is nothing to measure.
    """
    if not outputs:
        raise InvalidParameter("A run without any output was to be measured; give the workload at least one prompt.")
    prompt_lens = [len(out.prompt_token_ids) for out in outputs]
    output_lens = [len(out.token_ids) for out in outputs]
    times = [out.metrics for out in outputs]
    ttft = [1e3 * t.ttft_s for t in times if t.ttft_s is not None]
    tpot = [1e3 * t.tpot_s for t in times if t.tpot_s is not None]
    queue = [1e3 * t.queue_s for t in times if t.queue_s is not None]
    e2e = [1e3 * t.e2e_s for t in times if t.e2e_s is not None and t.first_token is not None]
    later = [out for out in outputs if out.metrics.tpot_s is not None]
    return RunMetrics(
        requests=len(outputs),
        failed=sum(out.finish_reason not in ("stop", "length") for out in outputs),
        prompt_tokens=sum(prompt_lens),
        output_tokens=sum(output_lens),
        prompt_len=(min(prompt_lens), max(prompt_lens)),
        output_len=(min(output_lens), max(output_lens)),
        wall_s=wall_s,
        tokens_per_s=sum(output_lens) / wall_s if wall_s > 0 else 0.0,
        ttft_ms=percentile(ttft, 50),
        ttft_p95_ms=percentile(ttft, 95),
        tpot_ms=percentile(tpot, 50),
        tpot_p95_ms=percentile(tpot, 95),
        e2e_ms=percentile(e2e, 50),
        e2e_p95_ms=percentile(e2e, 95),
        concurrency=mean_concurrency([(out.metrics.first_token, out.metrics.last_token) for out in later]),
        kv_tokens=mean_kv_tokens([(len(out.prompt_token_ids), len(out.token_ids)) for out in later]),
        kv_peak_tokens=peak_kv_tokens(outputs),
        preemptions=sum(t.preemptions for t in times),
        queue_ms=percentile(queue, 50),
        queue_p95_ms=percentile(queue, 95),
        padding_share=padding_share,
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which so many per cent lie, interpolated between neighbours (NumPy's default); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


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


def median(runs: Sequence[RunMetrics]) -> RunMetrics:
    """Field by field the median of several runs of one workload, so that one disturbed run spoils no number.

    Counts that may differ between runs (failures, preemptions, memory) take the largest: a loss is not to be averaged
    away.
    """
    if not runs:
        raise InvalidParameter("The median of no runs was asked for; run the workload at least once.")
    values = {}
    for field in dataclasses.fields(RunMetrics):
        column = [getattr(run, field.name) for run in runs]
        if field.name in ("failed", "preemptions", "kv_peak_tokens"):
            values[field.name] = max(column)
        elif "float" in str(field.type):  # a measurement; the rest is the same in every run
            known = [value for value in column if value is not None]
            values[field.name] = statistics.median(known) if known else None
        else:
            values[field.name] = column[0]
    return RunMetrics(**values)
