"""transformers' own continuous batching as a baseline. All that is known of its interface stands in this module.

Invariant: it runs as its users would run it, at the same limits as our engine, on requests that need no eviction; it
switches the attention function of a view of the model, never that of the model; and no answer is made up: a request
that the library loses, or whose tokens have no time stamps, is an error.

How it is set: a cache for as many requests as can run, none of it held back, in pages of 256 tokens, first come first
served. Tried on two cores of a CPU with SmolLM2-135M, transformers 5.24 and 8 of 16 requests running, seven rounds in
random order: a fifth of the cache held back, pages of 32 tokens, no sharing of blocks, prompts first, attention "eager"
for "sdpa". In bfloat16 their medians lie within 5 % of these settings (in float32, less quiet, within 9 %), and
of each the ratios of the rounds go from below 1 to above it: no difference. Steps of at most 128, 256 and 1,024 tokens
had medians within 5 % of 512, too. Graphs and overlapping steps exist on GPUs alone: see `cuda_graph`.

Its interface moves between releases, and written for 5.17 to 5.24 this relies on little of it: a manager of
`init_continuous_batching` with `start`, `add_request`, `get_result` and `stop`, rather than on `generate_batch`, which
has one length and one EOS for all requests and cannot take one that comes later. Each call makes a manager of its own,
with a cache that fits its requests, so that nothing of one run can reach the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import configuration_utils

from ..attention.view import view_of
from ..errors import BadEnvironment, GenerationFailed, InvalidParameter, UnsupportedModel, integer
from ..generation.params import SamplingParams
from ..generation.prompts import Prompt, make_requests, resolve_max_model_len
from ..generation.request import Request, RequestOutput
from ..models import hf_compat
from ..models.load import LanguageModel
from .baselines import check_supported
from .machine import synchronize
from .metrics import peak_kv_tokens
from .roofline import kv_token_bytes

SAFETY = 0.2  # of the cache is left free where that is no setting: below 15 % the library admits no more requests
PATIENCE_S = 0.5  # between two looks at whether its thread is still alive


class HFContinuousBatch:
    """Continuous batching of transformers, with at most `max_running` requests at once.

    max_batch_tokens: tokens of one step at most, as `max_num_batched_tokens` of `LLMEngine`.
    cuda_graph, attention: None leaves them to the library, which takes flash attention in half precision where it is
      installed, and CUDA graphs and steps that overlap (`use_async_batching`) only with it. cuda_graph=True or False
      settles the second; attention="sdpa" or "eager" the first.

    Raises `BadEnvironment` if the installed transformers has no continuous batching or one that this module does not
    know, `UnsupportedModel` if it cannot run the model: two tokens are generated to find out.
    """

    name = "HF continuous"
    keeps_cache = False  # one for each call
    gives_out_cache = True  # in pages; how many of them requests own, it does not tell

    def __init__(
        self,
        lm: LanguageModel,
        max_running: int = 8,
        *,
        max_batch_tokens: int = 512,
        max_model_len: int | None = None,
        cuda_graph: bool | None = None,
        attention: str | None = None,
    ) -> None:
        self.lm = lm
        if attention not in (None, "sdpa", "eager"):
            raise InvalidParameter(f"attention={attention!r} was asked for; there are `sdpa`, `eager` and None.")
        self.cuda_graph, self.attention = cuda_graph, attention
        self.max_running = integer("max_running", max_running, at_least=1)
        self.max_batch_tokens = integer("max_batch_tokens", max_batch_tokens, at_least=1)
        self.max_model_len = resolve_max_model_len(lm, max_model_len)
        self.num_steps: int | None = 0  # calls of the model so far; None if this transformers does not count them
        self.aside_s = 0.0  # of the last call: starting and stopping, which a server does once
        self._ids = map(str, itertools.count())
        self._held = (0, 0)
        self._fields = config_fields(lm)
        self._page = self._fields.get("page_size", self._fields.get("block_size"))  # renamed after 5.17
        try:
            probe = self.generate([[0, 0]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
        except GenerationFailed as error:
            raise self._unsupported(error) from error
        if probe.error:
            raise self._unsupported(probe.error)
        self._held = (0, 0)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers in input order; all requests arrive once the thread runs. Greedy only, without min_tokens.

        Raises what an engine's `generate` raises, `GenerationFailed` included.
        """
        requests = self._requests(prompts, params)
        return self._run(requests, [0.0] * len(requests))[0]

    def serve_arrivals(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], arrivals: Sequence[float]
    ) -> tuple[list[RequestOutput], float]:
        """The same for requests that come `arrivals` seconds after time zero, which is returned too."""
        return self._run(self._requests(prompts, params), list(arrivals))

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of KV cache of the last call: (reserved, used by tokens of requests at the fullest moment)."""
        per_token = kv_token_bytes(self.lm)
        return self._held[0] * per_token, self._held[1] * per_token

    @property
    def settings(self) -> str:
        """How the library was set in the last call, in a line, what it decided by itself included."""
        return self._settings

    def __repr__(self) -> str:
        return (
            f"HFContinuousBatch({self.lm!r}, max_running={self.max_running}, max_batch_tokens={self.max_batch_tokens}, "
            f"max_model_len={self.max_model_len}, cuda_graph={self.cuda_graph}, attention={self.attention!r})"
        )

    # -- one call ---------------------------------------------------------------------------------------------------

    def _requests(self, prompts: Any, params: Any) -> list[Request]:
        requests = make_requests(
            self.lm, prompts, params, max_model_len=self.max_model_len, now=time.perf_counter(), ids=self._ids
        )
        for request in requests:  # each for itself: lengths and EOS may differ here
            check_supported([request])
            if request.params.min_tokens and not request.params.ignore_eos:
                raise InvalidParameter(
                    "transformers' continuous batching cannot hold EOS back until min_tokens. Leave it at 0, or ignore "
                    "EOS altogether."
                )
        return requests

    def _run(self, requests: list[Request], arrivals: list[float]) -> tuple[list[RequestOutput], float]:
        opened = time.perf_counter()
        with self._manager(requests) as manager:
            began = time.perf_counter()
            for at in sorted(range(len(requests)), key=lambda i: arrivals[i]):
                while (left := began + arrivals[at] - time.perf_counter()) > 0:
                    time.sleep(left)  # its thread works on
                self._submit(manager, str(at), requests[at])
                requests[at].metrics.arrival = began + arrivals[at]
            results = self._collect(manager, requests)
            ended = time.perf_counter()
        steps = getattr(manager, "current_batch", None)
        self.num_steps = None if steps is None or self.num_steps is None else self.num_steps + steps
        self._settings = self._told(manager)
        for at, request in enumerate(requests):
            replay(results[str(at)], request)
        self.aside_s = (began - opened) + (time.perf_counter() - ended)
        outputs = [request.output() for request in requests]
        self._held = self._held[0], peak_kv_tokens(outputs)
        return outputs, began

    @contextmanager
    def _manager(self, requests: list[Request]) -> Iterator[Any]:
        """A running manager over a view of the model; afterwards its thread has ended."""
        attention = self.attention  # None: the model's own; the library takes flash attention where there is one
        if "auto_switch_to_flash" not in self._fields and (attention or self.lm.dtype == torch.float32):
            attention = f"paged|{attention or hf_compat.attention_of(self.lm.model.config)}"  # flash has no float32
        view = view_of(self.lm.model, attention)
        hf_compat.forget_manager(view)
        with torch.no_grad():
            try:
                manager = view.init_continuous_batching(
                    generation_config=GenerationConfig(do_sample=False, num_beams=1, eos_token_id=-1, pad_token_id=0),
                    continuous_batching_config=self._config(requests),
                )
                manager.warmup()  # graphs of a GPU; nothing on a CPU
            except Exception as error:  # whatever it is: it is not ours
                raise GenerationFailed(
                    f"The continuous batching of transformers did not start: {type(error).__name__}: {error}."
                ) from error
            manager.start()
            clean = False
            try:
                yield manager
                clean = True
            finally:
                manager.stop(block=True, hard_stop=not clean)
                if hasattr(manager, "destroy"):
                    manager.destroy()
                synchronize(self.lm.device)

    def _config(self, requests: list[Request]) -> Any:
        """The library's settings: the limits, and a cache for as many requests as can run, the largest ones."""
        page = self._page
        needs = (math.ceil((len(r.prompt_token_ids) + r.max_new_tokens) / page) for r in requests)
        blocks = sum(sorted(needs, reverse=True)[: self.max_running])
        free = 0.0 if "safety_margin" in self._fields else SAFETY
        blocks = max(self.max_running, math.ceil((blocks + 1) / (1 - free)))  # 5.17 runs no more requests than blocks
        self._held = blocks * page, 0
        options = {
            "max_requests_per_batch": self.max_running,
            "max_batch_tokens": max(self.max_batch_tokens, self.max_running),  # else fewer would run
            "num_blocks": blocks,
            "safety_margin": 0.0,
            "use_cuda_graph": self.cuda_graph,
            "auto_switch_to_flash": self.attention is None and self.lm.dtype != torch.float32,
        }
        options = {name: value for name, value in options.items() if name in self._fields}
        return configuration_utils.ContinuousBatchingConfig(**options)

    def _told(self, manager: Any) -> str:
        """The settings that matter for its speed, as they stand once it ran."""
        config = getattr(manager, "continuous_batching_config", None)
        names = ("page_size", "block_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "safety_margin",
                 "use_cuda_graph", "use_async_batching", "scheduler_type")  # fmt: skip
        told = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        attention = hf_compat.attention_of(getattr(manager, "model", self.lm.model).config)
        return f"transformers {_version()}, attention={attention}, " + ", ".join(f"{k}={v}" for k, v in told.items())

    def _submit(self, manager: Any, name: str, request: Request) -> None:
        eos = -1 if request.params.ignore_eos or not self.lm.eos_ids else sorted(self.lm.eos_ids)
        taken = manager.add_request(
            request.prompt_token_ids,
            request_id=name,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=eos,
            record_timestamps=True,
        )
        if taken is None:
            raise GenerationFailed("The thread of transformers' continuous batching takes no requests any more.")

    def _collect(self, manager: Any, requests: list[Request]) -> dict[str, Any]:
        """The library's results by name, when all are there."""
        results: dict[str, Any] = {}
        while len(results) < len(requests):
            result = manager.get_result(timeout=PATIENCE_S)
            if result is None:
                if not manager.is_running():
                    raise GenerationFailed(
                        f"The thread of transformers' continuous batching ended with {len(results)} of {len(requests)} "
                        "requests answered. Its log says why; the model itself can still be used."
                    )
            elif result.is_finished():
                results[result.request_id] = result
        return results

    def _unsupported(self, error: Any) -> UnsupportedModel:
        return UnsupportedModel(
            f"transformers {_version()} cannot run {self.lm.name} with continuous batching: {error} Leave this "
            "baseline out, or use HFStaticBatch."
        )


