"""Exercises of chapter 6, PagedAttention: block tables, the online softmax, prefixes; `ch06_pool` has the rest.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package or the solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake
from .ch06_pool import check_append, check_choose_victim

# -- the row of a position --------------------------------------------------------------------------------------------


def row_of(table: Sequence[int], block_size: int, position: int) -> int:
    """The row of the pool that holds the key and value of a position.

    table: the request's blocks in order of position; block b has the rows b * block_size and following.
    """
    return table[position // block_size] * block_size + position % block_size


def _draw_row_of(row_of: Function) -> Any:
    from ..plots.block_tables import placed_rows

    table, size = [4, 1, 3, 0], 3
    return placed_rows([int(row_of(table, size, p)) for p in range(11)], table, block_size=size, num_blocks=6)


check_row_of = Exercise(
    row_of,
    cases=(
        Case(([5], 4, 2), 22, "5 * 4 + 2"),
        Case(([5, 2], 4, 4), 8, "the first token of the second block"),
        Case(([7, 1, 4], 4, 11), 19, "4 * 4 + 3"),
        Case(([9, 3, 6, 0], 2, 5), 13, "6 * 2 + 1"),
        Case(([3, 8], 1, 1), 8, "blocks of one token"),
    ),
    mistakes=(
        Mistake(
            "That is right for a request that lies in one piece. Each entry of the table is a place of its own: first "
            "find out which entry the position belongs to.",
            lambda table, size, position: position,
            lambda table, size, position: table[0] * size + position,
        ),
        Mistake(
            "You added a place in a block to the number of a block. A block has block_size rows: block b begins at row "
            "b * block_size.",
            lambda table, size, position: table[position // size] + position % size,
        ),
        Mistake(
            "The block is the right one, but you added the whole position to its beginning. Inside the block the token "
            "stands at position % block_size.",
            lambda table, size, position: table[position // size] * size + position,
        ),
        Mistake(
            "Quotient and remainder have changed places: position // block_size says which entry of the table, "
            "position % block_size which row of the block.",
            lambda table, size, position: table[position % size] * size + position // size,
            lambda table, size, position: table[position % size % len(table)] * size + position // size,
        ),
    ),
    hints=(
        "With blocks of 4, which entry of the table does position 11 belong to? How many tokens stand before it there?",
        "table[position // block_size] is the block. It begins at row block * block_size; the token stands "
        "position % block_size rows further on.",
    ),
    solved="One division and one look into a table: that is what it costs to lie anywhere.",
    draw=_draw_row_of,
)


# -- two parts of a softmax -------------------------------------------------------------------------------------------

Part = tuple[Any, Any, torch.Tensor]  # maximum, total, weighted [dim]


def merge(first: Part, second: Part) -> Part:
    """Two parts of an online softmax put together: (maximum, total, weighted).

    first, second: such triples of two parts of the scores: the maximum, the sum of exp(score - maximum), and [dim], the
    sum of exp(score - maximum) * value; float64 tensors. A part without scores is (-inf, 0, zeros).
    """
    maximum_1, total_1, weighted_1 = first
    maximum_2, total_2, weighted_2 = second
    maximum = max(maximum_1, maximum_2)
    if maximum == -math.inf:  # two empty parts: -inf minus -inf would be no number
        return first
    factor_1, factor_2 = math.exp(maximum_1 - maximum), math.exp(maximum_2 - maximum)
    return maximum, factor_1 * total_1 + factor_2 * total_2, factor_1 * weighted_1 + factor_2 * weighted_2


def _unguarded(first: Part, second: Part) -> Part:
    """Two empty parts become NaN."""
    maximum, total, weighted = merge(first, second)
    return maximum, total + 0 * maximum, weighted + 0 * maximum  # 0 * -inf is NaN


def _without_maximum(exp: Function) -> Function:
    """Parts made into sums of plain exponentials again."""

    def wrong(first: Part, second: Part) -> Part:
        factor_1, factor_2 = exp(first[0]), exp(second[0])
        total, weighted = (factor_1 * first[n] + factor_2 * second[n] for n in (1, 2))
        return max(first[0], second[0]), total, weighted

    return wrong


def _divided(part: Part) -> Part:
    maximum, total, weighted = part
    return maximum, total, weighted / total


def _part(maximum: float, total: float, weighted: Sequence[float]) -> Part:
    return tuple(torch.tensor(x, dtype=torch.float64) for x in (maximum, total, weighted))


def _draw_merge(merge: Function) -> Any:
    """Three parts merged one after the other, with a value for each score that is 1 at its own place."""
    from ..plots.softmax import draw_merged
    from ..style import drawing

    scores = [[2.0, 1.0, 0.5], [3.0, 2.4], [-1.0, 1.8, 0.2]]
    one_hot = torch.eye(sum(map(len, scores)), dtype=torch.float64)  # [scores, scores]
    begin, state = 0, _part(-math.inf, 0.0, [0.0] * len(one_hot))
    for own in scores:
        s = torch.tensor(own, dtype=torch.float64)
        weights = torch.exp(s - s.max())
        part = s.max(), weights.sum(), weights @ one_hot[begin : begin + len(own)]
        state = tuple(torch.as_tensor(x) for x in merge(state, part))
        begin += len(own)
    result = (state[2] / state[1]).reshape(-1)
    if result.shape != (len(one_hot),) or not bool(result.isfinite().all()):
        raise ValueError("not finite")
    return drawing(draw_merged)(scores, result.tolist())


LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)
EMPTY = (-math.inf, 0.0, [0.0, 0.0])

check_merge = Exercise(
    merge,
    cases=(
        # equal maxima: nothing to rescale
        Case((_part(1, 2, [4, 6]), _part(1, 3, [1, 1])), (1.0, 5.0, [5.0, 7.0]), "equal maxima"),
        # exp(0 - ln 2) = 1/2 of the first
        Case((_part(0, 2, [4, 6]), _part(LN2, 1, [10, 20])), (LN2, 2.0, [12.0, 23.0]), "the second has the maximum"),
        # exp(-3 - ln 3 + 3) = 1/3 of the second
        Case((_part(-3, 1, [6, 0]), _part(-3 - LN3, 3, [9, 3])), (-3.0, 2.0, [9.0, 1.0]), "the first has the maximum"),
        # exp(1000) is beyond every float; exp(-ln 4) = 1/4
        Case((_part(1000, 8, [4, 8]), _part(1000 + LN4, 1, [1, 1])), (1000 + LN4, 3.0, [2.0, 3.0]), "large scores"),
        Case((_part(*EMPTY), _part(-2, 2, [3, 5])), (-2.0, 2.0, [3.0, 5.0]), "the first part is empty"),
        Case((_part(*EMPTY), _part(*EMPTY)), EMPTY, "both parts are empty"),
    ),
    mistakes=(
        Mistake(
            "You added sums that are measured against different maxima. Bring both to the larger one first: multiply a "
            "part's sum and vector by exp(its maximum - larger maximum).",
            lambda a, b: (max(a[0], b[0]), a[1] + b[1], a[2] + b[2]),
        ),
        Mistake(
            "The sums are right, but you added the vectors as they came. They are made of the same exponentials, and "
            "need the same factors.",
            lambda a, b: (*merge(a, b)[:2], a[2] + b[2]),
            lambda a, b: (*_unguarded(a, b)[:2], a[2] + b[2]),
        ),
        Mistake(
            "You divided by a sum. The parts are not done yet: keep sums and vectors apart, and divide once, when the "
            "last part has been merged.",
            lambda a, b: _divided(merge(a, b)),
            lambda a, b: _divided(_unguarded(a, b)),
            lambda a, b: (*merge(a, b)[:2], a[2] / a[1] + b[2] / b[1]),
        ),
        Mistake(
            "exp(1000) is more than a float can hold. Never take exp of a maximum itself: only of its difference to "
            "the larger one, which is 0 or less.",
            _without_maximum(torch.exp),
            _without_maximum(math.exp),
        ),
        Mistake(
            "Two empty parts: -inf - (-inf) is NaN, and so is exp(NaN). This does happen, when a split lies wholly "
            "behind the end of a short request. If the larger maximum is -inf, return an empty part.",
            _unguarded,
        ),
    ),
    hints=(
        "Both sums have to be measured against the same maximum. Which one, and by what factor does each sum change?",
        "The new maximum is the larger of the two. Multiply each part's total and weighted by "
        "exp(its maximum - new maximum), then add. What if both maxima are -inf?",
    ),
    solved="In any order and any number of parts it comes out the same, so parts can be computed at the same time.",
    draw=_draw_merge,
)


# -- what is in the cache ---------------------------------------------------------------------------------------------

Keys = Callable[[Any, tuple[int, ...]], Any]


def matched(prompt: Sequence[int], cached: Mapping[Any, int], block_size: int, key_of: Keys) -> int:
    """How many tokens of a prompt need not be computed.

    cached: {key: block}. key_of(previous, tokens) is the key of a full block with these tokens (a tuple) behind the
    block with the key `previous`, None for the first. Whole blocks from the beginning, and never all of the prompt.
    """
    key, tokens = None, 0
    while tokens + block_size < len(prompt):
        key = key_of(key, tuple(prompt[tokens : tokens + block_size]))
        if key not in cached:
            break
        tokens += block_size
    return tokens


def _on_after_a_miss(prompt: Sequence[int], cached: Mapping[Any, int], block_size: int, key_of: Keys) -> int:
    key, tokens = None, 0
    for begin in range(0, len(prompt) - block_size, block_size):
        key = key_of(key, tuple(prompt[begin : begin + block_size]))
        tokens += block_size * (key in cached)
    return tokens


def _unchained(wrong: Function) -> Function:
    return lambda prompt, cached, size, key_of: wrong(prompt, cached, size, lambda before, tokens: key_of(None, tokens))


class _KeyOf:
    """Keys that can be read: the tokens of all blocks so far, with points between blocks."""

    def __call__(self, previous: Any, tokens: Sequence[int]) -> str:
        own = "".join(str(token) for token in tokens)
        return own if previous is None else f"{previous}.{own}"

    def __repr__(self) -> str:
        return "key_of"


KEY_OF = _KeyOf()


def _draw_matched(matched: Function) -> Any:
    """A prompt in its blocks, what the learner's function takes from the cache, and what the cache has."""
    from ..plots.parts import board, finished, tile
    from ..style import DATA, SOFT_INK, UNUSED, drawing, on_colour

    prompt, size, side = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 3, 0.6
    keys = ["314", "314.159", "314.159.265"]
    cached = {keys[0]: 0, keys[1]: 5, "265": 2}
    count = int(matched(prompt, cached, size, KEY_OF))

    @drawing
    def draw() -> Any:
        figure, ax = board(7.0, 1.6)
        for n, token in enumerate(prompt):
            fill = DATA if n < count else UNUSED
            tile(ax, 0.2 + n * side, 0.5, fill, w=side, h=0.45)
            ax.text(0.2 + (n + 0.5) * side, 0.73, str(token), ha="center", va="center", color=on_colour(fill))
        for n, key in enumerate(keys):
            middle = 0.2 + (n + 0.5) * size * side
            there = "in the cache" if key in cached else "not in the cache"
            ax.plot([middle - 0.85, middle + 0.85], [1.02, 1.02], color=SOFT_INK)
            ax.text(middle, 1.1, f"key {key}\n{there}", ha="center", va="top", size=8.5, color=SOFT_INK)
        return finished(figure, f"Your answer: {count} of {len(prompt)} tokens (coloured) need not be computed")

    return draw()


