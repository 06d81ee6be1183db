"""Pictures of a batch: what padding costs, how a packed row looks, how full steps and slots are, what latency does.

Invariant: every number in a caption is counted from what was drawn, and lengths are drawn to one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..style import (
    ACTIVATIONS,
    DATA,
    GROUP_COLOURS,
    INK,
    SOFT_INK,
    UNUSED,
    Picture,
    canvas,
    colour_of,
    drawing,
    format_bytes,
    headline,
    on_colour,
    quiet,
)  # fmt: skip

if TYPE_CHECKING:
    from ...engine.llm_engine import LLMEngine

PROMPT_COLOUR, ANSWER_COLOUR = DATA, ACTIVATIONS
WAITING = {"facecolor": "#efede8", "edgecolor": "#a9adb3", "hatch": "////", "linewidth": 0.0}


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


def waste_shares(
    prompt_lens: Sequence[int], output_lens: Sequence[int], batch_size: int | None = None
) -> tuple[float, float]:
    """What share of the positions that padded static batches compute is padding, and what waits for the longest."""
    columns = np.array([row for batch in static_batches(prompt_lens, output_lens, batch_size) for row in batch])
    padding, _, _, waiting = columns.sum(0) / columns.sum()
    return float(padding), float(waiting)


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
    looks = [{"color": UNUSED}, {"color": PROMPT_COLOUR}, {"color": ANSWER_COLOUR}, WAITING]
    sums, y, middles, ticks = np.zeros(4, dtype=int), 0.0, [], []
    for batch in batches:
        middles.append(y + (len(batch) - 1) / 2)
        for row in batch:
            left = 0
            for width, look in zip(row, looks, strict=True):
                ax.add_patch(Rectangle((left, y - 0.42), width, 0.84, **({"linewidth": 0} | look)))
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
    padding, prompt, answer, waiting = (int(n) for n in sums)
    total = int(sums.sum())
    caption = (
        f"{total:,} positions computed: {padding / total:.0%} are padding, {waiting / total:.0%} wait for the longest"
    )
    headline(figure, title or caption)
    counts = {"padding": padding, "prompt": prompt, "answer": answer, "waiting for the longest": waiting}
    handles = [
        Rectangle((0, 0), 1, 1, **({"linewidth": 0} | look), label=f"{name} {count:,}")
        for look, (name, count) in zip(looks, counts.items(), strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, columnspacing=1.4)
    figure.alt = f"{len(batches)} padded batch{'es' if several else ''}: {caption}"
    return figure


@drawing
def packed_row(
    lengths: Sequence[int],
    labels: Sequence[str] | None = None,
    *,
    first_positions: Sequence[int] | None = None,
    position_ids: Sequence[int] | None = None,
    last_rows: Sequence[int] | None = None,
    title: str | None = None,
) -> Picture:
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
            ax.add_patch(Rectangle((column + 0.05, row + 0.05), 0.9, 0.9, color=UNUSED, linewidth=0))
        for n in range(length):
            for x, y in ((longest - length + n, row), (place, below)):
                ax.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, color=fill, linewidth=0))
                if positions is not None and side * 72 > 0.72 * size * digits:
                    ax.text(x + 0.5, y + 0.52, str(positions[place]), ha="center", va="center", size=size,
                            color=on_colour(fill))  # fmt: skip
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
    headline(figure, title or caption)
    figure.alt = caption
    return figure


@drawing
def slots_map(
    used: LLMEngine | Sequence[int | None],
    reserved: int | None = None,
    *,
    labels: Sequence[str | None] | None = None,
    bytes_per_token: float | None = None,
    title: str | None = None,
) -> Picture:
    """The slots of a cache, a row each: what is reserved, and what of it holds tokens of a request.

    used: tokens in each slot, None for a free one, with slots of `reserved` tokens; or an `LLMEngine` at work, from
    which all of it is taken.
    """
    if not isinstance(used, Sequence):
        cache = used.cache
        held = {request.table.blocks[0]: request for request in used.scheduler.running}
        owners = [held.get(slot) for slot in range(cache.num_blocks)]
        labels = [owner and owner.request_id for owner in owners]
        reserved, bytes_per_token = cache.block_size, cache.bytes_per_token
        used = [None if owner is None else owner.num_computed for owner in owners]
    height = 0.3 if len(used) <= 12 else max(0.085, 5.0 / len(used))
    figure, ax = canvas(7.0, 1.05 + height * len(used))
    for slot, tokens in enumerate(used):
        ax.barh(slot, reserved, height=0.74, color=UNUSED if tokens is not None else "#efede8")
        ax.barh(slot, tokens or 0, height=0.74, color=colour_of("slots"))
        if height >= 0.15:
            owner = f"{labels[slot]}: " if labels and labels[slot] else ""
            text = "free" if tokens is None else f"{owner}{tokens:,} of {reserved:,}"
            ax.text(reserved * 1.012, slot, text, va="center", size=9 if height > 0.2 else 7.5,
                    color=SOFT_INK if tokens is None else INK)  # fmt: skip
    every = 1 if height >= 0.15 else 8
    ax.set_yticks(
        range(0, len(used), every), [f"slot {n}" for n in range(0, len(used), every)], size=9 if height > 0.2 else 7.5
    )
    ax.set_xlim(0, reserved * (1.3 if height >= 0.15 else 1.01))
    ax.set_ylim(len(used) - 0.5, -0.5)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    quiet(ax, spines=())
    owned = [tokens for tokens in used if tokens is not None]
    share = sum(owned) / (reserved * len(used))
    caption = f"{len(owned)} of {len(used)} slots are taken, {share:.0%} of all that is reserved holds a token"
    if bytes_per_token is not None:
        total = reserved * len(used) * bytes_per_token
        caption = f"{len(owned)} of {len(used)} slots are taken, {share:.0%} of {format_bytes(total)} holds a token"
    headline(figure, title or caption)
    looks = ((colour_of("slots"), "used"), (UNUSED, "reserved, empty"), ("#efede8", "free"))
    handles = [Rectangle((0, 0), 1, 1, facecolor=c, edgecolor=SOFT_INK, linewidth=0.3, label=n) for c, n in looks]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.alt = caption
    return figure
