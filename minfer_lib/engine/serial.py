"""The first two engines: one request after the other.

`Engine` is what all engines share, `SerialEngine` a loop around the model whose step is left to the subclass.
`NaiveEngine` runs the model on the whole sequence for every new token: simple, right, and slower with every token it
says. `CachedEngine` keeps keys and values, so that a step computes one new token instead of all of them.

Invariant: requests are served in the order given, and one that has begun ends before the next begins, unless a caller
interleaves streams; each run has its own state, so that this is right too.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers.cache_utils import Cache, DynamicCache

from ..attention.view import EngineView
from ..cache.contiguous import KVCache, check_cacheable, check_filled
from ..errors import GenerationFailed, MinferError, must_be
from ..generation.params import SamplingParams
from ..generation.prompts import Prompt, conversations, make_requests, one_prompt, resolve_max_model_len
from ..generation.request import PieceReader, Request, RequestOutput, StreamPiece
from ..generation.sampling import Sampler
from ..models import hf_compat
from ..models.load import LanguageModel, load_model

Messages = Sequence[Mapping[str, Any]]


class Engine:
    """What every engine has: `generate`, `stream` and, over `generate`, `chat`. clock: seconds as a float.

    An engine runs the layers that the model has when the engine is made: after `quantize_int8`, make a new one.
    """

    name = "engine"

    def __init__(self, lm: LanguageModel, clock: Callable[[], float]) -> None:
        if not callable(clock):
            raise must_be("clock", "a function that returns seconds", clock)
        self.lm, self.clock = lm, clock

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        raise NotImplementedError

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        raise NotImplementedError

    def chat(
        self,
        messages: str | Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers to one conversation or a list of them, in the model's chat template, in input order.

        A conversation is a list of dicts with "role" and "content", or a string for one message of the user. Raises
        `InvalidPrompt` for messages that do not fit the template, and what `generate` raises.
        """
        prompts = [self.lm.chat_ids(conversation) for conversation in conversations(messages)]
        return self.generate(prompts, params, progress=progress)


class SerialEngine(Engine):
    """`generate` and `stream` for engines that serve one request at a time.

    lm: a `LanguageModel`, or a name as `load_model` takes it. max_model_len: tokens of prompt and answer together; None
    takes the model's limit, at most 2,048. clock: seconds as a float; tests inject their own.
    """

    name = "serial"

    def __init__(
        self,
        lm: LanguageModel | str | os.PathLike[str],
        *,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(lm if isinstance(lm, LanguageModel) else load_model(lm), clock)
        self.max_model_len = resolve_max_model_len(self.lm, max_model_len)
        self.sampler = Sampler(self.lm.eos_ids)
        self.model = EngineView(self.lm)
        self.num_steps = 0  # calls of the model so far
        self._ids = map(str, itertools.count())

    # -- what a subclass says -----------------------------------------------------------------------------------------

    def _memory(self) -> AbstractContextManager[Any]:
        """What one request keeps between its steps; given back when the request ends, however it ends."""
        return nullcontext()

    def _logits(self, request: Request, memory: Any) -> torch.Tensor:
        """Logits [1, vocab] for the next token of a request."""
        raise NotImplementedError

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
        returns what there is, the rest with finish_reason "abort"; if the model itself fails, `GenerationFailed`
        carries it.
        """
        requests = self._requests(prompts, params)
        try:
            for request in tqdm(requests, desc=self.name, unit="request") if progress else requests:
                for _ in self._run(request):
                    pass
        except KeyboardInterrupt:
            done = sum(request.finished for request in requests)
            warnings.warn(
                f"Interrupted: {done} of {len(requests)} answers are complete, the rest is cut.", stacklevel=2
            )
        except MinferError:  # a model that the engine could not refuse before it saw a step of it
            raise
        except Exception as error:
            raise self._failed(error, requests) from error
        finally:
            self._abort(requests)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """The answer to one prompt, piece by piece as it is generated; the last piece carries the finish reason.

        The prompt is checked here, at the call. With n > 1 the answers come one after the other, told apart by `index`.

        What the request keeps between its steps (a KV cache, in the engines that have one) is given back when the last
        piece was read, or when the iterator is closed or collected. A stream that is left early while something still
        refers to it holds its cache: call its `close()`, or read it inside `with contextlib.closing(...)`.
        """
        prompts = one_prompt(prompt, "stream()", "Call it once for each, or use generate().")
        return self._pieces(self._requests(prompts, params))

    def _pieces(self, requests: list[Request]) -> Iterator[StreamPiece]:
        try:
            for request in requests:
                reader = PieceReader(request)
                for _ in self._run(request):
                    yield reader.take()
        except MinferError:
            raise
        except Exception as error:
            raise self._failed(error, requests) from error
        finally:  # also when the reader of the stream goes away
            self._abort(requests)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _run(self, request: Request) -> Iterator[None]:
        """The steps of one request, from its prompt to its finish reason; yields after each."""
        request.metrics.first_scheduled = self.clock()
        with self._memory() as memory:
            while not request.finished:
                try:
                    self.num_steps += 1
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
        self.model.refresh()
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
        return self.lm.next_token_logits(ids, self.model, use_cache=False)


CACHES = ("own", "hf")


class CachedEngine(SerialEngine):
    """One request at a time over a KV cache: the whole prompt at first (prefill), then one token a step (decode).

    cache: "own" is this package's preallocated `KVCache` of max_model_len tokens, kept and reused from request to
      request; "hf" is the `DynamicCache` of transformers, made anew for each request and grown with every token.

    Invariant: before each step the cache holds every token of the request that the model has seen.
    """

    name = "cached"

    def __init__(
        self,
        lm: LanguageModel | str | os.PathLike[str],
        cache: Literal["own", "hf"] = "own",
        *,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(lm, max_model_len=max_model_len, clock=clock)
        if cache not in CACHES:
            raise must_be("cache", '"own" or "hf"', cache)
        check_cacheable(self.lm.model, self.lm.name)
        self.cache = cache
        self.name = "cached" if cache == "own" else "cached (HF cache)"
        self._argument = hf_compat.cache_argument(self.lm.model)
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
        logits = self.lm.next_token_logits(ids, self.model, use_cache=True, **{self._argument: memory})
        if prefill:
            check_filled(memory, len(new), self.lm.name)
        return logits

    def kv_bytes(self) -> int:
        """Bytes of KV buffers that this engine holds now, in use or waiting for the next request."""
        return sum(cache.nbytes_reserved for cache in self._caches)
