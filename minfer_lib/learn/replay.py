"""A recorded run, replayed step by step on its timeline.

Invariant: the line above the timeline and the timeline are made from the same traces, which no slider changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..engine.trace import StepTrace
from ..errors import InvalidParameter
from . import plots
from .plots.lanes import account, lanes
from .sliders import Gallery, Slider, explore
from .style import Picture


def batch_replay(
    steps: Sequence[StepTrace], *, unit: Literal["step", "s"] = "step", at: Sequence[int] | None = None
) -> Gallery | None:
    """Chapter 4: the timeline of a run up to a step, and one line about it: who waits, prefills, decodes, leaves.

    steps: of an engine with trace=True. `at`: the steps (from 1) of the static picture; None: the liveliest one, and
    the one at three quarters of the run. Raises `InvalidParameter` for steps that are not there.
    """
    recorded = tuple(steps)
    telling = telling_steps(recorded) if at is None else tuple(at)
    if not telling:
        raise InvalidParameter("at=() is not possible: it must name one step or more, counted from 1.")

    def draw(step: int) -> Picture:
        return plots.gantt(recorded, upto=step, unit=unit)

    return explore(draw, step=Slider(1, len(recorded), 1, telling[0]), positions=[{"step": step} for step in telling])


def telling_steps(steps: Sequence[StepTrace]) -> tuple[int, ...]:
    """The first of the steps with most of waiting, prefill, decode and an end in it, and the one at three quarters."""
    run = lanes(steps)
    lines = [account(run, steps, step) for step in range(1, len(steps) + 1)]
    lively = [sum(word in line for word in (" wait", " prefill", " decode", " leave")) for line in lines]
    first, late = lively.index(max(lively)) + 1, max(1, round(0.75 * len(steps)))
    return (first,) if first == late else (first, late)
