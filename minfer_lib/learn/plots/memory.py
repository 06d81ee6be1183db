"""Pictures of bytes: what fills the memory, how the cache grows, and which of memory and arithmetic a step waits for.

Invariant: sizes go in as bytes and come out labelled in powers of 1,024 (KiB, MiB, GiB), the units of a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from ..style import (
    ACTIVATIONS,
    ALERT,
    CARD,
    DATA,
    INK,
    KV_CACHE,
    SOFT_INK,
    WEIGHTS,
    Picture,
    canvas,
    drawing,
    format_bytes,
    headline,
    on_colour,
    quiet,
)  # fmt: skip

PART_COLOURS = {"weights": WEIGHTS, "KV cache": KV_CACHE, "activations": ACTIVATIONS}
OTHER_PARTS = (DATA, "#9aa3ad", "#b78fa0")
MEMORY_FILL, COMPUTE_FILL = "#e3eef5", "#f6ecd9"


@drawing
def memory_stack(
    rows: Mapping[str, Mapping[str, float]],
    *,
    budgets: Mapping[str, float] | None = None,
    scale: float = 1.0,
    title: str | None = None,
) -> Picture:
    """One stacked bar a row: `rows` maps a label ("fp16") to bytes by part ("weights", "KV cache", "activations").

    `budgets` ({"24 GiB card": bytes}) are lines to stay under; the title then counts the rows that fit the first.
    `scale` are bytes that the axis shows at least, for pictures to be compared.
    """
    budgets = dict(budgets or {})
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    end = max([*totals.values(), *budgets.values(), scale])
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    others = iter(OTHER_PARTS)
    colours = {name: PART_COLOURS.get(name) or next(others, DATA) for name in names}
    figure, ax = canvas(7.0, 1.35 + 0.42 * len(rows))
    for y, (label, parts) in enumerate(rows.items()):
        left = 0.0
        for name in names:
            size = parts.get(name, 0.0)
            ax.barh(y, size, left=left, color=colours[name], height=0.66, label=name if y == 0 else None)
            if size > end * 0.115:
                ax.text(
                    left + size / 2,
                    y,
                    format_bytes(size),
                    ha="center",
                    va="center",
                    size=8.5,
                    color=on_colour(colours[name]),
                )
            left += size
        over = any(totals[label] > limit for limit in list(budgets.values())[:1])
        text = ax.text(left + end * 0.008, y, format_bytes(left), va="center", size=9, color=ALERT if over else INK)
        text.set_bbox({"facecolor": CARD, "edgecolor": "none", "pad": 0.8})
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.45, -0.95 if budgets else -0.5)
    ax.set_xlim(0, end * 1.13)
    for label, limit in budgets.items():
        ax.axvline(limit, color=ALERT, linestyle="--", linewidth=1.2, zorder=0.9)
        at_the_end = limit > end * 0.75
        ax.text(limit, -0.72, f"{label} " if at_the_end else f" {label}", size=8.5, color=ALERT, va="center",
                ha="right" if at_the_end else "left")  # fmt: skip
    _bytes_axis(ax.xaxis, end)
    ax.tick_params(axis="y", length=0)
    quiet(ax, grid="x", spines=("bottom",))
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=len(names))
    if title is None and budgets:
        name, limit = next(iter(budgets.items()))
        title = f"{sum(total <= limit for total in totals.values())} of {len(rows)} fit ({name})"
    headline(figure, title)
    figure.alt = "memory: " + "; ".join(f"{label} {format_bytes(total)}" for label, total in totals.items())
    return figure


@drawing
def kv_growth(
    bytes_per_token: Mapping[str, float], *, lengths: Sequence[int], mark: int | None = None,
    budget: float | None = None, budget_label: str = "memory left for the cache", title: str | None = None,
) -> Picture:  # fmt: skip
    """Bytes of KV cache against its length in tokens, one straight line for each {"32 KV heads": bytes per token}.

    `mark` is a length at which the sizes are written out; `budget` draws the memory that there is.
    """
    figure, ax = canvas(7.0, 3.4)
    end = float(max(lengths))
    most, least = max(bytes_per_token.values()), min(bytes_per_token.values())
    shows_budget = budget is not None and budget <= most * end * 1.4  # a far one would flatten the lines
    top = max(most * end, budget if shows_budget else 0.0) * 1.12
    colours = (KV_CACHE, WEIGHTS, "#b78fa0", ACTIVATIONS)
    at = float(mark or end)
    heights = spread([size * end for size in bytes_per_token.values()], top * (0.15 if mark else 0.08))
    for (label, size), colour, height in zip(bytes_per_token.items(), colours, heights, strict=False):
        ax.plot([0, end], [0, end * size], color=colour)
        ax.annotate(
            label, (end, height), textcoords="offset points", xytext=(7, 5 if mark else 0), va="center", size=9.5
        )
        if mark:
            ax.plot([at], [at * size], "o", color=colour, markersize=6)
            value = f"{format_bytes(at * size)} at {at:,.0f}"
            ax.annotate(
                value, (end, height), textcoords="offset points", xytext=(7, -7), va="center", size=8.5, color=SOFT_INK
            )
    if mark:
        ax.axvline(at, color=SOFT_INK, linestyle=":", linewidth=1.0, zorder=0.9)
    if shows_budget:
        ax.axhline(budget, color=ALERT, linestyle="--", linewidth=1.2)
        ax.text(end * 0.01, budget, f"{budget_label}: {format_bytes(budget)}", color=ALERT, size=9, va="bottom")
    ax.set_xlim(0, end)
    ax.set_ylim(0, top)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    ax.set_xlabel("tokens in the cache")
    _bytes_axis(ax.yaxis, top)
    quiet(ax, grid="y")
    computed = (f"from {format_bytes(least * at)} to " if least < most else "") + format_bytes(most * at)
    headline(figure, title or f"At {at:,.0f} tokens the cache takes {computed}")
    figure.alt = "KV cache: " + "; ".join(
        f"{label} {format_bytes(s)} per token" for label, s in bytes_per_token.items()
    )
    return figure


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The values moved apart, upwards and in their order, until neighbours are `gap` from each other (for labels)."""
    result, last = list(values), -np.inf
    for index in np.argsort(values, kind="stable"):
        last = result[index] = max(values[index], last + gap)
    return result


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


