"""Exercise of chapter 6 about copy-on-write: a token is written to a block that others may hold as well.

Invariant: expected states were worked out by hand from the rules in the chapter; none comes from the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake, Outcome
from ..values import shortened

State = dict[str, Any]


@dataclass(frozen=True)
class InPlace:
    """A function that changes its arguments, as one that returns what has become of them."""

    function: Function

    @classmethod
    def of(cls, function: Any) -> Any:
        return cls(function) if callable(function) and not isinstance(function, cls) else function

    @property
    def __code__(self) -> Any:  # by which a check knows a stub, and finds the learner's lines
        return self.function.__code__

    def __call__(self, table: Any, token: Any, pool: Any, references: Any, free: Any) -> State:
        result = self.function(table, token, pool, references, free)
        if result is ...:
            raise NotImplementedError
        return {"table": table, "pool": pool, "references": references, "free": free}


def _append(
    table: State, token: str, pool: list[list], references: list[int], free: list[int], *, take: int = -1,
    copies: str = "shared", lowers: bool = True, sets: bool = True, counts: bool = True, grows: str = "full",
    tokens_copied: str = "all", copies_full: bool = False, entry: bool = True,
) -> None:  # fmt: skip
    """The right way, and with other options the wrong ones. take: which of the free blocks."""
    blocks, slot = table["blocks"], table["tokens"] % len(pool[0])

    def new() -> int:
        block = free.pop(take)
        if sets:
            references[block] = 1
        return block

    def own() -> int:
        old, block = blocks[-1], new()
        pool[block] = {"all": list(pool[old]), "alias": pool[old], "none": pool[block]}[tokens_copied]
        if lowers:
            references[old] -= 1
        if entry:
            blocks[-1] = block
        return block

    target = blocks[-1] if blocks else None
    if slot == 0 and (grows == "full" or not blocks):
        if copies_full and blocks and references[blocks[-1]] > 1:
            own()
        target = new()
        blocks.append(target)
    elif grows == "always":
        target = new()
        blocks.append(target)
    elif copies == "always" or (copies == "shared" and references[blocks[-1]] > 1):
        target = own()
    pool[target][slot] = token
    table["tokens"] += counts


def _wrong(**options: Any) -> InPlace:
    return InPlace(lambda *args: _append(*args, **options))


@dataclass(frozen=True)
class _Append(Exercise):
    """Looks at what has become of the arguments, and leaves open which of the free blocks is taken."""

    def check(self, answer: Any) -> bool:
        return super().check(InPlace.of(answer))

    def _right(self, outcome: Outcome, case: Case) -> bool:
        other = Outcome.of(_wrong(take=0), case.args)  # the right way, with the other end of the list
        return super()._right(outcome, case) or outcome.same_as(other, self.tolerance)

    def call_lines(self, case: Case) -> list[str]:
        table, token, pool, references, free = case.args
        before = {"table": table, "pool": pool, "references": references, "free": free}
        return [f"append(table, {token!r}, pool, references, free)", f"before   {self.value_line(before)}"]

    def value_line(self, value: Any) -> str:
        try:
            slots = " | ".join(" ".join("_" if s is None else str(s) for s in block) for block in value["pool"])
            table = value["table"]
            tokens = "1 token" if table["tokens"] == 1 else f"{table['tokens']} tokens"
            text = f"blocks {table['blocks']}, {tokens}; pool {slots}; references {value['references']}"
            return shortened(f"{text}; free {value['free']}", 115)
        except Exception:
            return super().value_line(value)


def _draw_append(append: Function) -> Any:
    """A and B hold the same two blocks; then both go on, each in its own way."""
    from .. import plots

    pool: list[list] = [["The", "cat", "sat"], ["on", None, None], *([None] * 3 for _ in range(4))]
    tables = {name: {"blocks": [0, 1], "tokens": 4} for name in "AB"}
    references, free = [2, 2, 0, 0, 0, 0], [5, 4, 3, 2]
    function = InPlace.of(append)
    for name, word in (("B", "a"), ("A", "the"), ("B", "roof"), ("A", "mat"), ("B", "now")):
        function(tables[name], word, pool, references, free)
    read = {
        name: [str(pool[table["blocks"][n // 3]][n % 3] or "?") for n in range(table["tokens"])]
        for name, table in tables.items()
    }
    texts = ", ".join(f"{name} reads “{' '.join(words)}”" for name, words in read.items())
    return plots.block_table(
        {name: table["blocks"] for name, table in tables.items()}, read, block_size=3, num_blocks=len(pool), title=texts
    )


def _case(about: str, before: Sequence[Any], after: Sequence[Any]) -> Case:
    """(blocks, tokens, pool as text, references, free), before and after an "x" is appended."""

    def state(part: Sequence[Any]) -> tuple[State, list[list], list[int], list[int]]:
        blocks, tokens, text, references, free = copy.deepcopy(part)
        pool = [[None if s == "_" else s for s in block.split()] for block in text.split("|")]
        return {"blocks": blocks, "tokens": tokens}, pool, references, free

    table, *rest = state(before)
    expected = dict(zip(("table", "pool", "references", "free"), state(after), strict=True))
    return Case((table, "x", *rest), expected, about)


APPEND = _Append(
    name="append",
    parameters=("table", "token", "pool", "references", "free"),
    cases=(
        _case("an empty table", ([], 0, "_ _ | _ _", [0, 0], [1, 0]), ([0], 1, "x _ | _ _", [1, 0], [1])),
        _case("room in a block of its own", ([1], 1, "_ _ | a _", [0, 1], [0]), ([1], 2, "_ _ | a x", [0, 1], [0])),
        _case("the last block is full", ([1], 2, "_ _ | a b", [0, 1], [0]), ([1, 0], 3, "x _ | a b", [1, 1], [])),
        _case(
            "the last block is shared", ([0, 1], 3, "a b | c _ | _ _", [2, 2, 0], [2]),
            ([0, 2], 4, "a b | c _ | c x", [2, 1, 1], []),
        ),
        _case(
            "the last block is shared, and full", ([0], 2, "a b | _ _ | _ _", [2, 0, 0], [2, 1]),
            ([0, 1], 3, "a b | x _ | _ _", [2, 1, 0], [2]),
        ),
        _case("three hold it", ([0], 1, "a _ _ | _ _ _", [3, 0], [1]), ([1], 2, "a _ _ | a x _", [2, 1], [])),
        _case(
            "only its beginning is shared", ([2, 0], 3, "c _ | _ _ | a b", [1, 0, 2], [1]),
            ([2, 0], 4, "c x | _ _ | a b", [1, 0, 2], [1]),
        ),
    ),
    mistakes=(
        Mistake(
            "written into the shared block",
            "Your token stands in a block that another table holds as well: that request would read a token which is "
            "not its own. With references[block] > 1, copy it to a free block and write there.",
            (_wrong(copies="never"),),
        ),
        Mistake(
            "count of the old block",
            "After the copy this table no longer holds the old block, so references of it goes down by one. A count "
            "that stays too high keeps the block from ever becoming free.",
            (_wrong(lowers=False),),
        ),
        Mistake(
            "count of the new block",
            "A block that comes from the free list is held by one table now: references[new] = 1. With 0 it would be "
            "handed out again.",
            (_wrong(sets=False),),
        ),
        Mistake(
            "a full block copied",
            "You copied a block that is full. Nothing is going to be written to it, so it can stay shared for good: "
            "take a new block for the token, and copy nothing.",
            (_wrong(copies_full=True),),
        ),
        Mistake("tokens not counted", 'Count the token: table["tokens"] += 1.', (_wrong(counts=False),)),
        Mistake(
            "no new block",
            "The last block was full and you took no other: the token went over the first one in it. When "
            'table["tokens"] % block size is 0, there is no room in the last block.',
            (_wrong(grows="never"),),
        ),
        Mistake(
            "a block for every token",
            "You take a new block for each token. As long as the last one has an empty slot, the token goes there.",
            (_wrong(grows="always"),),
        ),
        Mistake(
            "always copied",
            "You copy the last block even where this table alone holds it. With a count of 1, write in place.",
            (_wrong(copies="always"),),
        ),
        Mistake(
            "not a copy",
            "pool[new] = pool[old] makes two names for one list, and the write shows in both. Copy what is in it: "
            "list(pool[old]).",
            (_wrong(tokens_copied="alias"),),
        ),
        Mistake(
            "nothing copied",
            "You took a block for the copy, and put only the new token into it. The tokens that the old one held "
            "belong to this table too.",
            (_wrong(tokens_copied="none"),),
        ),
        Mistake(
            "old block in the table",
            "The copy is made, but the table still names the old block: blocks[-1] = new.",
            (_wrong(entry=False),),
        ),
    ),
    hint="Three ways: the last block is full (take one), shared (copy, then write) or its own. Count the token.",
    solved="What two requests share is copied at the last moment, one block of it, and only if somebody writes.",
    draw=_draw_append,
)  # fmt: skip
