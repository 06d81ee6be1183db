"""A request's whole life on one picture: from the string that came in to the slot that is free again.

Invariant: every number is that of one real request; the stretch of time below the boxes is drawn to scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from ...errors import InvalidParameter
from ..style import INK, SOFT_INK, UNUSED, Picture, colour_of, drawing
from .parts import arrow, board, box, finished, tile
from .profile import DECODE_COLOUR, PREFILL_COLOUR
from .timelines import lanes
from .tokens import visible

if TYPE_CHECKING:
    from ...engine.trace import StepTrace
    from ...generation.request import RequestOutput

BOX, ACROSS, DOWN = (2.5, 0.92), 2.72, 1.3  # inches: a box, and from one to the next
TEXT_FILL, QUEUE_FILL = "#e9e7e1", UNUSED


@drawing
def request_life(
    prompt: str, output: RequestOutput, steps: Sequence[StepTrace], *, title: str | None = None
) -> Picture:
    """What became of one request: boxes in order, each with this request's own numbers.

    prompt: the text. output: its finished answer. steps: the traces of the engine that made it.
    Raises `InvalidParameter` if the request is in none of the steps, or generated nothing.
    """
    lane = lanes(steps).get((output.request_id, output.index))
    if lane is None or not lane.chunks or output.metrics.ttft_s is None:
        raise InvalidParameter(
            f"Request {output.request_id} has no token in these {len(steps)} steps. Give the steps of the engine that "
            "answered it, made with trace=True."
        )
    chunks = [(step, tokens) for step, tokens, decodes in lane.chunks if not decodes]
    decodes = len(lane.chunks) - len(chunks)
    slot = next(
        chunk.block for chunk in steps[chunks[0][0] - 1].chunks
        if (chunk.request_id, chunk.index) == (output.request_id, output.index)
    )  # fmt: skip
    times, ids = output.metrics, output.prompt_token_ids
    held = len(ids) + len(output.token_ids) - 1
    sizes = " + ".join(str(tokens) for _, tokens in chunks[:4]) + (" + …" if len(chunks) > 4 else "")
    first, last = chunks[0][0], chunks[-1][0]
    where = f"in step {first}" if first == last else f"in steps {first} to {last}"
    tpot = "" if times.tpot_s is None else f"TPOT {times.tpot_s * 1e3:,.1f} ms"
    width, height = 0.3 + 2 * ACROSS + BOX[0] + 0.3, 0.5 + 2 * DOWN + BOX[1] + 1.5
    figure, ax = board(width, height)
    boxes = [
        ("prompt", TEXT_FILL, _quoted(prompt), f"{len(prompt):,} characters"),
        ("token ids", TEXT_FILL, f"[{', '.join(map(str, ids[:3]))}{', …' if len(ids) > 3 else ''}]",
         f"{len(ids):,} tokens"),
        ("waiting queue", QUEUE_FILL, f"waits {times.queue_s * 1e3:,.1f} ms", f"through {_steps(len(lane.waited))}"),
        ("slot of the cache", colour_of("slots"), f"slot {slot}", f"holds {held:,} tokens at the end"),
        ("prefill", PREFILL_COLOUR, f"{sizes} tokens", where),
        ("first token", PREFILL_COLOUR, f"id {output.token_ids[0]}", f"TTFT {times.ttft_s * 1e3:,.1f} ms"),
        ("decode", DECODE_COLOUR, f"{_steps(decodes)}, a token each", tpot),
        ("text, stop check", TEXT_FILL, f"{len(output.token_ids):,} ids, {len(output.text):,} characters",
         f"ends with “{output.finish_reason}”"),
        ("answer; slot is free", TEXT_FILL, _quoted(output.text), f"after {times.e2e_s * 1e3:,.1f} ms"),
    ]  # fmt: skip
    places = [(0.3 + ACROSS * (n % 3), 0.55 + DOWN * (n // 3)) for n in range(len(boxes))]
    half = BOX[0] / 2
    for place, (name, fill, *notes) in zip(places, boxes, strict=True):
        box(ax, place, BOX, fill, name, *notes)
    for (x, y), (to_x, to_y) in itertools.pairwise(places):
        if y == to_y:
            arrow(ax, (x + BOX[0], y + BOX[1] / 2), (to_x, to_y + BOX[1] / 2))
        else:
            between = (y + BOX[1] + to_y) / 2
            arrow(ax, (x + half, y + BOX[1]), (x + half, between), (to_x + half, between), (to_x + half, to_y))
    (x, y), (back, _) = places[7], places[6]
    end, below = y + BOX[1], y + BOX[1] + 0.2
    arrow(ax, (x + half, end), (x + half, below), (back + half, below), (back + half, end))
    ax.text((x + back + BOX[0]) / 2, below + 0.03, "not yet: the next step", ha="center", va="top", size=8.5,
            color=SOFT_INK)  # fmt: skip
    _time_line(ax, 0.3, height - 0.62, width - 0.6, times.queue_s, times.ttft_s, times.e2e_s)
    counts = f"{len(ids):,} tokens in, {len(output.token_ids):,} out"
    caption = f"{counts}, {_steps(len(lane.chunks))}, {times.e2e_s * 1e3:,.0f} ms"
    said = f"request {lane.name}: {caption}; " + " → ".join(name for name, *_ in boxes)
    return finished(figure, f"The life of request {lane.name}: {caption}", title, said)


def _quoted(text: str) -> str:
    """The beginning of a text in quotation marks, as much of it as a box has room for."""
    drawn = visible(text.strip(), 28).replace("·", " ")
    return f"“{drawn}”"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _time_line(ax: Axes, x: float, y: float, width: float, queue_s: float, ttft_s: float, e2e_s: float) -> None:
    """Waiting, prefill and decode to scale, each with its name, or with none where it is too short for one."""
    parts = [("waits", 0.0, queue_s, QUEUE_FILL), ("prefill", queue_s, ttft_s, PREFILL_COLOUR),
             ("decode", ttft_s, e2e_s, DECODE_COLOUR)]  # fmt: skip
    for name, begin, end, colour in parts:
        text, wide = f"{name} {(end - begin) * 1e3:,.0f} ms", width * (end - begin) / e2e_s
        tile(ax, x + width * begin / e2e_s, y, colour, text if wide > 0.085 * len(text) else "", w=wide, h=0.24,
             gap=(0, 0))  # fmt: skip
    mark = x + width * ttft_s / e2e_s
    ax.plot([mark, mark], [y - 0.07, y + 0.31], color=INK, linewidth=1.3)
    near = mark > x + width / 2
    below = {"y": y + 0.34, "va": "top", "size": 8.5, "color": SOFT_INK}
    ax.text(mark, s="first token", ha="right" if near else "left", **below)
    ax.text(x if near else x + width, s="arrival" if near else "end", ha="left" if near else "right", **below)
