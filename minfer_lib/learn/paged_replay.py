"""Runs of an engine without its model: requests of made-up tokens go through the real scheduler and the real cache.

Invariant: it is an `LLMEngine` that runs; only its forward pass is replaced, by one that hands out tokens without
computing any. The same requests with the same lengths take the same blocks. Nothing is random.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.llm_engine import LLMEngine
from ..engine.scheduler import Plan, Scheduler
from ..engine.trace import StepTrace
from ..errors import InvalidParameter
from ..generation.params import SamplingParams
from ..generation.sampling import Samples
from ..models.load import LanguageModel, load_model


@dataclass(frozen=True)
class ReplayRequest:
    """A prompt of `prompt` tokens that gets `n` answers of `output` tokens each.

    shared: the first so many tokens of the prompt are the same in all requests that share. arrives: the step (from 0)
    before which it joins the queue. priority: lower numbers run first.
    """

    prompt: int
    output: int
    shared: int = 0
    n: int = 1
    arrives: int = 0
    priority: float = 0


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


def _count(plan: Plan) -> Samples:
    """In the place of the forward pass: the next token of request n is always the one of n."""
    ends = [request for request, tokens in plan.items() if request.num_computed + tokens == request.num_tokens]
    return Samples([_token(int(request.request_id), request.index) for request in ends], [None] * len(ends))


def _token(number: int, index: int = 0) -> int:
    """A token that no other request has, so that only what is shared is found again."""
    return 20 + 8 * number + index


@functools.cache
def _model() -> LanguageModel:
    return load_model("tiny-random", device="cpu")  # for its sizes: it is never called


def replay(requests: Sequence[ReplayRequest], *, block_size: int = 4, num_blocks: int = 32) -> list[StepTrace]:
    """The steps that an engine with a paged cache takes for these requests; their ids are "0", "1", ... in order.

    A request that outgrows the pool ends there. Raises what the engine raises: `InvalidParameter` for numbers that are
    not possible, `PromptTooLong` for a prompt that can never fit.
    """
    room = min(2048, num_blocks * block_size)
    engine = LLMEngine(_model(), "paged", block_size=block_size, num_blocks=num_blocks, max_model_len=room, trace=True)
    # An engine's own watermark would leave no room for anybody else in a pool of so few tokens.
    engine.scheduler = Scheduler(engine.cache, max_num_seqs=16, max_num_batched_tokens=64, watermark=1)
    engine.runner.execute = _count
    coming, now = sorted(enumerate(requests), key=lambda one: one[1].arrives), 0
    while coming or engine.has_unfinished():
        if not engine.has_unfinished():
            now = max(now, coming[0][1].arrives)  # steps in which nobody would be at work are left out
        while coming and coming[0][1].arrives <= now:
            number, asked = coming.pop(0)
            if asked.shared > asked.prompt:
                raise InvalidParameter(f"{asked} is not possible: it shares more tokens than its prompt has.")
            ids = [*range(3, 3 + asked.shared), *[_token(number)] * (asked.prompt - asked.shared)]
            params = SamplingParams(max_tokens=asked.output, ignore_eos=True, n=asked.n, temperature=1.0)
            engine.add_request(ids, params, request_id=str(number), priority=asked.priority)
        engine.step()
        now += 1
    return engine.steps
