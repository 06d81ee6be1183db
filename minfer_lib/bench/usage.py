"""What an engine computed that nobody needed, the cache it held, and how many requests it had in hand at each moment.

Invariant: all of it is counted from what ran (token rows that went through the model, time stamps, steps), never from
what a method of batching promises. So a padding share of zero is a measurement, and padding that crept in would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .roofline import kv_token_bytes

if TYPE_CHECKING:
    from ..engine.trace import StepTrace
    from ..generation.request import RequestOutput
    from .metrics import RunMetrics


def computed_tokens(engine: Any) -> int | None:
    """Token rows that an engine has put through its model since it was made; None for one that does not count them."""
    if hasattr(engine, "computed_tokens"):
        return engine.computed_tokens
    stats = getattr(engine, "stats", None)
    return None if stats is None else int(stats()["computed_tokens"])


def padding_share(computed: int, outputs: Sequence[RequestOutput]) -> float:
    """Of `computed` token rows, the share that these answers did not need: padding, and steps past a row's own end.

    An answer needs each token of its prompt once and each of its own but the last, which is chosen and never fed back.
    """
    needed = sum(len(out.prompt_token_ids) + max(0, len(out.token_ids) - 1) for out in outputs)
    return max(0.0, 1 - needed / computed) if computed else 0.0


@dataclass(frozen=True)
class KVMemory:
    """Bytes of KV cache: set aside (`reserved`), and at the fullest moment of a run what requests owned (`held`) and
    what was filled with their tokens (`used`). None is "not known"."""

    reserved: int | None = None
    held: int | None = None
    used: int | None = None


def begin(engine: Any) -> None:
    """Before a run: an engine that would profit from earlier ones, by prefixes it still has, forgets them, and what it
    keeps of their fullest moment."""
    if hasattr(engine, "reset_stats"):
        engine.reset_stats()


def kv_memory(engine: Any, metrics: RunMetrics) -> KVMemory:
    """What an engine's cache was after a run, as it measured it itself where it did: shared rows count once there.

    Where requests do not get parts of a cache, they own all of it. An engine that tells only how much it has set aside
    is taken to have used what its requests needed; if that is more, it has given its caches back, and had as much.
    """
    tell = getattr(engine, "kv_bytes", None)
    if tell is None:
        return KVMemory()
    told = tell()
    if not isinstance(told, int):
        reserved, used = told
        return KVMemory(reserved, None if getattr(engine, "gives_out_cache", False) else reserved, used)
    if hasattr(engine, "reset_stats"):
        stats, per_token = engine.stats(), told // engine.kv_tokens
        held, used = (int(stats[f"kv_peak_{name}_tokens"]) * per_token for name in ("held", "used"))
        return KVMemory(told, held, used)
    used = metrics.kv_peak_tokens * kv_token_bytes(engine.lm)
    return KVMemory(max(told, used), max(told, used), used)


def held_between_runs(engine: Any) -> int:
    """Bytes of KV cache that an engine keeps while others run; the baselines give theirs back after each batch."""
    tell = getattr(engine, "kv_bytes", None)
    if tell is None or not getattr(engine, "keeps_cache", True):
        return 0
    told = tell()
    return told if isinstance(told, int) else told[0]


@dataclass(frozen=True)
class Occupancy:
    """How full a system was over time: entry i holds from times[i] for durations[i] seconds.

    times: seconds from the first of them. running: requests in hand; waiting: requests that have arrived and are not.
    tokens: token rows computed in the step; empty where there are no steps to count in.
    """

    times: list[float]
    durations: list[float]
    running: list[int]
    waiting: list[int]
    tokens: list[int]

    @property
    def mean(self) -> float:
        """Running requests on average over the time when any ran; 0 when none ever did."""
        busy = [(count, length) for count, length in zip(self.running, self.durations, strict=True) if count]
        total = sum(length for _, length in busy)
        return sum(count * length for count, length in busy) / total if total > 0 else 0.0


def occupancy(steps: Sequence[StepTrace]) -> Occupancy:
    """The occupancy of an `LLMEngine` that was made with trace=True, one entry for each of its `steps`.

    running: the requests that the step computed. The pause between two steps belongs to neither.
    """
    start = steps[0].began if steps else 0.0
    return Occupancy(
        times=[step.began - start for step in steps],
        durations=[step.seconds for step in steps],
        running=[len(step.chunks) for step in steps],
        waiting=[len(step.waiting) for step in steps],
        tokens=[step.num_tokens for step in steps],
    )


def occupancy_of(outputs: Sequence[RequestOutput]) -> Occupancy:
    """The occupancy of any system, from the time stamps of its answers; an entry for each moment when it changed.

    A request runs from the moment it was scheduled to its last token, not until it was handed over: a row of a padded
    batch that is done and waits for the others is not running. Requests without a token are left out.
    """
    times = [out.metrics for out in outputs if out.metrics.last_token is not None]
    changes = [(t.arrival, 0, 1) for t in times] + [(t.last_token, -1, 0) for t in times]
    changes += [(t.first_scheduled, 1, -1) for t in times]
    moments = sorted({moment for moment, _, _ in changes})
    if not moments:
        return Occupancy([], [], [], [], [])
    deltas = {moment: [0, 0] for moment in moments}
    for moment, run, wait in changes:
        deltas[moment][0] += run
        deltas[moment][1] += wait
    running, waiting = [], []
    for moment in moments:
        running.append((running[-1] if running else 0) + deltas[moment][0])
        waiting.append((waiting[-1] if waiting else 0) + deltas[moment][1])
    return Occupancy(
        times=[moment - moments[0] for moment in moments[:-1]],
        durations=[end - begin for begin, end in itertools.pairwise(moments)],
        running=running[:-1],  # at the last moment nobody is left
        waiting=waiting[:-1],
        tokens=[],
    )
