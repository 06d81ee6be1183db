"""Pictures of quantisation by hand: a few numbers and the grid they are rounded to, a small matrix on its way there.

Invariant: a grid is the one that `absmax` computes with (a test compares them), and every number in a caption is
computed from what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_hex

from ...errors import InvalidParameter
from ..style import ALERT, CARD, DATA, INK, SOFT_INK, UNUSED, Picture, canvas, colour_of, darker, drawing
from .parts import balanced, finished, fitting, plain, tile

if TYPE_CHECKING:
    from ...quant.absmax import Quantized

ARROW = {"arrowstyle": "-|>", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}


@dataclass(frozen=True)
class Grid:
    """The numbers that codes low .. high stand for: scale * (code - zero_point)."""

    scale: float
    zero_point: int
    low: int
    high: int

    @classmethod
    def of(cls, values: np.ndarray, bits: int, clip: float | None, zero_point: bool) -> Grid:
        """The grid for these values: symmetric, or with a zero point from the smallest of them (or 0) to the largest.

        clip: larger magnitudes do not widen it.
        """
        seen = values if clip is None else values.clip(-clip, clip)
        half = 2 ** (bits - 1)
        if not zero_point:
            return cls((float(abs(seen).max()) if clip is None else clip) / (half - 1) or 1.0, 0, -half + 1, half - 1)
        smallest, largest = min(0.0, float(seen.min())), max(0.0, float(seen.max()))
        scale = (largest - smallest) / (2 * half - 1) or 1.0
        return cls(scale, int(np.clip(np.round(-half - smallest / scale), -half, half - 1)), -half, half - 1)

    @property
    def points(self) -> np.ndarray:
        return self.scale * (np.arange(self.low, self.high + 1) - self.zero_point)

    def codes(self, values: np.ndarray) -> np.ndarray:
        return (np.round(values / self.scale) + self.zero_point).clip(self.low, self.high).astype(int)

    def decoded(self, codes: np.ndarray) -> np.ndarray:
        return self.scale * (codes - self.zero_point)


@drawing
def quantization_grid(
    values: Sequence[float], *, bits: int = 8, clip: float | None = None, zero_point: bool = False,
    title: str | None = None,
) -> Picture:  # fmt: skip
    """A handful of numbers (up to 8) on a line, the grid of what `bits` bits can say below it, and where each one goes.

    The table holds each number's code, what the code stands for and the error. The grid is symmetric about 0, or with
    `zero_point` spread from the smallest number to the largest. clip: the largest magnitude that the grid reaches;
    numbers beyond it are clipped and drawn so. Raises `InvalidParameter` for no numbers, or other than 2 to 8 bits.
    """
    numbers = plain(values).ravel()
    if not len(numbers) or not 2 <= bits <= 8:
        raise InvalidParameter(
            f"{len(numbers)} numbers on a grid of {bits} bits cannot be drawn: give one number or more, 2 to 8 bits."
        )
    grid = Grid.of(numbers, bits, clip, zero_point)
    codes = grid.codes(numbers)
    decoded = grid.decoded(codes)
    errors = decoded - numbers
    points = grid.points
    is_clipped = (numbers > points[-1] + grid.scale / 2) | (numbers < points[0] - grid.scale / 2)
    figure, ax = canvas(7.0, 3.15)
    low, high = min(numbers.min(), points[0]), max(numbers.max(), points[-1])
    span = high - low
    ax.plot([low, high], [1, 1], color=SOFT_INK, linewidth=1.0, zorder=0.9)
    ax.plot([points[0], points[-1]], [0, 0], color=SOFT_INK, linewidth=1.0, zorder=0.9)
    ax.vlines(points, -0.09, 0.09, color=SOFT_INK, linewidth=1.1 if bits <= 5 else 0.35, zorder=1)
    ax.plot([0, 0], [-0.15, 1.0], color=UNUSED, linewidth=1.0, zorder=0.8)
    places = balanced(numbers, span * 0.115)
    for x, point, error, clipped, place, code in zip(numbers, decoded, errors, is_clipped, places, codes, strict=True):
        ink = ALERT if clipped else colour_of("int8")
        ax.annotate("", (point, 0.06), (x, 0.96), arrowprops=ARROW | {"color": ink})
        ax.plot([x, x], [0.0, 0.94], color=ink, linewidth=0.8, linestyle=":", zorder=0.95)
        ax.plot([point, x], [0, 0], color=ink, linewidth=4.5, alpha=0.55, solid_capstyle="butt", zorder=1.5)
        ax.plot([x], [1], "o", color=ink, markersize=6)
        ax.plot([x, place], [1.07, 1.2], color=SOFT_INK, linewidth=0.6)
        ax.plot([point, place], [-0.12, -0.3], color=SOFT_INK, linewidth=0.6)
        ax.text(place, 1.24, _short(x), ha="center", va="bottom", size=9)
        below = ((str(code), INK), (_short(point), INK), (_short(error, True), darker(ink, 0.25)))
        for row, (text, colour) in enumerate(below):
            ax.text(place, -0.46 - 0.3 * row, text, ha="center", va="center", size=9, color=colour)
    edge = min(low, min(places)) - 0.09 * span
    for y, name in ((1.31, "number"), (-0.46, "code"), (-0.76, "stands for"), (-1.06, "error")):
        ax.text(edge, y, name, ha="right", va="center", size=9, color=SOFT_INK)
    ax.set_xlim(edge - 0.13 * span, max(high, max(places)) + 0.07 * span)
    ax.set_ylim(-1.25, 1.5)
    ax.axis("off")
    kind = f"{len(points)} grid points, {_short(grid.scale)} apart"
    cut = int(is_clipped.sum())
    lost = f"; {cut} of {len(numbers)} {'numbers are' if cut != 1 else 'numbers is'} clipped" if cut else ""
    caption = f"{kind}; largest error {_short(abs(errors).max())}{lost}"
    said = ", ".join(f"{_short(x)} to {_short(d)}" for x, d in zip(numbers, decoded, strict=True))
    return finished(figure, caption, title, f"{caption}: {said}")


@drawing
def matrix_steps(matrix: Any, quantized: Quantized, *, title: str | None = None) -> Picture:
    """A small matrix as four tables: its values, their codes and scales, the decoded values, the error.

    matrix: [rows, columns], up to about 6 x 6. quantized: what `absmax` made of it, with one scale for the tensor or
    one a row. Squares are shaded by magnitude, those of the error by the largest error.
    """
    values, codes = plain(matrix), plain(quantized.values)
    decoded = plain(quantized.dequantize())
    errors = decoded - values
    rows, columns = values.shape
    scales = plain(quantized.scale).ravel()
    zeros = None if quantized.zero_point is None else plain(quantized.zero_point).ravel()
    beside = 1.5 if zeros is None else 2.1  # squares that the scales take
    across = 4 if 4 * columns + beside < 19 else 2
    width = max(0.46 * (across * columns + beside + 0.5 * across) + 0.2, 4.8)
    block = rows + 1.17  # squares that a table takes, its name included
    figure, ax = canvas(width, 0.6 + 0.36 * block * 4 / across)
    signed = LinearSegmentedColormap.from_list("signed", [DATA, CARD, colour_of("int8")])
    wrong = LinearSegmentedColormap.from_list("wrong", [CARD, ALERT])
    digits = _decimals(values)
    tables = (
        ("values", values, lambda v: f"{v:.{digits}f}", signed, abs(values).max()),
        ("codes", codes, lambda v: f"{v:.0f}", signed, max(1.0, abs(codes).max())),
        ("decoded", decoded, lambda v: f"{v:.{digits}f}", signed, abs(values).max()),
        ("error", errors, lambda v: f"{v:+.{min(3, digits + 1)}f}", wrong, abs(errors).max()),
    )
    left, top = 0.0, 0.0
    for n, (name, table, text, shade, largest) in enumerate(tables):
        if n == across:
            left, top = 0.0, block
        ax.text(left, top - 0.22, name, ha="left", va="bottom", size=9.5, weight="bold")
        for (row, column), value in np.ndenumerate(table):
            amount = value / (largest or 1.0)
            fill = to_hex(shade(0.5 + 0.4 * amount if shade is signed else 0.6 * abs(amount)))
            shown = "0" if value == 0 else text(value) if text(value).strip("+-0.") else text(0.0).lstrip("+")
            tile(ax, left + column, top + row, fill, shown, size=8.5 if len(shown) < 6 else 7.5, gap=(0.03, 0.04))
        left += columns + 0.5
        if name == "codes":
            for row, scale in enumerate(scales):
                y = top + (row + 0.5 if len(scales) == rows else rows / 2)
                shift = "" if zeros is None else f"{'−' if zeros[row] >= 0 else '+'} {abs(zeros[row]):.0f}\n"
                ax.text(left - 0.38, y, f"{shift}× {scale:.3g}", ha="left", va="center", size=8.5, color=INK)
            left += beside
    ax.set_xlim(-0.4, width / 0.46 - 0.9)
    ax.set_ylim(top + rows + 0.15, -0.85)
    ax.axis("off")
    share = float(np.sqrt((errors**2).mean()) / (np.sqrt((values**2).mean()) or 1.0))
    vanished = int(((codes if zeros is None else decoded) == 0).sum() - (values == 0).sum())
    kind = "One scale for the matrix" if len(scales) == 1 else f"{len(scales)} scales, one a row"
    fate = f", {vanished} of {values.size} numbers became 0" if vanished > 0 else ""
    caption = f"{kind}: the error is {share:.1%} of the values{fate}"
    short = fitting(caption, f"The error is {share:.1%} of the values", most=int(10.8 * figure.get_figwidth()))
    return finished(figure, short, title, caption)


def _decimals(values: np.ndarray) -> int:
    """As many decimals as show the largest value with three digits."""
    largest = float(abs(values).max()) or 1.0
    return int(np.clip(2 - np.floor(np.log10(largest)), 0, 3))


def _short(value: float, signed: bool = False) -> str:
    """A number with up to three significant digits: 1.27, -0.003, +12.4."""
    text = f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    text = "0" if text in ("-0", "") else text
    return f"+{text}" if signed and value > 0 and text != "0" else text
