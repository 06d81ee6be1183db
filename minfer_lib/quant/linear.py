"""The two layers whose weights are one byte each: a linear layer and an embedding.

Invariant: `weight` holds the codes [out, in] as long as no kernel has packed them, `codes()` gives them in any case,
and nothing else of that size is kept: a layer costs one byte a weight and four bytes a channel. The scales stay float32
whatever dtype the model is moved to, and the codes stay integers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InvalidParameter, UnsupportedModel, one_of
from .absmax import is_pair_safe
from .products import LONGEST, Portable, Weights, choose, usable

ACTIVATIONS = ("dynamic", "none")
PREPARING = threading.RLock()  # one thread at a time gives layers the form that their kernel wants


class Int8Linear(nn.Module):
    """y = x W^T + b with W in int8, one scale per output channel.

    weight: int8 codes [out, in]; scale: float32 [out]; bias: float32 [out] or None; smoothing: float32 [in] or None,
    the SmoothQuant factors that the weights were multiplied with and the input is divided by.
    activations: "dynamic" rounds each token of the input to int8 with a scale of its own and multiplies integers
    (W8A8); "none" leaves the input as it is (W8A16, weight-only). kernel: its name, or None for the fastest on this
    machine; keep_rows: none that packs the weights, since an embedding reads them. Input and output are [..., in] and
    [..., out] in the dtype of the input.

    With "dynamic", weights that are not pair-safe (see `absmax.pair_safe_quantize`) are run by the portable kernel.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    smoothing: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activations: str = "dynamic",
        smoothing: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        kernel: str | None = None,
        keep_rows: bool = False,
    ) -> None:
        super().__init__()
        if activations not in ACTIVATIONS:
            raise InvalidParameter(f"activations={activations!r} is not possible: it must be {one_of(ACTIVATIONS)}.")
        if weight.dtype != torch.int8 or weight.dim() != 2:
            raise InvalidParameter(
                f"Weights of {weight.dtype} {list(weight.shape)} were given: int8 codes [out, in] are needed."
            )
        self.out_features, self.in_features = weight.shape
        for name, part, size in (("scale", scale, 0), ("bias", bias, 0), ("smoothing", smoothing, 1)):
            if part is not None and part.numel() != weight.shape[size]:  # kernels would read beyond its end
                raise InvalidParameter(f"{name} has {part.numel()} numbers: it must have {weight.shape[size]}.")
        if smoothing is not None and activations == "none":
            raise InvalidParameter(
                "smoothing divides activations that become codes: with activations='none' leave it out."
            )
        self.activations, self.kernel_name, self.dtype, self.keep_rows = activations, kernel, dtype, keep_rows
        self.shared: SharedInput | None = None  # with the layers that read the same input
        self.partners: list[Int8Linear] = []  # those layers, this one too, while they stand apart
        self._weights: Weights | None = None  # in the form of the kernel that runs them, made at the first use
        self._kernel: Portable | None = None
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("scale", scale.detach().float().reshape(-1).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().float().reshape(-1).contiguous())
        self.register_buffer("smoothing", None if smoothing is None else smoothing.detach().float().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            # some models bring the input to the dtype of the layer's weight first, and are wrong from there on
            raise UnsupportedModel(
                f"A layer in int8 was given {x.dtype}: this model reads the dtype of its weights. Load it again and "
                "name the layer in `skip` (the traceback shows which)."
            )
        if (x.requires_grad and torch.is_grad_enabled()) or torch.jit.is_tracing():
            raise UnsupportedModel(
                "A layer in int8 has no gradient and cannot be traced: its kernel works unseen. Run it "
                "under torch.no_grad(), or train the model before it is quantised."
            )
        if x.shape[-1] != self.in_features or x.device != self.scale.device:
            raise InvalidParameter(
                f"A layer in int8 with {self.in_features} inputs on {self.scale.device} was given {list(x.shape)} on "
                f"{x.device}: the last dimension and the device must be the layer's."
            )
        if self.shared is None and self.partners:  # all of them have been moved or copied
            with PREPARING:
                if self.shared is None:
                    SharedInput(self.partners)
        if self.shared is not None:
            return self.shared.part(self, x)
        rows = x.reshape(-1, self.in_features)
        return self.product(rows).view(*x.shape[:-1], self.out_features)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, in] to [tokens, out]."""
        if rows.is_cuda and self.activations == "none":
            from ..kernels.cuda import weight_only_product

            return weight_only_product(rows, self.weight, self.scale, self.bias)
        if self._weights is None:
            self.prepare()
        return self._kernel.product(rows, self._weights, self.activations == "dynamic")

    def prepare(self) -> None:
        """Chooses the kernel, and packs the weights if it wants them packed."""
        with PREPARING:
            if self._weights is None:
                self._prepare()

    def _prepare(self) -> None:
        dynamic = self.activations == "dynamic"
        kernel = choose(dynamic, self.dtype, self.weight.device, self.kernel_name, packing=not self.keep_rows)
        if dynamic and not (self.in_features <= LONGEST and is_pair_safe(self.weight)):
            kernel = usable(Portable.name)
        inverse = None if self.smoothing is None else 1.0 / self.smoothing
        weights = Weights(self.weight, self.scale, self.bias, inverse)
        kernel.prepare(weights, dynamic)
        if kernel.packs:
            self.weight = self.weight.new_empty(0)  # the packed form takes its place
            weights.codes = None
        self._kernel, self._weights = kernel, weights

    @property
    def kernel(self) -> str:
        """The name of the kernel that runs this layer."""
        if self.weight.is_cuda and self.activations == "none":
            return "triton"
        if self.shared is not None:
            return self.shared.whole.kernel
        if self._weights is None:
            self.prepare()
        return self._kernel.name

    def codes(self) -> torch.Tensor:
        """The codes, int8 [out, in], in whatever form they are kept."""
        if self.shared is not None:
            return self.shared.codes_of(self)
        if self._weights is not None and self._kernel.packs:
            return self._kernel.unpack(self._weights)
        return self.weight

    @property
    def packed_bytes(self) -> int:
        """Bytes of weights that a kernel keeps where PyTorch does not count them."""
        form = self if self.shared is None else self.shared.whole
        packed = form._weights is not None and form._kernel.packs
        return self.out_features * self.in_features if packed else 0

    def dequantized(self) -> torch.Tensor:
        """The weights [out, in] in float32, as the model had them but for the rounding."""
        whole = self.codes().float() * self.scale[:, None]
        return whole if self.smoothing is None else whole / self.smoothing

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8Linear:
        """Moves to a device, not to a dtype; prepared forms are made anew where the weights are then."""
        moved = fn(torch.empty(0, device=self.scale.device, dtype=self.dtype))
        if moved.device == self.scale.device and moved.dtype == self.dtype:
            return self  # as when a model is sent to where it is
        self.unprepare()
        self.dtype = moved.dtype
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = (
                    fn(buffer).to(buffer.dtype) if not buffer.is_floating_point() else _move(buffer, fn)
                )
        return self

    def unprepare(self) -> None:
        """Back to codes that stand row by row, in this layer alone."""
        if self.shared is not None:
            self.shared.dissolve()
        if self._weights is not None and self._kernel.packs:
            self.weight = self.codes()
        self._weights = self._kernel = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: prepared and shared forms hold addresses and views; both are made anew there."""
        state = super().__getstate__().copy()
        if self.shared is not None:
            own = {"weight": self.codes().clone(), "scale": self.scale.clone()}
            state |= {"_buffers": self._buffers | own, "shared": None, "partners": self.shared.layers}
        elif self._weights is not None and self._kernel.packs:
            state["_buffers"] = self._buffers | {"weight": self.codes()}
        return state | {"_weights": None, "_kernel": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.codes()  # whatever form they are kept in

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dtype != torch.int8:
            raise InvalidParameter(
                f"`{prefix}weight` is {weight.dtype} and would be cut to int8. Load an int8 model's."
            )
        self.unprepare()  # what was derived from the old codes is made anew
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activations={self.activations!r}, smoothing={self.smoothing is not None}"
        )


