"""The picture of what a decode step spends its milliseconds on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import InvalidParameter
from ..style import ACTIVATIONS, ALERT, DATA, INK, KV_CACHE, Picture, canvas, drawing
from .parts import finished, key, stacked

PART_COLOURS = {"reading": KV_CACHE, "arithmetic": DATA, "slow kernels": ACTIVATIONS, "launching": ALERT}
MEANINGS = {
    "reading": "reading what it must",
    "arithmetic": "arithmetic beyond that",
    "slow kernels": "kernels that reach neither limit",
    "launching": "launching and Python",
}


@drawing
def decomposition(steps: Iterable[Any], *, title: str | None = None) -> Picture:
    """Decode steps as stacked bars of four parts in milliseconds, with the spread of the steps.

    `steps`: what `bench.decompose` returns, or the rows of a recorded `Result` that hold the same numbers.
    """
    rows = [row for row in getattr(steps, "rows", steps) if "step ms" in row.values]
    if not rows:
        raise InvalidParameter("There is nothing to draw: no decode step was decomposed.")
    names = [row.engine for row in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidParameter(f"Two bars are called {twice[0]!r}. Give one of them another name: decompose(name=...).")
    parts = [{part: row.values[f"{part} ms"] for part in PART_COLOURS} for row in rows]
    most = max(row.values["high"] for row in rows)
    most = min(most, 1.6 * max(row.values["step ms"] for row in rows))  # one stray step must not crush the bars
    figure, ax = canvas(7.6, 1.45 + 0.4 * len(rows))
    stacked(ax, dict(zip(names, parts, strict=True)), PART_COLOURS, _ms, most)
    for at, row in enumerate(rows):
        step, low, high = (row.values[name] for name in ("step ms", "low", "high"))
        ax.plot([low, min(high, most)], [at + 0.4] * 2, color=INK, linewidth=1.1, marker="|", markersize=5)
        total = f"{_ms(step)} ms" + (f", up to {_ms(high)}" if high > most else "")
        ax.text(min(high, most) + 0.015 * most, at, total, va="center", size=9)
    ax.set_xlim(0, 1.3 * most)
    ax.set_xlabel("milliseconds a decode step; the thin lines are the spread of the steps", size=9)
    key(figure, {MEANINGS[part]: colour for part, colour in PART_COLOURS.items()}, fontsize=8.5, handlelength=1.2,
        columnspacing=1.1)  # fmt: skip
    alt = "a decode step: " + "; ".join(
        f"{row.engine} {row.values['step ms']:.3g} ms, of which "
        + ", ".join(f"{part} {ms / row.values['step ms']:.0%}" for part, ms in spent.items())
        for row, spent in zip(rows, parts, strict=True)
    )
    return finished(figure, _finding(rows, parts), title, alt)


def _finding(rows: list[Any], parts: list[dict[str, float]]) -> str:
    """What takes most of each step if it is the same in all, else of the first and the last one."""
    largest = [max(spent, key=spent.__getitem__) for spent in parts]
    shares = [spent[part] / row.values["step ms"] for row, spent, part in zip(rows, parts, largest, strict=True)]
    if len(set(largest)) == 1:
        least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
        return f"Largest in each step: {MEANINGS[largest[0]]}, {least if least == most else f'{least} to {most}'}"
    first, last = (f"{rows[i].engine}: {shares[i]:.0%} {largest[i]}" for i in (0, -1))
    return f"{first}; {last}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
