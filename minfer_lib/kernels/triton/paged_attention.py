"""Attention over a paged cache on a CUDA device: one launch for all decoding requests, one for all prompts.

Invariant: keys and values are read where they lie, through the block tables, and copied nowhere; nothing waits for the
device, and equal inputs give equal bits.

A decoding request reads all of its keys for one token, so memory is the limit: with few requests or long ones, several
programs share a request's keys, since one alone cannot ask for bytes fast enough. A prompt has many tokens for each key
that it reads, so arithmetic is the limit. Hence two kernels (`paged_kernels`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from ...errors import InvalidParameter
from .device import TRITON_DTYPES, dot_dtype, gpu_of
from .few_rows import TICKETS, tickets_of
from .paged_kernels import decode_kernel, merge_kernel, prefill_kernel
from .paged_plan import FEW_PARTS, AttentionPlan, plan_decode, plan_prefill, plan_splits

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1  # more than any context: positions are int32


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    block_size: int,
    longest: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One new token of each of R requests over the keys of its request -> [R, heads, value_dim] in the query's dtype.

    query [R, heads, key_dim] float16, bfloat16 or float32; keys [rows, kv_heads, key_dim] and values [rows, kv_heads,
    value_dim], the pools of a layer in the query's dtype, or in int8 with key_scales and value_scales float32 [rows,
    kv_heads]: the token at position p of request r lies in row block_tables[r, p // block_size] * block_size + p %
    block_size. block_tables [R, W] int32, a slice of a wider table too; kv_lens [R] int32, the tokens of each request,
    the new one included. No other row and no other entry of the table is read. A request of length 0 gets zeros.
    longest: the largest of kv_lens, or more, as the host knows it; a bound that holds for all steps makes a launch that
    a CUDA graph can repeat.

    Query head h reads key head h // (heads // kv_heads). scale: factor of the scores; softcap: they become softcap *
    tanh(scores / softcap) then; window: only the last so many keys are seen; sinks [heads]: a score more for each head
    that takes part in the softmax and carries no value.

    Raises InvalidParameter for tensors that do not fit together. Sources: Kwon et al. 2023 (PagedAttention,
    arXiv:2309.06180); Dao et al. 2023 (Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html).
    """
    scales = (key_scales, value_scales)
    _check(query, keys, values, block_tables, kv_lens, sinks, scales, len(query))
    (requests, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    out = query.new_empty(requests, heads, value_dim)
    if requests == 0:
        return out
    gpu = gpu_of(query.device)
    plan = plan_decode(heads // kv_heads, key_dim, value_dim, query.dtype.itemsize, gpu.shared_memory)
    window = window or NO_WINDOW
    splits, keys_per_split = plan_splits(requests, kv_heads, max(1, min(longest, window)), gpu.sms)
    groups = kv_heads * triton.cdiv(heads // kv_heads, plan.rows)
    parts = "one" if splits == 1 else "few" if splits <= FEW_PARTS and requests * groups <= TICKETS else "many"
    partial = tickets = None
    if parts != "one":
        partial = query.new_empty((requests, heads, splits, value_dim + 2), dtype=torch.float32)
        tickets = tickets_of(query.device) if parts == "few" else None
    if query.stride(2) != 1:
        query = query.contiguous()
    with torch.cuda.device_of(query):  # Triton launches on the current device
        decode_kernel[(groups, splits, requests)](
            query, keys, values, key_scales, value_scales, block_tables, kv_lens, sinks, out, partial, tickets,
            query.stride(0), query.stride(1),
            block_tables.stride(0), keys_per_split, window, *_factors(scale, softcap), PARTS=parts,
            AT_ONCE=max(1, min(8, 8192 // (plan.rows * plan.padded_value))),
            **_options(plan, query, values, block_size, softcap, sinks),
        )  # fmt: skip
        if parts == "many":
            merge_kernel[(heads, requests)](
                partial, kv_lens, out, keys_per_split, splits, window,
                VALUE_DIM=value_dim, PADDED_VALUE=plan.padded_value, TILE=16, num_warps=2,
            )  # fmt: skip
    return out


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    starts: torch.Tensor,
    *,
    block_size: int,
    most_new: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """New tokens of R requests, side by side, each over the keys of its request up to itself -> [T, heads, value_dim].

    query [T, heads, key_dim]; starts [R + 1] int32: request r has tokens starts[r] to starts[r + 1] of them, at most
    `most_new`, as the host knows it. They are the last of its kv_lens[r] tokens, and their keys and values are in the
    pools already. All else as in `paged_decode`.

    Raises InvalidParameter for tensors that do not fit together. Sources: Kwon et al. 2023 (arXiv:2309.06180); Dao et
    al. 2022 (FlashAttention, arXiv:2205.14135).
    """
    scales = (key_scales, value_scales)
    _check(query, keys, values, block_tables, kv_lens, sinks, scales, len(starts) - 1, starts)
    (tokens, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    out = query.new_empty(tokens, heads, value_dim)
    if tokens == 0 or len(kv_lens) == 0:
        return out
    gpu = gpu_of(query.device)
    plan = plan_prefill(key_dim, value_dim, query.dtype.itemsize, gpu.shared_memory)
    if query.stride(2) != 1:
        query = query.contiguous()
    with torch.cuda.device_of(query):
        prefill_kernel[(triton.cdiv(most_new * (heads // kv_heads), plan.rows), kv_heads, len(kv_lens))](
            query, keys, values, key_scales, value_scales, block_tables, kv_lens, starts, sinks, out,
            query.stride(0), query.stride(1),
            block_tables.stride(0), window or NO_WINDOW, *_factors(scale, softcap),
            ASYNCHRONOUS=gpu.multiplies_asynchronously(query.dtype, plan.rows, plan.warps),
            **_options(plan, query, values, block_size, softcap, sinks),
        )  # fmt: skip
    return out


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(scale, cap) as the kernels take them: the scores come out in units of log2(e)."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


def _options(
    plan: AttentionPlan, query: torch.Tensor, values: torch.Tensor, block_size: int, softcap: float | None,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel is compiled for: the same in all steps, and mostly in all layers."""
    (_, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    return dict(
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, BLOCK_SIZE=block_size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        PADDED_KEY=plan.padded_key, PADDED_VALUE=plan.padded_value, ROWS=plan.rows, TILE=plan.tile,
        CAPPED=softcap is not None, SINKS=sinks is not None, DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def _check(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_tables: torch.Tensor, kv_lens: torch.Tensor,
    sinks: torch.Tensor | None, scales: tuple[torch.Tensor | None, ...], requests: int,
    starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise InvalidParameter for what the kernels would read wrongly or beyond its end, as far as shapes can tell."""
    numbers = [part for part in (block_tables, kv_lens, starts) if part is not None]
    scales = [part for part in scales if part is not None]
    pools = [keys, values, *scales, *([] if sinks is None else [sinks])]
    fits = (
        query.dim() == keys.dim() == values.dim() == 3 and query.dtype in TRITON_DTYPES
        and keys.dtype == values.dtype == (torch.int8 if scales else query.dtype) and len(scales) in (0, 2)
        and all(part.shape == keys.shape[:2] and part.dtype == torch.float32 for part in scales)
        and keys.shape[:2] == values.shape[:2] and query.shape[2] == keys.shape[2]
        and query.shape[1] % keys.shape[1] == 0 and (sinks is None or sinks.shape == query.shape[1:2])
        and block_tables.shape[:-1] == kv_lens.shape == (requests,) and block_tables.stride(-1) == 1
        and all(part.dtype == torch.int32 for part in numbers)
        and all(part.is_contiguous() for part in (*pools, *numbers[1:]))
        and all(part.device == query.device for part in (*pools, *numbers))
    )  # fmt: skip
    if not fits:
        got = ", ".join(f"{list(part.shape)} {part.dtype} on {part.device}" for part in (query, *pools, *numbers))
        raise InvalidParameter(
            f"paged attention got {got}; it takes query [T, heads, dim], pools [rows, kv_heads, dim] in its dtype, "
            "or in int8 with float32 scales [rows, kv_heads], sinks [heads] or None, and int32 block tables [R, W], "
            "lengths [R] and starts [R + 1], on one device, contiguous but for the query and the rows of the block "
            "tables."
        )
