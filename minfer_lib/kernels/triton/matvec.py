"""One row of numbers times a matrix: the product of a decode step with one request, in Triton.

It reads every weight once and uses it once, so that the memory decides, and a kernel has to ask for enough bytes at a
time. A program streams along a few rows of the weight, the next tile on its way while one is summed up, and adds no
step of its own between the loads: all threads together load one row segment in 16-byte accesses, so that x is laid out
as a row of the weight is, and no thread waits for another before the end.

Invariant: sums are float32 and run in a fixed order, so equal inputs give equal bits; what lies past the end of a row
or of the matrix is not read, or multiplied by zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import INTERPRETED
from .int8_products import _to_float32

COUNTED_FROM = 32896.0  # what `_counted` adds to each code


@triton.jit
def _silu(gate):
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _folded(products, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """The products that one thread holds side by side, added up: [BLOCK_N, BLOCK_K // VECTOR]."""
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR)), axis=2)


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, n, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr,
) -> None:  # fmt: skip
    """out[n] of one row of x with a weight in floats.

    GATED: the weight has 2 n rows, and out is silu(first half) * second half. ADD: out is added to.
    """
    ns, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    rows = tl.minimum(ns, n - 1).to(tl.int64)  # past the end the last row again, never stored
    tile = weight_ptr + rows[:, None] * k + ks
    up_tile = tile + n.to(tl.int64) * k if GATED else tile
    w = tl.load(tile, mask=ks < k, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = tl.load(up_tile, mask=ks < k, other=0.0, eviction_policy="evict_first")
    sums = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    for at in range(0, k, BLOCK_K):
        x = tl.load(x_ptr + at + ks, mask=ks < k - at, other=0.0).to(tl.float32)
        sums += _folded(w.to(tl.float32) * x, BLOCK_N, BLOCK_K, VECTOR)
        if GATED:
            ups += _folded(up.to(tl.float32) * x, BLOCK_N, BLOCK_K, VECTOR)
        later = at + BLOCK_K
        w = tl.load(tile + later, mask=ks < k - later, other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_tile + later, mask=ks < k - later, other=0.0, eviction_policy="evict_first")
    out = tl.sum(sums, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    if GATED:
        gate_up = tl.sum(ups, axis=1)
        if HAS_BIAS:
            gate_up += tl.load(bias_ptr + n + rows).to(tl.float32)
        out = _silu(out) * gate_up
    if ADD:
        out += tl.load(out_ptr + ns, mask=ns < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + ns, out.to(out_ptr.dtype.element_ty), mask=ns < n)


@triton.jit
def _counted(codes):
    """int8 codes as the float32 numbers 32,896 + code: two instructions for four of them, and one each.

    The code, its sign bit turned, becomes bits 8 to 15 of 2**15. What is too much is taken off the finished sums.
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


@triton.jit
def _products8(w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COUNTED: tl.constexpr):
    floats = _counted(w) if COUNTED else _to_float32(w)
    return _folded(floats * x, BLOCK_N, BLOCK_K, 8)


@triton.jit(do_not_specialize=["eighths"])
def matvec8_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, n, eighths, offset,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    COUNTED: tl.constexpr,
) -> None:  # fmt: skip
    """out[n] of one row of x with a weight in int8; GATED and ADD as in `matvec_kernel`.

    Here arithmetic is the limit: at the memory's full speed an SM has some six instructions a weight. Two are enough.
    A thread holds 8 neighbouring weights of each of BLOCK_N rows, and so meets the same 8 numbers of x in each, which
    are loaded and converted once. That is what `eighths` is for, k / 8, which Triton knows nothing about: with vectors
    of 16 weights x would be laid out otherwise, and numbers had to change threads. No tile is kept from one round to
    the next, which would cost four more instructions a weight to take apart and put together.
    """
    k = eighths * 8
    ns, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    rows = tl.minimum(ns, n - 1).to(tl.int64)
    tile = weight_ptr + rows[:, None] * k + ks
    up_tile = tile + n.to(tl.int64) * k if GATED else tile
    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    xs = tl.zeros((1, BLOCK_K // 8), tl.float32)
    for at in range(0, k, BLOCK_K):
        inside = ks < k - at
        w = tl.load(tile + at, mask=inside, other=0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_tile + at, mask=inside, other=0, eviction_policy="evict_first")
        x = tl.load(x_ptr + at + ks, mask=inside, other=0.0).to(tl.float32)
        sums += _products8(w, x, BLOCK_N, BLOCK_K, COUNTED)
        if GATED:
            ups += _products8(up, x, BLOCK_N, BLOCK_K, COUNTED)
        xs += _folded(x, 1, BLOCK_K, 8)
    if COUNTED:  # in each thread, before the sums of threads meet: little is lost
        sums -= xs * offset
        ups -= xs * offset
    out = tl.sum(sums, axis=1) * tl.load(scale_ptr + rows)
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    if GATED:
        gate_up = tl.sum(ups, axis=1) * tl.load(scale_ptr + n + rows)
        if HAS_BIAS:
            gate_up += tl.load(bias_ptr + n + rows).to(tl.float32)
        out = _silu(out) * gate_up
    if ADD:
        out += tl.load(out_ptr + ns, mask=ns < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + ns, out.to(out_ptr.dtype.element_ty), mask=ns < n)


def matvec(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, *,
    gated: bool = False, add_to: torch.Tensor | None = None, plan: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """As `products.product`, for x [1, k]. plan: rows of the weight a program, and warps. int8: k a multiple of 8."""
    block_n, warps = plan
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = x.new_empty(1, n) if add_to is None else add_to
    options = dict(BLOCK_N=block_n, HAS_BIAS=bias is not None, ADD=add_to is not None, GATED=gated, num_warps=warps)
    grid = (triton.cdiv(n, block_n),)
    if weight.dtype == torch.int8:
        assert k % 8 == 0, f"{k} columns: rows would be read beyond their end"
        counted = not INTERPRETED and x.dtype != torch.float32  # which would lose digits
        matvec8_kernel[grid](
            x,
            weight,
            scale,
            bias,
            out,
            n,
            k // 8,
            COUNTED_FROM,
            BLOCK_K=256 * warps,
            COUNTED=counted,
            **options,
        )
    else:
        vector = 16 // weight.element_size()
        matvec_kernel[grid](x, weight, bias, out, n, k, BLOCK_K=vector * 32 * warps, VECTOR=vector, **options)
    return out
