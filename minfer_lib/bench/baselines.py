"""The named baselines: `generate` of Hugging Face transformers, one prompt at a time and as a padded batch.

Invariant: a baseline runs transformers as its users would, with nothing of this package in its way, and gives the
tokens that `model.generate` gives. It is greedy, and the model's own generation config has no say: some models ship a
repetition penalty there, which would make another text of the same logits.

Both take and return what the engines do, so that one harness measures all. Time stamps come from a streamer, which
transformers hands every token to as soon as it is chosen. That copies one token a row to the CPU in each step. It makes
no step wait that would not have waited: with any cache, `generate` reads after each step on a CPU or an NVIDIA GPU
whether all rows have ended (`StopCheck` in transformers 5.24), so that the next step starts when this one is done.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ..errors import InvalidParameter, integer, one_of
from ..generation.params import SamplingParams
from ..generation.prompts import Prompt, make_requests, resolve_max_model_len
from ..generation.request import Request, RequestOutput
from ..models.load import LanguageModel
from .machine import synchronize
from .roofline import kv_token_bytes
from .usage import padding_share


class HFSerial:
    """`model.generate`, one prompt after the other, in the order of arrival.

    static_cache: a cache of fixed size (`cache_implementation="static"`), as long as the longest request so far. On a
    GPU transformers then compiles the decode step, anew for each shape, so that the first run of a workload takes
    minutes and the next ones are its fastest way. On a CPU it does not compile.
    """

    name = "HF generate"
    batch_size = 1
    keeps_cache = False  # transformers makes a cache for each call and drops it

    def __init__(self, lm: LanguageModel, *, static_cache: bool = False, max_model_len: int | None = None) -> None:
        self.lm = lm
        self.static_cache = static_cache
        self.max_model_len = resolve_max_model_len(lm, max_model_len)
        self.num_steps = 0  # calls of the model so far
        self.computed_tokens = 0  # rows of tokens that went through it, padding included
        # The same layers. It is kept, since the compiled step is: of each `generate` a new one would compile again.
        self._model = copy.copy(lm.model)
        # Passing a config to `generate` is not enough: what it leaves at None is filled from the model's, EOS included.
        self._model.generation_config = GenerationConfig()
        self._ids = map(str, itertools.count())
        self._held = (0, 0)  # tokens that the largest cache of the last run had room for, and tokens in it
        self._static_len = 0  # of the caches made so far
        self._last_padding = 0.0
        if static_cache:
            self.name = f"{type(self).name}, static cache"

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers in input order; all requests arrive at the call. Greedy only: raises `InvalidParameter` otherwise.

        Raises what an engine's `generate` raises for prompts that cannot be run.
        """
        requests = make_requests(
            self.lm, prompts, params, max_model_len=self.max_model_len, now=time.perf_counter(), ids=self._ids
        )
        batches = self._batches(requests)
        for batch in batches:
            check_supported(batch)
            check_room(batch, self.lm)
        self._held = (0, 0)
        before = self.computed_tokens
        for batch in batches:
            self._run(batch)
        outputs = [request.output() for request in requests]
        self._last_padding = padding_share(self.computed_tokens - before, outputs)
        return outputs

    def padding_share(self) -> float:
        """Of the token rows that the last `generate` computed, the share that was padding or past a row's own end."""
        return self._last_padding

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of KV cache at the end of the largest batch of the last run: (reserved, used by tokens of requests)."""
        per_token = kv_token_bytes(self.lm)
        return self._held[0] * per_token, self._held[1] * per_token

    def _batches(self, requests: list[Request]) -> list[list[Request]]:
        """What runs together, in the order of running."""
        return [[request] for request in requests]

    def _run(self, batch: list[Request]) -> None:
        """Generate for one batch and replay its tokens, with the moments they came at, into the requests."""
        input_ids, mask = padded_left([request.prompt_token_ids for request in batch], self.lm.device)
        clock = TokenClock()
        config = generation_config(self.lm, batch)
        if self.static_cache:
            config.cache_implementation = "static"
        with torch.no_grad():
            rows = self._model.generate(
                input_ids, attention_mask=mask, generation_config=config, streamer=clock
            )  # [batch, prompt + new]
        synchronize(self.lm.device)
        ended = time.perf_counter()
        for request, row in zip(batch, rows[:, input_ids.shape[1] :].tolist(), strict=True):
            request.metrics.first_scheduled = clock.began
            for token, now in zip(row, clock.stamps, strict=True):
                if request.finished:  # the row ran on until the longest ended: computed, and thrown away
                    break
                request.append(token, None, now)
            request.metrics.finished = ended  # nobody gets an answer before the whole batch is done
        # The last token of each row is chosen, never fed back, so the cache has no entry for it.
        computed = rows.shape[0] * (rows.shape[1] - 1)
        self.computed_tokens += computed
        self.num_steps += rows.shape[1] - input_ids.shape[1]
        self._static_len = max(self._static_len, input_ids.shape[1] + config.max_new_tokens - 1)
        room = rows.shape[0] * self._static_len if self.static_cache else computed
        used = sum(len(request.prompt_token_ids) + len(request.token_ids) - 1 for request in batch)
        self._held = max(self._held, (room, used))


ORDERS = {  # by what a padded batch's requests are sorted, and how the row's name says it
    "arrival": "",
    "prompt": ", sorted by prompt",
    "answer": ", sorted by answer",
}


class HFStaticBatch(HFSerial):
    """`model.generate` on batches of up to `batch_size` prompts, padded on the left to the longest of them.

    Left, since a decoder continues at the right end: with padding there it would continue from the padding. A batch
    runs until its longest answer is done, and only then does the next one start: that is what makes it static.

    order: "arrival" as they come; "prompt" puts prompts of like lengths together, which leaves less padding, and which
      anybody can do who has all prompts at hand; "answer" goes by `max_tokens`, then by prompt, which is more than a
      user knows who lets EOS end the answers: the best that padded batches can do.
    even: batches of like sizes instead of full ones and a rest: 10 requests in batches of at most 8 are 5 and 5.
    """

    name = "HF padded batch"

    def __init__(
        self,
        lm: LanguageModel,
        batch_size: int = 8,
        *,
        order: str = "arrival",
        even: bool = False,
        static_cache: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(lm, static_cache=static_cache, max_model_len=max_model_len)
        self.batch_size = integer("batch_size", batch_size, at_least=1)
        if order not in ORDERS:
            raise InvalidParameter(f"order={order!r} was asked for; there are {one_of(list(ORDERS))}.")
        self.order, self.even = order, even
        self.name += ORDERS[order] + ", even" * even

    def _batches(self, requests: list[Request]) -> list[list[Request]]:
        if self.order == "prompt":
            requests = sorted(requests, key=lambda r: len(r.prompt_token_ids))
        elif self.order == "answer":
            requests = sorted(requests, key=lambda r: (r.max_new_tokens, len(r.prompt_token_ids)))
        size, n = self.batch_size, len(requests)
        batches = math.ceil(n / size)
        ends = [n * i // batches if self.even else min(n, size * i) for i in range(batches + 1)]
        return [requests[begin:end] for begin, end in itertools.pairwise(ends)]


class TokenClock(BaseStreamer):
    """Notes when each step's tokens were chosen; transformers copies them to the CPU first, so the GPU is done."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.stamps: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt once, then with each step's tokens [batch]."""
        if self._prompt_seen:
            self.stamps.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Called at the end; the stamps stay."""


