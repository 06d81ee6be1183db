"""torch's own products with int8 weights, which chapter 5 compares ours with. The engine uses neither.

Invariant: each takes the codes and scales that our layers have, and gives the same numbers up to its rounding.
"""

from __future__ import annotations

import torch

from ..errors import UnsupportedModel
from ..models import hf_compat

TINY = 1.5e-36  # a token that reaches no further is all zeros


class Fbgemm:
    """torch's quantised linear layer on x86 (fbgemm), which rounds the input inside the product and packs the weights.

    It knows one scale for the whole input. Tokens that were divided by their own largest value first all share the
    scale 1/127, so that each has its own again afterwards. codes: int8 [out, in]; scale: float32 [out]. Without VNNI it
    adds neighbouring products in 16 bits, so that codes have to be pair-safe.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        try:
            self.packed = hf_compat.fbgemm_pack(codes, scale.reshape(-1))
        except (RuntimeError, AttributeError) as error:
            raise UnsupportedModel(f"This torch has no quantised linear layer: {str(error).splitlines()[0]}") from error

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [m, in] to [m, out]."""
        peak = x.abs().amax(-1, keepdim=True).clamp_(min=TINY)
        return hf_compat.fbgemm_linear(x / peak, 1 / 127, 128, self.packed).mul_(peak)


class PackedBF16:
    """`torch._weight_int8pack_mm`: weight-only, for bfloat16. codes: int8 [out, in], in a multiple of 32."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        if hf_compat.weight_int8pack_mm is None:
            raise UnsupportedModel("This torch has no weight-only product for int8.")
        self.codes, self.scale = codes, scale.reshape(-1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [m, in] to [m, out]."""
        # the scales are applied here, in float32: rounded to bfloat16 they would be off by up to 0.4 % each
        ones = torch.ones_like(self.scale, dtype=torch.bfloat16)
        return (hf_compat.weight_int8pack_mm(x.contiguous(), self.codes, ones).float() * self.scale).to(x.dtype)