def replay(result: Any, request: Request) -> None:
    """Takes over what the library generated, token by token with the moments they came at."""
    began, ended = result.lifespan
    stamps = list(result.timestamps or ())
    request.metrics.first_scheduled = began
    if result.error is not None:
        request.finish("error", ended, error=str(result.error))
    elif len(stamps) != len(result.generated_tokens):
        tokens = len(result.generated_tokens)
        request.finish("error", ended, error=f"transformers gave {len(stamps)} time stamps to {tokens} tokens")
    for token, moment in zip(result.generated_tokens, stamps, strict=False):
        if request.finished:  # a stop string: computed further, and thrown away
            break
        request.append(token, None, moment)
    request.finish("error", ended, error="transformers ended it before its length or an EOS was reached")
    request.metrics.finished = ended  # when it was handed over


def config_fields(lm: LanguageModel) -> dict[str, Any]:
    """The library's settings with their defaults. Raises `BadEnvironment` where those that are needed are missing."""
    config = getattr(configuration_utils, "ContinuousBatchingConfig", None)
    fields = {f.name: f.default for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else {}
    known = {"max_requests_per_batch", "max_batch_tokens", "num_blocks"} <= fields.keys() and (
        "page_size" in fields or "block_size" in fields
    )
    if not hasattr(lm.model, "init_continuous_batching") or not known:
        raise BadEnvironment(
            f"transformers {_version()} has no continuous batching that can be measured here; 5.17 to 5.24 are known "
            "to have it. Install one of these, or leave this baseline out."
        )
    return fields


def _version() -> str:
    import transformers

    return transformers.__version__
