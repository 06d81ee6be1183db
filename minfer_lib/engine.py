"""`LLMEngine`: many requests at once, each of which may join, leave or be ended between any two steps.

A step is three calls: the scheduler says who runs with how many tokens, the runner computes them in one forward pass,
and `_postprocess` appends the new tokens and ends who is done. `generate` and `stream` only add requests and step.

Invariant between two steps: what has been generated is in the requests, so that nothing is lost, whatever a step runs
into; a request that has ended owns nothing; its output goes to whoever asked for it, once: to the `generate` or
`stream` that made the request, else to the next `step`.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from .cache_size import check_count, make_cache
from .errors import GenerationFailed, InvalidParameter, InvalidPrompt, MinferError, one_of
from .interrupts import held_interrupts
from .loading import LanguageModel
from .model_runner import ModelRunner
from .params import SamplingParams
from .prompts import Prompt, make_requests, prompt_list, request_ids
from .request import Request, RequestOutput
from .sampling import Sampler, Samples
from .scheduler import Chunk, Scheduler
from .stream import RequestStream
from .trace import StepTrace, Totals

KV_CACHES = ("slots",)
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


class LLMEngine:
    """Continuous batching over a KV cache of slots.

    kv_cache: "slots" gives each running request room for max_model_len tokens.
    num_blocks: slots of the cache; None takes as many as can run at once.
    max_num_seqs: requests that run at once at most; others wait. max_num_batched_tokens: tokens that one step computes
      at most, so that a long prompt is taken in chunks. max_model_len: tokens of prompt and answer together; None takes
      the model's limit, at most 2,048, less where the cache would not fit in memory (a warning says so).
    clock: seconds as a float; tests inject their own. trace: keep a `StepTrace` of every step in `steps`.

    Raises `UnsupportedModel` for a model that cannot be run with many requests in one row, `InvalidParameter` for
    options that are not possible.
    """

    name = "slots"

    def __init__(
        self,
        lm: LanguageModel,
        kv_cache: Literal["slots"] = "slots",
        *,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: bool = False,
    ) -> None:
        if kv_cache not in KV_CACHES:
            raise InvalidParameter(f"kv_cache={kv_cache!r} is not possible: it must be {one_of(KV_CACHES)}.")
        check_count("max_num_seqs", max_num_seqs)
        check_count("max_num_batched_tokens", max_num_batched_tokens)
        self.lm, self.kv_cache, self.clock, self.trace = lm, kv_cache, clock, trace
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_blocks = num_blocks
        self.cache = make_cache(lm, max_num_seqs, num_blocks, max_model_len)
        self.max_model_len = self.cache.block_size
        self.scheduler = Scheduler(self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.runner = ModelRunner(lm, self.cache, Sampler(lm.eos_ids))
        self.steps: list[StepTrace] = []
        self._ids = request_ids()
        self._owned: set[Request] = set()  # in the queues, by a generate or a stream, which reads them itself
        self._stepping = False
        self._outputs: list[RequestOutput] = []  # of the others, until the next step() hands them out
        self._totals = Totals()

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
        prompts = prompt_list(prompt)
        if len(prompts) != 1:
            raise InvalidPrompt(f"add_request() takes one prompt; {len(prompts)} were given. Call it once for each.")
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
        prompts = prompt_list(prompt)
        if len(prompts) != 1:
            raise InvalidPrompt(
                f"stream() takes one prompt; {len(prompts)} were given. Call it once for each, or use generate()."
            )
        stream = RequestStream(self, self._requests(prompts, params))
        self._adopt(stream.requests)
        return stream

    # -- one step -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with held_interrupts() as interrupts:
            if self._stepping:  # it would compute the same tokens a second time
                raise MinferError(
                    "This engine is in the middle of a step, and takes one at a time: step(), generate() and streams "
                    "cannot be used from inside a logits processor, nor from a second thread meanwhile. Add requests "
                    "with add_request(), and step when the step is over."
                )
            try:
                self._stepping = True
                self._step(interrupts)
            finally:
                self._stepping = False

    def _step(self, interrupts: held_interrupts) -> None:
        began = self.clock()
        self._expire(began)
        self._reap()
        chunks = self.scheduler.schedule()
        if not chunks:
            return
        scheduled = self.clock()
        for chunk in chunks:
            if chunk.request.metrics.first_scheduled is None:
                chunk.request.metrics.first_scheduled = began
        try:
            with interrupts.let_through():
                inputs = self.runner.build(chunks)
                built = self.clock()
                samples = self.runner.sample(self.runner.forward(inputs), inputs)
        except OUT_OF_MEMORY as error:
            self._fail(chunks, f"out of memory: {error}")
            return
        except MinferError:
            self._fail(chunks, "refused by the engine")
            raise
        except Exception as error:
            self._fail(chunks, f"{type(error).__name__}: {error}")
            raise GenerationFailed(
                f"{self.lm.name} failed in a step with {len(chunks)} requests: {type(error).__name__}: {error}. What "
                "they had generated until then is in the `outputs` of this exception; the engine can go on."
            ) from error
        computed = self.clock()
        gained = {
            chunk.request
            for row, chunk in enumerate(inputs.sampled)
            if row not in samples.errors and not chunk.request.finished
        }
        trace = StepTrace.of(chunks, gained, self.scheduler, self.cache)
        self._postprocess(chunks, inputs.sampled, samples)
        self._reap()
        trace = trace.timed(began, scheduled, built, computed, self.clock())
        self._totals.add(trace)
        if self.trace:
            self.steps.append(trace)

    def _postprocess(self, chunks: list[Chunk], sampled: list[Chunk], samples: Samples) -> None:
        """New tokens to their requests. A step that was interrupted does not come here: the next one computes the same
        tokens again, and to the same result."""
        now = self.clock()
        for row, chunk in enumerate(sampled):
            request = chunk.request
            if request.finished:  # aborted from inside a logits processor
                continue
            if row in samples.errors:
                error = samples.errors[row]
                request.finish("error", now, error=f"{type(error).__name__}: {error}")
            else:
                request.append(samples.token_ids[row], samples.logprobs[row], now)
        for chunk in chunks:
            chunk.request.num_computed += chunk.num_tokens

    def _expire(self, now: float) -> None:
        for request in (*self.scheduler.waiting, *self.scheduler.running):
            if request.deadline is not None and now >= request.deadline:
                request.finish("timeout", now)

    def _fail(self, chunks: list[Chunk], error: str) -> None:
        for chunk in chunks:
            chunk.request.finish("error", self.clock(), error=error)
        self._reap()

    def _reap(self) -> None:
        """Takes what has ended out of the queues, and keeps the outputs that nobody else reads."""
        for request in self.scheduler.remove_finished():
            self._totals.finished[request.finish_reason] += 1
            if request in self._owned:
                self._owned.remove(request)
            else:
                self._outputs.append(request.output())

    # -- who owns a request ---------------------------------------------------------------------------------------

    def _requests(self, prompts: Any, params: Any, ids: Any = None) -> list[Request]:
        known = self._known_ids()
        return make_requests(
            self.lm, prompts, params, max_model_len=self.max_model_len, now=self.clock(),
            ids=ids or (each for each in self._ids if each not in known),
        )  # fmt: skip

    def _known_ids(self) -> set[str]:
        everybody = itertools.chain(self.scheduler.waiting, self.scheduler.running, self._outputs)
        return {each.request_id for each in everybody}

    def _adopt(self, requests: list[Request]) -> None:
        with held_interrupts():
            self._owned.update(requests)
            for request in requests:
                self.scheduler.add(request)

    def _release(self, requests: list[Request]) -> None:
        """Ends what has not ended. In the middle of a step (a logits processor closes a stream) its requests still take
        part, and are taken out when it is over."""
        with held_interrupts():
            for request in requests:
                request.finish("abort", self.clock())
            if not self._stepping:
                self._reap()

    # -- what it is doing -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Where the engine stands and what it has done since it was made; the names are those of `trace.Totals`."""
        return self._totals.report(self.scheduler, self.cache)

    def kv_bytes(self) -> int:
        """Bytes that the KV cache reserves."""
        return self.cache.nbytes_reserved

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if queues and cache contradict each other."""
        self.scheduler.check_invariants()

    def __repr__(self) -> str:
        return (
            f"LLMEngine({self.lm!r}, kv_cache={self.kv_cache!r}, max_num_seqs={self.max_num_seqs}, "
            f"max_num_batched_tokens={self.max_num_batched_tokens}, max_model_len={self.max_model_len})"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
