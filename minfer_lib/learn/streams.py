"""Several answers that grow side by side, as an engine streams them.

Invariant: one display is updated in place. No widget is involved, so that the boxes work in any front end, and what a
notebook keeps is their last state; when the call ends, however it ends, no stream is left open.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import InvalidParameter
from ..generation.params import SamplingParams
from .style import CARD, CARD_EDGE, INK, SOFT_INK, in_notebook

SECONDS_APART = 0.05  # between two updates: more would only keep the front end busy


class Streaming(Protocol):
    """An engine whose streams may be read in any order."""

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Any: ...


@dataclass
class Box:
    """One answer so far. ending: "" while it grows."""

    title: str
    text: str = ""
    tokens: int = 0
    ending: str = ""

    @property
    def state(self) -> str:
        count = "1 token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        return f"{count}, {self.ending}" if self.ending else f"{count} …"


@dataclass
class Boxes:
    """All of them, `columns` beside each other."""

    boxes: list[Box]
    columns: int

    def __repr__(self) -> str:
        return "\n\n".join(f"{box.title}\n{box.text.strip()}\n({box.state})" for box in self.boxes)

    def _repr_html_(self) -> str:
        look = (
            f"display:inline-block;vertical-align:top;box-sizing:border-box;width:{97 / self.columns:.1f}%;"
            f"margin:3px;padding:8px 12px;border:1px solid {CARD_EDGE};background-color:{CARD};color:{INK};"
            "font-size:13px;line-height:1.4"
        )
        parts = [
            f'<div style="{look}"><div style="font-weight:bold">{html.escape(box.title)}</div>'
            f'<div style="white-space:pre-wrap;margin:5px 0">{html.escape(box.text.strip()) or "&nbsp;"}</div>'
            f'<div style="font-size:11px;color:{SOFT_INK}">{box.state}</div></div>'
            for box in self.boxes
        ]
        return f"<div>{''.join(parts)}</div>"


def stream_side_by_side(
    engine: Streaming,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    titles: Sequence[str] | None = None,
    columns: int = 2,
) -> list[str] | None:
    """Streams the answers to all `prompts` at once, each in a box of its own that fills as pieces arrive.

    params: for all, or one each; n has to be 1. titles: what stands above the boxes; None: the prompts. In a notebook
    the boxes are displayed and nothing is returned; elsewhere the answers are printed when all are complete, and
    their texts returned. Raises what `engine.stream` raises, and `InvalidParameter` for numbers that do not match.
    """
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    names = [_title(prompt) for prompt in prompts] if titles is None else list(titles)
    for what, given in (("params", each), ("titles", names)):
        if len(given) != len(prompts):
            raise InvalidParameter(f"{len(prompts)} prompts and {len(given)} {what} were given. Give one for each.")
    if any(one is not None and one.n != 1 for one in each):
        raise InvalidParameter("A box shows one answer, and n > 1 was asked for. Give the prompt as often instead.")
    if not isinstance(columns, int) or columns < 1:
        raise InvalidParameter(f"columns={columns!r} is not possible: it must be an integer of 1 or more.")
    boxes = Boxes([Box(name) for name in names], min(columns, max(1, len(prompts))))
    update = _displayed(boxes) if in_notebook() else None
    streams: list[Any] = []
    try:
        for prompt, one in zip(prompts, each, strict=True):
            streams.append(engine.stream(prompt, one))
        _read(streams, boxes.boxes, update)
    finally:
        for stream in streams:
            stream.close()
        if update:
            update()
    if update:
        return None
    print(boxes)
    return [box.text for box in boxes.boxes]


def _read(streams: Sequence[Any], boxes: Sequence[Box], update: Any) -> None:
    """Takes a piece of each stream in turn, until all have ended."""
    reading = list(zip(streams, boxes, strict=True))
    shown = time.monotonic()
    while reading:
        for stream, box in list(reading):
            piece = next(stream, None)
            if piece is None:
                reading.remove((stream, box))
                continue
            box.text += piece.text
            box.tokens += len(piece.token_ids)
            box.ending = piece.finish_reason or ""
        if update and time.monotonic() - shown >= SECONDS_APART:
            update()
            shown = time.monotonic()


def _displayed(boxes: Boxes) -> Any:
    """Displays the boxes, and returns a function that brings the display up to date."""
    from IPython.display import display

    handle = display(boxes, display_id=True)
    return lambda: handle.update(boxes)


def _title(prompt: Any, limit: int = 90) -> str:
    if not isinstance(prompt, str):
        return f"{len(prompt):,} token ids"
    line = " ".join(prompt.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
