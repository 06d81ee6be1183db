"""Attention over paged keys and values on a CUDA device: one launch for all decoding requests, one for all prompts.

Invariant: keys and values are read where they lie, through the block tables, and copied nowhere; nothing waits for the
device, and equal inputs give equal bits.

A decoding request reads all of its keys for one token, which is all about memory: with few requests or long ones its
keys are split among several programs, since one alone cannot ask for bytes fast enough. A prompt has many tokens for
each key it reads, which is about arithmetic. Hence two kernels (`paged_kernels`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...errors import InvalidParameter

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "Paged attention on a CUDA device is a Triton kernel, and triton is not installed. torch for CUDA brings it on "
        "Linux; elsewhere `pip install triton`, or run the model on the CPU, which does not need it."
    ) from error

from .paged_kernels import decode_kernel, merge_kernel, prefill_kernel
from .paged_plan import plan_decode, plan_prefill, plan_splits, power_of_2, up

# TRITON_INTERPRET=1 at the import of triton: Python runs the kernels, on the CPU.
INTERPRETED: bool = triton.knobs.runtime.interpret
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1  # more than any context: positions are int32


@functools.lru_cache
def _device(device: torch.device) -> tuple[int, int, bool]:
    """(multiprocessors, bytes of shared memory that a program may take, whether it is a Hopper)."""
    if INTERPRETED:
        return 1, 2**20, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin, properties.major == 9


@functools.lru_cache(maxsize=1024)
def _options(
    decode: bool, heads: int, kv_heads: int, key_dim: int, value_dim: int, block_size: int, dtype: torch.dtype,
    device: torch.device, capped: bool, sinks: bool,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """(queries of a program, what the kernel is compiled for): the same in all steps, and mostly in all layers."""
    group, (_, memory, hopper) = heads // kv_heads, _device(device)
    padded = [max(16, power_of_2(dim)) for dim in (key_dim, value_dim)]
    size = dtype.itemsize
    plan = plan_decode(group, *padded, size, memory) if decode else plan_prefill(*padded, size, memory)
    options = dict(
        KV_HEADS=kv_heads, GROUP=group, BLOCK_SIZE=block_size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        PADDED_KEY=padded[0], PADDED_VALUE=padded[1], ROWS=plan.rows, TILE=plan.tile, CAPPED=capped, SINKS=sinks,
        # Triton's interpreter multiplies bfloat16 wrongly, without a word.
        DOT_DTYPE=TRITON_DTYPES[torch.float32 if INTERPRETED else dtype],
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if not decode:  # when Triton takes Hopper's own matrix instruction, which runs on while the threads go on
        options["ASYNCHRONOUS"] = hopper and size == 2 and plan.rows >= 64
    return plan.rows, options


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
    splits: int | None = None,
) -> torch.Tensor:
    """One new token of each of R requests over the keys of its request -> [R, heads, value_dim] in the query's dtype.

    query [R, heads, key_dim] float16, bfloat16 or float32, of any strides; keys [tokens, kv_heads, key_dim] and values
    [tokens, kv_heads, value_dim], the pools of a layer in the query's dtype, contiguous: the token at position p of
    request r lies in row block_tables[r, p // block_size] * block_size + p % block_size. block_tables [R, W] int32,
    kv_lens [R] int32, the tokens of each request, the new one included; longest: the most of them, or more, as the host
    knows it. What stands in rows that belong to no visible token does not matter. A request of length 0 gets zeros.

    Query head h reads key head h // (heads // kv_heads). scale: factor of the scores; softcap: they become softcap *
    tanh(scores / softcap) then; window: only the last so many keys are seen; sinks [heads]: a score more for each head
    that takes part in the softmax and carries no value. splits: parts to cut the longest context into, at most,
    instead of what `plan_splits` says.

    Raises InvalidParameter for any other dtype, shape or device. Sources: Kwon et al. 2023 (PagedAttention,
    arXiv:2309.06180); Dao et al. 2023 (Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html).
    """
    _check("paged_decode", query, keys, values, block_tables, kv_lens, sinks, block_size, window, softcap)
    (requests, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    if len(kv_lens) != requests or longest > block_tables.shape[1] * block_size or (splits or 1) < 1:
        raise InvalidParameter(
            f"paged_decode got {requests} queries, {len(kv_lens)} lengths, the longest {longest}, splits={splits} and "
            f"tables {tuple(block_tables.shape)} of blocks of {block_size}; it takes one query and one length for each "
            "table, no length that is longer than its table, and at least 1 split."
        )
    out = query.new_empty(requests, heads, value_dim)
    if requests == 0:
        return out
    rows, options = _options(
        True, heads, kv_heads, key_dim, value_dim, block_size, query.dtype, query.device,
        softcap is not None, sinks is not None,
    )  # fmt: skip
    window = NO_WINDOW if window is None else window
    visible = max(1, min(longest, window))
    if splits is None:
        splits, keys_per_split = plan_splits(requests, kv_heads, visible, _device(query.device)[0])
    else:
        keys_per_split = up(visible, splits)
        splits = up(visible, keys_per_split)
    partial = None if splits == 1 else query.new_empty((requests, heads, splits, value_dim + 2), dtype=torch.float32)
    if query.stride(2) != 1:
        query = query.contiguous()
    with torch.cuda.device_of(query):  # Triton launches on the current device
        decode_kernel[(kv_heads * up(heads // kv_heads, rows), splits, requests)](
            query, keys, values, block_tables, kv_lens, sinks, out, partial, query.stride(0), query.stride(1),
            block_tables.stride(0), keys_per_split, window, *_factors(scale, softcap), WHOLE=partial is None, **options,
        )  # fmt: skip
        if partial is not None:
            merge_kernel[(heads, requests)](
                partial, kv_lens, out, keys_per_split, splits, window,
                VALUE_DIM=value_dim, PADDED_VALUE=options["PADDED_VALUE"], TILE=16, num_warps=2,
            )  # fmt: skip
    return out


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    q_starts: torch.Tensor,
    *,
    block_size: int,
    most_new: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """New tokens of R requests, side by side, each over the keys of its request up to itself -> [T, heads, value_dim].

    query [T, heads, key_dim]; q_starts [R + 1] int32: request r has tokens q_starts[r] to q_starts[r + 1] of them, at
    most `most_new`, as the host knows it. They are the last of its kv_lens[r] tokens, and their keys and values are in
    the pools already. All else as in `paged_decode`.

    Raises InvalidParameter for any other dtype, shape or device. Sources: Kwon et al. 2023 (arXiv:2309.06180); Dao et
    al. 2022 (FlashAttention, arXiv:2205.14135).
    """
    _check("paged_prefill", query, keys, values, block_tables, kv_lens, sinks, block_size, window, softcap)
    (tokens, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    requests = len(kv_lens)
    if q_starts.dtype != torch.int32 or q_starts.shape != (requests + 1,) or q_starts.device != query.device:
        raise InvalidParameter(
            f"paged_prefill got q_starts {_described(q_starts)} for {requests} requests; it takes the {requests + 1} "
            "borders between the requests' tokens, as int32 on the device of the query."
        )
    out = query.new_empty(tokens, heads, value_dim)
    if tokens == 0 or requests == 0:
        return out
    rows, options = _options(
        False, heads, kv_heads, key_dim, value_dim, block_size, query.dtype, query.device,
        softcap is not None, sinks is not None,
    )  # fmt: skip
    if query.stride(2) != 1:
        query = query.contiguous()
    with torch.cuda.device_of(query):
        prefill_kernel[(up(most_new * (heads // kv_heads), rows), kv_heads, requests)](
            query, keys, values, block_tables, kv_lens, q_starts, sinks, out, query.stride(0), query.stride(1),
            block_tables.stride(0), NO_WINDOW if window is None else window, *_factors(scale, softcap), **options,
        )  # fmt: skip
    return out


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(scale, cap) as the kernels take them: the scores come out in units of log2(e)."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _check(
    name: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor,
    lens: torch.Tensor, sinks: torch.Tensor | None, block_size: int, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    """Raise InvalidParameter for what the kernels would read wrongly or beyond its end, as far as the host can know."""
    device, dtype, possible = query.device, query.dtype, None
    if dtype not in TRITON_DTYPES or keys.dtype != dtype or values.dtype != dtype:
        possible = "query, keys and values have one dtype, float16, bfloat16 or float32: make the pools in the model's"
    elif (
        query.dim() != 3 or keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]
        or query.shape[2] != keys.shape[2] or keys.shape[1] == 0 or query.shape[1] % keys.shape[1] != 0
    ):  # fmt: skip
        possible = "they are [.., heads, dim], [tokens, kv_heads, dim] and [tokens, kv_heads, value_dim] in shape"
    elif not (keys.is_contiguous() and values.is_contiguous()):
        possible = "keys and values are contiguous, as the pools were made: a copy of them for each call is no option"
    elif tables.dtype != torch.int32 or tables.dim() != 2 or tables.stride(1) != 1:
        possible = "block tables are [requests, blocks] in int32, the numbers of a row side by side"
    elif lens.dtype != torch.int32 or lens.shape != tables.shape[:1] or not lens.is_contiguous():
        possible = "lengths are [requests] in int32, one for each block table, contiguous"
    elif sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_floating_point()):
        possible = f"sinks are [heads] in floats, and these are {_described(sinks)}"
    elif block_size < 1 or (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        possible = "block_size and window are at least 1 and softcap is above 0; without a window or a cap it is None"
    elif not query.is_cuda and not INTERPRETED:
        possible = "all tensors are on a CUDA device; on another one attend with torch, or the kernel for CPUs"
    elif any(part is not None and part.device != device for part in (keys, values, tables, lens, sinks)):
        possible = "all tensors are on one device" + ("" if sinks is None else f", sinks too: {_described(sinks)}")
    if possible is not None:
        parts = dict(query=query, keys=keys, values=values, block_tables=tables, kv_lens=lens)
        got = ", ".join(f"{key} {_described(part)}" for key, part in parts.items())
        raise InvalidParameter(
            f"{name} got {got}, block_size {block_size}, window {window}, softcap {softcap}. It wants that {possible}."
        )
