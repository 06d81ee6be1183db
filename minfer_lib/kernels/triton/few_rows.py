"""Two to 64 rows of numbers times a matrix: the products of a decode step with that many requests, in Triton.

The weight stands on the left, where the tensor cores take 64 rows of it at a time, and x on the right, where 16 columns
will do: the product is computed transposed. cuBLAS pads a batch of 8 to 64 or 128 rows.

Invariant: sums are float32. Where several programs share a sum over k, the last of them to come, told by a ticket, adds
the parts in their order, so that equal inputs give equal bits, and leaves the ticket at zero for the next launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import dot_dtype
from .matvec import _silu

TICKETS = 2**16
_scratch: dict[torch.device, list[torch.Tensor]] = {}


@triton.jit(do_not_specialize=["m"])
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, tickets_ptr, m, n, k, k_per_split,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, DOT_DTYPE: tl.constexpr,
) -> None:  # fmt: skip
    """out[m, n] = (weight @ x.T).T for m up to BLOCK_M; k a multiple of BLOCK_K. GATED, ADD: as in `matvec_kernel`."""
    ns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ms, ks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    split, splits = tl.program_id(1), tl.num_programs(1)
    rows = tl.minimum(ns, n - 1).to(tl.int64)
    begin = split * k_per_split
    end = tl.minimum(begin + k_per_split, k)
    w_tile = weight_ptr + rows[:, None] * k + ks[None, :]
    up_tile = w_tile + n.to(tl.int64) * k if GATED else w_tile
    x_tile = x_ptr + ms.to(tl.int64)[None, :] * k + ks[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(begin, end, BLOCK_K):
        w = tl.load(w_tile + at, eviction_policy="evict_first")
        x = tl.load(x_tile + at, mask=(ms < m)[None, :], other=0.0).to(DOT_DTYPE)
        sums = tl.dot(w.to(DOT_DTYPE), x, sums)
        if GATED:
            up = tl.load(up_tile + at, eviction_policy="evict_first")
            ups = tl.dot(up.to(DOT_DTYPE), x, ups)
    inside = (ns < n)[:, None] & (ms < m)[None, :]
    last = True
    if SPLIT:
        part = partial_ptr + (split * m + ms).to(tl.int64)[None, :] * n + ns[:, None]
        tl.store(part, sums, mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them takes the ticket
        ticket = tl.atomic_add(tickets_ptr + tl.program_id(0), 1, sem="acq_rel")
        last = ticket == splits - 1
        if last:
            tl.store(tickets_ptr + tl.program_id(0), 0)
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in range(splits):
                part = partial_ptr + (i * m + ms).to(tl.int64)[None, :] * n + ns[:, None]
                sums += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        if GATED:
            if HAS_BIAS:
                ups += tl.load(bias_ptr + n + rows).to(tl.float32)[:, None]
            sums = _silu(sums) * ups
        out_tile = out_ptr + ms.to(tl.int64)[None, :] * n + ns[:, None]
        if ADD:
            sums += tl.load(out_tile, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_tile, sums.to(out_ptr.dtype.element_ty), mask=inside)


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False,
    add_to: torch.Tensor | None = None, plan: tuple[int, int, int, int, int],
) -> torch.Tensor:  # fmt: skip
    """As `products.product`, for x [m, k] with m from 2 to 64 and a weight in x's dtype, bfloat16 or float16.

    plan: BLOCK_N, BLOCK_K, warps, stages and splits; k a multiple of BLOCK_K, and one split where it is gated.
    """
    block_n, block_k, warps, stages, splits = plan
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    k_per_split = triton.cdiv(triton.cdiv(k, splits), block_k) * block_k
    splits = triton.cdiv(k, k_per_split)
    assert k % block_k == 0 and m <= 64 and not (gated and splits > 1), f"{list(x.shape)} cannot be cut as {plan}"
    out = x.new_empty(m, n) if add_to is None else add_to
    tiles = triton.cdiv(n, block_n)
    partial = tickets = None
    if splits > 1:
        assert tiles <= TICKETS
        partial, tickets = scratch(x.device, splits * m * n)
    few_rows_kernel[(tiles, splits)](
        x, weight, bias, out, partial, tickets, m, n, k, k_per_split, BLOCK_N=block_n,
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_K=block_k, SPLIT=splits > 1, HAS_BIAS=bias is not None,
        ADD=add_to is not None, GATED=gated, DOT_DTYPE=dot_dtype(x.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def scratch(device: torch.device, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(room for partial results, tickets that are zero between launches), for all kernels of a device that split a sum.

    They run one after the other on one stream. What was handed out once stays where it is, since captured graphs have
    its address: more room comes beside it.
    """
    if device not in _scratch:
        _scratch[device] = [torch.zeros(TICKETS, dtype=torch.int32, device=device)]
    kept = _scratch[device]
    if len(kept) == 1 or kept[-1].numel() < floats:
        kept.append(torch.empty(max(floats, 2**22), dtype=torch.float32, device=device))
    return kept[-1], kept[0]
