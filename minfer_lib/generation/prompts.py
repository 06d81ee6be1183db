"""From what a caller passes, prompts and parameters in several forms, to checked requests.

Invariant: everything that can be wrong with a prompt or with parameters for this model is found here, for all of them,
before the first request exists; so a call either serves all of its prompts or raises and has served none.
"""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter, InvalidPrompt, PromptTooLong, integer, shown
from ..models.load import LanguageModel
from .params import SamplingParams
from .request import Request, RequestMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int]  # tuples, ranges, NumPy arrays and one-dimensional tensors of integers will do, too
Conversation = str | Sequence[Mapping[str, Any]]

DEFAULT_MAX_MODEL_LEN = 2048  # tokens
LONG_TOKEN = 64  # characters; few tokens are longer, so that a text of more for each token of the limit is suspicious
NO_LIST = (str, bytes, bytearray, Mapping, Set)  # can be iterated over, but not for token ids or prompts


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
    lm.check_unchanged()
    many = prompt_list(prompts)
    checked = []
    for prompt, prompt_params in zip(many, params_list(params, len(many)), strict=True):
        token_ids = prompt_token_ids(lm, prompt, max_model_len)
        model_params = params_for(lm, prompt_params)
        checked.append((token_ids, [with_own_processors(model_params) for _ in range(model_params.n)]))
    requests = []
    for token_ids, answer_params in checked:
        request_id, seed = next(ids), answer_params[0].seed
        seed = secrets.randbits(63) if seed is None else seed
        answers = [
            Request(
                request_id=request_id,
                index=index,
                prompt_token_ids=list(token_ids),
                params=own,
                seed=seed,
                max_new_tokens=min(own.max_tokens, max_model_len - len(token_ids)),
                eos_ids=lm.eos_ids,
                tokenizer=lm.tokenizer,
                metrics=RequestMetrics(arrival=now),
            )
            for index, own in enumerate(answer_params)
        ]
        for answer in answers if len(answers) > 1 else ():
            answer.siblings = answers  # one list for all of them
        requests += answers
    return requests


# -- one or several ---------------------------------------------------------------------------------------------------


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or token ids) or several -> a list of prompts, none of them looked at yet."""
    if isinstance(prompts, str):
        return [prompts]
    many = _items(prompts)
    return [many] if many and _are_integers(many) else many


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
    given = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in given):
        raise InvalidParameter("params must be a SamplingParams, or a list with one for each prompt.")
    if len(given) != count:
        raise InvalidParameter(
            f"{len(given)} SamplingParams were given for {count} prompts. Give one for all, or one for each."
        )
    return given


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation (a list of messages, or a string for one by the user) or several -> a list of conversations.

    What a message may be is for the chat template to say (`LanguageModel.chat_ids`).
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        return [messages]
    many = list(messages)
    return [many] if any(isinstance(message, Mapping) for message in many) else many


def _items(values: Any) -> list[Any]:
    """What a list, array, tensor or other iterable holds, numbers of other libraries as Python's."""
    values = _plain(values)
    if type(values) is list and _are_integers(values):
        return values.copy()
    if isinstance(values, NO_LIST) or not isinstance(values, Iterable):
        raise InvalidPrompt(f"A prompt is a string or a list of token ids; {shown(values)} is neither.")
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _are_integers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}  # True and False are no token ids


# -- checks against the model -----------------------------------------------------------------------------------------


def prompt_token_ids(lm: LanguageModel, prompt: Prompt, max_model_len: int) -> list[int]:
    """Checked token ids of one prompt."""
    if isinstance(prompt, str):
        check_characters(lm, prompt, max_model_len)
        token_ids = lm.encode(prompt)
    else:
        token_ids = _items(prompt)
        if not _are_integers(token_ids):
            raise InvalidPrompt(f"A prompt is a string or a list of token ids; {shown(prompt)} is neither.")
    if not token_ids:
        raise InvalidPrompt("A prompt has no tokens. A model needs at least one to continue from; give it some text.")
    if not 0 <= min(token_ids) <= max(token_ids) < lm.vocab_size:
        outside = next(t for t in token_ids if not 0 <= t < lm.vocab_size)
        raise InvalidPrompt(
            f"Token id {shown(outside)} is not in the vocabulary of {lm.name}: ids go from 0 to {lm.vocab_size - 1}."
        )
    if len(token_ids) >= max_model_len:
        raise _too_long(f"{len(token_ids)} tokens", lm, max_model_len)
    return token_ids


