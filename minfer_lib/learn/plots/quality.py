"""The picture of quality against size: what each way to quantise a model saves, and what it changes in the answers.

Invariant: every point is one measured row, sizes stand relative to one row of the same table, and no label covers
another or a point.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ...errors import InvalidParameter
from ..style import CARD, INK, SOFT_INK, Picture, canvas, drawing, headline, quiet
from .precision import _looks

# Where a label may stand from its point: to the right and left first, then above and below, then between
AROUND = tuple((np.cos(a), np.sin(a)) for a in np.deg2rad([0, 180, 90, 270, 30, 330, 150, 210, 60, 300, 120, 240]))
ASKED = "name, bytes or ms, perplexity, kl and top1"


@drawing
def quality_map(rows: Sequence[Any], *, base: str | None = None, title: str | None = None) -> Picture:
    """Quality against size, a point for each way to hold a model: to the left is smaller, further down is better.

    rows: dicts or objects with name, bytes (or ms), perplexity, kl (mean KL divergence from the reference, in nats) and
    top1 (share of positions with the same likeliest token); or a table of `bench`, which has such `rows`. Heights are
    KL divergences, or perplexities where no row has one. base: the row that sizes are relative to (None: the first
    whose name begins with bf16 or bfloat16, else the largest).

    Raises `InvalidParameter` if there is nothing to draw, or no row of the name `base`.
    """
    rows = getattr(rows, "rows", rows)
    table = [{key: _value(row, key) for key in ("name", "bytes", "ms", "perplexity", "kl", "top1")} for row in rows]
    unit = "bytes" if table and all(row["bytes"] is not None for row in table) else "ms"
    measure = "kl" if any(row["kl"] is not None for row in table) else "perplexity"
    table = [row for row in table if row[unit] is not None and row[measure] is not None]
    if not table:
        raise InvalidParameter(f"There is nothing to draw: a row needs {ASKED}, as keys or attributes.")
    names = [str(row["name"]) for row in table]
    largest = str(max(table, key=lambda row: row[unit])["name"])
    base = base or next((name for name in names if name.lower().startswith(("bf16", "bfloat16"))), largest)
    if base not in names:
        raise InvalidParameter(f"base={base!r} is no row of the table. Its rows are {', '.join(names)}.")
    reference = table[names.index(base)]
    x = np.array([row[unit] / reference[unit] for row in table])
    y = np.array([row[measure] for row in table], dtype=float)
    figure, ax = canvas(7.0, 4.0)
    if measure == "kl":
        floor = min([*y[y > 0], 1.0]) / 5  # where a divergence of 0 is drawn, which a logarithm has no place for
        ax.set_yscale("log")
        ax.set_ylim(floor / 1.8, max([*y, floor * 5]) * 3.5)
        ax.yaxis.set_major_locator(LogLocator())
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
        if (y <= 0).any():
            ax.axhline(floor, color=SOFT_INK, linestyle=":", linewidth=1.0)
            ticks = [t for t in ax.get_yticks() if t > floor * 2]
            ax.set_yticks([floor, *ticks], ["0", *(f"{t:g}" for t in ticks)])
            ax.set_ylim(floor / 1.8, max([*y, floor * 5]) * 3.5)
        y = np.where(y > 0, y, floor)
    else:
        reach = (max(y) - min(y)) or 1.0
        ax.set_ylim(min(y) - 0.25 * reach, max(y) + 0.35 * reach)
    span = (max(x) - min(x)) or 0.5
    ax.set_xlim(min(x) - 0.3 * span, max(x) + 0.35 * span)
    looks = _looks(names)
    for name, at, height in zip(names, x, y, strict=True):
        look = looks[name]
        ax.plot([at], [height], "o", markersize=9, color=look["color"], zorder=3,
                markeredgecolor=INK if look["linewidth"] else look["color"], markeredgewidth=1.2)  # fmt: skip
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.2g}"))
    ax.set_xlabel(f"{'weight bytes' if unit == 'bytes' else 'time'}, {base} = 1")
    ax.set_ylabel("KL divergence" if measure == "kl" else "perplexity")
    quiet(ax, grid="y")
    caption = _finding(table, unit, reference)
    headline(figure, title or caption)
    texts = ["\n".join(filter(None, (str(row["name"]), _numbers(row)))) for row in table]
    place_labels(figure, ax, list(zip(x, y, strict=True)), texts)
    figure.alt = "quality: " + "; ".join(
        f"{row['name']} {size:.2f} of the {unit}, {_numbers(row)}" for row, size in zip(table, x, strict=True)
    )
    return figure


def _value(row: Any, key: str) -> Any:
    return row.get(key) if isinstance(row, Mapping) else getattr(row, key, None)


def _numbers(row: Mapping[str, Any]) -> str:
    parts = [f"ppl {row['perplexity']:.2f}"] if row["perplexity"] is not None else []
    return ", ".join(parts + ([f"top-1 {row['top1']:.1%}"] if row["top1"] is not None else []))


def _finding(table: Sequence[Mapping[str, Any]], unit: str, reference: Mapping[str, Any]) -> str | None:
    """The smallest row, with what it costs in perplexity."""
    least = min(table, key=lambda row: row[unit])
    if least is reference:
        return None
    said = f"{least['name']}: {least[unit] / reference[unit]:.0%} of {reference['name']}'s {unit}"
    if least["perplexity"] is None or reference["perplexity"] is None:
        return said
    return f"{said}, perplexity {reference['perplexity']:.2f} → {least['perplexity']:.2f}"


def place_labels(figure: Picture, ax: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Writes a text beside each point, at the nearest place where it covers no other text, no point and no edge."""
    figure.draw_without_rendering()  # the layout decides where points are
    scale = figure.dpi / 72
    pixels = [ax.transData.transform(point) for point in points]
    frame = ax.get_window_extent()
    taken = [Bbox.from_bounds(px - 6 * scale, py - 6 * scale, 12 * scale, 12 * scale) for px, py in pixels]
    for pixel, point, text in zip(pixels, points, texts, strict=True):
        label = ax.annotate(text, point, xytext=(0, 0), textcoords="offset points", va="center", zorder=4)
        label.set(size=8.5, linespacing=1.15, bbox={"facecolor": CARD, "edgecolor": "none", "pad": 0.5})
        label.set_in_layout(False)
        size = label.get_window_extent().size
        best, least = None, np.inf
        for distance, (dx, dy) in itertools.product((10, 22, 34, 48, 64, 82, 102), AROUND):  # points
            side = 0 if abs(dx) < 0.3 else int(np.sign(dx))
            end = pixel + np.array([dx, dy]) * distance * scale
            middle = end + np.array([side, 0 if side else np.sign(dy)]) * size / 2
            place = Bbox([middle - size / 2, middle + size / 2])
            leader = _leader(pixel, end, 7 * scale) if distance > 12 else []
            inside = frame.x0 + 2 <= place.x0 and place.x1 <= frame.x1 + 8 and frame.y0 <= place.y0 and (
                place.y1 <= frame.y1 + 4)  # fmt: skip
            covered = 20 * (not inside) + 5 * sum(place.padded(2).overlaps(other) for other in taken)
            covered += sum(other.contains(*dot) for dot in leader for other in taken)
            if covered < least:
                best, least = (
                    (side, (middle[1] - pixel[1]) / scale, dx * distance, dy * distance, place, leader),
                    covered,
                )
            if least == 0:
                break
        side, height, x, y, place, leader = best
        label.set(ha={1: "left", -1: "right", 0: "center"}[side])
        label.xyann = (x, height)
        taken.append(place)
        if leader:
            look = {"arrowstyle": "-", "color": SOFT_INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
            line = ax.annotate("", point, xytext=(x, y), textcoords="offset points", arrowprops=look, zorder=2)
            line.set_in_layout(False)
            taken += [Bbox.from_bounds(*(dot - 1), 2, 2) for dot in leader]


def _leader(start: np.ndarray, end: np.ndarray, gap: float) -> list[np.ndarray]:
    """Places, in pixels, along the line from a point to its label, without the first `gap`."""
    length = float(np.hypot(*(end - start)))
    return [start + (end - start) * t / length for t in np.arange(gap, length - 2, 4)]
