"""Pictures of bytes: what fills the memory, how the cache grows, and which of memory and arithmetic a step waits for.

Invariant: sizes go in as bytes and come out labelled in powers of 1,024 (KiB, MiB, GiB), the units of a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from ..style import (
    ACTIVATIONS,
    ALERT,
    CARD,
    INK,
    KV_CACHE,
    SOFT_INK,
    WEIGHTS,
    Picture,
    canvas,
    colour_of,
    drawing,
    engine_family,
    format_bytes,
    headline,
    marker_of,
    quiet,
)  # fmt: skip
from .labels import label_points
from .parts import CARD_BEHIND, COUNT, balanced, finished, key, part_colours, stacked

MEMORY_FILL, COMPUTE_FILL = "#e3eef5", "#f6ecd9"


@drawing
def memory_stack(
    rows: Mapping[str, Mapping[str, float]], *, budgets: Mapping[str, float] | None = None, scale: float = 1.0,
    title: str | None = None,
) -> Picture:  # fmt: skip
    """One stacked bar a row: `rows` maps a label ("fp16") to bytes by part ("weights", "KV cache", "activations").

    `budgets` ({"24 GiB card": bytes}) are lines to stay under; the title then counts the rows that fit the first.
    `scale` are bytes that the axis shows at least, for pictures to be compared.
    """
    budgets = dict(budgets or {})
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    end = max([*totals.values(), *budgets.values(), scale])
    colours = part_colours(rows)
    figure, ax = canvas(7.0, 1.35 + 0.42 * len(rows))
    stacked(ax, rows, colours, format_bytes, end * 1.15)
    first = min(list(budgets.values())[:1], default=np.inf)
    for y, total in enumerate(totals.values()):
        ax.text(total + end * 0.008, y, format_bytes(total), va="center", size=9, bbox=CARD_BEHIND,
                color=ALERT if total > first else INK)  # fmt: skip
    ax.set_ylim(top=-0.95 if budgets else -0.5)
    ax.set_xlim(0, end * 1.13)
    for label, limit in budgets.items():
        ax.axvline(limit, color=ALERT, linestyle="--", linewidth=1.2, zorder=0.9)
        at_the_end = limit > end * 0.75
        ax.text(limit, -0.72, f"{label} " if at_the_end else f" {label}", size=8.5, color=ALERT, va="center",
                ha="right" if at_the_end else "left")  # fmt: skip
    _bytes_axis(ax.xaxis, end)
    quiet(ax, grid="x", spines=("bottom",))
    if len(colours) > 1:
        key(figure, colours)
    caption = f"{sum(total <= first for total in totals.values())} of {len(rows)} fit ({next(iter(budgets), '')})"
    alt = "memory: " + "; ".join(f"{label} {format_bytes(total)}" for label, total in totals.items())
    return finished(figure, caption if budgets else "", title, alt)


@drawing
def kv_growth(
    bytes_per_token: Mapping[str, float], *, lengths: Sequence[int], mark: int, title: str | None = None
) -> Picture:
    """Bytes of KV cache against its length in tokens, one straight line for each {"32 KV heads": bytes per token}.

    `mark` is a length at which the sizes are written out.
    """
    figure, ax = canvas(7.0, 3.4)
    end, (least, most) = float(max(lengths)), (min(bytes_per_token.values()), max(bytes_per_token.values()))
    colours = (KV_CACHE, WEIGHTS, "#b78fa0", ACTIVATIONS)
    heights = balanced([size * end for size in bytes_per_token.values()], most * end * 0.17)
    beside = {"textcoords": "offset points", "va": "center"}
    for (label, size), colour, height in zip(bytes_per_token.items(), colours, heights, strict=False):
        ax.plot([0, end], [0, end * size], color=colour)
        ax.plot([mark], [mark * size], "o", color=colour, markersize=6)
        value = f"{format_bytes(mark * size)} at {mark:,}"
        ax.annotate(label, (end, height), xytext=(7, 5), size=9.5, **beside)
        ax.annotate(value, (end, height), xytext=(7, -7), size=8.5, color=SOFT_INK, **beside)
    ax.axvline(mark, color=SOFT_INK, linestyle=":", linewidth=1.0, zorder=0.9)
    ax.set_xlim(0, end)
    ax.set_ylim(0, most * end * 1.12)
    ax.xaxis.set_major_formatter(COUNT)
    ax.set_xlabel("tokens in the cache")
    _bytes_axis(ax.yaxis, most * end * 1.12)
    quiet(ax, grid="y")
    computed = (f"from {format_bytes(least * mark)} to " if least < most else "") + format_bytes(most * mark)
    alt = "KV cache: " + "; ".join(f"{label} {format_bytes(s)} per token" for label, s in bytes_per_token.items())
    return finished(figure, f"At {mark:,} tokens the cache takes {computed}", title, alt)


@drawing
def roofline(
    peak_flops: float, bandwidth: float, points: Mapping[str, tuple[float, float | None]], *, title: str | None = None
) -> Picture:
    """FLOP/s that a machine can reach against arithmetic intensity (Williams et al. 2009), both axes logarithmic.

    `peak_flops` in FLOP/s, `bandwidth` in bytes/s. `points` maps a label to (FLOP per byte, FLOP/s reached or None:
    then it is drawn on the roof, as what could be reached); engines have their colours, and `bench.roofline.points`
    finds their places. Left of the ridge memory is what a step waits for.
    """
    ridge = peak_flops / bandwidth
    xs = [intensity for intensity, _ in points.values()]
    low, high = min([*xs, ridge]) / 4, max([*xs, ridge]) * 6
    reached = [f for _, f in points.values() if f]
    floor = min([low * bandwidth, *reached]) / 5
    figure, ax = canvas(7.0, 3.9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    roof_x = np.array([low, ridge, high])
    roof_y = np.minimum(roof_x * bandwidth, peak_flops)
    ax.fill_between(roof_x[:2], floor, roof_y[:2], color=MEMORY_FILL, linewidth=0)
    ax.fill_between(roof_x[1:], floor, roof_y[1:], color=COMPUTE_FILL, linewidth=0)
    ax.plot(roof_x, roof_y, color=INK, linewidth=1.8)
    for centre, text in ((np.sqrt(low * ridge), "waits for memory"), (np.sqrt(ridge * high), "waits for arithmetic")):
        ax.text(centre, floor * 1.35, text, ha="center", va="bottom", size=9.5, color=SOFT_INK)
    ax.text(high, peak_flops * 1.18, _si(peak_flops, "FLOP/s"), ha="right", va="bottom", size=9)
    taken = [np.log(x / low) / np.log(ridge / low) for x in xs]  # where on the slope, 0 to 1, points are
    free = max((0.3, 0.5, 0.7), key=lambda place: min((abs(place - t) for t in taken), default=1.0))
    slope_x = low * (ridge / low) ** free
    ax.annotate(_si(bandwidth, "B/s"), (slope_x, slope_x * bandwidth), textcoords="offset points", xytext=(-6, 4),
                ha="right", size=9)  # fmt: skip
    ax.axvline(ridge, color=SOFT_INK, linestyle=":", linewidth=1.0)
    heights = [flops or min(x * bandwidth, peak_flops) for x, flops in points.values()]
    for (label, (intensity, flops)), y in zip(points.items(), heights, strict=True):
        engine = engine_family(label)
        colour = WEIGHTS if engine is None else colour_of(label)
        ax.plot([intensity], [y], "o" if engine is None else marker_of(label), markersize=8,
                color=colour if flops else CARD, markeredgecolor=colour, markeredgewidth=1.6)  # fmt: skip
    ax.set_xlim(low, high)
    ax.set_ylim(floor, peak_flops * 3)
    ax.set_xlabel("FLOP for each byte that is read")
    ax.set_ylabel("FLOP/s")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _si(v)))
    ax.minorticks_off()
    quiet(ax)
    caption = f"Below {ridge:.3g} FLOP for each byte, this machine waits for memory"
    shares = {label: f / min(x * bandwidth, peak_flops) for label, (x, f) in points.items() if f}
    engines = [label for label in shares if engine_family(label) is not None]
    if engines:
        best = max(engines, key=shares.__getitem__)
        caption = f"{best} comes nearest to the roof: {shares[best]:.0%} of what it could reach"
    headline(figure, title or caption)
    label_points(figure, ax, zip(points, xs, heights, strict=True), size=9)
    figure.alt = f"roofline: ridge at {ridge:.3g} FLOP/byte; " + "; ".join(
        f"{label} {intensity:.3g} FLOP/byte" + (f", {shares[label]:.0%} of the roof" if label in engines else "")
        for label, (intensity, _) in points.items()
    )
    return figure


def _bytes_axis(axis: Any, end: float) -> None:
    """Ticks at round numbers of the unit that suits `end`, not at round numbers of bytes."""
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if end >= u), (1, "B"))
    ticks = [tick for tick in MaxNLocator(6).tick_values(0, end / unit) if tick * unit <= end * 1.001]
    axis.set_ticks([tick * unit for tick in ticks], [f"{tick:g}" for tick in ticks])
    axis.set_label_text(name)


def _si(value: float, unit: str = "") -> str:
    """1.23e12 -> "1.23 T" (powers of 1,000, as rates are given)."""
    return EngFormatter(unit)(float(f"{value:.3g}"))