def padded_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [prompts, longest] int64; the mask is 0 where a row is padding.

    Done on ids, so that a model without a tokenizer can be measured, and no tokenizer's padding side is touched. The
    padding id is 0: behind the mask any id gives the same result.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def check_supported(batch: Sequence[Request]) -> None:
    """Raises `InvalidParameter` for parameters under which `generate` would not mean what they mean here."""
    for request in batch:
        params = request.params
        if params.temperature or params.penalises or params.logit_bias or params.logits_processors:
            raise InvalidParameter(
                "The Hugging Face baselines are greedy, so that their tokens can be compared with every engine's; "
                "temperature, penalties, logit_bias and logits_processors were asked for. Leave them at their defaults."
            )
        if params.logprobs is not None:
            raise InvalidParameter("The Hugging Face baselines report no logprobs. Leave logprobs at None.")
        if params.min_tokens and params.stop_token_ids:
            raise InvalidParameter(
                "The Hugging Face baselines cannot hold stop_token_ids back until min_tokens. Leave one of them out."
            )
    least = {request.params.min_tokens for request in batch if not request.params.ignore_eos}
    if len(least) > 1 or (any(least) and any(request.params.ignore_eos for request in batch)):
        raise InvalidParameter(
            "A padded batch has one min_tokens and one ignore_eos for all of its rows, and different ones were asked "
            "for. Make them equal, or use batch_size=1."
        )


def check_room(batch: Sequence[Request], lm: LanguageModel) -> None:
    """Raises `InvalidParameter` if padding plus the longest answer would carry a row past the model's limit.

    Every row of a padded batch is as long as the longest prompt and runs as long as the longest answer.
    """
    prompt = max(len(request.prompt_token_ids) for request in batch)
    answer = max(request.max_new_tokens for request in batch)
    if prompt + answer > lm.max_model_len:
        raise InvalidParameter(
            f"A padded batch of a prompt of {prompt} and an answer of {answer} tokens needs {prompt + answer} "
            f"positions in every row, and {lm.name} has {lm.max_model_len}. Use a smaller batch_size, or requests of "
            "like lengths."
        )


def generation_config(lm: LanguageModel, batch: Sequence[Request]) -> GenerationConfig:
    """Greedy, for as long as the longest row needs, ending at EOS only if every row wants that."""
    eos = None if any(request.params.ignore_eos for request in batch) else sorted(lm.eos_ids) or None
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max(request.max_new_tokens for request in batch),
        min_new_tokens=batch[0].params.min_tokens or None,
        eos_token_id=eos,
        pad_token_id=0,
        use_cache=True,
    )
