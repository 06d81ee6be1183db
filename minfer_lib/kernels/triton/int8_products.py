"""The kernels of the int8 product, in Triton: one for one row of x, one for more, and two small helpers.

Invariant: a weight leaves the GPU's memory as one byte and becomes a float in registers; nothing past the end of a
matrix is stored; sums are float32 and run in a fixed order, so equal inputs give equal bits. `int8_linear` picks
one and checks what it gets: all of it contiguous and on one device, x [m, k], weight [n, k], scale and bias [n].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import wait_for_dot


@triton.jit
def _to_float32(codes):
    """int8 to float32 by bit operations: the instruction for it is so slow on an H200 that it becomes the limit.

    From 2**23 to 2**24 the float32 numbers are the whole ones, so their last bits count: put code + 128 there (the code
    with its sign bit turned) and take 2**23 + 128 off. Exact.
    """
    return (codes.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _to_half_in_pairs(codes, DTYPE: tl.constexpr):
    """int8 to bfloat16 or float16, two codes in one register at a time, in half the operations of `.to(DTYPE)`. Exact.

    As `_to_float32`: from 1024 to 2048 float16 counts in whole numbers, so code + 1152 goes there and 1152 comes off.
    bfloat16 does so from 128 to 256 only: 128 + the low 7 bits go there, and 128, or for a negative code 256, come off.
    """
    if DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, low, offset;
            prmt.b32 pair, $1, 0, 0x4140;
            lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xEA;
            lop3.b32 offset, pair, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, low, offset;
            }""", "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, offset;
            xor.b32 pair, $1, 0x8080;
            prmt.b32 pair, pair, 0x64646464, 0x4140;
            mov.b32 offset, 0x64806480;
            sub.rn.f16x2 $0, pair, offset;
            }""", "=r,r", [codes], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def matvec_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, n, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """out[n] for one row of x: each thread keeps partial sums of its own, added up across threads once, at the end."""
    ns, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows = tl.minimum(ns, n - 1).to(tl.int64)  # past the end the last row again, never stored; n * k may exceed 2**31
    w_tile = weight_ptr + rows[:, None] * k + ks[None, :]  # [BLOCK_N, BLOCK_K]
    # x in the shape of the weight's tile, every row the same: each thread loads, from the L1 cache, just the values
    # that its own weights meet, and no thread waits for another.
    x_tile = x_ptr + (rows * 0)[:, None] + ks[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K // 16), tl.float32)
    for at in range(0, k, BLOCK_K):
        inside = (ks < k - at)[None, :] if MASK_K else None
        w = tl.load(w_tile + at, mask=inside)
        x = tl.load(x_tile + at, mask=inside, other=0.0 if MASK_K else None)
        # A thread loads 16 weights at a time and folds their products at once: few registers, so many loads in flight.
        sums += tl.sum(tl.reshape(_to_float32(w) * x.to(tl.float32), (BLOCK_N, BLOCK_K // 16, 16)), axis=2)
    out = tl.sum(sums, axis=1) * tl.load(scale_ptr + rows)
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    tl.store(out_ptr + ns, out.to(out_ptr.dtype.element_ty), mask=ns < n)


@triton.jit(do_not_specialize=["m"])
def dot_kernel(
    x, weight, scale_ptr, bias_ptr, out_ptr, m, n, k, k_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, MASK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    PARTIAL: tl.constexpr, DOT_DTYPE: tl.constexpr, COPY_ENGINE: tl.constexpr, ASYNCHRONOUS: tl.constexpr,
) -> None:  # fmt: skip
    """out[m, n], or with PARTIAL one split's unscaled share of it, computed as (weight @ x.T).T.

    Tensor cores take the left operand from registers, 16 or 64 rows of it at a time, and as few as 8 columns of the
    right one. So the weight stands left: its bytes become floats in registers and are multiplied there, never stored
    again, and 3 rows of x are padded to 16 columns. x and weight are pointers, or descriptors for the copy engine.
    ASYNCHRONOUS must be true wherever Triton takes Hopper's own matrix instruction.
    """
    # Neighbouring programs share a tile of the weight: the first reads it from memory, the others find it in the cache.
    row_tiles = tl.cdiv(m, BLOCK_M)
    first_n = tl.program_id(0) // row_tiles * BLOCK_N
    first_m = tl.program_id(0) % row_tiles * BLOCK_M
    split = tl.program_id(1)
    ns, ms, ks = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows_n = tl.minimum(ns, n - 1).to(tl.int64)  # past the end the last row again, never stored; n * k may exceed 2**31

    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(split * k_per_split, tl.minimum((split + 1) * k_per_split, k), BLOCK_K):
        if COPY_ENGINE:  # one thread asks for a whole tile; what lies outside of the matrix arrives as zeros
            w_tile = weight.load([first_n, at])
            x_tile = x.load([first_m, at]).T
        else:
            inside = ks < k - at if MASK_K else None
            w_place = rows_n[:, None] * k + (at + ks)[None, :]  # [BLOCK_N, BLOCK_K]
            w_tile = tl.load(
                weight + w_place, mask=inside[None, :] if MASK_K else None
            )  # past k anything: x is 0 there
            # Rows that x does not have are not loaded: the last one in their place, from everywhere at once, is slow.
            x_place = ms.to(tl.int64)[None, :] * k + (at + ks)[:, None]  # [BLOCK_K, BLOCK_M]
            x_inside = (ms < m)[None, :] & inside[:, None] if MASK_K else (ms < m)[None, :]
            x_tile = tl.load(x + x_place, mask=x_inside, other=0.0)
        # An int8 code is exact in each of these dtypes. "ieee" keeps float32 from being rounded to tf32.
        if ASYNCHRONOUS:
            sums = wait_for_dot(tl.dot(_to_half_in_pairs(w_tile, DOT_DTYPE), x_tile, sums))
        else:
            sums = tl.dot(w_tile.to(DOT_DTYPE), x_tile.to(DOT_DTYPE), sums, input_precision="ieee")

    if not PARTIAL:
        sums *= tl.load(scale_ptr + rows_n)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + rows_n).to(tl.float32)[:, None]
    out_tile = out_ptr + (split * m + ms).to(tl.int64)[None, :] * n + ns[:, None]  # [BLOCK_N, BLOCK_M], out transposed
    tl.store(out_tile, sums.to(out_ptr.dtype.element_ty), mask=(ns < n)[:, None] & (ms < m)[None, :])


@triton.jit(do_not_specialize=["m"])
def sum_kernel(
    partial_ptr, scale_ptr, bias_ptr, out_ptr, m, n,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """out[m, n] from partial[splits, m, n], the first split always first: atomic additions would come in any order."""
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
def dequantize_kernel(weight_ptr, scale_ptr, out_ptr, n, k, ROWS: tl.constexpr, BLOCK_K: tl.constexpr) -> None:
    """out = weight * scale, ROWS by BLOCK_K of it."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    place = rows[:, None] * k + columns[None, :]
    w = _to_float32(tl.load(weight_ptr + place, mask=inside, other=0))
    w *= tl.load(scale_ptr + rows, mask=rows < n, other=0.0)[:, None]
    tl.store(out_ptr + place, w.to(out_ptr.dtype.element_ty), mask=inside)
