"""What an engine computed, what of it nobody needed, and the cache it held.

Invariant: all of it is counted from what ran (token rows that went through the model, time stamps, steps), never from
what a method of batching promises. So a padding share of zero is a measurement, and padding that crept in would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .roofline import kv_token_bytes

if TYPE_CHECKING:
    from ..generation.request import RequestOutput
    from .metrics import Run


def computed_tokens(engine: Any) -> int | None:
    """Token rows that an engine has put through its model since it was made; None for one that does not count them."""
    if hasattr(engine, "computed_tokens"):
        return engine.computed_tokens
    stats = getattr(engine, "stats", None)
    return None if stats is None else int(stats()["computed_tokens"])


def steps_made(engine: Any) -> int | None:
    """Calls of its model that an engine has made since it was made; None for one that does not count them."""
    if hasattr(engine, "num_steps"):
        return engine.num_steps
    stats = getattr(engine, "stats", None)
    return None if stats is None else int(stats()["steps"])


class Counting:
    """What an engine counts between its making and `since()`."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.steps, self.computed = engine, steps_made(engine), computed_tokens(engine)

    def since(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Steps, and the share of padding in what was computed for these answers, as `metrics.measure` takes them."""
        computed = None if self.computed is None else computed_tokens(self.engine) - self.computed
        return {
            "steps": None if self.steps is None else steps_made(self.engine) - self.steps,
            "padding_share": None if computed is None else padding_share(computed, outputs),
        }


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


def kv_memory(engine: Any, run: Run) -> KVMemory:
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
    used = run.kv_peak_tokens * kv_token_bytes(engine.lm)
    return KVMemory(max(told, used), max(told, used), used)


def held_between_runs(engine: Any) -> int:
    """Bytes of KV cache that an engine keeps while others run; the baselines give theirs back after each batch."""
    tell = getattr(engine, "kv_bytes", None)
    if tell is None or not getattr(engine, "keeps_cache", True):
        return 0
    told = tell()
    return told if isinstance(told, int) else told[0]
