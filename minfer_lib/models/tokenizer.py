"""Text to token ids and back, and text that arrives token by token.

A tokenizer here is one of transformers; this module holds the few calls that the engines make on it, each with the
surprise that it avoids. A token is a piece of bytes, not of text, so a character may need several tokens: that is what
`StreamDecoder` is for.

Invariants: the ids of a text depend on the text and the tokenizer's files alone, not on what others set on the shared
tokenizer, and control tokens that a user typed into a message are text like any other. The pieces that a
`StreamDecoder` has returned, joined, are a prefix of the text of all tokens so far, and never end inside a character.
"""

from __future__ import annotations

import codecs
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import InvalidPrompt, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoders put where bytes make no character
CONTEXT_TOKENS = 8  # tokens of the prompt that are looked at for how the answer begins


# -- text to ids ------------------------------------------------------------------------------------------------------


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a raw string, with the special tokens the tokenizer adds by itself (for many models a BOS).

    A text that begins with that BOS, as a rendered chat template does, gets no second one.
    Raises `InvalidPrompt` for what is no string, and for a string that cannot be encoded.
    """
    if not isinstance(text, str):
        raise InvalidPrompt(f"A text must be one string; it is {shown(text)}.")
    ids = _ids(tokenizer, text)
    if len(ids) > 1 and ids[0] == ids[1]:
        begin, plain = _ids(tokenizer, "a")[:1], _ids(tokenizer, "a", add_special_tokens=False)[:1]
        while begin != plain and ids[:2] == begin * 2:
            del ids[0]
    return ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    with _refused(f"The text {shown(text)} cannot be encoded"):
        text.encode()  # halves of surrogate pairs, which UTF-8 cannot write, are said to be of a wrong type otherwise
        if tokenizer.is_fast:
            return _own_backend(tokenizer).encode(text, add_special_tokens=add_special_tokens).ids
        # verbose=False: no warning about lengths; engines check those
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text that is no token, whatever it says: the parts of a tokenizer, without its list of added tokens."""
    if not tokenizer.is_fast:
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


_BACKENDS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, Tokenizer]] = WeakKeyDictionary()


