"""A request from its arrival to its last token: what was asked, what has come of it, and when.

Invariant: `token_ids` is the truth. Text and finish reason follow from it, so that whatever breaks off a step, the
request goes on from the tokens that it has. A request that has a finish reason never changes again. Everything that can
be wrong with prompts and parameters is found by `prompts.make_requests`, before the first of them starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..models.tokenizer import StreamDecoder
from .params import SamplingParams
from .stopping import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One answer in the making. n > 1 answers to one prompt are n requests with the same request_id.

    Whoever asked for it may read it from any thread; only the thread whose step it is changes it.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int]
    tokenizer: PreTrainedTokenizerBase | None
    metrics: RequestMetrics
    siblings: Sequence[Request] = ()  # all answers to the same prompt, where there are several
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    num_text: int = 0  # tokens that have text: all but an ending EOS or stop token
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cause: Exception | None = None  # why the model failed in its step
    # what an engine notes about it
    priority: float = 0  # lower numbers run first
    deadline: float | None = None  # second of the engine's clock when its time is up
    arrival: int = 0  # its number among all requests of the engine
    owned: bool = False  # by a `generate` or a `stream`, which reads it itself; otherwise `step` returns its output
    delivered: bool = False  # it has ended, and whoever asked for it can have its output
    num_computed: int = 0  # tokens, of the prompt and then of the output, that the KV cache holds
    turn: int = 0  # which of all parts of steps was its last
    table: Any = None  # its room in the KV cache; None while it waits
    _stops: StopStrings | None = None
    _decoder: StreamDecoder | None = None
    _stopped_text: str = ""  # text that has passed the stop strings, where there are any

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def tokens(self, begin: int, end: int) -> list[int]:
        """Token ids of prompt and output from one position to another."""
        prompt = len(self.prompt_token_ids)
        if begin >= prompt:
            return self.token_ids[begin - prompt : end - prompt]
        return self.prompt_token_ids[begin:end] + self.token_ids[: max(0, end - prompt)]

    # -- what changes it ----------------------------------------------------------------------------------------------

    def append(self, token_id: int, logprobs: dict[int, float] | None, now: float) -> None:
        """Takes the token of one step and ends the request if it was the last."""
        if logprobs is not None:
            self.logprobs[len(self.token_ids) :] = [logprobs]
        self.token_ids.append(token_id)  # from here on it counts, whatever breaks off the rest
        metrics = self.metrics
        if metrics.first_token is None:
            metrics.first_token = now
        metrics.last_token = now
        metrics.num_tokens = len(self.token_ids)
        self._follow(len(self.token_ids), now)

    def restore(self, now: float) -> None:
        """After a step that was broken off: derives what follows from `token_ids` again."""
        self.num_computed, self.table = 0, None
        if self.finished:
            return
        self._stops = self._decoder = None
        self._stopped_text = ""
        self.metrics.num_tokens = len(self.token_ids)
        first = 1 if self.params.stop else max(1, len(self.token_ids))  # without stop strings the last token tells
        self.num_text = first - 1
        for count in range(first, len(self.token_ids) + 1):
            if not self.finished:
                self._follow(count, now)

    def _follow(self, count: int, now: float) -> None:
        """Whether the first `count` tokens of the answer end it; those before the last do not."""
        params, token_id = self.params, self.token_ids[count - 1]
        armed = count > params.min_tokens
        if armed and token_id in params.stop_token_ids:  # before EOS, which may be one of them
            name = self.tokenizer.convert_ids_to_tokens(token_id) if params.stop else None
            self.finish("stop", now, stop_reason=name if name in params.stop else token_id)
            return
        if armed and token_id in self.eos_ids and not params.ignore_eos:
            self.finish("stop", now)
            return
        self.num_text = count
        if params.stop:
            if self._stops is None:
                self._stops = StopStrings(params.stop)
                self._decoder = StreamDecoder(self.tokenizer, self.prompt_token_ids)
            try:
                self._stopped_text += self._stops.feed(self._decoder.feed([token_id]), armed)
            except Exception as failure:  # a tokenizer that cannot decode what the model says
                self.finish("error", now, error=_undecodable(failure))
                return
            if self._stops.hit is not None:
                self.finish("stop", now, stop_reason=self._stops.hit)
                return
        if count >= self.max_new_tokens:
            self.finish("length", now)

    def finish(
        self, reason: FinishReason, now: float, *, stop_reason: str | int | None = None, error: str | None = None
    ) -> None:
        """Ends the request and releases text that was held back; without effect on one that has ended."""
        if self.finished:
            return
        if self._stops is not None:
            try:
                armed = len(self.token_ids) > self.params.min_tokens
                self._stopped_text += self._stops.feed(self._decoder.flush(), armed) + self._stops.flush()
                if self._stops.hit is not None:  # perhaps only just now, in what the decoder still held
                    reason, stop_reason, error = "stop", self._stops.hit, None
            except Exception as failure:  # a tokenizer that cannot decode what the model says
                reason, error = "error", _undecodable(failure)
        self.stop_reason, self.error, self.metrics.finished = stop_reason, error, now
        self.finish_reason = reason  # last: whoever sees it may read everything else

    # -- what can be read ---------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The text of the answer so far. Without stop strings nobody needs it at each step, so it is decoded here."""
        return self._stopped_text if self.params.stop else PieceReader(self).take().text

    def output(self) -> RequestOutput:
        """The finished answer."""
        reader = PieceReader(self)
        piece = reader.take()
        return RequestOutput(
            self.request_id, self.index, self.prompt_token_ids, self.token_ids, piece.text, piece.finish_reason,
            self.stop_reason, reader.error or self.error, self.logprobs if self.params.logprobs is not None else None,
            self.metrics,
        )  # fmt: skip


class PieceReader:
    """Reads an answer as it grows, piece by piece. Each reader has a place of its own."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.error: str | None = None  # of a tokenizer that cannot decode what the model says
        self.ended = False  # whether the last piece was taken
        self._decoder = None if request.params.stop else StreamDecoder(request.tokenizer, request.prompt_token_ids)
        self._characters = self._tokens = self._decoded = 0

    def take(self) -> StreamPiece:
        """What is new since the last call. The last piece of an answer carries its finish reason."""
        request = self.request
        reason = request.finish_reason  # first: once it is there, all the rest is
        count, num_text = len(request.token_ids), request.num_text
        token_ids, self._tokens = request.token_ids[self._tokens : count], count
        if self._decoder is None:
            text = request._stopped_text[self._characters :]
            self._characters += len(text)
        else:
            text = self._decode(request.token_ids[self._decoded : num_text], reason is not None)
            self._decoded = max(self._decoded, num_text)
        reason = "error" if self.error else reason
        self.ended = reason is not None
        return StreamPiece(request.request_id, request.index, text, token_ids, reason)

    def _decode(self, token_ids: Sequence[int], last: bool) -> str:
        text = ""
        try:
            text = self._decoder.feed(token_ids)
            return text + (self._decoder.flush() if last else "")
        except Exception as failure:
            self.error = _undecodable(failure)
            return text


def _undecodable(failure: Exception) -> str:
    return f"the tokenizer cannot decode the answer: {type(failure).__name__}: {failure}"
