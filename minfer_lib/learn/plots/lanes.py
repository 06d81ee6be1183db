"""What the traces of a run say of each of its requests: when it waited, what of it was computed, when it was gone.

Invariant: lanes stand in the order in which requests were first seen, and steps are counted from 1. A trace does not
say when a request ends, only that no later step knows it: the last recorded step is taken as the end of those in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import InvalidParameter

if TYPE_CHECKING:
    from ...engine.trace import StepTrace

Owner = tuple[str, int]


@dataclass
class Lane:
    """What one request did: (step, tokens, decodes) of each step that it was part of, and the steps that it waited."""

    name: str
    chunks: list[tuple[int, int, bool]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last step that knows the request."""
        return max([*(step for step, _, _ in self.chunks[-1:]), *self.waited[-1:]])


def lanes(steps: Sequence[StepTrace]) -> dict[Owner, Lane]:
    """The requests of a run, in the order in which they were first seen: those of a step's chunks, then who waits.

    Raises `InvalidParameter` if there are none.
    """
    if not steps:
        raise InvalidParameter(
            "There are no steps to draw. Make the engine with trace=True and let it answer something; its `steps` are "
            "what goes in here."
        )
    found: dict[Owner, Lane] = {}

    def lane(owner: Owner) -> Lane:
        name = owner[0] if owner[1] == 0 else f"{owner[0]}.{owner[1]}"
        return found.setdefault(owner, Lane(name))

    for number, step in enumerate(steps, 1):
        for chunk in step.chunks:
            lane((chunk.request_id, chunk.index)).chunks.append((number, chunk.num_tokens, chunk.decodes))
        for owner in step.waiting:
            lane(tuple(owner)).waited.append(number)
    return found


def account(run: Mapping[Owner, Lane], steps: Sequence[StepTrace], step: int) -> str:
    """One line about a step (counted from 1): who waits, prefills, decodes, and who is not seen after it."""
    if not 1 <= step <= len(steps):
        raise InvalidParameter(f"step={step!r} is not possible: there are {len(steps)} steps, counted from 1.")
    now = steps[step - 1]
    prompts = [chunk.num_tokens for chunk in now.chunks if not chunk.decodes]
    leaves = [lane.name for lane in run.values() if lane.last == step]
    parts = [
        f"{len(now.waiting)} wait{'s' * (len(now.waiting) == 1)}" if now.waiting else "",
        f"{len(prompts)} prefill{'s' * (len(prompts) == 1)} {sum(prompts):,} tokens" if prompts else "",
        f"{now.num_decodes} decode{'s' * (now.num_decodes == 1)}" if now.num_decodes else "",
    ]
    if len(leaves) == 1:
        parts.append(f"request {leaves[0]} leaves")
    elif leaves:
        parts.append(f"{len(leaves)} leave")
    return f"Step {step} of {len(steps)}: " + ", ".join(part for part in parts if part)


def summary(run: Mapping[Owner, Lane], steps: Sequence[StepTrace]) -> str:
    """One line about the whole run."""
    most = max(len(step.chunks) for step in steps)
    waited = sum(bool(lane.waited) for lane in run.values())
    requests = "1 request" if len(run) == 1 else f"{len(run)} requests"
    taken = "1 step" if len(steps) == 1 else f"{len(steps):,} steps"
    return f"{requests} in {taken}, at most {most} at once; {waited} had to wait"
