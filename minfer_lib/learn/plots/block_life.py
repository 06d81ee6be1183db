"""What becomes of the rows of a KV cache: over the steps of a run, and at one moment in several engines.

Invariant: the rows of a moment add up to what the cache has; shares are taken of what was drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...errors import InvalidParameter
from ..style import ALERT, KV_CACHE, SOFT_INK, Picture, canvas, colour_of, drawing, engine_family, quiet
from .blocks import CACHED, EMPTY
from .parts import COUNT, finished, fitting, key, looks, stacked

if TYPE_CHECKING:
    from ...engine.trace import StepTrace

UNFILLED = "#b78fa0"
SET_ASIDE = {"facecolor": "#dfdcd4", "edgecolor": "#8d939b", "hatch": "...."}
REST = {"unfilled": (UNFILLED, "held, unfilled"), "cached": (CACHED, "cached"), "free": (EMPTY, "free")}


def _rows(steps: Sequence[StepTrace]) -> dict[str, np.ndarray]:
    """Rows of each kind after each step, [steps]."""
    filled = np.array([step.kv_tokens for step in steps])
    held = np.array([step.kv_held for step in steps])
    capacity = np.array([step.kv_capacity for step in steps])
    cached = np.array([len(s.blocks.cached) * s.blocks.block_size if s.blocks else 0 for s in steps])
    return {"filled": filled, "unfilled": held - filled, "cached": cached, "free": capacity - held - cached}


def preempted_at(steps: Sequence[StepTrace]) -> list[int]:
    """The steps (from 1) in which a request had to give its blocks back; in the first of a run nobody has to."""
    sums = [step.blocks.preemptions if step.blocks else 0 for step in steps]
    return [n for n, (before, after) in enumerate(itertools.pairwise(sums), 2) if after > before]


@drawing
def block_life(steps: Sequence[StepTrace] | Mapping[str, Sequence[StepTrace]], *, title: str | None = None) -> Picture:
    """The rows of a cache over the steps of a run: filled, held but unfilled, cached, free; of one run or of several.

    steps: of an engine with trace=True, or {label: steps}; slots and pages alike. A line marks each step in which a
    request was preempted. Raises `InvalidParameter` if there are none.
    """
    runs = dict(steps) if isinstance(steps, Mapping) else {"": steps}
    if not runs or not all(runs.values()):
        raise InvalidParameter("There are no steps to draw. Make the engine with trace=True, and take its `steps`.")
    figure, axes = canvas(
        7.0 if len(runs) == 1 else 8.6, 3.3, columns=len(runs), sharex=True, sharey=True, squeeze=False
    )
    shares, fills, preemptions, seen = {}, {}, 0, set()
    for ax, (label, run) in zip(axes[0], runs.items(), strict=True):
        colour = colour_of(label) if engine_family(label) else colour_of("paged" if run[0].blocks else "slots")
        fills[f"filled, {label}" if label else "filled"] = colour
        kinds, marks = _rows(run), preempted_at(run)
        preemptions += len(marks)
        seen |= {name for name, rows in kinds.items() if rows.any()}
        shares[label] = kinds["filled"].sum() / max(1, (kinds["filled"] + kinds["unfilled"]).sum())
        _stack(ax, kinds, colour, marks)
        ax.set_xlabel("step")
        if label:
            note = f", {len(marks)} preemption{'s' * (len(marks) != 1)}" if run[0].blocks else ""
            ax.set_title(f"{label}: {len(run):,} steps{note}", size=10, pad=6)
    axes[0, 0].set_ylabel("rows of the cache")
    axes[0, 0].set_xlim(0.5, max(len(run) for run in runs.values()) + 0.5)  # one scale for all panels
    axes[0, 0].set_ylim(0, 1.14 * max(step.kv_capacity for run in runs.values() for step in run))
    key(figure, fills | {name: look for kind, (look, name) in REST.items() if kind in seen}
        | ({"a preemption": ALERT} if preemptions else {}), columnspacing=1.3, handlelength=1.4)  # fmt: skip
    if "" in runs:
        found = f"{shares['']:.0%} of the rows that requests hold are filled"
        found += f"; {preemptions} preemption{'s' * (preemptions != 1)}" if steps[0].blocks else ""
    else:
        each = ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
        found = fitting(f"Filled, of the rows that requests hold: {each}", f"Filled: {each}")
    return finished(figure, found, title)


def _stack(ax: Axes, kinds: Mapping[str, np.ndarray], colour: str, marks: Sequence[int]) -> None:
    steps = len(kinds["filled"])
    edges, below = np.arange(steps + 1) + 0.5, np.zeros(steps)
    for name, rows in kinds.items():
        look = looks(colour if name == "filled" else REST[name][0])
        ax.stairs(below + rows, edges, baseline=below, fill=True, **look)
        below = below + rows
    capacity = int(below.max())
    ax.axhline(capacity, color=SOFT_INK, linestyle="--", linewidth=1.2)
    ax.annotate(f"{capacity:,} rows", (1.0, capacity), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                textcoords="offset points", xytext=(0, 2), size=9)  # fmt: skip
    if marks:
        ax.vlines(marks, 0, capacity, colors=ALERT, linewidth=1.1, alpha=0.75)
        ax.plot(marks, [capacity * 1.025] * len(marks), linestyle="none", marker="v", markersize=5, color=ALERT)
    ax.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_formatter(COUNT)
    quiet(ax)


@drawing
def kv_waste(rows: Mapping[str, Mapping[str, float]], *, title: str | None = None) -> Picture:
    """Of what a cache has reserved: what holds tokens, and what does not, for what reason. A bar each, to one scale.

    rows: {label: {"tokens": n, "unfilled": n, "idle": n, "free": n}}, of which any may be missing. unfilled: inside of
    what requests own (internal fragmentation). idle: free, and of no use to anybody, because it is too small or kept
    apart (external fragmentation). free: what the next request can have. Raises `InvalidParameter` for other kinds.
    """
    kinds = {"tokens": KV_CACHE, "unfilled": UNFILLED, "idle": SET_ASIDE, "free": EMPTY}
    names = dict(zip(kinds, ("hold tokens", "owned, unfilled", "free, but of no use", "free"), strict=True))
    for label, parts in rows.items():
        if unknown := sorted(set(parts) - set(kinds)):
            raise InvalidParameter(
                f"The part {unknown[0]!r} of {label!r} is not known. The parts are {', '.join(kinds)}."
            )
    totals = {label: float(sum(parts.values())) for label, parts in rows.items()}
    end = max([*totals.values(), 1.0])
    figure, ax = canvas(7.0, 1.2 + 0.46 * len(rows))
    shares = {label: {kind: size / (totals[label] or 1.0) for kind, size in parts.items()}
              for label, parts in rows.items()}  # fmt: skip
    stacked(ax, rows, kinds, lambda size: "", end)
    for y, (label, parts) in enumerate(shares.items()):
        told = ", ".join(f"{'of no use' if kind == 'idle' else kind} {_share(parts[kind])}"
                         for kind in kinds if parts.get(kind))  # fmt: skip
        ax.text(totals[label] + 0.012 * end, y, f"{totals[label]:,.0f} rows\n{told}", va="center", size=8)
    ax.set_xlim(0, end * 1.75)
    ax.set_ylim(top=-0.55)
    present = [kind for kind in kinds if any(parts.get(kind) for parts in rows.values())]
    key(figure, {names[kind]: kinds[kind] for kind in present}, columnspacing=1.4, handlelength=1.5)
    held = {label: parts.get("tokens", 0.0) for label, parts in shares.items()}
    each = ", ".join(f"{label} {share:.0%}" for label, share in held.items())
    short = (
        f"Between {min(held.values(), default=0):.0%} and {max(held.values(), default=0):.0%} of the rows hold a token"
    )
    alt = "; ".join(
        f"{label}: " + ", ".join(f"{name} {size:,.0f}" for name, size in parts.items()) for label, parts in rows.items()
    )
    return finished(figure, fitting(f"Rows that hold a token: {each}", short), title, alt)


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"
