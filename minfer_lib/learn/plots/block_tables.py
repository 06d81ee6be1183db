"""Block tables as translation of addresses: what a request sees as one text lies anywhere in memory.

Invariant: every arrow is an entry of a block table that was given, and a token stands in the row that the table
translates its position to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ...errors import InvalidParameter
from ..style import ALERT, CARD, INK, SOFT_INK, Picture, darker, drawing, on_colour
from .blocks import EMPTY, lighter, request_colours
from .parts import arrow, board, finished, tile
from .tokens import visible

ROOM_BETWEEN = 1.0  # inches, for the arrows


@drawing
def block_table(
    tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[str]], *, block_size: int, num_blocks: int,
    title: str | None = None,
) -> Picture:  # fmt: skip
    """On the left what each request sees, its tokens in blocks one after the other; on the right where these lie.

    tables: the block table of each request. tokens: the texts of its tokens, in order. A block in two tables is shared.
    Raises `InvalidParameter` if a table has too few blocks for its tokens, or a block that does not exist.
    """
    for name, table in tables.items():
        if len(tokens.get(name, ())) > len(table) * block_size or any(not 0 <= b < num_blocks for b in table):
            raise InvalidParameter(
                f"The block table {list(table)} of {name!r} does not hold its {len(tokens.get(name, ()))} tokens: "
                f"there are blocks 0 to {num_blocks - 1} of {block_size} tokens."
            )
    colours = request_colours(list(tables))
    size = 8.5 if block_size <= 4 else 7.5
    width = 7.0 if block_size <= 4 else 9.0
    label = 0.36  # inches, for numbers of blocks
    cell = (width - 0.5 - ROOM_BETWEEN - 2 * label - 0.55) / (2 * block_size)
    left_lines = sum(max(1, len(table)) + 1.25 for table in tables.values()) - 0.25
    lines = max(left_lines, num_blocks)
    height = 0.29 if lines <= 16 else max(0.17, 4.8 / lines)
    total = 0.95 + height * lines
    figure, ax = board(width, total)
    left, right, top = 0.25 + label, width - 0.25 - 0.55 - cell * block_size, 0.8
    for x, text in ((left - label, "what a request sees"), (right, "where it lies in memory")):
        ax.text(x, top - 0.16, text, size=9, color=SOFT_INK, va="center")
    holders: dict[int, list[tuple[str, int]]] = {}  # of a block: (request, which of its blocks it is)
    y = top + height * max(0.0, (num_blocks - left_lines) / 2)
    arrows = []
    for name, table in tables.items():
        ax.text(left - label, y + height * 0.6, name, size=10, weight="bold", va="center",
                color=darker(colours[name], 0.35))  # fmt: skip
        ax.text(left + block_size * cell, y + height * 0.6, f"table [{', '.join(map(str, table))}]", size=9,
                ha="right", va="center", color=SOFT_INK)  # fmt: skip
        y += height
        for n, block in enumerate(table):
            _block(ax, left, y, cell, height, [(colours[name], _part(tokens[name], n, block_size))], block_size, size)
            ax.text(left - 0.08, y + height / 2, str(n), size=8, ha="right", va="center", color=SOFT_INK)
            arrows.append((name, y + height / 2, block, len(holders.get(block, ()))))
            holders.setdefault(block, []).append((name, n))
            y += height
        y += height * (0.25 if table else 1.25)
    begin = top + height * max(0.0, (left_lines - num_blocks) / 2)
    for block in range(num_blocks):
        parts = [(colours[name], _part(tokens[name], n, block_size)) for name, n in holders.get(block, ())]
        y = begin + block * height
        _block(ax, right, y, cell, height, parts, block_size, size)
        ax.text(right + block_size * cell + 0.08, y + height / 2, str(block), size=8, va="center", color=SOFT_INK)
        if len(parts) > 1:
            ax.text(right + block_size * cell + 0.26, y + height / 2, f"×{len(parts)}", size=8.5, va="center",
                    weight="bold")  # fmt: skip
    for name, y, block, nth in arrows:
        end = begin + (block + 0.12 + 0.76 * (nth + 0.5) / len(holders[block])) * height
        arrow(ax, (left + block_size * cell + 0.03, y), (right - 0.03, end), colour=darker(colours[name], 0.35))
    filled = sum(max(len(_part(tokens[name], n, block_size)) for name, n in held) for held in holders.values())
    shared, unfilled = sum(len(held) > 1 for held in holders.values()), len(holders) * block_size - filled
    caption = f"{len(holders)} of {num_blocks} blocks in use" + (f", {shared} of them shared" if shared else "")
    return finished(figure, f"{caption}; {unfilled} cell{'s' * (unfilled != 1)} unfilled", title)


def _part(tokens: Sequence[str], n: int, block_size: int) -> Sequence[str]:
    return tokens[n * block_size : (n + 1) * block_size]


def _block(
    ax: Axes, x: float, y: float, cell: float, height: float, parts: Sequence[tuple[str, Sequence[str]]],
    block_size: int, size: float,
) -> None:  # fmt: skip
    """A block of `block_size` cells at (x, y), in a band for each of those who hold it: (colour, tokens in it)."""
    pad, inner = min(0.03, 0.1 * cell), height - 0.05
    band = inner / max(1, len(parts))
    for slot in range(block_size):
        for n, (colour, tokens) in enumerate(parts or [(EMPTY, ())]):
            fill = colour if slot < len(tokens) else lighter(colour, 0.78) if parts else EMPTY
            tile(ax, x + slot * cell, y + 0.025 + n * band, fill, w=cell, h=band, gap=(pad / 2, 0))
        texts = [tokens[slot] for _, tokens in parts if slot < len(tokens)]
        if texts:
            letters = int((cell - 0.06) * 72 / (0.64 * size))
            text = visible(texts[0] if letters > 6 else texts[0].lstrip(" ") or " ", letters) if letters >= 3 else ""
            several = len(parts) > 1
            ax.text(x + (slot + 0.5) * cell, y + height / 2, text, size=size, ha="center", va="center",
                    color=INK if several else on_colour(parts[0][0]),
                    bbox={"facecolor": CARD, "edgecolor": "none", "pad": 0.6, "alpha": 0.85} if several and text
                    else None)  # fmt: skip
    ax.add_patch(Rectangle((x + pad, y + 0.025), block_size * cell - 2 * pad, inner, fill=False, linewidth=0.9,
                           edgecolor=SOFT_INK if parts else "#c9c6be"))  # fmt: skip


@drawing
def placed_rows(
    rows: Sequence[int], table: Sequence[int], *, block_size: int, num_blocks: int, title: str | None = None
) -> Picture:
    """The rows of a pool, and in them the positions of one request that a function has put there.

    rows: for each position the row. Blocks of the table are outlined in the colour of the request's block; a row that
    belongs to another block than the table says, or two positions in one row, are marked red.
    """
    total = num_blocks * block_size
    left, top, cell = 0.3, 0.42, 6.4 / total
    figure, ax = board(7.0, 1.5)
    order = {block: n for n, block in enumerate(table)}
    colours = request_colours([str(n) for n in range(len(table))])
    at: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        at.setdefault(int(row), []).append(position)
    wrong = 0
    for row in range(total):
        block, here = row // block_size, at.get(row, [])
        mine = order.get(block)
        fine = len(here) == 1 and mine == here[0] // block_size and row % block_size == here[0] % block_size
        fill = EMPTY if mine is None else lighter(colours[str(mine)], 0.78)
        if here:
            fill = colours[str(mine)] if fine else ALERT
            wrong += 0 if fine else len(here)
        text = "" if not here else str(here[0]) if len(here) == 1 else f"{here[0]}+"
        tile(ax, left + row * cell, top + 0.12, fill, text, w=cell, h=0.36, size=8.5 if cell > 0.24 else 7,
             gap=(0.015, 0))  # fmt: skip
    for block in range(num_blocks):
        x, wide = left + block * block_size * cell, block_size * cell
        edge = {"fill": False, "linewidth": 0.9, "edgecolor": SOFT_INK if block in order else "#c9c6be"}
        ax.add_patch(Rectangle((x + 0.005, top + 0.08), wide - 0.01, 0.44, **edge))
        ax.text(x + wide / 2, top + 0.64, f"block {block}", ha="center", va="center", size=8, color=SOFT_INK)
    off = wrong + sum(not 0 <= int(row) < total for row in rows)
    note = f"all {len(rows)} positions are where the table [{', '.join(map(str, table))}] says"
    note = f"{off} of {len(rows)} positions are not where the table says" if off else note
    ax.text(left, top + 0.86, "the pool, row by row, with the positions in it", size=8.5, color=SOFT_INK, va="center")
    return finished(figure, f"Your rows: {note}", title, note)
