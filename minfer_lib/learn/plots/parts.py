"""What the pictures are put together from: legends, rows of bars, tiles, boxes with arrows, labels that keep apart.

Invariant: nothing here knows what a picture is about; colours and texts are handed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from ..style import CARD, INK, PART_COLOURS, SOFT_INK, Picture, canvas, headline, on_colour, quiet

COUNT = "{x:,.0f}"  # how an axis writes whole numbers
CARD_BEHIND = {"facecolor": CARD, "edgecolor": "none", "pad": 0.8}  # of a text that a line may run through
Look = str | Mapping[str, Any]  # a colour, or keywords of a patch


def plain(values: Any) -> np.ndarray:
    """Numbers, lists of them, arrays and tensors (of any device and dtype) as an array of float64."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def finished(figure: Picture, caption: str, title: str | None = None, alt: str | None = None) -> Picture:
    """The last line of a drawing: the headline is `title` or what was computed, the text `alt` or the same."""
    headline(figure, title or caption)
    figure.alt = alt or caption
    return figure


def fitting(*sentences: str, most: int = 76) -> str:
    """The first of the sentences that a headline has room for, else the last one."""
    return next((sentence for sentence in sentences if sentence and len(sentence) <= most), sentences[-1])


def looks(look: Look) -> dict[str, Any]:
    return {"linewidth": 0.0} | ({"facecolor": look} if isinstance(look, str) else dict(look))


def key(figure: Picture, entries: Mapping[str, Look], **options: Any) -> None:
    """A legend below the picture: {label: its look}."""
    handles = [Patch(**looks(look), label=label) for label, look in entries.items()]
    figure.legend(handles=handles, **({"loc": "outside lower center", "ncols": len(handles)} | options))


def bar_rows(ax: Axes, names: Sequence[str]) -> None:
    """Names in place of an axis beside horizontal bars at 0, 1, ..., the first on top; no numbers below them."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    quiet(ax, spines=("left",))


def told_bars(ax: Axes, bars: Mapping[str, tuple[float, Look]], text: Callable[[float], str], room: float) -> None:
    """A bar for each {name: (value, look)}, its number behind it; `room` for the numbers, as a share of the axis."""
    longest = max(value for value, _ in bars.values()) or 1.0
    for row, (value, look) in enumerate(bars.values()):
        ax.barh(row, value, height=0.7, **looks(look))
        ax.text(value + 0.012 * longest, row, text(value), va="center", size=9)
    bar_rows(ax, list(bars))
    ax.set_xlim(0, longest * (1 + room))


def part_colours(rows: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The colour of each part of the rows, in the order of `PART_COLOURS`, then the others as they come."""
    others = itertools.cycle(("#9aa3ad", "#b78fa0", "#d3bac5"))
    names = dict.fromkeys(part for parts in rows.values() for part in parts)
    known = {name: colour for name, colour in PART_COLOURS.items() if name in names}
    return known | {name: next(others) for name in names if name not in known}


def stacked(
    ax: Axes, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, Look], text: Callable[[float], str],
    end: float,
) -> None:  # fmt: skip
    """One stacked horizontal bar a row; parts that are wide enough on an axis up to `end` carry their size."""
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for name, look in colours.items():
            size = float(parts.get(name, 0.0))
            look = looks(look)
            ax.add_patch(Rectangle((left, y - 0.33), size, 0.66, **look))
            if size > end * 0.1 and text(size):
                hatched = "hatch" in look
                ax.text(left + size / 2, y, text(size), ha="center", va="center", size=8.5,
                        color=INK if hatched else on_colour(look["facecolor"]),
                        bbox=CARD_BEHIND if hatched else None)  # fmt: skip
            left += size
    bar_rows(ax, list(rows))


def board(width: float, height: float) -> tuple[Picture, Axes]:
    """A picture whose axes are the whole card, in inches from its upper left corner. Call `finished` on it at the end:
    nothing is moved to make room."""
    figure, ax = canvas(width, height)
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.axis("off")
    ax.set_position((0, 0, 1, 1))
    figure.set_layout_engine("none")
    return figure, ax


def tile(
    ax: Axes, x: float, y: float, look: Look, text: str = "", *, w: float = 1.0, h: float = 1.0, size: float = 8.5,
    gap: tuple[float, float] = (0.05, 0.05),
) -> None:  # fmt: skip
    """A rectangle from (x, y) on, `w` by `h` less a gap on each side, with a text in its middle."""
    look = looks(look)
    ax.add_patch(Rectangle((x + gap[0], y + gap[1]), w - 2 * gap[0], h - 2 * gap[1], **look))
    if text:
        ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", size=size, color=on_colour(look["facecolor"]))


def box(
    ax: Axes, at: tuple[float, float], size: tuple[float, float], fill: str, name: str, *notes: str, edge: str = "none",
    ink: str | None = None,
) -> None:  # fmt: skip
    """A rounded box with its name in bold and lines of notes below it, in inches."""
    (x, y), (w, h) = at, size
    ax.add_patch(FancyBboxPatch(at, w, h, boxstyle="round,pad=0,rounding_size=0.07", facecolor=fill, edgecolor=edge,
                                linewidth=1.0))  # fmt: skip
    lines = [name, *(note for note in notes if note)]
    for n, line in enumerate(lines):
        ax.text(x + w / 2, y + h / 2 + (n - (len(lines) - 1) / 2) * 0.22, line, ha="center", va="center",
                size=9 if n else 10, weight="normal" if n else "bold", color=ink or on_colour(fill))  # fmt: skip


def arrow(ax: Axes, *points: tuple[float, float], colour: str = SOFT_INK) -> None:
    """A line through the points, with a head at the last."""
    xs, ys = zip(*points[:-1], strict=True)
    ax.plot(xs, ys, color=colour, linewidth=1.3, solid_capstyle="butt")
    ax.add_patch(FancyArrowPatch(points[-2], points[-1], arrowstyle="-|>", mutation_scale=10, color=colour,
                                 linewidth=1.3, shrinkA=0, shrinkB=0))  # fmt: skip


def balanced(values: Sequence[float], gap: float) -> list[float]:
    """The values moved apart, in their order, until neighbours are `gap` from each other, each group about its middle.

    Least squares: where labels crowd, each ends up as near to its place as all of them together allow.
    """
    order = np.argsort(values, kind="stable")
    groups: list[list[float]] = []  # [sum, count] of wanted places, each less the gaps below it
    for rank, index in enumerate(order):
        groups.append([values[index] - rank * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    places = [total / count for total, count in groups for _ in range(int(count))]
    result = list(values)
    for rank, index in enumerate(order):
        result[index] = float(places[rank] + rank * gap)
    return result
