"""A linear layer over int8 weights on a CUDA device: x @ (weight * scale).T + bias, with no dequantised copy of the weights.

Invariant: a weight leaves the GPU's memory as one byte and becomes a float only in registers (or, for many rows, in a
workspace small enough to stay in the L2 cache). Products are summed in float32; the scale of an output feature, constant
along its sum, is applied once on the finished sum. The sums run in a fixed order, so equal inputs give equal bits.

One step of decoding reads every weight once and does two operations with each for every row: up to about 100 rows the
reading is what takes the time, and half the bytes are half the time. Three ways to compute the same product:

- `matvec`, 1 row: no matrix units, whole warps stream along the rows of the weight;
- `dot`, a few rows and up: `tl.dot` with the weight as the *left* operand, the product transposed;
- `dequantize`, many rows: the arithmetic takes the time now, so a slice of the weights is written out and torch multiplies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from minfer_lib.errors import InvalidParameter

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "The int8 product on a CUDA device is a Triton kernel, and triton is not installed. torch's builds for CUDA bring it on "
        "Linux; elsewhere install it with `pip install triton`, or run the model on the CPU, which does not need it."
    ) from error

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 before the import: kernels run as Python, on the CPU
WORKSPACE_BYTES = 16 * 2**20  # of dequantised weights at a time: well inside the L2 cache of a data-centre GPU (40 to 60 MB)
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Plan:
    """How one product is cut up. `block_n` output features by `block_m` rows are one program's; it walks k by `block_k`."""

    path: Literal["matvec", "dot", "dequantize"]
    block_n: int = 64
    block_m: int = 16
    block_k: int = 128
    splits: int = 1  # programs that share one sum over k, each a contiguous part of it
    warps: int = 4
    stages: int = 4  # tiles of k in flight


