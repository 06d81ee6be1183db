"""Runs of an engine without its model: the real scheduler and the real cache, with tokens that are made up.

Invariant: a step is what `LLMEngine` does in a step, apart from the forward pass and the clock: the same requests with
the same lengths take the same blocks. Nothing is random, and no memory is reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..cache.paged import PagedKVCache
from ..cache.slots import SlotKVCache
from ..engine.cache_size import check_count
from ..engine.scheduler import Scheduler
from ..engine.trace import StepTrace
from ..errors import InvalidParameter
from ..generation.params import SamplingParams
from ..generation.request import Request, RequestMetrics
from ..models.tokenizer import StreamDecoder

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
        cache, max_num_seqs=check_count("max_num_seqs", max_num_seqs),
        max_num_batched_tokens=check_count("max_num_batched_tokens", max_num_batched_tokens),
        watermark=watermark if paged else 0,
    )  # fmt: skip
    coming = sorted(
        ((asked.arrives, answers) for asked, answers in zip(requests, _answers(requests), strict=True)),
        key=lambda one: one[0],
    )
    steps: list[StepTrace] = []
    clock = 0
    while coming or scheduler.waiting or scheduler.running:
        if not scheduler.waiting and not scheduler.running:
            clock = max(clock, coming[0][0])
        while coming and coming[0][0] <= clock:
            for request in coming.pop(0)[1]:
                scheduler.add(request)
        steps.append(_step(scheduler, cache, room))
        clock += 1
    return steps


def _answers(requests: Sequence[ReplayRequest]) -> list[list[Request]]:
    """For each request its n answers, as the engine makes them."""
    made = []
    for number, asked in enumerate(requests):
        own = range(APART * (number + 1), APART * (number + 1) + asked.prompt - asked.shared)
        ids = [*range(asked.shared), *own]
        params = SamplingParams(max_tokens=asked.output, ignore_eos=True)
        answers = [
            Request(
                str(number), index, ids, params, index, asked.output, frozenset(), StreamDecoder(None, ids),
                RequestMetrics(0.0), priority=asked.priority,
            )
            for index in range(asked.n)
        ]  # fmt: skip
        for answer in answers:
            answer.siblings = tuple(other for other in answers if other is not answer)
        made.append(answers)
    return made


def _step(scheduler: Scheduler, cache: PagedKVCache | SlotKVCache, room: int) -> StepTrace:
    """One step: as `engine_core.EngineCore._step`, with a counted token in place of a sampled one."""
    chunks = scheduler.schedule()
    gained = {chunk.request for chunk in chunks if chunk.samples}
    trace = StepTrace.of(chunks, gained, scheduler, cache, in_full=True)
    for request in gained:
        token = -1 - APART * (int(request.request_id) + 1) - 1000 * request.index - len(request.token_ids)
        request.append(token, None, 0.0)
        if request.num_tokens > room:
            request.finish("length", 0.0, stop_reason="kv_cache_full")
    for chunk in chunks:
        scheduler.computed(chunk)
    scheduler.remove_finished()
    return trace
