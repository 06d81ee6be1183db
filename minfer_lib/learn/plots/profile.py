"""Pictures of where time goes: the operators of a profile, the forward passes of a request.

Invariant: times go in as measured, and shares are computed from all of them, also from those that are not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..style import ACTIVATIONS, CARD, DATA, GROUP_COLOURS, SOFT_INK, UNUSED, Picture, canvas, drawing, quiet
from ..values import shortened
from .parts import finished, key, told_bars

PREFILL_COLOUR, DECODE_COLOUR = DATA, ACTIVATIONS


class TimelineStep(NamedTuple):
    """One forward pass: its kind, how many tokens went in, and how long it took."""

    kind: Literal["prefill", "decode"]
    tokens: int
    seconds: float


@drawing
def time_by_operator(
    names: Sequence[str], ms: Sequence[float], groups: Sequence[str] | None = None, *, most: int = 10,
    title: str | None = None,
) -> Picture:  # fmt: skip
    """Where the time of a profile went: one bar an operator, the slowest on top, coloured by group if groups are given.

    `ms` are milliseconds of self time (not counting what an operator calls), so that they may be added up.
    """
    total = float(sum(ms)) or 1.0
    order = sorted(range(len(ms)), key=lambda i: -ms[i])
    shown, rest = order[:most], order[most:]
    kinds = sorted(set(groups)) if groups else []  # by name, so that a group keeps its colour from run to run
    colour = {kind: GROUP_COLOURS[n % len(GROUP_COLOURS)] for n, kind in enumerate(kinds)}
    bars = {shortened(names[i].removeprefix("aten::"), 34): (float(ms[i]), colour[groups[i]] if groups else DATA)
            for i in shown}  # fmt: skip
    if rest:
        bars[f"{len(rest)} others"] = (float(sum(ms[i] for i in rest)), UNUSED)
    figure, ax = canvas(7.0, 1.0 + 0.28 * len(bars) + (0.3 if groups else 0.0))
    told_bars(ax, bars, lambda value: f"{value:.3g} ms  ({value / total:.0%})", room=0.26)
    if groups:
        sums = {kind: sum(ms[i] for i in order if groups[i] == kind) for kind in kinds}
        key(figure, {f"{kind} {sums[kind] / total:.0%}": colour[kind] for kind in kinds}, ncols=min(4, len(kinds)))
    shares = {name: value / total for name, (value, _) in bars.items()}
    first = next(iter(shares))
    alt = "time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return finished(figure, f"{first} takes {shares[first]:.0%} of {total:.3g} ms", title, alt)


@drawing
def prefill_decode_timeline(
    steps: Sequence[TimelineStep | tuple[str, int, float]], *, title: str | None = None
) -> Picture:
    """The forward passes of one request on a time axis, with TTFT and TPOT marked where they are.

    `steps` are ("prefill" or "decode", tokens that went in, seconds), in order; each ends with a new token.
    """
    steps = [TimelineStep(*step) for step in steps]
    ends = np.cumsum([step.seconds for step in steps])
    starts = ends - [step.seconds for step in steps]
    prefills = [n for n, step in enumerate(steps) if step.kind == "prefill"]
    first = prefills[-1] if prefills else 0  # the step that ends with the first token
    ttft = float(ends[first])
    later = len(steps) - 1 - first
    tpot = (float(ends[-1]) - ttft) / later if later else None
    figure, ax = canvas(7.0, 2.15)
    end = float(ends[-1])
    thin = 0.8 if len(steps) < 60 else 0.2
    for start, step in zip(starts, steps, strict=True):
        fill = PREFILL_COLOUR if step.kind == "prefill" else DECODE_COLOUR
        ax.barh(0, step.seconds, left=start, height=0.5, color=fill, edgecolor=CARD, linewidth=thin)
    spans = [(0.0, ttft, f"TTFT {ttft * 1e3:,.0f} ms")]
    if tpot is not None:
        spans.append((ttft, end, f"{later} step{'s' * (later != 1)}, TPOT {tpot * 1e3:,.1f} ms"))
    look = {"arrowstyle": "<->", "color": SOFT_INK, "shrinkA": 0, "shrinkB": 0}
    for left, right, text in spans:
        ax.annotate("", (left, 0.42), (right, 0.42), arrowprops=look)
        at_the_edge = left == 0 and right < end * 0.28  # a text centred over a short span would leave the card
        x, side = (0.0, "left") if at_the_edge else ((left + right) / 2, "center")
        ax.text(x, 0.52, text, ha=side, va="bottom", size=9.5)
    many = "one step" if len(prefills) == 1 else f"{len(prefills)} steps"
    prompt = sum(steps[n].tokens for n in prefills)
    key(figure, {f"prefill: {prompt:,} tokens in {many}": PREFILL_COLOUR, "decode: one token a step": DECODE_COLOUR})
    ax.set_xlim(0, end * 1.01)
    ax.set_ylim(-0.32, 0.85)
    ax.set_yticks([])
    ax.set_xlabel("seconds since arrival")
    quiet(ax, spines=("bottom",))
    alt = f"prefill of {prompt} tokens, TTFT {ttft:.3g} s"
    if tpot is None:
        return finished(figure, "", title, alt)
    caption = f"The first token took as long as {ttft / tpot:.1f} later ones"
    return finished(figure, caption, title, f"{alt}; {later} decode steps, TPOT {tpot:.3g} s")
