"""Pictures of an engine under load: how many run, what a step is made of, how latency grows with the rate.

Invariant: means over time are weighted by time, and a headline that compares takes both numbers at the same rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ...errors import InvalidParameter
from ..style import INK, SOFT_INK, Picture, canvas, colour_of, drawing, engine_family, headline, line_style, quiet
from .profile import DECODE_COLOUR, PREFILL_COLOUR

if TYPE_CHECKING:
    from ...engine.trace import StepTrace

PEER_LINES = ("-", "--", ":")


@drawing
def occupancy(
    times: Sequence[float], running: Sequence[int], limit: int, *, engine: str = "slots", title: str | None = None
) -> Picture:
    """How many requests run at each moment: `running[n]` from `times[n]` (seconds) until the next moment.

    `times` may have one moment more than `running` has numbers: the end. Without it the last number is drawn up to its
    moment and does not count in the mean. `limit`: as many could run.
    """
    moments = np.asarray(times, dtype=float)
    counts = np.asarray(running, dtype=float)
    if len(moments) == len(counts):
        counts = counts[:-1] if len(counts) > 1 else counts
        moments = moments if len(moments) > 1 else np.append(moments, moments[0] + 1.0)
    moments = moments - moments[0]
    spans = np.diff(moments)
    mean = float((spans * counts).sum() / spans.sum()) if spans.sum() > 0 else float(counts.mean())
    figure, ax = canvas(7.0, 2.7)
    ax.stairs(counts, moments, fill=True, color=colour_of(engine), alpha=0.75, linewidth=0)
    for height, name in ((limit, f"at most {limit}"), (mean, f"mean {mean:.1f}")):
        ax.axhline(height, color=SOFT_INK, linestyle="--" if height == limit else ":", linewidth=1.2)
        ax.annotate(name, (1.0, height), xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(5, 0),
                    va="center" if abs(limit - mean) > 0.07 * limit or height == limit else "top", size=9,
                    annotation_clip=False)  # fmt: skip
    ax.set_xlim(0, moments[-1])
    ax.set_ylim(0, limit * 1.08)
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlabel("seconds")
    ax.set_ylabel("requests that run")
    quiet(ax, grid="y")
    caption = f"{mean:.1f} of {limit} places are taken on average, {mean / limit:.0%}"
    headline(figure, title or caption)
    figure.alt = caption
    return figure


@drawing
def running_requests(
    runs: Mapping[str, Sequence[StepTrace]], *, limit: int | None = None, unit: Literal["step", "s"] | None = None,
    title: str | None = None,
) -> Picture:  # fmt: skip
    """How many requests the steps of several engines computed: {label: steps}, a line each.

    unit: the axis counts steps or seconds; None: seconds if all traces have times. limit: as many could run. Means are
    over the axis: of seconds the time that steps took, pauses left out. Raises `InvalidParameter` without steps.
    """
    if not runs or not all(runs.values()):
        raise InvalidParameter("There are no steps to draw. Make the engine with trace=True, and take its `steps`.")
    timed = all(step.ended > step.began for steps in runs.values() for step in steps)
    by_time = timed if unit is None else unit == "s"
    figure, ax = canvas(7.0, 3.0)
    means, highest, others = {}, 0, 0
    for label, steps in runs.items():
        counts = np.array([len(step.chunks) for step in steps])
        edges = np.arange(len(steps) + 1) + 0.5
        spans = np.ones(len(steps))
        if by_time:
            edges = np.array([*(step.began for step in steps), steps[-1].ended]) - steps[0].began
            spans = np.array([step.seconds for step in steps])
        means[label] = float((counts * spans).sum() / (spans.sum() or 1.0))
        highest = max(highest, int(counts.max()))
        peer = engine_family(label) is None
        ax.stairs(counts, edges, linewidth=1.8, color=INK if peer else colour_of(label),
                  linestyle=PEER_LINES[others % len(PEER_LINES)] if peer else "-",
                  label=f"{label}: {means[label]:.1f} on average, at most {int(counts.max())}")  # fmt: skip
        others += peer
    if limit is not None:
        ax.axhline(limit, color=SOFT_INK, linestyle="--", linewidth=1.2)
        ax.annotate(f"at most {limit}", (1.0, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                    textcoords="offset points", xytext=(0, 2), size=9)  # fmt: skip
    ax.set_xlim(left=0 if by_time else 0.5)
    ax.set_ylim(0, max(highest, limit or 0) * 1.14)
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(9, integer=not by_time))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.set_xlabel("seconds" if by_time else "step")
    ax.set_ylabel("requests in a step")
    quiet(ax, grid="y")
    figure.legend(loc="outside lower center", ncols=min(2, len(runs)), columnspacing=1.3)
    caption = "Requests in a step, on average: " + ", ".join(f"{label} {mean:.1f}" for label, mean in means.items())
    headline(figure, title or caption)
    figure.alt = caption
    return figure


@drawing
def step_composition(steps: Sequence[StepTrace], *, budget: int | None = None, title: str | None = None) -> Picture:
    """The tokens of each step, those of prompts and those that were fed back, stacked; `budget` is the line above."""
    prefill = np.array([sum(c.num_tokens for c in step.chunks if not c.decodes) for step in steps])
    decode = np.array([sum(c.num_tokens for c in step.chunks if c.decodes) for step in steps])
    edges = np.arange(len(steps) + 1) + 0.5
    figure, ax = canvas(7.0, 2.9)
    ax.stairs(decode, edges, fill=True, color=DECODE_COLOUR, label=f"decode: {decode.sum():,} tokens")
    ax.stairs(decode + prefill, edges, baseline=decode, fill=True, color=PREFILL_COLOUR,
              label=f"prefill: {prefill.sum():,} tokens")  # fmt: skip
    highest = int((prefill + decode).max())
    if budget is not None:
        ax.axhline(budget, color=SOFT_INK, linestyle="--", linewidth=1.2)
        ax.annotate(f"budget {budget:,}", (1.0, budget), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                    textcoords="offset points", xytext=(0, 2), size=9)  # fmt: skip
    ax.set_xlim(0.5, len(steps) + 0.5)
    ax.set_ylim(0, max(highest, budget or 0) * 1.13)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    ax.set_xlabel("step")
    ax.set_ylabel("tokens")
    quiet(ax, grid="y")
    figure.legend(loc="outside lower center", ncols=2)
    mixed = int(((prefill > 0) & (decode > 0)).sum())
    caption = f"{len(steps):,} steps of at most {highest:,} tokens; {mixed:,} of them mix prefill and decode"
    headline(figure, title or caption)
    figure.alt = caption
    return figure


@drawing
def latency_curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    ylabel: str,
    xlabel: str = "requests a second",
    log_y: bool = True,
    title: str | None = None,
) -> Picture:
    """A latency (seconds) against the rate of arrivals, a line for each engine {name: (rates, latencies)}."""
    figure, ax = canvas(7.0, 3.3)
    peers = 0
    for name, (rates, seconds) in series.items():
        look = line_style(name)
        if engine_family(name) is None:  # peers share ink and marker
            look["linestyle"] = PEER_LINES[peers % len(PEER_LINES)]
            peers += 1
        ax.plot(rates, seconds, label=name, **look)
    if log_y:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.set_xlim(left=0)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    quiet(ax, grid="y")
    figure.legend(loc="outside lower center", ncols=min(3, len(series)))
    points = {name: dict(zip(rates, seconds, strict=True)) for name, (rates, seconds) in series.items()}
    finite = {name: {r for r, s in p.items() if np.isfinite(s)} for name, p in points.items()}
    shared = set.intersection(*finite.values())
    finding = None
    if shared and len(series) > 1:
        rate = max(shared)
        best, worst = (choose(points, key=lambda name: points[name][rate]) for choose in (min, max))
        if points[best][rate] < points[worst][rate]:
            unit = xlabel.replace("requests", "request", 1) if rate == 1 else xlabel
            finding = f"At {rate:.3g} {unit}: {best} {points[best][rate]:.3g}, {worst} {points[worst][rate]:.3g}"
    headline(figure, title or finding)
    figure.alt = f"{ylabel} over {xlabel}: " + (finding or ", ".join(series))
    return figure
