"""Watching a model on a text: how large each input feature of its linear layers gets, and which layers share an input.

Invariant: the model is only looked at. What is noted is a few numbers for each feature, never the activations.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InvalidPrompt, UnsupportedModel
from ..models.load import LanguageModel

CALIBRATION = Path(__file__).parent / "calibration.txt"  # ours, of many kinds: prose, dialogue, code, tables
WINDOW = 512  # tokens of the text that are run at once


@dataclass
class Watched:
    """A linear layer and what was seen of its input: how large each feature gets, and who else reads it."""

    name: str
    layer: nn.Module
    peak: torch.Tensor | None = None  # float32 [in]; None if the layer was never called
    shares_with: str | None = None  # the layer that was called with the same tensor just before


def watch(lm: LanguageModel, targets: dict[str, nn.Module], prompts: list[list[int]]) -> dict[str, Watched]:
    """Runs prompts through the model and notes what each target's input is like."""
    watched = {name: Watched(name, layer) for name, layer in targets.items()}
    last: list[Any] = [None, None]  # the input that was seen last, and the name of the layer that read it

    def note(each: Watched, args: tuple[Any, ...]) -> None:
        x = args[0]
        if x.numel() == 0:  # an expert that no token goes to
            return
        peak = x.detach().abs().reshape(-1, x.shape[-1]).amax(0).float()
        if not peak.isfinite().all():
            raise UnsupportedModel(
                f"{lm.name} computes NaN or infinity on the calibration text, in the input of {each.name}: there is "
                "no scale for that. Nothing was changed."
            )
        if each.peak is None:
            each.peak, each.shares_with = peak, last[1] if last[0] is x else None
        else:
            each.peak = torch.maximum(each.peak, peak)
            if each.shares_with is not None and last[0] is not x:
                each.shares_with = None  # not always, so not at all
        last[:] = x, each.name

    hooks = [w.layer.register_forward_pre_hook(lambda _, args, w=w: note(w, args)) for w in watched.values()]
    try:
        for ids in prompts:
            lm.next_token_logits(torch.tensor([ids], device=lm.device), use_cache=False)
            last[:] = None, None
    finally:
        for hook in hooks:
            hook.remove()
    return watched


def sharing(watched: dict[str, Watched]) -> list[list[Watched]]:
    """Layers that read the same input together, in the order of the model, without those that were never called."""
    groups: list[list[Watched]] = []
    of: dict[str, list[Watched]] = {}
    for each in watched.values():
        if each.peak is None:
            continue
        group = of.get(each.shares_with or "")
        if group is None:
            group = []
            groups.append(group)
        group.append(each)
        of[each.name] = group
    return groups


def calibration_prompts(lm: LanguageModel, given: str | Sequence[str | Sequence[int]] | None) -> list[list[int]]:
    """Prompts of token ids, none longer than a window."""
    window = min(WINDOW, lm.max_model_len)
    advice = "Pass text as the model will see it, some hundred words of it, or lists of token ids."
    if given is None:
        if lm.tokenizer is None:
            return [some_ids(lm, min(window, 256))]
        given = CALIBRATION.read_text(encoding="utf-8")
    try:
        prompts = [given] if isinstance(given, str) else list(given)
        ids = [
            lm.encode(prompt) if isinstance(prompt, str) else list(map(operator.index, prompt)) for prompt in prompts
        ]
    except TypeError as error:
        raise InvalidPrompt(f"calibration={given!r:.60} is no text, nor a list of prompts. {advice}") from error
    pieces = [each[at : at + window] for each in ids for at in range(0, len(each), window)]
    if not pieces or any(not 0 <= i < lm.vocab_size for piece in pieces for i in piece):
        raise InvalidPrompt(f"The calibration text is empty or holds ids outside of 0 to {lm.vocab_size - 1}. {advice}")
    return pieces


def some_ids(lm: LanguageModel, tokens: int) -> list[int]:
    """Token ids that depend on nothing but the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(lm.vocab_size, (min(tokens, lm.max_model_len),), generator=generator).tolist()
