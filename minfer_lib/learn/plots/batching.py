"""Pictures of a batch: what padding costs, and how a packed row looks.

Invariant: every number in a caption is counted from what was drawn, and lengths are drawn to one scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..style import ACTIVATIONS, DATA, GROUP_COLOURS, INK, UNUSED, Picture, canvas, drawing, quiet
from .parts import finished, key, stacked, tile

WAITING = {"facecolor": "#efede8", "edgecolor": "#a9adb3", "hatch": "////"}


@drawing
def static_batch_waste(prompt_lens: Sequence[int], output_lens: Sequence[int], *, title: str | None = None) -> Picture:
    """A padded static batch to scale: a row for each request, a column for each position that is computed.

    Prompts are padded on the left to the longest, and every row runs until the longest answer is done. The pass over
    the prompts gives every request its first token; the last token of an answer is not fed back, so an answer of n
    tokens computes n - 1 columns.
    """
    longest, last = max(prompt_lens), max(output_lens)
    rows = [(longest - p, p, o - 1, last - o) for p, o in zip(prompt_lens, output_lens, strict=True)]
    height = 0.3 if len(rows) <= 10 else 0.17
    figure, ax = canvas(7.0, 1.35 + height * len(rows))
    kinds = ("padding", "prompt", "answer", "waiting for the longest")
    looks = dict(zip(kinds, (UNUSED, DATA, ACTIVATIONS, WAITING), strict=True))
    stacked(ax, {str(n): dict(zip(kinds, row, strict=True)) for n, row in enumerate(rows, 1)}, looks, lambda _: "", 1.0)
    ax.tick_params(axis="y", labelsize=9 if height > 0.2 else 7.5)
    ax.set_ylabel("request")
    ax.set_xlim(0, sum(rows[0]) * 1.005)
    ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    ax.set_xlabel("positions that are computed")
    quiet(ax, spines=("bottom",))
    sums = np.sum(rows, 0)
    total, (padding, _, _, waiting) = int(sums.sum()), sums / sums.sum()
    key(figure, {f"{name} {count:,}": looks[name] for name, count in zip(kinds, sums, strict=True)}, columnspacing=1.4)
    caption = f"{total:,} positions computed: {padding:.0%} are padding, {waiting:.0%} wait for the longest"
    return finished(figure, caption, title)


@drawing
def packed_row(
    lengths: Sequence[int], labels: Sequence[str] | None = None, *, first_positions: Sequence[int] | None = None,
    position_ids: Sequence[int] | None = None, last_rows: Sequence[int] | None = None, title: str | None = None,
) -> Picture:  # fmt: skip
    """The new tokens of one step twice: as a rectangle padded on the left, and below it as one row without padding.

    lengths: new tokens of each request. A square carries its token's position if `first_positions` says how many tokens
    each request has in the cache already, or if `position_ids` gives the row's positions one by one. `last_rows`
    outlines places of the row: those that get logits.
    """
    names = list(labels or [f"request {n + 1}" for n in range(len(lengths))])
    longest, total = max(lengths), sum(lengths)
    positions = list(position_ids) if position_ids is not None else None
    if positions is None and first_positions is not None:
        positions = [first + n for first, length in zip(first_positions, lengths, strict=True) for n in range(length)]
    margin = 0.35 + 0.075 * max(6, *(len(name) for name in names))  # inches
    side = min(0.36, (6.6 - margin) / max(total, longest))
    below = len(lengths) + 0.6
    figure, ax = canvas(7.0, 0.6 + side * (below + 1.1))
    size = 8.5 if side > 0.28 else 7.0
    digits = max((len(str(position)) for position in positions or ()), default=0)
    place = 0
    for row, length in enumerate(lengths):
        fill = GROUP_COLOURS[row % len(GROUP_COLOURS)]
        for column in range(longest - length):
            tile(ax, column, row, UNUSED)
        for n in range(length):
            fits = positions is not None and side * 72 > 0.72 * size * digits
            for x, y in ((longest - length + n, row), (place, below)):
                tile(ax, x, y, fill, str(positions[place]) if fits else "", size=size)
            place += 1
        ax.text(-0.3, row + 0.5, names[row], ha="right", va="center", size=9)
    for row in last_rows or ():
        ax.add_patch(Rectangle((row + 0.03, below + 0.03), 0.94, 0.94, fill=False, edgecolor=INK, linewidth=1.8))
    ax.text(-0.3, below + 0.5, "packed", ha="right", va="center", size=9, weight="bold")
    ax.set_xlim(-margin / side, (6.75 - margin) / side)
    ax.set_ylim(below + 1.1, 0)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    padded = len(lengths) * longest
    share = 1 - total / padded
    caption = f"{padded} squares padded, {total} packed: {share:.0%} of the rectangle is padding"
    return finished(figure, caption, title)
