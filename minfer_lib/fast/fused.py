"""A forward pass of our own over the weights of a Llama-like model, with everything between the products fused.

transformers runs a decoder layer of Llama in some 45 kernels: at a batch of one they do little more than start. Here
a layer takes eight: norm, product, rotary embedding with cache write, attention, product, norm, product, product. What
two kernels would hand each other through memory stays inside one: q, k and v are one product, gate and up another;
the residual is added by the product before it; SiLU times up is the end of theirs.

Invariant: the weights are the model's own, in place: merged matrices own the memory and the model's parameters are
slices of them (`models.fused_linear`). Every layer was compared with the module it stands for, on random input, before
it counts; a model whose layers are of another class, or do not agree, is not run this way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention.batch import PackedBatch
from ..attention.support import layer_window
from ..errors import UnsupportedModel
from ..kernels.products import product
from ..models import hf_compat
from ..models.fused_linear import FusedLinear
from ..models.load import LanguageModel
from ..quant.linear import Int8Linear

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class FusedDecoder:
    """Called with ids and positions int64 [T], a batch and the rows whose logits are wanted: logits [rows, vocab].

    Raises `UnsupportedModel` for a model that cannot be fused, and says why.
    """

    name = "fused"

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        model = lm.model
        base = getattr(model, "model", None)
        kinds = sorted({type(layer).__name__ for layer in getattr(base, "layers", ())})
        if not kinds or not set(kinds) <= set(LAYERS):
            raise _refusal(lm, f"its layers are {', '.join(kinds) or 'unknown'}, not one of {', '.join(LAYERS)}")
        self.parts, self.kernels = kernels_for(lm.device)
        self.embedding, self.rotary = base.embed_tokens, base.rotary_emb
        self.layers = [FusedLayer(lm, layer, self.parts) for layer in base.layers]
        self.norm, self.head = base.norm, model.lm_head
        _check_plain(lm, model, base, self.norm, self.head, self.embedding)
        _check_int8(lm, self.head)
        self.head_weights = product_arguments(self.head)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.hidden(ids, positions, batch)
        return self.logits(hidden if rows is None else hidden.index_select(0, rows))

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """ids, positions [T] -> the residual stream [T, hidden] behind the last layer."""
        hidden = self.embedding(ids)
        cos, sin = self.rotary(hidden[None], positions[None])  # [1, T, head_dim]
        for layer in self.layers:
            hidden = layer(hidden, cos[0], sin[0], batch)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab]."""
        normed = self.parts.rms_norm(hidden, self.norm.weight, self.norm.variance_epsilon)
        return product(normed, **self.head_weights)

    def refresh(self) -> bool:
        """Follows weights that were moved or replaced; whether any was."""
        projections = [merged for layer in self.layers for merged in (layer.qkv, layer.gate_up)]
        moved = [merged for merged in projections if not merged.intact()]
        for merged in moved:
            merged.merge()
        if any(merged.whole is None for merged in projections):
            raise _refusal(self.lm, "its projections cannot be merged any more")
        for layer in self.layers:
            layer.refresh()
        self.head_weights = product_arguments(self.head)
        return bool(moved)

    def tensors(self) -> list[torch.Tensor]:
        """All that a captured graph has the addresses of."""
        merged = [m.whole for layer in self.layers for m in (layer.qkv, layer.gate_up)]
        return [*self.lm.model.parameters(), *self.lm.model.buffers(), *(m.weight for m in merged)]


class FusedLayer:
    """One decoder layer over the weights of `layer`, a module of one of the classes in LAYERS."""

    def __init__(self, lm: LanguageModel, layer: nn.Module, parts: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _check_plain(lm, layer, attention, mlp, *layer.modules())
        if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise _refusal(lm, f"its activation is {type(mlp.act_fn).__name__}, not SiLU")
        self.parts, self.index = parts, attention.layer_idx
        self.scale, self.window = attention.scaling, layer_window(lm.model.config, attention.layer_idx)
        self.head_dim = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.qkv = FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = attention.o_proj, mlp.down_proj
        if self.qkv.whole is None or self.gate_up.whole is None:
            raise _refusal(lm, "its projections cannot be merged: they require gradients, have hooks or share memory")
        for linear in (self.qkv.whole, self.gate_up.whole, self.out, self.down):
            _check_int8(lm, linear)
        self.refresh()

    def refresh(self) -> None:
        """Looks up where the weights are."""
        merged = self.qkv.whole, self.gate_up.whole
        self.qkv_weights, self.gate_up_weights, self.out_weights, self.down_weights = map(
            product_arguments, (*merged, self.out, self.down)
        )

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """hidden [T, hidden] in and out, changed in place; cos and sin [T, head_dim]."""
        parts, pool = self.parts, batch.pools[self.index]
        normed = parts.rms_norm(hidden, self.input_norm.weight, self.input_norm.variance_epsilon)
        qkv = product(normed, **self.qkv_weights)  # [T, (heads + 2 kv_heads) * head_dim]
        q_gain = k_gain = None
        eps = 0.0
        if self.q_norm is not None:
            q_gain, k_gain, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon
        query = parts.rope_cache(  # [T, heads, head_dim]
            qkv, cos, sin, q_gain, k_gain, batch.slot_mapping, pool.keys, pool.values, eps, self.heads, self.kv_heads,
            pool.key_scales, pool.value_scales,
        )  # fmt: skip
        batch.attended += 1
        attended = batch.backend.attend(query, pool, batch, scale=self.scale, window=self.window)
        hidden = product(attended.flatten(1), **self.out_weights, add_to=hidden)
        normed = parts.rms_norm(hidden, self.mlp_norm.weight, self.mlp_norm.variance_epsilon)
        inner = product(normed, **self.gate_up_weights, gated=True)  # [T, intermediate]
        return product(inner, **self.down_weights, add_to=hidden)


def product_arguments(linear: nn.Module) -> dict[str, torch.Tensor | None]:
    """The arguments of `product` that stand for a linear layer, in floats or int8."""
    found = {"weight": linear.weight, "scale": getattr(linear, "scale", None), "bias": linear.bias}
    if type(linear) is Int8Linear and not linear.weight_only:
        found |= {"sums": linear.sums(), "smoothing": linear.smoothing}
    return found


def _check_int8(lm: LanguageModel, linear: nn.Module) -> None:
    """Refuses int8 layers that round their activations too, where there is no kernel of ours for them."""
    if type(linear) is Int8Linear and not linear.weight_only and linear.kernel != "compiled":
        raise _refusal(
            lm,
            f"its int8 layers round activations too, and the kernel for these is {linear.kernel!r} here, not "
            "'compiled'; quantize_int8(activations='none') leaves activations as they are",
        )


def kernels_for(device: torch.device) -> tuple[Any, str]:
    """(kernels for a device, what they are written in): Triton for CUDA, C for a CPU with a compiler, or torch."""
    if device.type == "cuda":
        from ..kernels.triton import fused_parts

        return fused_parts, "Triton"
    from ..kernels import compiled_parts, reference_parts

    if device.type != "cpu" or compiled_parts.why_not():
        return reference_parts, "torch"
    return compiled_parts, "C"


def _check_plain(lm: LanguageModel, *modules: nn.Module) -> None:
    """Refuses what others see or change on its way: hooks, and modules with a forward of their own."""
    for module in modules:
        if hf_compat.has_hooks(module) or "forward" in vars(module):
            raise _refusal(lm, f"a {type(module).__name__} of it has a hook, or a forward of its own")


def _refusal(lm: LanguageModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{lm.name} cannot be fused: {reason}.")
