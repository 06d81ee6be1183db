"""Every name of transformers and torch that this package uses and that they do not promise to keep.

An upgrade may rename or remove any of them. All stand here, so that there is one file to look at, and each says what
breaks without it and, where something can be done, does it: an upgrade may cost speed or a feature, but never change
results in silence. A test names each, and another one finds such names anywhere else in the package.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

# Base of `PeakMemory`, which sees each operation on its way to the kernel. Without it nothing measures activations.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Finds the tensors among the arguments of an operation, for `PeakMemory`.
from torch.utils._pytree import tree_leaves as tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

try:
    from transformers.cache_utils import CacheLayerMixin
except ImportError:

    class CacheLayerMixin:  # transformers asks a layer for its methods, never for its class
        """The base of our contiguous cache's layers, with the three attributes that transformers' own one has."""

        def __init__(self) -> None:
            self.keys: torch.Tensor | None = None
            self.values: torch.Tensor | None = None
            self.is_initialized = False


try:
    from transformers.pytorch_utils import Conv1D
except ImportError:

    class Conv1D(nn.Module):
        """No layer is one of these: GPT-2's linear layers, [in, out], are then left in floats by quantisation."""


# -- models -----------------------------------------------------------------------------------------------------------


def causal_class_name(config: PreTrainedConfig) -> str:
    """The model class that a config stands for, as its file would name it. Without it other systems cannot be told
    which architecture a shape has."""
    return AutoModelForCausalLM._model_mapping[type(config)].__name__


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether `forward` can be told which positions' logits are wanted; without it all are computed."""
    ask = getattr(model, "_supports_logits_to_keep", None)
    return ask() if ask is not None else "logits_to_keep" in inspect.signature(model.forward).parameters


def can_set_attention(model: PreTrainedModel) -> bool:
    """Whether its layers call a registered function; without the answer, the probe still sees which layers did."""
    ask = getattr(model, "_can_set_attn_implementation", None)
    return ask() if ask is not None else True


def attention_of(config: PreTrainedConfig) -> str | None:
    """The name of the attention function that layers with this config call."""
    return config._attn_implementation


def set_attention(config: PreTrainedConfig, name: str | None) -> None:
    """Makes layers with this config, and with configs inside it, call that function.

    `model.set_attn_implementation` walks through all modules and may refuse; layers read the config at each call, so
    writing it is enough. Without it no layer would call our function, and the probe refuses every model.
    """
    config._attn_implementation = name


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether it keeps a state other than keys and values; without it `layer_types` of the config still tell most."""
    return bool(getattr(model, "_is_stateful", False))


def cache_argument(model: PreTrainedModel) -> str:
    """What this model calls its cache: "cache" since transformers 5.24, "past_key_values" before.

    It has to be asked, because the wrong one is not refused: 5.17 swallows it and runs without a cache.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forget_manager(view: PreTrainedModel) -> None:
    """Lets a view begin without the manager of continuous batching that a user may keep on their model.

    Without it the baseline of `bench` would run theirs, with other limits than were asked for, and end it.
    """
    view.__dict__.pop("_cached_continuous_batching_manager", None)


def can_dequantize(config: PreTrainedConfig) -> bool:
    """Whether the config says how its weights were quantised, in a way that transformers knows.

    One that it does not know is passed over with a warning, and the codes are loaded as if they were weights. Without
    the list of those it knows, they are believed.
    """
    told = getattr(config, "quantization_config", None)
    if told is None:
        return False
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    except ImportError:
        return True
    told = told if isinstance(told, dict) else told.to_dict()
    by_bits = "bitsandbytes" if told.get("load_in_8bit") or told.get("load_in_4bit") else ""  # of old folders
    method = told.get("quant_method") or by_bits
    method = str(getattr(method, "value", method))
    return bool(method) and any(known.startswith(method) for known in AUTO_QUANTIZATION_CONFIG_MAPPING)


# -- modules ----------------------------------------------------------------------------------------------------------


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Children by name. `named_children` leaves out those that are None and those that stand there twice."""
    return dict(module._modules)


def with_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> nn.Module:
    """Another module of the same class with the same parameters, buffers and attributes, but these children."""
    twin = object.__new__(type(module))
    twin.__dict__ = module.__dict__ | {"_modules": dict(children)}
    return twin


def with_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor], **attributes: Any) -> nn.Module:
    """Another module of the same class and attributes, with other parameters and buffers of the same names."""
    twin = object.__new__(type(module))
    twin.__dict__ = module.__dict__ | attributes
    twin._parameters = {name: tensors.get(name, old) for name, old in module._parameters.items()}
    twin._buffers = {name: tensors.get(name, old) for name, old in module._buffers.items()}
    return twin


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see or change what goes into it or comes out: then another layer must not take its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[object]:
    """The hooks that see or change what goes into it or comes out; without them a switched hook goes unnoticed."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def tensor_places(module: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str]]:
    """Where the parameters and buffers of a module itself are kept, or would be: (dictionary, name) each.

    Looking there is a hundred times as fast as `parameters()`, and sees one that was replaced. Without it every request
    that joins costs milliseconds.
    """
    return [(kept, name) for kept in (module._parameters, module._buffers) for name in kept]


def one_compilation() -> AbstractContextManager[None]:
    """While it lasts, torch.compile takes a layer's number for a symbol, so that one compilation serves all layers.

    Without it each layer would be compiled by itself, and after eight of them none.
    """
    from torch import _dynamo

    return _dynamo.config.patch(allow_unspec_int_on_nn_module=True, cache_size_limit=64)


# -- tensors ----------------------------------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors have in common if and only if they share their memory. An address is the next best."""
    storage = tensor.untyped_storage()
    return getattr(storage, "_cdata", None) or storage.data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with each change in place, but not with one through `.data`; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


# -- products of int8 matrices ----------------------------------------------------------------------------------------

# (int8 [m, k], int8 [k, n]) -> exact int32 sums [m, n]. None where torch has none: the portable product is used.
int_mm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = getattr(torch, "_int_mm", None)

# (bfloat16 [m, k], int8 [n, k], bfloat16 [n]) -> bfloat16 [m, n], weight-only. Chapter 5 compares with it.
weight_int8pack_mm: Callable[..., torch.Tensor] | None = getattr(torch, "_weight_int8pack_mm", None)


def fbgemm_pack(codes: torch.Tensor, scale: torch.Tensor) -> Any:
    """Weights (int8 [out, in], scale [out]) in the order of torch's quantised linear layer. Chapter 5 compares with it.

    Quantised tensors are deprecated in torch; where they are gone this raises `AttributeError`, and the comparison
    lacks that row.
    """
    zeros = torch.zeros(len(codes), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they are deprecated
        carrier = torch._make_per_channel_quantized_tensor(codes, scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(carrier, None)


def fbgemm_linear(x: torch.Tensor, scale: float, zero: int, packed: Any) -> torch.Tensor:
    """float32 [..., out] of float32 x [..., in], rounded to eight bits with one scale, and weights of `fbgemm_pack`."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, scale, zero, packed)
