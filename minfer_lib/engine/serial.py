"""The first engine: a loop around the model, one request after the other, nothing remembered between steps.

`SerialEngine` is the loop, shared with the second engine; what a step computes is left to the subclass. `NaiveEngine`
runs the model on the whole sequence for every new token: simple, right, and slower with every token it says.

Invariant: requests are served in the order given, and one that has begun ends before the next begins, unless a caller
interleaves streams himself; each run has its own state, so that this is right too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers.cache_utils import Cache, DynamicCache

from ..cache.contiguous import KVCache, cache_argument, check_cacheable, check_filled
from ..errors import GenerationFailed, InvalidParameter, InvalidPrompt, MinferError, one_of
from ..generation.params import SamplingParams
from ..generation.prompts import Prompt, make_requests, prompt_list, request_ids, resolve_max_model_len
from ..generation.request import Request, RequestOutput, StreamPiece
from ..generation.sampling import Sampler
from ..models.load import LanguageModel


class SerialEngine:
    """`generate` and `stream` for engines that serve one request at a time.

    max_model_len: tokens of prompt and answer together; None takes the model's limit, at most 2,048.
    clock: seconds as a float; tests inject their own.
    """

    name = "serial"

    def __init__(
        self, lm: LanguageModel, *, max_model_len: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.lm = lm
        self.max_model_len = resolve_max_model_len(lm, max_model_len)
        self.clock = clock
        self.sampler = Sampler(lm.eos_ids)
        self._ids = request_ids()

    # -- what a subclass says -------------------------------------------------------------------------------------

    def _memory(self) -> AbstractContextManager[Any]:
        """What one request keeps between its steps; given back when the request ends, however it ends."""
        return nullcontext()

    def _logits(self, request: Request, memory: Any) -> torch.Tensor:
        """Logits [1, vocab] for the next token of a request."""
        raise NotImplementedError

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
        returns what there is, the rest with finish_reason "abort"; if the model itself fails, `GenerationFailed`
        carries it.
        """
        requests = self._requests(prompts, params)
        try:
            for request in tqdm(requests, desc=self.name, unit="request", disable=not progress):
                for _ in self._run(request):
                    pass
        except KeyboardInterrupt:
            self._abort(requests)
            done = sum(r.finish_reason != "abort" for r in requests)
            warnings.warn(
                f"Interrupted: {done} of {len(requests)} answers are complete, the rest is cut.", stacklevel=2
            )
        except MinferError:  # a model that the engine could not refuse before it saw a step of it
            self._abort(requests)
            raise
        except Exception as error:
            raise self._failed(error, requests) from error
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """The answer to one prompt, piece by piece as it is generated; the last piece carries the finish reason.

        The prompt is checked here, at the call. With n > 1 the answers come one after the other, told apart by `index`.

        What the request keeps between its steps (a KV cache, in the engines that have one) is given back when the last
        piece was read, or when the iterator is closed or collected. A stream that is left early while something still
        refers to it holds its cache: call its `close()`, or read it inside `with contextlib.closing(...)`.
        """
        prompts = prompt_list(prompt)
        if len(prompts) != 1:
            raise InvalidPrompt(
                f"stream() takes one prompt; {len(prompts)} were given. Call it once for each, or use generate()."
            )
        return self._pieces(self._requests(prompts, params))

    def _pieces(self, requests: list[Request]) -> Iterator[StreamPiece]:
        try:
            for request in requests:
                for _ in self._run(request):
                    yield request.take_piece()
        except MinferError:
            raise
        except Exception as error:
            raise self._failed(error, requests) from error
        finally:  # also when the reader of the stream goes away
            self._abort(requests)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _run(self, request: Request) -> Iterator[None]:
        """The steps of one request, from its prompt to its finish reason; yields after each."""
        request.metrics.first_scheduled = self.clock()
        with self._memory() as memory:
            while not request.finished:
                try:
                    logits = self._logits(request, memory)
                    samples = self.sampler(logits, [request])
                except (torch.OutOfMemoryError, MemoryError) as error:
                    samples = None
                    request.finish("error", self.clock(), error=f"out of memory: {error}")
                if samples and samples.errors:
                    error = samples.errors[0]
                    request.finish("error", self.clock(), error=f"{type(error).__name__}: {error}")
                elif samples:
                    request.append(samples.token_ids[0], samples.logprobs[0], self.clock())
                yield

    def _requests(self, prompts: Any, params: Any) -> list[Request]:
        return make_requests(
            self.lm, prompts, params, max_model_len=self.max_model_len, now=self.clock(), ids=self._ids
        )

    def _abort(self, requests: list[Request]) -> None:
        for request in requests:
            request.finish("abort", self.clock())

    def _failed(self, error: Exception, requests: list[Request]) -> GenerationFailed:
        self._abort(requests)
        return GenerationFailed(
            f"{self.lm.name} failed in the middle of a request: {type(error).__name__}: {error}. "
            "What was generated until then is in the `outputs` of this exception.",
            [request.output() for request in requests],
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lm!r}, max_model_len={self.max_model_len})"


class NaiveEngine(SerialEngine):
    """Runs the model on everything so far, for every token: step t costs a forward pass over prompt + t tokens."""

    name = "naive"

    def _logits(self, request: Request, memory: None) -> torch.Tensor:
        ids = torch.tensor([request.prompt_token_ids + request.token_ids], device=self.lm.device)  # [1, tokens so far]
        return self.lm.next_token_logits(ids, use_cache=False)


CACHES = ("own", "hf")


class CachedEngine(SerialEngine):
    """One request at a time over a KV cache.

    cache: "own" is this package's preallocated `KVCache` of max_model_len tokens, kept and reused from request to
      request; "hf" is the `DynamicCache` of transformers, made anew for each request and grown with every token.
    """

    name = "cached"

    def __init__(
        self,
        lm: LanguageModel,
        cache: Literal["own", "hf"] = "own",
        *,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(lm, max_model_len=max_model_len, clock=clock)
        if cache not in CACHES:
            raise InvalidParameter(f"cache={cache!r} is not possible: it must be {one_of(CACHES)}.")
        check_cacheable(lm.model, lm.name)
        self.cache = cache
        self.name = "cached" if cache == "own" else "cached (HF cache)"
        self._argument = cache_argument(lm.model)
        self._caches: list[KVCache] = []  # all that were ever made: as many as requests ran at once
        self._free: list[KVCache] = []  # those whose request has ended, for the next ones

    @contextmanager
    def _memory(self) -> Iterator[Cache]:
        if self.cache == "hf":
            yield DynamicCache(config=self.lm.model.config)
            return
        layers = self.lm.model.config.get_text_config().num_hidden_layers
        if not self._free:
            self._caches.append(KVCache(layers, self.max_model_len))
            self._free.append(self._caches[-1])
        cache = self._free.pop()
        try:
            yield cache
        finally:
            cache.reset()
            self._free.append(cache)

    def _logits(self, request: Request, memory: Cache) -> torch.Tensor:
        prefill = not request.token_ids
        new = request.prompt_token_ids if prefill else request.token_ids[-1:]
        ids = torch.tensor([new], device=self.lm.device)  # [1, prompt] once, then [1, 1]
        logits = self.lm.next_token_logits(ids, use_cache=True, **{self._argument: memory})
        if prefill:
            check_filled(memory, len(new), self.lm.name)
        return logits

    def kv_bytes(self) -> int:
        """Bytes of KV buffers that this engine holds now, in use or waiting for the next request."""
        return sum(cache.nbytes_reserved for cache in self._caches)
