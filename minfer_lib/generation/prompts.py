"""From what a caller passes, prompts and parameters in several forms, to checked requests.

Invariant: everything that can be wrong with a prompt or with parameters for this model is found here, for all of them,
before the first request starts; so a call either serves all of its prompts or raises and has served none.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidParameter, InvalidPrompt, PromptTooLong
from ..models.load import LanguageModel
from ..models.tokenizer import StreamDecoder
from .params import SamplingParams
from .request import Request, RequestMetrics

DEFAULT_MAX_MODEL_LEN = 2048  # tokens
Prompt = str | Sequence[int]
# They can be iterated over, but not for token ids: the keys of what a tokenizer returns would be run as texts.
NO_IDS = (bytes, bytearray, Mapping)


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
    if lm.model.training:
        raise InvalidParameter(
            f"{lm.name} is in training mode, where dropout changes what it says. Call lm.model.eval() first."
        )
    many = prompt_list(prompts)
    requests = []
    for prompt, each in zip(many, params_list(params, len(many)), strict=True):
        token_ids = prompt_token_ids(lm, prompt, max_model_len)
        check_against_model(each, lm)
        request_id = next(ids)
        seed = each.seed if each.seed is not None else secrets.randbits(63)
        answers = [
            Request(
                request_id, index, list(token_ids), each, seed,
                max_new_tokens=min(each.max_tokens, max_model_len - len(token_ids)),
                eos_ids=lm.eos_ids,
                tokenizer=lm.tokenizer,
                metrics=RequestMetrics(arrival=now),
            )
            for index in range(each.n)
        ]  # fmt: skip
        for answer in answers if each.n > 1 else ():
            answer.siblings = tuple(other for other in answers if other is not answer)
        requests += answers
    return requests


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or token ids) or several -> a list of prompts."""
    if isinstance(prompts, (str, *NO_IDS)):  # all but strings are refused where each prompt is checked
        return [prompts]
    if hasattr(prompts, "tolist"):  # numpy arrays and tensors
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise InvalidPrompt(f"A prompt is a string or a list of token ids; {prompts!r} is neither.")
    many = list(prompts)
    return [many] if many and all(_is_int(p) for p in many) else many


def one_prompt(prompt: Prompt, caller: str, advice: str) -> list[Prompt]:
    """A list of the single prompt that a call takes. Raises `InvalidPrompt` for several, or none."""
    prompts = prompt_list(prompt)
    if len(prompts) != 1:
        raise InvalidPrompt(f"{caller} takes one prompt; {len(prompts)} were given. {advice}")
    return prompts


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in each):
        raise InvalidParameter("params must be a SamplingParams, or a list with one for each prompt.")
    if len(each) != count:
        raise InvalidParameter(
            f"{len(each)} SamplingParams were given for {count} prompts. Give one for all, or one for each."
        )
    return each


def prompt_token_ids(lm: LanguageModel, prompt: Any, max_model_len: int) -> list[int]:
    """Checked token ids of one prompt."""
    if isinstance(prompt, str):
        token_ids = lm.encode(prompt)
    else:
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        values = list(values) if isinstance(values, Iterable) and not isinstance(values, NO_IDS) else [None]
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
            f"A prompt of {len(token_ids)} tokens leaves no room for an answer: this engine's limit is "
            f"{max_model_len} tokens, prompt and answer together, so a prompt may have {max_model_len - 1}. Shorten "
            f"it, or make the engine with a larger max_model_len (at most {lm.max_model_len} for {lm.name})."
        )
    return token_ids


def check_fits_pool(request: Request, kv_tokens: int) -> None:
    """Raises `PromptTooLong` for a prompt that the whole KV cache could not hold."""
    tokens = len(request.prompt_token_ids)
    if tokens > kv_tokens:
        raise PromptTooLong(
            f"A prompt of {tokens} tokens can never run: this engine's KV cache has room for {kv_tokens}. Shorten "
            "it, or make the engine with more blocks (num_blocks)."
        )


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
    """ "0", "1", "2", ..."""
    return map(str, itertools.count())


def _is_int(value: Any) -> bool:
    # arrays and tensors have an __index__ too, and a list of them is a list of prompts
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(value)
    except TypeError:  # every tensor has the method; one of floats refuses when it is called
        return False
    return True