def _own_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the tokenizer that nobody else sets truncation, padding or the like on: each call of it does, for all.

    What somebody changes for good (tokens added, another post-processor) is taken over by a new copy.
    """
    backend = tokenizer.backend_tokenizer
    parts = (backend.pre_tokenizer, backend.post_processor, backend.decoder)
    state = (id(backend), backend.get_vocab_size(), *map(repr, parts))
    if tokenizer not in _BACKENDS or _BACKENDS[tokenizer][0] != state:
        try:
            own = copy.deepcopy(backend)
        except Exception:  # one with parts that are written in Python cannot be copied
            return backend
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        _BACKENDS[tokenizer] = (state, own)
    return _BACKENDS[tokenizer][1]


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turns what a tokenizer raises into `InvalidPrompt`, and lets an interrupt or a time limit of the caller pass."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidPrompt(f"{what}: it is not valid Unicode.") from error
    except BaseException as error:
        known = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
        # the tokenizers library raises plain exceptions, and a panic that is none
        if isinstance(error, known) or type(error) is Exception or type(error).__name__ == "PanicException":
            raise InvalidPrompt(f"{what}: {type(error).__name__}: {_cut(error)}.") from error
        raise


def _cut(error: BaseException, limit: int = 200) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= limit else f"{text[:limit]}..."


# -- conversations ----------------------------------------------------------------------------------------------------

MESSAGE = 'Each message is a dict such as {"role": "user", "content": "Hello"}.'


def apply_chat(tokenizer: PreTrainedTokenizerBase, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation in the model's chat template, ending where the assistant's answer begins or goes on.

    `messages` are dicts with "role" ("system", "user", "assistant") and "content": a string, or a list of text parts
    such as {"type": "text", "text": "Hello"}. A string in place of the list stands for one user message. A last message
    by the assistant is the beginning of the answer, and is continued. The ids already hold every special token: do not
    decode and encode them again.

    Control tokens are the template's alone: where a message holds the text of one, its ids are those of the text.

    Raises `InvalidPrompt` when the tokenizer has no chat template or the messages do not fit it.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidPrompt(
            "A chat was asked for, but this model's tokenizer has no chat template (a base model, perhaps). "
            "Pass the text itself as the prompt, or load an instruction-tuned model."
        )
    conversation = _checked_messages(messages)
    goes_on = conversation[-1]["role"] == "assistant"
    if goes_on and not conversation[-1]["content"].strip() and len(conversation) > 1:
        conversation, goes_on = conversation[:-1], False  # an answer of which nothing is there yet

    control = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    control |= {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    longest_first = sorted(filter(None, control), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    # the template sees a private character, which nobody typed, in place of each control token that somebody typed
    strings: list[str] = []
    _each_string(conversation, lambda text: strings.append(text) or text)
    typed = sorted({token for text in strings for token in pattern.findall(text)})
    unused = (c for c in map(chr, itertools.count(0xF0000)) if not any(c in text for text in strings))
    stand_ins = dict(zip(typed, unused, strict=False))
    hidden = _each_string(conversation, lambda text: pattern.sub(lambda match: stand_ins[match.group()], text))
    try:
        text = tokenizer.apply_chat_template(
            hidden, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
    except Exception as error:  # templates are programs of the model's authors; they raise what they like
        raise InvalidPrompt(f"The messages do not fit this model's chat template: {_cut(error)}. {MESSAGE}") from error
    if not isinstance(text, str) or not text.strip():
        raise InvalidPrompt("This model's chat template makes nothing of these messages: not a single character.")
    plain = {stand_ins[token]: _plain_ids(tokenizer, token) for token in typed}
    ids: list[int] = []
    for part in re.split(f"([{''.join(plain)}])", text) if plain else [text]:
        ids += plain[part] if part in plain else _ids(tokenizer, part, False)

    # some tokenizers make a control token of other spellings (capitals, wide letters), or have it as an ordinary one
    forbidden = set(control.values()) - {tokenizer.unk_token_id}
    if sum(i in forbidden for i in ids) > len(pattern.findall(text)):  # more than the template wrote
        parts = [part for text in strings for part in pattern.split(text)]
        for i in itertools.chain(*plain.values(), *(_ids(tokenizer, part, False) for part in parts)):
            if i in forbidden:
                raise InvalidPrompt(
                    f"A message holds {shown(tokenizer.decode([i]))}, a control token of this model, and its tokenizer "
                    "cannot write that as plain text. Take it out of the message."
                )
    return ids


def _checked_messages(messages: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their contents as strings."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        checked = [dict(message) for message in messages]
    except (TypeError, ValueError):
        checked = []
    if not checked or not all(isinstance(message.get("role"), str) for message in checked):
        raise InvalidPrompt(
            f"A conversation must be a list of messages with a role; it is {shown(messages)}. {MESSAGE}"
        )
    for message in checked:
        content = message.get("content")
        if isinstance(content, list | tuple) and content:
            parts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
            if all(isinstance(part, str) for part in parts):
                message["content"] = content = "".join(parts)
        if not isinstance(content, str):
            raise InvalidPrompt(
                f"The content of a message must be a string or a list of text parts; it is {shown(content)}. {MESSAGE}"
            )
    return checked


def _each_string(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_string(item, change) for key, item in value.items()}
    return [_each_string(item, change) for item in value] if isinstance(value, list | tuple) else value


# -- ids to text ------------------------------------------------------------------------------------------------------


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Text of token ids; special tokens such as `<|im_end|>` are left out unless asked for.

    Raises `InvalidPrompt` for what the tokenizer refuses, such as negative numbers.
    """
    with _refused(f"The token ids {shown(ids)} cannot be decoded"):
        return tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )  # clean-up would move spaces before punctuation, so that pieces no longer join


class StreamDecoder:
    """Turns tokens into text as they come, never returning half a character.

    A prompt may end inside a character. Tokens that complete it return the whole character; where none does, the U+FFFD
    that stands for its bytes is the prompt's and is left out. With `tokenizer=None` (a model served by ids alone) every
    piece is empty. Nothing is looked up before the first token is fed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._begin = (tokenizer, prompt_ids, skip_special_tokens)
        self._way: _ByBytes | _ByWindow | None = None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete: often a word a token, nothing while a character is incomplete.

        Many tokens at once give the joined text of feeding them one by one.
        """
        tokenizer, prompt_ids, skip = self._begin
        if tokenizer is None or not len(token_ids):
            return ""
        if self._way is None:
            bytes_of = _bytes_of(_own_backend(tokenizer), skip) if tokenizer.is_fast else None
            self._way = _ByWindow(tokenizer, prompt_ids, skip) if bytes_of is None else _ByBytes(bytes_of, prompt_ids)
        return self._way.feed(token_ids)

    def step(self, token_id: int) -> str:
        """The same for one token."""
        return self.feed([token_id])

    def flush(self) -> str:
        """What is still held back at the end, without the bytes of a character that never got complete."""
        return self._way.flush() if self._way is not None else ""


