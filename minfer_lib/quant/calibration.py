"""Watching a model on a text: how large each input feature of its linear layers gets, and which layers share an input.

Invariant: the model is only looked at. What is noted is a few numbers for each feature, never the activations.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InvalidPrompt, UnsupportedModel, shown
from ..models.fused_linear import InputGroups
from ..models.load import LanguageModel

CALIBRATION = Path(__file__).parent / "calibration.txt"  # ours, of many kinds: prose, dialogue, code, tables
WINDOW = 512  # tokens of the text that are run at once


def watch(
    lm: LanguageModel, layers: dict[str, nn.Module], prompts: list[list[int]]
) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Runs prompts through the model and notes what the layers' inputs are like.

    Returns the largest magnitude of each input feature, float32 [in], of the layers that were called, by name; and
    their names in groups that share an input. Raises `UnsupportedModel` for an input that is not finite.
    """
    peaks: dict[str, torch.Tensor] = {}
    inputs = InputGroups()

    def note(name: str, args: tuple[Any, ...]) -> None:
        x = args[0]
        if x.numel() == 0:  # an expert that no token goes to
            return
        inputs.note(name, x)
        peak = x.detach().abs().reshape(-1, x.shape[-1]).amax(0).float()
        if not peak.isfinite().all():
            raise UnsupportedModel(
                f"{lm.name} computes NaN or infinity on the calibration text, in the input of {name}: there is no "
                "scale for that. Nothing was changed."
            )
        peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: note(name, args)) for name, layer in layers.items()
    ]
    try:
        for ids in prompts:
            lm.next_token_logits(torch.tensor([ids], device=lm.device), use_cache=False)
            inputs.end()
    finally:
        for hook in hooks:
            hook.remove()
    return peaks, inputs.groups()


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
        raise InvalidPrompt(f"calibration must be text or a list of prompts; it is {shown(given)}. {advice}") from error
    pieces = [prompt[at : at + window] for prompt in ids for at in range(0, len(prompt), window)]
    if not pieces or any(not 0 <= i < lm.vocab_size for piece in pieces for i in piece):
        raise InvalidPrompt(f"The calibration text is empty or holds ids outside of 0 to {lm.vocab_size - 1}. {advice}")
    return pieces


def some_ids(lm: LanguageModel, tokens: int) -> list[int]:
    """Token ids that depend on nothing but the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(lm.vocab_size, (min(tokens, lm.max_model_len),), generator=generator).tolist()
