"""Any family of models, its own layers compiled by torch.compile: no kernel of ours but attention and products.

Each decoder layer is compiled by itself, and one compilation serves all layers of a model: weights are inputs of the
compiled code, and the layer's index is a symbol. Attention and products are custom operations, which the compiler does
not look into: they find the batch of the step in `RUNNING`, as vLLM's attention finds its forward context.

Invariant: nothing of the model is replaced; compiled are the layers of an engine's own view of it (`attention.view`),
and it counts once it agreed with the modules (`proof`). Source: regional compilation, PyTorch 2.5.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from ..attention.batch import PackedBatch
from ..attention.interface import packed_attention
from ..attention.view import view_of
from ..engine.runner import ViewDecoder
from ..errors import UnsupportedModel
from ..kernels.products import product
from ..models import hf_compat
from ..models.fused_linear import FusedLinear, row_tensors
from ..models.load import LanguageModel
from ..quant.linear import Int8Linear
from .fused import product_arguments

NAME = "minfer_compiled"
ARGUMENTS = ("weight", "scale", "bias", "sums", "smoothing")  # of a product
RUNNING = threading.local()  # .batch: of the step that this thread runs


@torch.library.custom_op("minfer::attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float | None, window: int | None,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`packed_attention` over the batch of the step: query [1, heads, T, dim] -> [1, T, heads, value_dim]."""
    module = SimpleNamespace(layer_idx=layer)  # all that is read of it
    return packed_attention(
        module, query, key, value, None, scale, 0.0, window, softcap, sinks, minfer=RUNNING.batch
    )[0].contiguous()  # fmt: skip


@attend.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("minfer::product", mutates_args=())
def compiled_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None,
    sums: torch.Tensor | None, smoothing: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`kernels.products.product`: x [T, in] -> [T, out]."""
    return product(x, weight, scale=scale, bias=bias, sums=sums, smoothing=smoothing)


@compiled_product.register_fake
def _(x: Any, weight: Any, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if attention_mask is not None:
        raise UnsupportedModel(f"The attention function `{NAME}` was given a mask.")
    return torch.ops.minfer.attend(query, key, value, module.layer_idx, scaling, sliding_window, softcap, s_aux), None


AttentionInterface.register(NAME, _attention)


class Part(nn.Module):
    """Stands in a view for one of several linear layers that read the same input; the first computes all of them.

    Right only because they are called one after the other with the same tensor, which was watched (`shared_inputs`).
    """

    def __init__(self, whole: nn.Module, sizes: list[int], first: Part | None, index: int) -> None:
        super().__init__()
        self.sizes, self.index = sizes, index
        self.results: tuple[torch.Tensor, ...] = ()
        self.first = [first]  # in a list, as `whole`: no child of this one
        self.whole = [whole]
        if first is None:
            for name in ARGUMENTS:
                self.register_buffer(name, None, persistent=False)
            self.refresh()

    def refresh(self) -> None:
        """Looks up where the weights are."""
        if self.index == 0:
            for name, tensor in product_arguments(self.whole[0]).items():
                setattr(self, name, None if tensor is None else tensor.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index == 0:
            rows = torch.ops.minfer.product(x.reshape(-1, x.shape[-1]), *(getattr(self, name) for name in ARGUMENTS))
            results = rows.view(*x.shape[:-1], -1).split(self.sizes, -1)
            self.results = results
            return results[0]
        first = self.first[0]
        result = first.results[self.index]
        if self.index == len(self.sizes) - 1:
            first.results = ()
        return result


class CompiledDecoder(ViewDecoder):
    """As `engine.runner.ViewDecoder`, with compiled layers. Raises `UnsupportedModel` for a model without any."""

    name = "compiled"

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._keeps_rows = hf_compat.supports_logits_to_keep(lm.model)
        self._make()

    def _make(self) -> None:
        lm = self.lm
        self.view = view_of(lm.model, NAME)
        base = getattr(self.view, "model", None)
        layers = getattr(base, "layers", None)
        if not layers:
            raise UnsupportedModel(f"{lm.name} cannot be compiled: it has no layers under `model.layers`.")
        self.merged: list[FusedLinear] = []
        grouped = {name for group in lm.input_groups for name in group}
        alone = [[name] for name, module in self.view.named_modules() if row_tensors(module) and name not in grouped]
        for group in [*lm.input_groups, *alone]:
            self._merge(group)
        for layer in layers:
            # An attribute of the view's own container: the model's layer is not touched.
            layer.__dict__["forward"] = torch.compile(layer.forward, dynamic=None)

    def _merge(self, group: list[str]) -> None:
        modules = [self.view.get_submodule(name) for name in group]
        if any(type(m) not in (nn.Linear, Int8Linear) or hf_compat.has_hooks(m) for m in modules):
            return
        if any(type(m) is Int8Linear and not m.weight_only and m.kernel != "compiled" for m in modules):
            return  # torch's own operations, which its compiler knows
        if len(modules) == 1:
            self.view.set_submodule(group[0], Part(modules[0], [len(modules[0].weight)], None, 0))
            return
        merged = FusedLinear(modules)
        if merged.whole is None:
            return
        self.merged.append(merged)
        first = Part(merged.whole, merged.sizes, None, 0)
        self.view.set_submodule(group[0], first)
        for index, name in enumerate(group[1:], 1):
            self.view.set_submodule(name, Part(merged.whole, merged.sizes, first, index))

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        RUNNING.batch = batch
        with hf_compat.one_compilation():
            return self._logits(ids, positions, rows)

    def refresh(self) -> None:
        """Follows weights that were moved or replaced."""
        if not all(merged.intact() for merged in self.merged):
            for merged in self.merged:
                merged.merge()
            self._make()
        for module in self.view.modules():
            if isinstance(module, Part):
                module.refresh()
