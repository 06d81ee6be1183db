"""Text to token ids and back, and text that arrives token by token.

A tokenizer here is one of transformers; this module holds the few calls that the engines make on it, each with the
surprise that it avoids. `StreamDecoder` is the part that is easy to get wrong: a token is a piece of bytes, not of
text, so a character may need several tokens.

Invariant of `StreamDecoder`: the pieces it has returned, joined, are a prefix of the text of all tokens so far, and
never end inside a character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoders put where bytes do not (yet) make a character
CONTEXT_TOKENS = 8  # tokens of the prompt that the first piece is decoded together with


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a raw string, with the special tokens the tokenizer adds by itself (for many models a BOS)."""
    try:
        # verbose=False: no warning about lengths; engines check those
        return list(tokenizer(text, verbose=False)["input_ids"])
    except (TypeError, UnicodeEncodeError) as error:  # halves of surrogate pairs, which UTF-8 cannot write
        raise InvalidPrompt(f"The text {text!r} cannot be encoded: it is not valid Unicode.") from error


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Text of token ids; special tokens such as `<|im_end|>` are left out unless asked for."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )  # clean-up would move spaces before punctuation, so that pieces no longer join


def apply_chat(tokenizer: PreTrainedTokenizerBase, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the model's chat template, ending where the assistant's answer begins.

    `messages` are dicts with "role" ("system", "user", "assistant") and "content"; a string stands for one user
    message. The ids already hold every special token: do not decode and encode them again.

    Raises `InvalidPrompt` when the tokenizer has no chat template or the messages do not fit it.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidPrompt(
            "A chat was asked for, but this model's tokenizer has no chat template (a base model, perhaps). "
            "Pass the text itself as the prompt, or load an instruction-tuned model."
        )
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        messages = list(messages)
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise TypeError("they are no list of dicts with a role")  # most templates would render them as nothing
        # return_dict=False: transformers 5 otherwise returns a BatchEncoding instead of a list
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates are programs of the model's authors; they raise what they like
        raise InvalidPrompt(
            f"The messages do not fit this model's chat template: {error}. "
            'Each message is a dict such as {"role": "user", "content": "Hello"}, the last one by the user.'
        ) from error
    return list(ids)


class StreamDecoder:
    """Turns tokens into text one at a time, never returning half a character.

    The tokens whose text is not settled yet are decoded together with a few settled ones before them (the context),
    and only what comes after the context's text is new. Decoding in context matters: many tokenizers drop the space
    in front of a token that stands first. While the text ends in U+FFFD, a character may still be incomplete and
    nothing is returned. The method is that of Hugging Face's text-generation-inference and of vLLM.

    A prompt may end inside a character. Tokens that complete it return the whole character; where none does, the U+FFFD
    that stands for its bytes is the prompt's and is left out.

    With `tokenizer=None` (a model served by ids alone) every piece is empty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])  # context, then tokens that are not settled
        self._settled = len(self._ids)  # how many of them are context
        self._tail = ""  # the prompt's text behind the context: it ends in the U+FFFD of an incomplete character
        if tokenizer is not None:
            self._begin_between_characters(list(prompt_ids))

    def step(self, token_id: int) -> str:
        """Text that this token completes: often one word, empty while a character is incomplete."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token_id)
        piece = self._unsettled_text()
        if piece.endswith(REPLACEMENT):
            return ""
        # The new tokens become the context of the next ones; the old context is no longer needed. A token without
        # text of its own (a special one) must not be the only context.
        if piece:
            self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        return self._without_tail(piece)

    def flush(self) -> str:
        """What is still held back at the end, without the bytes of a character that never got complete."""
        if self._tokenizer is None or self._settled == len(self._ids):
            return ""
        piece = self._unsettled_text().rstrip(REPLACEMENT)
        self._settled = len(self._ids)
        return self._without_tail(piece)

    def _text(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids, self._skip)

    def _unsettled_text(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._settled])) :]

    def _without_tail(self, piece: str) -> str:
        if piece and self._tail:
            whole = self._tail.rstrip(REPLACEMENT)  # a token may hold a space and the beginning of an emoji
            lost, self._tail = len(self._tail) - len(whole), ""
            piece = piece.removeprefix(whole)
            while lost and piece.startswith(REPLACEMENT):
                piece, lost = piece[1:], lost - 1
        return piece

    def _begin_between_characters(self, prompt_ids: list[int]) -> None:
        """Makes the context begin and end between two characters, of which none has more than four tokens.

        Decoders with byte tokens (SentencePiece) give a whole run of bytes up if it begins or ends inside a character.
        """
        for cut in range(min(4, len(prompt_ids) + 1)):
            for more in range(4):
                ids = prompt_ids[-CONTEXT_TOKENS - more :]
                context = self._text(ids[: len(ids) - cut])
                if not context.startswith(REPLACEMENT) and not context.endswith(REPLACEMENT):
                    self._ids, self._settled = ids, len(ids) - cut
                    self._tail = self._text(ids)[len(context) :] if cut else ""
                    return
