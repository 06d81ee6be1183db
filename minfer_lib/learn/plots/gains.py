"""What each step of the course changed for the better and for the worse, in one picture.

Invariant: every mark is a ratio of two rows of one comparison, turned so that over 1 is better; a headline names only
what the marks show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from ...errors import InvalidParameter
from ..style import ALERT, INK, SOFT_INK, UNUSED, Picture, canvas, colour_of, drawing, engine_family, headline, quiet
from .comparison import named_rows

MARKS = (("tokens/s", "o"), ("TTFT", "s"), ("TPOT", "^"), ("cache held", "D"), ("weights", "v"))


def step_factors(comparison: Any, before: str, after: str) -> dict[str, float]:
    """What going from one row to another changed, each as a factor that is over 1 where it got better.

    tokens/s: more is better; TTFT, TPOT, cache held by requests, weights: less is better. What one of the rows does not
    know is left out, and so is a time whose runs overlap: that is no difference.
    """
    first, second = comparison.row(before), comparison.row(after)
    pairs = {
        name: (getattr(one, figure), getattr(other, figure))
        for name, figure, one, other in (
            ("tokens/s", "tokens_per_s", second, first),
            ("TTFT", "ttft_ms", first, second),
            ("TPOT", "tpot_ms", first, second),
        )
        if comparison.differs(after, before, figure)
    } | {
        "cache held": (first.kv_held, second.kv_held),
        "weights": (first.weight_bytes, second.weight_bytes),
    }
    return {name: a / b for name, (a, b) in pairs.items() if a and b}


@drawing
def gains_and_costs(comparison: Any, steps: Mapping[str, tuple[str, str]], *, title: str | None = None) -> Picture:
    """What each step of the course changed, {"KV cache": ("naive", "cached"), ...}: to the right of 1 is better.

    The colour is that of the row that the step leads to.
    """
    factors = {name: step_factors(comparison, *pair) for name, pair in steps.items()}
    figure, ax = canvas(7.6, 1.55 + 0.62 * len(steps))
    values = [value for each in factors.values() for value in each.values()]
    if not values:
        raise InvalidParameter("There is nothing to draw: the rows of these steps have no figures in common.")
    ax.axvline(1.0, color=SOFT_INK, linewidth=1.1)
    ax.axvspan(min(values) / 1e6, 1.0, color=ALERT, alpha=0.05, linewidth=0)
    for at, (name, each) in enumerate(factors.items()):
        after = steps[name][1]
        colour = INK if engine_family(after) is None else colour_of(after)
        shown = [(mark, symbol) for mark, symbol in MARKS if mark in each and abs(each[mark] - 1) > 0.005]
        for row, (mark, symbol) in enumerate(shown):
            y = at + (row - (len(shown) - 1) / 2) * 0.17
            ax.plot([each[mark]], [y], symbol, color=colour, markersize=6.5)
            text = f"{mark} {each[mark]:.2f}×" if each[mark] < 10 else f"{mark} {each[mark]:.0f}×"
            ax.annotate(text, (each[mark], y), xytext=(7, 0), textcoords="offset points", va="center", size=8,
                        color=INK)  # fmt: skip
    ax.set_xscale("log", base=2)
    low, high = min(*values, 0.8), max(*values, 1.25)
    width = high / low
    ax.set_xlim(low / width**0.06 / 1.15, high * width**0.28 * 1.2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    ax.xaxis.set_minor_locator(NullLocator())
    named_rows(ax, [f"{name}\n{before} → {after}" for name, (before, after) in steps.items()])
    for edge in range(1, len(steps)):
        ax.axhline(edge - 0.5, color=UNUSED, linewidth=0.7)
    quiet(ax, spines=("bottom",))
    keys = [
        Line2D([], [], linestyle="none", marker=symbol, color=INK, markersize=6, label=mark) for mark, symbol in MARKS
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8.5, columnspacing=1.2)
    ax.set_xlabel("worse  ←  times better  →  better", size=9, color=SOFT_INK)
    gains = {name: each["tokens/s"] for name, each in factors.items() if "tokens/s" in each}
    caption = None
    if gains:
        best = max(gains, key=gains.__getitem__)
        caption = f"{best} gained most in tokens/s here, {gains[best]:.1f} times" if gains[best] > 1.005 else None
    headline(figure, title or caption or "No step gained tokens/s here")
    figure.alt = "gains and costs: " + "; ".join(
        f"{name} " + ", ".join(f"{mark} {value:.2f}" for mark, value in each.items()) for name, each in factors.items()
    )
    return figure
