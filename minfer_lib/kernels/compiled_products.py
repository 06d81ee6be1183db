"""Products on a CPU by our own kernel in C (products.c): int8 weights of any number of rows, float weights of few.

Invariant: scratch memory belongs to the call, so that any number of threads may call at once; a row's result has the
same bits alone and in any company.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

import torch

from . import compiled

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}  # of x and of weights, which may be int8 too
CALL = struct.Struct("@7P3q4i")  # `call` in products.c: 7 pointers, 3 sizes, kinds of x and weight, gated, adds


def compiled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    sums: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `products.product`: x [m, k] -> [m, n], or gated [m, n / 2], in x's dtype, float32 or bfloat16.

    weight [n, k], contiguous, in float32, bfloat16, or int8 codes with their scale [n] in float32; bias [n]. sums int32
    [n], 128 x the sum of each row of codes: x becomes int8 too, each row with a scale of its own (None: it stays as it
    is), and is divided by smoothing [k] first.
    """
    m, (n, k) = len(x), weight.shape
    width = n // 2 if gated else n
    x = x.contiguous()
    if bias is not None:
        bias = bias.to(torch.float32 if scale is not None else weight.dtype)
    out = torch.empty(m, width, dtype=x.dtype) if add_to is None else add_to
    tensors = (x, out, weight, sums, scale, bias, smoothing)
    code = c_function()(
        CALL.pack(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors), m, n, k, KINDS[x.dtype],
            KINDS[weight.dtype], gated, add_to is not None,
        )
    )  # fmt: skip
    if code:
        raise MemoryError("none is left for the rows of a product")
    return out


@cache
def c_function() -> Callable[[bytes], int]:
    """The kernel. Raises `compiled.CannotCompile` with the reason."""
    return compiled.library("products").product
