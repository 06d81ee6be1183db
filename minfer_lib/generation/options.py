"""`SamplingParams` on a command line: each field an option of its name, and messages in the options' words.

Invariant: the table has every field but `logits_processors`, since functions cannot be typed. It needs no torch, so
that --help is quick.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .params import SamplingParams


def token_bias(text: str) -> tuple[int, float]:
    """ID=VALUE as a pair."""
    try:
        token_id, _, value = text.partition("=")
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, a token id and a number as in 42=-1.5") from None


# What is not given keeps the default of `SamplingParams`, unless one stands here.
SAMPLING: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "default": 256, "help": "longest answer, in tokens (default: 256)"},
    "min_tokens": {"type": int, "help": "do not end before so many tokens (default: 0)"},
    "temperature": {"type": float, "help": "0 (default) always takes the likeliest token; higher is more varied"},
    "top_k": {"type": int, "help": "only the N likeliest tokens (default: 0, all)"},
    "top_p": {"type": float, "help": "only the likeliest tokens that make up this share (default: 1, all)"},
    "min_p": {"type": float, "help": "only tokens at least so likely beside the likeliest (default: 0, all)"},
    "repetition_penalty": {"type": float, "help": "above 1: less of what prompt and answer have (default: 1, off)"},
    "presence_penalty": {"type": float, "help": "taken off the logit of what the answer has (default: 0)"},
    "frequency_penalty": {"type": float, "help": "the same, once for each time that it has it (default: 0)"},
    "logit_bias": {
        "type": token_bias, "action": "append", "metavar": "ID=X",
        "help": "added to the logit of this token id; -inf bans it; may be given repeatedly",
    },
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text; may be given repeatedly"},
    "stop_token_ids": {
        "type": int, "action": "append", "metavar": "ID",
        "help": "end after this token id too; may be given repeatedly",
    },
    "ignore_eos": {"action": "store_true", "help": "go on where the model would end"},
    "seed": {"type": int, "help": "the same seed gives the same answer"},
    "logprobs": {"type": int, "help": "with --json: log-probabilities of the N likeliest tokens at each place"},
    "n": {"type": int, "help": "so many answers to the prompt, one after the other (default: 1)"},
}  # fmt: skip


def add_sampling_options(command: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """The table `SAMPLING` as options."""
    group = command.add_argument_group("sampling")
    for name, about in SAMPLING.items():
        if name not in without:
            metavar = {"metavar": {int: "N", float: "X"}[about["type"]]} if about.get("type") in (int, float) else {}
            group.add_argument(option(name), dest=name, **{"default": argparse.SUPPRESS, **metavar, **about})


def option(name: str) -> str:
    """`max_tokens` as `--max-tokens`."""
    return f"--{name.replace('_', '-')}"


def in_options(message: str, args: argparse.Namespace) -> str:
    """A message about a field or an argument in the words of the command line: "top_p must ..." is about --top-p."""
    known = SAMPLING.keys() | vars(args).keys()
    names = r"^[a-z_]+(?=[= ])|\b[a-z]+_[a-z_]+\b"  # the first word, and those that can be nothing but a name
    return re.sub(names, lambda word: option(word[0]) if word[0] in known else word[0], message)


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The options as `SamplingParams`, which checks them."""
    from .params import SamplingParams

    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)
