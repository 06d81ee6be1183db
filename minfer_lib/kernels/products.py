"""x times a weight, as a decoder layer needs it: with bias, with SiLU, or added to the residual stream, in one kernel.

Invariant: which kernel computes it follows from shapes, dtypes and the device alone, never from a clock, and all of
them compute the same up to rounding. What no kernel of ours is faster at is left to torch, and on a CPU all of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .reference_parts import silu_mul

SMS = 132  # streaming multiprocessors of an H100 or H200, which the plans were found on


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, *,
    gated: bool = False, add_to: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """y = x W^T + bias [m, n], in the dtype of x.

    x [m, k], contiguous; weight [n, k] in the dtype of x, or int8 with scale float32 [n]; bias [n] or None. gated: silu
    of the first half of y times the second, [m, n / 2]. add_to [m, n]: y is added to it in place, and it is returned.
    """
    if x.is_cuda and (y := _ours(x, weight, scale, bias, gated, add_to)) is not None:
        return y
    if weight.dtype == torch.int8:
        y = _int8(x, weight, scale, bias)
    elif add_to is not None and bias is None and not gated:
        return add_to.addmm_(x, weight.T)
    else:
        y = F.linear(x, weight, bias)
    if gated:
        y = _silu_mul(y)
    return y if add_to is None else add_to.add_(y)


def _ours(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, gated: bool,
    add_to: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """The product by a kernel for few rows; None where there is none, or torch's is as fast."""
    plan = plan_product(len(x), *weight.shape, weight.dtype, gated)
    if plan is None:
        return None
    with torch.cuda.device_of(x):
        if len(x) == 1:
            from .triton.matvec import matvec

            return matvec(x, weight, scale, bias, gated=gated, add_to=add_to, plan=plan)
        from .triton.few_rows import few_rows

        return few_rows(x, weight, bias, gated=gated, add_to=add_to, plan=plan)


def plan_product(m: int, n: int, k: int, dtype: torch.dtype, gated: bool) -> tuple[int, ...] | None:
    """How a kernel of ours cuts the product of m rows and a weight [n, k], as measured on an H200; None for torch's."""
    few = n < 4096  # few rows of weights: more threads on each, or too few bytes are on their way at a time
    if m == 1 and dtype == torch.int8:
        return None if k % 8 else (8, 8) if few else (4, 2) if gated or n > 32768 else (2, 2)
    if m == 1:
        return None if k * dtype.itemsize % 16 else (1, 2) if gated else (4, 4) if few else (2, 2)
    # float32: the tensor cores would round to tf32
    if dtype in (torch.int8, torch.float32) or m > 64 or k % 128:
        return None
    if m > 16:
        return (64, 64, 4, 6, 1) if gated else None
    if gated:
        return (32, 128, 2, 4, 1)
    if few:
        return (32, 128, 2, 5, max(1, min(round(2 * SMS / -(-n // 32)), k // 512)))
    return (64, 128, 4, 4, 1) if n > 32768 else None


def _int8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.is_cuda:
        from .triton.int8_linear import int8_linear

        return int8_linear(x, weight, scale, bias)
    y = (x.float() @ weight.float().T) * scale
    return (y if bias is None else y + bias).to(x.dtype)


def _silu_mul(y: torch.Tensor) -> torch.Tensor:
    if y.is_cuda:
        from .triton import fused_parts

        return fused_parts.silu_mul(y)
    return silu_mul(y)
