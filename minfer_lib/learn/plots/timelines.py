"""Pictures of scheduling: which request waits, prefills, decodes or is gone, step by step.

Invariant: every request has a lane of its own, in the order in which they were first seen, and what a caption says is
read from the steps that were drawn, counted from 1. A trace does not say when a request ends, only that no later step
knows it: the last recorded step is taken as the end of those in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from ...errors import InvalidParameter
from ..style import FAINT, INK, SOFT_INK, Picture, canvas, drawing, on_colour, quiet
from .parts import finished, key, tile
from .profile import DECODE_COLOUR, PREFILL_COLOUR

if TYPE_CHECKING:
    from ...engine.trace import StepTrace

WAITS_COLOUR = "#c9cdd3"
STATES = {"w": ("waits", WAITS_COLOUR), "p": ("prefill", PREFILL_COLOUR), "d": ("decode", DECODE_COLOUR),
          "x": ("done, still computed", {"facecolor": "#efede8", "edgecolor": "#a9adb3", "hatch": "////"})}  # fmt: skip
Owner = tuple[str, int]


@dataclass
class Lane:
    """What one request did: (step, tokens, decodes) of each step that it was part of, and the steps that it waited."""

    name: str
    chunks: list[tuple[int, int, bool]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last step that knows the request."""
        return max([*(step for step, _, _ in self.chunks[-1:]), *self.waited[-1:]])


def lanes(steps: Sequence[StepTrace]) -> dict[Owner, Lane]:
    """The requests of a run, in the order in which they were first seen: those of a step's chunks, then who waits.

    Raises `InvalidParameter` if there are none.
    """
    if not steps:
        raise InvalidParameter(
            "There are no steps to draw. Make the engine with trace=True and let it answer something; its `steps` are "
            "what goes in here."
        )
    found: dict[Owner, Lane] = {}

    def lane(owner: Owner) -> Lane:
        name = owner[0] if owner[1] == 0 else f"{owner[0]}.{owner[1]}"
        return found.setdefault(owner, Lane(name))

    for number, step in enumerate(steps, 1):
        for chunk in step.chunks:
            lane((chunk.request_id, chunk.index)).chunks.append((number, chunk.num_tokens, chunk.decodes))
        for owner in step.waiting:
            lane(tuple(owner)).waited.append(number)
    return found


def account(run: Mapping[Owner, Lane], steps: Sequence[StepTrace], step: int) -> str:
    """One line about a step (counted from 1): who waits, prefills, decodes, and who is not seen after it."""
    if not 1 <= step <= len(steps):
        raise InvalidParameter(f"step={step!r} is not possible: there are {len(steps)} steps, counted from 1.")
    now = steps[step - 1]
    prompts = [chunk.num_tokens for chunk in now.chunks if not chunk.decodes]
    leaves = [lane.name for lane in run.values() if lane.last == step]
    parts = [
        f"{len(now.waiting)} wait{'s' * (len(now.waiting) == 1)}" if now.waiting else "",
        f"{len(prompts)} prefill{'s' * (len(prompts) == 1)} {sum(prompts):,} tokens" if prompts else "",
        f"{now.num_decodes} decode{'s' * (now.num_decodes == 1)}" if now.num_decodes else "",
    ]
    if len(leaves) == 1:
        parts.append(f"request {leaves[0]} leaves")
    elif leaves:
        parts.append(f"{len(leaves)} leave")
    return f"Step {step} of {len(steps)}: " + ", ".join(part for part in parts if part)


def summary(run: Mapping[Owner, Lane], steps: Sequence[StepTrace]) -> str:
    """One line about the whole run."""
    most = max(len(step.chunks) for step in steps)
    waited = sum(bool(lane.waited) for lane in run.values())
    requests = "1 request" if len(run) == 1 else f"{len(run)} requests"
    taken = "1 step" if len(steps) == 1 else f"{len(steps):,} steps"
    return f"{requests} in {taken}, at most {most} at once; {waited} had to wait"


