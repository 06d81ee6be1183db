"""Pictures of what a precision costs and brings: bytes moved, times, memory, quality, losers included.

Invariant: a ratio in a caption is taken between two numbers of the same picture. Sizes of memory are drawn in GB of
10^9 bytes here, as budgets are given, and bytes that are moved in powers of 1,024.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from ..style import ALERT, DATA, INK, PEER_FILL, SOFT_INK, Picture, canvas, colour_of, drawing, format_bytes, quiet
from .parts import CARD_BEHIND, bar_rows, finished, fitting, key, part_colours, stacked

OURS = colour_of("int8")
LIGHTER = "#e9b878"  # a second way of int8 beside the first


@drawing
def bytes_moved(rows: Mapping[str, Mapping[str, float]], *, title: str | None = None) -> Picture:
    """What each way of computing something moves between memory and processor: {"bf16": {"weights": bytes}, ...}.

    A stacked bar for each way, its total behind it with the ratio to the first way.
    """
    totals = {name: float(sum(parts.values())) for name, parts in rows.items()}
    end, first = max(totals.values()), next(iter(totals))
    figure, ax = canvas(7.0, 1.2 + 0.42 * len(rows))
    stacked(ax, rows, part_colours(rows), format_bytes, end)
    ratios = {name: total / totals[first] for name, total in totals.items()}
    for y, (name, total) in enumerate(totals.items()):
        ratio = "" if name == first else f", {ratios[name]:.3g}×"
        ax.text(total + end * 0.012, y, format_bytes(total) + ratio, va="center", size=9)
    ax.set_xlim(0, end * 1.27)
    key(figure, part_colours(rows), ncols=6, columnspacing=1.1, handlelength=1.3)
    others = [name for name in rows if name != first]
    found = "; ".join(f"{name}: {ratios[name]:.3g}×" for name in others)
    if others:
        least = min(others, key=ratios.__getitem__)
        short = f"“{least}” moves {ratios[least]:.3g}× the bytes of “{first}”"
        found = fitting(f"Bytes against {first}: {found}", short) if len(others) > 1 else short
    alt = "bytes moved: " + "; ".join(f"{name} {format_bytes(total)}" for name, total in totals.items())
    return finished(figure, found, title, alt)


@drawing
def memory_budget(rows: Mapping[str, Mapping[str, float]], *, budget: float = 8e9, title: str | None = None) -> Picture:
    """What fills the memory, {"bf16": {"layers": bytes, "embedding": bytes, ...}, ...}, against `budget` bytes.

    Behind each bar its total and what is left of the budget, or how much is missing; GB are 10^9 bytes.
    """
    totals = {name: float(sum(parts.values())) for name, parts in rows.items()}
    end = max(*totals.values(), budget)
    figure, ax = canvas(7.0, 1.55 + 0.42 * len(rows))
    stacked(ax, rows, part_colours(rows), lambda size: f"{size / 1e9:.2f}", end)
    for y, total in enumerate(totals.values()):
        left = budget - total
        rest = abs(budget / 1e9 - round(total / 1e9, 2))  # what is written adds up
        verdict = f"{rest:.2f} left" if left >= 0 else f"{rest:.2f} too much"
        ax.text(max(total, budget if 0 <= left < 0.25 * end else 0.0) + end * 0.012, y,
                f"{total / 1e9:.2f} GB, {verdict}", va="center", size=9, color=INK if left >= 0 else ALERT,
                bbox=CARD_BEHIND)  # fmt: skip
    ax.set_xlim(0, end * 1.42)
    ax.set_ylim(top=-0.95)
    ax.axvline(budget, color=ALERT, linestyle="--", linewidth=1.2, zorder=0.9)
    ax.text(budget, -0.72, f" {budget / 1e9:g} GB", size=8.5, color=ALERT, va="center")
    ticks = [tick for tick in MaxNLocator(6).tick_values(0, end / 1e9) if tick * 1e9 <= end * 1.02]
    ax.set_xticks([tick * 1e9 for tick in ticks], [f"{tick:g}" for tick in ticks])
    ax.set_xlabel("GB (10⁹ bytes)")
    quiet(ax, grid="x", spines=("bottom",))
    key(figure, part_colours(rows), ncols=6, columnspacing=1.1, handlelength=1.3)
    fits = sum(total <= budget for total in totals.values())
    caption = f"{fits} of {len(rows)} {'fits' if fits == 1 else 'fit'} in {budget / 1e9:g} GB"
    alt = f"{caption}: " + "; ".join(f"{name} {total / 1e9:.2f} GB" for name, total in totals.items())
    return finished(figure, caption, title, alt)


@drawing
def ways_timed(
    times: Mapping[str, Mapping[int, float]], *, highlight: Collection[str] = ("int8 (ours)",), unit: str = "ms",
    title: str | None = None,
) -> Picture:  # fmt: skip
    """Several ways to compute the same product, timed: {"float32": {rows: time}, ...}, a panel for each number of rows.

    A dot for each time on a common logarithmic scale in `unit`, with its number; the fastest is bold. Up to 8 ways and
    4 numbers of rows can be read.
    """
    counts = sorted({rows for way in times.values() for rows in way})
    every = [time for way in times.values() for time in way.values()]
    low, high = min(every), max(every)
    figure, axes = canvas(7.0, 1.3 + 0.29 * len(times), columns=len(counts), sharey=True, sharex=True, squeeze=False)
    fastest: dict[str, list[int]] = {}
    for ax, rows in zip(axes[0], counts, strict=True):
        here = {name: way[rows] for name, way in times.items() if rows in way}
        best = min(here, key=here.__getitem__)
        fastest.setdefault(best, []).append(rows)
        bar_rows(ax, list(times))
        for y, name in enumerate(times):
            if name not in here:
                ax.text(low, y, "not measured", va="center", size=8, color=SOFT_INK)
                continue
            ax.plot([here[name]], [y], "o", markersize=7, color=OURS if name in highlight else "#a9b4bf")
            ax.annotate(f"{here[name]:,.3g}", (here[name], y), textcoords="offset points", xytext=(7, 0), va="center",
                        size=8.5, weight="bold" if name == best else "normal")  # fmt: skip
        ax.set_xscale("log")
        room = 0.1 + 0.09 * len(counts)  # share of a panel that the numbers behind the dots take
        ax.set_xlim(low / 1.4, high * max(high / low, 1.5) ** (room / (1 - room)))
        decades = [10.0**n for n in range(-4, 7) if low / 1.4 <= 10.0**n <= high * 1.4]
        ax.set_xticks(decades or [low], [f"{tick:g}" for tick in decades or [low]])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_title(f"{rows:,} {'row' if rows == 1 else 'rows'}", size=9.5, pad=5)
        quiet(ax, grid="x", spines=("left",))
    told = "; ".join(f"{name} at {_and(at)} {'row' if at == [1] else 'rows'}" for name, at in fastest.items())
    caption = fitting(f"Fastest: {told}", "The fastest are in bold")
    axes[0, 0].set_xlabel(f"{unit} (logarithmic); the fastest is bold", size=9, color=SOFT_INK, loc="left")
    said = (f"{name} " + ", ".join(f"{rows}: {way[rows]:.3g}" for rows in sorted(way)) for name, way in times.items())
    return finished(figure, caption, title, f"{caption}; " + "; ".join(said))


@drawing
def step_times_by_batch(
    times: Mapping[str, Mapping[int, float]], *, base: str = "bf16", title: str | None = None
) -> Picture:
    """The decode step at each batch size, {"bf16": {batch: ms}, "int8": {...}, ...}, and its ratio to `base`."""
    batches = sorted({batch for way in times.values() for batch in way})
    bars = len(times) * len(batches)
    page = min(9.4, max(7.0, 0.46 * bars + 0.9))
    size = 8.5 if bars <= 13 else 7.0
    figure, ax = canvas(page, 3.3)
    highest = max(ms for way in times.values() for ms in way.values())
    looks = _looks(list(times))
    width = 0.84 / len(times)
    for n, (name, way) in enumerate(times.items()):
        for group, batch in enumerate(batches):
            if batch not in way:
                continue
            x = group + (n - (len(times) - 1) / 2) * width
            ax.bar(x, way[batch], width=width * 0.9, label=name if batch == min(way) else None, **looks[name])
            ratio = name != base and batch in times.get(base, {})
            text = f"{way[batch]:,.3g}" + (f"\n{way[batch] / times[base][batch]:.2f}×" if ratio else "")
            ax.text(x, way[batch] + 0.012 * highest, text, ha="center", va="bottom", size=size, linespacing=1.05)
    ax.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    ax.set_xlim(-0.52, len(batches) - 0.48)
    ax.set_ylim(0, highest * 1.2)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_ylabel("ms a step")
    ax.tick_params(axis="x", length=0)
    quiet(ax, grid="y")
    figure.legend(loc="outside lower center", ncols=min(5, len(times)), columnspacing=1.3)
    ratios = {name: [way[b] / times[base][b] for b in batches if b in way and b in times.get(base, {})]
              for name, way in times.items() if name != base}  # fmt: skip
    ratios = {name: found for name, found in ratios.items() if found}
    caption = ""
    if ratios:
        best = min(ratios, key=lambda name: float(np.mean(ratios[name])))
        caption = f"{best}: {min(ratios[best]):.2f} to {max(ratios[best]):.2f} of {base}'s time, by batch"
    said = "; ".join(
        f"{name} " + ", ".join(f"{batch}: {way[batch]:.3g} ms" for batch in batches if batch in way)
        for name, way in times.items()
    )
    return finished(figure, caption, title, f"{caption or 'step times'}; {said}")


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keywords of bars: orange for int8 of ours, black outlines for bitsandbytes and other peers, blue for the rest."""
    ours, rest = iter((OURS, LIGHTER, "#8f5a1a")), iter((DATA, "#9db4c4", "#c5cdd5"))
    looks = {}
    for name in names:
        peer = name.lower().startswith(("bitsandbytes", "hf", "transformers", "vllm", "llama.cpp"))
        colour = PEER_FILL if peer else next(ours, OURS) if "int8" in name else next(rest, DATA)
        looks[name] = {"color": colour, "edgecolor": INK if peer else "none", "linewidth": 1.2 if peer else 0.0}
    return looks


def _and(parts: Sequence[Any]) -> str:
    """1, 8 and 32."""
    words = [str(part) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
