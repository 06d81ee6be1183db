"""The blocks of a paged cache under sliders: a run replayed step by step, with other blocks and other pools.

Invariant: what is shown is a step of a real scheduler and a real cache, of an engine's run or of `paged_replay`; moving
a slider replays, and nothing is carried over from the position before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..engine.trace import StepTrace
from ..errors import InvalidParameter
from .paged_replay import DEFAULT_REQUESTS, replay
from .plots.blocks import Contents, draw_blocks, request_colours
from .plots.timelines import lanes
from .sliders import Choice, Gallery, Slider, explore
from .style import Picture, drawing

BLOCK_SIZES, POOLS = (1, 2, 4, 8, 16), (48, 64, 96, 128, 192)
NARROW = 4.7  # inches: two pictures side by side


def block_map(steps: Sequence[StepTrace] | None = None) -> Gallery | None:
    """Chapter 6: the block map of a step, with sliders for the step, the block size and the size of the pool in tokens.

    steps: of an engine with kv_cache="paged" and trace=True; then there is only the slider over them. None: a run of a
    few requests that share their beginnings, outgrow small pools and leave tails in large blocks. Raises
    `InvalidParameter` for steps without blocks.
    """
    if steps is not None:
        return _of_engine([step for step in steps if step.blocks is not None])

    @functools.cache
    def run(block_size: int, pool: int) -> Sequence[StepTrace]:
        return replay(DEFAULT_REQUESTS, block_size=block_size, num_blocks=pool // block_size)

    def draw(step: int, block_size: int, pool: int) -> Picture:
        return draw_step(run(block_size, pool), step, NARROW)

    shared = _liveliest(run(4, 96))
    sizes = [{"step": shared, "block_size": size, "pool": 96} for size in (4, 1, 16)]
    return explore(
        draw,
        step=Slider(1, lambda step, block_size, pool: len(run(block_size, pool)), 1, shared, play=True),
        block_size=Choice(BLOCK_SIZES, 4, "block size"),
        pool=Choice(POOLS, 96, "pool (tokens)"),
        positions=[*sizes, {"step": _crowded(run(4, 64)), "block_size": 4, "pool": 64}],
    )


def _of_engine(steps: Sequence[StepTrace]) -> Gallery | None:
    if not steps:
        raise InvalidParameter(
            "These steps have no block maps. Make the engine with kv_cache='paged' and trace=True, and give its steps."
        )
    telling = dict.fromkeys((_liveliest(steps), _crowded(steps)))
    slider = Slider(1, len(steps), 1, next(iter(telling)), play=True)
    return explore(
        lambda step: draw_step(steps, step, 7.0), step=slider, positions=[{"step": step} for step in telling]
    )


@drawing
def draw_step(steps: Sequence[StepTrace], number: int, width: float) -> Picture:
    """The block map of step `number` (from 1), who runs and waits above it, and what the blocks hold below."""
    step = steps[number - 1]
    here, preempted = Contents.of(step.blocks), step.blocks.preemptions
    title = f"Step {number} of {len(steps)}: {len(step.blocks.tables)} run, {len(step.waiting)} wait"
    title += f", {preempted} preempted so far" if preempted else ""
    share = here.unfilled_rows / max(1, here.held_rows)
    note = f"{here.unfilled_rows} of {here.held_rows} rows unfilled ({share:.0%}); {here.shared} shared, "
    note += f"{len(here.cached)} cached, {here.free} empty"
    colours = request_colours([lane.name for lane in lanes(steps).values()])  # one a request through all steps
    return draw_blocks(step.blocks, title=title, note=note, width=width, colours=colours, lines=2)


def _liveliest(steps: Sequence[StepTrace]) -> int:
    """The first of the steps (from 1) with the most requests that share a block, and of these the most tokens."""

    def holds(step: StepTrace) -> tuple[int, int]:
        return max(map(len, Contents.of(step.blocks).holders.values()), default=0), step.kv_tokens

    return max(range(len(steps)), key=lambda n: (holds(steps[n]), -n)) + 1


def _crowded(steps: Sequence[StepTrace]) -> int:
    """The first of the steps (from 1) with the most requests waiting, after the first preemption if there was one."""
    waits = [(step.blocks.preemptions > 0, len(step.waiting)) for step in steps]
    return waits.index(max(waits)) + 1
