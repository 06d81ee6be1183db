"""Exercises of chapter 2 about sampling: temperature and top-p.

Invariant: expected values were worked out by hand from the definitions in the chapter, none comes from the package.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

WORDS = ("mat", "sofa", "floor", "moon", "spoon")
LOGITS = (2.0, 1.5, 0.5, -0.5, -1.0)

# -- temperature ------------------------------------------------------------------------------------------------------


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)


def _without_maximum(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return _greedy(logits)
    exps = (logits / temperature).exp()
    return exps / exps.sum()


def _without_maximum_in_python(logits: torch.Tensor, temperature: float) -> list[float]:
    if temperature == 0:
        return _greedy(logits).tolist()
    exps = [math.exp(x / temperature) for x in logits.tolist()]
    return [e / sum(exps) for e in exps]


def _divided_by_zero(logits: torch.Tensor, temperature: float) -> list[float]:
    scaled = [(x - max(logits.tolist())) / temperature for x in logits.tolist()]
    exps = [math.exp(x) for x in scaled]
    return [e / sum(exps) for e in exps]


def _draw_distribution(distribution: Function) -> Any:
    from .. import plots

    temperatures = [n / 20 for n in range(1, 61)]
    rows = [torch.as_tensor(distribution(torch.tensor(LOGITS), t)).tolist() for t in temperatures]
    return plots.curves(
        temperatures, {word: [row[n] for row in rows] for n, word in enumerate(WORDS)}, xlabel="temperature",
        ylabel="probability", y_range=(0, 1.05), title="Your distribution of the chapter's five words",
    )  # fmt: skip


DISTRIBUTION = Exercise(
    name="distribution",
    parameters=("logits", "temperature"),
    cases=(
        Case((torch.tensor([0.0, math.log(2), math.log(5)]), 1.0), [0.125, 0.25, 0.625], "temperature 1: the softmax"),
        Case((torch.tensor([0.0, math.log(4)]), 2.0), [1 / 3, 2 / 3], "warmer: 1 to 4 becomes 1 to 2"),
        Case((torch.tensor([0.0, math.log(2)]), 0.5), [0.2, 0.8], "colder: 1 to 2 becomes 1 to 4"),
        Case((torch.tensor([2.0, 1.5, -1.0]), 0.001), [1.0, 0.0, 0.0], "ordinary logits, a low temperature"),
        Case((torch.tensor([1.0, 3.0, 2.0]), 0.0), [0.0, 1.0, 0.0], "temperature 0: greedy"),
    ),
    mistakes=(
        Mistake(
            "overflow",
            "2 / 0.001 is 2,000, and e to the power of 2,000 is more than any float can hold: infinity / infinity is "
            "no number. Subtract the largest logit first; that changes no probability.",
            (_without_maximum, _without_maximum_in_python),
        ),
        Mistake(
            "division by zero",
            "Only temperature 0 is missing. Nothing can be divided by it: by agreement it means greedy, that is all "
            "probability on the largest logit. Ask for it first.",
            (
                lambda logits, t: ((logits - logits.max()) / t).softmax(-1),
                lambda logits, t: (logits / t).softmax(-1),
                _divided_by_zero,
            ),
        ),
        Mistake(
            "the other way round",
            "You multiplied by the temperature. A low temperature has to make differences larger: divide.",
            (
                lambda logits, t: (logits * t).softmax(-1),
                lambda logits, t: _greedy(logits) if t == 0 else (logits * t).softmax(-1),
            ),
        ),
        Mistake(
            "temperature without effect",
            "The temperature has no effect. Dividing probabilities by it and normalising them again gives the same "
            "probabilities: it belongs to the logits, before the softmax.",
            (
                lambda logits, t: logits.softmax(-1),
                lambda logits, t: _greedy(logits) if t == 0 else logits.softmax(-1),
            ),
        ),
        Mistake(
            "divided after the softmax",
            "You divided the probabilities, and their sum is no longer 1. The temperature divides the logits, before "
            "the softmax.",
            (
                lambda logits, t: logits.softmax(-1) / t,
                lambda logits, t: _greedy(logits) if t == 0 else logits.softmax(-1) / t,
            ),
        ),
        Mistake(
            "not normalised",
            "These are not probabilities yet: divide them by their sum.",
            (
                lambda logits, t: _greedy(logits) if t == 0 else ((logits - logits.max()) / t).exp(),
                lambda logits, t: _greedy(logits) if t == 0 else (logits / t).exp(),
            ),
        ),
    ),
    hint="Three steps: the case of temperature 0, then (logits - maximum) / temperature, then the softmax.",
    solved="With the maximum taken off first, every exponent is 0 or less, however low the temperature.",
    draw=_draw_distribution,
)

# -- top-p ------------------------------------------------------------------------------------------------------------


def _kept(probs: torch.Tensor, count: int) -> list[int]:
    return probs.argsort(descending=True)[:count].tolist()


def _reaching(probs: torch.Tensor, p: float) -> int:
    """How many of the likeliest tokens it takes to reach p."""
    running = probs.sort(descending=True).values.double().cumsum(0)
    return min(len(probs), int((running < p - 1e-6).sum()) + 1)


def _before(probs: torch.Tensor) -> torch.Tensor:
    """What the tokens before each hold together, the likeliest first: [vocab]."""
    ordered = probs.sort(descending=True).values.double()
    return ordered.cumsum(0) - ordered


def _draw_top_p(top_p_filter: Function) -> Any:
    from .. import plots

    before = torch.tensor(LOGITS).softmax(-1)
    stay = [int(token) for token in top_p_filter(before.clone(), 0.9)]
    after = torch.zeros_like(before)
    after[stay] = before[stay]
    return plots.filtered_bars(WORDS, before.tolist(), (after / after.sum()).tolist(), cumulative=True)


TOP_P_FILTER = Exercise(
    name="top_p_filter",
    parameters=("probs", "p"),
    cases=(
        Case((torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]), 0.7), [0, 1], "0.5 is too little, 0.8 is enough"),
        Case((torch.tensor([0.1, 0.3, 0.06, 0.5, 0.04]), 0.85), [3, 1, 0], "the ids are not in order of probability"),
        Case((torch.tensor([0.6, 0.4]), 0.5), [0], "the first token is enough"),
        Case((torch.tensor([0.5, 0.3, 0.2]), 1.0), [0, 1, 2], "p = 1 keeps everything"),
        Case((torch.tensor([0.5, 0.25, 0.25]), 0.5), [0], "the first token reaches p exactly"),
    ),
    mistakes=(
        Mistake(
            "drops the crossing token",
            "The token with which the sum reaches p stays in. Without it the rest holds less than p, and where the "
            "likeliest token alone exceeds p, nothing is left to draw from.",
            (
                lambda probs, p: _kept(probs, int((probs.sort(descending=True).values.cumsum(0) <= p + 1e-6).sum())),
                lambda probs, p: _kept(probs, _reaching(probs, p) - (p < 1)),
                lambda probs, p: _kept(probs, max(1, _reaching(probs, p) - (p < 1))),
            ),
        ),
        Mistake(
            "one too many",
            "You keep one token more than is needed. Once the sum has reached p, the next one is out.",
            (lambda probs, p: _kept(probs, _reaching(probs, p) + 1),),
        ),
        Mistake(
            "one too many at exactly p",
            "You keep one token too many where the sum hits p exactly. With p reached, the rest is out: the question "
            "is >= p, not > p.",
            (lambda probs, p: _kept(probs, int((_before(probs) <= p + 1e-6).sum())),),
        ),
        Mistake(
            "not sorted",
            "You add the probabilities in the order of the ids. The likeliest come first: sort before you add.",
            (lambda probs, p: list(range(int((probs.cumsum(0) < p - 1e-6).sum()) + 1)),),
        ),
        Mistake(
            "ranks for ids",
            "These are ranks, not ids: the likeliest token is rank 0, but its id is its place in `probs`. `sort` and "
            "`argsort` give the ids as well.",
            (lambda probs, p: list(range(_reaching(probs, p))),),
        ),
        Mistake(
            "ids in ascending order",
            "The right tokens, in order of their ids. Return the likeliest first.",
            (lambda probs, p: sorted(_kept(probs, _reaching(probs, p))),),
        ),
        Mistake(
            "a threshold for each token",
            "You compare each probability with p by itself. It is the running sum of the sorted probabilities that has "
            "to reach p.",
            (
                lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] >= p],
                lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] > p],
                lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] >= 1 - p],
                lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] > 1 - p],
                lambda probs, p: [i for i in probs.argsort(descending=True).tolist() if probs[i] <= p],
                lambda probs, p: [i for i, prob in enumerate(probs) if prob >= 1 - p],
                lambda probs, p: [i for i, prob in enumerate(probs) if prob <= p],
            ),
        ),
    ),
    hint="Sort, add up, and stop at the first token with which the sum is at least p; that token is still in.",
    solved="The token that crosses the line stays, so at least one always does.",
    draw=_draw_top_p,
)
