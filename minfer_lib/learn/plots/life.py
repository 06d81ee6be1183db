"""A request's whole life on one picture: from the string that came in to the slot that is free again.

Invariant: every number is that of one real request; the stretch of time below the boxes is drawn to scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ...errors import InvalidParameter
from ..style import INK, SOFT_INK, Picture, canvas, colour_of, drawing, headline, on_colour
from .lanes import lanes
from .profile import DECODE_COLOUR, PREFILL_COLOUR
from .timelines import WAITS_COLOUR
from .tokens import visible

if TYPE_CHECKING:
    from ...engine.trace import StepTrace
    from ...generation.request import RequestOutput

BOX, ACROSS, DOWN = (2.5, 0.92), 2.72, 1.3  # inches: a box, and from one to the next
TEXT_FILL, QUEUE_FILL = "#e9e7e1", "#dfe2e6"


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
    figure, ax = canvas(width, height)
    boxes = [
        ("prompt", TEXT_FILL, _quoted(prompt, figure), f"{len(prompt):,} characters"),
        ("token ids", TEXT_FILL, f"[{', '.join(map(str, ids[:3]))}{', …' if len(ids) > 3 else ''}]",
         f"{len(ids):,} tokens"),
        ("waiting queue", QUEUE_FILL, f"waits {times.queue_s * 1e3:,.1f} ms", f"through {_steps(len(lane.waited))}"),
        ("slot of the cache", colour_of("slots"), f"slot {slot}", f"holds {held:,} tokens at the end"),
        ("prefill", PREFILL_COLOUR, f"{sizes} tokens", where),
        ("first token", PREFILL_COLOUR, f"id {output.token_ids[0]}", f"TTFT {times.ttft_s * 1e3:,.1f} ms"),
        ("decode", DECODE_COLOUR, f"{_steps(decodes)}, a token each", tpot),
        ("text, stop check", TEXT_FILL, f"{len(output.token_ids):,} ids, {len(output.text):,} characters",
         f"ends with “{output.finish_reason}”"),
        ("answer; slot is free", TEXT_FILL, _quoted(output.text, figure),
         f"after {times.e2e_s * 1e3:,.1f} ms"),
    ]  # fmt: skip
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.axis("off")
    places = [(0.3 + ACROSS * (n % 3), 0.55 + DOWN * (n // 3)) for n in range(len(boxes))]
    for (x, y), (name, fill, *notes) in zip(places, boxes, strict=True):
        _box(ax, x, y, name, fill, notes)
    for (x, y), (to_x, to_y) in itertools.pairwise(places):
        if y == to_y:
            _arrow(ax, [(x + BOX[0], y + BOX[1] / 2), (to_x, to_y + BOX[1] / 2)])
        else:
            between = (y + BOX[1] + to_y) / 2
            _arrow(ax, [(x + BOX[0] / 2, y + BOX[1]), (x + BOX[0] / 2, between), (to_x + BOX[0] / 2, between),
                        (to_x + BOX[0] / 2, to_y)])  # fmt: skip
    (x, y), (back, _) = places[7], places[6]
    below = y + BOX[1] + 0.2
    _arrow(ax, [(x + BOX[0] / 2, y + BOX[1]), (x + BOX[0] / 2, below), (back + BOX[0] / 2, below),
                (back + BOX[0] / 2, y + BOX[1])])  # fmt: skip
    ax.text((x + back + BOX[0]) / 2, below + 0.03, "not yet: the next step", ha="center", va="top", size=8.5,
            color=SOFT_INK)  # fmt: skip
    _time_line(ax, 0.3, height - 0.62, width - 0.6, times.queue_s, times.ttft_s, times.e2e_s)
    counts = f"{len(ids):,} tokens in, {len(output.token_ids):,} out"
    caption = f"{counts}, {_steps(len(lane.chunks))}, {times.e2e_s * 1e3:,.0f} ms"
    headline(figure, title or f"The life of request {lane.name}: {caption}")
    figure.set_layout_engine("none")  # the axes are the whole card, one unit an inch
    ax.set_position((0, 0, 1, 1))
    figure.alt = f"request {lane.name}: {caption}; " + " → ".join(name for name, *_ in boxes)
    return figure


def _quoted(text: str, figure: Picture) -> str:
    """The beginning of a text in quotation marks, as much of it as a box has room for."""
    drawn = visible(text.strip(), 60).replace("·", " ")
    width_of = FigureCanvasAgg(figure).get_renderer().get_text_width_height_descent
    room, font = (BOX[0] - 0.2) * figure.dpi, FontProperties(size=9)
    for end in range(len(drawn), 0, -1):
        quoted = f"“{drawn[:end]}{'…' if end < len(drawn) else ''}”"
        if width_of(quoted, font, False)[0] <= room:
            return quoted
    return "“”"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _box(ax: Axes, x: float, y: float, name: str, fill: str, notes: Sequence[str]) -> None:
    ax.add_patch(FancyBboxPatch((x, y), *BOX, boxstyle="round,pad=0,rounding_size=0.07", facecolor=fill, linewidth=0))
    ink = on_colour(fill)
    ax.text(x + BOX[0] / 2, y + 0.2, name, ha="center", va="center", size=10, weight="bold", color=ink)
    for line, note in enumerate(notes):
        ax.text(x + BOX[0] / 2, y + 0.46 + 0.24 * line, note, ha="center", va="center", size=9, color=ink)


def _arrow(ax: Axes, points: Sequence[tuple[float, float]]) -> None:
    """A line through the points, with a head at the last."""
    xs, ys = zip(*points[:-1], strict=True)
    ax.plot(xs, ys, color=SOFT_INK, linewidth=1.3, solid_capstyle="butt")
    ax.add_patch(FancyArrowPatch(points[-2], points[-1], arrowstyle="-|>", mutation_scale=10, color=SOFT_INK,
                                 linewidth=1.3, shrinkA=0, shrinkB=0))  # fmt: skip


def _time_line(ax: Axes, x: float, y: float, width: float, queue_s: float, ttft_s: float, e2e_s: float) -> None:
    """Waiting, prefill and decode to scale, each with its name, or with none where it is too short for one."""
    parts = [("waits", 0.0, queue_s, WAITS_COLOUR), ("prefill", queue_s, ttft_s, PREFILL_COLOUR),
             ("decode", ttft_s, e2e_s, DECODE_COLOUR)]  # fmt: skip
    for name, begin, end, colour in parts:
        left, right = x + width * begin / e2e_s, x + width * end / e2e_s
        ax.add_patch(FancyBboxPatch((left, y), right - left, 0.24, boxstyle="square,pad=0", facecolor=colour,
                                    linewidth=0))  # fmt: skip
        text = f"{name} {(end - begin) * 1e3:,.0f} ms"
        if right - left > 0.085 * len(text):
            ax.text((left + right) / 2, y + 0.12, text, ha="center", va="center", size=8.5, color=on_colour(colour))
    mark = x + width * ttft_s / e2e_s
    ax.plot([mark, mark], [y - 0.07, y + 0.31], color=INK, linewidth=1.3)
    near = mark > x + width / 2
    ax.text(mark, y + 0.34, "first token", ha="right" if near else "left", va="top", size=8.5, color=SOFT_INK)
    ax.text(x if near else x + width, y + 0.34, "arrival" if near else "end", ha="left" if near else "right", va="top",
            size=8.5, color=SOFT_INK)  # fmt: skip
