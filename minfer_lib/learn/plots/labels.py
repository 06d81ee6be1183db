"""Labels beside points, where many points lie close together, and numbers along logarithmic axes.

Invariant: a label covers no point, no line and no other text as long as there is a free place within reach; one that
had to move away is joined to its point by a thin line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ..style import INK, SOFT_INK, Picture

SIDES = ((1, 0), (1, -1), (1, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (0, 1))  # right, below right, above right, ...
DISTANCES = (7, 15, 26, 40, 56, 74)  # points, 1/72 inch


def log_axis(ax: Any, which: str, values: Iterable[float], unit: float = 1.0) -> None:
    """Makes the axis "x" or "y" logarithmic with ticks at 1, 2, 5, ..., unless the values lie too near for that.

    The numbers along it are in `unit`s.
    """
    axis, values = getattr(ax, f"{which}axis"), [value for value in values if value > 0]
    if values and max(values) > 4 * min(values):
        getattr(ax, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=20))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:,g}"))


def told(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def label_points(
    figure: Picture, ax: Any, points: Iterable[tuple[str, float, float]], colours: Sequence[str] = (), size: float = 8.5
) -> None:
    """Writes a text beside each point (text, x, y) of these axes; call it last, when limits and titles are set."""
    points = list(points)
    figure.draw_without_rendering()  # from here on it is known where things are
    frame = ax.get_window_extent()
    taken = [text.get_window_extent() for text in ax.texts]
    for line in ax.lines:
        path = line.get_transform().transform_path(line.get_path()).interpolated(40)
        taken += [Bbox([vertex - 1, vertex + 1]) for vertex in path.vertices]
    pixel = figure.dpi / 72
    colours = colours or [INK] * len(points)
    for _, x, y in points:
        at_x, at_y = ax.transData.transform((x, y))
        taken.append(Bbox([[at_x - 5 * pixel, at_y - 5 * pixel], [at_x + 5 * pixel, at_y + 5 * pixel]]))
    for (text, x, y), colour in zip(points, colours, strict=True):
        label = ax.annotate(text, (x, y), xytext=(0, 0), textcoords="offset points", size=size, color=colour)
        label.set_in_layout(False)
        for dx, dy in _places():
            label.set_position((dx, dy))
            label.set_ha({1: "left", 0: "center", -1: "right"}[int(np.sign(dx))])
            label.set_va({1: "bottom", 0: "center", -1: "top"}[int(np.sign(dy))])
            box = label.get_window_extent().padded(1.0)
            inside = box.x0 > frame.x0 and box.x1 < frame.x1 and box.y0 > frame.y0 and box.y1 < frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        if max(abs(dx), abs(dy)) > DISTANCES[0]:
            line = {"arrowstyle": "-", "color": SOFT_INK, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
            ax.annotate("", (x, y), xytext=(dx, dy), textcoords="offset points", arrowprops=line).set_in_layout(False)


def _places() -> Iterator[tuple[float, float]]:
    for distance in DISTANCES:
        for across, up in SIDES:
            yield across * distance, up * distance * 0.8
