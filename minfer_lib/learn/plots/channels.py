"""Pictures of a real layer's numbers: how far its channels and features reach, and what smoothing makes of that.

Invariant: peaks are largest magnitudes, taken from the tensors that are given; a headline compares what was drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ..style import ALERT, DATA, SOFT_INK, UNUSED, Picture, canvas, colour_of, darker, drawing, quiet
from .parts import CARD_BEHIND, balanced, finished, plain

STEPS = 127  # of an int8 code on each side of zero
ORDINARY, OURS = "#a9b4bf", colour_of("int8")


@drawing
def channel_ranges(weight: Any, *, title: str | None = None) -> Picture:
    """What one scale for a whole weight [out, in] leaves of the 127 steps to each of its output channels.

    Left all weights as a histogram (log counts) with the range of the one grid, right the largest magnitude of each
    output channel, sorted; the channel in the middle of them is marked in both.
    """
    values = plain(weight)
    peaks = abs(values).max(1)  # [out]
    order, largest = np.argsort(peaks, kind="stable"), float(peaks.max())
    rank = len(order) // 2
    chosen = int(order[rank])
    figure, (left, right) = canvas(7.0, 3.1, columns=2)
    edges = np.linspace(-largest, largest, 61)
    for data, colour, name in ((values, UNUSED, "all channels"), (values[chosen], OURS, f"channel {chosen}")):
        left.stairs(np.histogram(data, edges)[0], edges, fill=True, color=colour, label=name, baseline=0.7)
    left.set_yscale("log")
    left.set_ylim(bottom=0.7)
    for x in (-largest, largest):
        left.axvline(x, color=SOFT_INK, linestyle="--", linewidth=1.1)
    left.set_xlabel(f"weight; one grid: ±{largest:.3g}")
    left.set_ylabel("how many")
    left.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    _plain_log(left.yaxis)
    right.fill_between(np.arange(len(peaks)), 0, peaks[order], color=UNUSED, linewidth=0)
    right.plot(np.arange(len(peaks)), peaks[order], color=SOFT_INK, linewidth=1.2)
    right.plot([rank], [peaks[chosen]], "o", color=OURS, markersize=7)
    right.axhline(largest, color=SOFT_INK, linestyle="--", linewidth=1.1)
    right.annotate(f"{STEPS} steps", (0, largest), textcoords="offset points", xytext=(4, 1), va="bottom", size=9,
                   color=SOFT_INK)  # fmt: skip
    used = STEPS * peaks / largest if largest else np.zeros_like(peaks)
    y = peaks[chosen] + (0.14 if peaks[chosen] < 0.75 * largest else -0.1) * largest
    right.text(1.14 * rank, y, f"channel {chosen}: {used[chosen]:.0f} steps", ha="right", size=9, color=darker(OURS))
    right.set_xlim(0, max(1, len(peaks) - 1))
    right.set_ylim(0, largest * 1.14 or 1.0)
    right.set_xlabel("output channels, sorted")
    right.set_ylabel("largest |weight|")
    right.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    quiet(right, grid="y")
    figure.legend(loc="outside lower left", ncols=2)
    caption = f"With one scale the median channel uses {np.median(used):.0f} of the {STEPS} steps"
    return finished(figure, caption, title, f"{caption}, the smallest {used.min():.0f}")


@drawing
def feature_peaks(
    activations: Any, *, threshold: float | None = None, label_top: int = 5, title: str | None = None
) -> Picture:
    """The largest magnitude that each feature of a layer's input, [tokens, features], reaches over all tokens.

    Features that reach the `threshold` are outliers and drawn so; without one only the `label_top` largest are.
    """
    peaks = abs(plain(activations)).max(0)  # [features]
    figure, ax = canvas(7.0, 3.0)
    caption = draw_peaks(ax, peaks, threshold, label_top)
    return finished(figure, caption, title)


def draw_peaks(ax: Axes, peaks: np.ndarray, threshold: float | None, label_top: int) -> str:
    """The bars of `feature_peaks` on axes of its own or of somebody else; returns the finding."""
    top = np.argsort(-peaks, kind="stable")[:label_top]
    marked = peaks >= threshold if threshold is not None else np.isin(np.arange(len(peaks)), top)
    highest, middle = float(peaks.max()), float(np.median(peaks))
    places = np.arange(len(peaks))
    thin = max(0.6, min(3.0, 380 / len(peaks)))
    ax.vlines(places[~marked], 0, peaks[~marked], color=ORDINARY, linewidth=thin)
    ax.vlines(places[marked], 0, peaks[marked], color=OURS, linewidth=max(1.6, thin))
    ceiling = max(highest, threshold or 0.0) * 1.2 or 1.0
    named = sorted(int(n) for n in top if marked[n])
    for n, place in zip(named, balanced(named, 0.058 * len(peaks)), strict=True):
        ax.annotate(str(n), (n, peaks[n]), (place, peaks[n] + 0.07 * ceiling), ha="center", va="bottom", size=8.5,
                    color=darker(OURS),
                    bbox=CARD_BEHIND)  # fmt: skip
        ax.plot([n, place], [peaks[n], peaks[n] + 0.07 * ceiling], color=OURS, linewidth=0.7)
    lines = [(middle, f"median {middle:.3g}", DATA, ":")]
    if threshold is not None:
        lines.append((threshold, f"threshold {threshold:.3g}", ALERT, "--"))
    heights = balanced([height for height, *_ in lines], 0.085 * ceiling)
    heights = [height + max(0.0, 0.03 * ceiling - min(heights)) for height in heights]
    for (height, name, colour, dashes), place in zip(lines, heights, strict=True):
        ax.axhline(height, color=colour, linestyle=dashes, linewidth=1.2, zorder=2.5)
        ax.annotate(name, (1.0, place), xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(5, 0),
                    va="center", size=9, color=darker(colour, 0.3), annotation_clip=False)  # fmt: skip
    ax.set_xlim(-0.01 * len(peaks), len(peaks) * 1.01)
    ax.set_ylim(0, ceiling)
    ax.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel("feature")
    ax.set_ylabel("largest |x|")
    quiet(ax, grid="y")
    times = f"{highest / middle:.0f} times the median" if middle else "and the median 0"
    if threshold is None:
        return f"Feature {int(peaks.argmax())} reaches {highest:.3g}, {times}"
    count = int(marked.sum())
    share = f"{count} of {len(peaks)} features ({count / len(peaks):.1%})"
    return f"{share} {'reaches' if count == 1 else 'reach'} {threshold:.3g}; the largest is {times}"


@drawing
def smoothing_effect(activation_peak: Any, weight_peak: Any, factors: Any, *, title: str | None = None) -> Picture:
    """What smoothing (Xiao et al. 2023) does to the peaks of input features: activations / factors, weights * factors.

    All three: [features]. The features stand in the order of their activation peaks, both scales are logarithmic.
    """
    x, w, s = (plain(values).ravel() for values in (activation_peak, weight_peak, factors))
    order = np.argsort(x, kind="stable")
    figure, axes = canvas(7.0, 4.0, rows=2, sharex=True)
    ratios = []
    large = len(s) > 100  # then small squares without soft edges, which a PNG holds in far fewer bytes
    look = {"linestyle": "none", "marker": "s" if large else "o", "markersize": 2 if large else 4,
            "markeredgewidth": 0, "antialiased": not large}  # fmt: skip
    for ax, before, after, name in zip(axes, (x, w), (x / s, w * s), ("activations", "weights"), strict=True):
        for values, colour, label in ((before, SOFT_INK, "before"), (after, OURS, "after")):
            ax.plot(values[order], color=colour, label=label, **look)
        ax.set_yscale("log")
        ax.set_ylabel(f"peaks of {name}")
        _plain_log(ax.yaxis)
        ratios.append((name, *(float(v.max() / (np.median(v) or 1.0)) for v in (before, after))))
        quiet(ax, grid="y")
    axes[1].set_xlabel("input features, by activation peak")
    axes[1].xaxis.set_major_locator(MaxNLocator(7, integer=True))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, markerscale=3 if large else 1)
    (_, x0, x1), (_, w0, w1) = ratios
    caption = f"Largest over median: activations {x0:.3g} → {x1:.3g}, weights {w0:.3g} → {w1:.3g}"
    return finished(figure, caption, title)


def _plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers, never as powers: 0.5, 1, 2 or, over many decades, 1, 10, 1,000."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,g}")
