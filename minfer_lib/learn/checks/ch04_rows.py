"""Exercises of chapter 4 about the packed row: building it, and who may look at whom in it.

Invariant: expected values were worked out by hand from the definitions in the chapter, none comes from the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

Chunks = Sequence[tuple[list[int], int]]

# -- the row ----------------------------------------------------------------------------------------------------------


def _packed(
    chunks: Chunks, position: Callable[[int, int, int], int] = lambda computed, n, row: computed + n, last: str = "last"
) -> tuple[list[int], list[int], list[int]]:
    """The right row; `position` takes (computed, n-th of the chunk, place in the row), `last` names wrong rows."""
    ids, positions, rows = [], [], []
    for tokens, computed in chunks:
        begin = len(ids)
        positions += [position(computed, n, begin + n) for n in range(len(tokens))]
        ids += tokens
        end = len(ids)
        rows.append({"last": end - 1, "end": end, "begin": begin, "inside": end - begin - 1}[last])
    return ids, positions, rows


def _only_the_very_last(chunks: Chunks) -> tuple[list[int], list[int], list[int]]:
    ids, positions, rows = _packed(chunks)
    return ids, positions, rows[-1:]


def _padded(chunks: Chunks) -> tuple[list[int], list[int], list[int]]:
    longest = max(len(tokens) for tokens, _ in chunks)
    ids = [token for tokens, _ in chunks for token in [0] * (longest - len(tokens)) + tokens]
    positions = [p for t, c in chunks for p in [0] * (longest - len(t)) + list(range(c, c + len(t)))]
    return ids, positions, [longest * (n + 1) - 1 for n in range(len(chunks))]


def _nested(chunks: Chunks) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return [t for t, _ in chunks], [list(range(c, c + len(t))) for t, c in chunks], _packed(chunks)[2]


def _draw_pack(pack: Function) -> Any:
    from .. import plots

    chunks = [([504], 9), ([28], 4), ([11, 12, 13, 14, 15, 16], 0), ([7, 8, 9], 8)]
    ids, positions, rows = pack(chunks)
    return plots.packed_row(
        [len(tokens) for tokens, _ in chunks], ["A", "B", "C", "D"], position_ids=list(positions), last_rows=list(rows),
        title=f"Your row: {len(ids)} tokens with their positions, outlined those that get logits",
    )  # fmt: skip


PACK = Exercise(
    name="pack",
    parameters=("chunks",),
    cases=(
        Case(([([5, 6, 7], 0)],), ([5, 6, 7], [0, 1, 2], [2]), "one prompt"),
        Case(([([9], 3)],), ([9], [3], [0]), "one decode step"),
        Case(([([9], 3), ([4], 7)],), ([9, 4], [3, 7], [0, 1]), "two that decode"),
        Case(([([9], 3), ([5, 6, 7], 0)],), ([9, 5, 6, 7], [3, 0, 1, 2], [0, 3]), "a decode step and a prompt"),
        Case(([([8, 8], 4), ([5, 6, 7], 2)],), ([8, 8, 5, 6, 7], [4, 5, 2, 3, 4], [1, 4]), "two later chunks"),
    ),
    mistakes=(
        Mistake(
            "positions of the row",
            "Your positions count through the row. Each request has its own text: its first new token stands at "
            "num_computed, whatever stands left of it in the row.",
            (lambda c: _packed(c, lambda computed, n, row: row),),
        ),
        Mistake(
            "positions from 0",
            "Your positions begin at 0 in every chunk. A request that has num_computed tokens in the cache goes on "
            "there.",
            (lambda c: _packed(c, lambda computed, n, row: n),),
        ),
        Mistake(
            "positions one too far",
            "Your positions are one too far. Counted from 0, the token after num_computed others has position "
            "num_computed.",
            (lambda c: _packed(c, lambda computed, n, row: computed + n + 1),),
        ),
        Mistake(
            "one position for a chunk",
            "All tokens of a chunk got the same position. They follow each other: num_computed, num_computed + 1, ...",
            (lambda c: _packed(c, lambda computed, n, row: computed),),
        ),
        Mistake(
            "the row after the last",
            "Your last_rows are one too far: they name where the next request begins.",
            (lambda c: _packed(c, last="end"),),
        ),
        Mistake(
            "first rows",
            "You named where each request begins. What is sampled comes from the logits of its last token.",
            (lambda c: _packed(c, last="begin"),),
        ),
        Mistake(
            "counted inside the chunk",
            "Your last_rows are counted inside each chunk. They are places in the row: add what stands left of it.",
            (lambda c: _packed(c, last="inside"),),
        ),
        Mistake(
            "only the very last",
            "There is one last row for the whole step in yours. Each request needs the logits of its own last token.",
            (_only_the_very_last,),
        ),
        Mistake(
            "padded",
            "You padded the chunks to the same length. In a packed row nothing stands between two requests.",
            (_padded,),
        ),
        Mistake(
            "a list for each request",
            "You return a list for each request. The row is flat: all of their tokens in one list.",
            (_nested,),
        ),
    ),
    hint="Token n of a chunk has position num_computed + n; note len(input_ids) - 1 after appending each chunk.",
    solved="The model sees one row of T tokens. Which request each belongs to is the business of attention alone.",
    draw=_draw_pack,
)


# -- who looks at whom ------------------------------------------------------------------------------------------------

Seen = Callable[[int, int, int, int, int, int], bool]


def _mask(seen: Seen) -> Function:
    """A mask from a rule: seen(i, owner of i, position of i, j, owner of j, position of j)."""

    def may_attend(owner: Sequence[Any], position: Sequence[int]) -> list[list[bool]]:
        tokens = list(zip(itertools.count(), owner, position, strict=False))
        return [[seen(*one, *other) for other in tokens] for one in tokens]

    return may_attend


def _draw_may_attend(may_attend: Function) -> Any:
    from .. import plots

    owner, position = ["A", "B", "C", "C", "C", "C", "D", "D", "D"], [9, 4, 0, 1, 2, 3, 8, 9, 10]
    seen = may_attend(owner, position)
    names = [f"{o}{p}" for o, p in zip(owner, position, strict=True)]
    return plots.attention_mask([[bool(s) for s in row] for row in seen], query_labels=names, key_labels=names)


MAY_ATTEND = Exercise(
    name="may_attend",
    parameters=("owner", "position"),
    cases=(
        Case(([0], [0]), [[True]], "one token"),
        Case(([0, 0], [0, 1]), [[True, False], [True, True]], "one prompt"),
        Case(([0, 1], [6, 2]), [[True, False], [False, True]], "two that decode"),
        Case(
            ([0, 1, 1], [5, 0, 1]),
            [[True, False, False], [False, True, False], [False, True, True]],
            "a decode step and a prompt",
        ),
        Case(
            ([0, 0, 1, 1], [4, 5, 4, 5]),
            [[True, False, False, False], [True, True, False, False], [False, False, True, False],
             [False, False, True, True]],
            "two chunks at the same positions",
        ),
        Case(([7, 7, 3], [1, 0, 9]), [[True, True, False], [False, True, False], [False, False, True]],
             "tokens out of order"),
    ),
    mistakes=(
        Mistake(
            "causal only",
            "That is the triangle of a single text. In a packed row what stands to the left may be somebody else's: "
            "the owner has to be the same as well.",
            (_mask(lambda i, o, p, j, other, q: j <= i), _mask(lambda i, o, p, j, other, q: q <= p)),
        ),
        Mistake(
            "same owner only",
            "Tokens of a request see those that come after them. A token may look at itself and at earlier ones.",
            (_mask(lambda i, o, p, j, other, q: o == other),),
        ),
        Mistake(
            "itself hidden",
            "A token may look at itself. In your mask each sees only what stands before it.",
            (_mask(lambda i, o, p, j, other, q: o == other and q < p),),
        ),
        Mistake(
            "the wrong way round",
            "Yours is turned over: the row is the token that looks, the column the one that is looked at.",
            (_mask(lambda i, o, p, j, other, q: o == other and q >= p),),
        ),
        Mistake(
            "places for positions",
            "You compared places in the row. That works while a request's tokens stand in order; what decides is their "
            "position.",
            (_mask(lambda i, o, p, j, other, q: o == other and j <= i),),
        ),
        Mistake(
            "True hides",
            "The other way round: True is to mean that a token may be looked at, and yours marks the hidden ones.",
            (_mask(lambda i, o, p, j, other, q: not (o == other and q <= p)),),
        ),
        Mistake(
            "everybody",
            "Everybody sees everybody: requests would read each other's texts.",
            (_mask(lambda i, o, p, j, other, q: True),),
        ),
    ),
    hint="Row i, column j is True where owner[i] == owner[j] and position[j] <= position[i].",
    solved="A triangle for each request. Most of the square is False, so the engine never builds it whole.",
    draw=_draw_may_attend,
)  # fmt: skip
