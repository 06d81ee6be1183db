"""Pictures of engines under load: where more requests stop being answered, and how many are answered in time.

Invariant: what is drawn over the offered rate is what was achieved; a knee is marked only where the points show one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ...errors import InvalidParameter
from ..style import INK, SOFT_INK, Picture, canvas, drawing, engine_family, headline, line_style, quiet
from .labels import log_axis, told

BEND = 0.1  # a curve that rises above the straight line to its end by less, as a share of the whole, has no knee

RING = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgecolor": INK, "linestyle": "none"}


def knee(rates: Sequence[float], reached: Sequence[float]) -> float | None:
    """The offered rate from which on more of it gives little more; None where the curve is (almost) straight.

    That is the point which lies highest above the line from the origin to the last point (Satopaa et al. 2011, "Finding
    a kneedle in a haystack"), and never the last rate: nobody knows what comes after it.
    """
    x, y = np.asarray(rates) / rates[-1], np.asarray(reached) / (max(reached) or 1.0)
    above = y - x
    return float(rates[int(above.argmax())]) if above.max() > BEND else None


@drawing
def saturation(result: Any, *, title: str | None = None) -> Picture:
    """Requests/s achieved and time to first token over the offered rate, with the knee of each engine as a ring.

    `result`: of `bench.latency_curve`. TTFT is the 95th percentile where every point has 20 requests, else the median.
    """
    curves = _curves(result)
    tail = all(row.ttft_p95_ms is not None for rows in curves.values() for row in rows)
    name_of_ttft = "ttft_p95_ms" if tail else "ttft_ms"
    figure, (left, right) = canvas(8.0, 3.7, columns=2)
    knees = {}
    for name, rows in curves.items():
        rates = [row.x for row in rows]
        knees[name] = knee(rates, [row.requests_per_s for row in rows])
        for ax, figure_of in ((left, "requests_per_s"), (right, name_of_ttft)):
            _line(ax, name, rows, lambda row, f=figure_of: row.median(f), lambda row, f=figure_of: row.spread(f))
            if knees[name] is not None:
                at = rows[rates.index(knees[name])]
                ax.plot([at.x], [at.median(figure_of)], **RING)
    _offered(left, sorted({row.x for rows in curves.values() for row in rows}))
    left.set_title("requests/s achieved", size=10)
    right.set_title(f"time to first token, {'95th percentile' if tail else 'median'}, s", size=10)
    every = [row for rows in curves.values() for row in rows]
    log_axis(left, "y", [row.requests_per_s for row in every])
    log_axis(right, "y", [row.median(name_of_ttft) for row in every], unit=1e3)
    for ax in (left, right):
        _rate_axis(ax, sorted({row.x for rows in curves.values() for row in rows}))
    handles, _ = left.get_legend_handles_labels()
    handles += [Line2D([], [], **RING, label="knee")] * any(rate is not None for rate in knees.values())
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    offered = max((rate for rate in result.xs if np.isfinite(rate)), default=np.inf)
    caption = f"No engine is saturated at {offered:g} requests/s"
    reached = {name: max(row.requests_per_s for row in rows) for name, rows in curves.items()}
    slowest = min(reached, key=reached.__getitem__)
    if reached[slowest] < 0.9 * offered:
        caption = f"{slowest} answers at most {told(reached[slowest])} of {offered:g} requests/s"
    if any(rate is not None for rate in knees.values()):
        best = max(curves, key=lambda name: max(row.requests_per_s for row in curves[name]))
        most = max(row.requests_per_s for row in curves[best])
        end = "has no knee here" if knees[best] is None else f"has its knee at {knees[best]:g} offered"
        caption = f"{best} answers most, {told(most)} requests/s, and {end}"
    headline(figure, title or caption)
    figure.alt = "saturation: " + "; ".join(
        f"{name} at most {told(max(row.requests_per_s for row in rows))} requests/s, "
        + ("no knee" if knees[name] is None else f"knee at {knees[name]:g}") for name, rows in curves.items()
    )  # fmt: skip
    return figure


@drawing
def goodput(result: Any, ttft_ms: float, tpot_ms: float, *, title: str | None = None) -> Picture:
    """Requests/s that met both limits over the offered rate: more load helps until the queue breaks the first limit.

    `result`: of `bench.latency_curve`. ttft_ms, tpot_ms: limits in milliseconds. Drawn are the median of the runs and
    their spread.
    """
    curves = _curves(result)
    figure, ax = canvas(7.0, 3.5)

    def good(row: Any) -> list[float]:
        return [run.goodput(ttft_ms, tpot_ms) for run in row.counted]

    for name, rows in curves.items():
        _line(ax, name, rows, lambda row: np.median(good(row)), lambda row: (min(good(row)), max(good(row))))
    _offered(ax, result.xs)
    best = {name: max(rows, key=lambda row: np.median(good(row))) for name, rows in curves.items()}
    peaks = {name: float(np.median(good(row))) for name, row in best.items()}
    ax.set_ylim(0, 1.15 * max(max(good(row)) for rows in curves.values() for row in rows) or 1.0)
    ax.set_title(f"requests/s with TTFT ≤ {ttft_ms:g} ms and TPOT ≤ {tpot_ms:g} ms", size=10)
    _rate_axis(ax, sorted({row.x for rows in curves.values() for row in rows}))
    figure.legend(loc="outside lower center", ncols=min(5, len(curves) + 1))
    winner = max(peaks, key=peaks.__getitem__)
    caption = f"{winner} serves most in time: {told(peaks[winner])} requests/s, at {best[winner].x:g} offered"
    headline(figure, title or (caption if peaks[winner] else "No engine meets these limits at any rate"))
    figure.alt = f"goodput at TTFT {ttft_ms:g} ms and TPOT {tpot_ms:g} ms: " + "; ".join(
        f"{name} at most {told(peak)} requests/s" for name, peak in peaks.items()
    )
    return figure


def _curves(result: Any) -> dict[str, list[Any]]:
    curves = {
        name: [row for row in result.series(name) if row.ttft_ms and row.x < float("inf")] for name in result.engines
    }
    curves = {name: rows for name, rows in curves.items() if rows}
    if not curves:
        raise InvalidParameter("There is nothing to draw: no row has times to the first token.")
    return curves


def _line(ax: Any, name: str, rows: list[Any], middle: Callable[[Any], float], spread: Callable[[Any], Any]) -> None:
    """One engine's curve over the offered rate, with the spread of its runs."""
    style = line_style(name)
    ax.plot([row.x for row in rows], [middle(row) for row in rows], label=name, linewidth=1.6,
            linestyle="--" if engine_family(name) is None else "-", **{**style, "markersize": 5})  # fmt: skip
    for row in rows:
        ax.vlines(row.x, *spread(row), color=style["color"], alpha=0.35, linewidth=3)


def _offered(ax: Any, rates: Sequence[float]) -> None:
    every = np.geomspace(rates[0], rates[-1])
    ax.plot(every, every, color=SOFT_INK, linewidth=1.0, linestyle=":", label="all that is offered")


def _rate_axis(ax: Any, rates: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(rates))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    ax.set_xlabel("requests/s offered")
    quiet(ax)
