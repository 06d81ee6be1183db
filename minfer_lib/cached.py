"""The second engine: keys and values are kept, so that a step computes one new token instead of all of them.

Invariant: before each step the cache holds every token of the request but the newest ones that the model has not seen:
the whole prompt at first (prefill), then exactly one (decode).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from transformers.cache_utils import Cache, DynamicCache

from .errors import InvalidParameter, one_of
from .kv_cache import KVCache, cache_argument, check_cacheable, check_filled
from .loading import LanguageModel
from .naive import SerialEngine
from .request import Request

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
