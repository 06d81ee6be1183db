"""Exercise of chapter 6 about preemption: who gives its blocks back when there are none left.

Invariant: expected values were worked out by hand from the rule in the chapter, none comes from the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

Running = dict[str, Any]


def _request(name: str, priority: int, arrival: int, blocks: int, generated: int) -> Running:
    return {"name": name, "priority": priority, "arrival": arrival, "blocks": blocks, "generated": generated}


def _order(request: Running) -> tuple[int, int]:
    return request["priority"], request["arrival"]


def _last(
    running: Sequence[Running], needed_by: Running, order: Function = _order, none: bool = True
) -> Running | None:
    """The right answer, and with another order, or without `none`, a wrong one."""
    last = max(running, key=order)
    return None if none and last == needed_by else last


def _by(order: Function) -> tuple[Function, Function]:
    """The wrong order, by somebody who remembers when to return None and by somebody who does not."""
    return (lambda running, needed_by: _last(running, needed_by, order),
            lambda running, needed_by: _last(running, needed_by, order, none=False))  # fmt: skip


def _name(request: Running | None) -> str | None:
    return None if request is None else request["name"]


def _others_only(running: Sequence[Running], needed_by: Running) -> Running | None:
    return max((request for request in running if request != needed_by), key=_order, default=None)


@dataclass(frozen=True)
class _Victim(Exercise):
    """Shows requests by name."""

    def call_lines(self, case: Case) -> list[str]:
        running, needed_by = case.args
        lines = [
            f"{r['name']}: priority {r['priority']}, arrival {r['arrival']}, {r['blocks']} blocks, "
            f"{r['generated']} generated"
            for r in running
        ]
        return ["choose_victim(running, needed_by) with", *(f"    {line}" for line in lines),
                f"    needed_by: {needed_by['name']}"]  # fmt: skip

    def value_line(self, value: Any) -> str:
        return str(value["name"]) if isinstance(value, dict) and "name" in value else super().value_line(value)


SIZE, POOL, PROMPT, ANSWER = 2, 8, 3, 9


def _draw_choose_victim(choose_victim: Function) -> Any:
    """Four requests in a pool of eight blocks, which is not enough for all of them at once."""
    from .. import plots

    waiting = [_request(name, 0, n, 0, 0) for n, name in enumerate("ABCD")]
    rows, running, closed = dict.fromkeys("ABCD", ""), [], False
    preemptions = again = 0
    while (waiting or running) and len(rows["A"]) < 40:
        state = {request["name"]: "w" for request in [*waiting, *running]}
        for request in sorted(running, key=_order):
            if request not in running:
                continue  # preempted a moment ago
            needs = -(-(PROMPT + request["generated"]) // SIZE)
            while request["blocks"] < needs and sum(r["blocks"] for r in running) >= POOL:
                victim = choose_victim([dict(r) for r in running], dict(request))
                if victim is None:
                    break
                victim = next(r for r in running if r["name"] == victim["name"])
                running.remove(victim)
                waiting.append(victim)
                state[victim["name"]], victim["blocks"], closed = "w", 0, True
                preemptions += 1
                again += PROMPT + victim["generated"] - 1
                if victim is request:
                    break
            if request in running and sum(r["blocks"] for r in running) + needs - request["blocks"] <= POOL:
                request["blocks"] = needs
                request["generated"] += 1
                state[request["name"]] = "d"
        waiting.sort(key=_order)
        while waiting and not (closed and running):
            first = waiting[0]
            needs = -(-(PROMPT + first["generated"]) // SIZE)
            if sum(r["blocks"] for r in running) + needs > POOL:
                break
            running.append(waiting.pop(0))
            first["blocks"], first["generated"] = needs, first["generated"] + 1
            state[first["name"]] = "p"
        for name in rows:
            rows[name] += state.get(name, " ")
        closed = closed and all(request["generated"] < ANSWER for request in running)
        running = [request for request in running if request["generated"] < ANSWER]
    first = (
        f"A, the first, is done in step {len(rows['A'].rstrip())}"
        if not waiting and not running
        else "not all get done"
    )
    title = f"{preemptions} preemptions, {again} tokens computed again; {first}"
    figure = plots.iteration_timeline({"with your choice": rows}, title=title)
    figure.axes[0].texts[0].set_text(f"with your choice, in a pool of {POOL} blocks of {SIZE} tokens")
    return figure


A, B, C = _request("a", 0, 0, 9, 5), _request("b", 0, 1, 2, 30), _request("c", 0, 2, 5, 11)
BIG = _request("big", 0, 1, 12, 8)
LOW = _request("low", 2, 0, 4, 2)
D, E = _request("d", 3, 4, 3, 20), _request("e", 3, 5, 1, 3)

CHOOSE_VICTIM = _Victim(
    name="choose_victim",
    parameters=("running", "needed_by"),
    cases=(
        Case(([A, B, C], A), C, "the first needs a block"),
        Case(([A, B, C], C), None, "the last needs a block"),
        Case(([C, A, B], B), C, "another order in the list"),
        Case(([LOW, A, B, C], B), LOW, "the first to come is the least urgent"),
        Case(([LOW, A, B, C], LOW), None, "the least urgent needs a block"),
        Case(([A, D, E, C], C), E, "two of the same priority"),
        Case(([D, A], D), None, "two requests"),
        Case(([B], B), None, "it is alone"),
        Case(([A, BIG, C], A), C, "the one in the middle has most blocks"),
    ),
    mistakes=(
        Mistake(
            "upside down",
            "The order is upside down: you take the first of all, who must never give way, or nobody might ever get to "
            "an end.",
            _by(lambda r: (-r["priority"], -r["arrival"])),
        ),
        Mistake(
            "the name",
            "You return the request's name. Return its dict.",
            (
                lambda running, needed_by: max(running, key=_order)["name"],
                lambda running, needed_by: _name(_last(running, needed_by)),
            ),
        ),
        Mistake(
            "the largest",
            "You take the one with the most blocks. That frees the most room, but its loss costs the most to compute "
            "again, and a long request might never get to its end.",
            _by(lambda r: r["blocks"]),
        ),
        Mistake(
            "the longest answer",
            "You take the one that has generated most. It would have to wait longest for what it had already: the "
            "order is priority, then arrival.",
            _by(lambda r: r["generated"]),
        ),
        Mistake(
            "the shortest answer",
            "You take the one that has generated least. That is cheap, but the order that nobody can complain about is "
            "priority, then arrival.",
            _by(lambda r: -r["generated"]),
        ),
        Mistake(
            "the oldest",
            "You take the one that came first. It would have to wait again and again for later ones; and if the first "
            "never gives way, somebody always gets to the end.",
            (*_by(lambda r: -r["arrival"]), *_by(lambda r: (r["priority"], -r["arrival"]))),
        ),
        Mistake(
            "priority ignored",
            "You look at the arrival alone. Whoever has the highest priority number gives way first, however early it "
            "came; arrival decides among equals.",
            _by(lambda r: r["arrival"]),
        ),
        Mistake(
            "priority upside down",
            "Lower numbers are more urgent. Yours takes from the most urgent.",
            _by(lambda r: (-r["priority"], r["arrival"])),
        ),
        Mistake(
            "the needy one",
            "The request that needs the block is itself the last, and yours preempts it: it would give back all blocks "
            "in order to get one. Return None, and it keeps them and waits.",
            (lambda running, needed_by: _last(running, needed_by, none=False),),
        ),
        Mistake(
            "from those before it",
            "The request that needs the block is itself the last, and yours takes from one that comes before it. Who "
            "came later must not push others out: return None.",
            (_others_only,),
        ),
        Mistake(
            "last of the list",
            "You take the last of the list. The list is in no order: look at priority and arrival.",
            (
                lambda running, needed_by: running[-1],
                lambda running, needed_by: None if running[-1] == needed_by else running[-1],
            ),
        ),
    ),
    hint="max(running, key=lambda r: (r['priority'], r['arrival'])), and None if that is needed_by.",
    solved="The first of all never gives way, so that somebody makes progress in every step.",
    draw=_draw_choose_victim,
)