class _ByBytes:
    """For tokenizers whose tokens are known as bytes: the bytes are joined, and UTF-8 says where characters end."""

    def __init__(self, bytes_of: _TokenBytes, prompt_ids: Sequence[int]) -> None:
        self._bytes_of = bytes_of
        self._begun = any(bytes_of[token] for token in prompt_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(bytes_of.errors)
        end = b"".join(bytes_of[token] for token in prompt_ids[-CONTEXT_TOKENS:])[-4:]
        unfinished = end[codecs.utf_8_decode(end, "replace", False)[1] :]
        self._utf8.decode(unfinished)
        self._lost = len(unfinished.decode(errors=bytes_of.errors))  # marks that stand for it unless it is completed

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = [self._bytes_of[token] for token in token_ids]
        if not self._begun and any(pieces):  # the first token of a text may lose a space
            at = next(i for i, piece in enumerate(pieces) if piece)
            pieces[at], self._begun = self._bytes_of.look_up(token_ids[at], []), True
        text = self._utf8.decode(b"".join(pieces))
        if text and self._lost:
            own = text.lstrip(REPLACEMENT)
            text, self._lost = text[min(self._lost, len(text) - len(own)) :], 0
        return text

    def flush(self) -> str:
        pending, _ = self._utf8.getstate()
        self._utf8.reset()
        return pending.decode(errors="replace")[:-1]  # Python waits after ED A0, which are two broken characters


class _ByWindow:
    """For any other tokenizer: the last tokens are decoded together with some before them, and what is new is returned.

    Decoding in context matters: many tokenizers drop the space in front of a token that stands first. While the text
    ends in U+FFFD a character may still be incomplete, but none has more than four tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], skip: bool) -> None:
        self._text = lambda ids: decode(tokenizer, ids, skip)
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])  # context, then tokens that are not settled
        self._settled = len(self._ids)  # how many of them are context

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._one, token_ids))

    def _one(self, token_id: int) -> str:
        self._ids.append(token_id)
        piece = self._unsettled_text()
        if piece.endswith(REPLACEMENT) and len(self._ids) - self._settled < 4:
            return ""
        # The new tokens become the context of the next ones. A token without text must not be the only context.
        begin = self._settled if piece else max(0, len(self._ids) - 2 * CONTEXT_TOKENS)
        self._ids = self._ids[begin:]
        self._settled = len(self._ids)
        return piece

    def flush(self) -> str:
        piece = self._unsettled_text().rstrip(REPLACEMENT)
        self._settled = len(self._ids)
        return piece

    def _unsettled_text(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._settled])) :]


# -- tokens as bytes --------------------------------------------------------------------------------------------------


def bytes_to_letters() -> dict[int, str]:
    """The printable letter that byte-level BPE (GPT-2) writes for each byte; the odd ones get letters from 256 up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    odd = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(odd)}


LETTER_BYTES = {letter: byte for byte, letter in bytes_to_letters().items()}
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

# SentencePiece has a mark for each byte that makes no character, where others have one for all bytes of a broken one.
MARK_EACH_BYTE = "minfer_mark_each_byte"
codecs.register_error(MARK_EACH_BYTE, lambda error: (REPLACEMENT * (error.end - error.start), error.end))


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, looked up when it is first met. Special tokens may be left out, and then have none.

    byte_level: each letter of a token stands for a byte (GPT-2 and its heirs); else a token is text, or one byte that
    is written as `<0x0A>` (SentencePiece).
    """

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool, byte_level: bool) -> None:
        special = backend.get_added_tokens_decoder().items() if skip_special_tokens else ()
        super().__init__({token_id: b"" for token_id, token in special if token.special})
        self._text = functools.partial(backend.decode, skip_special_tokens=skip_special_tokens)
        self._token, self._byte_level = backend.id_to_token, byte_level
        self.errors = "replace" if byte_level else MARK_EACH_BYTE
        self._before = backend.encode("a", add_special_tokens=False).ids  # a text in front of a token

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = piece = self.look_up(token_id, self._before)
        return piece

    def look_up(self, token_id: int, before: list[int]) -> bytes:
        """The same where these tokens stand in front of it."""
        token = self._token(token_id)
        if token is None:  # a row of the embedding that the tokenizer knows nothing of
            return b""
        if self._byte_level:
            values = [LETTER_BYTES.get(letter) for letter in token]
            return token.encode() if None in values else bytes(values)
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return self._text([*before, token_id])[len(self._text(before)) :].encode()


@functools.lru_cache(maxsize=16)
def _bytes_of(backend: Tokenizer, skip_special_tokens: bool) -> _TokenBytes | None:
    """The table of a tokenizer; None for one whose tokens cannot be told as bytes one by one."""
    kind = repr(backend.decoder)
    byte_level = kind.startswith("ByteLevel(")
    return _TokenBytes(backend, skip_special_tokens, byte_level) if byte_level or "ByteFallback(" in kind else None
