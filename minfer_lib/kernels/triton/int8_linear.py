"""A linear layer over int8 weights on a CUDA device: x @ (weight * scale).T + bias, with no float copy of the weights.

Invariant: a weight leaves the GPU's memory as one byte and becomes a float only in registers, or for many rows in a
workspace of fixed size. Sums are float32; the scale of an output feature, constant along its sum, is applied once, on
the finished sum. Every sum runs in a fixed order: equal inputs give equal bits.

A step of decoding reads every weight once and does two operations with it for each row: up to some 50 rows the reading
takes the time, and half the bytes could take half of it. Three ways to compute the same product, from few rows to many:

- `matvec`, 1 row: no tensor cores; warps stream along the rows of the weight;
- `dot`: `tl.dot` with the weight as the *left* operand, which computes the product transposed;
- `dequantize`: arithmetic takes the time now, so slices of the weight are written out as floats and torch multiplies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import InvalidParameter
from .device import GPU, TRITON_DTYPES, dot_dtype, gpu_of
from .int8_products import dequantize_kernel, dot_kernel, matvec_kernel, sum_kernel

WORKSPACE_BYTES = 32 * 2**20  # of dequantised weights at a time, about half the L2 cache of an H200


@dataclass(frozen=True)
class ProductPlan:
    """How a product is cut up: a program has `block_n` output features of `block_m` rows, and walks k by `block_k`."""

    path: Literal["matvec", "dot", "dequantize"]
    block_n: int = 64
    block_m: int = 16
    block_k: int = 128
    splits: int = 1  # programs that share one sum over k, each a contiguous part of it
    warps: int = 4
    stages: int = 3  # tiles along k in flight
    copy_engine: bool = False  # let Hopper's copy engine (TMA) fetch the tiles instead of the threads


def dequantize(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """weight [n, k] int8 times scale [n], written to `out` [n, k] in its dtype, and returned; all three contiguous."""
    n, k = weight.shape
    dequantize_kernel[(triton.cdiv(n, 4), triton.cdiv(k, 1024))](weight, scale, out, n, k, ROWS=4, BLOCK_K=1024)
    return out


@functools.lru_cache(maxsize=4096)
def plan_product(m: int, n: int, k: int, dtype: torch.dtype, gpu: GPU) -> ProductPlan:
    """How to compute x [m, k] times weight [n, k]: from the shape and the GPU alone, never by a clock.

    The numbers were the fastest of some hundred on an H200, over the layers of a 7B model; all others are as correct.
    """
    if m == 1:
        if n > 64 * gpu.sms:
            return ProductPlan("matvec", block_n=8, block_k=512, warps=2)
        # Few rows of weights: more threads on each, or too few bytes are on their way at a time.
        block_k, warps = (1024, 1) if n > 8 * gpu.sms else (2048, 4)
        return ProductPlan("matvec", block_n=1, block_k=block_k, warps=warps)
    if m > 1024 or (m > 64 and dtype == torch.float32):
        return ProductPlan("dequantize")
    if k % 16 != 0 and dtype != torch.float32:
        return ProductPlan("dequantize")  # rows that start at odd addresses: no tile can be fetched but byte by byte
    if dtype == torch.float32:
        return ProductPlan("dot", block_n=32, block_m=16, block_k=64)
    # With two warps Triton takes the matrix instruction of older GPUs, whose layout makes the conversion to floats
    # cheap; beyond 32 rows Hopper's own, which takes four warps, is faster all the same. In tiles of 256 rows too few
    # programs fit an SM for one to multiply while another converts, but each weight is converted less often.
    if m <= 16:
        plan, waves = ProductPlan("dot", 32, 16, 128, warps=2, stages=4), 6
    elif m <= 32:
        plan, waves = ProductPlan("dot", 64, 32, 128, warps=2), 6
    elif not gpu.hopper:
        plan, waves = ProductPlan("dot", 64, 64, 64), 3
    elif m <= 64:
        plan, waves = ProductPlan("dot", 64, 64, 128, copy_engine=True), 3
    elif m <= 384 or 512 < m <= 640:
        plan, waves = ProductPlan("dot", 64, 128, 64, copy_engine=True), 3
    else:
        plan, waves = ProductPlan("dot", 64, 256, 64, copy_engine=True), 2
    tiles = triton.cdiv(n, plan.block_n) * triton.cdiv(m, plan.block_m)
    # Too few tiles to keep every SM busy: share each one's sum among several, unless it is short.
    return replace(plan, splits=max(1, min(waves * gpu.sms // tiles, 8, k // 512)))


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    plan: ProductPlan | None = None,
) -> torch.Tensor:
    """x @ (weight * scale[:, None]).T + bias, without gradients.

    x [m, k] float16, bfloat16 or float32, of any strides, m may be 0; weight [n, k] int8, contiguous; scale [n]
    float32, the step of each output feature's grid; bias [n] in floats, or None. All on one CUDA device (on the CPU
    where Triton interprets its kernels). Returns [m, n] in the dtype of x. Sums are float32; where the plan is to
    dequantize, each weight times its scale is rounded to the dtype of x first, as in a layer that is kept in it.

    `plan` replaces what `plan_product` says. Raises InvalidParameter for any other dtype, shape or device.

    Source: weight-only int8 with the scale behind the sum, as in Frantar et al. 2024 (MARLIN, arXiv:2408.11743).
    """
    _check(x, weight, scale, bias)
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty(m, n)
    if m == 0 or n == 0:
        return out
    x = x.detach().contiguous()
    if x.data_ptr() % 16 != 0:  # a part of something else; the copy engine wants rows at multiples of 16 bytes
        x = x.clone()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _launch(x, weight, scale, bias, out, plan or plan_product(m, n, k, x.dtype, gpu_of(x.device)))
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    plan: ProductPlan,
) -> None:  # fmt: skip
    """Run a plan into `out` [m, n]; everything contiguous and checked."""
    k, n = x.shape[1], weight.shape[0]
    if plan.path == "dequantize":
        _dequantize_and_multiply(x, weight, scale, bias, out)
    elif plan.path == "dot":
        _dot(x, weight, scale, bias, out, plan)
    else:
        matvec_kernel[(triton.cdiv(n, plan.block_n),)](
            x, weight, scale, bias, out, n, k, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
            MASK_K=k % plan.block_k != 0, HAS_BIAS=bias is not None, num_warps=plan.warps,
        )  # fmt: skip


def _dot(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    plan: ProductPlan,
) -> None:  # fmt: skip
    """The dot path, into `out`; with several splits through partial sums [splits, m, n] in float32."""
    (m, k), n = x.shape, weight.shape[0]
    k_per_split = max(1, triton.cdiv(triton.cdiv(k, plan.splits), plan.block_k)) * plan.block_k
    splits = max(1, triton.cdiv(k, k_per_split))
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else None
    copy_engine = plan.copy_engine and k % 16 == 0 and k > 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    x_in: Any = TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k]) if copy_engine else x
    w_in: Any = TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]) if copy_engine else weight
    dot_kernel[(triton.cdiv(n, plan.block_n) * triton.cdiv(m, plan.block_m), splits)](
        x_in, w_in, scale, bias, out if partial is None else partial, m, n, k, k_per_split,
        BLOCK_N=plan.block_n, BLOCK_M=plan.block_m, BLOCK_K=plan.block_k, MASK_K=k % plan.block_k != 0,
        HAS_BIAS=bias is not None, PARTIAL=partial is not None, DOT_DTYPE=dot_dtype(x.dtype), COPY_ENGINE=copy_engine,
        ASYNCHRONOUS=gpu_of(x.device).multiplies_asynchronously(x.dtype, plan.block_n, plan.warps),
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if partial is not None:
        sum_kernel[(triton.cdiv(n, 256), m)](
            partial, scale, bias, out, m, n, SPLITS=splits, BLOCK=256, HAS_BIAS=bias is not None, num_warps=2
        )


@torch.no_grad()
def _dequantize_and_multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """The dequantize path: slice by slice of output features, so that no more than WORKSPACE_BYTES stand in floats."""
    n, k = weight.shape
    most = max(1, WORKSPACE_BYTES // max(1, k * x.element_size()))
    most = most // 128 * 128 or most  # slices that start at odd addresses send cuBLAS down a slow path
    rows = min(n, most, triton.cdiv(triton.cdiv(n, triton.cdiv(n, most)), 128) * 128)  # as equal as that allows
    workspace = x.new_empty(rows, k)
    for first in range(0, n, rows):
        last = min(first + rows, n)
        floats = dequantize(weight[first:last], scale[first:last], workspace[: last - first])
        if bias is None:
            torch.mm(x, floats.T, out=out[:, first:last])
        else:
            torch.addmm(bias[first:last].to(x.dtype), x, floats.T, out=out[:, first:last])


def _check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise InvalidParameter for what the kernels would read wrongly or beyond its end."""
    rest = [weight, scale] if bias is None else [weight, scale, bias]
    fits = (
        x.dtype in TRITON_DTYPES and weight.dtype == torch.int8 and scale.dtype == torch.float32
        and x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]
        and all(part.shape == weight.shape[:1] for part in rest[1:])
        and all(part.is_contiguous() and part.device == x.device for part in rest)
    )  # fmt: skip
    if not fits:
        got = ", ".join(f"{list(part.shape)} {part.dtype} on {part.device}" for part in (x, *rest))
        raise InvalidParameter(
            f"int8_linear got {got}; it takes x [m, k] in floats, weight [n, k] in int8, scale [n] in float32 and bias "
            "[n] or None, contiguous but for x, on one device."
        )
