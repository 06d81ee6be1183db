"""Pictures of the comparison of all engines: the ladder, waiting times and their tail, and memory.

Invariant: rows are those of a `bench` comparison, in its order; a row without a figure has no mark, and no headline
names a winner that the rows do not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ...errors import InvalidParameter
from ..style import (
    INK,
    KV_CACHE,
    SOFT_INK,
    UNUSED,
    WEIGHTS,
    Picture,
    bar_style,
    canvas,
    drawing,
    engine_family,
    headline,
    line_style,
    quiet,
)

MIB = 1024**2
RESERVED = "#eceae4"  # neither tokens nor requests have it


def _measured(comparison: Any) -> list[Any]:
    rows = [row for row in getattr(comparison, "rows", comparison) if row.kind == "measured"]
    if not rows:
        raise InvalidParameter("There is nothing to draw: the comparison has no row that was measured.")
    return rows


def named_rows(ax: Any, names: Sequence[str]) -> None:
    """Names of horizontal bars at 0, 1, ..., the first one at the top."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)


@drawing
def throughput_ladder(comparison: Any, *, base: str | None = None, title: str | None = None) -> Picture:
    """Output tokens/s of each row with the spread of its runs, and its ratio to the row `base` (None: the first one).

    Where the runs of two rows overlap there is no ratio: what lies inside the spread is no difference.
    """
    rows = [row for row in _measured(comparison) if row.tokens_per_s]
    names = [row.engine for row in rows]
    if base is not None and base not in names:
        raise InvalidParameter(f"base={base!r} is no row here. There are {', '.join(names)}.")
    reference = rows[0 if base is None else names.index(base)]
    figure, ax = canvas(7.0, 1.0 + 0.32 * len(rows))
    most = max(row.spread()[1] for row in rows)
    for at, row in enumerate(rows):
        low, high = row.spread()
        ax.barh(at, row.tokens_per_s, height=0.64, **bar_style(row.engine))
        ax.plot([low, low, low, high, high, high], [at - 0.15, at + 0.15, at, at, at - 0.15, at + 0.15],
                color=INK, linewidth=1.1, solid_capstyle="butt", visible=high > low)  # fmt: skip
        text = f"{row.tokens_per_s:,.3g}" if row.tokens_per_s < 1000 else f"{row.tokens_per_s:,.0f}"
        text += "" if len(row.counted) > 1 else "  (one run)"
        ax.text(high + 0.015 * most, at, text, va="center", size=9.5)
        ratio = comparison.compared(row.engine, reference.engine).replace("x", "×")
        ax.text(1.36 * most, at, ratio, va="center", ha="right", size=9.5, color=SOFT_INK)
    ax.set_xlim(0, 1.37 * most)
    ax.set_xticks([])
    named_rows(ax, names)
    quiet(ax, spines=("left",))
    ax.set_xlabel(f"output tokens/s, median and spread of the runs; on the right: times {reference.engine}", size=9,
                  color=SOFT_INK)  # fmt: skip
    best = max(rows, key=lambda row: row.tokens_per_s)
    if best is reference or not comparison.differs(best.engine, reference.engine):
        caption = f"No row is faster than {reference.engine}"
    else:
        gain = best.tokens_per_s / reference.tokens_per_s
        caption = f"{best.engine}: {gain:.1f} times the tokens/s of {reference.engine}"
    headline(figure, title or caption)
    figure.alt = "throughput: " + "; ".join(f"{row.engine} {row.tokens_per_s:.3g} tokens/s" for row in rows)
    return figure


@drawing
def latency_spread(comparison: Any, *, title: str | None = None) -> Picture:
    """TTFT and TPOT of each row, logarithmic: a dot for each request of the middle run, a line at their median."""
    rows = [row for row in _measured(comparison) if row.ttft_ms]
    if not rows:
        raise InvalidParameter("There is nothing to draw: no row has times to the first token.")
    figure, axes = canvas(8.0, 1.25 + 0.3 * len(rows), columns=2, sharey=True)
    for ax, name, heading in zip(axes, ("ttft", "tpot"), ("time to first token", "time per later token"), strict=True):
        known = []
        for at, row in enumerate(rows):
            middle = sorted(row.counted, key=lambda run: run.wall_s)[len(row.counted) // 2]
            times = [value for value in getattr(middle, name) if value is not None]
            if not times:
                continue
            known += times
            style = line_style(row.engine)
            ax.plot(times, [at] * len(times), "o", markersize=5, alpha=0.55, color=style["color"], markeredgewidth=0)
            median = getattr(middle, f"{name}_ms")
            ax.plot([median], [at], marker="|", markersize=15, markeredgewidth=2.0, color=INK)
            ax.annotate(_ms(max(times)), (max(times), at), xytext=(6, 0), textcoords="offset points", va="center",
                        size=8.5)  # fmt: skip
        ax.set_xscale("log")
        ax.set_xlim(min(known) / 1.4, max(known) * (max(known) / min(known)) ** 0.28 * 1.15)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _ms(value)))
        ax.tick_params(axis="x", labelsize=8.5)
        ax.tick_params(axis="y", length=0)
        ax.set_title(heading, size=10)
        quiet(ax, grid="x", spines=())
    named_rows(axes[0], [row.engine for row in rows])
    longest = {row.engine: max(value for value in row.median("ttft") if value is not None) for row in rows}
    least = min(longest, key=longest.__getitem__)
    caption = f"Whoever waited longest had their first token soonest with {least}: {_ms(longest[least])}"
    headline(figure, title or caption)
    figure.supxlabel("a dot for each request; line: their median; number: the slowest", size=9, color=SOFT_INK)
    figure.alt = f"{caption}; " + "; ".join(
        f"{row.engine} TTFT {row.ttft_ms:.3g} ms, at most {longest[row.engine]:.3g} ms" for row in rows
    )
    return figure


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s" if value < 10_000 else f"{value / 1000:.0f} s"


