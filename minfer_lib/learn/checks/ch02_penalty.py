"""Exercise of chapter 2 about the repetition penalty.

Invariant: expected values were worked out by hand from the definition in the chapter, none comes from the package.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake, Outcome
from .ch02_sampling import LOGITS, WORDS


def _for_each_occurrence(logits: torch.Tensor, seen: list[int], penalty: float) -> torch.Tensor:
    result = logits.clone()
    for token in seen:
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    return result


def _on_seen(change: Function) -> Function:
    """A wrong penalty: `change(values of the seen tokens, penalty)`, on each of them once."""

    def penalise(logits: torch.Tensor, seen: list[int], penalty: float) -> torch.Tensor:
        ids = torch.tensor(sorted(set(seen)), dtype=torch.long)
        result = logits.clone()
        result[ids] = change(logits[ids], penalty)
        return result

    return penalise


def _draw_penalise(penalise: Function) -> Any:
    from .. import plots

    before = torch.tensor(LOGITS)
    after = torch.as_tensor(penalise(before.clone(), [2, 3], 1.5)).softmax(-1).tolist()
    was = before.softmax(-1).tolist()
    change = ", ".join(f"{WORDS[n]} {'less' if after[n] < was[n] else 'MORE'} likely" for n in (2, 3))
    return plots.filtered_bars(WORDS, was, after, title=f"floor and moon were seen: {change}")


@dataclass(frozen=True)
class _LeavesLogits(Exercise):
    """An exercise whose first argument must stay as it is: a right answer that changes it is told so."""

    def check(self, answer: Any) -> bool:
        right = callable(answer) and all(self._right(Outcome.of(answer, case.args), case) for case in self.cases)
        if not right or not any(_changes_logits(answer, case) for case in self.cases):
            return super().check(answer)
        print(
            f"{self.name}: not right yet. What it returns is right in all {len(self.cases)} cases, but the logits that "
            "it was given have changed as well.\nHint: Whoever called may still need them as they were. Begin with "
            "logits.clone(), and punish the copy."
        )
        return False


def _changes_logits(penalise: Function, case: Case) -> bool:
    logits, *others = copy.deepcopy(case.args)
    before = logits.clone()
    penalise(logits, *others)
    return not torch.equal(logits, before)


PENALISE = _LeavesLogits(
    name="penalise",
    parameters=("logits", "seen", "penalty"),
    cases=(
        Case((torch.tensor([2.0, 1.0, -1.0]), [0], 2.0), [1.0, 1.0, -1.0], "a positive logit"),
        Case((torch.tensor([2.0, 1.0, -1.0]), [2], 2.0), [2.0, 1.0, -2.0], "a negative logit"),
        Case((torch.tensor([3.0, 0.0, -1.0, 6.0]), [3, 3, 3], 1.5), [3.0, 0.0, -1.0, 4.0], "seen three times"),
        Case((torch.tensor([1.0, -2.0]), [], 1.3), [1.0, -2.0], "nothing was seen"),
    ),
    mistakes=(
        Mistake(
            "divides negative logits",
            "A negative logit divided by the penalty moves up: -1 / 2 is -0.5, and the token gets likelier. Multiply "
            "where the logit is negative.",
            (_on_seen(lambda values, penalty: values / penalty),),
        ),
        Mistake(
            "multiplies",
            "You multiply positive logits: 2 becomes 4, and the token gets likelier. Divide where a logit is positive.",
            (
                _on_seen(lambda values, penalty: values * penalty),
                _on_seen(lambda values, penalty: torch.where(values > 0, values * penalty, values / penalty)),
            ),
        ),
        Mistake(
            "once for each occurrence",
            "A token that was seen three times is punished three times here. The repetition penalty counts whether a "
            "token was seen, not how often (that is the frequency penalty): go through the set of ids.",
            (_for_each_occurrence,),
        ),
        Mistake(
            "subtracts",
            "You take the penalty off. That is how presence and frequency penalties work; the repetition penalty "
            "divides and multiplies.",
            (_on_seen(lambda values, penalty: values - penalty),),
        ),
        Mistake(
            "every token",
            "You changed tokens that were not seen. Only the ids in `seen` are punished.",
            (
                lambda logits, seen, penalty: torch.where(logits > 0, logits / penalty, logits * penalty),
                lambda logits, seen, penalty: logits / penalty,
            ),
        ),
        Mistake(
            "new tokens only",
            "You punish the tokens that were not seen and spare those that were. It is the other way round.",
            (
                lambda logits, seen, penalty: torch.tensor(
                    [
                        float(x) if n in seen else float(x / penalty if x > 0 else x * penalty)
                        for n, x in enumerate(logits)
                    ]
                ),
            ),
        ),
    ),
    hint="For every id in set(seen): a positive logit is divided by the penalty, a negative one multiplied.",
    solved="Both ways the logit goes down, once for each token that was seen, and the others stay as they are.",
    draw=_draw_penalise,
)
