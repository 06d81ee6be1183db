"""Checks of chapter 6, PagedAttention: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch06_append import APPEND
from .ch06_merge import MERGE
from .ch06_prefix import MATCHED, ROW_OF
from .ch06_victim import CHOOSE_VICTIM

EXERCISES = (ROW_OF, MERGE, APPEND, MATCHED, CHOOSE_VICTIM)


def check_row_of(row_of: Function) -> bool:
    """Checks `row_of(table, block_size, position) -> row`: where in the pool the key and value of a position are.

    table: the request's blocks in order of position; block b has the rows b * block_size and following.
    """
    return ROW_OF.check(row_of)


def check_merge(merge: Function) -> bool:
    """Checks `merge(first, second) -> (maximum, total, weighted)` of the online softmax.

    first, second: such triples of two parts of the scores: the maximum, the sum of exp(score - maximum), and [dim], the
    sum of exp(score - maximum) * value; float64 tensors. A part without scores is (-inf, 0, zeros).
    """
    return MERGE.check(merge)


def check_append(append: Function) -> bool:
    """Checks `append(table, token, pool, references, free)`, which writes a token behind the last one of a table.

    table: {"blocks": [...], "tokens": n}. pool: blocks, which are lists of slots, None where empty. references: how
    many tables hold each block. free: blocks that nobody holds; `free.pop()` takes one. All are changed in place. A
    block that others hold too is copied before it is written to; behind a full one a new one is taken.
    """
    return APPEND.check(append)


def check_matched(matched: Function) -> bool:
    """Checks `matched(prompt, cached, block_size, key_of) -> tokens` of a prompt that need not be computed.

    cached: {key: block}. key_of(previous, tokens) is the key of a full block with these tokens (a tuple) behind the
    block with the key `previous`, None for the first. Whole blocks from the beginning, and never all of the prompt.
    """
    return MATCHED.check(matched)


def check_choose_victim(choose_victim: Function) -> bool:
    """Checks `choose_victim(running, needed_by) -> request` that has to give its blocks back, or None.

    running: dicts with name, priority (lower is more urgent), arrival, blocks and generated; needed_by: the one of them
    that needs a block. The victim is last by priority, then by arrival; None if that is needed_by: it waits.
    """
    return CHOOSE_VICTIM.check(choose_victim)