@drawing
def memory_of_engines(comparison: Any, *, title: str | None = None) -> Picture:
    """Weights and KV cache of each row to scale, and beside them the cache alone, down to what tokens fill of it."""
    rows = [row for row in _measured(comparison) if row.weight_bytes]
    if not rows:
        raise InvalidParameter("There is nothing to draw: no row says how large its weights are.")
    figure, axes = canvas(8.4, 1.5 + 0.3 * len(rows), columns=2, sharey=True, width_ratios=(1, 1.15))
    whole, cache = axes
    most = max(row.weight_bytes + (row.kv_reserved or 0) for row in rows) / MIB
    widest = max((row.kv_reserved or 0) for row in rows) / MIB
    for at, row in enumerate(rows):
        reserved, held, used = ((size or 0) / MIB for size in (row.kv_reserved, row.kv_held, row.kv_used))
        weights = row.weight_bytes / MIB
        whole.barh(at, weights, height=0.62, color=WEIGHTS)
        for size, colour in ((reserved, RESERVED), (held, UNUSED), (used, KV_CACHE)):
            whole.barh(at, size, left=weights, height=0.62, color=colour)
        whole.text(weights + reserved + 0.02 * most, at, _mib(weights + reserved), va="center", size=8.5)
        if not row.kv_reserved:
            cache.text(0.01 * widest, at, "none kept", va="center", size=8.5, color=SOFT_INK)
            continue
        known = row.kv_held is not None
        cache.barh(at, reserved, height=0.62, color=RESERVED, edgecolor=UNUSED, linewidth=0.8)
        cache.barh(at, held, height=0.62, color=UNUSED)
        cache.barh(at, used, height=0.62, color=KV_CACHE)
        waste = f"{_share(row.kv_waste)} of it empty" if row.kv_waste is not None else "not told"
        held_text = f"held {_mib(held)}, {waste}" if known else "held: not told"
        cache.text(reserved + 0.02 * widest, at, held_text, va="center", size=8.5)
    whole.set_xlim(0, 1.3 * most)
    cache.set_xlim(0, 1.95 * (widest or 1))
    for ax, heading in zip(axes, ("weights and cache reserved, MiB", "the cache alone, MiB"), strict=True):
        ax.set_title(heading, size=10)
        ax.set_xticks([])
        quiet(ax, spines=("left",))
    named_rows(whole, [row.engine for row in rows])
    keys = [Patch(color=WEIGHTS, label="weights"), Patch(color=KV_CACHE, label="cache, filled with tokens"),
            Patch(color=UNUSED, label="held by requests, empty"),
            Patch(facecolor=RESERVED, edgecolor=UNUSED, label="reserved, nobody's")]  # fmt: skip
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=8.5, handlelength=1.2, columnspacing=1.2)
    told = [row for row in rows if row.kv_waste is not None and engine_family(row.engine) is not None]
    caption = None
    if told:
        high, low = max(told, key=lambda row: row.kv_waste), min(told, key=lambda row: row.kv_waste)
        caption = f"Of the cache that requests hold, {high.engine} leaves {_share(high.kv_waste)} empty"
        if low is not high:
            caption += f", {low.engine} {_share(low.kv_waste)}"
    headline(figure, title or caption)
    figure.alt = "memory: " + "; ".join(
        f"{row.engine} weights {_mib(row.weight_bytes / MIB)} MiB, cache {_mib((row.kv_reserved or 0) / MIB)}, "
        f"used {_mib((row.kv_used or 0) / MIB)} MiB" for row in rows
    )  # fmt: skip
    return figure


def _share(value: float) -> str:
    return f"{value:.0%}" if value < 0.995 else "over 99%"


def _mib(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
