"""Runs of an engine without its model: the real scheduler and the real cache, with tokens that are made up.

Invariant: a step is what `LLMEngine` does in a step, apart from the forward pass and the clock: the same requests with
the same lengths take the same blocks. Nothing is random, and no memory is reserved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..cache.paged import PagedKVCache
from ..cache.slots import SlotKVCache
from ..engine.scheduler import Scheduler
from ..engine.trace import StepTrace
from ..errors import InvalidParameter, integer
from ..generation.params import SamplingParams
from ..generation.request import Request, RequestMetrics
from ..generation.sampling import Samples

APART = 1_000_000  # token ids of one request from those of the next


@dataclass(frozen=True)
class ReplayRequest:
    """A prompt of `prompt` tokens that gets `n` answers of `output` tokens each.

    shared: the first so many tokens of the prompt are the same in all requests that share. arrives: the step (from 0)
    before which it joins the queue; where nobody is at work until then, the steps in between are left out. priority:
    lower numbers run first. Raises `InvalidParameter` for lengths that contradict each other.
    """

    prompt: int
    output: int
    shared: int = 0
    n: int = 1
    arrives: int = 0
    priority: float = 0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1 or self.n < 1 or self.arrives < 0 or not 0 <= self.shared <= self.prompt:
            raise InvalidParameter(
                f"{self} is not possible: prompt, output and n must be 1 or more, arrives 0 or more, and shared from 0 "
                "to the length of the prompt."
            )


# Four begin with the same twelve tokens, one prompt gets two answers, and two come while the others are at work.
DEFAULT_REQUESTS = (
    ReplayRequest(prompt=18, output=14, shared=12),
    ReplayRequest(prompt=5, output=22),
    ReplayRequest(prompt=14, output=9, n=2, arrives=1),
    ReplayRequest(prompt=15, output=12, shared=12, arrives=3),
    ReplayRequest(prompt=9, output=17, arrives=4),
    ReplayRequest(prompt=21, output=10, shared=12, arrives=12),
    ReplayRequest(prompt=14, output=13, shared=12, arrives=20),
)


def replay(
    requests: Sequence[ReplayRequest],
    *,
    block_size: int = 4,
    num_blocks: int = 32,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    enable_prefix_caching: bool = True,
    kv_cache: Literal["paged", "slots"] = "paged",
    watermark: int = 1,
) -> list[StepTrace]:
    """The steps that an engine with such a cache takes for these requests; their ids are "0", "1", ... in order.

    watermark: as of `Scheduler`; an engine's own would leave no room for anybody else in a pool of so few tokens.
    With kv_cache="slots" there are `num_blocks` slots of `block_size` tokens, and the traces have no `blocks`. A
    request that outgrows the pool (or its slot) ends there, as in the engine; a prompt that can never fit is refused
    with `InvalidParameter`.
    """
    if kv_cache not in ("paged", "slots"):
        raise InvalidParameter(f"kv_cache={kv_cache!r} is not possible: it must be 'paged' or 'slots'.")
    num_blocks, block_size = (
        integer("num_blocks", num_blocks, at_least=1),
        integer("block_size", block_size, at_least=1),
    )
    paged = kv_cache == "paged"
    device = torch.device("cpu")
    cache: PagedKVCache | SlotKVCache = (
        PagedKVCache({}, num_blocks, block_size, device, enable_prefix_caching=enable_prefix_caching)
        if paged
        else SlotKVCache({}, num_blocks, block_size, device)
    )
    room = num_blocks * block_size if paged else block_size  # tokens that one request can have
    longest = max((request.prompt for request in requests), default=0)
    if longest > room:
        raise InvalidParameter(
            f"A prompt of {longest} tokens can never run in {num_blocks} blocks of {block_size} tokens: there is room "
            f"for {room}. Shorten it, or make the pool larger."
        )
    scheduler = Scheduler(
        cache, max_num_seqs=integer("max_num_seqs", max_num_seqs, at_least=1),
        max_num_batched_tokens=integer("max_num_batched_tokens", max_num_batched_tokens, at_least=1),
        watermark=watermark if paged else 0,
    )  # fmt: skip
    coming = sorted(
        ((asked.arrives, answers) for asked, answers in zip(requests, _answers(requests, room), strict=True)),
        key=lambda one: one[0],
    )
    steps: list[StepTrace] = []
    clock, arrivals = 0, itertools.count(1)
    while coming or scheduler.waiting or scheduler.running:
        if not scheduler.waiting and not scheduler.running:
            clock = max(clock, coming[0][0])
        while coming and coming[0][0] <= clock:
            for request in coming.pop(0)[1]:
                request.arrival = next(arrivals)
                scheduler.add(request)
        steps.append(_step(scheduler, cache))
        clock += 1
    return steps


def _answers(requests: Sequence[ReplayRequest], room: int) -> list[list[Request]]:
    """For each request its n answers, as the engine makes them. room: tokens that one request can have."""
    everyone = []
    for number, asked in enumerate(requests):
        own = range(APART * (number + 1), APART * (number + 1) + asked.prompt - asked.shared)
        ids = [*range(asked.shared), *own]
        params = SamplingParams(max_tokens=asked.output, ignore_eos=True)
        most = min(asked.output, room + 1 - asked.prompt)  # the last token is never computed, and needs no room
        answers = [
            Request(
                str(number), index, ids, params, seed=0, max_new_tokens=most, eos_ids=frozenset(), tokenizer=None,
                metrics=RequestMetrics(0.0), priority=asked.priority,
            )
            for index in range(asked.n)
        ]  # fmt: skip
        for answer in answers:
            answer.siblings = answers
        everyone.append(answers)
    return everyone


def _step(scheduler: Scheduler, cache: PagedKVCache | SlotKVCache) -> StepTrace:
    """One step: as `LLMEngine._step`, with counted tokens in place of sampled ones."""
    plan = scheduler.schedule()
    sampled = [request for request, tokens in plan.items() if request.num_computed + tokens == request.num_tokens]
    token_ids = [-1 - APART * (int(r.request_id) + 1) - 1000 * r.index - len(r.token_ids) for r in sampled]
    samples = Samples(token_ids, [None] * len(sampled))
    trace = StepTrace.of(plan, samples, scheduler, cache)
    scheduler.update(plan, samples, 0.0)
    return trace
