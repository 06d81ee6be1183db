"""The map of the course, the same in every chapter with the chapter's part lit, and one decoder layer with its shapes.

Invariant: shapes and counts are computed from the config that is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import InvalidParameter, one_of
from ...models.memory import ModelShape
from ..style import ACTIVATIONS, INK, KV_CACHE, SOFT_INK, Picture, drawing
from .parts import arrow, board, box, finished

DIM, DIM_EDGE, FRAME = "#edebe5", "#d3d0c8", "#f4f2ed"
LIT = "#f0c94c"
TOP, MIDDLE, BOTTOM = 0.78, 1.88, 3.32  # inches: the upper edges of the three rows
# Part: (left edge, upper edge, width, height, a note)
PARTS = {
    "server": (0.25, TOP, 1.1, 0.6, "HTTP, streams"),
    "request": (1.65, TOP, 1.2, 0.6, "prompt, answer"),
    "scheduler": (3.15, TOP, 1.2, 0.6, "who is in a step"),
    "runner": (4.65, TOP, 1.2, 0.6, "a step as one row"),
    "tokens": (0.85, MIDDLE + 0.2, 1.2, 0.6, "text ↔ ids"),
    "layers": (2.4, MIDDLE, 3.95, 1.0, ""),
    "attention": (2.55, MIDDLE + 0.33, 1.8, 0.54, "looks back"),
    "logits": (6.62, MIDDLE + 0.2, 1.1, 0.6, "one per token"),
    "sampler": (7.95, MIDDLE + 0.2, 0.9, 0.6, "draws one"),
    "cache": (2.55, BOTTOM, 1.15, 0.6, "keys, values"),
    "weights": (3.95, BOTTOM, 1.15, 0.6, "read each step"),
    "kernels": (5.35, BOTTOM, 1.0, 0.6, "arithmetic"),
    "launches": (6.75, BOTTOM, 1.1, 0.6, "CPU starts GPU"),
}


@drawing
def engine_map(lit: str | Iterable[str] = (), *, layers: int = 30, title: str | None = None) -> Picture:
    """The map of the whole course: how text becomes text, and what stands around the model; what is `lit` stands out.

    lit: one or more of server, request, scheduler, runner, tokens, layers, attention, logits, sampler, cache, weights,
    kernels, launches. Raises `InvalidParameter` for others. layers: how many the model has.
    """
    names = [lit] if isinstance(lit, str) else list(lit)
    if unknown := [name for name in names if name not in PARTS]:
        raise InvalidParameter(f"engine_map(lit={unknown[0]!r}) is not possible: the parts are {one_of(PARTS)}.")
    figure, ax = board(9.4, 4.2)

    def draw(name: str, label: str | None = None, at: tuple[float, ...] | None = None, note: str = "") -> None:
        x, y, w, h, *rest = at or PARTS[name]
        on = name in names
        box(ax, (x, y), (w, h), LIT if on else DIM, label or name, note or "".join(rest), edge=INK if on else DIM_EDGE,
            ink=INK if on or not names else SOFT_INK)  # fmt: skip

    x, y, w, h, _ = PARTS["layers"]
    on = "layers" in names
    box(ax, (x, y), (w, h), LIT if on else FRAME, "", edge=INK if on else DIM_EDGE)
    ax.text(x + w / 2, y + 0.17, f"{layers} layers", ha="center", va="center", size=10, weight="bold",
            color=INK if on or not names else SOFT_INK)  # fmt: skip
    draw("feed-forward", at=(4.5, MIDDLE + 0.33, 1.7, 0.54), note="each token alone")
    for name in PARTS:
        if name != "layers":
            draw(name)
    across = MIDDLE + 0.5
    for left, right in (("server", "request"), ("request", "scheduler"), ("scheduler", "runner")):
        arrow(ax, (PARTS[left][0] + PARTS[left][2], TOP + 0.3), (PARTS[right][0], TOP + 0.3))
    for left, right in (("tokens", "layers"), ("layers", "logits"), ("logits", "sampler")):
        arrow(ax, (PARTS[left][0] + PARTS[left][2], across), (PARTS[right][0], across))
    arrow(ax, (4.35, MIDDLE + 0.6), (4.5, MIDDLE + 0.6))
    for at in (0.34, 9.17):
        ax.text(at, across, "text", ha="center", va="center", size=9.5, color=SOFT_INK, rotation=90)
    arrow(ax, (0.47, across), (0.85, across))
    arrow(ax, (8.85, across), (9.07, across))
    arrow(ax, (1.75, TOP + 0.6), (1.75, MIDDLE + 0.2))  # a request is its tokens
    arrow(ax, (5.25, TOP + 0.6), (5.25, MIDDLE))
    for name in ("cache", "weights", "kernels"):
        middle = PARTS[name][0] + PARTS[name][2] / 2
        arrow(ax, (middle, BOTTOM), (middle, MIDDLE + (0.87 if name == "cache" else 1.0)))
    arrow(ax, (6.75, BOTTOM + 0.3), (6.35, BOTTOM + 0.3))
    arrow(ax, (8.4, MIDDLE + 0.2), (8.4, TOP - 0.18), (3.75, TOP - 0.18), (3.75, TOP))
    ax.text(7.14, TOP - 0.13, "the next step: one more token for each", ha="center", va="top", size=9, color=SOFT_INK)
    said = f"The engine; this chapter: {', '.join(names)}" if names else "The whole engine"
    flow = (
        f"text, tokens, {layers} layers (attention, feed-forward), logits, sampler, text; around it server, request, "
    )
    flow += "scheduler, runner, cache, weights, kernels, launches"
    return finished(figure, said, title, f"{said}. Map of an inference engine: {flow}")


@drawing
def decoder_layer(config: Any, *, title: str | None = None) -> Picture:
    """One decoder layer (Llama, Qwen, Mistral and kin) with the shapes of what flows, n tokens that look back at S.

    config: of transformers, or a `ModelShape`. A box holds its operation and what its weights turn into what.
    """
    shape = config if isinstance(config, ModelShape) else ModelShape.from_config(config)
    hidden, heads, kv, dim, inner = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate
    figure, ax = board(9.4, 4.25)
    upper, lower = 1.5, 3.3  # inches: the middles of the two rows
    flow, weight = f"[n, {hidden:,}]", "#cfe0f3"

    def place(x: float, y: float, w: float, fill: str, name: str, *notes: str, h: float = 0.62) -> None:
        box(ax, (x, y - h / 2), (w, h), fill, name, *notes, edge=DIM_EDGE, ink=INK)

    for y in (upper, lower):
        ax.text(0.25, y, f"x\n{flow}", va="center", size=9, linespacing=1.3)
        place(1.3, y, 0.9, DIM, "RMSNorm")
    for n, (name, count) in enumerate((("q", heads), ("k", kv), ("v", kv))):
        y = upper + (n - 1) * 0.62
        place(2.55, y, 1.5, weight, name, f"{hidden:,} → {count} × {dim}", h=0.52)
        arrow(ax, (2.2, upper), (2.38, upper), (2.38, y), (2.55, y))
    place(4.4, upper - 0.31, 0.95, DIM, "RoPE", "turns q, k", h=1.14)
    for y in (upper - 0.62, upper):
        arrow(ax, (4.05, y), (4.4, y))
    place(4.4, upper + 0.62, 1.02, KV_CACHE, "cache", f"2 × [S, {kv}, {dim}]", h=0.52)
    arrow(ax, (4.05, upper + 0.62), (4.4, upper + 0.62))
    arrow(ax, (4.875, upper + 0.26), (4.875, upper + 0.36))
    place(5.75, upper, 1.55, ACTIVATIONS, "attention", f"{heads} heads of {dim}", f"[{heads}, n, S] scores", h=0.8)
    arrow(ax, (5.35, upper - 0.31), (5.55, upper - 0.31), (5.55, upper - 0.15), (5.75, upper - 0.15))
    arrow(ax, (5.42, upper + 0.62), (5.55, upper + 0.62), (5.55, upper + 0.2), (5.75, upper + 0.2))
    place(7.55, upper, 1.1, weight, "o", f"{heads} × {dim} → {hidden:,}")
    arrow(ax, (7.3, upper), (7.55, upper))
    for n, name in enumerate(("gate", "up")):
        y = lower + (n - 0.5) * 0.62
        place(2.55, y, 1.5, weight, name, f"{hidden:,} → {inner:,}", h=0.52)
        arrow(ax, (2.2, lower), (2.38, lower), (2.38, y), (2.55, y))
        arrow(ax, (4.05, y), (4.4, y))
    place(4.4, lower, 1.55, DIM, "SiLU(gate) × up", f"[n, {inner:,}]", h=1.14)
    place(7.2, lower, 1.45, weight, "down", f"{inner:,} → {hidden:,}")
    arrow(ax, (5.95, lower), (7.2, lower))
    for y in (upper, lower):
        arrow(ax, (0.95, y), (1.3, y))
        arrow(ax, (8.65, y), (8.88, y))
        ax.text(9.0, y, "+", ha="center", va="center", size=14, weight="bold")
        over = y - (1.08 if y == upper else 0.72)
        arrow(ax, (1.12, y), (1.12, over), (9.0, over), (9.0, y - 0.12))
    arrow(ax, (9.0, upper + 0.14), (9.0, upper + 1.0), (0.62, upper + 1.0), (0.62, lower - 0.28))
    attention, forward = hidden * dim * 2 * (heads + kv), 3 * hidden * inner
    total = attention + forward
    caption = f"One of {shape.layers} layers: {total / 1e6:,.1f} M weights, {forward / total:.0%} of them feed-forward"
    alt = f"{caption}; x {flow}, q {heads} heads, k and v {kv} heads of {dim}, feed-forward {inner:,} wide"
    return finished(figure, caption, title, alt)
