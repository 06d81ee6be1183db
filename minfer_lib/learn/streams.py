"""Several answers that grow side by side, as an engine streams them.

Invariant: one display is updated in place. No widget is involved, so that the boxes work in any front end, and what a
notebook keeps is their last state; when the call ends, however it ends, no stream is left open.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidParameter
from ..generation.params import SamplingParams
from .quiet import in_notebook
from .style import CARD, CARD_EDGE, INK, SOFT_INK

SECONDS_APART = 0.05  # between two updates: more would only keep the front end busy
BOX = (
    "display:inline-block;vertical-align:top;box-sizing:border-box;width:48%;margin:3px;padding:8px 12px;"
    f"font-size:13px;line-height:1.4;border:1px solid {CARD_EDGE};background-color:{CARD};color:{INK}"
)


@dataclass
class Boxes:
    """The answers so far, two beside each other: titles, texts, and below each text its tokens and how it ended."""

    titles: list[str]
    texts: list[str] = field(init=False)
    tokens: list[int] = field(init=False)
    endings: list[str] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.titles)
        self.texts, self.tokens, self.endings = [""] * count, [0] * count, ["…"] * count

    def _parts(self) -> list[tuple[str, str, str]]:
        states = [f"{tokens:,} tokens, {end}" for tokens, end in zip(self.tokens, self.endings, strict=True)]
        return [(t, text.strip(), state) for t, text, state in zip(self.titles, self.texts, states, strict=True)]

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n{text}\n({state})" for title, text, state in self._parts())

    def _repr_html_(self) -> str:
        parts = [
            f'<div style="{BOX}"><b>{html.escape(title)}</b><div style="white-space:pre-wrap;margin:5px 0">'
            f'{html.escape(text) or "&nbsp;"}</div><div style="font-size:11px;color:{SOFT_INK}">{state}</div></div>'
            for title, text, state in self._parts()
        ]
        return f"<div>{''.join(parts)}</div>"


def stream_side_by_side(engine: Any, prompts: Sequence[Any], params: SamplingParams | None = None) -> list[str] | None:
    """Streams the answers to all `prompts` at once, each in a box of its own that fills as pieces arrive.

    engine: one whose streams may be read in any order, as an `LLMEngine`. params: for all of them; n has to be 1. In a
    notebook the boxes are displayed and nothing is returned; elsewhere the answers are printed when all are complete,
    and their texts returned. Raises what `engine.stream` raises, and `InvalidParameter` for n > 1.
    """
    if params is not None and params.n != 1:
        raise InvalidParameter("A box shows one answer, and n > 1 was asked for. Give the prompt as often instead.")
    boxes = Boxes([p if isinstance(p, str) else f"{len(p):,} token ids" for p in prompts])
    update: Callable[[], None] = lambda: None  # noqa: E731
    if in_notebook():
        from IPython.display import display

        handle = display(boxes, display_id=True)
        update = lambda: handle.update(boxes)  # noqa: E731
    with ExitStack() as opened:
        opened.callback(update)
        reading = {n: opened.enter_context(closing(engine.stream(p, params))) for n, p in enumerate(prompts)}
        shown = time.monotonic()
        while reading:
            for n, stream in list(reading.items()):
                piece = next(stream, None)
                if piece is None:
                    del reading[n]
                    continue
                boxes.texts[n] += piece.text
                boxes.tokens[n] += len(piece.token_ids)
                boxes.endings[n] = piece.finish_reason or "…"
            if time.monotonic() - shown >= SECONDS_APART:
                update()
                shown = time.monotonic()
    if in_notebook():
        return None
    print(boxes)
    return boxes.texts
