"""Attention over paged keys and values on a CUDA device: one launch for all decoding requests, one for all prompts.

Invariant: keys and values are read where they lie, through the block tables, and copied nowhere; how the work is cut up
follows from the shapes and from numbers that the host knows, never from a clock or from what a tensor on the device
holds. So nothing waits for the device, and equal inputs give equal bits.

A decoding request reads all of its keys for one token, which is all about memory: with few requests or long ones its
keys are split among several programs, since one alone cannot ask for bytes fast enough. A prompt has many tokens for
each key it reads, which is about arithmetic. Hence two kernels (`paged_kernels`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidParameter

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "Paged attention on a CUDA device is a Triton kernel, and triton is not installed. torch for CUDA brings it on "
        "Linux; elsewhere `pip install triton`, or run the model on the CPU, which does not need it."
    ) from error

from .paged_kernels import decode_kernel, merge_kernel, prefill_kernel

# TRITON_INTERPRET=1 at the import of triton: Python runs the kernels, on the CPU.
INTERPRETED: bool = triton.knobs.runtime.interpret
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1  # more than any context: positions are int32


@dataclass(frozen=True)
class Plan:
    """How attention is cut up: a program has `rows` queries and walks the keys by `tile`."""

    rows: int
    tile: int
    warps: int
    stages: int  # tiles of keys and values in flight


@functools.lru_cache(maxsize=256)
def plan_decode(group: int, dims: int, itemsize: int, memory: int) -> Plan:
    """For `group` query heads on a key head, key and value of `dims` numbers together, of `itemsize` bytes each.

    memory: bytes of shared memory that a program may take. The numbers were the fastest on an H200.
    """
    rows = max(16, triton.next_power_of_2(group))
    tile = 64 if itemsize == 2 else 32
    return _fitting(Plan(rows, tile, warps=4, stages=3), dims * itemsize, memory)


@functools.lru_cache(maxsize=256)
def plan_prefill(dims: int, itemsize: int, memory: int) -> Plan:
    """As `plan_decode`, for chunks of prompts."""
    if itemsize == 4:
        return _fitting(Plan(32, 32, warps=4, stages=2), dims * itemsize, memory)
    plan = Plan(128, 64, warps=8 if dims > 128 else 4, stages=3) if dims <= 256 else Plan(64, 32, warps=4, stages=2)
    return _fitting(plan, dims * itemsize, memory - plan.rows * dims * itemsize // 2)  # the queries lie there too


def _fitting(plan: Plan, bytes_per_key: int, memory: int) -> Plan:
    """`plan`, with as many tiles in flight, and these as large, as fit into shared memory."""
    stages, tile = plan.stages, plan.tile
    while stages * tile * bytes_per_key > memory and (stages > 1 or tile > 16):
        stages, tile = (stages - 1, tile) if stages > 2 or tile == 16 else (stages, tile // 2)
    return Plan(plan.rows, tile, plan.warps, stages)


@functools.lru_cache(maxsize=65536)
def plan_splits(requests: int, kv_heads: int, longest: int, processors: int) -> tuple[int, int]:
    """(splits, keys in each): the parts that each request's keys are cut into, from shapes alone.

    All parts have the same size whatever a request's length, so that no program works for much longer than others.
    """
    splits = max(1, 4 * processors // (requests * kv_heads))
    keys = min(max(_up(longest, splits), 128), 2048)
    keys = _up(keys, 64) * 64
    return max(1, _up(longest, keys)), keys


def _up(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


@functools.lru_cache
def _device(device: torch.device) -> tuple[int, int, bool]:
    """(multiprocessors, bytes of shared memory that a program may take, whether it is a Hopper)."""
    if INTERPRETED:
        return 1, 2**20, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin, properties.major == 9


@functools.lru_cache(maxsize=1024)
def _launch_options(
    decode: bool, heads: int, kv_heads: int, key_dim: int, value_dim: int, block_size: int, dtype: torch.dtype,
    device: torch.device, capped: bool, sinks: bool,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """(queries of a program, what the kernels are compiled for): the same in all layers and steps of a model."""
    group, (_, memory, hopper) = heads // kv_heads, _device(device)
    padded = [max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim)]
    if decode:
        plan = plan_decode(group, sum(padded), dtype.itemsize, memory)
    else:
        plan = plan_prefill(sum(padded), dtype.itemsize, memory)
    return plan.rows, dict(
        KV_HEADS=kv_heads, GROUP=group, BLOCK_SIZE=block_size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        PADDED_KEY=padded[0], PADDED_VALUE=padded[1], ROWS=plan.rows, TILE=plan.tile, CAPPED=capped, SINKS=sinks,
        # Triton's interpreter multiplies bfloat16 wrongly, without a word.
        DOT_DTYPE=TRITON_DTYPES[torch.float32 if INTERPRETED else dtype],
        # When Triton takes Hopper's own matrix instruction, which runs on while the threads go on.
        ASYNCHRONOUS=hopper and dtype.itemsize == 2 and plan.rows >= 64,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


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
    that takes part in the softmax and carries no value. splits: at least so many parts for the longest context, instead
    of what `plan_splits` says.

    Raises InvalidParameter for any other dtype, shape or device. Sources: Kwon et al. 2023 (PagedAttention,
    arXiv:2309.06180); Dao et al. 2023 (Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html).
    """
    _check("paged_decode", query, keys, values, block_tables, kv_lens, sinks, block_size, window, softcap)
    (requests, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    if len(kv_lens) != requests or not 0 <= longest <= block_tables.shape[1] * block_size:
        raise InvalidParameter(
            f"paged_decode got {requests} queries, {len(kv_lens)} lengths, {longest} as the longest and block tables "
            f"{tuple(block_tables.shape)} of blocks of {block_size}; there is one query and one length for each table, "
            "and no request is longer than its table."
        )
    out = query.new_empty(requests, heads, value_dim)
    if requests == 0:
        return out
    window = NO_WINDOW if window is None else window
    visible = max(1, min(longest, window))
    if splits is None:
        splits, keys_per_split = plan_splits(requests, kv_heads, visible, _device(query.device)[0])
    else:
        keys_per_split = _up(visible, splits)
        splits = _up(visible, keys_per_split)
    _, options = _launch_options(
        True, heads, kv_heads, key_dim, value_dim, block_size, query.dtype, query.device,
        softcap is not None, sinks is not None,
    )  # fmt: skip
    partial = None if splits == 1 else query.new_empty((requests, heads, splits, value_dim + 2), dtype=torch.float32)
    if query.stride(2) != 1:
        query = query.contiguous()
    with torch.cuda.device_of(query):  # Triton launches on the current device
        decode_kernel[(kv_heads, splits, requests)](
            query, keys, values, block_tables, kv_lens, sinks, out, partial, query.stride(0), query.stride(1),
            block_tables.stride(0), keys_per_split, window, *_factors(scale, softcap),
            WHOLE=partial is None, **options,
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
    least 1 and at most `most_new`, as the host knows it. They are the last of its kv_lens[r] tokens, and their keys and
    values are in the pools already. All else as in `paged_decode`.

    Raises InvalidParameter for any other dtype, shape or device. Sources: Kwon et al. 2023 (arXiv:2309.06180); Dao et
    al. 2022 (FlashAttention, arXiv:2205.14135).
    """
    _check("paged_prefill", query, keys, values, block_tables, kv_lens, sinks, block_size, window, softcap)
    (tokens, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    requests = len(kv_lens)
    if q_starts.dtype != torch.int32 or len(q_starts) != requests + 1 or q_starts.device != query.device:
        raise InvalidParameter(
            f"paged_prefill got q_starts {tuple(q_starts.shape)} in {q_starts.dtype} on {q_starts.device} for "
            f"{requests} requests; it takes the {requests + 1} borders of the requests' tokens as int32, on the device "
            "of the query."
        )
    out = query.new_empty(tokens, heads, value_dim)
    if tokens == 0 or requests == 0:
        return out
    window = NO_WINDOW if window is None else window
    rows, options = _launch_options(
        False, heads, kv_heads, key_dim, value_dim, block_size, query.dtype, query.device,
        softcap is not None, sinks is not None,
    )  # fmt: skip
    if query.stride(2) != 1:
        query = query.contiguous()
    with torch.cuda.device_of(query):
        prefill_kernel[(_up(most_new * (heads // kv_heads), rows), kv_heads, requests)](
            query, keys, values, block_tables, kv_lens, q_starts, sinks, out, query.stride(0), query.stride(1),
            block_tables.stride(0), window, *_factors(scale, softcap),
            **options,
        )  # fmt: skip
    return out


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(scale, cap) as the kernels take them: the scores come out in units of log2(e)."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


def _check(
    name: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_tables: torch.Tensor,
    kv_lens: torch.Tensor, sinks: torch.Tensor | None, block_size: int, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    """Raise InvalidParameter for what the kernels would read wrongly or beyond its end, as far as the host can know."""
    if query.dtype not in TRITON_DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        raise InvalidParameter(
            f"{name} got a query in {query.dtype}, keys in {keys.dtype} and values in {values.dtype}; it takes all "
            "three in float16, bfloat16 or float32. Make the pools in the dtype of the model."
        )
    if (
        query.dim() != 3 or keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]
        or query.shape[2] != keys.shape[2] or keys.shape[1] == 0 or query.shape[1] % keys.shape[1] != 0
    ):  # fmt: skip
        raise InvalidParameter(
            f"{name} got query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)}; the "
            "shapes are [queries, heads, key_dim], [tokens, kv_heads, key_dim] and [tokens, kv_heads, value_dim], "
            "heads a multiple of kv_heads."
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise InvalidParameter(f"{name} needs keys and values contiguous: copying a pool for each call is no option.")
    if (
        block_tables.dtype != torch.int32 or kv_lens.dtype != torch.int32 or block_tables.dim() != 2
        or kv_lens.shape != block_tables.shape[:1] or block_tables.stride(1) != 1 or not kv_lens.is_contiguous()
    ):  # fmt: skip
        raise InvalidParameter(
            f"{name} got block tables {tuple(block_tables.shape)} in {block_tables.dtype} and lengths "
            f"{tuple(kv_lens.shape)} in {kv_lens.dtype}; they are [requests, blocks] and [requests] in int32, with the "
            "numbers of a row side by side."
        )
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_floating_point()):
        raise InvalidParameter(
            f"{name} got sinks {tuple(sinks.shape)} in {sinks.dtype}; it takes ({query.shape[1]},) in floats, one for "
            "each query head."
        )
    if block_size < 1 or (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise InvalidParameter(
            f"{name} got block_size {block_size}, window {window} and softcap {softcap}; a block has at least 1 token, "
            "and so has a window; a softcap is above 0. Leave window and softcap None for neither."
        )
    device = query.device
    if (
        keys.device != device or values.device != device or block_tables.device != device or kv_lens.device != device
        or (sinks is not None and sinks.device != device) or not (query.is_cuda or INTERPRETED)
    ):  # fmt: skip
        parts = (query, keys, values, block_tables, kv_lens, *([] if sinks is None else [sinks]))
        raise InvalidParameter(
            f"{name} got tensors on {', '.join(str(part.device) for part in parts)}; it needs all of them on one CUDA "
            "device. Move them there, or use the attention for the CPU."
        )
