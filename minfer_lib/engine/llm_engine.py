"""`LLMEngine`: many requests at once, each of which may join, leave or be ended between any two steps.

Invariant: `generate` and `stream` only add requests and step, so that they, `add_request` with `step`, and several of
each at once give the same answers; the step itself is in `engine_core`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from ..errors import GenerationFailed, InvalidParameter
from ..generation.params import SamplingParams
from ..generation.prompts import Prompt, one_prompt
from ..generation.request import RequestOutput
from .core import EngineCore
from .interrupts import held_interrupts
from .stream import RequestStream


class LLMEngine(EngineCore):
    """Continuous batching over a KV cache of slots, or of blocks that are given out as they are used.

    kv_cache: "slots" gives each running request room for max_model_len tokens; "paged" gives it blocks of block_size
      tokens as its tokens arrive (PagedAttention), lets requests share them, and preempts when there is none left.
    num_blocks: slots or blocks of the cache; None takes as many as the requests that can run at once could fill, or as
      fit in memory. block_size, enable_prefix_caching (keep blocks that nobody uses until their room is needed, for
      requests that begin alike), attention_backend (see `paged_attention`): of the paged cache.
    max_num_seqs: requests that run at once at most; others wait. max_num_batched_tokens: tokens that one step computes
      at most, so that a long prompt is taken in chunks. max_model_len: tokens of prompt and answer together; None takes
      the model's limit, at most 2,048, less where slots would not fit in memory (a warning says so).
    The weights of `lm` must not change while requests run; changed between two calls, cached prefixes are given up.
    clock: seconds as a float; tests inject their own. trace: keep a `StepTrace` of every step in `steps`.

    Raises `UnsupportedModel` for a model that cannot be run with many requests in one row, `InvalidParameter` for
    options that are not possible.
    """

    # -- requests one at a time -----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> str:
        """Puts a prompt into the queue and returns its id; outputs come from `step`.

        priority: lower numbers run first. timeout_s: seconds from now after which the request ends with what it has,
        finish_reason "timeout". n > 1 makes n requests of one id.
        Raises `InvalidPrompt`, `PromptTooLong` or `InvalidParameter`, also for an id that is in use.
        """
        prompts = one_prompt(prompt, "add_request()", "Call it once for each.")
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidParameter(f"request_id={request_id!r} is not possible: it must be a string with a character.")
        if request_id in self._known_ids():
            raise InvalidParameter(
                f"request_id={request_id!r} is in use by a request that has not ended. Choose another."
            )
        if not _is_number(priority):
            raise InvalidParameter(f"priority={priority!r} is not possible: it must be a number; lower ones run first.")
        if timeout_s is not None and not (_is_number(timeout_s) and timeout_s >= 0):
            raise InvalidParameter(f"timeout_s={timeout_s!r} is not possible: it must be seconds, 0 or more, or None.")
        requests = self._requests(prompts, params, ids=None if request_id is None else iter([request_id]))
        for request in requests:
            request.priority = priority
            request.deadline = None if timeout_s is None else request.metrics.arrival + timeout_s
        with held_interrupts():
            for request in requests:
                self.scheduler.add(request)
        return requests[0].request_id

    def step(self) -> list[RequestOutput]:
        """Computes one step and returns the outputs of what ended since the last call, aborted and timed out included.

        Without anything to do it returns what there is at once. If the model fails, `GenerationFailed` carries the
        outputs of the requests that it was computing for; the others go on with the next step.
        """
        try:
            self._advance()
        except GenerationFailed as error:
            error.outputs, self._outputs = self._outputs, []
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or an output has not been handed out yet."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._outputs)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it stands; what it has generated is its output, with finish_reason "abort".

        Without effect for an id that is unknown or has ended.
        """
        for request in (*self.scheduler.waiting, *self.scheduler.running):
            if request.request_id == request_id:
                request.finish("abort", self.clock())

    # -- the interface of every engine ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers to one prompt or a list of prompts (strings or lists of token ids), in input order.

        params: one `SamplingParams` for all, or one each. Everything is checked before the first token is computed:
        `InvalidPrompt`, `PromptTooLong`, `InvalidParameter`. An interrupt from the keyboard ends the call early and
        returns what there is, the rest with finish_reason "abort"; if the model fails, `GenerationFailed` carries it.
        Requests of other callers are computed along and stay where they are.
        """
        requests = self._requests(prompts, params)
        try:
            self._adopt(requests)
            with tqdm(total=len(requests), desc=self.name, unit="request", disable=not progress) as bar:
                while unfinished := sum(not request.finished for request in requests):
                    bar.update(len(requests) - unfinished - bar.n)
                    self._advance()
                bar.update(len(requests) - bar.n)
        except KeyboardInterrupt:
            done = sum(request.finished for request in requests)
            warnings.warn(
                f"Interrupted: {done} of {len(requests)} answers are complete, the rest is cut.", stacklevel=2
            )
        except GenerationFailed as error:
            self._release(requests)
            error.outputs = [request.output() for request in requests]
            raise
        finally:
            self._release(requests)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """The answer to one prompt, piece by piece as it is generated; the last piece carries the finish reason.

        The request joins the engine at the call, so that several streams, read in any order, share their steps. With
        n > 1 the pieces of the answers come interleaved, told apart by `index`. Closing the stream aborts the request.
        """
        prompts = one_prompt(prompt, "stream()", "Call it once for each, or use generate().")
        stream = RequestStream(self, self._requests(prompts, params))
        self._adopt(stream.requests)
        return stream

    def __repr__(self) -> str:
        return (
            f"LLMEngine({self.lm!r}, kv_cache={self.kv_cache!r}, max_num_seqs={self.max_num_seqs}, "
            f"max_num_batched_tokens={self.max_num_batched_tokens}, max_model_len={self.max_model_len})"
        )


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer beyond all floats, which no clock could be added to
        return False
