"""`SamplingParams`: everything a caller may say about how an answer is drawn and where it ends.

Invariant: an instance that exists is valid and does not change, so nothing behind it checks again. What depends on the
model (are these ids in its vocabulary?) is checked when a request is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..errors import integer, must_be, number

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
"""processor(generated token ids, logits [vocab] float32) -> logits [vocab]; called once a step, after penalties."""

MAX_N = 1024  # answers to one prompt; each is a request of its own, with a place in every queue
LARGEST = torch.finfo(torch.float32).max  # the sampler computes in float32, where more would be infinite


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
    stop: a string or several; the answer ends before the first one that appears. A special token such as "<|im_end|>"
      may be one of them.
    stop_token_ids: ids that end the answer, beside the model's EOS.
    ignore_eos: treat EOS as any other token (benchmarks want outputs of equal length).
    seed: any integer; the same seed gives the same tokens, also to equal prompts of one call. None draws a new one for
      each prompt.
    logprobs: report the log-probabilities of so many most likely tokens and of the chosen one; None is off.
    n: how many answers to give to each prompt, 1 to 1,024. Their random numbers are independent, and so are those of
      different seeds.
    logits_processors: functions (generated ids, logits [vocab]) -> logits [vocab], called in order after the bias. Each
      answer calls copies of its own (`copy.deepcopy`), so that an object may keep a state; a function is not copied and
      must keep none. After a step that was broken off they are called for the same generated ids again.

    The order is: penalties, bias, processors, min_tokens, temperature, top_k, top_p, min_p.
    Raises `InvalidParameter` for any value outside of these ranges, of another type, or beyond float32.
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
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dict has no hash
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
        self._integer("n", at_least=1, at_most=MAX_N)
        if self.seed is not None:
            self._integer("seed")
        if self.logprobs is not None:
            self._integer("logprobs", at_least=0)
        self._number("temperature", "0 (greedy) or more", lambda x: x >= 0)
        self._number("top_p", "over 0 and at most 1 (1 turns it off)", lambda x: 0 < x <= 1)
        self._number("min_p", "between 0 (off) and 1", lambda x: 0 <= x <= 1)
        self._number("repetition_penalty", "over 0 (1 turns it off)", lambda x: x > 0)
        self._number("presence_penalty", "a finite number")
        self._number("frequency_penalty", "a finite number")
        if self.min_tokens > self.max_tokens:
            raise must_be("min_tokens", f"at most max_tokens, which is {self.max_tokens}", self.min_tokens)
        if not isinstance(self.ignore_eos, bool):
            raise must_be("ignore_eos", "True or False", self.ignore_eos)
        self._set("stop", self._strings())
        self._set("stop_token_ids", self._ids())
        self._set("logit_bias", self._bias())
        self._set("logits_processors", self._processors())

    @cached_property
    def penalises(self) -> bool:
        """Whether any of the three penalties is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def edits_logits(self) -> bool:
        """Whether penalties, a bias or processors change logits at every step; min_tokens does so only in the first."""
        return bool(self.penalises or self.logit_bias or self.logits_processors)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass

    def _integer(self, name: str, **limits: Any) -> None:
        self._set(name, integer(name, getattr(self, name), **limits))

    def _number(self, name: str, possible: str, allowed: Callable[[float], bool] = lambda x: True) -> None:
        value = number(name, getattr(self, name), possible, allowed)
        self._set(name, number(name, value, f"within the range of float32, up to {LARGEST:.2g}", _fits_float32))

    def _strings(self) -> tuple[str, ...]:
        stop = self.stop
        strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(strings, Sequence | set | frozenset) or not all(isinstance(s, str) and s for s in strings):
            raise must_be("stop", "a string or a list of strings, none of them empty", stop)
        return tuple(dict.fromkeys(strings))

    def _ids(self) -> tuple[int, ...]:
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        try:
            return tuple(dict.fromkeys(integer("each of them", token_id, at_least=0) for token_id in ids))
        except (TypeError, ValueError):
            raise must_be("stop_token_ids", "a list of token ids (integers of 0 or more)", ids) from None

    def _bias(self) -> dict[int, float]:
        bias = {} if self.logit_bias is None else self.logit_bias
        try:
            return {
                integer("a token id", token_id, at_least=0): (
                    -math.inf if value == -math.inf else number("a bias", value, allowed=_fits_float32)
                )
                for token_id, value in dict(bias).items()
            }
        except (TypeError, ValueError):
            possible = "a dict from token ids to numbers within the range of float32, or -inf, which bans a token"
            raise must_be("logit_bias", possible, bias) from None

    def _processors(self) -> tuple[LogitsProcessor, ...]:
        processors = () if self.logits_processors is None else self.logits_processors
        if not isinstance(processors, Sequence) or not all(callable(p) for p in processors):
            possible = "a list of functions (generated ids, logits [vocab]) -> logits [vocab]"
            raise must_be("logits_processors", possible, processors)
        return tuple(processors)


def _fits_float32(x: float) -> bool:
    return abs(x) <= LARGEST
