"""Attention of decoding requests over a paged cache on CPUs: the kernel of paged_decode.c, called from torch.

Invariant: keys and values are read where they lie, through the block tables, and nothing behind a request's length is
read. A request's result has the same bits alone and in any company, with any block size and number of threads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch

from ..errors import InvalidParameter, one_of
from . import compiled
from .reference_parts import quantize_rows

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POOL_KINDS = KINDS | {torch.int8: 3}
NO_WINDOW = 2**62  # more than any context

# `call` in paged_decode.c, field by field: 9 pointers, 12 sizes, scale and softcap, kinds of query and pool. Packing a
# record of bytes takes a fifth of the time that filling a ctypes.Structure does, once a layer and step.
CALL = struct.Struct("@9P12q2f2i")


def compiled_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One new token of each of R requests over the keys of its request -> [R, heads, value_dim] in the query's dtype.

    query [R, heads, key_dim]; keys [rows, kv_heads, key_dim] and values [rows, kv_heads, value_dim], the pools of a
    layer: the token at position p of request r lies in row block_tables[r, p // block_size] * block_size + p %
    block_size. Both float32, bfloat16 or float16, all sums in float32; or both int8, with key_scales and value_scales
    float32 [rows, kv_heads] that the codes are multiplied by. block_tables [R, W] int32, a slice of a wider table too;
    kv_lens [R] int32, the tokens of each request, the new one included. No other row and no other entry of the table is
    read. A request of length 0 gets zeros.

    scale: factor of the scores. window: so many tokens are seen, the new one included. softcap: scores become
    softcap * tanh(scores / softcap). sinks [heads]: a score that takes part in the softmax and carries no value.

    Raises InvalidParameter for tensors that do not fit together, for lengths and blocks that the tables or the pool do
    not have, and where the kernel is not usable. Source: Kwon et al. 2023 (PagedAttention, arXiv:2309.06180).
    """
    if reason := why_not(query.dtype if keys.dtype == torch.int8 else keys.dtype):
        raise InvalidParameter(f"compiled_decode cannot run over {keys.dtype} here: {reason}. Attend with torch.")
    out = torch.empty(*query.shape[:2], values.shape[-1], dtype=query.dtype, device=query.device)
    _decode(
        c_function(), out, query, keys, values, block_tables, kv_lens, block_size, scale, window, softcap, sinks,
        key_scales, value_scales,
    )  # fmt: skip
    return out


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernel is not usable for keys of this dtype, kept as they are or as int8; None if it is. Found out once a
    process."""
    if dtype not in KINDS:
        return f"the kernel reads {one_of([str(kind).removeprefix('torch.') for kind in KINDS])}"
    try:
        function = c_function()
    except compiled.CannotCompile as error:
        return str(error)
    with torch.device("cpu"):  # whatever the caller's default is
        sizes = ((2, 5, 20, 37), (3, 1, 56, 56))
        right = all(_is_right(function, dtype, kept, *heads) for kept in (dtype, torch.int8) for heads in sizes)
    return None if right else "its results are wrong on this CPU"


@cache
def c_function() -> Callable[[bytes], int]:
    function = compiled.library("paged_decode").paged_decode
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def _decode(
    function: Callable[[bytes], int], out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    block_tables: torch.Tensor, kv_lens: torch.Tensor, block_size: int, scale: float, window: int | None,
    softcap: float | None, sinks: torch.Tensor | None, key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write the result to `out` [R, heads, value_dim]. Beyond shapes, lengths and blocks are checked in C."""
    scales = [part for part in (key_scales, value_scales) if part is not None]
    fits = (
        query.dim() == keys.dim() == values.dim() == 3 and query.dtype in KINDS and keys.dtype == values.dtype
        and len(scales) == 2 * (keys.dtype == torch.int8)
        and all(part.shape == keys.shape[:2] and part.dtype == torch.float32 for part in scales)
        and all(part.is_contiguous() and part.is_cpu for part in scales)
        and keys.shape[:2] == values.shape[:2] and query.shape[2] == keys.shape[2]
        and query.shape[1] % keys.shape[1] == 0 and (sinks is None or sinks.shape == query.shape[1:2])
        and block_tables.shape[:-1] == kv_lens.shape == query.shape[:1] and block_tables.stride(-1) == 1
        and block_tables.dtype == kv_lens.dtype == torch.int32
        and keys.is_contiguous() and values.is_contiguous() and kv_lens.is_contiguous()
        and query.is_cpu and keys.is_cpu and values.is_cpu and block_tables.is_cpu and kv_lens.is_cpu
        and (sinks is None or (sinks.is_cpu and sinks.is_contiguous()))
    )  # fmt: skip
    if not fits:
        tensors = [query, keys, values, block_tables, kv_lens, *([] if sinks is None else [sinks]), *scales]
        got = ", ".join(f"{list(part.shape)} {part.dtype} on {part.device}" for part in tensors)
        raise InvalidParameter(
            f"compiled_decode got {got}; it takes query [R, heads, key_dim], keys [rows, kv_heads, key_dim] and values "
            "[rows, kv_heads, value_dim] in one dtype, int32 block tables [R, W] and lengths [R], sinks [heads] or "
            "None, and for int8 float32 scales [rows, kv_heads] of keys and values, on the CPU, contiguous but for the "
            "query and the rows of the block tables."
        )
    if query.stride(2) != 1:
        query = query.contiguous()
    if sinks is not None:
        sinks = sinks.float()
    blocks = len(keys) // block_size
    code = function(
        CALL.pack(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), block_tables.data_ptr(),
            kv_lens.data_ptr(),
            *(0 if part is None else part.data_ptr() for part in (sinks, key_scales, value_scales)),
            *query.shape[:2], *keys.shape[1:], values.shape[2],
            *query.stride()[:2], block_tables.stride(0), block_tables.shape[1], blocks, block_size,
            window or NO_WINDOW, scale, softcap or 0.0, KINDS[query.dtype], POOL_KINDS[keys.dtype],
        )
    )  # fmt: skip
    if code == 1:
        raise MemoryError("none is left for the parts of long contexts; run fewer requests at a time")
    if code:  # a fault of the caller, found in C before anything is read
        raise InvalidParameter(
            f"compiled_decode got kv_lens from {kv_lens.min()} to {kv_lens.max()} and blocks from {block_tables.min()} "
            f"to {block_tables.max()}: a request has 0 to {block_tables.shape[1] * block_size} tokens, in blocks 0 to "
            f"{blocks - 1}."
        )


