"""The online softmax: parts of a row of scores, each with a maximum and a sum of its own, become one distribution.

Invariant: the weights below are made from the parts alone, by the factors that are drawn; the softmax over all scores
that they are compared with is computed apart, in one piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ...errors import InvalidParameter
from ..style import FAINT, GROUP_COLOURS, INK, SOFT_INK, Picture, canvas, darker, drawing, quiet
from .parts import finished, plain


def merged(scores: Sequence[np.ndarray]) -> tuple[list[float], list[float], list[float], np.ndarray]:
    """(maximum, sum of exp(score - maximum), factor exp(maximum - largest maximum)) of each part, and the weights of
    all scores, [scores], made from them. An empty part has the maximum -inf, the sum 0 and the factor 0."""
    maxima = [float(part.max()) if len(part) else -math.inf for part in scores]
    shifted = [np.exp(part - top) if len(part) else part for part, top in zip(scores, maxima, strict=True)]
    sums = [float(part.sum()) for part in shifted]
    factors = [math.exp(top - max(maxima)) for top in maxima]
    total = sum(factor * own for factor, own in zip(factors, sums, strict=True))
    return maxima, sums, factors, np.concatenate(shifted) * np.repeat(factors, [len(p) for p in shifted]) / total


@drawing
def merged_softmax(scores: Sequence[Sequence[float]], *, title: str | None = None) -> Picture:
    """Scores in parts, one list each, and how they become the weights of one softmax.

    Above: the scores, and of each part its maximum, its sum of exp(score - maximum), and the factor that brings it to
    the largest maximum of all. Below: the weights, and rings where the softmax over all scores at once has them. A part
    may be empty. Raises `InvalidParameter` if all are, or for scores that are not finite.
    """
    return draw_merged(scores, title=title)


def draw_merged(
    scores: Sequence[Sequence[float]], given: Sequence[float] | None = None, title: str | None = None
) -> Picture:
    """`merged_softmax`, with weights `given` by somebody else in place of the merged ones."""
    parts = [plain(part).reshape(-1) for part in scores]
    whole = np.concatenate(parts) if parts else np.zeros(0)
    if not len(whole) or not np.isfinite(whole).all():
        raise InvalidParameter("merged_softmax takes finite scores, at least one: [[2.0, 1.0], [5.0], ...].")
    maxima, sums, factors, weights = merged(parts)
    weights = weights if given is None else plain(given)
    shifted = np.exp(whole - whole.max())
    at_once = shifted / shifted.sum()
    gap = 0.8
    width = max(2.6, 15 / len(parts))  # of a part without scores, and of the narrowest one, in bars
    begins, places, x = [], [], 0.0
    for part in parts:
        room = max(len(part), width)
        begins.append((x, x + room))
        places += [x + (room - len(part)) / 2 + n + 0.5 for n in range(len(part))]
        x += room + gap
    figure, (above, below) = canvas(7.0 if len(parts) <= 4 else 9.0, 4.5, rows=2, sharex=True, height_ratios=[1.25, 1])
    colours = [GROUP_COLOURS[n % len(GROUP_COLOURS)] for n in range(len(parts))]
    of_bar = [colours[n] for n, part in enumerate(parts) for _ in part]
    low, high = min(0.0, float(whole.min())), max(0.0, float(whole.max()))
    span = (high - low) or 1.0
    above.bar(places, whole, width=0.8, color=of_bar)
    above.axhline(0, color=SOFT_INK, linewidth=0.8)
    for (begin, end), colour, top, own, factor in zip(begins, colours, maxima, sums, factors, strict=True):
        number = "-inf" if top == -math.inf else f"{top:.3g}"
        largest = f"{'+' if max(maxima) < 0 else '-'} {abs(max(maxima)):.3g}"
        power = f" = exp({number} {largest})" if len(parts) < 4 else ""
        for n, line in enumerate((f"max {number}", f"sum {own:.3g}", f"× {factor:.3g}{power}")):
            above.text((begin + end) / 2, high + (0.6 - 0.17 * n) * span, line, ha="center", va="center", size=8.5,
                       color=darker(colour, 0.5), weight="bold" if n == 2 else "normal")  # fmt: skip
    above.set_ylim(low - 0.06 * span, high + 0.72 * span)
    above.set_yticks([tick for tick in above.get_yticks() if low - 0.06 * span <= tick <= high + 0.05 * span])
    above.set_ylabel("score", y=max(0.15, (0.5 * (high - low) + 0.06 * span) / (1.78 * span)))
    below.bar(places, weights, width=0.8, color=of_bar)
    below.plot(places, at_once, linestyle="none", marker="o", markersize=6, markerfacecolor="none", color=INK,
               label="softmax over all scores at once")  # fmt: skip
    below.set_ylim(0, 1.12 * float(max(weights.max(), at_once.max())))
    below.set_ylabel("weight")
    below.set_xlim(-gap / 2, x - gap / 2)
    for ax in (above, below):
        ax.set_xticks([])
        quiet(ax, spines=("left",))
        for (_, end), (begin, _) in itertools.pairwise(begins):
            ax.axvline((end + begin) / 2, color=FAINT, linewidth=1.2)
    below.axhline(0, color=SOFT_INK, linewidth=0.8)
    figure.legend(loc="outside lower center")
    difference = float(abs(weights - at_once).max())
    counts = f"{len(parts)} part{'s' * (len(parts) != 1)}, the weights of {len(whole)} scores"
    verdict = "are those of one softmax" if difference <= 1e-12 else f"are off by up to {difference:.2g}"
    found = f"{'Merged from' if given is None else 'By your merge of'} {counts} {verdict}"
    return finished(figure, found, title, f"{found}; factors " + ", ".join(f"{factor:.3g}" for factor in factors))