@triton.jit
def _to_float32(codes):
    """int8 to float32 by bit operations: the instruction for it is so slow on an H200 that it, not memory, sets the pace.

    The float32 numbers from 2**23 to 2**24 are the whole ones, so its last bits are a counter: put code + 128 (the code
    with its sign bit turned) there, and take 2**23 + 128 off. Exact.
    """
    return (codes.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _matvec_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, n, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[n] for one row: every thread keeps its own partial sums along k, added up across threads once, at the end."""
    ns, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows = tl.minimum(ns, n - 1).to(tl.int64)  # past the end: the last row again, never stored; n * k may exceed 2**31
    w_tile = weight_ptr + rows[:, None] * k + ks[None, :]  # [BLOCK_N, BLOCK_K]
    # x gets the shape of the weight's tile too, every row the same: so each thread loads, from the L1 cache, just the
    # values that its own weights meet, and no thread waits for another.
    x_tile = x_ptr + (rows * 0)[:, None] + ks[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K // 16), tl.float32)
    for at in range(0, k, BLOCK_K):
        inside = (ks < k - at)[None, :] if MASK_K else None
        w = tl.load(w_tile + at, mask=inside)
        x = tl.load(x_tile + at, mask=inside, other=0.0 if MASK_K else None)
        # A thread loads 16 weights at a time and folds their products into one sum: few registers, so many loads in flight.
        sums += tl.sum(tl.reshape(_to_float32(w) * x.to(tl.float32), (BLOCK_N, BLOCK_K // 16, 16)), axis=2)
    out = tl.sum(sums, axis=1) * tl.load(scale_ptr + rows)
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    tl.store(out_ptr + ns, out.to(out_ptr.dtype.element_ty), mask=ns < n)


@triton.jit(do_not_specialize=["m"])
def _dot_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, m, n, k, k_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTIAL: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """out[m, n], or with PARTIAL one split's unscaled share of it, computed as (weight @ x.T).T.

    The matrix units of Hopper take 64 rows of the left operand at a time but as few as 8 columns of the right one, and
    the left one straight from registers. So the weight stands left: its bytes become floats in registers and are
    multiplied there, and a batch of 3 rows is padded to 16 columns, not to 64 rows.
    """
    # Neighbouring programs share a tile of the weight: the first reads it from memory, the others find it in the cache.
    row_tiles = tl.cdiv(m, BLOCK_M)
    ns = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    ms = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    split = tl.program_id(1)
    rows_n = tl.minimum(ns, n - 1).to(tl.int64)  # past the end: the last row again, never stored; n * k may exceed 2**31
    rows_m = tl.minimum(ms, m - 1).to(tl.int64)
    w_tile = weight_ptr + rows_n[:, None] * k + ks[None, :]  # [BLOCK_N, BLOCK_K]
    x_tile = x_ptr + rows_m[None, :] * k + ks[:, None]  # [BLOCK_K, BLOCK_M], x transposed

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(split * k_per_split, tl.minimum((split + 1) * k_per_split, k), BLOCK_K):
        inside = ks < k - at if MASK_K else None
        w = tl.load(w_tile + at, mask=inside[None, :] if MASK_K else None)
        x = tl.load(x_tile + at, mask=inside[:, None] if MASK_K else None, other=0.0 if MASK_K else None)
        # An int8 code is exact in each of these dtypes. "ieee" keeps float32 from being rounded to tf32.
        sums = tl.dot(w.to(DOT_DTYPE), x.to(DOT_DTYPE), sums, input_precision="ieee")

    if not PARTIAL:
        sums *= tl.load(scale_ptr + rows_n)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + rows_n).to(tl.float32)[:, None]
    out_tile = out_ptr + (split * m + ms).to(tl.int64)[None, :] * n + ns[:, None]  # [BLOCK_N, BLOCK_M], out transposed
    tl.store(out_tile, sums.to(out_ptr.dtype.element_ty), mask=(ns < n)[:, None] & (ms < m)[None, :])


@triton.jit(do_not_specialize=["m"])
def _sum_kernel(
    partial_ptr, scale_ptr, bias_ptr, out_ptr, m, n,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[m, n] from partial[splits, m, n], always first split first: atomic additions would come in any order."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(partial_ptr + (split * m + row) * n + columns, mask=inside, other=0.0)
    sums *= tl.load(scale_ptr + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + columns, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(weight_ptr, scale_ptr, out_ptr, k, BLOCK_K: tl.constexpr):
    """out[row, :] = weight[row, :] * scale[row], one program a row and a stretch of it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(weight_ptr + row * k + columns, mask=columns < k, other=0).to(tl.float32)
    w *= tl.load(scale_ptr + row)
    tl.store(out_ptr + row * k + columns, w.to(out_ptr.dtype.element_ty), mask=columns < k)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """weight [n, k] int8 times scale [n], written to `out` [n, k] (its dtype) and returned; all three contiguous."""
    n, k = weight.shape
    _dequantize_kernel[(n, triton.cdiv(k, 2048))](weight, scale, out, k, BLOCK_K=2048)
    return out


def plan_product(m: int, n: int, k: int, dtype: torch.dtype, processors: int) -> Plan:
    """How to compute x [m, k] times weight [n, k] on a GPU of that many multiprocessors: by shape alone, not by a clock."""
    if m == 1:
        return Plan("matvec", block_n=4, block_k=512, warps=4) if n <= 64 * processors else Plan("matvec", 8, 1, 512, 1, 2)
    if m > 256 or (dtype == torch.float32 and m > 64):
        return Plan("dequantize")
    if dtype == torch.float32:
        return Plan("dot", block_n=32, block_m=16, block_k=64, stages=3)
    block_m = min(max(16, triton.next_power_of_2(m)), 128)
    block_n, block_k = 64, 128
    tiles = triton.cdiv(n, block_n) * triton.cdiv(m, block_m)
    splits = max(1, min(2 * processors // tiles, k // (4 * block_k)))
    return Plan("dot", block_n, block_m, block_k, splits)


@functools.lru_cache
def _processors(device: torch.device) -> int:
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    plan: Plan | None = None,
) -> torch.Tensor:
    """x @ (weight * scale[:, None]).T + bias, without gradients.

    x [m, k] float16, bfloat16 or float32, of any strides, m may be 0; weight [n, k] int8, contiguous; scale [n] float32,
    the step of each output feature's grid; bias [n] or None. All on one CUDA device (on the CPU where Triton interprets its
    kernels). Returns [m, n] in the dtype of x. Sums are float32; with more rows than the dot path takes, each weight
    is rounded to the dtype of x once it is scaled, as a layer kept in that dtype would have it.

    `plan` overrides `plan_product`. Raises InvalidParameter for a dtype, shape or device other than these.

    Source: weight-only int8 with the scale behind the product, as in Frantar et al. 2024 (Marlin, arXiv:2408.11743).
    """
    _check(x, weight, scale, bias)
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty(m, n)
    if m == 0 or n == 0:
        return out
    x = x.detach().contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _launch(x, weight, scale, bias, out, plan or plan_product(m, n, k, x.dtype, _processors(x.device)))
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
        _matvec_kernel[(triton.cdiv(n, plan.block_n),)](
            x, weight, scale, bias, out, n, k, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
            MASK_K=k % plan.block_k != 0, HAS_BIAS=bias is not None, num_warps=plan.warps,
        )  # fmt: skip


def _dot(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, plan: Plan
) -> None:
    """The dot path, into `out`; with several splits through partial sums [splits, m, n] in float32."""
    (m, k), n = x.shape, weight.shape[0]
    k_per_split = triton.cdiv(triton.cdiv(k, plan.splits), plan.block_k) * plan.block_k
    splits = max(1, triton.cdiv(k, k_per_split)) if k else 1
    partial = splits > 1
    target = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if partial else out
    grid = (triton.cdiv(n, plan.block_n) * triton.cdiv(m, plan.block_m), splits)
    # The interpreter multiplies bfloat16 wrongly, without a word.
    dtype = torch.float32 if INTERPRETED and x.dtype == torch.bfloat16 else x.dtype
    _dot_kernel[grid](
        x, weight, scale, bias, target, m, n, k, k_per_split,
        BLOCK_N=plan.block_n, BLOCK_M=plan.block_m, BLOCK_K=plan.block_k, MASK_K=k % plan.block_k != 0,
        HAS_BIAS=bias is not None, PARTIAL=partial, DOT_DTYPE=TRITON_DTYPES[dtype],
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if partial:
        _sum_kernel[(triton.cdiv(n, 256), m)](
            target, scale, bias, out, m, n, SPLITS=splits, BLOCK=256, HAS_BIAS=bias is not None, num_warps=2
        )


@torch.no_grad()
def _dequantize_and_multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """The dequantize path: slice by slice of output features, so that no more than WORKSPACE_BYTES stand in floats."""
    n, k = weight.shape
    rows = max(1, min(n, WORKSPACE_BYTES // max(1, k * x.element_size())))
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
            f"int8_linear got x {x.dtype}, weight {weight.dtype} and scale {scale.dtype}; it multiplies x in float16, bfloat16 "
            "or float32 by an int8 weight with float32 scales. Convert them first."
        )
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or scale.shape != weight.shape[:1]:
        raise InvalidParameter(
            f"int8_linear got x {tuple(x.shape)}, weight {tuple(weight.shape)} and scale {tuple(scale.shape)}; the shapes are "
            "[m, k], [n, k] and [n]. Flatten the leading dimensions of x into one."
        )
    if bias is not None and (bias.shape != scale.shape or not bias.is_floating_point()):
        raise InvalidParameter(
            f"int8_linear got a bias {tuple(bias.shape)} in {bias.dtype}; it takes one of {tuple(scale.shape)}, in floats."
        )
    parts = [part for part in (weight, scale, bias) if part is not None]
    if not all(part.is_contiguous() for part in parts):
        raise InvalidParameter("int8_linear needs weight, scale and bias contiguous. Call .contiguous() on them once.")
    if any(part.device != x.device for part in parts) or not (x.is_cuda or INTERPRETED):
        devices = ", ".join(str(part.device) for part in (x, *parts))
        raise InvalidParameter(
            f"int8_linear got tensors on {devices}; it needs all of them on one CUDA device. Move them there, or use the "
            "products for the CPU."
        )
