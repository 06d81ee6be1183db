"""The products of a fused decoder, x @ weight.T: by whichever kernel is fastest for that many rows.

A step is little but products, and how one is best computed depends on the number of rows: one row is a matter of
reading the weight, many are one of arithmetic, and between them lies what tensor cores can do while the weight is read.
What follows a product is part of it, where that saves a kernel: SiLU times up, and adding to the residual.

Invariant: which kernel it is follows from shape, dtype and device alone, never from a clock, and all of them compute
the same but for rounding.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F

from . import compiled_parts, reference_parts


def product(
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
    """x @ weight.T + bias -> [m, n], or gated [m, n / 2], in the dtype of x.

    x [m, k] in floats; weight [n, k] in the dtype of x, or int8 codes with their scale [n] in float32, the step of each
    output's grid; bias [n] or None. gated: silu(first half of the outputs) * second half. add_to: the residual [m, n],
    contiguous, which the result is added to in place, and which is returned. All on one device; nothing waits for it.
    sums, smoothing: as of `compiled_products.compiled_product`, for int8 weights on a CPU with a C compiler.
    """
    if x.is_cuda:
        return _on_gpu(x.contiguous(), weight, scale, bias, gated, add_to)
    if compiled_parts.why_not():
        return reference_parts.product(x, weight, scale, bias, gated=gated, add_to=add_to)
    return compiled_parts.product(x, weight, scale, bias, sums=sums, smoothing=smoothing, gated=gated, add_to=add_to)


@functools.lru_cache(maxsize=4096)
def choose(
    m: int, n: int, k: int, dtype: torch.dtype, int8: bool, gated: bool
) -> Literal["matvec", "few_rows", "int8_linear", "torch"]:
    """Which kernel computes x [m, k] in `dtype` times weight [n, k]: what was the fastest on an H200."""
    if int8:
        return "matvec" if m == 1 and k % 8 == 0 else "int8_linear"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "torch"
    if m == 1:
        return (
            "matvec" if k % 16 == 0 else "torch"
        )  # else rows start at odd addresses, and nothing is read in one piece
    # The matrix units would round float32 to tf32. From 17 rows on ours gains only by what it spares after the product.
    if dtype == torch.float32 or not 2 <= m <= 64 or k % 128 != 0:
        return "torch"
    if m > 16:
        return "few_rows" if gated else "torch"
    return "few_rows" if gated or n < 4096 or n > 32768 else "torch"


def _on_gpu(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, gated: bool,
    add_to: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    from .triton import few_rows, fused_parts, int8_linear, matvec  # only here is Triton needed

    n, k = weight.shape
    way = choose(len(x), n, k, x.dtype, scale is not None, gated)
    if way == "matvec":
        return matvec.matvec(x, weight, scale=scale, bias=bias, gated=gated, add_to=add_to)
    if way == "few_rows":
        return few_rows.few_rows(x, weight, bias=bias, gated=gated, add_to=add_to)
    if way == "torch" and add_to is not None and bias is None and not gated:
        return add_to.addmm_(x, weight.T)
    y = F.linear(x, weight, bias) if way == "torch" else int8_linear.int8_linear(x, weight, scale, bias)
    y = fused_parts.silu_mul(y) if gated else y
    return y if add_to is None else add_to.add_(y)
