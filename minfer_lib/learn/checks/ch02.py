"""Checks of chapter 2, The naive loop: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch02_loop import HOLD_BACK, TOTAL_TOKENS
from .ch02_penalty import PENALISE
from .ch02_sampling import DISTRIBUTION, TOP_P_FILTER

EXERCISES = (DISTRIBUTION, TOP_P_FILTER, PENALISE, HOLD_BACK, TOTAL_TOKENS)


def check_distribution(distribution: Function) -> bool:
    """Checks `distribution(logits, temperature) -> probabilities [vocab]`; temperature 0 is greedy."""
    return DISTRIBUTION.check(distribution)


def check_top_p_filter(top_p_filter: Function) -> bool:
    """Checks `top_p_filter(probs, p) -> list of the ids that stay`, most likely first; `probs` is a tensor [vocab]."""
    return TOP_P_FILTER.check(top_p_filter)


def check_penalise(penalise: Function) -> bool:
    """Checks `penalise(logits, seen, penalty) -> logits [vocab]` with the repetition penalty on the ids in `seen`."""
    return PENALISE.check(penalise)


def check_hold_back(hold_back: Function) -> bool:
    """Checks `hold_back(text, stops) -> str`: the longest end of `text` that may be the beginning of a stop string."""
    return HOLD_BACK.check(hold_back)


def check_total_tokens(total_tokens: Function) -> bool:
    """Checks `total_tokens(prompt, new) -> int`: tokens that a loop without a cache runs through the model."""
    return TOTAL_TOKENS.check(total_tokens)
