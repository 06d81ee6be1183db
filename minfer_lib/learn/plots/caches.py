"""Pictures of the KV cache: what is computed again without one, and what of the room is used.

Invariant: every number in a caption is counted from what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..style import UNUSED, Picture, canvas, colour_of, drawing, format_bytes, quiet
from .attention import squares
from .parts import bar_rows, finished, key, tile


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
    squares(ax, [cell for cell, n in zip(cells, is_new, strict=True) if not n], UNUSED)
    squares(ax, [cell for cell, n in zip(cells, is_new, strict=True) if n], colour_of(engine))
    for step in range(steps) if side > 0.13 else (0, steps - 1):
        ax.text(-0.35, step + 0.5, f"step {step + 1}", ha="right", va="center", size=9 if side > 0.2 else 8)
    ax.set_xlim(-0.65 / side, (width - 0.95) / side)
    ax.set_ylim(steps, 0)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    new, repeated = sum(is_new), len(is_new) - sum(is_new)
    key(figure, {"a new key": colour_of(engine), "a key that a step before had computed": UNUSED},
        loc="outside lower left")  # fmt: skip
    alt = f"keys computed by {steps} steps after a prompt of {prompt}: {new} new, {repeated} repeated"
    return finished(figure, f"{new:,} new, {repeated:,} repeated", title, alt)


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
        fills = (colour_of(engine), UNUSED)
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
    key(figure, {"used": colour_of(engine), "reserved, empty": UNUSED})
    return finished(figure, caption, title)
