"""A request from its arrival to its last token: what was asked, what has come of it, and when.

Invariant: `token_ids` and `text` only grow, and a request that has a finish reason never changes again. Everything that can
be wrong with prompts and parameters is found by `make_requests`, before the first of them starts.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import InvalidParameter, InvalidPrompt, PromptTooLong
from .loading import LanguageModel
from .params import SamplingParams
from .stopping import StopStrings
from .tokenizer import StreamDecoder

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
DEFAULT_MAX_MODEL_LEN = 2048
Prompt = str | Sequence[int]


@dataclass
class RequestMetrics:
    """Moments of a request in seconds of the engine's clock; None until they happen."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """Arrival until some of the prompt was first computed."""
        return self._since(self.arrival, self.first_scheduled)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from arrival."""
        return self._since(self.arrival, self.first_token)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return self._since(self.first_token, self.last_token) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Arrival until the end."""
        return self._since(self.arrival, self.finished)

    @staticmethod
    def _since(begin: float | None, end: float | None) -> float | None:
        return None if begin is None or end is None else end - begin


@dataclass(frozen=True)
class RequestOutput:
    """One finished answer.

    index: which of the prompt's n answers. token_ids holds the ending EOS or stop token and the tokens of a stop string; text
    holds neither, nor half a character. stop_reason: the stop string or stop id that ended it, or "kv_cache_full";
    None for EOS and for a plain "length". logprobs: one dict {token id: log-probability} a token, if asked for.
    error: what went wrong, with finish_reason "error".
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    logprobs: list[dict[int, float]] | None
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamPiece:
    """What one step added to an answer; the last piece of an answer carries its finish_reason."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(eq=False)
class Request:
    """One answer in the making. n > 1 answers to one prompt are n requests with the same request_id."""

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int]
    decoder: StreamDecoder
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.params.stop)
        self._streamed = (0, 0)  # characters and tokens that `take_piece` has handed out

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int, logprobs: dict[int, float] | None, now: float) -> None:
        """Takes the token of one step and ends the request if it was the last."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.metrics.first_token is None:
            self.metrics.first_token = now
        self.metrics.last_token, self.metrics.num_tokens = now, len(self.token_ids)

        armed = len(self.token_ids) > self.params.min_tokens
        is_eos = token_id in self.eos_ids and not self.params.ignore_eos
        if armed and (is_eos or token_id in self.params.stop_token_ids):
            self.finish("stop", now, stop_reason=None if is_eos else token_id)
            return
        self.text += self._stops.feed(self.decoder.step(token_id), armed)
        if self._stops.hit is not None:
            self.finish("stop", now, stop_reason=self._stops.hit)
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish("length", now)

    def finish(
        self, reason: FinishReason, now: float, *, stop_reason: str | int | None = None, error: str | None = None
    ) -> None:
        """Ends the request and releases text that was held back; without effect on one that has ended."""
        if self.finished:
            return
        armed = len(self.token_ids) > self.params.min_tokens
        self.text += self._stops.feed(self.decoder.flush(), armed) + self._stops.flush()
        if self._stops.hit is not None:  # perhaps only just now, in what the decoder still held
            reason, stop_reason, error = "stop", self._stops.hit, None
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.metrics.finished = now

    def take_piece(self) -> StreamPiece:
        """What is new since the last call."""
        characters, tokens = self._streamed
        self._streamed = len(self.text), len(self.token_ids)
        return StreamPiece(
            self.request_id, self.index, self.text[characters:], self.token_ids[tokens:], self.finish_reason
        )

    def output(self) -> RequestOutput:
        """The finished answer."""
        return RequestOutput(
            self.request_id, self.index, self.prompt_token_ids, self.token_ids, self.text, self.finish_reason,
            self.stop_reason, self.error, self.logprobs if self.params.logprobs is not None else None, self.metrics,
        )  # fmt: skip


# -- from what a caller passes to requests --------------------------------------------------------------------------


def make_requests(
    lm: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    max_model_len: int,
    now: float,
    ids: Iterator[str],
) -> list[Request]:
    """Requests for one prompt or a list of them, all checked; n > 1 gives n consecutive requests with one id.

    params: one for all, one each, or None for the defaults. ids: where request ids come from.
    Raises `InvalidPrompt`, `PromptTooLong` or `InvalidParameter`, and then has made none.
    """
    many = prompt_list(prompts)
    requests = []
    for prompt, each in zip(many, params_list(params, len(many)), strict=True):
        token_ids = prompt_token_ids(lm, prompt, max_model_len)
        check_against_model(each, lm)
        request_id = next(ids)
        seed = each.seed if each.seed is not None else secrets.randbits(63)
        for index in range(each.n):
            requests.append(
                Request(
                    request_id, index, list(token_ids), each, seed + index,
                    max_new_tokens=min(each.max_tokens, max_model_len - len(token_ids)),
                    eos_ids=lm.eos_ids,
                    decoder=StreamDecoder(lm.tokenizer, token_ids),
                    metrics=RequestMetrics(arrival=now),
                )
            )  # fmt: skip
    return requests


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or token ids) or several -> a list of prompts."""
    if isinstance(prompts, str | bytes):  # bytes are refused where each prompt is checked
        return [prompts]
    if hasattr(prompts, "tolist"):  # numpy arrays and tensors
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise InvalidPrompt(f"A prompt is a string or a list of token ids; {prompts!r} is neither.")
    many = list(prompts)
    return [many] if many and all(_is_int(p) for p in many) else many


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in each):
        raise InvalidParameter("params must be a SamplingParams, or a list with one for each prompt.")
    if len(each) != count:
        raise InvalidParameter(f"{len(each)} SamplingParams were given for {count} prompts. Give one for all, or one for each.")
    return each


