"""2 to 64 rows of x times a weight in floats, on a CUDA device: what a step of some requests consists of.

Still each weight is read once and the reading takes the time, but every one meets several rows now: tensor cores do the
arithmetic. The weight is the *left* operand, and the product is computed transposed: instructions take 16 or 64 rows on
the left and as few as 8 columns on the right, so 3 rows of x cost 16 columns, and no weight waits for them.

Few rows of weights make too few programs to read at full speed. So several share a sum over k: each writes its part,
takes a ticket from a counter, and the one that draws the last ticket adds the parts up: no second kernel.

Invariant: parts are added in the order of k, whoever adds them, and sums are float32: equal inputs give equal bits.
Between two launches all tickets are 0, so products on one device must not overlap in time: one stream at a time. What
comes next is done on the finished sums: bias, SiLU times up, the residual. The oracle is
`kernels.reference_parts.product`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .device import GPU, dot_dtype, gpu_of
from .fused_parts import silu

TICKETS = 2**16  # counters, one for each tile of outputs


@dataclass(frozen=True)
class RowsPlan:
    """A program has `block_n` outputs of all rows of x, and walks k by `block_k`, of which k must be a multiple."""

    block_n: int
    block_k: int
    warps: int
    stages: int  # tiles along k in flight
    splits: int = 1  # programs that share one sum over k; 1 where the product is gated


@functools.lru_cache(maxsize=4096)
def plan_few_rows(m: int, n: int, k: int, itemsize: int, gated: bool, gpu: GPU) -> RowsPlan:
    """How to compute x [m, k] times weight [n, k]: from the shape and the GPU alone, never by a clock.

    itemsize: bytes of a number. The tiles were the fastest on an H200, over the layers of a 7B model, with as many
    stages as fit into the GPU's shared memory; all others are as correct.
    """
    if m > 16:
        plan = RowsPlan(64, 64, warps=4, stages=6)
    elif gated:
        plan = RowsPlan(32, 128, warps=2, stages=4)
    elif n < 4096:  # with two programs for each SM, unless the parts would become short
        splits = max(1, min(round(2 * gpu.sms / triton.cdiv(n, 32)), k // 512))
        plan = RowsPlan(32, 128, warps=2, stages=5, splits=splits)
    else:
        plan = RowsPlan(64, 128, warps=4, stages=4)
    stage = ((2 if gated else 1) * plan.block_n + _padded(m)) * plan.block_k * itemsize
    return replace(plan, stages=max(1, min(plan.stages, (gpu.shared_memory - 1024) // stage)))


def _padded(m: int) -> int:
    return max(16, triton.next_power_of_2(m))


@triton.jit(do_not_specialize=["m"])
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, tickets_ptr, m, n, k, k_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, DOT_DTYPE: tl.constexpr,
) -> None:  # fmt: skip
    """out[m, n] as (weight @ x.T).T, m up to BLOCK_M, k a multiple of BLOCK_K.

    SPLIT: parts [splits, m, n] in float32 meet in `partial`; tickets holds a 0 for each program along n. GATED: the
    weight has 2n rows, and out is silu(first half) * second half. ADD: out is added to.
    """
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ns, ms, ks = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows = tl.minimum(ns, n - 1).to(tl.int64)  # past the end the last row again, never stored; n * k may exceed 2**31
    w_tile = weight_ptr + rows[:, None] * k + ks[None, :]  # [BLOCK_N, BLOCK_K]
    up_tile = w_tile + tl.cast(n, tl.int64) * k if GATED else w_tile
    x_tile = x_ptr + ms.to(tl.int64)[None, :] * k + ks[:, None]  # [BLOCK_K, BLOCK_M]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    begin = split * k_per_split
    for at in range(begin, tl.minimum(begin + k_per_split, k), BLOCK_K):
        w = tl.load(w_tile + at, eviction_policy="evict_first").to(DOT_DTYPE)
        x = tl.load(x_tile + at, mask=(ms < m)[None, :], other=0.0).to(DOT_DTYPE)
        sums = tl.dot(w, x, sums, input_precision="ieee")
        if GATED:
            up = tl.load(up_tile + at, eviction_policy="evict_first").to(DOT_DTYPE)
            ups = tl.dot(up, x, ups, input_precision="ieee")

    inside = (ns < n)[:, None] & (ms < m)[None, :]
    last = True
    if SPLIT:
        part = partial_ptr + (split * m + ms).to(tl.int64)[None, :] * n + ns[:, None]
        tl.store(part, sums, mask=inside)
        tl.debug_barrier()  # all threads have written before one of them takes the ticket, which publishes it
        last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(tickets_ptr + tile, 0)  # for the next launch
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in range(splits):
                part = partial_ptr + (i * m + ms).to(tl.int64)[None, :] * n + ns[:, None]
                sums += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")  # from L2, where others wrote it
    if last:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        if GATED:
            if HAS_BIAS:
                ups += tl.load(bias_ptr + n + rows).to(tl.float32)[:, None]
            sums = silu(sums) * ups
        out_tile = out_ptr + ms.to(tl.int64)[None, :] * n + ns[:, None]
        if ADD:
            sums += tl.load(out_tile, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_tile, sums.to(out_ptr.dtype.element_ty), mask=inside)


@functools.lru_cache
def tickets_of(device: torch.device) -> torch.Tensor:
    """Counters that are 0 between launches. Made once and never freed, since graphs hold their address."""
    # Zeros of a graph would be written when it is replayed, and be missing until then.
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run the product once before capture"
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
    plan: RowsPlan | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias -> [m, n], or gated [m, n / 2], in the dtype of x.

    x [m, k], m from 1 to 64, k a multiple of 128; weight [n, k] in the dtype of x: float16 or bfloat16 (float32 is
    right as well, and slow). bias [n] in any floats, or None. gated: silu(first half of the outputs) * second half.
    add_to: the residual, which the result is added to in place, and which is returned. All contiguous and on one
    device.

    `plan` replaces what `plan_few_rows` says. Source of the split over k: Stream-K (Osama et al. 2023,
    arXiv:2301.03598), here in equal parts.
    """
    m, k = x.shape
    n = len(weight) // (2 if gated else 1)
    plan = plan or plan_few_rows(m, len(weight), k, x.element_size(), gated, gpu_of(x.device))
    k_per_split = triton.cdiv(triton.cdiv(k, plan.splits), plan.block_k) * plan.block_k
    tiles, splits = triton.cdiv(n, plan.block_n), triton.cdiv(k, k_per_split)
    assert m <= 64 and k % plan.block_k == 0 and weight.shape[1] == k and not (gated and splits > 1)
    assert (bias is None or bias.shape == (len(weight),)) and (add_to is None or add_to.shape == (m, n))
    assert all(part is None or part.is_contiguous() for part in (x, weight, bias, add_to))
    out = x.new_empty(m, n) if add_to is None else add_to
    partial = tickets = None
    if splits > 1:
        assert tiles <= TICKETS
        partial, tickets = x.new_empty((splits, m, n), dtype=torch.float32), tickets_of(x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        few_rows_kernel[(tiles, splits)](
            x, weight, bias, out, partial, tickets, m, n, k, k_per_split,
            BLOCK_N=plan.block_n, BLOCK_M=_padded(m), BLOCK_K=plan.block_k, SPLIT=splits > 1,
            HAS_BIAS=bias is not None, GATED=gated, ADD=add_to is not None, DOT_DTYPE=dot_dtype(x.dtype),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    return out
