"""The picture of the trade that batching makes: tokens/s of all requests against those that one user sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import InvalidParameter
from ..style import Picture, canvas, darker, drawing, engine_family, headline, line_style, quiet
from .labels import label_points, log_axis, told


@drawing
def frontier(result: Any, *, title: str | None = None) -> Picture:
    """Tokens/s of all requests over tokens/s a user (1000 / TPOT in ms), a curve for each engine of a `bench.frontier`.

    A number beside a point is how many requests ran at once; a light cross is the spread of its runs. Up and to the
    right is better. Of more than four engines the ends of their curves have numbers.
    """
    curves = {name: [row for row in result.series(name) if row.tpot_ms] for name in result.engines}
    curves = {name: rows for name, rows in curves.items() if rows}
    if not curves:
        raise InvalidParameter("There is nothing to draw: no row has a time per token.")
    figure, ax = canvas(7.0, 4.2)
    points, colours = [], []
    for name, rows in curves.items():
        xs, ys, style = [1e3 / row.tpot_ms for row in rows], [row.tokens_per_s for row in rows], line_style(name)
        dashed = "--" if engine_family(name) is None else "-"
        ax.plot(xs, ys, label=name, linestyle=dashed, linewidth=1.6, **{**style, "markersize": 5})
        for row, x, y in zip(rows, xs, ys, strict=True):
            ax.hlines(y, *(1e3 / ms for ms in row.spread("tpot_ms")), color=style["color"], alpha=0.35, linewidth=1.2)
            ax.vlines(x, *row.spread("tokens_per_s"), color=style["color"], alpha=0.35, linewidth=1.2)
        points += _numbers(rows, xs, ys, ends_only=len(curves) > 4)
        colours += [darker(style["color"])] * (len(points) - len(colours))
    ax.margins(0.08, 0.1)
    ax.set_xlabel("tokens/s that one user sees")
    ax.set_ylabel("tokens/s of all")
    log_axis(ax, "x", [1e3 / row.tpot_ms for rows in curves.values() for row in rows])
    log_axis(ax, "y", [row.tokens_per_s for rows in curves.values() for row in rows])
    quiet(ax)
    figure.legend(loc="outside lower center", ncols=min(5, len(curves)))
    best = max(curves, key=lambda name: max(row.tokens_per_s for row in curves[name]))
    top, alone = max(curves[best], key=lambda row: row.tokens_per_s), curves[best][0]
    caption = f"{best} is fastest with {top.x:g} at once: {told(top.tokens_per_s)} tokens/s"
    if top is not alone:
        gain, speed = top.tokens_per_s / alone.tokens_per_s, alone.tpot_ms / top.tpot_ms
        caption = f"{best}, {top.x:g} at once: {gain:.1f} times the tokens/s of {alone.x:g}, each at {speed:.0%} speed"
    headline(figure, title or caption)
    label_points(figure, ax, points, colours, size=8)
    figure.alt = "tokens/s of all and of one user: " + "; ".join(
        f"{name} "
        + ", ".join(f"{row.x:g} at once {told(row.tokens_per_s)} and {told(1e3 / row.tpot_ms)}" for row in rows)
        for name, rows in curves.items()
    )
    return figure


def _numbers(
    rows: Sequence[Any], xs: Sequence[float], ys: Sequence[float], ends_only: bool
) -> list[tuple[str, float, float]]:
    """What to write beside a curve's points; those that lie on each other have one text, "1 to 32"."""
    groups: list[list[int]] = []
    for i in range(len(rows)):
        last = groups[-1][-1] if groups else i
        near = abs(xs[i] / xs[last] - 1) < 0.05 and abs(ys[i] / ys[last] - 1) < 0.05
        groups = [*groups[:-1], [*groups[-1], i]] if groups and near else [*groups, [i]]
    if ends_only:
        groups = [groups[0], groups[-1]][: len(groups)]
    return [
        (f"{rows[g[0]].x:g}" + (f" to {rows[g[-1]].x:g}" if len(g) > 1 else ""), xs[g[-1]], ys[g[-1]]) for g in groups
    ]
