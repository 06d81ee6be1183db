"""The blocks of a paged KV cache in memory order: who holds each of them, and how much of it is filled.

Invariant: everything is counted from the block tables of one moment, and blocks are drawn to scale: one of eight tokens
is as wide as two of four. A request keeps its colour from step to step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb

from ...errors import InvalidParameter
from ..style import CARD, INK, SOFT_INK, Picture, canvas, drawing, headline, on_colour
from .parts import CARD_BEHIND, Look, fitting, key, looks

if TYPE_CHECKING:
    from ...engine.trace import BlockMap, StepTrace

# Nine colours that keep apart for readers with colour vision deficiencies: "muted", P. Tol, Colour Schemes, 2021
REQUEST_COLOURS = (
    "#88ccee", "#cc6677", "#ddcc77", "#117733", "#44aa99", "#aa4499", "#999933", "#332288", "#882255",
)  # fmt: skip
EMPTY = "#ebe9e3"
CACHED = {"facecolor": "#e6e5e1", "edgecolor": "#8d939b", "hatch": "/////"}
GAP = 0.035  # inches between blocks


def lighter(colour: str, share: float = 0.72) -> str:
    """A colour mixed with the card, for what a request holds and has not filled."""
    return to_hex([(1 - share) * c + share * card for c, card in zip(to_rgb(colour), to_rgb(CARD), strict=True)])


def request_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each of the names, in order; with more than nine of them colours come again."""
    return {name: REQUEST_COLOURS[n % len(REQUEST_COLOURS)] for n, name in enumerate(names)}


@dataclass(frozen=True)
class Contents:
    """The blocks of a moment. holders: for each that is in use, the name of each holder and the tokens it has in it."""

    block_size: int
    num_blocks: int
    names: tuple[str, ...]  # of all requests that have blocks, in natural order
    holders: Mapping[int, tuple[tuple[str, int], ...]]
    cached: tuple[int, ...]

    @classmethod
    def of(cls, blocks: BlockMap) -> Contents:
        size = blocks.block_size
        holders: dict[int, list[tuple[str, int]]] = {}
        for table in blocks.tables:
            name = table.request_id if table.index == 0 else f"{table.request_id}.{table.index}"
            for n, block in enumerate(table.blocks):
                holders.setdefault(block, []).append((name, min(size, table.tokens - n * size)))
        names = {name for held in holders.values() for name, _ in held}
        return cls(size, blocks.num_blocks, tuple(sorted(names, key=_natural)),
                   {block: tuple(held) for block, held in holders.items()}, blocks.cached)  # fmt: skip

    @property
    def held_rows(self) -> int:
        return len(self.holders) * self.block_size

    @property
    def unfilled_rows(self) -> int:
        """Rows of blocks in use that hold no token: the ends of last blocks."""
        return sum(self.block_size - max(tokens for _, tokens in held) for held in self.holders.values())

    @property
    def shared(self) -> int:
        return sum(len(held) > 1 for held in self.holders.values())

    @property
    def free(self) -> int:
        """Blocks that are neither in use nor cached."""
        return self.num_blocks - len(self.holders) - len(self.cached)

    @property
    def caption(self) -> str:
        used = f"{len(self.holders)} of {self.num_blocks} blocks used"
        rest = f"{self.shared} shared, {len(self.cached)} cached, {self.free} empty"
        waste = f"{self.unfilled_rows} of {self.held_rows} rows unfilled"
        return fitting(f"{used}, {waste}; {rest}", f"{used}; {rest}") if self.holders else f"{used}; {rest}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts request 10 behind request 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


@drawing
def block_map(blocks: StepTrace | BlockMap, *, title: str | None = None) -> Picture:
    """All blocks of a paged cache in memory order, filled as far as they hold tokens, in the colour of the request.

    blocks: a step of an engine with kv_cache="paged" and trace=True, or its `blocks`. Raises `InvalidParameter` for a
    step of slots.
    """
    at = getattr(blocks, "blocks", blocks)
    if at is None:
        raise InvalidParameter(
            "This step has no block map; only a paged cache has one. "
            "Make the engine with kv_cache='paged' and trace=True, and give one of its steps."
        )
    return draw_blocks(at, title=title)