@drawing
def roofline(
    peak_flops: float, bandwidth: float, points: Mapping[str, tuple[float, float | None]], *, title: str | None = None
) -> Picture:
    """FLOP/s that a machine can reach against arithmetic intensity (Williams et al. 2009), both axes logarithmic.

    `peak_flops` in FLOP/s, `bandwidth` in bytes/s. `points` maps a label to (FLOP per byte, FLOP/s reached or None:
    then it is drawn on the roof, as what could be reached). Left of the ridge memory is what a step waits for.
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
    ax.text(high, peak_flops * 1.18, f"{_si(peak_flops)}FLOP/s", ha="right", va="bottom", size=9)
    taken = [np.log(x / low) / np.log(ridge / low) for x in xs]  # where on the slope, 0 to 1, points are
    free = max((0.3, 0.5, 0.7), key=lambda place: min((abs(place - t) for t in taken), default=1.0))
    slope_x = low * (ridge / low) ** free
    ax.annotate(
        f"{_si(bandwidth)}B/s",
        (slope_x, slope_x * bandwidth),
        textcoords="offset points",
        xytext=(-6, 4),
        ha="right",
        size=9,
    )
    ax.axvline(ridge, color=SOFT_INK, linestyle=":", linewidth=1.0)
    for label, (intensity, flops) in points.items():
        y = flops or min(intensity * bandwidth, peak_flops)
        ax.plot(
            [intensity],
            [y],
            "o",
            markersize=8,
            color=WEIGHTS if flops else CARD,
            markeredgecolor=WEIGHTS,
            markeredgewidth=1.6,
        )
        place = np.log(intensity / low) / np.log(high / low)  # 0 at the left edge, 1 at the right
        side = "left" if place < 0.6 else "center" if place < 0.85 else "right"
        shift = 9 if side == "left" else 0
        ax.annotate(label, (intensity, y), textcoords="offset points", xytext=(shift, -10), ha=side, va="top", size=9)
    ax.set_xlim(low, high)
    ax.set_ylim(floor, peak_flops * 3)
    ax.set_xlabel("FLOP for each byte that is read")
    ax.set_ylabel("FLOP/s")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _si(v).strip()))
    ax.minorticks_off()
    quiet(ax)
    headline(figure, title or f"Below {ridge:.3g} FLOP for each byte, this machine waits for memory")
    figure.alt = f"roofline: ridge at {ridge:.3g} FLOP/byte; " + "; ".join(
        f"{label} {intensity:.3g} FLOP/byte" for label, (intensity, _) in points.items()
    )
    return figure


def _bytes_axis(axis: object, end: float) -> None:
    """Ticks at round numbers of the unit that suits `end`, not at round numbers of bytes."""
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if end >= u), (1, "B"))
    rough = end / unit / 5
    power = 10.0 ** np.floor(np.log10(rough)) if rough > 0 else 1.0
    step = next(s for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999) * power
    ticks = np.arange(0, end / unit * 1.001, step)
    axis.set_ticks(ticks * unit, [f"{t:g}" for t in ticks])  # type: ignore[attr-defined]
    axis.set_label_text(name)  # type: ignore[attr-defined]


def _si(value: float) -> str:
    """1.23e12 -> "1.23 T" (powers of 1,000, as rates are given)."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g} "
