"""The same model with cheaper weights, for the rungs and comparisons that need one.

Invariant: quantising changes a model in place, so what is quantised here is a copy with weights of its own. It is
made from the weights that are there, not from a name, so that it is this model whatever was done to it since it was
loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import torch
from torch import nn

from ..errors import InvalidParameter, UnsupportedModel
from ..models.load import LanguageModel
from ..quant.quantize import check_not_quantized, quantize_int8


def copied(lm: LanguageModel, device: torch.device | str) -> LanguageModel:
    """A copy of a model on a device, which nothing done to it there can change back here; the tokenizer is shared."""
    place = torch.device(device)
    # deepcopy takes what its memo has: so no weight is ever copied on a device that has no room for a second model
    memo: dict[int, Any] = {id(b): b.detach().to(place, copy=True) for b in lm.model.buffers()}
    for weight in lm.model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().to(place, copy=True), requires_grad=False)
    return dataclasses.replace(lm, model=copy.deepcopy(lm.model, memo), device=place)


def int8(lm: LanguageModel, **options: Any) -> LanguageModel:
    """The model through `quantize_int8` with these options; one that went through it already comes back as it is.

    The copy is made on the CPU and goes to the model's device layer by layer, as it gets smaller.
    Raises `UnsupportedModel` where it cannot be quantised, also for one that another library has quantised.
    """
    if lm.quantization is not None and not options:
        return lm
    _check(lm)
    device = lm.device
    # a bar for whoever waits at a terminal; in a file or a notebook's cell it would only be noise
    return quantize_int8(copied(lm, "cpu"), device=device, progress=sys.stderr.isatty(), **options)


def int8_weight_only(lm: LanguageModel) -> LanguageModel:
    """`int8`, with activations left as they are: what the fast path's kernels for GPUs take."""
    return int8(lm, activations="none") if lm.quantization is None else lm


def bitsandbytes(lm: LanguageModel) -> LanguageModel:
    """The model through `bitsandbytes_int8`. Raises `UnsupportedModel` as `int8` does, `BadEnvironment` without it."""
    from ..quant.bitsandbytes import bitsandbytes_int8, imported

    imported()  # before a model is copied in vain
    _check(lm)
    return bitsandbytes_int8(copied(lm, lm.device))


def _check(lm: LanguageModel) -> None:
    try:
        check_not_quantized(lm)
    except InvalidParameter as error:
        raise UnsupportedModel(str(error)) from error
