"""Exercises of chapter 6 about block tables: the row of a position, and what of a prompt is in the cache already.

Invariant: expected values were worked out by hand from the definitions in the chapter, none comes from the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

# -- the row of a position --------------------------------------------------------------------------------------------


def _draw_row_of(row_of: Function) -> Any:
    from ..plots.block_tables import placed_rows

    table, size = [4, 1, 3, 0], 3
    return placed_rows([int(row_of(table, size, p)) for p in range(11)], table, block_size=size, num_blocks=6)


ROW_OF = Exercise(
    name="row_of",
    parameters=("table", "block_size", "position"),
    cases=(
        Case(([0], 4, 2), 2, "the first block of the pool"),
        Case(([5], 4, 2), 22, "5 * 4 + 2"),
        Case(([5, 2], 4, 4), 8, "the first token of the second block"),
        Case(([7, 1, 4], 4, 11), 19, "4 * 4 + 3"),
        Case(([9, 3, 6, 0], 2, 5), 13, "6 * 2 + 1"),
        Case(([3, 8], 1, 1), 8, "blocks of one token"),
        Case(([6], 16, 15), 111, "the last token of a block"),
    ),
    mistakes=(
        Mistake(
            "the position itself",
            "That is the position itself, as if the request began at row 0 and lay there in one piece. Which block it "
            "is in stands in the table.",
            (lambda table, size, position: position,),
        ),
        Mistake(
            "blocks for rows",
            "You added a place in a block to the number of a block. A block has block_size rows: block b begins at row "
            "b * block_size.",
            (lambda table, size, position: table[position // size] + position % size,),
        ),
        Mistake(
            "no remainder",
            "The block is the right one, but you added the whole position to its beginning. Inside of the block the "
            "token stands at position % block_size.",
            (lambda table, size, position: table[position // size] * size + position,),
        ),
        Mistake(
            "beginning of the block",
            "That is where the block begins. The token stands position % block_size rows further on.",
            (lambda table, size, position: table[position // size] * size,),
        ),
        Mistake(
            "quotient and remainder swapped",
            "Quotient and remainder have changed places: position // block_size says which entry of the table, "
            "position % block_size which row of the block.",
            (
                lambda table, size, position: table[position % size] * size + position // size,
                lambda table, size, position: table[position % size % len(table)] * size + position // size,
            ),
        ),
        Mistake(
            "in one piece",
            "You went on from the first block of the table, as if the others came right behind it. Each entry of the "
            "table is a place of its own.",
            (lambda table, size, position: table[0] * size + position,),
        ),
        Mistake(
            "one block too far",
            "You look one entry too far: position 0 is in table[0].",
            (lambda table, size, position: table[position // size + 1] * size + position % size,),
        ),
    ),
    hint="table[position // block_size] is the block; it begins at row block * block_size; add position % block_size.",
    solved="One division and one look into a table: that is what it costs to lie anywhere.",
    draw=_draw_row_of,
)

# -- what is in the cache ---------------------------------------------------------------------------------------------


class _KeyOf:
    """Keys that can be read: the tokens of all blocks so far, with points between blocks."""

    def __call__(self, previous: Any, tokens: Sequence[int]) -> str:
        own = "".join(str(token) for token in tokens)
        return own if previous is None else f"{previous}.{own}"

    def __repr__(self) -> str:
        return "key_of"


KEY_OF = _KeyOf()
Keys = Callable[[Any, Sequence[int]], Any]


def _matched(
    prompt: Sequence[int], cached: Mapping[str, int], block_size: int, key_of: Keys, *, chained: bool = True,
    stops: bool = True, limit: str = "before the end", of: str = "tokens", previous: str = "key",
) -> int:  # fmt: skip
    """The right answer, and with other options the wrong ones."""
    key: Any = None
    found, last = 0, {"before the end": len(prompt) - 1, "end": len(prompt), "a block less": len(prompt) - block_size}
    for begin in range(0, last.get(limit, len(prompt)) - block_size + 1, block_size):
        tokens = tuple(prompt[begin : begin + block_size])
        mine = key_of(key if chained else None, tokens)
        key = mine if previous == "key" else tokens
        if mine in cached:
            found += 1
        elif stops:
            break
    if of == "blocks":
        return found
    return min(found * block_size, len(prompt) - 1) if limit == "one less" else found * block_size


def _wrong(**options: Any) -> Function:
    return lambda prompt, cached, size, key_of: _matched(prompt, cached, size, key_of, **options)


def _draw_matched(matched: Function) -> Any:
    """A prompt in its blocks, what the learner's function takes from the cache, and what the cache has."""
    from ..style import DATA, INK, SOFT_INK, UNUSED, canvas, drawing, on_colour

    prompt, size = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 3
    keys, key = [], None
    for begin in range(0, len(prompt) - size + 1, size):
        key = KEY_OF(key, prompt[begin : begin + size])
        keys.append(key)
    cached = {keys[0]: 0, keys[1]: 5, "265": 2}
    count = int(matched(prompt, cached, size, KEY_OF))

    @drawing
    def draw() -> Any:
        figure, ax = canvas(7.0, 1.75)
        figure.set_layout_engine("none")
        ax.set_position((0.05, 0.06, 0.9, 0.72))
        ax.set_xlim(-0.1, len(prompt) + 0.1)
        ax.set_ylim(2.0, 0)
        ax.axis("off")
        for n, token in enumerate(prompt):
            fill = DATA if n < count else UNUSED
            ax.bar(n + 0.5, 0.8, width=0.92, bottom=0.2, color=fill)
            ax.text(n + 0.5, 0.6, str(token), ha="center", va="center", size=10, color=on_colour(fill))
        for n, name in enumerate(keys):
            begin, end = n * size + 0.06, (n + 1) * size - 0.06
            ax.plot([begin, end], [1.2, 1.2], color=INK, linewidth=1.4)
            there = "in the cache" if name in cached else "not in the cache"
            ax.text((begin + end) / 2, 1.5, f"key {name}", ha="center", va="center", size=8.5)
            ax.text((begin + end) / 2, 1.82, there, ha="center", va="center", size=8.5, color=SOFT_INK)
        title = f"Your answer: {count} of {len(prompt)} tokens (coloured) need not be computed"
        figure.text(0.18 / 7, 1 - 0.15 / 1.75, title, ha="left", va="top", size=11.5)
        figure.alt = title
        return figure

    return draw()


