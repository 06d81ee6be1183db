"""Exercise of chapter 6 about the online softmax: two parts become one.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum [], total [], weighted [dim]


def _part(maximum: float, total: float, weighted: Sequence[float]) -> Part:
    return tuple(torch.tensor(x, dtype=torch.float64) for x in (maximum, total, weighted))


def _merged(
    first: Part, second: Part, *, rescale: tuple[bool, bool] = (True, True), sign: float = 1.0, empty: bool = True,
    vectors: bool = True, divide: bool = False,
) -> Part:  # fmt: skip
    """The right answer, and with other options the wrong ones."""
    largest = torch.maximum(first[0], second[0])
    if empty and largest == -math.inf:
        return first
    factors = [
        torch.exp(sign * (part[0] - largest)) if wanted else torch.ones_like(largest)
        for part, wanted in zip((first, second), rescale, strict=True)
    ]
    total = factors[0] * first[1] + factors[1] * second[1]
    weighted = factors[0] * first[2] + factors[1] * second[2] if vectors else first[2] + second[2]
    return largest, total, weighted / total if divide else weighted


def _averaged(first: Part, second: Part) -> Part:
    """Each part divided by its own sum, before they are put together."""
    largest, total, _ = _merged(first, second)
    return largest, total, first[2] / first[1] + second[2] / second[1]


def _first_as_reference(first: Part, second: Part) -> Part:
    factor = torch.exp(second[0] - first[0])
    return first[0], first[1] + factor * second[1], first[2] + factor * second[2]


def _without_maximum(first: Part, second: Part, exp: Function) -> Part:
    """Back to plain exponentials."""
    factors = exp(first[0]), exp(second[0])
    return (
        torch.maximum(first[0], second[0]),
        factors[0] * first[1] + factors[1] * second[1],
        factors[0] * first[2] + factors[1] * second[2],
    )


def _larger_only(first: Part, second: Part) -> Part:
    return first if first[0] >= second[0] else second


def _draw_merge(merge: Function) -> Any:
    """Three parts merged one after the other, with a value for each score that is 1 at its own place."""
    from ..plots.softmax import draw_merged
    from ..style import drawing

    scores = [[2.0, 1.0, 0.5], [3.0, 2.4], [-1.0, 1.8, 0.2]]
    count, begin, state = sum(map(len, scores)), 0, _part(-math.inf, 0.0, [0.0] * sum(map(len, scores)))
    for own in scores:
        s = torch.tensor(own, dtype=torch.float64)
        one_hot = torch.eye(count, dtype=torch.float64)[begin : begin + len(own)]  # [scores of the part, count]
        weights = torch.exp(s - s.max())
        state = tuple(torch.as_tensor(x) for x in merge(state, (s.max(), weights.sum(), weights @ one_hot)))
        begin += len(own)
    result = (state[2] / state[1]).reshape(-1)
    if result.shape != (count,) or not bool(result.isfinite().all()):
        raise ValueError("not finite")
    return drawing(draw_merged)(scores, result.tolist())


LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)
EMPTY = (-math.inf, 0.0, [0.0, 0.0])

MERGE = Exercise(
    name="merge",
    parameters=("first", "second"),
    cases=(
        # equal maxima: nothing to rescale
        Case((_part(1, 2, [4, 6]), _part(1, 3, [1, 1])), (1.0, 5.0, [5.0, 7.0]), "equal maxima"),
        # exp(0 - ln 2) = 1/2 of the first
        Case((_part(0, 2, [4, 6]), _part(LN2, 1, [10, 20])), (LN2, 2.0, [12.0, 23.0]), "the second has the maximum"),
        # exp(-3 - ln 3 + 3) = 1/3 of the second
        Case((_part(-3, 1, [6, 0]), _part(-3 - LN3, 3, [9, 3])), (-3.0, 2.0, [9.0, 1.0]), "the first has the maximum"),
        # exp(1000) is beyond every float; exp(-ln 4) = 1/4
        Case(
            (_part(1000, 8, [4, 8]), _part(1000 + LN4, 1, [1, 1])), (1000 + LN4, 3.0, [2.0, 3.0]), "large scores"
        ),
        Case((_part(2, 1, [3, 5]), _part(*EMPTY)), (2.0, 1.0, [3.0, 5.0]), "the second part is empty"),
        Case((_part(*EMPTY), _part(-2, 2, [3, 5])), (-2.0, 2.0, [3.0, 5.0]), "the first part is empty"),
        Case((_part(*EMPTY), _part(*EMPTY)), EMPTY, "both parts are empty"),
    ),
    mistakes=(
        Mistake(
            "nothing rescaled",
            "You added sums that are measured against different maxima. Bring both to the larger one first: a part's "
            "sum and vector are multiplied by exp(its maximum - larger maximum).",
            (lambda a, b: _merged(a, b, rescale=(False, False)),),
        ),
        Mistake(
            "one rescaled",
            "You rescale one of the two parts always and the other never. Which of them has the larger maximum is not "
            "known beforehand: multiply each by exp(its own maximum - larger maximum); for one of them that is 1.",
            (lambda a, b: _merged(a, b, rescale=(True, False)), lambda a, b: _merged(a, b, rescale=(False, True))),
        ),
        Mistake(
            "the first as reference",
            "You measure everything against the maximum of the first part. The proportions are right, but a second "
            "part with larger scores overflows, and behind an empty part all is lost. Take the larger maximum.",
            (_first_as_reference,),
        ),
        Mistake(
            "NaN",
            "Two empty parts: -inf - (-inf) is NaN, and exp(NaN) too. A split may lie wholly behind the end of a short "
            "request, so this happens: if the larger maximum is -inf, return an empty part.",
            (lambda a, b: _merged(a, b, empty=False),),
        ),
        Mistake(
            "divided too early",
            "You divided by a sum. The parts are not done yet: keep sums and vectors apart, and divide once, when the "
            "last part has been merged.",
            (lambda a, b: _merged(a, b, divide=True), _averaged, lambda a, b: _merged(a, b, divide=True, empty=False)),
        ),
        Mistake(
            "upside down",
            "Your factors are upside down: exp(larger maximum - maximum) grows where it should shrink. It is "
            "exp(maximum - larger maximum), at most 1.",
            (lambda a, b: _merged(a, b, sign=-1.0), lambda a, b: _merged(a, b, sign=-1.0, empty=False)),
        ),
        Mistake(
            "without the maximum",
            "exp(1000) is more than a float can hold. Never take exp of a maximum itself: only of its difference to "
            "the larger one, which is 0 or less.",
            (
                lambda a, b: _without_maximum(a, b, torch.exp),
                lambda a, b: _without_maximum(a, b, math.exp),
            ),
        ),
        Mistake(
            "vectors not rescaled",
            "The sums are right, but the vectors are added as they came. They are made of the same exponentials, and "
            "need the same factors.",
            (lambda a, b: _merged(a, b, vectors=False), lambda a, b: _merged(a, b, vectors=False, empty=False)),
        ),
        Mistake(
            "only one part",
            "You return the part with the larger maximum and drop the other. Its scores are smaller, not gone.",
            (_larger_only,),
        ),
    ),
    hint="maximum = larger of the two; each part's total and weighted times exp(its maximum - maximum), then add.",
    solved="In any order and any number of parts it comes out the same, so parts can be computed at the same time.",
    draw=_draw_merge,
)  # fmt: skip
