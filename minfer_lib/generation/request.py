"""A request from its arrival to its last token: what was asked, what has come of it, and when.

Invariant: `token_ids` and `text` only grow, and a request that has a finish reason never changes again. Everything
that can be wrong with prompts and parameters is found by `prompts.make_requests`, before the first of them starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..models.tokenizer import StreamDecoder
from .params import SamplingParams
from .stopping import StopStrings

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


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

    index: which of the prompt's n answers. token_ids holds the ending EOS or stop token and the tokens of a stop
    string; text holds neither, nor half a character. stop_reason: the stop string or stop id that ended it, or
    "kv_cache_full"; None for EOS and for a plain "length". logprobs: one dict {token id: log-probability} a token, if
    asked for.
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
    priority: float = 0  # lower numbers run first
    deadline: float | None = None  # second of the engine's clock when its time is up
    num_computed: int = 0  # tokens, of the prompt and then of the output, that the KV cache holds
    siblings: Sequence[Request] = ()  # the other answers to the same prompt

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.params.stop)
        self._streamed = (0, 0)  # characters and tokens that `take_piece` has handed out

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens that the model has not seen: some of the prompt, or the one that was sampled last."""
        return self.num_tokens - self.num_computed

    def tokens(self, begin: int, end: int) -> list[int]:
        """Token ids of prompt and output from one position to another."""
        prompt = len(self.prompt_token_ids)
        if begin >= prompt:
            return self.token_ids[begin - prompt : end - prompt]
        return self.prompt_token_ids[begin:end] + self.token_ids[: max(0, end - prompt)]

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` of those that are to compute."""
        return self.tokens(self.num_computed, self.num_computed + count)

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
