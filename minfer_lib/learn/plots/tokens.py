"""Pictures of tokens: text cut into pieces, the probabilities of what may come next, and the draw of one of them.

Invariant: every function takes plain data and returns a figure; none of them knows a model or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from matplotlib import get_data_path
from matplotlib.ft2font import FT2Font
from matplotlib.patches import FancyBboxPatch

from ..style import CARD, DATA, INK, SOFT_INK, UNUSED, Picture, canvas, drawing, quiet
from .parts import CARD_BEHIND, bar_rows, finished, key, tile, told_bars

BOX_FILLS = ("#cfe0f3", "#f6dfc0", "#cdebdc", "#e6d7f5", "#f4d3d1")  # tints of the engines' colours
SPECIAL_FILL = "#e9e7e1"


@lru_cache(maxsize=1)
def _font() -> FT2Font:
    return FT2Font(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf")


def visible(piece: str, limit: int = 24) -> str:
    """A token as it can be drawn: spaces as a raised dot, line ends as an arrow, what the font lacks as U+ codes."""
    marks = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
    drawn = "".join(
        marks.get(c) or (c if c.isprintable() and _font().get_char_index(ord(c)) else f"U+{ord(c):04X}") for c in piece
    )
    return drawn if len(drawn) <= limit else drawn[: limit - 1] + "…"


@drawing
def token_boxes(
    pieces: Sequence[str], ids: Sequence[int], *, special: Collection[int] = (), title: str | None = None
) -> Picture:
    """Text cut into tokens: a coloured box for each piece, its id below, broken into lines as text is.

    `special` are ids that stand for no text (they are drawn grey). `pieces` and `ids` are of equal length.
    """
    labels = [visible(piece) or "∅" for piece in pieces]
    line_width, gap, row_height = 76.0, 0.7, 0.6  # in characters of the monospaced font; inches
    boxes: list[tuple[float, int, float]] = []
    x, line = 0.0, 0
    for label, number in zip(labels, ids, strict=True):
        width = max(len(label), len(str(number)) * 0.8) + 1.0
        if x and x + width > line_width:
            x, line = 0.0, line + 1
        boxes.append((x, line, width))
        x += width + gap
    lines = line + 1
    figure, ax = canvas(7.0, 0.5 + row_height * lines)
    ax.set_xlim(0, line_width)
    ax.set_ylim(-row_height * lines, 0)
    ax.axis("off")
    for n, ((left, row, width), label, number) in enumerate(zip(boxes, labels, ids, strict=True)):
        top = -row * row_height
        is_special = number in special
        ax.add_patch(FancyBboxPatch(
            (left, top - 0.28), width, 0.26, boxstyle="round,pad=0,rounding_size=0.05", mutation_aspect=1,
            facecolor=SPECIAL_FILL if is_special else BOX_FILLS[n % len(BOX_FILLS)],
            edgecolor=SOFT_INK if is_special else "none", linewidth=0.8, linestyle=":",
        ))  # fmt: skip
        middle = {"x": left + width / 2, "ha": "center", "va": "center", "family": "monospace"}
        ax.text(y=top - 0.155, s=label, size=9.5, **middle)
        ax.text(y=top - 0.40, s=str(number), size=7.5, color=SOFT_INK, **middle)
    characters = sum(len(p) for n, p in enumerate(pieces) if ids[n] not in special)
    caption = f"{len(pieces)} tokens, {characters} characters"
    return finished(figure, caption, title, f"{len(pieces)} tokens: " + " | ".join(labels))


@drawing
def top_tokens(
    tokens: Sequence[str], probs: Sequence[float], *, chosen: int | None = None, most: int = 10,
    title: str | None = None,
) -> Picture:  # fmt: skip
    """The likeliest next tokens, longest bar on top; `chosen` (an index into `tokens`) is coloured.

    `tokens` and `probs` may be the whole vocabulary or a part; the `most` likeliest are drawn, the rest is summed up.
    """
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[:most]
    shown = [float(probs[i]) for i in order]
    figure, ax = canvas(7.0, 0.95 + 0.27 * len(order))
    told_bars(ax, {i: (float(probs[i]), INK if i == chosen else DATA) for i in order}, _percent, room=0.14)
    ax.set_yticks(range(len(order)), [visible(tokens[i]) for i in order], family="monospace")
    rest = max(0.0, 1.0 - sum(shown))
    caption = f"These {len(order)} tokens hold {_percent(sum(shown))}; all others together {_percent(rest)}"
    said = (f"{visible(tokens[i])} {_percent(p)}" for i, p in zip(order, shown, strict=True))
    return finished(figure, caption, title, "next token: " + ", ".join(said))


@drawing
def filtered_bars(
    tokens: Sequence[str], before: Sequence[float], after: Sequence[float], *, cumulative: bool = False, most: int = 12,
    title: str | None = None, width: float = 7.0, longest: float | None = None,
) -> Picture:  # fmt: skip
    """A distribution before and after a filter: outlines before, solid bars after, dropped tokens in grey.

    `before` and `after` are probabilities of the same tokens (0 in `after`: dropped). With `cumulative` the running sum
    of `before` is written beside each bar (top-p). `longest` is the probability of the longest bar that there is room
    for (None: that of the longest one here), so that pictures can share a scale.
    """
    everything = sorted(range(len(before)), key=lambda i: (-before[i], i))
    order = everything[:most]
    figure, ax = canvas(width, 1.28 + 0.27 * len(order))
    rows = range(len(order))
    was, now = [float(before[i]) for i in order], [float(after[i]) for i in order]
    dropped = [n <= 0.0 for n in now]
    ax.barh(rows, was, height=0.74, color=[UNUSED if d else "none" for d in dropped], edgecolor=SOFT_INK, linewidth=0.9)
    ax.barh(rows, now, height=0.50, color=DATA)
    longest = longest or max(*was, *now)
    running = 0.0
    for row, (w, n) in enumerate(zip(was, now, strict=True)):
        running += w
        text = f"dropped ({_percent(w)})" if n <= 0 else f"{_percent(w)} → {_percent(n)}"
        text += f"   sum {_percent(running)}" if cumulative else ""
        ax.text(max(w, n) + longest * 0.015, row, text, va="center", size=8.5, color=SOFT_INK if n <= 0 else INK,
                bbox=CARD_BEHIND)  # fmt: skip
    bar_rows(ax, [visible(tokens[i]) for i in order])
    ax.set_xlim(0, longest * (1.42 if cumulative else 1.2))
    for label, is_dropped in zip(ax.get_yticklabels(), dropped, strict=True):
        label.set(color=SOFT_INK if is_dropped else INK, family="monospace")
    outlined = {"edgecolor": SOFT_INK, "linewidth": 0.9}
    key(figure, {"before": {"facecolor": "none"} | outlined, "after": DATA} | (
        {"dropped": {"facecolor": UNUSED} | outlined} if any(dropped) else {}))  # fmt: skip
    kept = sum(1 for p in after if p > 0)
    mass = _percent(sum(float(before[i]) for i in everything if after[i] > 0))
    caption = f"{kept:,} of {len(after):,} tokens kept; they held {mass}"
    caption = f"All {kept:,} tokens kept" if kept == len(after) else caption
    said = (f"{visible(tokens[i])} {_percent(n) if n > 0 else 'dropped'}" for i, n in zip(order, now, strict=True))
    return finished(figure, caption, title, f"{kept} of {len(before)} tokens kept: " + ", ".join(said))


@drawing
def unit_line(
    tokens: Sequence[str], probs: Sequence[float], *, u: float | None = None, title: str | None = None
) -> Picture:
    """A line of length 1 cut into a stretch for each token, as long as its probability, in the order given.

    `u` in [0, 1) is a random number; the arrow falls on the token that it draws, which is named in the headline.
    """
    figure, ax = canvas(7.0, 1.75)
    end, drawn, free_from = 0.0, None, 0.0
    for n, (token, p) in enumerate(zip(tokens, probs, strict=True)):
        start, end = end, end + float(p)
        hit = u is not None and start <= u < end
        drawn = token if hit else drawn
        name, middle = visible(token), start + p / 2
        inside = p > 0.012 * (len(name) + 1)
        look = {"facecolor": INK if hit else BOX_FILLS[n % len(BOX_FILLS)], "edgecolor": CARD, "linewidth": 1.2}
        tile(ax, start, 0, look, name if inside else "", w=float(p), size=9.5, gap=(0, 0))
        half = 0.006 * (len(name) + 1)  # what does not fit stands above, clear of another such name and of the arrow
        if not inside and middle - half >= free_from and (u is None or abs(middle - u) > half + 0.01):
            ax.text(middle, 1.22, name, ha="center", va="center", size=8.5)
            free_from = middle + half
    if u is not None:
        ax.annotate(f"u = {u:.3f}", (u, 1.0), xytext=(u, 1.75), ha="center", va="center", size=9,
                    arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4})  # fmt: skip
    ax.set_xlim(-0.04, 1.04)
    ax.set_ylim(0, 2.1 if u is not None else 1.4)
    ax.set_yticks([])
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    quiet(ax, spines=("bottom",))
    alt = "a line from 0 to 1: " + ", ".join(f"{visible(t)} {_percent(p)}" for t, p in zip(tokens, probs, strict=True))
    alt += f"; {u:.3f} falls on {visible(drawn)}" if drawn is not None else ""
    return finished(figure, f"The arrow falls on {visible(drawn)!r}" if drawn is not None else "", title, alt)


def _percent(p: float) -> str:
    return f"{p:.0%}" if p >= 0.995 else f"{p:.1%}" if p >= 0.001 or p == 0 else "<0.1%"
