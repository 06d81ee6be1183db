"""Pictures of a batch: what padding costs, and how a packed row looks.

Invariant: every number in a caption is counted from what was drawn, and lengths are drawn to one scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..style import ACTIVATIONS, DATA, GROUP_COLOURS, INK, UNUSED, Picture, canvas, drawing, quiet
from .parts import finished, key, tile

WAITING = {"facecolor": "#efede8", "edgecolor": "#a9adb3", "hatch": "////"}


def static_batches(
    prompt_lens: Sequence[int], output_lens: Sequence[int], batch_size: int | None = None
) -> list[list[tuple[int, int, int, int]]]:
    """(padding, prompt, answer, waiting) columns of each request in padded batches of `batch_size`, in arrival order.

    The pass over the prompts gives every request its first token, each later one feeds a token back. The last token of
    an answer is not fed back, so an answer of n tokens computes n - 1 columns.
    """
    pairs = list(zip(prompt_lens, output_lens, strict=True))
    size = batch_size or len(pairs)
    batches = [pairs[begin : begin + size] for begin in range(0, len(pairs), size)]
    rows = []
    for batch in batches:
        longest_prompt, longest_answer = max(p for p, _ in batch), max(o for _, o in batch)
        rows.append([(longest_prompt - p, p, o - 1, longest_answer - o) for p, o in batch])
    return rows


@drawing
def static_batch_waste(
    prompt_lens: Sequence[int], output_lens: Sequence[int], *, batch_size: int | None = None, title: str | None = None
) -> Picture:
    """Padded static batches to scale: a row for each request, a column for each position that is computed.

    Prompts are padded on the left to the longest of their batch, and every row runs until the longest answer is done.
    """
    batches = static_batches(prompt_lens, output_lens, batch_size)
    height = 0.3 if len(prompt_lens) <= 10 else 0.17
    figure, ax = canvas(7.0, 1.35 + height * (len(prompt_lens) + 0.8 * (len(batches) - 1)))
    looks = [UNUSED, DATA, ACTIVATIONS, WAITING]
    sums, y, middles, ticks = np.zeros(4, dtype=int), 0.0, [], []
    for batch in batches:
        middles.append(y + (len(batch) - 1) / 2)
        for row in batch:
            left = 0
            for width, look in zip(row, looks, strict=True):
                tile(ax, left, y - 0.42, look, w=width, h=0.84, gap=(0, 0))
                left += width
            sums += row
            ticks.append(y)
            y += 1
        y += 0.8
    several = len(batches) > 1
    names = [f"batch {n + 1}" for n in range(len(batches))] if several else [f"{n + 1}" for n in range(len(ticks))]
    ax.set_yticks(middles if several else ticks, names, size=9 if several or height > 0.2 else 7.5)
    if not several:
        ax.set_ylabel("request")
    ax.set_xlim(0, max(sum(row) for batch in batches for row in batch) * 1.005)
    ax.set_ylim(y - 1.3, -0.6)
    ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    ax.set_xlabel("positions that are computed")
    ax.tick_params(axis="y", length=0)
    quiet(ax, spines=("bottom",))
    total, (padding, _, _, waiting) = int(sums.sum()), sums / sums.sum()
    caption = f"{total:,} positions computed: {padding:.0%} are padding, {waiting:.0%} wait for the longest"
    kinds = ("padding", "prompt", "answer", "waiting for the longest")
    key(figure, {f"{name} {count:,}": look for name, count, look in zip(kinds, sums, looks, strict=True)},
        columnspacing=1.4)  # fmt: skip
    return finished(figure, caption, title, f"{len(batches)} padded batch{'es' if several else ''}: {caption}")


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
