"""`LLMEngine`: many requests at once, each of which may join, leave or be ended between any two steps.

A step is three calls: the scheduler plans who computes how many tokens, the runner computes them in one forward pass,
and the scheduler takes the new tokens in and says which requests they end.

Invariant: the tokens of the requests are the truth, and all else follows from them. Whatever breaks off a step, the
next one puts queues and cache together again from the requests, and computes anew what was not finished. One thread
steps at a time; any thread may add, abort and wait, and what it waits for is computed in steps that all callers share.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from ..attention.backends import AttentionBackend, choose_backend
from ..attention.support import packed_layers
from ..errors import (
    GenerationFailed,
    InvalidParameter,
    InvariantBroken,
    MinferError,
    integer,
    must_be,
    number,
    one_of,
)
from ..generation.params import SamplingParams
from ..generation.prompts import Prompt, check_fits_pool, make_requests, one_prompt
from ..generation.request import PieceReader, Request, RequestOutput, StreamPiece
from ..generation.sampling import Sampler, Samples
from ..models.load import LanguageModel, load_model
from ..models.weights import WeightWatch
from .cache_size import make_cache
from .runner import ModelRunner
from .scheduler import WATERMARK, Plan, Scheduler
from .serial import Engine
from .trace import StepTrace, Totals

FAST = ("auto", "fused", "compiled", "graph")


class LLMEngine(Engine):
    """Continuous batching over a KV cache of slots, or of blocks that are given out as they are used.

    lm: a `LanguageModel`, or a name as `load_model` takes it.
    kv_cache: "slots" gives each running request room for max_model_len tokens; "paged" gives it blocks of block_size
      tokens as its tokens arrive (PagedAttention), lets requests share them, and preempts when there is none left. A
      subclass of `PagedKVCache` is used in its place, and a cache that exists already as it is, by one
      engine at a time.
    kv_cache_dtype: None keeps keys and values in the model's dtype; "int8" in 8 bits, each key and value of a head with
      a float32 scale: about half the bytes of a 16-bit cache, and numbers that are off by up to 0.4 % of the largest
      beside them. A token is rounded once, by itself, so that answers may part from those of `model.generate`, but do
      not depend on what shares a step, on chunks or on preemption. A subclass as kv_cache follows it; beside a cache
      that exists already, whose layers say what it keeps, it is refused.
    num_blocks: slots or blocks of the cache; None takes as many as the requests that can run at once could fill, or as
      fit in memory. block_size, enable_prefix_caching (keep blocks that no request uses until their room is needed, for
      requests that begin alike): of the paged cache.
    max_num_seqs: requests that run at once at most; others wait. max_num_batched_tokens: tokens that one step computes
      at most, so that a long prompt is taken in chunks. max_model_len: tokens of prompt and answer together; None takes
      the model's limit, at most 2,048, less where slots would not fit in memory (a warning says so).
    fast: remove launches, the work between them and waiting for the host (`fast`). True takes the first way that this
      model and device can go, and proves it: "fused" (our own layers), "compiled" (the model's, through torch.compile),
      "graph" (the model's, as they are, in a CUDA graph); each may be asked for by name. On a CPU, which has no graphs,
      kernels in C do what lies between the products, and products of few rows, where there is a C compiler. "auto" is
      True on CUDA and False on a CPU. `fast_path` says which way it went.
    scheduler: a `Scheduler` class, or an object with its methods. backend: "auto", "torch", "compiled", "triton" or an
      `AttentionBackend`.
    clock: seconds as a float; tests inject their own. trace: keep a `StepTrace` of every step in `steps`.

    An engine may be used from several threads: their requests share its steps. It runs the layers that the model has
    when the engine is made. Weights that change in place are noticed when the next request joins, and cached prefixes
    are given up; what `models.weights` cannot see needs `reset_prefix_cache()`.

    Raises `UnsupportedModel` for a model that cannot be run with many requests in one row, `InvalidParameter` for
    options that cannot be.
    """

    def __init__(
        self,
        lm: LanguageModel | str | os.PathLike[str],
        kv_cache: Literal["slots", "paged"] | type | Any = "slots",
        *,
        kv_cache_dtype: Literal["int8"] | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        max_model_len: int | None = None,
        fast: bool | Literal["auto", "fused", "compiled", "graph"] = "auto",
        scheduler: type[Scheduler] | Scheduler = Scheduler,
        backend: str | AttentionBackend = "auto",
        clock: Callable[[], float] = time.perf_counter,
        trace: bool = False,
    ) -> None:
        lm = lm if isinstance(lm, LanguageModel) else load_model(lm)
        super().__init__(lm, clock)
        if not hasattr(scheduler, "schedule"):
            raise must_be("scheduler", "a Scheduler class, or an object with its methods", scheduler)
        if not isinstance(trace, bool):
            raise must_be("trace", "True or False", trace)
        if not isinstance(fast, bool | str) or (isinstance(fast, str) and fast not in FAST):
            raise must_be("fast", f"True, False or {one_of(FAST)}", fast)
        if not isinstance(enable_prefix_caching, bool):
            raise must_be("enable_prefix_caching", "True or False", enable_prefix_caching)
        self.max_num_seqs = integer("max_num_seqs", max_num_seqs, at_least=1, at_most=2**20)
        self.max_num_batched_tokens = integer("max_num_batched_tokens", max_num_batched_tokens, at_least=1)
        self.kv_cache, self.kv_cache_dtype = kv_cache, kv_cache_dtype
        if type(self).name == Engine.name:  # else a class that builds on this one has a name of its own
            self.name = kv_cache if isinstance(kv_cache, str) else "paged"
        if fast == "auto" and lm.device.type != "cuda":
            fast = False
        self.cache, self.max_model_len = make_cache(
            lm, kv_cache, kv_cache_dtype=kv_cache_dtype, max_num_seqs=self.max_num_seqs, num_blocks=num_blocks,
            block_size=block_size, max_model_len=max_model_len, step_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching, graphs=fast is not False and lm.device.type == "cuda",
        )  # fmt: skip
        if isinstance(scheduler, type):
            scheduler = scheduler(
                self.cache, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
                watermark=WATERMARK if self.cache.shares_prompts else 0,
            )  # fmt: skip
        elif getattr(scheduler, "cache", self.cache) is not self.cache:
            raise InvalidParameter(
                "scheduler must plan over this engine's cache; the one that was given has another. Make the cache "
                "first and pass it to both, LLMEngine(lm, kv_cache=cache, scheduler=Scheduler(cache, ...)), or pass "
                "the class."
            )
        self.scheduler = scheduler
        dtype = next((shape.dtype for shape in packed_layers(lm).values()), lm.dtype)
        self.backend = choose_backend(lm.device, dtype, backend)
        quantized = any(pool.key_scales is not None for pool in self.cache.pools.values())
        if quantized and not getattr(self.backend, "reads_int8", False):
            raise InvalidParameter(
                f"kv_cache_dtype='int8' needs a backend that can read such a cache, and {self.backend.name!r} does not "
                "say so. Give it `reads_int8 = True` once it multiplies codes by their scales, as KVPool.read does."
            )
        sampler = Sampler(lm.eos_ids)
        self.fast, self.trace, self.steps = fast, trace, []
        self.ahead: Any = None  # steps whose tokens are not waited for, on the fast path
        if fast is False:
            self.runner = ModelRunner(lm, self.cache, sampler, self.backend)
        else:
            from ..fast import choose  # only where it is used: it brings compilers

            self.runner = choose.make_runner(
                lm, self.cache, sampler, self.backend, fast, max_num_seqs=self.max_num_seqs,
                max_model_len=self.max_model_len,
            )  # fmt: skip
            self.ahead = choose.make_ahead(self)
        self.totals = Totals()

        self._requests: dict[str, list[Request]] = {}  # by id, all that have not been handed out
        self._ids = map(str, itertools.count())
        self._arrivals = itertools.count(1)
        self._inbox: deque[Request] = deque()  # of requests that the next step puts into the queue
        self._aborts: deque[str] = deque()  # ids that the next step ends
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._finished: dict[Request, None] = {}  # their outputs are for the next `step`
        self._weights = WeightWatch(lm.model) if getattr(self.cache, "enable_prefix_caching", False) else None
        self._broken = False  # a step was broken off
        self._turn = threading.Lock()  # held by the thread that steps
        self._stepper: int | None = None  # the thread that steps
        self._gates: deque[threading.Lock] = deque()  # one for each thread that waits for a step to be over

    # -- one step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        began = self.clock()
        self._take_in(began)
        if self.ahead is not None and self.ahead.step(began):
            return None
        plan = self.scheduler.schedule()
        if not plan:
            return self._check_idle()
        if self.ahead is not None and self.ahead.begin(plan, began):
            return None
        scheduled = self.clock()
        samples = self._execute(plan)
        if samples is not None:
            self._take_out(plan, samples, began, scheduled)

    def _execute(self, plan: Plan) -> Samples | None:
        """The samples of a step; None if the model failed, which ends the requests of the step with an error."""
        self._mark_scheduled(plan, self.clock())
        try:
            return self.runner.execute(plan)
        except Exception as error:
            self._fail(plan, error)
            return None

    def _mark_scheduled(self, plan: Plan, now: float) -> None:
        for request in plan:
            if request.metrics.first_scheduled is None:
                request.metrics.first_scheduled = now

    def _take_out(self, plan: Plan, samples: Samples, began: float, scheduled: float) -> None:
        """A step is computed: its tokens go to the requests, and those that they end to whoever asked."""
        computed = self.clock()
        self._observe(plan, samples)
        for request in self.scheduler.update(plan, samples, computed):
            self._deliver(request)
        self._time(began, scheduled, computed)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """The model failed in a step: its requests end."""
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        message = f"out of memory: {error}" if out_of_memory else f"{type(error).__name__}: {error}"
        cause = None if out_of_memory else without_frames(error)
        for request in plan:
            if not request.finished:
                request.cause = cause
                request.finish("error", self.clock(), error=message)
                self.scheduler.remove(request)
                self._deliver(request)

    def _take_in(self, now: float) -> None:
        """Requests that have arrived join the queue; those that were aborted or whose time is up end."""
        if self._inbox:
            self._follow_model()
        while self._inbox:
            request = self._inbox[0]
            if request.arrival == 0 and not request.finished:  # else a step was broken off here, or it was aborted
                request.arrival = next(self._arrivals)
                self.scheduler.add(request)
                if request.deadline is not None:
                    heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
            self._inbox.popleft()
        while self._aborts:
            for request in self._requests.get(self._aborts[0], ()):
                self._end(request, "abort", now)
            self._aborts.popleft()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._end(self._deadlines[0][2], "timeout", now)
            heapq.heappop(self._deadlines)

    def _follow_model(self) -> None:
        """What was done to the model since requests joined last: weights that moved, and keys of weights of before."""
        self.runner.refresh()
        if self._weights is not None and self._weights.changed():
            self.cache.reset_prefix_cache()

    def _end(self, request: Request, reason: Literal["abort", "timeout"], now: float) -> None:
        if not request.finished:
            request.finish(reason, now)
            if request.arrival:
                self.scheduler.remove(request)
            self._deliver(request)

    def _deliver(self, request: Request) -> None:
        """A request has ended: its output is for whoever asked for it."""
        if not request.owned:
            self._finished[request] = None
        request.delivered = True  # last: until then it may be delivered again, which changes nothing
        self.totals.finished[request.finish_reason] += 1
        if request.owned:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Nobody needs the id of a request any more, once all answers of that id have ended."""
        if all(answer.delivered for answer in self._requests.get(request.request_id, ())):
            self._requests.pop(request.request_id, None)

    def _recover(self) -> None:
        """After a step that was broken off: puts everything together again from the requests and their tokens."""
        now = self.clock()
        if self.ahead is not None:
            self.ahead.forget()
        requests = [r for answers in list(self._requests.values()) for r in answers if r.arrival]
        self.scheduler.reset()
        self._deadlines = [(r.deadline, r.arrival, r) for r in requests if r.deadline is not None and not r.finished]
        heapq.heapify(self._deadlines)
        for request in sorted(requests, key=lambda request: request.arrival):
            request.restore(now)
            if not request.finished and request.num_tokens > self.kv_tokens:  # its last token filled the cache
                request.finish("length", now, stop_reason="kv_cache_full")
            if not request.finished:
                self.scheduler.add(request)
            elif not request.delivered:
                self._deliver(request)

    def _check_idle(self) -> None:
        if self.scheduler.running or self.scheduler.waiting:
            raise InvariantBroken(
                f"the scheduler planned an empty step, while {len(self.scheduler.running)} requests run and "
                f"{len(self.scheduler.waiting)} wait: they would wait for ever. Its policy must let one of them run."
            )

    # -- whose step it is ---------------------------------------------------------------------------------------------

    def _advance(self, request: Request | None = None) -> None:
        """Goes one step on, unless `request` has ended. While another thread steps, waits for that step to be over."""
        if self._turn.locked() and not self._in_step():
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
            if self._turn.locked():
                gate.acquire(timeout=1)
            return
        try:
            self._with_turn(self._step, request)
        finally:
            with suppress(IndexError):
                while True:
                    self._gates.popleft().release()

    def _in_step(self) -> bool:
        """Whether the caller is inside a step: a logits processor, say."""
        return self._turn.locked() and self._stepper == threading.get_ident()

    def _with_turn(self, act: Callable[[], Any], request: Request | None = None) -> Any:
        if self._in_step():
            raise MinferError(
                "This engine is in the middle of a step, and takes one at a time: a logits processor can use "
                "add_request(), abort() and stats(), and nothing that steps. Step when the step is over."
            )
        # In one line: no exception can come between the end of the block and the release of the lock.
        with self._turn: return self._act(act, request)  # noqa: E701  # fmt: skip

    def _act(self, act: Callable[[], Any], request: Request | None) -> Any:
        if request is not None and request.finished:
            return None
        try:
            self._stepper = threading.get_ident()
            if self._broken:
                self._recover()
            self._broken = True  # until it is over
            result = act()
            self._broken = False
            return result
        finally:
            self._stepper = None

    def _settle(self) -> None:
        """Lets aborts take effect now; within a step (a logits processor closes a stream) they wait for the next."""
        if not self._in_step():
            self._with_turn(lambda: self._take_in(self.clock()))

    # -- requests one at a time ---------------------------------------------------------------------------------------

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
            raise must_be("request_id", "a string with at least one character", request_id)
        priority = number("priority", priority, "a number; lower ones run first")
        if timeout_s is not None:
            timeout_s = number("timeout_s", timeout_s, "seconds, 0 or more, or None", lambda x: x >= 0)
        requests = self._requests_of(prompts, params, request_id)
        for request in requests:
            request.priority = priority
            request.deadline = None if timeout_s is None else request.metrics.arrival + timeout_s
        self._submit(requests)
        return requests[0].request_id

    def step(self) -> list[RequestOutput]:
        """Computes one step and returns the outputs of what ended since the last call, aborted and timed out included.

        Without anything to do it returns what there is at once. If the model fails, `GenerationFailed` carries these
        outputs; the other requests go on with the next step.
        """
        self._advance()
        cause = next((request.cause for request in list(self._finished) if request.cause is not None), None)
        turn, hand_out = self._turn, [functools.partial(self._hand_out, cause)]
        del self  # an exception keeps this frame, which must not keep the engine
        # In one line, as in `_with_turn`.
        if cause is None:
            with turn: return hand_out.pop()()  # noqa: E701  # fmt: skip
        with turn: raise hand_out.pop()()  # noqa: E701  # fmt: skip

    def _hand_out(self, cause: Exception | None) -> list[RequestOutput] | GenerationFailed:
        """The outputs of requests that have ended; with a cause, the exception that carries them."""
        requests = list(self._finished)
        result: Any = [request.output() for request in requests]
        if cause is not None:
            result = generation_failed(self.lm.name, cause, result)
        for request in requests:
            self._release(request)
        # The last thing that is done, in one line with the return: until then nothing has been handed out.
        return [deque(map(self._finished.pop, requests), maxlen=0), result][1]

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or an output has not been handed out yet."""
        scheduler = self.scheduler
        queued = self._inbox or self._aborts or scheduler.waiting or scheduler.running
        return bool(queued or self._finished or self._broken)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it stands; what it has generated is its output, with finish_reason "abort".

        Without effect for an id that is unknown or has ended.
        """
        if isinstance(request_id, str) and request_id in self._requests:
            self._aborts.append(request_id)

    # -- the interface of every engine --------------------------------------------------------------------------------

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
        requests = self._requests_of(prompts, params)
        try:
            self._submit(requests, owned=True)
            # no bar where none is wanted: tqdm takes a lock of the whole process even for one that is not shown
            with tqdm(total=len(requests), desc=self.name, unit="request") if progress else nullcontext() as bar:
                for request in requests:
                    while not request.finished:
                        self._advance(request)
                        if bar is not None:
                            bar.update(sum(request.finished for request in requests) - bar.n)
        except KeyboardInterrupt:
            done = sum(request.finished for request in requests)
            warnings.warn(
                f"Interrupted: {done} of {len(requests)} answers are complete, the rest is cut.", stacklevel=2
            )
        finally:
            self._abandon(requests)
        outputs = [request.output() for request in requests]
        cause = next((request.cause for request in requests if request.cause is not None), None)
        if cause is None:
            return outputs
        failure = generation_failed(self.lm.name, cause, outputs)
        del self, requests, request  # the exception keeps this frame, which must not keep the engine
        raise failure

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """The answer to one prompt, piece by piece as it is generated; the last piece carries the finish reason.

        The request joins the engine at the call, so that several streams, read in any order, share their steps. With
        n > 1 the pieces of the answers come interleaved, told apart by `index`. Closing the stream aborts the request.
        """
        prompts = one_prompt(prompt, "stream()", "Call it once for each, or use generate().")
        requests = self._requests_of(prompts, params)
        stream = RequestStream(self, requests)
        self._submit(requests, owned=True)
        return stream

    def _requests_of(self, prompts: Any, params: Any, request_id: str | None = None) -> list[Request]:
        """Checked requests, whose ids are taken from now on."""
        ids = self._ids if request_id is None else iter([request_id])
        requests = make_requests(
            self.lm, prompts, params, max_model_len=self.max_model_len, now=self.clock(),
            ids=(each for each in ids if request_id is not None or each not in self._requests),
        )  # fmt: skip
        for request in requests:
            check_fits_pool(request, self.kv_tokens)
        return requests

    def _submit(self, requests: list[Request], owned: bool = False) -> None:
        groups: dict[str, list[Request]] = {}
        for request in requests:
            request.owned = owned
            groups.setdefault(request.request_id, []).append(request)
        try:
            for request_id, answers in groups.items():
                if self._requests.setdefault(request_id, answers) is not answers:
                    raise InvalidParameter(
                        f"request_id={request_id!r} is in use by a request that has not ended. Choose another."
                    )
            self._inbox.extend(requests)
        except BaseException:  # an interrupt, too: all of them have joined, or none
            for request_id, answers in groups.items():
                if self._requests.get(request_id) is answers:
                    del self._requests[request_id]
            raise

    def _abandon(self, requests: Sequence[Request]) -> None:
        """Ends what has not ended of a `generate` or a `stream`."""
        open_ids = dict.fromkeys(request.request_id for request in requests if not request.finished)
        if open_ids:
            self._aborts.extend(open_ids)
            self._settle()
            for request in requests:
                if request.request_id not in self._requests:  # interrupted before it could join
                    request.finish("abort", self.clock())

    # -- what it is doing ---------------------------------------------------------------------------------------------

    def _observe(self, plan: Plan, samples: Samples) -> None:
        self.totals.count(plan, samples, self.scheduler, self.cache)
        if self.trace:
            self.steps.append(StepTrace.of(plan, samples, self.scheduler, self.cache))

    def _time(self, began: float, scheduled: float, computed: float) -> None:
        ended = self.clock()
        self.totals.time(began, scheduled, computed, ended)
        if self.trace:
            self.steps[-1] = self.steps[-1].timed(began, scheduled, computed, ended)

    def stats(self) -> dict[str, float]:
        """Where the engine stands and what it has done since it was made; the names are those of `trace.Totals`."""
        report = functools.partial(self.totals.report, self.scheduler, self.cache)
        stats = report() if self._in_step() else self._with_turn(report)
        return stats | {"waiting": stats["waiting"] + len(self._inbox)}

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache has room for: the most that one request could have, if it were alone."""
        return self.cache.num_blocks * self.cache.block_size

    @property
    def fast_path(self) -> str:
        """What of the fast path this engine runs, with what its graphs cost; or why it runs none."""
        return self.runner.description

    def kv_bytes(self) -> int:
        """Bytes that the KV cache reserves."""
        return self.cache.nbytes_reserved

    def reset_prefix_cache(self) -> None:
        """Gives up cached blocks that no request uses, and their contents with them; running requests keep theirs."""
        self._with_turn(self.cache.reset_prefix_cache)

    def reset_stats(self) -> None:
        """Lets a new measurement begin: cached prefixes go, and the fullest moment in `stats()` is looked for anew."""
        self.reset_prefix_cache()
        self.totals.kv_peak_used_tokens = self.totals.kv_peak_held_tokens = 0

    def check_invariants(self) -> None:
        """Raises `InvariantBroken` if queues and cache contradict each other."""
        self._with_turn(self.scheduler.check_invariants)

    def __repr__(self) -> str:
        return (
            f"LLMEngine({self.lm!r}, kv_cache={self.kv_cache!r}, max_num_seqs={self.max_num_seqs}, "
            f"max_num_batched_tokens={self.max_num_batched_tokens}, max_model_len={self.max_model_len})"
        )


class RequestStream(Iterator[StreamPiece]):
    """Iterates over the pieces of `requests`, and lets the engine step when there is none to hand out.

    It is an object rather than a generator, because a generator that was never started cannot be closed: its request
    would run on without a reader.
    """

    def __init__(self, engine: LLMEngine, requests: list[Request]) -> None:
        self.requests = requests
        self._engine: LLMEngine | None = engine
        self._readers = [PieceReader(request) for request in requests]
        self._pieces: deque[StreamPiece] = deque()

    @property
    def request_id(self) -> str:
        """For `abort`."""
        return self.requests[0].request_id

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> StreamPiece:
        while not self._pieces:
            if not self._readers:
                raise StopIteration
            self._collect()
            if not self._pieces:
                self._wait()
        return self._pieces.popleft()

    def _wait(self) -> None:
        try:
            self._engine._advance(self._readers[0].request)
        except MinferError:
            raise  # refused, in the middle of a step: nothing has changed
        except BaseException:
            self.close()
            raise

    def _collect(self) -> None:
        """Takes what the answers have gained since the last look."""
        for reader in list(self._readers):
            piece = reader.take()
            if reader.ended:
                self._readers.remove(reader)
                if reader.request.cause is not None:
                    self._fail(reader.request.cause)
            if piece.token_ids or piece.text or piece.finish_reason:
                self._pieces.append(piece)

    def _fail(self, cause: Exception) -> None:
        engine, self._readers = self._engine, []
        engine._abandon(self.requests)
        failure = generation_failed(engine.lm.name, cause, [request.output() for request in self.requests])
        self._engine = None  # the exception keeps the frames of this stream, which must not keep the engine
        del engine
        raise failure

    def close(self) -> None:
        """Aborts what has not ended; what was not read is dropped."""
        self._readers, self._pieces = [], deque()
        if self._engine is not None:
            self._engine._abandon(self.requests)

    def __del__(self) -> None:
        # Python may collect a forgotten stream in the middle of anything that an engine does: the next step ends it.
        engine = getattr(self, "_engine", None)
        if engine is not None and any(not request.finished for request in self.requests):
            engine.abort(self.request_id)


def generation_failed(name: str, cause: Exception, outputs: list[RequestOutput]) -> GenerationFailed:
    """The exception for those whose requests were in a step that failed."""
    failure = GenerationFailed(
        f"{name} failed in a step: {type(cause).__name__}: {cause}. What was generated until then is in the `outputs` "
        "of this exception; the engine can go on.",
        outputs,
    )
    failure.__cause__ = cause
    return failure


def without_frames(error: Exception) -> Exception:
    """The error with its traceback as a text: the frames would keep all tensors and engines that they worked on."""
    error.add_note("".join(["It failed here:\n", *traceback.format_tb(error.__traceback__)]).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__, link = None, link.__cause__ or link.__context__
    return error
