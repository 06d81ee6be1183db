"""Exercise of chapter 4 about the scheduler: who takes part in a step, and with how many tokens.

Invariant: expected values were worked out by hand from the rules in the chapter, none comes from the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

Queue = Sequence[tuple[str, int]]


def _schedule(
    running: Queue, waiting: Queue, budget: int, max_num_seqs: int, *, in_order: bool = False, chunked: bool = True,
    decodes_count: bool = True, limit: str = "all", counts_down: bool = True, zeros: bool = False, admits: bool = True,
    prompts_run: bool = True,
) -> dict[str, int]:  # fmt: skip
    """The right schedule, and with other options the wrong ones."""
    chosen: dict[str, int] = {}
    left = budget

    def give(request: str, wanted: int, counts: bool = True) -> None:
        nonlocal left
        tokens = min(wanted, left) if chunked or wanted <= left else 0
        if tokens or zeros:
            chosen[request] = tokens
        if counts_down and counts:
            left -= tokens

    queue = running if in_order else sorted(running, key=lambda request: request[1] > 0)  # stable
    for request, prompt in queue:
        if prompt == 0 or prompts_run:
            give(request, prompt or 1, decodes_count or prompt > 0)
    count = {"all": len(running), "new only": 0, "none": -(10**9)}[limit]
    for request, prompt in waiting if admits else ():
        if count >= max_num_seqs or (left <= 0 and not zeros):
            break
        give(request, prompt)
        count += 1
    return chosen


def _one_more(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    return _schedule(running, waiting, budget, max_num_seqs + 1)


def _no_budget(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    return _schedule(running, waiting, 10**9, max_num_seqs)


def _decodes_get_their_left(running: Queue, waiting: Queue, budget: int, max_num_seqs: int) -> dict[str, int]:
    """min(budget, left) for everybody, which is 0 for a request that decodes."""
    return _schedule([request for request in running if request[1]], waiting, budget,
                     max_num_seqs - sum(left == 0 for _, left in running))  # fmt: skip


def _option(**options: Any) -> Function:
    return lambda running, waiting, budget, most: _schedule(running, waiting, budget, most, **options)


def _draw_schedule(schedule: Function) -> Any:
    """Steps of a toy run: four requests, a budget of 6 tokens, two at once."""
    from .. import plots

    prompts, answers = {"A": 5, "B": 9, "C": 4, "D": 3}, {"A": 4, "B": 3, "C": 2, "D": 2}
    left, made = dict(prompts), dict.fromkeys(prompts, 0)
    running: list[str] = []
    waiting, rows = list(prompts), dict.fromkeys(prompts, "")
    for _ in range(24):
        if not running and not waiting:
            break
        step = schedule([(r, left[r]) for r in running], [(r, prompts[r]) for r in waiting], 6, 2)
        for request in prompts:
            tokens = step.get(request, 0)
            state = "d" if tokens and left[request] == 0 else "p" if tokens else "w"
            rows[request] += " " if request not in running + waiting else state
        for request, tokens in step.items():
            if request in waiting:
                waiting.remove(request)
                running.append(request)
            left[request] -= min(tokens, left[request])
            made[request] += left[request] == 0
        running = [request for request in running if made[request] < answers[request]]
    ended = "all get done" if not running and not waiting else "not all get done"
    title = f"6 tokens a step, 2 requests at once: {ended}"
    return plots.iteration_timeline({"your scheduler": rows}, title=title)


SCHEDULE = Exercise(
    name="schedule",
    parameters=("running", "waiting", "budget", "max_num_seqs"),
    cases=(
        Case(([], [], 8, 4), {}, "nothing to do"),
        Case(([("a", 0), ("b", 0)], [], 8, 4), {"a": 1, "b": 1}, "two decode"),
        Case(([], [("a", 5)], 8, 4), {"a": 5}, "a prompt that fits"),
        Case(([], [("a", 20)], 8, 4), {"a": 8}, "a prompt larger than the budget"),
        # one token for b, then 7 of the 12 that a has left
        Case(([("a", 12), ("b", 0)], [("c", 3)], 8, 4), {"b": 1, "a": 7}, "a prompt under way and a decode step"),
        # one each for a and b, 6 left: 3 for c, 3 of the 9 of d, nothing for e
        Case(
            ([("a", 0), ("b", 0)], [("c", 3), ("d", 9), ("e", 2)], 8, 8),
            {"a": 1, "b": 1, "c": 3, "d": 3},
            "two decode, three wait",
        ),
        Case(
            ([("a", 0), ("b", 2)], [("c", 2), ("d", 2), ("e", 2)], 16, 3), {"a": 1, "b": 2, "c": 2}, "room for one more"
        ),
        Case(([("a", 0), ("b", 0)], [("c", 2)], 16, 2), {"a": 1, "b": 1}, "no room for more"),
        Case(([("a", 0), ("b", 0), ("c", 0)], [("d", 2)], 2, 8), {"a": 1, "b": 1}, "more decode than the budget"),
    ),
    mistakes=(
        Mistake(
            "whole prompts only",
            "A prompt that is larger than what is left gets nothing in yours. Give it what is left: the rest of it "
            "comes in later steps, that is what a chunk is.",
            (_option(chunked=False),),
        ),
        Mistake(
            "order of the list",
            "You go through `running` as it stands, and a prompt takes the budget from those that decode. They come "
            "first: somebody is reading along.",
            (_option(in_order=True),),
        ),
        Mistake(
            "budget ignored",
            "You give more tokens than the budget. It bounds the sum over all requests of the step.",
            (_no_budget,),
        ),
        Mistake(
            "budget for each",
            "Each request gets up to the whole budget in yours. Take off what has been given away.",
            (_option(counts_down=False),),
        ),
        Mistake(
            "decodes for nothing",
            "Tokens of requests that decode count too: take them off the budget.",
            (_option(decodes_count=False),),
        ),
        Mistake(
            "a decode step without a token",
            "A request that decodes has no prompt left, and computes one token all the same: the one sampled last.",
            (_decodes_get_their_left,),
        ),
        Mistake(
            "nobody admitted",
            "Nobody is taken from the queue. While budget is left and fewer than max_num_seqs run, its front joins.",
            (_option(admits=False),),
        ),
        Mistake(
            "limit ignored",
            "More than max_num_seqs run in yours. Those that run already count as well as those that join.",
            (_option(limit="none"), _option(limit="new only")),
        ),
        Mistake(
            "one too many", "You admit one too many: at most max_num_seqs run, that number included.", (_one_more,)
        ),
        Mistake(
            "prompts under way forgotten",
            "A running request whose prompt is not complete gets nothing in yours. It comes before the queue.",
            (_option(prompts_run=False),),
        ),
        Mistake(
            "zeros",
            "Requests with 0 tokens are in your answer. Who takes no part in the step is left out.",
            (_option(zeros=True),),
        ),
    ),
    hint="Three loops over one budget: who decodes (1 token), who has prompt left (min(left, budget)), who waits.",
    solved="Nobody waits for a whole batch any more: this function is asked again before each step.",
    draw=_draw_schedule,
)
