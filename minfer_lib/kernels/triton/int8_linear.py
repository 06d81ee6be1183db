"""A linear layer over int8 weights on a CUDA device: x @ (weight * scale).T + bias, with no float copy of the weights.

Invariant: a weight leaves the GPU's memory as one byte and becomes a float only in registers, or for many rows in a
workspace of fixed size. Sums are float32; the scale of an output feature, constant along its sum, is applied once, on
the finished sum. Every sum runs in a fixed order: equal inputs give equal bits.

A step of decoding reads every weight once and does two operations with it for each row: up to some 50 rows the reading
takes the time, and half the bytes could take half of it. Three ways to compute the same product, from few rows to many:

- `matvec`, 1 row: no matrix units; warps stream along the rows of the weight;
- `dot`: `tl.dot` with the weight as the *left* operand, which computes the product transposed;
- `dequantize`: arithmetic takes the time now, so slices of the weight are written out as floats and torch multiplies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ...errors import InvalidParameter

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError(
        "The int8 product on a CUDA device is a Triton kernel, and triton is not installed. torch for CUDA brings it "
        "on Linux; elsewhere `pip install triton`, or run the model on the CPU, which does not need it."
    ) from error

from .int8_products import dequantize_kernel, dot_kernel, matvec_kernel, sum_kernel

# TRITON_INTERPRET=1 at the import of triton: Python runs the kernels, on the CPU.
INTERPRETED: bool = triton.knobs.runtime.interpret
WORKSPACE_BYTES = 32 * 2**20  # of dequantised weights at a time, about half the L2 cache of an H200
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Plan:
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
def plan_product(m: int, n: int, k: int, dtype: torch.dtype, processors: int, hopper: bool) -> Plan:
    """How to compute x [m, k] times weight [n, k] on that many multiprocessors: from the shape alone, never by a clock.

    `hopper`: an H100 or H200, say: a matrix instruction and a copy engine of its own, 227 KB of shared memory. The
    numbers were the fastest of some hundred on an H200, over the layers of a 7B model; all others are as correct.
    """
    if m == 1:
        if n > 64 * processors:
            return Plan("matvec", block_n=8, block_k=512, warps=2)
        # Few rows of weights: more threads on each, or too few bytes are on their way at a time.
        return Plan("matvec", 1, 1, 1024, warps=1) if n > 8 * processors else Plan("matvec", 1, 1, 2048, warps=4)
    if m > 1024 or (m > 64 and dtype == torch.float32):
        return Plan("dequantize")
    if k % 16 != 0 and dtype != torch.float32:
        return Plan("dequantize")  # rows that start at odd addresses: no tile can be fetched but byte by byte
    if dtype == torch.float32:
        return Plan("dot", block_n=32, block_m=16, block_k=64)
    # With two warps Triton takes the matrix instruction of older GPUs, whose layout makes the conversion to floats
    # cheap; beyond 32 rows Hopper's own, which takes four warps, is faster all the same. In tiles of 256 rows too few
    # programs fit a multiprocessor for one to multiply while another converts, but each weight is converted less often.
    if m <= 16:
        plan, waves = Plan("dot", 32, 16, 128, warps=2, stages=4), 6
    elif m <= 32:
        plan, waves = Plan("dot", 64, 32, 128, warps=2), 6
    elif not hopper:
        plan, waves = Plan("dot", 64, 64, 64), 3
    elif m <= 64:
        plan, waves = Plan("dot", 64, 64, 128, copy_engine=True), 3
    elif m <= 384 or 512 < m <= 640:
        plan, waves = Plan("dot", 64, 128, 64, copy_engine=True), 3
    else:
        plan, waves = Plan("dot", 64, 256, 64, copy_engine=True), 2
    tiles = triton.cdiv(n, plan.block_n) * triton.cdiv(m, plan.block_m)
    # Too few tiles to keep every multiprocessor busy: share each one's sum among several, unless it is short.
    return replace(plan, splits=max(1, min(waves * processors // tiles, 8, k // 512)))


@functools.lru_cache
def _device(device: torch.device) -> tuple[int, bool]:
    """(multiprocessors, whether it is a Hopper)."""
    if INTERPRETED:
        return 1, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major == 9


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    plan: Plan | None = None,
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
        _launch(x, weight, scale, bias, out, plan or plan_product(m, n, k, x.dtype, *_device(x.device)))
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, plan: Plan
) -> None:
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
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, plan: Plan
) -> None:
    """The dot path, into `out`; with several splits through partial sums [splits, m, n] in float32."""
    (m, k), n = x.shape, weight.shape[0]
    k_per_split = max(1, triton.cdiv(triton.cdiv(k, plan.splits), plan.block_k)) * plan.block_k
    splits = max(1, triton.cdiv(k, k_per_split))
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else None
    copy_engine = plan.copy_engine and k % 16 == 0 and k > 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    x_in: Any = TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k]) if copy_engine else x
    w_in: Any = TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]) if copy_engine else weight
    # When Triton takes Hopper's own matrix instruction. What that needs would only slow the others down.
    hopper = _device(x.device)[1]
    asynchronous = hopper and x.dtype != torch.float32 and plan.warps % 4 == 0 and plan.block_n % 64 == 0
    # Triton's interpreter multiplies bfloat16 wrongly, without a word.
    dtype = torch.float32 if INTERPRETED and x.dtype == torch.bfloat16 else x.dtype
    dot_kernel[(triton.cdiv(n, plan.block_n) * triton.cdiv(m, plan.block_m), splits)](
        x_in, w_in, scale, bias, out if partial is None else partial, m, n, k, k_per_split,
        BLOCK_N=plan.block_n, BLOCK_M=plan.block_m, BLOCK_K=plan.block_k, MASK_K=k % plan.block_k != 0,
        HAS_BIAS=bias is not None, PARTIAL=partial is not None, DOT_DTYPE=TRITON_DTYPES[dtype], COPY_ENGINE=copy_engine,
        ASYNCHRONOUS=asynchronous, num_warps=plan.warps, num_stages=plan.stages,
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
    if x.dtype not in TRITON_DTYPES or weight.dtype != torch.int8 or scale.dtype != torch.float32:
        raise InvalidParameter(
            f"int8_linear got x {x.dtype}, weight {weight.dtype} and scale {scale.dtype}; it multiplies x in float16, "
            "bfloat16 or float32 by an int8 weight with float32 scales. Convert them first."
        )
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or scale.shape != weight.shape[:1]:
        raise InvalidParameter(
            f"int8_linear got x {tuple(x.shape)}, weight {tuple(weight.shape)} and scale {tuple(scale.shape)}; the "
            "shapes are [m, k], [n, k] and [n]. Flatten the leading dimensions of x into one."
        )
    if bias is not None and (bias.shape != scale.shape or not bias.is_floating_point()):
        raise InvalidParameter(
            f"int8_linear got a bias {tuple(bias.shape)} in {bias.dtype}; it takes {tuple(scale.shape)} in floats."
        )
    parts = [part for part in (weight, scale, bias) if part is not None]
    if not all(part.is_contiguous() for part in parts):
        raise InvalidParameter("int8_linear needs weight, scale and bias contiguous. Call .contiguous() on them once.")
    if any(part.device != x.device for part in parts) or not (x.is_cuda or INTERPRETED):
        devices = ", ".join(str(part.device) for part in (x, *parts))
        raise InvalidParameter(
            f"int8_linear got tensors on {devices}; it needs all of them on one CUDA device. Move them there, or use "
            "the products for the CPU."
        )