TWO = {"12": 0, "12.34": 3}

check_matched = Exercise(
    matched,
    cases=(
        Case(([1, 2, 3, 4, 5], TWO, 2, KEY_OF), 4, "two blocks, one token left"),
        Case(([9, 2, 3, 4, 5], TWO, 2, KEY_OF), 0, "another beginning"),
        Case(([1, 2, 3, 4], TWO, 2, KEY_OF), 2, "all of it is cached"),
        Case(([7, 8, 1, 2, 5], {"12": 0, "78": 1}, 2, KEY_OF), 2, "the same tokens behind others"),
        Case(([1, 2, 3, 4, 5, 6, 7], {"12": 0, "12.34.56": 2}, 2, KEY_OF), 2, "a block in between is gone"),
        Case(([1, 2, 3, 4, 5, 6, 7, 8], {"123": 0, "123.456": 4}, 3, KEY_OF), 6, "blocks of three"),
    ),
    mistakes=(
        Mistake(
            "You look for each block as if it were the first: key_of(None, ...). The same tokens behind other tokens "
            "have other keys and values, so the key of the block before goes in.",
            _unchained(matched),
            _unchained(_on_after_a_miss),
        ),
        Mistake(
            "You matched the whole prompt. The model has to see at least one token to say what comes next: compute the "
            "block that holds the last one.",
            lambda prompt, cached, size, key_of: matched([*prompt, None], cached, size, key_of),
        ),
        Mistake(
            "Only whole blocks can be shared. Where the whole prompt is cached you leave out its last token, and would "
            "go on in the middle of a block that belongs to others. Leave out the whole block.",
            lambda prompt, cached, size, key_of: min(matched([*prompt, None], cached, size, key_of), len(prompt) - 1),
        ),
        Mistake(
            "You went on behind a block that is not in the cache. A token needs everything before it, without a gap: "
            "the first miss ends the search.",
            _on_after_a_miss,
        ),
        Mistake(
            "You counted blocks. We want tokens: times block_size.",
            lambda prompt, cached, size, key_of: matched(prompt, cached, size, key_of) // size,
        ),
    ),
    hints=(
        "Go through the prompt block by block. What does the key of each block need, and what ends the search?",
        "While the block ends before the prompt does: key = key_of(key, its tokens as a tuple), beginning with None. "
        "Stop if the key is not in cached, else count block_size tokens.",
    ),
    solved="A system prompt of a thousand tokens costs its first request a thousand, and all others none.",
    draw=_draw_matched,
)


EXERCISES = (check_row_of, check_merge, check_append, check_matched, check_choose_victim)