class SharedInput:
    """Layers that read the same tensor, as q, k and v do: one matrix, one rounding of the input, one product.

    The first of them to be called computes the result of all; the others find theirs waiting. It is recognised by the
    input being the very same tensor, unchanged; another input is computed afresh, so that whoever calls one of the
    layers alone gets the right result too.
    """

    def __init__(self, layers: Sequence[Int8Linear]) -> None:
        first = layers[0]
        for layer in layers[1:]:
            same = layer.smoothing is first.smoothing or (
                layer.smoothing is not None
                and first.smoothing is not None
                and torch.equal(layer.smoothing, first.smoothing)
            )
            if not same or layer.activations != first.activations:
                raise InvalidParameter("Layers that share an input must have the same smoothing and activations.")
        biases = [layer.bias for layer in layers]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat(
                [layer.scale.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
            )
        self.layers = list(layers)
        self.sizes = [layer.out_features for layer in layers]
        self.whole = Int8Linear(
            torch.cat([layer.codes() for layer in layers]), torch.cat([layer.scale for layer in layers]), bias,
            activations=first.activations, smoothing=first.smoothing, dtype=first.dtype, kernel=first.kernel_name,
        )  # fmt: skip
        self._waiting: tuple[torch.Tensor, int | torch.Tensor, dict[Int8Linear, torch.Tensor]] | None = None
        for layer, codes, scale in zip(
            layers, self.whole.weight.split(self.sizes), self.whole.scale.split(self.sizes), strict=True
        ):
            layer.unprepare()
            layer.weight, layer.scale, layer.smoothing = codes, scale, first.smoothing  # nothing is held twice
        self.whole.prepare()
        if self.whole._kernel.packs:
            for layer in layers:
                layer.weight = self.whole.weight
        for layer in self.layers:  # last, so that no thread finds a group that is not ready
            layer.shared, layer.partners = self, []

    def part(self, layer: Int8Linear, x: torch.Tensor) -> torch.Tensor:
        """The layer's share of the product with x [..., in]."""
        waiting = self._waiting
        if waiting is not None and waiting[0] is x and _unchanged(x, waiting[1]):
            result = waiting[2].pop(layer, None)  # in one step: another thread may be after the same
            if not waiting[2]:
                self._waiting = None
            if result is not None:
                return result
        whole = self.whole.product(x.reshape(-1, self.whole.in_features)).view(*x.shape[:-1], sum(self.sizes))
        results = dict(zip(self.layers, whole.split(self.sizes, -1), strict=True))
        result = results.pop(layer)
        self._waiting = (x, _state(x), results)
        return result

    def codes_of(self, layer: Int8Linear) -> torch.Tensor:
        """The layer's codes [out, in]."""
        return self.whole.codes().split(self.sizes)[self.layers.index(layer)]

    def dissolve(self) -> None:
        """Gives each layer its own weights back."""
        for layer, codes, scale in zip(
            self.layers, self.whole.codes().split(self.sizes), self.whole.scale.split(self.sizes), strict=True
        ):
            layer.shared, layer.weight, layer.scale = None, codes.clone(), scale.clone()
            layer.partners = self.layers
        self._waiting = None


class Int8Embedding(nn.Module):
    """An embedding whose rows are int8 with a scale each: weight [vocab, hidden], scale float32 [vocab].

    The output is in `dtype`. A tied output layer is an `Int8Linear` over the same two tensors.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, padding_idx: int | None = None,
        factor: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        if scale.numel() != self.num_embeddings:
            raise InvalidParameter(f"scale has {scale.numel()} numbers: it must have {self.num_embeddings}.")
        self.padding_idx, self.dtype, self.factor = padding_idx, dtype, factor
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.detach().float().reshape(-1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight[ids].to(torch.float32) * self.scale[ids][..., None]
        rows = rows.to(self.dtype)
        return rows if self.factor is None else rows * rows.new_tensor(self.factor)  # the factor is rounded too

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8Embedding:
        moved = fn(torch.empty(0, device=self.scale.device, dtype=self.dtype))
        self.dtype = moved.dtype
        self.weight, self.scale = fn(self.weight), _move(self.scale, fn)
        return self

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def _state(x: torch.Tensor) -> int | torch.Tensor:
    """What tells later whether x was changed in place. Inference tensors count no changes, so theirs is a copy."""
    return x.clone() if x.is_inference() else x._version


def _unchanged(x: torch.Tensor, state: int | torch.Tensor) -> bool:
    return torch.equal(x, state) if isinstance(state, torch.Tensor) else x._version == state


def _move(buffer: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """To where `fn` moves tensors, in its own dtype."""
    moved = fn(buffer)
    return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
