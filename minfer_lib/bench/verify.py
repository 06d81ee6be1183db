"""Do the outputs of two engines allow their times to be compared?

Invariant: an engine that made fewer tokens, or other ones where they must be equal, never stands in a table without a
warning. The rule: greedy sampling in float32 on the same weights gives the same tokens, whatever the engine and
whatever shares the batch. In shorter types rounding differs with the company, and answers may part.
"""

from __future__ import annotations

from collections.abc import Sequence

Tokens = Sequence[Sequence[int]]  # [request] -> token ids of its answer
SAME, DIFFER = "same", "DIFFER"


def judge_lengths(runs: Sequence[Tokens], wanted: Sequence[int] | None) -> list[str]:
    """A warning if any run made answers of other lengths than `wanted` (None: lengths were not promised)."""
    for lengths in [[len(ids) for ids in run] for run in runs]:
        if wanted is not None and lengths != list(wanted):
            at = next((i for i, (got, want) in enumerate(zip(lengths, wanted, strict=False)) if got != want), None)
            if at is None:
                return [f"it gave {len(lengths)} answers to {len(wanted)} requests"]
            return [f"request {at} made {lengths[at]} tokens instead of {wanted[at]}, so its times do not compare"]
    return []


def judge_tokens(runs: Sequence[Tokens], reference: Tokens, *, exact: bool) -> tuple[str, list[str]]:
    """How the tokens of several runs compare with a reference: (a word for the table, warnings).

    exact: whether they must be equal; then a difference is a warning. Otherwise the word is the share of tokens before
    answers part, averaged over requests and runs.
    """
    other = next((run for run in runs if list(map(list, run)) != list(map(list, reference))), None)
    if other is None:
        return SAME, []
    if exact:
        pairs = enumerate(zip(other, reference, strict=False))
        at = next((i for i, (ours, theirs) in pairs if list(ours) != list(theirs)), len(reference))
        where = f" at token {shared(other[at], reference[at])}" if at < min(len(other), len(reference)) else ""
        return DIFFER, [f"its tokens are not those of the first row, from request {at}{where} on"]
    shares = [
        shared(ours, theirs) / max(len(ours), len(theirs), 1)
        for run in runs
        for ours, theirs in zip(run, reference, strict=False)
    ]
    return f"{100 * sum(shares) / max(len(shares), 1):.0f} % until they part", []


def shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two answers have in common before they part."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
