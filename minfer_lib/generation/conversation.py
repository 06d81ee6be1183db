"""From what somebody types at a shell to the prompt of an engine: a chat template, a system message, token ids.

Invariant: what is returned fits the model, or `InvalidPrompt` says what would; it imports no torch, so that the command
line can explain itself quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidPrompt, PromptTooLong

if TYPE_CHECKING:
    from ..models.load import LanguageModel

Messages = list[dict[str, str]]


def system_message(text: str | None) -> Messages:
    """The beginning of a conversation: a system message if one was given."""
    return [{"role": "system", "content": text}] if text else []


def prompt_of(
    lm: LanguageModel, text: str, *, system: str | None = None, raw: bool = False, chat: bool = False
) -> str | list[int]:
    """A prompt as the engine takes it: in the chat template if the model has one, as it is with `raw`."""
    if lm.tokenizer is None:
        try:
            if ids := [int(part) for part in text.replace(",", " ").split()]:
                return ids
            raise ValueError("no ids at all")
        except ValueError:
            raise InvalidPrompt(
                f"{lm.name} has no tokenizer, so its prompt is a list of token ids such as '11 48 7'; {text!r} is not."
            ) from None
    has_template = getattr(lm.tokenizer, "chat_template", None) is not None
    if raw or not (chat or system or has_template):
        return text
    return lm.chat_ids([*system_message(system), {"role": "user", "content": text}])


def fitting(
    lm: LanguageModel, system: Messages, turns: Messages, limit: int, wanted: int
) -> tuple[list[int], Messages]:
    """Token ids of a conversation, and its turns: the oldest are dropped until `wanted` more tokens have room.

    Raises `PromptTooLong` if the last message alone leaves no room within `limit` tokens.
    """
    room = min(wanted, limit // 2)
    while len(prompt := lm.chat_ids(system + turns)) + room > limit and len(turns) > 1:
        turns = turns[2:]  # a question with its answer
    if len(prompt) >= limit:
        raise PromptTooLong(f"This message takes {len(prompt)} tokens, and the limit is {limit}. Send a shorter one.")
    return prompt, turns
