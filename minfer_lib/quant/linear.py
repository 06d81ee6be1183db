"""The two layers whose weights are one byte each: a linear layer and an embedding.

Invariant: what a layer holds are its codes, a byte a weight, and four bytes a channel: plain buffers, which copies,
pickles and state dicts take as they are. What a product derives from the codes is made when it is first needed, and
again when the codes are others or elsewhere. Scales stay float32 whatever dtype the model is moved to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import InvalidParameter, UnsupportedModel, must_be, one_of
from ..models import hf_compat
from .absmax import is_pair_safe
from .products import LONGEST, PRODUCTS, choose

ACTIVATIONS = ("dynamic", "none")


class Int8Module(nn.Module):
    """Codes int8 [out, in] and a float32 scale [out] for each row."""

    weight: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype | None = None  # of what comes out, where no input tells it

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        if weight.dtype != torch.int8 or weight.dim() != 2:
            raise must_be("weight", "codes in int8, [out, in]", f"{weight.dtype} {list(weight.shape)}")
        self._register("weight", weight)
        self._register("scale", scale, len(weight))

    def _register(self, name: str, tensor: torch.Tensor | None, size: int | None = None) -> None:
        if tensor is not None and size is not None:
            if tensor.numel() != size:  # kernels would read beyond its end
                raise must_be(name, f"{size} numbers", f"{tensor.numel()} numbers")
            tensor = tensor.detach().float().reshape(-1)
        self.register_buffer(name, None if tensor is None else tensor.contiguous())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8Module:
        """Moves to a device, and never to a dtype."""
        moved = fn(torch.empty(0, device=self.scale.device, dtype=self.dtype or torch.float32))
        self.dtype = self.dtype and moved.dtype
        for name, buffer in list(self.named_buffers(recurse=False)):
            there = fn(buffer)
            setattr(self, name, there if there.dtype == buffer.dtype else buffer.to(moved.device))
        return self


class Int8Linear(Int8Module):
    """y = x W^T + b with W in int8, one scale per output channel.

    weight: int8 codes [out, in]; scale: float32 [out]; bias: float32 [out] or None; smoothing: float32 [in] or None,
    the SmoothQuant factors that the weights were multiplied with and the input is divided by.
    activations: "dynamic" rounds each token of the input to int8 with a scale of its own and multiplies integers
    (W8A8); "none" leaves the input as it is (W8A16, weight-only). kernel: the name of a product, or None for the first
    that this device can use. Input and output are [..., in] and [..., out] in the dtype of the input.

    With "dynamic", weights that are not pair-safe (see `absmax.pair_safe_quantize`) are run by the portable product.
    """

    bias: torch.Tensor | None
    smoothing: torch.Tensor | None
    row_tensors: ClassVar = ("weight", "scale", "bias")  # for `FusedLinear`: those with a row for each output

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activations: str = "dynamic",
        smoothing: torch.Tensor | None = None,
        kernel: str | None = None,
    ) -> None:
        super().__init__(weight, scale)
        if activations not in ACTIVATIONS:
            raise must_be("activations", one_of(ACTIVATIONS), activations)
        if smoothing is not None and activations == "none":
            raise InvalidParameter("smoothing divides activations that become codes; with activations='none' omit it.")
        self.out_features, self.in_features = weight.shape
        self.activations, self.asked_kernel = activations, kernel
        self._register("bias", bias, self.out_features)
        self._register("smoothing", smoothing, self.in_features)
        self._derived: tuple[Any, torch.Tensor | None] = (None, None)

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
        rows = x.reshape(-1, self.in_features)
        return PRODUCTS[self.kernel](rows, self).view(*x.shape[:-1], self.out_features)

    @property
    def weight_only(self) -> bool:
        """Whether the input is multiplied as it is: neither rounded nor divided by smoothing factors."""
        return self.activations == "none" and self.smoothing is None

    @property
    def kernel(self) -> str:
        """The name of the product that runs this layer."""
        dynamic, device = self.activations == "dynamic", self.scale.device.type
        if dynamic and device == "cpu" and self.sums() is None:
            return "portable"
        return choose(dynamic, device, self.asked_kernel)

    def sums(self) -> torch.Tensor | None:
        """int32 [out]: 128 x the sum of each row of codes. None if weight-only, or if integer units could overflow."""
        if self.activations == "none":
            return None
        key = self.weight.data_ptr(), hf_compat.version_of(self.weight), self.weight.shape
        derived = self._derived  # read once, since other threads may use the layer
        if derived[0] != key:
            sums = None
            if self.in_features <= LONGEST and is_pair_safe(self.weight):
                sums = (128 * self.weight.sum(1, dtype=torch.int64)).to(torch.int32)
            derived = self._derived = key, sums
        return derived[1]

    def merges_with(self, other: Int8Linear) -> bool:
        """Whether one product may compute both, for `FusedLinear`."""
        one, two = self.smoothing, other.smoothing
        same = one is two or (one is not None and two is not None and torch.equal(one, two))
        return same and (self.activations, self.asked_kernel) == (other.activations, other.asked_kernel)

    def dequantized(self) -> torch.Tensor:
        """The weights [out, in] in float32, as the model had them but for the rounding."""
        whole = self.weight.float() * self.scale[:, None]
        return whole if self.smoothing is None else whole / self.smoothing

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activations={self.activations!r}, smoothing={self.smoothing is not None}"
        )


class Int8Embedding(Int8Module):
    """An embedding whose rows are int8 with a scale each: weight [vocab, hidden], scale float32 [vocab].

    The output is in `dtype`, times `factor` if there is one. A tied output layer is an `Int8Linear` over the same two
    tensors.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, padding_idx: int | None = None,
        factor: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weight, scale)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.dtype, self.factor = padding_idx, dtype, factor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = (self.weight[ids].to(torch.float32) * self.scale[ids][..., None]).to(self.dtype)
        return rows if self.factor is None else rows * rows.new_tensor(self.factor)  # the factor is rounded too

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
