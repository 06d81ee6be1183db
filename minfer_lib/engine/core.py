"""The step of `LLMEngine`, and who the requests in it belong to.

A step is three calls: the scheduler says who runs with how many tokens, the runner computes them in one forward pass,
and `_postprocess` appends the new tokens and ends who is done.

Invariant between two steps: what has been generated is in the requests, so that nothing is lost, whatever a step runs
into; a request that has ended owns nothing; its output goes to whoever asked for it, once: to the `generate` or
`stream` that made the request, else to the next `step`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..attention.batch import GATHER
from ..errors import GenerationFailed, InvalidParameter, MinferError, one_of
from ..generation.prompts import check_fits_pool, make_requests, request_ids, resolve_max_model_len
from ..generation.request import Request, RequestOutput
from ..generation.sampling import Sampler, Samples
from ..models.load import LanguageModel
from .cache_size import check_count, make_cache
from .interrupts import held_interrupts
from .runner import ModelRunner
from .scheduler import WATERMARK, Chunk, Scheduler
from .trace import StepTrace, Totals

if TYPE_CHECKING:
    from ..attention.backends import AttentionBackend

KV_CACHES = ("slots", "paged")
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


class EngineCore:
    """What `LLMEngine` is made of: queues, cache and runner, and the loop body that moves them one step on.

    Its arguments are described there.
    """

    name = "slots"  # on the ladder; an engine of pages says so

    def __init__(
        self,
        lm: LanguageModel,
        kv_cache: Literal["slots", "paged"] = "slots",
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        max_model_len: int | None = None,
        attention_backend: AttentionBackend = "auto",
        clock: Callable[[], float] = time.perf_counter,
        trace: bool = False,
    ) -> None:
        from ..attention.backends import check_backend, choose_kernels  # of a later chapter

        if kv_cache not in KV_CACHES:
            raise InvalidParameter(f"kv_cache={kv_cache!r} is not possible: it must be {one_of(KV_CACHES)}.")
        check_backend(attention_backend, kv_cache)
        if not isinstance(enable_prefix_caching, bool):
            raise InvalidParameter(
                f"enable_prefix_caching={enable_prefix_caching!r} is not possible: it must be True or False."
            )
        self.max_num_seqs = check_count("max_num_seqs", max_num_seqs)
        self.max_num_batched_tokens = check_count("max_num_batched_tokens", max_num_batched_tokens)
        self.lm, self.kv_cache, self.clock, self.trace = lm, kv_cache, clock, trace
        if type(self).name == EngineCore.name:  # unless a class that builds on this one has a name of its own
            self.name = kv_cache
        self.num_blocks, self.block_size, self.attention_backend = num_blocks, block_size, attention_backend
        self.enable_prefix_caching = enable_prefix_caching
        self.cache = make_cache(
            lm, kv_cache, max_num_seqs=self.max_num_seqs, num_blocks=num_blocks, block_size=block_size,
            max_model_len=max_model_len, step_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
        )  # fmt: skip
        if kv_cache == "slots":
            self.max_model_len = self.cache.block_size
            kernels, watermark = GATHER, 0  # slots are read in place
        else:
            self.max_model_len = resolve_max_model_len(lm, max_model_len)
            dtype = next((pool.keys.dtype for pool in self.cache.pools.values()), lm.dtype)
            kernels = choose_kernels(lm.device, dtype, attention_backend)
            watermark = WATERMARK
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
            watermark=watermark,
        )  # fmt: skip
        self.runner = ModelRunner(lm, self.cache, Sampler(lm.eos_ids), kernels)
        self.steps: list[StepTrace] = []
        self._weights: list[tuple[int, int]] = []  # address and version of each tensor of the model
        self._ids = request_ids()
        self._owned: set[Request] = set()  # in the queues, by a generate or a stream, which reads them itself
        self._stepping = False
        self._outputs: list[RequestOutput] = []  # of the others, until the next step() hands them out
        self._totals = Totals()

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
        trace = StepTrace.of(chunks, gained, self.scheduler, self.cache, in_full=self.trace)
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
                if request.num_tokens > self.kv_tokens:  # its newest token is an answer, but finds no room any more
                    request.finish("length", now, stop_reason="kv_cache_full")
        for chunk in chunks:
            self.scheduler.computed(chunk)

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
        if not (self.scheduler.waiting or self.scheduler.running):
            self._notice_new_weights()
        known = self._known_ids()
        requests = make_requests(
            self.lm, prompts, params, max_model_len=self.max_model_len, now=self.clock(),
            ids=ids or (each for each in self._ids if each not in known),
        )  # fmt: skip
        for request in requests:
            check_fits_pool(request, self.kv_tokens)
        return requests

    def _notice_new_weights(self) -> None:
        """Keys and values of weights that have changed since (quantised, trained on) must not be found any more."""
        if self.kv_cache != "paged" or not self.cache.enable_prefix_caching:
            return
        tensors = itertools.chain(self.lm.model.parameters(), self.lm.model.buffers())
        weights = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        if weights != self._weights:
            self.reset_prefix_cache()
            self._weights = weights

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

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache has room for: the most that one request could have, if it were alone."""
        return self.cache.num_blocks * self.cache.block_size

    def kv_bytes(self) -> int:
        """Bytes that the KV cache reserves."""
        return self.cache.nbytes_reserved

    def reset_prefix_cache(self) -> None:
        """Gives up cached blocks that no request uses, and their contents with them; running requests keep theirs."""
        if self.kv_cache == "paged":
            self.cache.allocator.forget()

    def forget(self) -> None:
        """Lets a new measurement begin: cached prefixes go, and the fullest moment in `stats()` is looked for anew."""
        self.reset_prefix_cache()
        self._totals.kv_peak_used_tokens = self._totals.kv_peak_held_tokens = 0

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if queues and cache contradict each other."""
        self.scheduler.check_invariants()
