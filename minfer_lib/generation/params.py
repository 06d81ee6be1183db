"""`SamplingParams`: everything a caller may say about how an answer is drawn and where it ends.

Invariant: an instance that exists is valid and never changes, so nothing behind it checks again. What depends on the
model (are these ids in the vocabulary?) is checked when a request is made of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidParameter

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
"""processor(generated token ids, logits [vocab] float32) -> logits [vocab]; called once a step, after penalties."""


class Bias(Mapping[int, float]):
    """A dict that never changes, and so has a hash. (A MappingProxyType can neither be hashed nor pickled.)"""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. The defaults are greedy decoding of at most 128 tokens.

    max_tokens: tokens to generate at most (1 or more).
    min_tokens: tokens to generate before EOS, stop ids and stop strings count (0 to max_tokens).
    temperature: 0 is greedy; otherwise logits are divided by it before the softmax.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the fewest tokens whose probabilities reach this, in (0, 1]; 1 is off.
    min_p: keep tokens at least this many times as likely as the most likely one, in [0, 1]; 0 is off.
    repetition_penalty: above 1 makes tokens of prompt and output less likely (over 0; 1 is off).
    presence_penalty: taken off the logit of each token that the output already has.
    frequency_penalty: the same, once for each time that it has it.
    logit_bias: {token id: added to its logit}; -inf bans a token.
    stop: a string or several; the answer ends before the first one that appears.
    stop_token_ids: ids that end the answer, beside the model's EOS.
    ignore_eos: treat EOS as any other token (benchmarks want outputs of equal length).
    seed: the same seed gives the same tokens; None draws a new one for each request.
    logprobs: report the log-probabilities of so many most likely tokens and of the chosen one; None is off.
    n: how many answers to give to each prompt; answer i uses seed + i.
    logits_processors: functions (generated ids, logits [vocab]) -> logits [vocab], called in order after the bias.

    Raises `InvalidParameter` for any value outside of these ranges or of another type.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    logits_processors: Sequence[LogitsProcessor] | None = None

    def __post_init__(self) -> None:
        self._integer("max_tokens", at_least=1)
        self._integer("min_tokens", at_least=0)
        self._integer("top_k", at_least=0, hint="0 turns it off")
        self._integer("n", at_least=1)
        if self.seed is not None:
            self._integer("seed")
        if self.logprobs is not None:
            self._integer("logprobs", at_least=0)
        self._number("temperature", lambda x: x >= 0, "0 (greedy) or more")
        self._number("top_p", lambda x: 0 < x <= 1, "over 0 and at most 1 (1 turns it off)")
        self._number("min_p", lambda x: 0 <= x <= 1, "between 0 (off) and 1")
        self._number("repetition_penalty", lambda x: x > 0, "over 0 (1 turns it off)")
        self._number("presence_penalty", lambda x: True, "a finite number")
        self._number("frequency_penalty", lambda x: True, "a finite number")
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"at most max_tokens, which is {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            self._refuse("ignore_eos", "True or False")
        self._set("stop", self._strings())
        self._set("stop_token_ids", self._ids())
        self._set("logit_bias", self._bias())
        self._set("logits_processors", self._processors())

    @property
    def penalises(self) -> bool:
        """Whether any of the three penalties is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether anything changes a row's logits before the temperature does."""
        return bool(self.penalises or self.logit_bias or self.logits_processors or self.min_tokens)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass

    def _refuse(self, name: str, possible: str) -> None:
        raise InvalidParameter(
            f"SamplingParams({name}={getattr(self, name)!r}) is not possible: it must be {possible}."
        )

    def _integer(self, name: str, at_least: int | None = None, hint: str = "") -> None:
        value = getattr(self, name)
        possible = "an integer" + (f" of {at_least} or more" if at_least is not None else "")
        possible += f" ({hint})" if hint else ""
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)  # takes numpy's integers, refuses 3.0
        except TypeError:
            self._refuse(name, possible)
        if at_least is not None and number < at_least:
            self._refuse(name, possible)
        self._set(name, number)

    def _number(self, name: str, allowed: Callable[[float], bool], possible: str) -> None:
        try:
            value = getattr(self, name)
            if isinstance(value, str | bool):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._refuse(name, possible)
        if not math.isfinite(number) or not allowed(number):
            self._refuse(name, possible)
        self._set(name, number)

    def _strings(self) -> tuple[str, ...]:
        stop = self.stop
        strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(strings, Sequence | set | frozenset) or not all(isinstance(s, str) and s for s in strings):
            self._refuse("stop", "a string or a list of strings, none of them empty")
        return tuple(dict.fromkeys(strings))

    def _ids(self) -> tuple[int, ...]:
        try:
            return tuple(_token_id(t) for t in (() if self.stop_token_ids is None else self.stop_token_ids))
        except TypeError:
            self._refuse("stop_token_ids", "a list of token ids (integers of 0 or more)")

    def _bias(self) -> Bias:
        try:
            bias = {_token_id(t): float(b) for t, b in dict({} if self.logit_bias is None else self.logit_bias).items()}
        except (TypeError, ValueError, OverflowError):
            bias = {0: math.nan}
        if any(math.isnan(b) or b == math.inf for b in bias.values()):
            self._refuse("logit_bias", "a dict from token ids to numbers; -inf bans a token, +inf and NaN are refused")
        return Bias(bias)

    def _processors(self) -> tuple[LogitsProcessor, ...]:
        processors = () if self.logits_processors is None else self.logits_processors
        if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
            self._refuse("logits_processors", "a list of functions (generated ids, logits [vocab]) -> logits [vocab]")
        return tuple(processors)


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or operator.index(value) < 0:
        raise TypeError
    return operator.index(value)
