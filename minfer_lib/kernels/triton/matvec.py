"""One row of x times a weight, on a CUDA device: what a step of a single request consists of.

Each weight is used once, so nothing counts but how fast weights come from memory. Tensor cores would help with nothing:
a program streams along a few rows of the weight, and its threads add up what they loaded themselves.

Invariant: no thread waits for another before its sums are finished: a thread loads just those numbers of x that meet
its own weights. Sums are float32 and run in a fixed order, so equal inputs give equal bits; nothing past the end of a
row or of the matrix is read. What comes next is done on the finished sums, in registers: scale, bias, SiLU times up,
the residual. The oracle is `kernels.reference_parts.product`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .device import INTERPRETED
from .fused_parts import silu
from .int8_products import _to_float32

TOO_MUCH = tl.constexpr(32896.0)  # what `_counted` adds to a code: 2**15 + 128


@dataclass(frozen=True)
class MatvecPlan:
    rows: int  # of the weight, which a program streams along side by side
    warps: int


def plan_matvec(n: int, int8: bool, gated: bool) -> MatvecPlan:
    """How to compute one row of x times a weight of n rows: from its shape alone.

    The numbers were the fastest on an H200, over the layers of a 7B model; all others are as correct. Where the weight
    has few rows, more threads share each, or too few bytes are on their way at once.
    """
    few = n < 4096
    if int8:
        return MatvecPlan(8, 8) if few else MatvecPlan(4, 2) if gated or n > 32768 else MatvecPlan(2, 2)
    return MatvecPlan(1, 2) if gated else MatvecPlan(4, 4) if few else MatvecPlan(2, 2)


@triton.jit
def _in_threads(products, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """Products that one thread holds side by side added up: [BLOCK_N, BLOCK_K] -> [BLOCK_N, BLOCK_K // VECTOR]."""
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR)), axis=2)