def prompt_token_ids(lm: LanguageModel, prompt: Any, max_model_len: int) -> list[int]:
    """Checked token ids of one prompt."""
    if isinstance(prompt, str):
        token_ids = lm.encode(prompt)
    else:
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        values = list(values) if isinstance(values, Iterable) and not isinstance(values, bytes) else [None]
        if not all(_is_int(v) for v in values):
            raise InvalidPrompt(f"A prompt is a string or a list of token ids; {prompt!r} is neither.")
        token_ids = [operator.index(v) for v in values]
    if not token_ids:
        raise InvalidPrompt("A prompt has no tokens. A model needs at least one to continue from; give it some text.")
    if outside := [t for t in token_ids if not 0 <= t < lm.vocab_size]:
        raise InvalidPrompt(
            f"Token id {outside[0]} is not in the vocabulary of {lm.name}: ids go from 0 to {lm.vocab_size - 1}."
        )
    if len(token_ids) >= max_model_len:
        raise PromptTooLong(
            f"A prompt of {len(token_ids)} tokens leaves no room for an answer: this engine's limit is {max_model_len} tokens, "
            f"prompt and answer together, so a prompt may have {max_model_len - 1}. Shorten it, or make the engine with a larger "
            f"max_model_len (at most {lm.max_model_len} for {lm.name})."
        )
    return token_ids


def check_against_model(params: SamplingParams, lm: LanguageModel) -> None:
    """What `SamplingParams` could not know: whether its ids exist here, and whether there is any text to stop at."""
    for name, used in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if outside := [t for t in used if t >= lm.vocab_size]:
            raise InvalidParameter(
                f"{name} names token {outside[0]}, but ids of {lm.name} go from 0 to {lm.vocab_size - 1}."
            )
    if params.stop and lm.tokenizer is None:
        raise InvalidParameter(
            f"stop={list(params.stop)} was asked for, but {lm.name} has no tokenizer and so no text to find it in. "
            "Use stop_token_ids."
        )


def resolve_max_model_len(lm: LanguageModel, max_model_len: int | None) -> int:
    """The engine's limit in tokens: what was asked for, else the model's own limit, at most 2,048."""
    if max_model_len is None:
        return min(lm.max_model_len, DEFAULT_MAX_MODEL_LEN)
    if not _is_int(max_model_len) or not 2 <= max_model_len <= lm.max_model_len:
        raise InvalidParameter(
            f"max_model_len={max_model_len!r} is not possible: it must be an integer from 2 to {lm.max_model_len}, "
            f"the most that {lm.name} can place."
        )
    return operator.index(max_model_len)


def request_ids() -> Iterator[str]:
    """"0", "1", "2", ..."""
    return map(str, itertools.count())


def _is_int(value: Any) -> bool:
    # arrays and tensors have an __index__ too, and a list of them is a list of prompts
    return hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0
