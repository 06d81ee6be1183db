"""The picture of what the steps of an engine were made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..style import SOFT_INK, Picture, canvas, drawing, headline, quiet
from .profile import DECODE_COLOUR, PREFILL_COLOUR

if TYPE_CHECKING:
    from ...engine.trace import StepTrace


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