@triton.jit
def _finish(out_ptr, bias_ptr, sums, ups, ns, rows, n, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr):
    """Bias, gate and residual on finished sums [BLOCK_N], and the store."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + rows).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            ups += tl.load(bias_ptr + n + rows).to(tl.float32)
        sums = silu(sums) * ups
    if ADD:
        sums += tl.load(out_ptr + ns, mask=ns < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + ns, sums.to(out_ptr.dtype.element_ty), mask=ns < n)


@triton.jit
def float_matvec_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, n, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:  # fmt: skip
    """out[n] of a weight in floats; the next tile of it is on its way while one is added up.

    GATED: the weight has 2n rows, and out is silu(first half) * second half. ADD: out is added to. BLOCK_K is what all
    threads together load in one access of 16 bytes each, VECTOR numbers: so x [1, BLOCK_K] lies in the threads as a row
    of the weight does, and is loaded once for all rows.
    """
    ns, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    rows = tl.minimum(ns, n - 1).to(tl.int64)  # past the end the last row again, never stored; n * k may exceed 2**31
    w_tile = weight_ptr + rows[:, None] * k + ks
    up_tile = w_tile + tl.cast(n, tl.int64) * k if GATED else w_tile
    w = tl.load(w_tile, mask=ks < k, other=0.0, eviction_policy="evict_first")  # nobody will want it again
    if GATED:
        up = tl.load(up_tile, mask=ks < k, other=0.0, eviction_policy="evict_first")
    sums = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    for at in range(0, k, BLOCK_K):
        x = tl.load(x_ptr + at + ks, mask=ks < k - at, other=0.0).to(tl.float32)
        sums += _in_threads(w.to(tl.float32) * x, BLOCK_N, BLOCK_K, VECTOR)
        if GATED:
            ups += _in_threads(up.to(tl.float32) * x, BLOCK_N, BLOCK_K, VECTOR)
        later = at + BLOCK_K
        w = tl.load(w_tile + later, mask=ks < k - later, other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_tile + later, mask=ks < k - later, other=0.0, eviction_policy="evict_first")
    _finish(out_ptr, bias_ptr, tl.sum(sums, axis=1), tl.sum(ups, axis=1), ns, rows, n, HAS_BIAS, GATED, ADD)


@triton.jit
def _counted(codes):
    """int8 codes to float32 numbers TOO_MUCH + code, exact: one instruction for each, and one for four of them.

    From 2**15 to 2**16 the bits 8 to 15 of a float32 count in whole numbers: the code with its sign bit turned, which
    is code + 128, goes there by a permutation of bytes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 turned;
        xor.b32 turned, $4, 0x80808080;
        prmt.b32 $0, turned, 0x47000000, 0x7404;
        prmt.b32 $1, turned, 0x47000000, 0x7414;
        prmt.b32 $2, turned, 0x47000000, 0x7424;
        prmt.b32 $3, turned, 0x47000000, 0x7434;
        }""", "=r,=r,=r,=r,r", [codes], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["eighths"])
def int8_matvec_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, n, eighths,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COUNTED: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:  # fmt: skip
    """out[n] of a weight in int8; GATED and ADD as above. COUNTED: by `_counted`, in the registers of an NVIDIA GPU.

    An H200 brings a byte in the time of some 6 instructions, so what counts is the arithmetic for each weight. Two will
    do: one makes it a float that is too large by a constant, one multiplies and adds. What is too much, the constant
    times the sum of x, comes off each thread's sums at the end.

    A thread holds 8 neighbouring weights of each row, and so meets the same 8 numbers of x in each, which are loaded
    and converted once. That is what `eighths` is for: k = 8 * eighths is for Triton a multiple of 8 and no more, else
    it would load 16 weights at a time, and x would lie in other threads than the weights it meets. The tile is not
    carried from one round of the loop to the next: Triton would take it apart and put it together, four instructions a
    weight.
    """
    k = eighths * 8
    ns, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    rows = tl.minimum(ns, n - 1).to(tl.int64)
    w_tile = weight_ptr + rows[:, None] * k + ks
    up_tile = w_tile + tl.cast(n, tl.int64) * k if GATED else w_tile
    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    sum_of_x = tl.zeros((1, BLOCK_K // 8), tl.float32)
    for at in range(0, k, BLOCK_K):
        inside = ks < k - at
        w = tl.load(w_tile + at, mask=inside, other=0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_tile + at, mask=inside, other=0, eviction_policy="evict_first")
        x = tl.load(x_ptr + at + ks, mask=inside, other=0.0).to(tl.float32)
        sums += _in_threads((_counted(w) if COUNTED else _to_float32(w)) * x, BLOCK_N, BLOCK_K, 8)
        if GATED:
            ups += _in_threads((_counted(up) if COUNTED else _to_float32(up)) * x, BLOCK_N, BLOCK_K, 8)
        sum_of_x += _in_threads(x, 1, BLOCK_K, 8)
    if COUNTED:  # before the sums of threads meet: the smaller the numbers, the less is lost
        sums -= sum_of_x * TOO_MUCH
        ups -= sum_of_x * TOO_MUCH
    out, up_out = tl.sum(sums, axis=1) * tl.load(scale_ptr + rows), tl.sum(ups, axis=1)
    if GATED:
        up_out *= tl.load(scale_ptr + n + rows)
    _finish(out_ptr, bias_ptr, out, up_out, ns, rows, n, HAS_BIAS, GATED, ADD)


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias -> [1, n], or gated [1, n / 2], in the dtype of x.

    x [1, k] float16, bfloat16 or float32; weight [n, k] in the dtype of x, or int8 codes (k a multiple of 8) with their
    scale [n] in float32; bias [n] in any floats, or None. gated: silu(first half of the outputs) * second half. add_to:
    the residual, which the result is added to in place, and which is returned. All contiguous and on one device.

    int8 codes are exact. With 16-bit x the sums of a thread are rounded as those of numbers some 500 times as large:
    less than what rounding the result costs, unless x has one sign throughout and the result is small for its size.
    """
    int8 = weight.dtype == torch.int8
    n, k = len(weight) // (2 if gated else 1), weight.shape[1]
    assert x.shape == (1, k) and (scale is None) == (not int8) and not (int8 and k % 8)
    assert all(part is None or part.shape == (len(weight),) for part in (scale, bias))
    assert all(part is None or part.is_contiguous() for part in (x, weight, scale, bias, add_to))
    assert add_to is None or add_to.shape == (1, n)
    out = x.new_empty(1, n) if add_to is None else add_to
    plan = plan_matvec(len(weight), int8, gated)
    vector = 8 if int8 else 16 // weight.element_size()
    options = dict(BLOCK_N=plan.rows, BLOCK_K=32 * plan.warps * vector, num_warps=plan.warps)
    options |= dict(HAS_BIAS=bias is not None, GATED=gated, ADD=add_to is not None)
    grid = (triton.cdiv(n, plan.rows),)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if int8:
            # float32 has no bits to spare for what is too much, nor has AMD that instruction, or the interpreter any.
            counted = x.dtype != torch.float32 and torch.version.hip is None and not INTERPRETED
            int8_matvec_kernel[grid](x, weight, scale, bias, out, n, k // 8, COUNTED=counted, **options)
        else:
            float_matvec_kernel[grid](x, weight, bias, out, n, k, VECTOR=vector, **options)
    return out