TWO = {"12": 0, "12.34": 3}

MATCHED = Exercise(
    name="matched",
    parameters=("prompt", "cached", "block_size", "key_of"),
    cases=(
        Case(([1, 2, 3, 4, 5], {}, 2, KEY_OF), 0, "nothing is cached"),
        Case(([1, 2, 3, 4, 5], TWO, 2, KEY_OF), 4, "two blocks, one token left"),
        Case(([1, 2, 9, 9, 5], TWO, 2, KEY_OF), 2, "the same beginning"),
        Case(([1, 2, 3, 4], TWO, 2, KEY_OF), 2, "all of it is cached"),
        Case(([7, 8, 1, 2, 5], {"12": 0, "78": 1}, 2, KEY_OF), 2, "the same tokens behind others"),
        Case(([1, 2, 3, 4, 5, 6, 7], {"12": 0, "12.34.56": 2}, 2, KEY_OF), 2, "a block in between is gone"),
        Case(([1, 2, 3, 4, 5, 6, 7], TWO | {"12.34.56": 1}, 2, KEY_OF), 6, "three blocks, one token left"),
        Case(([1], {"1": 4}, 1, KEY_OF), 0, "one token"),
        Case(([1, 2, 3, 4, 5, 6, 7, 8], {"123": 0, "123.456": 4}, 3, KEY_OF), 6, "blocks of three"),
        Case(([9, 2, 3, 4, 5], TWO, 2, KEY_OF), 0, "another beginning"),
    ),
    mistakes=(
        Mistake(
            "keys not chained",
            "You look for each block as if it were the first: key_of(None, ...). The same tokens behind other tokens "
            "have other keys and values; so the key of the block before goes in.",
            (_wrong(chained=False), _wrong(chained=False, stops=False)),
        ),
        Mistake(
            "all tokens matched",
            "You matched the whole prompt. The model has to see at least one token to say what comes next: the block "
            "that holds the last one is computed.",
            (_wrong(limit="end"),),
        ),
        Mistake(
            "a part of a block",
            "Only whole blocks can be shared. Where the whole prompt is cached you leave out its last token, and would "
            "go on in the middle of a block that belongs to others: leave out the whole block.",
            (_wrong(limit="one less"),),
        ),
        Mistake(
            "on after a miss",
            "You went on behind a block that is not in the cache. What comes before a token must be there without a "
            "gap: the first miss ends the search.",
            (_wrong(stops=False),),
        ),
        Mistake(
            "blocks counted", "You counted blocks. Asked for are tokens: times block_size.", (_wrong(of="blocks"),)
        ),
        Mistake(
            "tokens for the key",
            "You hand key_of the tokens of the block before. It takes the key of that block, which stands for all "
            "tokens up to there.",
            (_wrong(previous="tokens"),),
        ),
        Mistake(
            "a block too few",
            "You leave the last whole block out even where tokens come behind it. Only if the prompt ends with it does "
            "it have to be computed.",
            (_wrong(limit="a block less"),),
        ),
    ),
    hint="From the first block on, while the block ends before the prompt does: make its key from the last one; stop "
    "if it is not in cached.",
    solved="A system prompt of a thousand tokens costs its first request a thousand, and all others none.",
    draw=_draw_matched,
)  # fmt: skip
