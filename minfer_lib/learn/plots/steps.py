"""Pictures of how time moves with length: clouds of steps with a fitted curve, gains, one bar an engine.

Invariant: times go in as measured; a curve that is fitted writes its formula beside its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from ..style import (
    GROUP_COLOURS,
    SOFT_INK,
    Picture,
    bar_style,
    canvas,
    darker,
    drawing,
    engine_family,
    line_style,
    quiet,
)
from .parts import COUNT, balanced, finished, told_bars

LEADER = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}  # a name to its curve


@drawing
def step_times(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, fit: int | Mapping[str, int] | None = 1,
    title: str | None = None, xlabel: str = "tokens in the sequence",
) -> Picture:  # fmt: skip
    """Time of a step against length, a cloud of points for each engine {name: (lengths, milliseconds)}.

    `fit` draws a polynomial of that degree through each cloud by least squares (or {name: degree}; None: no curve) and
    writes it out. The engines have their own colours.
    """
    figure, ax = canvas(7.0, 3.5)
    degrees = fit if isinstance(fit, Mapping) else dict.fromkeys(series, fit)
    far = max(max(x) for x, _ in series.values())
    tall = max(max(y) for _, y in series.values())
    ends, notes = [], []
    for name, (lengths, ms) in series.items():
        x, y = np.asarray(lengths, dtype=float), np.asarray(ms, dtype=float)
        style = line_style(name) | {"linestyle": "none", "markersize": 4.5, "alpha": 0.6}
        ax.plot(x, y, **style)
        degree = degrees.get(name)
        if degree is None or len(set(x)) <= degree:
            ends.append(float(y[np.argmax(x)]))
            notes.append("")
            continue
        curve = np.polynomial.Polynomial.fit(x, y, degree)
        grid = np.linspace(x.min(), x.max(), 100)
        ax.plot(grid, curve(grid), color=style["color"], linewidth=2.0)
        ends.append(float(curve(x.max())))
        notes.append(_formula(curve.convert().coef))
    top, heights = tall * 1.08, balanced(ends, tall * 0.15)
    beside = {"textcoords": "offset points", "va": "center"}
    for (name, (lengths, _)), height, note in zip(series.items(), heights, notes, strict=True):
        is_short = max(lengths) < 0.7 * far  # such a cloud leaves room for its name where it ends
        at = (max(lengths) if is_short else far, height)
        colour = line_style(name)["color"]
        ax.annotate(name, at, xytext=(8, 5 if note else 0), color=colour, weight="bold", size=9.5, **beside)
        ax.annotate(note, at, xytext=(8, -8), size=8.5, color=SOFT_INK, **beside)
    ax.set_ylim(0, max(top, max(heights) * 1.04))
    ax.set_xlim(left=0, right=far * 1.01)
    ax.xaxis.set_major_formatter(COUNT)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("ms a step")
    quiet(ax, grid="y")
    said = "; ".join(f"{name} {note or 'not fitted'}" for name, note in zip(series, notes, strict=True))
    return finished(figure, "", title, f"step time: {said}")


@drawing
def gain_vs_length(
    lengths: Sequence[float], gain: Sequence[float], *, engine: str, over: str, xlabel: str = "prompt length in tokens",
    title: str | None = None,
) -> Picture:  # fmt: skip
    """How many times faster `engine` is than `over` at each length; below the line at 1 it is slower."""
    figure, ax = canvas(7.0, 3.1)
    ax.plot(lengths, gain, **line_style(engine))
    ax.axhline(1.0, color=SOFT_INK, linestyle="--", linewidth=1.1)
    at_right = abs(gain[-1] - 1.0) >= abs(gain[0] - 1.0)  # where the line leaves room
    ax.text(lengths[-1 if at_right else 0], 1.0, f"as fast as {over}", size=8.5, color=SOFT_INK, va="bottom",
            ha="right" if at_right else "left")  # fmt: skip
    ax.set_xscale("log", base=2)  # lengths are usually doubled
    for x, g in zip(lengths, gain, strict=True):
        ax.annotate(f"{g:.1f}×", (x, g), textcoords="offset points", xytext=(-2, 7), ha="right", size=9)
    ax.set_ylim(0, max(*gain, 1.0) * 1.2)
    ax.set_xticks(lengths, [f"{x:,.0f}" for x in lengths])
    ax.minorticks_off()
    ax.margins(x=0.09)  # room for the first number beside the axis
    ax.set_xlabel(xlabel)
    ax.set_ylabel("times faster")
    quiet(ax, grid="y")
    caption = f"{engine} against {over}: {min(gain):.1f} to {max(gain):.1f} times as fast, depending on length"
    said = ", ".join(f"{x:,.0f} tokens {g:.1f}x" for x, g in zip(lengths, gain, strict=True))
    return finished(figure, caption, title, f"{engine} over {over}: {said}")


@drawing
def bars_by_engine(values: Mapping[str, float], *, unit: str, title: str | None = None) -> Picture:
    """One bar an engine, in the engines' colours; peers have a black outline. `unit` is written behind each number."""
    figure, ax = canvas(7.0, 0.85 + 0.34 * len(values))
    told_bars(ax, {n: (v, bar_style(n)) for n, v in values.items()}, lambda v: f"{v:,.3g} {unit}", room=0.2)
    return finished(figure, "", title, "; ".join(f"{name} {value:,.3g} {unit}" for name, value in values.items()))


