"""Pictures of attention and its cache: who may look at whom, how much, which heads share keys, what is computed anew.

Invariant: every number in a caption is counted from what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex

from ..style import CARD, ENGINE_COLOURS, KV_CACHE, SOFT_INK, UNUSED, Picture, canvas, drawing, format_bytes, quiet
from .parts import bar_rows, finished, key, tile

HIDDEN = "#e6e4dd"


def squares(ax: Axes, cells: Sequence[tuple[int, int]], colour: str) -> None:
    """A square in each of the cells (column, row), drawn at once: a picture may have thousands."""
    low, high = 0.06, 0.94
    corners = [[(x + dx, y + dy) for dx, dy in ((low, low), (high, low), (high, high), (low, high))] for x, y in cells]
    ax.add_collection(PolyCollection(corners, facecolors=colour, linewidths=0), autolim=False)


def causal_mask(q_len: int, kv_len: int, *, bottom_right: bool = True, **labels: Any) -> Picture:
    """Who may look at whom: a row for each of `q_len` new tokens, a column for each of the `kv_len` keys.

    The new tokens are the last ones, so the triangle ends in the bottom right corner: row i sees the keys up to
    kv_len - q_len + i. `bottom_right=False` draws the classic mistake of a mask that starts in the top left corner, for
    comparison. labels: as of `attention_mask`.
    """
    offset = kv_len - q_len if bottom_right else 0
    return attention_mask([[key <= offset + row for key in range(kv_len)] for row in range(q_len)], **labels)


@drawing
def attention_mask(
    seen: Sequence[Sequence[bool]], *, query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None, title: str | None = None,
) -> Picture:  # fmt: skip
    """Any mask: `seen[i][j]` says whether new token i looks at key j. The new tokens are the last of the keys."""
    q_len, kv_len = len(seen), len(seen[0])
    old = kv_len - q_len  # columns before this one are keys that were in the cache already
    side = min(0.34, 5.4 / kv_len)
    figure, ax = canvas(max(4.6, side * kv_len + 1.4), 1.15 + side * q_len)
    cells = [(column, row) for row in range(q_len) for column in range(kv_len)]
    kinds = [("old" if x < old else "new") if seen[y][x] else "hidden" for x, y in cells]
    new = (ENGINE_COLOURS["cached"], "sees a new key" if old else "sees")
    looks = {"old": (KV_CACHE, "sees an old key"), "new": new, "hidden": (HIDDEN, "hidden")}
    for kind, (colour, _) in looks.items():
        squares(ax, [cell for cell, its in zip(cells, kinds, strict=True) if its == kind], colour)
    words = key_labels or [str(n) for n in range(kv_len)]
    queries = query_labels or [str(old + n) for n in range(q_len)]
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
    key(figure, {label: colour for kind, (colour, label) in looks.items() if kind in kinds}, loc="outside lower left")
    seen_pairs = f"{len(cells) - kinds.count('hidden')} of {len(cells)} pairs are seen"
    alt = f"mask of {q_len} queries over {kv_len} keys: {seen_pairs}"
    return finished(figure, f"{q_len} new of {kv_len} tokens: {seen_pairs}", title, alt)


@drawing
def attention_weights(
    weights: Sequence[Sequence[float]], *, room: int | None = None, title: str | None = None
) -> Picture:
    """How much each query takes from each row of the cache: one line a step, darker for more.

    `weights[i]` holds one number for each row that step i read; lines may differ in length. `room` is the number of
    rows that the cache has (None: the most that any step read); rows that a step did not read stay empty.
    """
    columns = max(room or 0, *(len(line) for line in weights))
    figure, ax = canvas(max(4.6, 0.62 * columns + 1.5), 0.85 + 0.36 * len(weights))
    shade = LinearSegmentedColormap.from_list("weights", [CARD, ENGINE_COLOURS["cached"]])
    for y, line in enumerate(weights):
        for x in range(columns):
            weight = line[x] if x < len(line) else None
            fill = UNUSED if weight is None else to_hex(shade(0.12 + 0.88 * min(1.0, max(0.0, weight))))
            tile(ax, x, y, fill, "" if weight is None else f"{weight:.2f}", size=9, gap=(0.04, 0.08))
        ax.text(-0.12, y + 0.5, f"step {y + 1}", ha="right", va="center", size=9)
    for x in range(columns):
        ax.text(x + 0.5, len(weights) + 0.12, f"row {x}", ha="center", va="top", size=8.5, color=SOFT_INK)
    ax.set_xlim(-1.35, columns + 0.1)
    ax.set_ylim(len(weights) + 0.55, 0)
    ax.axis("off")
    read = sum(len(line) for line in weights)
    caption = f"{len(weights)} steps read {read} of {len(weights) * columns} rows"
    said = "; ".join(" ".join(f"{w:.2f}" for w in line) for line in weights)
    return finished(figure, caption, title, f"attention weights: {said}")


@drawing
def head_groups(
    query_heads: int, kv_heads: int, *, reads: Sequence[int] | None = None, title: str | None = None
) -> Picture:
    """Which query heads share which key/value head (grouped-query attention, Ainslie et al. 2023).

    Query head i reads key/value head i // (query_heads / kv_heads): neighbours share, and only KV heads are cached.
    `reads` draws another assignment: the KV head of each query head.
    """
    group = query_heads // kv_heads
    owners = [i // group for i in range(query_heads)] if reads is None else list(reads)
    figure, ax = canvas(7.0, 1.9)
    numbered = query_heads <= 32
    for i, owner in enumerate(owners):
        tile(ax, i, 1.5, SOFT_INK, str(i) if numbered else "", h=0.5, size=8, gap=(0.1, 0))
        ax.plot([i + 0.5, owner * group + group / 2], [1.46, 0.64], color=SOFT_INK, linewidth=0.9)
    for j in range(kv_heads):
        tile(ax, j * group + group / 2 - 0.5, 0.1, KV_CACHE, str(j) if numbered else "", h=0.5, size=8, gap=(0.1, 0))
    ax.text(-0.3, 1.75, "query heads", ha="right", va="center", size=9)
    ax.text(-0.3, 0.35, "KV heads", ha="right", va="center", size=9)
    ax.set_xlim(-query_heads * 0.18, query_heads)
    ax.set_ylim(0, 2.1)
    ax.axis("off")
    caption = f"{query_heads} query heads read {kv_heads} KV heads, {group} share each"
    return finished(figure, caption, title)


@drawing
def recomputed_keys(prompt: int, steps: int, *, title: str | None = None) -> Picture:
    """The keys that a loop without cache computes: one row of squares a step, grey where a step before had them.

    The first step computes the prompt, each later one the whole sequence, one token longer. The caption counts.
    """
    rows = [prompt + step for step in range(steps)]
    side = min(0.26, 5.9 / rows[-1])  # inches
    width = max(4.9, side * rows[-1] + 1.1)
    figure, ax = canvas(width, 0.85 + side * steps)
    cells = [(position, step) for step, length in enumerate(rows) for position in range(length)]
    is_new = [step == 0 or position == rows[step] - 1 for position, step in cells]
    squares(ax, [cell for cell, n in zip(cells, is_new, strict=True) if not n], UNUSED)
    squares(ax, [cell for cell, n in zip(cells, is_new, strict=True) if n], ENGINE_COLOURS["cached"])
    for step in range(steps) if side > 0.13 else (0, steps - 1):
        ax.text(-0.35, step + 0.5, f"step {step + 1}", ha="right", va="center", size=9 if side > 0.2 else 8)
    ax.set_xlim(-0.65 / side, (width - 0.95) / side)
    ax.set_ylim(steps, 0)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    new, repeated = sum(is_new), len(is_new) - sum(is_new)
    key(figure, {"a new key": ENGINE_COLOURS["cached"], "a key that a step before had computed": UNUSED},
        loc="outside lower left")  # fmt: skip
    alt = f"keys computed by {steps} steps after a prompt of {prompt}: {new} new, {repeated} repeated"
    return finished(figure, f"{new:,} new, {repeated:,} repeated", title, alt)


@drawing
def cache_fill(
    used: Sequence[int], reserved: int | Sequence[int], *, labels: Sequence[str] | None = None,
    bytes_per_token: float | None = None, title: str | None = None,
) -> Picture:  # fmt: skip
    """What of a preallocated cache is used: one row a request, `used` of its `reserved` tokens in colour.

    Up to 64 reserved tokens are drawn one by one, more as a bar. With `bytes_per_token` the caption counts bytes too.
    """
    room = [reserved] * len(used) if isinstance(reserved, int) else list(reserved)
    names = labels or [f"request {n + 1}" for n in range(len(used))]
    figure, ax = canvas(7.0, 1.05 + 0.34 * len(used))
    longest = max(room)
    for row, (filled, total) in enumerate(zip(used, room, strict=True)):
        fills = (ENGINE_COLOURS["cached"], UNUSED)
        if longest <= 64:
            for n in range(total):
                tile(ax, n, row - 0.32, fills[n >= filled], h=0.64, gap=(0.06, 0))
        else:
            ax.barh(row, [total, filled], height=0.64, color=fills[::-1])
        ax.text(total + longest * 0.012, row, f"{filled:,} of {total:,}", va="center", size=9)
    bar_rows(ax, names)
    ax.set_xlim(0, longest * 1.2)
    quiet(ax, spines=())
    empty = sum(room) - sum(used)
    caption = f"{empty:,} of {sum(room):,} reserved tokens hold nothing: {empty / max(1, sum(room)):.0%}"
    if bytes_per_token is not None:
        caption += f", {format_bytes(empty * bytes_per_token)}"
    key(figure, {"used": ENGINE_COLOURS["cached"], "reserved, empty": UNUSED})
    return finished(figure, caption, title)
