"""When an answer ends: EOS, stop ids, stop strings, a length. Here is the part of it that looks at text.

A stop string may begin in one token and end in a later one, so text that could still become a stop string must be held
back from the reader, and released when it turns out not to be one.

Special tokens are no part of the text; a stop string that is one is a stop id as well (`prompts.params_for`).

Invariant of `StopStrings`: released text never holds any part of the stop string that ends the answer, and what is
released does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that arrives in pieces for the first of several stop strings.

    Among stop strings the one that is complete first wins, as if the text came character by character; when two are
    complete at the same character, the longer one. `hit` is the string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""  # arrived, but not released: it may be the beginning of a stop string
        self.hit: str | None = None

    def feed(self, piece: str, armed: bool = True) -> str:
        """Adds a piece of text and returns what may be released.

        While not `armed` (min_tokens not reached) nothing that ends in this piece counts as a hit; a stop string that
        begins in it and ends in a later, armed piece does.
        """
        if self.hit is not None or not self._stops:
            return "" if self.hit is not None else piece
        text, old = self._held + piece, len(self._held)
        if armed:
            hits = []
            for stop in self._stops:
                at = text.find(stop, max(0, old + 1 - len(stop)))  # must end in the new piece
                if at >= 0:
                    hits.append((at + len(stop), at, stop))
            if hits:
                _, at, self.hit = min(hits)  # the first end; then the first begin, which is the longer string
                self._held = ""
                return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Text still held back when the answer ends for another reason: it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