@drawing
def curves(
    x: Sequence[float], series: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str, log_x: bool = False,
    log_y: bool = False, y_range: tuple[float, float | None] | None = None, title: str | None = None,
) -> Picture:  # fmt: skip
    """Plain curves over one axis, named at their right ends; values that are no numbers (NaN) leave gaps."""
    figure, ax = canvas(7.0, 2.9)
    if log_x:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(COUNT)
    ax.yaxis.set_major_formatter("{x:,.10g}")
    if log_y:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xlim(min(x), max(x))  # also where a curve has gaps at its ends
    ends = []
    for (name, values), group in zip(series.items(), GROUP_COLOURS, strict=False):
        y = np.asarray(values, dtype=float)
        colour = line_style(name)["color"] if engine_family(name) else group  # an engine keeps its colour here too
        ax.plot(x, y, color=colour)
        if len(last := np.flatnonzero(np.isfinite(y))):
            ends.append((name, x[last[-1]], float(y[last[-1]]), colour))
    if y_range:
        ax.set_ylim(*y_range)
    heights = [y for _, _, y, _ in ends]
    low, high = ax.get_ylim()
    if ends and not log_y:
        heights = balanced(heights, 0.075 * (high - low))
        heights = [height - max(0.0, max(heights) - high) for height in heights]  # none above the picture
        heights = [height + max(0.0, low - min(heights)) for height in heights]  # and none below it
    moved = not log_y and any(
        abs(height - y) > 0.02 * (high - low) for (_, _, y, _), height in zip(ends, heights, strict=True)
    )
    for (name, at, y, colour), height in zip(ends, heights, strict=True):
        if len(series) > 1:
            ink = colour if engine_family(name) else darker(colour)
            placed = {"xy": (at, y), "textcoords": ("offset points", "data"), "annotation_clip": False}
            ax.annotate(name, xytext=(20 if moved else 7, height), va="center", color=ink, **placed)
            if moved:
                ax.annotate("", xytext=(18, height), arrowprops=LEADER | {"color": ink}, **placed)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    quiet(ax, grid="y")
    return finished(figure, "", title, f"{ylabel} over {xlabel}: " + ", ".join(series))


def _formula(coefficients: Sequence[float]) -> str:
    """A fitted polynomial in n as a reader writes it, with the digits that scattered points support: 12 + 0.046 n."""
    powers = ("", " n", " n²", " n³")
    text = ""
    for c, power in zip(coefficients, powers, strict=False):
        size = f"{float(f'{abs(c):.2g}'):,g}{power}"
        text += size if not text and c >= 0 else f"{' − ' if text else '−'}{size}" if c < 0 else f" + {size}"
    return f"fit: {text} ms"
