"""Ctrl-C waits while an engine does its bookkeeping.

Invariant: code under `held_interrupts()` runs to its end, but for what it lets through; an interrupt that comes
meanwhile is delivered right after. Without this, one between two lines could leave a request in no queue, or with a
token more than it asked for. Nearly all the time of a step is the model's, where interrupts get through, so that nobody
waits for it.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class held_interrupts:  # noqa: N801  (used as a function is)
    """Holds SIGINT back in the block. In other threads than the main one, where none is delivered, it does nothing."""

    def __enter__(self) -> held_interrupts:
        self._pressed: tuple[int, FrameType | None] | None = None
        self._handler = None  # of whoever uses the engine
        found = signal.getsignal(signal.SIGINT)
        if callable(found) and threading.current_thread() is threading.main_thread():
            self._handler = found
            self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._deliver()

    def let_through(self) -> _LetThrough:
        """An inner block that may be interrupted, at its beginning by what came before it."""
        return _LetThrough(self)

    def _hold(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed = number, frame

    def _deliver(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            pressed, self._pressed = self._pressed, None
            if pressed is not None:
                self._handler(*pressed)


class _LetThrough:
    """The inner block. No generator: an interrupt at its very end would leave that unfinished, and Python would run the
    rest of it, which takes the interrupts away from their owner, whenever it is collected."""

    def __init__(self, held: held_interrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        try:
            self._held._deliver()
        except BaseException:
            self._held._hold()
            raise

    def __exit__(self, *_: object) -> None:
        self._held._hold()
