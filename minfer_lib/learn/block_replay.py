"""The blocks of a paged cache under sliders: a run replayed step by step, with other blocks and other pools.

Invariant: what is shown is a step of a real scheduler and a real cache, of an engine's run or of `paged_replay`; moving
a slider replays, and nothing is carried over from the position before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from ..engine.trace import StepTrace
from ..errors import InvalidParameter
from .paged_replay import DEFAULT_REQUESTS, ReplayRequest, replay
from .plots.blocks import Contents, draw_blocks, request_colours
from .plots.lanes import lanes
from .sliders import Choice, Gallery, Slider, explore
from .style import Picture, drawing

BLOCK_SIZES = (1, 2, 4, 8, 16)
LARGEST = BLOCK_SIZES[-1]
NARROW = 4.7  # inches: two pictures side by side


def block_map(
    requests: Sequence[ReplayRequest] | None = None,
    *,
    steps: Sequence[StepTrace] | None = None,
    at: Sequence[int] | None = None,
    block_size: int = 4,
    pool: int = 96,
) -> Gallery | None:
    """Chapter 6: the block map of a step, with sliders for the step, the block size and the size of the pool.

    requests: replayed without a model, with blocks of 1 to 16 tokens in a pool of about half to twice `pool` tokens;
    None: a few that share their beginnings, outgrow small pools and leave tails in large blocks. steps: of an engine
    with kv_cache="paged" and trace=True instead; then there is only the slider over them. at: the steps (from 1) of the
    static picture of an engine's run; None: two telling ones. Raises `InvalidParameter` for what cannot be replayed.
    """
    if steps is not None:
        return _of_engine([step for step in steps if step.blocks is not None], at)
    asked = DEFAULT_REQUESTS if requests is None else tuple(requests)
    if not asked:
        raise InvalidParameter("requests=() is not possible: there must be one ReplayRequest or more to replay.")
    if block_size not in BLOCK_SIZES:
        raise InvalidParameter(f"block_size={block_size!r} is not possible: it must be one of {BLOCK_SIZES}.")
    least = -(-max(each.prompt for each in asked) // LARGEST) * LARGEST  # every prompt fits, in blocks of any size
    pools = sorted({max(least, round(pool * share / LARGEST) * LARGEST) for share in (0.5, 2 / 3, 1, 4 / 3, 2)})
    begin = min(pools, key=lambda tokens: abs(tokens - pool))

    @functools.cache
    def run(size: int, tokens: int) -> tuple[StepTrace, ...]:
        return tuple(replay(asked, block_size=size, num_blocks=tokens // size))

    def draw(step: int, block_size: int, pool: int) -> Picture:
        taken = run(block_size, pool)
        return draw_step(taken, min(step, len(taken)), NARROW)

    longest = max(len(run(size, pools[0])) for size in BLOCK_SIZES)
    shared = _liveliest(run(block_size, begin))
    small = pools[max(0, pools.index(begin) - 1)]
    sizes = [{"step": shared, "block_size": size, "pool": begin} for size in dict.fromkeys((block_size, 1, LARGEST))]
    return explore(
        draw,
        step=Slider(1, longest, 1, shared, play=True),
        block_size=Choice(BLOCK_SIZES, block_size, "block size"),
        pool=Choice(tuple(pools), begin, "pool (tokens)"),
        positions=[*sizes, {"step": _crowded(run(block_size, small)), "block_size": block_size, "pool": small}],
    )


def _of_engine(steps: Sequence[StepTrace], at: Sequence[int] | None) -> Gallery | None:
    if not steps:
        raise InvalidParameter(
            "These steps have no block maps. Make the engine with kv_cache='paged' and trace=True, and give its steps."
        )
    if at is not None and (not at or not all(1 <= step <= len(steps) for step in at)):
        raise InvalidParameter(f"at={at!r} is not possible: it must name steps from 1 to {len(steps)}.")
    telling = tuple(at or dict.fromkeys((_liveliest(steps), _crowded(steps))))

    def draw(step: int) -> Picture:
        return draw_step(steps, step, 7.0)

    return explore(
        draw,
        step=Slider(1, len(steps), 1, telling[0], play=True),
        positions=[{"step": step} for step in telling],
    )


@drawing
def draw_step(steps: Sequence[StepTrace], number: int, width: float) -> Picture:
    """The block map of step `number` (from 1), who runs and waits above it, and what the blocks hold below."""
    step = steps[number - 1]
    assert step.blocks is not None  # of a paged cache
    here, preempted = Contents.of(step.blocks), step.blocks.preemptions
    title = f"Step {number} of {len(steps)}: {len(step.blocks.tables)} run, {len(step.waiting)} wait"
    title += f", {preempted} preempted so far" if preempted else ""
    share = here.unfilled_rows / max(1, here.held_rows)
    note = f"{here.unfilled_rows} of {here.held_rows} rows unfilled ({share:.0%}); {here.shared} shared, "
    note += f"{len(here.cached)} cached, {here.free} empty"
    return draw_blocks(step.blocks, title=title, note=note, width=width, colours=_colours(steps), lines=2)


def _colours(steps: Sequence[StepTrace]) -> Mapping[str, str]:
    """One colour a request through all steps."""
    return request_colours([lane.name for lane in lanes(steps).values()])


def _liveliest(steps: Sequence[StepTrace]) -> int:
    """The first of the steps (from 1) with the most requests that share a block, and of these the most tokens."""

    def holds(step: StepTrace) -> tuple[int, int]:
        assert step.blocks is not None
        held = Contents.of(step.blocks).holders.values()
        return max((len(holders) for holders in held), default=0), step.kv_tokens

    return max(range(len(steps)), key=lambda n: (holds(steps[n]), -n)) + 1


def _crowded(steps: Sequence[StepTrace]) -> int:
    """The first of the steps (from 1) with the most requests waiting, after the first preemption if there was one."""

    def waits(step: StepTrace) -> tuple[bool, int]:
        return step.blocks is not None and step.blocks.preemptions > 0, len(step.waiting)

    return max(range(len(steps)), key=lambda n: (waits(steps[n]), -n)) + 1