def draw_blocks(
    blocks: BlockMap, *, title: str | None = None, colours: Mapping[str, str] | None = None, width: float = 7.0,
    note: str | None = None, lines: int = 1,
) -> Picture:  # fmt: skip
    """`block_map` with the colours of a whole run, another width (inches), a line below, and room for so many lines of
    legend, so that all pictures of a run have one size. Call it inside of a `drawing`."""
    here = Contents.of(blocks)
    colours = colours or request_colours(here.names)
    across = _columns(here.num_blocks, here.block_size)
    rows = -(-here.num_blocks // across)
    height = 0.34 if rows <= 8 else max(0.09, 2.8 / rows)  # inches
    left, room = 0.5, width - 0.75
    token = room / (across * here.block_size)  # inches
    entries = _entries(here, colours)
    wide = sum(0.38 + 0.075 * len(name) for name in entries)  # inches, in one line
    needed = max(1, -(-wide // (width - left)))
    legend = 0.21 * max(needed, lines) + 0.12
    total = 0.56 + height * rows + (0.3 if note else 0.0) + legend
    figure, ax = canvas(width, total)
    figure.set_layout_engine("none")
    ax.set_position((left / width, 1 - (0.47 + height * rows) / total, room / width, height * rows / total))
    ax.set_xlim(0, room)
    ax.set_ylim(rows, 0)
    ax.axis("off")
    _draw_cells(ax, here, colours, across, token, height)
    for row in range(0, rows, max(1, round(0.16 / height))):
        ax.text(-0.07, row + 0.5, str(row * across), ha="right", va="center", size=7.5, color=SOFT_INK)
    headline(figure, title or here.caption)
    if note:
        figure.text(left / width, (legend + 0.13) / total, note, size=9.5, va="center")
    key(figure, entries, loc="upper left", bbox_to_anchor=((left - 0.1) / width, legend / total),
        ncols=int(-(-len(entries) // needed)), fontsize=8.5, handlelength=1.3, columnspacing=1.0, handletextpad=0.5,
        labelspacing=0.35)  # fmt: skip
    figure.alt = (f"{title}: " if title else "") + here.caption
    return figure


def _columns(num_blocks: int, block_size: int) -> int:
    """Blocks in a row: of 32 tokens, or of twice as many again and again, until six rows are enough."""
    tokens = 32
    while num_blocks * block_size > 6 * tokens:
        tokens *= 2
    return max(1, min(tokens // block_size, num_blocks, 64 if num_blocks <= 4096 else 128))


def _draw_cells(ax: Axes, here: Contents, colours: Mapping[str, str], across: int, token: float, height: float) -> None:
    gap_x, gap_y = min(GAP, 0.22 * token * here.block_size), min(GAP / height, 0.2)
    corners: dict[str, list[list[tuple[float, float]]]] = {}
    cached = set(here.cached)

    def place(fill: str, x: float, y: float, w: float, h: float) -> None:
        if w > 0:
            corners.setdefault(fill, []).append([(x, y), (x + w, y), (x + w, y + h), (x, y + h)])

    full = token * here.block_size - gap_x
    for block in range(here.num_blocks):
        x, y = (block % across) * token * here.block_size, block // across + gap_y / 2
        held = here.holders.get(block, ())
        if not held:
            place("cached" if block in cached else EMPTY, x, y, full, 1 - gap_y)
            continue
        band = (1 - gap_y) / len(held)
        for n, (name, tokens) in enumerate(held):
            filled = full * tokens / here.block_size
            place(colours[name], x, y + n * band, filled, band)
            place(lighter(colours[name]), x + filled, y + n * band, full - filled, band)
        text = f"×{len(held)}" if len(held) > 1 else held[0][0]
        if text and full > 0.06 + 0.075 * len(text) and height >= 0.17:
            covered, alone = held[0][1] >= here.block_size / 2, len(held) == 1
            ax.text(x + full / 2, y + 0.5 - gap_y / 2, text, ha="center", va="center", size=8,
                    color=on_colour(colours[held[0][0]]) if alone and covered else INK,
                    bbox=None if alone else CARD_BEHIND)  # fmt: skip
    for fill, shapes in corners.items():
        ax.add_collection(PolyCollection(shapes, **looks(CACHED if fill == "cached" else fill)), autolim=False)
    if token >= 0.085 and here.block_size > 1:  # where one token ends and the next begins
        for n in range(here.num_blocks):
            x, y = (n % across) * token * here.block_size, n // across + 1 - gap_y / 2
            ticks = [x + full * slot / here.block_size for slot in range(1, here.block_size)]
            ax.vlines(ticks, y - 0.2, y, colors=CARD, linewidth=0.8)


def _entries(here: Contents, colours: Mapping[str, str]) -> dict[str, Look]:
    """The legend: {label: look}."""
    shown = here.names if len(here.names) <= 10 else here.names[:9]
    entries: dict[str, Look] = {name if n else f"request {name}": colours[name] for n, name in enumerate(shown)}
    if len(here.names) > len(shown):
        entries[f"and {len(here.names) - len(shown)} more"] = "none"
    if here.unfilled_rows:
        entries["unfilled"] = lighter(colours[here.names[0]])
    if here.shared:
        entries["×n shared"] = "none"
    return entries | ({"cached": CACHED} if here.cached else {}) | ({"empty": EMPTY} if here.free else {})
