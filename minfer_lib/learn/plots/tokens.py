"""Pictures of tokens: text cut into pieces, the probabilities of what may come next, and the draw of one of them.

Invariant: every function takes plain data and returns a figure; none of them knows a model or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from matplotlib import get_data_path
from matplotlib.ft2font import FT2Font
from matplotlib.patches import FancyBboxPatch, Rectangle

from ..style import CARD, DATA, INK, SOFT_INK, UNUSED, Picture, canvas, drawing, headline, on_colour, quiet

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
    pieces: Sequence[str], ids: Sequence[int] | None = None, *, special: Collection[int] = (), title: str | None = None
) -> Picture:
    """Text cut into tokens: a coloured box for each piece, its id below, broken into lines as text is.

    `special` are ids that stand for no text (they are drawn grey). `pieces` and `ids` are of equal length.
    """
    labels = [visible(piece) or "∅" for piece in pieces]
    numbers = [""] * len(labels) if ids is None else [str(i) for i in ids]
    line_width, gap, advance = 76.0, 0.7, 1.0  # in characters of the monospaced font
    boxes: list[tuple[float, int, float]] = []
    x, line = 0.0, 0
    for label, number in zip(labels, numbers, strict=True):
        width = max(len(label) * advance, len(number) * advance * 0.8) + 1.0
        if x and x + width > line_width:
            x, line = 0.0, line + 1
        boxes.append((x, line, width))
        x += width + gap
    lines = line + 1
    row_height = 0.36 if ids is None else 0.60  # inches
    figure, ax = canvas(7.0, (0.62 if ids is None else 0.50) + row_height * lines)
    ax.set_xlim(0, line_width)
    ax.set_ylim(-row_height * lines, 0)
    ax.axis("off")
    for n, ((left, row, width), label, number) in enumerate(zip(boxes, labels, numbers, strict=True)):
        top = -row * row_height
        is_special = ids is not None and ids[n] in special
        ax.add_patch(
            FancyBboxPatch(
                (left, top - 0.28), width, 0.26, boxstyle="round,pad=0,rounding_size=0.05", mutation_aspect=1,
                facecolor=SPECIAL_FILL if is_special else BOX_FILLS[n % len(BOX_FILLS)],
                edgecolor=SOFT_INK if is_special else "none", linewidth=0.8, linestyle=":",
            )
        )  # fmt: skip
        ax.text(left + width / 2, top - 0.155, label, ha="center", va="center", family="monospace", size=9.5)
        ax.text(
            left + width / 2, top - 0.40, number, ha="center", va="center", family="monospace", size=7.5, color=SOFT_INK
        )
    characters = sum(len(p) for n, p in enumerate(pieces) if ids is None or ids[n] not in special)
    headline(figure, title or f"{len(pieces)} tokens, {characters} characters")
    figure.alt = f"{len(pieces)} tokens: " + " | ".join(labels)
    return figure


@drawing
def top_tokens(
    tokens: Sequence[str],
    probs: Sequence[float],
    *,
    chosen: int | None = None,
    most: int = 10,
    title: str | None = None,
) -> Picture:
    """The likeliest next tokens, longest bar on top; `chosen` (an index into `tokens`) is coloured.

    `tokens` and `probs` may be the whole vocabulary or a part; the `most` likeliest are drawn, the rest is summed up.
    """
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[:most]
    shown = [float(probs[i]) for i in order]
    figure, ax = canvas(7.0, 0.95 + 0.27 * len(order))
    colours = [INK if i == chosen else DATA for i in order]
    ax.barh(range(len(order)), shown, color=colours, height=0.72)
    ax.set_yticks(range(len(order)), [visible(tokens[i]) for i in order], family="monospace")
    ax.invert_yaxis()
    for row, p in enumerate(shown):
        ax.text(p + max(shown) * 0.012, row, _percent(p), va="center", size=9)
    ax.set_xlim(0, max(shown) * 1.14)
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    quiet(ax, spines=("left",))
    rest = max(0.0, 1.0 - sum(shown))
    headline(
        figure, title or f"These {len(order)} tokens hold {_percent(sum(shown))}; all others together {_percent(rest)}"
    )
    figure.alt = "next token: " + ", ".join(
        f"{visible(tokens[i])} {_percent(p)}" for i, p in zip(order, shown, strict=True)
    )
    return figure


@drawing
def filtered_bars(
    tokens: Sequence[str], before: Sequence[float], after: Sequence[float], *, cut_probability: float | None = None,
    cut_rank: int | None = None, cumulative: bool = False, most: int = 12, title: str | None = None, width: float = 7.0,
    longest: float | None = None,
) -> Picture:  # fmt: skip
    """A distribution before and after a filter: outlines before, solid bars after, dropped tokens in grey.

    `before` and `after` are probabilities of the same tokens (0 in `after`: dropped). The cut can be drawn where it
    falls: `cut_probability` as a line across the bars (min-p), `cut_rank` as a line under the k-th bar (top-k), and
    with `cumulative` the running sum of `before` is written beside each bar (top-p). `longest` is the probability of
    the longest bar that there is room for (None: that of the longest one here), so that pictures can share a scale.
    """
    everything = sorted(range(len(before)), key=lambda i: (-before[i], i))
    order = everything[:most]
    figure, ax = canvas(width, 1.28 + 0.27 * len(order))
    rows = range(len(order))
    was, now = [float(before[i]) for i in order], [float(after[i]) for i in order]
    dropped = [n <= 0.0 for n in now]
    ax.barh(rows, was, height=0.74, color=[UNUSED if d else "none" for d in dropped], edgecolor=SOFT_INK, linewidth=0.9)
    ax.barh(rows, now, height=0.50, color=DATA)
    ax.set_yticks(rows, [visible(tokens[i]) for i in order], family="monospace")
    for label, is_dropped in zip(ax.get_yticklabels(), dropped, strict=True):
        label.set_color(SOFT_INK if is_dropped else INK)
    ax.invert_yaxis()
    longest = longest or max(*was, *now)
    ax.set_xlim(0, longest * (1.42 if cumulative else 1.2))
    running = 0.0
    for row, (w, n) in enumerate(zip(was, now, strict=True)):
        running += w
        text = f"dropped ({_percent(w)})" if n <= 0 else f"{_percent(w)} → {_percent(n)}"
        text += f"   sum {_percent(running)}" if cumulative else ""
        note = ax.text(max(w, n) + longest * 0.015, row, text, va="center", size=8.5, color=SOFT_INK if n <= 0 else INK)
        note.set_bbox({"facecolor": CARD, "edgecolor": "none", "pad": 0.6})  # a cut may run through it
    if cut_probability is not None:
        ax.set_ylim(len(order) + 0.15, -0.6)
        ax.axvline(cut_probability, color=INK, linestyle="--", linewidth=1.1, zorder=0.9)
        ax.text(
            cut_probability + longest * 0.01,
            len(order) - 0.25,
            f"cut at {_percent(cut_probability)}",
            size=8.5,
            va="center",
        )
    if cut_rank is not None and 0 < cut_rank < len(order):
        ax.axhline(cut_rank - 0.5, color=INK, linestyle="--", linewidth=1.1)
        ax.text(ax.get_xlim()[1], cut_rank - 0.55, f"cut after {cut_rank}", size=8.5, ha="right", va="bottom")
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    quiet(ax, spines=("left",))
    kept = sum(1 for p in after if p > 0)
    mass = sum(float(before[i]) for i in everything if after[i] > 0)
    everyone = f"All {kept:,} tokens kept" if kept == len(after) else None
    headline(figure, title or everyone or f"{kept:,} of {len(after):,} tokens kept; they had {_percent(mass)}")
    figure.legend(
        handles=[
            Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=SOFT_INK, label="before"),
            Rectangle((0, 0), 1, 1, facecolor=DATA, label="after"),
            Rectangle((0, 0), 1, 1, facecolor=UNUSED, edgecolor=SOFT_INK, label="dropped"),
        ],
        loc="outside lower center", ncols=3,
    )  # fmt: skip
    figure.alt = f"{kept} of {len(before)} tokens kept: " + ", ".join(
        f"{visible(tokens[i])} {'dropped' if d else _percent(n)}" for i, n, d in zip(order, now, dropped, strict=True)
    )
    return figure


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
        fill = INK if hit else BOX_FILLS[n % len(BOX_FILLS)]
        ax.add_patch(Rectangle((start, 0), float(p), 1, facecolor=fill, edgecolor=CARD, linewidth=1.2))
        name = visible(token)
        if p > 0.012 * (len(name) + 1):  # else it would not fit
            ax.text(
                start + p / 2, 0.5, name, ha="center", va="center", family="monospace", size=9.5,
                color=on_colour(fill),
            )  # fmt: skip
        else:  # above the line, where neither another such name nor the arrow stands
            half = 0.006 * (len(name) + 1)
            middle = start + p / 2
            if middle - half >= free_from and (u is None or abs(middle - u) > half + 0.01):
                ax.text(middle, 1.22, name, ha="center", va="center", family="monospace", size=8.5)
                free_from = middle + half
    if u is not None:
        ax.annotate(
            f"u = {u:.3f}", (u, 1.0), xytext=(u, 1.75), ha="center", va="center", size=9,
            arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4},
        )  # fmt: skip
    ax.set_xlim(-0.04, 1.04)
    ax.set_ylim(0, 2.1 if u is not None else 1.4)
    ax.set_yticks([])
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    quiet(ax, spines=("bottom",))
    headline(figure, title or (f"The arrow falls on {visible(drawn)!r}" if drawn is not None else None))
    figure.alt = "a line from 0 to 1: " + ", ".join(
        f"{visible(t)} {_percent(p)}" for t, p in zip(tokens, probs, strict=True)
    ) + (f"; {u:.3f} falls on {visible(drawn)}" if drawn is not None else "")  # fmt: skip
    return figure


def _percent(p: float) -> str:
    return f"{p:.0%}" if p >= 0.995 else f"{p:.1%}" if p >= 0.001 or p == 0 else "<0.1%"