def check_characters(lm: LanguageModel, text: str, max_model_len: int) -> None:
    """Raises `PromptTooLong` for a text that no tokenisation could fit in, before much work is put in one."""
    if lm.tokenizer is None or len(text) <= LONG_TOKEN * max_model_len:
        return
    longest = max(map(len, lm.tokenizer.get_vocab()))
    if len(text) > longest * max_model_len:
        raise _too_long(f"{len(text):,} characters (the longest token has {longest})", lm, max_model_len)


def _too_long(length: str, lm: LanguageModel, max_model_len: int) -> PromptTooLong:
    return PromptTooLong(
        f"A prompt of {length} leaves no room for an answer: this engine's limit is {max_model_len} tokens, prompt and "
        f"answer together, so a prompt may have {max_model_len - 1}. Shorten it, or make the engine with a larger "
        f"max_model_len (at most {lm.max_model_len} for {lm.name})."
    )


def check_fits_pool(request: Request, kv_tokens: int) -> None:
    """Raises `PromptTooLong` for a prompt that the whole KV cache could not hold."""
    tokens = len(request.prompt_token_ids)
    if tokens > kv_tokens:
        raise PromptTooLong(
            f"A prompt of {tokens} tokens can never run: this engine's KV cache has room for {kv_tokens}. Shorten "
            "it, or make the engine with more blocks (num_blocks)."
        )


def params_for(lm: LanguageModel, params: SamplingParams) -> SamplingParams:
    """Parameters as this model's requests use them: a stop string that is a special token becomes a stop id too.

    Special tokens are left out of the text that stop strings are looked for in. Raises `InvalidParameter` for what
    `SamplingParams` could not know: ids that do not exist here, stop strings without any text to find them in.
    """
    for name, used in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if outside := [t for t in used if t >= lm.vocab_size]:
            raise InvalidParameter(
                f"{name} names token {shown(outside[0])}, but ids of {lm.name} go from 0 to {lm.vocab_size - 1}."
            )
    if not params.stop:
        return params
    if lm.tokenizer is None:
        raise InvalidParameter(
            f"stop must be left out: {lm.name} has no tokenizer and so no text to find {shown(list(params.stop))} in. "
            "Use stop_token_ids."
        )
    special = special_tokens(lm.tokenizer)
    for stop in params.stop:
        if inside := [token for token in special if token in stop and stop not in special]:
            raise InvalidParameter(
                f"stop must hold a special token alone or not at all; {shown(stop)} holds {inside[0]!r}, which is left "
                f"out of the text. Use stop={inside[0]!r}, or stop_token_ids=[{special[inside[0]]}]."
            )
    stop_ids = [special[stop] for stop in params.stop if stop in special]
    return dataclasses.replace(params, stop_token_ids=[*params.stop_token_ids, *stop_ids]) if stop_ids else params


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """{what it is written as: id} of all tokens that decoding leaves out."""
    added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {token: token_id for token, token_id in (*added.items(), *named) if token}


def with_own_processors(params: SamplingParams) -> SamplingParams:
    """Parameters for one answer, with logits processors that no other answer calls: they may keep a state."""
    if not params.logits_processors:
        return params
    try:
        return dataclasses.replace(params, logits_processors=copy.deepcopy(params.logits_processors))
    except Exception as error:
        raise InvalidParameter(
            "logits_processors must be functions or objects that can be copied, since each answer has its own; "
            f"copy.deepcopy({shown(params.logits_processors)}) raises {type(error).__name__}: {error}."
        ) from error


def resolve_max_model_len(lm: LanguageModel, max_model_len: int | None) -> int:
    """The engine's limit in tokens: what was asked for, else the model's own limit, at most 2,048."""
    if max_model_len is None:
        return min(lm.max_model_len, DEFAULT_MAX_MODEL_LEN)
    return integer("max_model_len", max_model_len, 2, lm.max_model_len, hint=f"the most that {lm.name} can place")
