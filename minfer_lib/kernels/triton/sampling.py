"""The token of each row, drawn where the logits are, in two kernels and without sorting.

The first looks at parts of 4,096 logits: the largest of each, where it is, and the mass, the sum of the unnormalised
probabilities. The second, one program a row, finds the part in which the running sum of masses passes the drawn
number, and then the place in it: the same inverse CDF, in order of ids, as `generation.sampling`.

Invariant: the results are those of `fast.sampling.sample`, in torch: masses are float32, relative to the row's largest
logit, and summed in float64; a row with a NaN, or without a finite largest logit, gets -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PART = 4096
COLDEST = tl.constexpr(1e-6)  # below it float32 cannot tell a row from a greedy one


@triton.jit
def scan_kernel(
    logits_ptr, temperature_ptr, best_ptr, where_ptr, mass_ptr, vocab, row_stride, BLOCK: tl.constexpr
) -> None:
    """One part of one row: its largest logit, NaN if one is NaN; the id of it; its mass relative to the largest."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best, where = tl.max(x, 0, return_indices=True)  # passes over NaN; of equals the first
    temperature = tl.maximum(tl.load(temperature_ptr + row), COLDEST)
    mass = tl.where(x == float("-inf"), 0.0, tl.exp((x - best) / temperature))
    best = tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), best)
    tl.store(best_ptr + row * parts + part, best)
    tl.store(where_ptr + row * parts + part, part * BLOCK + where)
    tl.store(mass_ptr + row * parts + part, tl.sum(mass.to(tl.float64), 0))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, best_ptr, where_ptr, mass_ptr, out_ptr, vocab, row_stride, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    bests = tl.load(best_ptr + row * parts + i, mask=i < parts, other=float("-inf"))
    top, first = tl.max(bests, 0, return_indices=True)
    finite = (top < float("inf")) & (top > float("-inf")) & (tl.sum((bests != bests).to(tl.int32), 0) == 0)
    temperature = tl.load(temperature_ptr + row)
    token = tl.load(where_ptr + row * parts + first)
    if finite & (temperature > 0.0):
        temperature = tl.maximum(temperature, COLDEST)
        mass = tl.load(mass_ptr + row * parts + i, mask=i < parts, other=0.0)  # float64
        mass *= tl.where(bests == float("-inf"), 0.0, tl.exp((bests - top) / temperature)).to(tl.float64)
        upto = tl.cumsum(mass, 0)
        total = tl.max(upto, 0)
        point = tl.load(uniform_ptr + row) * total
        # Rounding may put the point on the very end: it belongs to the last part that has any mass.
        last = tl.max(tl.where(mass > 0.0, i, 0), 0)
        part = tl.minimum(tl.sum((upto <= point).to(tl.int32), 0), last)
        before = tl.sum(tl.where(i < part, mass, 0.0), 0)
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        masses = tl.where(x == float("-inf"), 0.0, tl.exp((x - top) / temperature)).to(tl.float64)
        inner = tl.cumsum(masses, 0) + before
        place = tl.sum((inner <= point).to(tl.int32), 0)
        token = part * BLOCK + tl.minimum(place, tl.max(tl.where(masses > 0.0, tl.arange(0, BLOCK), 0), 0))
    tl.store(out_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `fast.sampling.sample`; the rows of logits may lie apart."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    mass = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    stride = logits.stride(0)
    scan_kernel[(rows, parts)](logits, temperature, best, where, mass, vocab, stride, BLOCK=PART, num_warps=4)
    draw_kernel[(rows,)](
        logits, temperature, uniform, best, where, mass, out, vocab, stride, parts, BLOCK=PART,
        PARTS=triton.next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    return out
