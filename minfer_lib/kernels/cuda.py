"""Weight-only products on a GPU: our Triton kernel where Triton is installed, plain torch elsewhere.

Invariant: nothing of Triton is imported before a tensor on a GPU asks for a product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

SLICE = 2**22  # weights that are turned into floats at a time without Triton


@cache
def triton_product() -> Any | None:
    """The Triton kernel's function; None where Triton is not installed (Windows, AMD builds without it)."""
    try:
        from .triton.int8_linear import int8_linear
    except ImportError:
        return None
    return int8_linear


def weight_only_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [m, in] with codes [out, in] and scales [out]: [m, out] in x's dtype, without a whole dequantised matrix."""
    product = triton_product()
    if product is not None:
        return product(x, weight, scale, bias)
    rows = max(1, SLICE // max(1, weight.shape[1]))
    parts = [
        linear(x, (codes.float() * scales[:, None]).to(x.dtype))
        for codes, scales in zip(weight.split(rows), scale.split(rows), strict=True)
    ]
    y = torch.cat(parts, -1) if parts else x.new_empty(len(x), 0)
    return y if bias is None else y + bias.to(y.dtype)
