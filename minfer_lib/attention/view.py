"""An engine's own view of a model: the same layers and weights, in containers and configs of its own.

Which function attends is written in a model's config, where everybody reads it who runs the model. An engine that wrote
its own there would switch it for all others, so that it runs a view instead: a second tree of container modules (the
model, its decoder layers, their attention and MLP modules) over the same leaves (linear layers, norms, embeddings).

Invariant: nothing of the model is changed, and no weight is copied. A view runs the layers that the model had when the
view was made; weights that change in place, and hooks, are those of the model.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models import hf_compat
from ..models.fused_linear import FusedLinear, fuse, shared_inputs
from ..models.load import LanguageModel


def view_of(model: PreTrainedModel, attention: str | None = None) -> PreTrainedModel:
    """A view of a model, whose layers call the attention function registered as `attention`; None keeps the model's."""
    configs: dict[int, Any] = {}

    def clone(module: nn.Module) -> nn.Module:
        config, children = module.__dict__.get("config"), hf_compat.children_of(module)
        if not children and config is None:
            return module  # a leaf: shared
        new = hf_compat.with_children(module, {k: None if m is None else clone(m) for k, m in children.items()})
        if config is not None:
            if id(config) not in configs:
                configs[id(config)] = copy.deepcopy(config)
            new.__dict__["config"] = configs[id(config)]
        _rebind(module, new)
        return new

    view = clone(model)
    if attention is not None:
        for config in configs.values():
            hf_compat.set_attention(config, attention)
    return view


class EngineView:
    """The view that one engine runs, `view`, with projections that read the same input merged where that is faster.

    attention: as for `view_of`. Called, it is the model.
    """

    def __init__(self, lm: LanguageModel, attention: str | None = None) -> None:
        self.lm, self.attention = lm, attention
        self._make()

    def _make(self) -> None:
        lm = self.lm
        self._forward = vars(lm.model).get("forward")
        self.view = view_of(lm.model, self.attention)
        self.fused: list[FusedLinear] = []
        if lm.device.type == "cpu" or lm.quantization is not None:
            if lm.input_groups is None:
                view, token = view_of(lm.model), torch.zeros(1, 1, dtype=torch.long, device=lm.device)
                with torch.no_grad():
                    lm.input_groups = shared_inputs(view, lambda: view(input_ids=token, use_cache=False))
            self.fused = fuse(self.view, lm.input_groups)

    def refresh(self) -> None:
        """Follows what was done to the model: a forward of its own, weights that were moved or replaced."""
        if vars(self.lm.model).get("forward") is not self._forward:
            self._make()
        for fused in self.fused:
            if not fused.intact():
                fused.merge()

    def __call__(self, **inputs: Any) -> Any:
        return self.view(**inputs)


def _rebind(module: nn.Module, new: nn.Module) -> None:
    """A forward that an instance was given (by accelerate, say) is bound to it, and would run its children."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and module in forward.args:  # accelerate's, which only moves inputs
        forward = module.__dict__.get("_old_forward", forward)
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        new.__dict__["forward"] = types.MethodType(forward.__func__, new)