@drawing
def gantt(steps: Sequence[StepTrace], *, upto: int | None = None, title: str | None = None) -> Picture:
    """A lane for each request of a run: waiting, its prompt in chunks (tokens written in), decode steps, the end.

    `upto` marks a step (counted from 1) and fades what comes after it.
    """
    run = lanes(steps)
    caption = account(run, steps, upto) if upto is not None else summary(run, steps)
    height = 0.27 if len(run) <= 16 else max(0.15, 5.2 / len(run))
    figure, ax = canvas(8.4, 1.35 + height * len(run))
    per_step = 525 / len(steps)  # points
    apart = 0.0 if per_step < 4.0 else min(0.12, 0.7 / per_step)  # a hair between steps that can be told apart
    size = 7.5 if height > 0.2 else 6.5
    bars: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}
    for y, lane in enumerate(run.values()):
        served = {step: (tokens, decodes) for step, tokens, decodes in lane.chunks}
        for step in range(min([*served, *lane.waited]), lane.last + 1):
            later = upto is not None and step > upto
            tokens, decodes = served.get(step, (0, False))
            colour, half = DECODE_COLOUR if decodes else PREFILL_COLOUR, 0.37
            if not tokens:  # it waits, or it has begun and has no token in this step
                colour, half = (WAITS_COLOUR, 0.13) if step in lane.waited else (FAINT, 0.06)
            elif not decodes and not later and per_step > 0.68 * size * len(str(tokens)):
                ax.text(step, y + 0.03, str(tokens), ha="center", va="center", size=size, color=on_colour(colour))
            x0, x1 = step - 0.5, step + 0.5 - (apart if tokens else 0.0)
            corners = [(x0, y - half), (x1, y - half), (x1, y + half), (x0, y + half)]
            bars.setdefault((colour, later), []).append(corners)
        if lane.last in served and (upto is None or lane.last <= upto):
            ax.plot([lane.last + 0.5] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.3, zorder=3)
    for (colour, later), shapes in bars.items():
        faded = 0.25 if later else 1.0
        ax.add_collection(PolyCollection(shapes, facecolors=colour, alpha=faded, linewidths=0), autolim=False)
    if upto is not None:
        ax.axvspan(upto - 0.5, upto + 0.5, facecolor="none", edgecolor=INK, linewidth=1.2, zorder=4)
    names, every = [lane.name for lane in run.values()], 1 if len(run) <= 40 else 5
    ax.set_yticks(range(0, len(names), every), names[::every], size=8.5 if height > 0.2 else 7.5)
    ax.set_ylabel("request")
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    quiet(ax, spines=("bottom",))
    ax.set_xlim(0.5 - 0.002 * len(steps), len(steps) + 0.5 + 0.006 * len(steps))
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.set_xlabel("step")
    key(figure, {"waits": WAITS_COLOUR, "prefill, in tokens": PREFILL_COLOUR, "decode, one token": DECODE_COLOUR,
                 "the end": INK})  # fmt: skip
    return finished(figure, caption, title)


@drawing
def iteration_timeline(panels: Mapping[str, Mapping[str, str]], *, title: str | None = None) -> Picture:
    """Toy schedules, one below the other: {"static": {"A": "ppddxx", ...}, "continuous": {...}}, a character a step.

    w: waits. p: part of its prompt is computed. d: decodes. x: it is done, and its row is computed all the same, as in
    a static batch. A space: not there yet, or gone. Raises `InvalidParameter` for other characters.
    """
    for rows in panels.values():
        if unknown := sorted(set("".join(rows.values())) - set(STATES) - {" "}):
            raise InvalidParameter(
                f"The state {unknown[0]!r} is not known. Each step of a request is one of w (waits), p (prefill), "
                "d (decode), x (done, still computed) or a space."
            )
    longest = max(len(row) for rows in panels.values() for row in rows.values())
    label = 0.35 + 0.085 * max(len(name) for rows in panels.values() for name in rows)  # inches
    side = min(0.36, (6.7 - label) / longest)
    lines = sum(len(rows) for rows in panels.values())
    gap = 0.62 / side  # in squares, between panels: title and step numbers
    width = max(5.9, label + side * longest + 0.35)
    figure, ax = canvas(width, 0.98 + side * (lines + gap * len(panels)))
    y, notes = 0.0, []
    for name, rows in panels.items():
        text = "".join(rows.values())
        length = max(len(row.rstrip()) for row in rows.values())
        useful, idle = text.count("p") + text.count("d"), text.count("x")
        notes.append(f"{name} {length} steps")
        waste = f", {idle} of {useful + idle} computed squares are waste" if idle else ", no square is waste"
        ax.text(0.0, y + gap * 0.42, f"{name}: {length} steps{waste}", va="center", size=9.5, weight="bold")
        y += gap
        for step in range(longest) if side > 0.2 else range(0, longest, 5):
            ax.text(step + 0.5, y - 0.08, str(step + 1), ha="center", va="bottom", size=7.5, color=SOFT_INK)
        for request, row in rows.items():
            ax.text(-0.25, y + 0.5, request, ha="right", va="center", size=9)
            for step, state in enumerate(row):
                if state != " ":
                    tile(ax, step, y, STATES[state][1], gap=(0.05, 0.07))
            y += 1
    ax.set_xlim(-label / side, (width - 0.3 - label) / side)
    ax.set_ylim(y, 0)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    seen = {state for rows in panels.values() for row in rows.values() for state in row}
    key(figure, dict(look for state, look in STATES.items() if state in seen), columnspacing=1.4)
    return finished(figure, ", ".join(notes), title)