def _is_right(
    function: Callable[[bytes], int], dtype: torch.dtype, kept: torch.dtype, kv_heads: int, group: int, key_dim: int,
    value_dim: int,
) -> bool:  # fmt: skip
    """Whether `function` computes a small case with all that there is to it, in its every digit. kept: the pool's."""
    generator = torch.Generator().manual_seed(0)
    lengths, block_size, scale, window, softcap = [1, 23, 0, 500], 7, 0.4, 490, 3.0
    width, heads = -(-max(lengths) // block_size), kv_heads * group
    tables = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    rows = tables.numel() * block_size
    keys, values, query, sinks = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((rows, kv_heads, key_dim), (rows, kv_heads, value_dim), (len(lengths), heads, key_dim), (heads,))
    )
    out = torch.full((len(lengths), heads, value_dim), torch.nan, dtype=dtype)  # what is not written stays NaN
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    pools, scales = (keys, values), (None, None)
    if kept == torch.int8:
        pools, scales = zip(*map(quantize_rows, pools), strict=True)
        keys, values = (codes.double() * part[..., None] for codes, part in zip(pools, scales, strict=True))
    _decode(function, out, query, *pools, tables.int(), kv_lens, block_size, scale, window, softcap, sinks, *scales)
    for r, length in enumerate(lengths):
        position = torch.arange(max(0, length - window), length)
        at = tables[r, position // block_size] * block_size + position % block_size
        k, v = (pool[at].double().repeat_interleave(group, 1) for pool in (keys, values))  # [length, heads, dim]
        scores = torch.einsum("hd,lhd->hl", query[r].double(), k) * scale
        scores = torch.cat([softcap * (scores / softcap).tanh(), sinks.double()[:, None]], 1)
        wanted = torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, :-1], v)
        half_a_digit = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
        if not ((out[r].double() - wanted).abs() <= 2e-6 + half_a_digit * wanted.abs()).all():  # not for NaN either
            return False
    return True
