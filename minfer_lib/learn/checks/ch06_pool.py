"""Exercises of chapter 6 about a pool that several requests share: copy-on-write, and who gives way when it is full.

Invariant: expected states were worked out by hand from the rules in the chapter; none comes from the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake
from ..values import shortened, shown

# -- copy-on-write ----------------------------------------------------------------------------------------------------

State = dict[str, Any]


def append(table: State, token: str, pool: list[list], references: list[int], free: list[int]) -> None:
    """Writes a token behind the last one of a table.

    table: {"blocks": [...], "tokens": n}. pool: blocks, which are lists of slots, None where empty. references: how
    many tables hold each block. free: blocks that nobody holds; `free.pop()` takes one. All are changed in place. A
    block that others hold too is copied before it is written to; behind a full one a new one is taken.
    """
    blocks, slot = table["blocks"], table["tokens"] % len(pool[0])
    if slot == 0:
        blocks.append(free.pop())
        references[blocks[-1]] = 1
    elif references[blocks[-1]] > 1:
        shared, own = blocks[-1], free.pop()
        pool[own] = list(pool[shared])
        references[shared] -= 1
        references[own] = 1
        blocks[-1] = own
    pool[blocks[-1]][slot] = token
    table["tokens"] += 1


def _appends(
    copies: Callable[[int, int], bool] = lambda count, slot: count > 1 and slot > 0, copied: Function = list,
    given_back: int = 1, held: int = 1,
) -> Function:  # fmt: skip
    """Wrong ways. copies: whether the last block is copied, from (references of it, slot of the new token); copied: its
    tokens; given_back, held: what the count of the old block goes down by, and what that of a new one is set to."""

    def wrong(table: State, token: str, pool: list[list], references: list[int], free: list[int]) -> None:
        blocks, slot = table["blocks"], table["tokens"] % len(pool[0])
        if blocks and copies(references[blocks[-1]], slot):
            old, new = blocks[-1], free.pop()
            pool[new] = copied(pool[old])
            references[old] -= given_back
            references[new] = held
            blocks[-1] = new
        if slot == 0:
            blocks.append(free.pop())
            references[blocks[-1]] = held
        pool[blocks[-1]][slot] = token
        table["tokens"] += 1

    return wrong


def _run_append(append: Function, table: Any, token: Any, pool: Any, references: Any, free: Any) -> State:
    """It returns nothing: what has become of its arguments is compared."""
    if append(table, token, pool, references, free) is ...:
        raise NotImplementedError
    return {"table": table, "pool": pool, "references": references, "free": free}


def _state(blocks: list[int], tokens: int, pool: str, references: list[int], free: list[int]) -> State:
    slots = [[None if slot == "_" else slot for slot in block.split()] for block in pool.split("|")]
    return {"table": {"blocks": blocks, "tokens": tokens}, "pool": slots, "references": references, "free": free}


def _case(about: str, before: State, *after: State) -> Case:
    """An "x" is appended. Of several states after it each is right: any of the free blocks may be taken."""
    table, *rest = before.values()
    return Case((table, "x", *rest), after[0], about, also=after[1:])


def _state_line(state: Any) -> str:
    try:
        slots = " | ".join(" ".join("_" if s is None else str(s) for s in block) for block in state["pool"])
        blocks, tokens = state["table"]["blocks"], state["table"]["tokens"]
        text = f"blocks {blocks}, {tokens} token{'s' * (tokens != 1)}; pool {slots}; references {state['references']}"
        return shortened(f"{text}; free {state['free']}", 115)
    except Exception:  # a wrong answer may have put anything there
        return shown(state)


def _append_lines(case: Case) -> list[str]:
    table, token, pool, references, free = case.args
    before = {"table": table, "pool": pool, "references": references, "free": free}
    return [f"append(table, {token!r}, pool, references, free)", f"before   {_state_line(before)}"]


def _draw_append(append: Function) -> Any:
    """A and B hold the same two blocks; then both go on, each in its own way."""
    from .. import plots

    pool: list[list] = [["The", "cat", "sat"], ["on", None, None], *([None] * 3 for _ in range(4))]
    tables = {name: {"blocks": [0, 1], "tokens": 4} for name in "AB"}
    references, free = [2, 2, 0, 0, 0, 0], [5, 4, 3, 2]
    for name, word in (("B", "a"), ("A", "the"), ("B", "roof"), ("A", "mat"), ("B", "now")):
        append(tables[name], word, pool, references, free)
    read = {
        name: [str(pool[table["blocks"][n // 3]][n % 3] or "?") for n in range(table["tokens"])]
        for name, table in tables.items()
    }
    texts = ", ".join(f"{name} reads “{' '.join(words)}”" for name, words in read.items())
    blocks = {name: table["blocks"] for name, table in tables.items()}
    return plots.block_table(blocks, read, block_size=3, num_blocks=len(pool), title=texts)


check_append = Exercise(
    append,
    cases=(
        _case(
            "an empty table", _state([], 0, "_ _ | _ _", [0, 0], [1, 0]),
            _state([0], 1, "x _ | _ _", [1, 0], [1]), _state([1], 1, "_ _ | x _", [0, 1], [0]),
        ),
        _case(
            "the last block is full", _state([1], 2, "_ _ | a b", [0, 1], [0]),
            _state([1, 0], 3, "x _ | a b", [1, 1], []),
        ),
        _case(
            "the last block is shared", _state([0, 1], 3, "a b | c _ | _ _", [2, 2, 0], [2]),
            _state([0, 2], 4, "a b | c _ | c x", [2, 1, 1], []),
        ),
        _case(
            "the last block is shared, and full", _state([0], 2, "a b | _ _ | _ _", [2, 0, 0], [2, 1]),
            _state([0, 1], 3, "a b | x _ | _ _", [2, 1, 0], [2]), _state([0, 2], 3, "a b | _ _ | x _", [2, 0, 1], [1]),
        ),
        _case(
            "only its beginning is shared", _state([2, 0], 3, "c _ | _ _ | a b", [1, 0, 2], [1]),
            _state([2, 0], 4, "c x | _ _ | a b", [1, 0, 2], [1]),
        ),
    ),
    mistakes=(
        Mistake(
            "You wrote into a block that another table holds as well: that request would read a token which is not its "
            "own. If references[block] > 1, copy the block to a free one and write there.",
            _appends(copies=lambda count, slot: False),
        ),
        Mistake(
            "After the copy this table no longer holds the old block, so its count goes down by one. A count that "
            "stays too high keeps the block from ever becoming free.",
            _appends(given_back=0),
        ),
        Mistake(
            "A block that comes from the free list is held by one table now: references[new] = 1. With 0 it would be "
            "handed out again.",
            _appends(held=0),
        ),
        Mistake(
            "You copied a block that is full. Nobody will write to it again, so it can stay shared for good: take a "
            "new block for the token, and copy nothing.",
            _appends(copies=lambda count, slot: count > 1),
        ),
        Mistake(
            "pool[new] = pool[old] makes two names for one list, and the write shows in both. Copy what is in it: "
            "list(pool[old]).",
            _appends(copied=lambda block: block),
        ),
    ),
    hints=(
        "The last block is full (or there is none), or it has room and is shared, or it has room and belongs to this "
        "table alone. What does each of the three need before you can write?",
        'It is full if table["tokens"] % len(pool[0]) is 0: take a block, its count is 1. Shared: take a block, copy '
        "the list, set one count to 1 and lower the other, put the new block into the table. Then write, and count the "
        "token.",
    ),
    solved="What two requests share is copied at the last moment, one block of it, and only if somebody writes.",
    draw=_draw_append,
    run=_run_append,
    call_lines=_append_lines,
    value_line=_state_line,
)  # fmt: skip


# -- who gives way ----------------------------------------------------------------------------------------------------

Running = dict[str, Any]


def choose_victim(running: Sequence[Running], needed_by: Running) -> Running | None:
    """The request that has to give its blocks back, or None.

    running: dicts with name, priority (lower is more urgent), arrival, blocks and generated; needed_by: the one of them
    that needs a block. The victim is last by priority, then by arrival; None if that is needed_by: it waits.
    """
    last = max(running, key=lambda request: (request["priority"], request["arrival"]))
    return None if last == needed_by else last


def _order(request: Running) -> tuple[int, int]:
    return request["priority"], request["arrival"]


def _last_by(order: Function) -> tuple[Function, Function]:
    """Another order, by somebody who remembers when to return None and by somebody who does not."""

    def remembers(running: Sequence[Running], needed_by: Running) -> Running | None:
        last = max(running, key=order)
        return None if last == needed_by else last

    return remembers, lambda running, needed_by: max(running, key=order)


def _request(name: str, priority: int, arrival: int, blocks: int, generated: int) -> Running:
    return {"name": name, "priority": priority, "arrival": arrival, "blocks": blocks, "generated": generated}


def _victim_lines(case: Case) -> list[str]:
    running, needed_by = case.args
    text = "    {name}: priority {priority}, arrival {arrival}, {blocks} blocks, {generated} generated"
    requests = [text.format(**request) for request in running]
    return ["choose_victim(running, needed_by) with", *requests, f"    needed_by: {needed_by['name']}"]


def _draw_choose_victim(choose_victim: Function) -> Any:
    """Four requests in a pool that is too small for all of them at once."""
    from .. import plots

    size, pool, prompt, answer = 2, 8, 3, 9
    requests = [_request(name, 0, n, 0, 0) for n, name in enumerate("ABCD")]
    running, waiting, rows = [], list(requests), dict.fromkeys("ABCD", "")
    preemptions = again = 0

    def takes(request: Running) -> bool:
        """The blocks for one more token, if there are as many."""
        needs = -(-(prompt + request["generated"]) // size)
        if sum(r["blocks"] for r in requests) - request["blocks"] + needs > pool:
            return False
        request.update(blocks=needs, generated=request["generated"] + 1)
        return True

    while (running or waiting) and len(rows["A"]) < 40:
        states = {request["name"]: "w" for request in [*running, *waiting]}
        for request in sorted(running, key=_order):
            while request in running and states[request["name"]] != "d":
                if takes(request):
                    states[request["name"]] = "d"
                    break
                victim = choose_victim(*copy.deepcopy((running, request)))
                if victim is None:
                    break
                victim = next(r for r in running if r["name"] == victim["name"])
                preemptions += 1
                again += prompt + victim["generated"] - 1
                victim["blocks"], states[victim["name"]] = 0, "w"
                running.remove(victim)
                waiting.append(victim)
        waiting.sort(key=_order)
        while waiting and takes(waiting[0]):
            states[waiting[0]["name"]] = "p"
            running.append(waiting.pop(0))
        for name in rows:
            rows[name] += states.get(name, " ")
        for request in [r for r in running if r["generated"] == answer]:
            request["blocks"] = 0
            running.remove(request)
    ended = "not all get done" if running or waiting else f"A is done in step {len(rows['A'].rstrip())}"
    title = f"{preemptions} preemptions, {again} tokens computed again; {ended}"
    figure = plots.iteration_timeline({"with your choice": rows}, title=title)
    figure.axes[0].texts[0].set_text(f"with your choice, in a pool of {pool} blocks of {size} tokens")
    return figure


A, B, C = _request("a", 0, 0, 9, 5), _request("b", 0, 1, 2, 30), _request("c", 0, 2, 5, 11)
BIG = _request("big", 0, 1, 12, 8)
LOW, D = _request("low", 2, 0, 20, 40), _request("d", 1, 5, 3, 20)

check_choose_victim = Exercise(
    choose_victim,
    cases=(
        Case(([A, B, C], A), C, "the first needs a block"),
        Case(([A, B, C], C), None, "the last needs a block"),
        Case(([C, A, B], B), C, "another order in the list"),
        Case(([LOW, A, D, C], A), LOW, "the first to come is the least urgent"),
        Case(([LOW, A, D, C], LOW), None, "the least urgent needs a block"),
        Case(([A, BIG, C], A), C, "the one in the middle has most blocks"),
    ),
    mistakes=(
        Mistake(
            "You take the one with the most blocks. That frees the most room, but its loss costs the most to compute "
            "again, and a long request might never get to its end.",
            *_last_by(lambda r: r["blocks"]),
        ),
        Mistake(
            "You take the one that came first. It would have to wait again and again for later ones. If the first "
            "never gives way, somebody always gets to the end.",
            *_last_by(lambda r: -r["arrival"]),
            *_last_by(lambda r: (r["priority"], -r["arrival"])),
        ),
        Mistake(
            "You look at the arrival alone. Whoever has the highest priority number gives way first, however early it "
            "came; arrival decides among equals.",
            *_last_by(lambda r: r["arrival"]),
        ),
        Mistake(
            "The request that needs the block is itself the last, and yours preempts it: it would give back all its "
            "blocks in order to get one. Return None, and it keeps them and waits.",
            lambda running, needed_by: max(running, key=_order),
        ),
        Mistake(
            "The request that needs the block is itself the last, and yours takes from one that comes before it. Who "
            "came later must not push others out: return None.",
            lambda running, needed_by: max((r for r in running if r != needed_by), key=_order, default=None),
        ),
    ),
    hints=(
        "Put the running requests in an order. Which is the last of all, and what if that one needs the block itself?",
        "max() with a key takes the last: the key is the tuple of priority and arrival. Return None if you find "
        "needed_by.",
    ),
    solved="The first of all never gives way, so that somebody makes progress in every step.",
    draw=_draw_choose_victim,
    call_lines=_victim_lines,
    value_line=lambda value: str(value["name"]) if isinstance(value, dict) and "name" in value else shown(value),
)
