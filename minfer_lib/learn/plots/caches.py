"""Pictures of the KV cache: what is computed again without one, who sees whom, and what of the room is used.

Invariant: every number in a caption is counted from what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from ..style import (
    ENGINE_COLOURS,
    KV_CACHE,
    SOFT_INK,
    UNUSED,
    Picture,
    canvas,
    colour_of,
    drawing,
    format_bytes,
    headline,
    quiet,
)

HIDDEN = "#e6e4dd"


def _squares(ax: Axes, cells: Sequence[tuple[int, int]], colour: str) -> None:
    """A square in each of the cells (column, row), drawn at once: a picture may have thousands."""
    low, high = 0.06, 0.94
    corners = [[(x + dx, y + dy) for dx, dy in ((low, low), (high, low), (high, high), (low, high))] for x, y in cells]
    ax.add_collection(PolyCollection(corners, facecolors=colour, linewidths=0), autolim=False)


@drawing
def recomputed_keys(prompt: int, steps: int, *, engine: str = "cached", title: str | None = None) -> Picture:
    """The keys that a loop without cache computes: one row of squares a step, grey where a step before had them.

    The first step computes the prompt, each later one the whole sequence, one token longer. The caption counts.
    """
    rows = [prompt + step for step in range(steps)]
    side = min(0.26, 5.9 / rows[-1])  # inches
    width = max(4.9, side * rows[-1] + 1.1)
    figure, ax = canvas(width, 0.85 + side * steps)
    cells = [(position, step) for step, length in enumerate(rows) for position in range(length)]
    is_new = [step == 0 or position == rows[step] - 1 for position, step in cells]
    _squares(ax, [cell for cell, n in zip(cells, is_new, strict=True) if not n], UNUSED)
    _squares(ax, [cell for cell, n in zip(cells, is_new, strict=True) if n], colour_of(engine))
    for step in range(steps) if side > 0.13 else (0, steps - 1):
        ax.text(-0.35, step + 0.5, f"step {step + 1}", ha="right", va="center", size=9 if side > 0.2 else 8)
    ax.set_xlim(-0.65 / side, (width - 0.95) / side)
    ax.set_ylim(steps, 0)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    new, repeated = sum(is_new), len(is_new) - sum(is_new)
    headline(figure, title or f"{new:,} new, {repeated:,} repeated")
    handles = [
        Rectangle((0, 0), 1, 1, color=colour_of(engine), label="a new key"),
        Rectangle((0, 0), 1, 1, color=UNUSED, label="a key that a step before had computed"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
    figure.alt = f"keys computed by {steps} steps after a prompt of {prompt}: {new} new, {repeated} repeated"
    return figure


@drawing
def causal_mask(
    q_len: int, kv_len: int, *, window: int | None = None, query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None, bottom_right: bool = True, title: str | None = None,
) -> Picture:  # fmt: skip
    """Who may look at whom: a row for each of `q_len` new tokens, a column for each of the `kv_len` keys.

    The new tokens are the last ones, so the triangle ends in the bottom right corner: row i sees the keys up to
    kv_len - q_len + i (with `window` only the latest so many). `bottom_right=False` draws the classic mistake of a
    mask that starts in the top left corner, for comparison.
    """
    offset = kv_len - q_len if bottom_right else 0
    side = min(0.34, 5.4 / kv_len)
    figure, ax = canvas(max(4.6, side * kv_len + 1.4), 1.15 + side * q_len)
    cells = [(column, row) for row in range(q_len) for column in range(kv_len)]
    first_seen = [0 if window is None else max(0, offset + row - window + 1) for row in range(q_len)]
    is_seen = {(column, row): first_seen[row] <= column <= offset + row for column, row in cells}
    seen = sum(is_seen.values())
    old = kv_len - q_len  # columns before this one are keys that were in the cache already
    _squares(ax, [cell for cell in cells if not is_seen[cell]], HIDDEN)
    _squares(ax, [cell for cell in cells if is_seen[cell] and cell[0] < old], KV_CACHE)
    _squares(ax, [cell for cell in cells if is_seen[cell] and cell[0] >= old], ENGINE_COLOURS["cached"])
    words = key_labels or [str(n) for n in range(kv_len)]
    queries = query_labels or [str(kv_len - q_len + n) for n in range(q_len)]
    size = 9.0 if side > 0.25 else 7.0
    slanted = any(len(word) > 3 for word in words)
    for column, word in enumerate(words):
        label = ax.text(column + 0.5, -0.15, word, ha="center", va="bottom", size=size)
        if slanted:
            label.set(x=column + 0.35, ha="left", rotation=40, rotation_mode="anchor")
    for row, word in enumerate(queries):
        ax.text(-0.2, row + 0.5, word, ha="right", va="center", size=size)
    ax.set_xlim(-0.55 / side, (figure.get_figwidth() - 0.85) / side)
    ax.set_ylim(q_len, -0.9)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    headline(figure, title or f"{q_len} new of {kv_len} tokens: {seen} of {q_len * kv_len} pairs are seen")
    handles = [Rectangle((0, 0), 1, 1, color=KV_CACHE, label="sees an old key"),
               Rectangle((0, 0), 1, 1, color=ENGINE_COLOURS["cached"], label="sees a new key"),
               Rectangle((0, 0), 1, 1, color=HIDDEN, label="hidden")]  # fmt: skip
    figure.legend(handles=handles if offset else handles[1:], loc="outside lower left", ncols=3)
    figure.alt = f"mask of {q_len} queries over {kv_len} keys: {seen} of {q_len * kv_len} pairs are seen"
    return figure


@drawing
def cache_fill(
    used: Sequence[int], reserved: int | Sequence[int], *, labels: Sequence[str] | None = None,
    bytes_per_token: float | None = None, engine: str = "cached", title: str | None = None,
) -> Picture:  # fmt: skip
    """What of a preallocated cache is used: one row a request, `used` of its `reserved` tokens in the engine's colour.

    Up to 64 reserved tokens are drawn one by one, more as a bar. With `bytes_per_token` the caption counts bytes too.
    """
    room = [reserved] * len(used) if isinstance(reserved, int) else list(reserved)
    names = labels or [f"request {n + 1}" for n in range(len(used))]
    figure, ax = canvas(7.0, 1.05 + 0.34 * len(used))
    longest = max(room)
    for row, (filled, total) in enumerate(zip(used, room, strict=True)):
        if longest <= 64:
            for n in range(total):
                fill = colour_of(engine) if n < filled else UNUSED
                ax.add_patch(Rectangle((n + 0.06, row - 0.32), 0.88, 0.64, color=fill, linewidth=0))
        else:
            ax.barh(row, total, height=0.64, color=UNUSED)
            ax.barh(row, filled, height=0.64, color=colour_of(engine))
        ax.text(total + longest * 0.012, row, f"{filled:,} of {total:,}", va="center", size=9)
    ax.set_yticks(range(len(used)), names)
    ax.set_xlim(0, longest * 1.2)
    ax.set_ylim(len(used) - 0.5, -0.5)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    quiet(ax, spines=())
    empty = sum(room) - sum(used)
    caption = f"{empty:,} of {sum(room):,} reserved tokens hold nothing: {empty / max(1, sum(room)):.0%}"
    if bytes_per_token is not None:
        caption += f", {format_bytes(empty * bytes_per_token)}"
    headline(figure, title or caption)
    handles = [Rectangle((0, 0), 1, 1, color=colour_of(engine), label="used"),
               Rectangle((0, 0), 1, 1, color=UNUSED, label="reserved, empty")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.alt = caption
    return figure


@drawing
def head_groups(query_heads: int, kv_heads: int, *, title: str | None = None) -> Picture:
    """Which query heads share which key/value head (grouped-query attention, Ainslie et al. 2023).

    Query head i reads key/value head i // (query_heads / kv_heads): neighbours share, and only KV heads are cached.
    """
    group = query_heads // kv_heads
    figure, ax = canvas(7.0, 1.9)
    pitch = 1.0
    for i in range(query_heads):
        ax.add_patch(Rectangle((i * pitch + 0.1, 1.5), 0.8, 0.5, color=SOFT_INK, linewidth=0))
        owner = i // group
        centre = (owner * group + group / 2) * pitch
        ax.plot([i * pitch + 0.5, centre], [1.46, 0.64], color=SOFT_INK, linewidth=0.9)
    for j in range(kv_heads):
        left = (j * group + group / 2 - 0.4) * pitch
        ax.add_patch(Rectangle((left, 0.1), 0.8, 0.5, color=KV_CACHE, linewidth=0))
    if query_heads <= 32:
        for i in range(query_heads):
            ax.text(i + 0.5, 1.75, str(i), ha="center", va="center", size=8, color="#ffffff")
        for j in range(kv_heads):
            ax.text(j * group + group / 2, 0.35, str(j), ha="center", va="center", size=8)
    ax.text(-0.3, 1.75, "query heads", ha="right", va="center", size=9)
    ax.text(-0.3, 0.35, "KV heads", ha="right", va="center", size=9)
    ax.set_xlim(-query_heads * 0.18, query_heads)
    ax.set_ylim(0, 2.1)
    ax.axis("off")
    headline(figure, title or f"{query_heads} query heads read {kv_heads} KV heads, {group} share each")
    figure.alt = f"{query_heads} query heads share {kv_heads} KV heads, {group} each"
    return figure
