"""LLM.int8() as the library bitsandbytes does it, through its own interface: the comparison for our own int8.

The method is that of Dettmers, Lewis, Belkada and Zettlemoyer, "LLM.int8(): 8-bit Matrix Multiplication for
Transformers at Scale" (2022, arXiv 2208.07339). Weights have a scale for each output channel, activations one for each
token; features in which an activation reaches the threshold are multiplied in the model's own dtype, the rest in int8.

Invariant: after the call every linear layer that was not skipped is bitsandbytes' own `Linear8bitLt`, with the weights
and scales that `from_pretrained(..., BitsAndBytesConfig(load_in_8bit=True))` would have given it, and nothing else of
the model has changed; or there was an exception, raised before the first layer was touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

from ..errors import BadEnvironment, UnsupportedModel, number
from ..models.hf_compat import Conv1D
from ..models.load import LanguageModel
from .quantize import HEAD, broken_off, check_not_quantized, linear_layers, skipped_names

NOISE_OF_PRODUCTS = "bitsandbytes.autograd._functions"  # a line for every product whose input is not float16
NOISE_OF_IMPORT = "bitsandbytes.backends.cpu.ops"  # that an optional package with 4-bit kernels is missing


def bitsandbytes_int8(
    lm: LanguageModel, *, threshold: float = 6.0, skip: str | Sequence[str] = (HEAD,)
) -> LanguageModel:
    """Replaces the linear layers of `lm` by bitsandbytes' LLM.int8() layers, in place, and returns `lm`.

    One layer after the other, so that the peak is the model and one layer. The compute dtype (`lm.dtype`) stays; inputs
    are cast to float16 inside the product, as the library does it. On a GPU the layers are quantised there.

    threshold: activations of at least this size make their feature an outlier; 0 keeps none apart.
    skip: names that stay as they are, as for `quantize_int8`. A tied output layer that is not skipped gets int8 weights
      of its own, beside the embedding, which stays.

    What is no plain linear layer (`nn.Linear`, or GPT-2's `Conv1D`) stays too: embeddings, norms, stacked experts.

    An outlier in one row makes its feature an outlier for all rows of the product, so that answers depend, a little, on
    the company in a batch.

    Raises `BadEnvironment` without bitsandbytes, `InvalidParameter` for a model that is quantised already, a threshold
    that is not possible or a name in `skip` that is not there, `UnsupportedModel` for a model that has no layer to
    replace, or weights that float16 cannot hold.
    """
    threshold = number("threshold", threshold, "a number of at least 0 (6 in the paper; 0: off)", lambda x: x >= 0)
    check_not_quantized(lm)
    names = list(linear_layers(lm, skipped_names(skip)))
    for name in names:
        check_weight(lm, name)
    bnb = imported()
    for name in names:
        try:
            layer = converted(bnb, lm.model.get_submodule(name), threshold)
        except Exception as error:
            if name == names[0]:
                raise
            raise broken_off(lm.name, error) from error
        lm.model.set_submodule(name, layer)
    # a level rather than a filter: lines that are filtered are still made, which would cost time in every product
    products = logging.getLogger(NOISE_OF_PRODUCTS)
    if products.level == logging.NOTSET:  # else somebody wants to hear of them, or not
        products.setLevel(logging.ERROR)
    return lm


def converted(bnb: ModuleType, layer: nn.Linear | Conv1D, threshold: float) -> nn.Module:
    """A `Linear8bitLt` with the weights of `layer` in int8 [out, in] and a float32 scale for each row [out]."""
    weight = layer.weight.detach()
    if isinstance(layer, Conv1D):  # keeps them as [in, out]
        weight = weight.T
    new = bnb.nn.Linear8bitLt(
        weight.shape[1], weight.shape[0], layer.bias is not None,
        has_fp16_weights=False, threshold=threshold, device="meta",
    )  # fmt: skip
    # float16 first, as the library does: its rounding decides which code a bfloat16 or float32 weight gets
    values, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16).contiguous())
    new.weight = bnb.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales)
    new.bias = layer.bias
    new.init_8bit_state()  # what the first call would do: the library then keeps the scales where no counter looks,
    new.register_buffer("scales", scales, persistent=False)  # so the same tensor is named as a buffer too
    return new.train(layer.training)  # in training mode it would multiply in another way


def check_weight(lm: LanguageModel, name: str) -> None:
    """Raises `UnsupportedModel` unless float16, through which the library goes, can hold the weights of a layer."""
    low, high = torch.aminmax(lm.model.get_submodule(name).weight.detach())  # NaN if there is one
    limit = torch.finfo(torch.float16).max
    if not (-limit <= low.item() and high.item() <= limit):
        raise UnsupportedModel(
            f"{name} of {lm.name} has weights from {low.item():.3g} to {high.item():.3g}, but bitsandbytes takes "
            f"finite ones within {limit:.0f} only. Nothing was changed; skip this layer, or repair the checkpoint."
        )


def imported() -> ModuleType:
    """bitsandbytes. Raises `BadEnvironment` if it cannot be imported."""
    try:
        with silenced(NOISE_OF_IMPORT):
            import bitsandbytes
    except Exception as error:  # a wheel that does not fit torch or the driver fails with errors of any kind
        raise BadEnvironment(
            f"LLM.int8() was asked for, and bitsandbytes cannot be imported ({type(error).__name__}: {error}). "
            "Install it with `pip install bitsandbytes`, or use quantize_int8, which needs no other library."
        ) from error
    return bitsandbytes


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keeps one logger, and no other, from saying less than errors for a while."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
