"""Attention of decoding requests over a paged cache on processors: the kernel of paged_decode.c, called from torch.

Invariant: keys and values are read where they lie, through the block tables, and nothing behind a request's length is
read. A request's result has the same bits alone and in any company, with any block size and number of threads.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from functools import cache

import torch

from ..errors import InvalidParameter, one_of
from . import compiled

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NAMES = [str(dtype).removeprefix("torch.") for dtype in KINDS]
EVERYTHING = 2**62  # a window that hides nothing


# `call` in paged_decode.c, field by field: 7 pointers, 12 sizes, scale and softcap, kinds of query and pool. Packing a
# record of bytes takes a fifth of the time that filling a ctypes.Structure does, once a layer and step.
CALL = struct.Struct("@7P12q2f2i")


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
) -> torch.Tensor:
    """One new token of each of R requests over its keys so far (PagedAttention, Kwon et al. 2023).

    query [R, heads, key_dim], in any layout; keys [blocks * block_size, kv_heads, key_dim] and values [.., value_dim],
    contiguous; float32, bfloat16 or float16, all sums in float32. block_tables int32 [R, W]: numbers of the blocks that
    hold a request's tokens, in order of position. kv_lens int32 [R]: its tokens, the new one included, at least 1.

    scale: factor of the scores. window: so many tokens are seen, the new one included. softcap: scores become
    softcap * tanh(scores / softcap). sinks [heads]: a score that takes part in the softmax and carries no value.

    Returns [R, heads, value_dim] in query's dtype. Raises `InvalidParameter` for tensors that do not fit together,
    lengths and blocks that the tables or the pool do not have, and on a machine where the kernel is not usable.
    """
    if reason := why_not(keys.dtype):
        raise InvalidParameter(
            f"compiled_decode with {keys.dtype} is not possible here: {reason}. "
            "minfer_lib.attention.interface.attend_decodes computes the same with torch."
        )
    return _decode(_function(), query, keys, values, block_tables, kv_lens, block_size, scale, window, softcap, sinks)


def usable(dtype: torch.dtype) -> bool:
    """Whether the kernel can be compiled here and computes the right thing for pools of this dtype."""
    return why_not(dtype) is None


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernel is not usable for pools of this dtype; None if it is. Found out once a process."""
    if dtype not in KINDS:
        return f"the kernel reads {one_of(NAMES)}"
    try:
        return _problem(_function(), dtype)
    except compiled.CannotCompile as error:
        return str(error)
    except AttributeError as error:  # a library without the function
        return str(error).splitlines()[0]


@cache
def _function() -> Callable[[bytes], int]:
    function = compiled.library("paged_decode").paged_decode
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def _decode(
    function: Callable[[bytes], int],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    try:
        (requests, heads, key_dim), (rows, kv_heads, _), value_dim = query.shape, keys.shape, values.shape[2]
        fits = (
            keys.shape[2] == key_dim
            and values.shape == (rows, kv_heads, value_dim)
            and heads % kv_heads == 0
            and rows % block_size == 0
            and tables.shape[0] == requests
            and lengths.shape == (requests,)
            and tables.dtype is lengths.dtype is torch.int32
            and keys.dtype is values.dtype
            and query.dtype in KINDS
            and query.is_cpu and keys.is_cpu and values.is_cpu and tables.is_cpu and lengths.is_cpu
            and keys.is_contiguous()
            and values.is_contiguous()
            and block_size >= 1
            and (window is None or window >= 1)
            and (softcap is None or softcap > 0)
            and (sinks is None or sinks.shape == (heads,))
        )  # fmt: skip
    except (ValueError, IndexError, TypeError, ZeroDivisionError, AttributeError):
        fits = False
    if not fits:
        raise InvalidParameter(_complaint(query, keys, values, tables, lengths, block_size, window, softcap, sinks))
    query_step, head_step, step = query.stride()
    if step != 1:
        query = query.contiguous()
        query_step, head_step, step = query.stride()
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    if sinks is not None:
        sinks = sinks.to("cpu", torch.float32).contiguous()
    lengths = lengths.contiguous()
    out = torch.empty(requests, heads, value_dim, dtype=query.dtype)
    call = CALL.pack(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        tables.data_ptr(),
        lengths.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        requests,
        heads,
        kv_heads,
        key_dim,
        value_dim,
        query_step,
        head_step,
        tables.stride(0),
        tables.shape[1],
        rows // block_size,
        block_size,
        window or EVERYTHING,
        scale,
        softcap or 0.0,
        KINDS[query.dtype],
        KINDS[keys.dtype],
    )
    if code := function(call):
        raise _failure(code, tables, lengths, rows // block_size, block_size)
    return out


def _complaint(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> str:
    """What does not fit, of arguments that do not."""
    tensors = {"query": query, "keys": keys, "values": values, "block_tables": tables, "kv_lens": lengths}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
            where = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            return f"{name} is on {where}: compiled_decode takes tensors in the processor's memory. Move it there."
    for name, least in {"block_size": block_size, "window": window}.items():
        if not (isinstance(least, int) and least >= 1) and not (name == "window" and least is None):
            return f"{name}={least!r} is not possible: it must be a whole number of tokens, at least 1."
    if softcap is not None and not (isinstance(softcap, int | float) and softcap > 0):
        return f"softcap={softcap!r} is not possible: it must be above 0, or None for scores as they are."
    if query.dtype not in KINDS or keys.dtype != values.dtype:
        return (
            f"query is {query.dtype}, keys are {keys.dtype} and values {values.dtype}: query may be {one_of(NAMES)}, "
            "and keys and values must have the same dtype. Convert them."
        )
    if tables.dtype != torch.int32 or lengths.dtype != torch.int32:
        return f"block_tables are {tables.dtype} and kv_lens {lengths.dtype}: both must be torch.int32. Convert them."
    if keys.dim() == 3 and values.dim() == 3 and not (keys.is_contiguous() and values.is_contiguous()):
        return "keys or values are not contiguous: the kernel reads a pool where it lies. Pass the whole pool."
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    sinks_shape = "" if sinks is None else f", sinks {list(getattr(sinks, 'shape', ()))}"
    return (
        f"{shapes}{sinks_shape} with block_size={block_size} do not fit together: they must be [R, heads, key_dim], "
        "[blocks * block_size, kv_heads, key_dim], [blocks * block_size, kv_heads, value_dim], [R, W] and [R], sinks "
        "[heads], with heads a multiple of kv_heads. Check which of them differs."
    )


def _failure(code: int, tables: torch.Tensor, lengths: torch.Tensor, blocks: int, block_size: int) -> Exception:
    """The error that stands for what paged_decode returned."""
    if code == 1:
        return MemoryError("none is left for the parts of long contexts; run fewer requests at a time")
    if code == 2:
        return InvalidParameter(
            f"kv_lens from {lengths.min()} to {lengths.max()} are not possible: with {tables.shape[1]} blocks of "
            f"{block_size} tokens a request has 1 to {tables.shape[1] * block_size}. Count the new token, and give it "
            "a block."
        )
    return InvalidParameter(
        f"block_tables name blocks from {tables.min()} to {tables.max()}: the pool has blocks 0 to {blocks - 1}. "
        "Blocks that a request's tokens are in must exist."
    )


def _problem(function: Callable[[bytes], int], dtype: torch.dtype) -> str | None:
    """What the kernel gets wrong on a small case with all that there is to it; None if nothing."""
    generator = torch.Generator().manual_seed(0)
    lengths, block_size, (kv_heads, group, key_dim, value_dim) = [1, 23, 300], 7, (2, 5, 20, 37)
    width = -(-max(lengths) // block_size)
    tables = torch.randperm(3 * width, generator=generator).view(3, width)
    keys, values, query, sinks = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in (
            (3 * width * block_size, kv_heads, key_dim),
            (3 * width * block_size, kv_heads, value_dim),
            (3, kv_heads * group, key_dim),
            (kv_heads * group,),
        )
    )
    scale, window, softcap = 0.4, 290, 3.0
    found = _decode(
        function, query, keys, values, tables.int(), torch.tensor(lengths, dtype=torch.int32), block_size, scale,
        window, softcap, sinks,
    )  # fmt: skip
    for r, length in enumerate(lengths):
        position = torch.arange(max(0, length - window), length)
        rows = tables[r, position // block_size] * block_size + position % block_size
        k, v = (pool[rows].double().repeat_interleave(group, 1) for pool in (keys, values))  # [length, heads, dim]
        scores = torch.einsum("hd,lhd->hl", query[r].double(), k) * scale
        scores = torch.cat([softcap * (scores / softcap).tanh(), sinks.double()[:, None]], 1)
        wanted = torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, :-1], v)
        limit = 1e-5 + (0 if dtype is torch.float32 else torch.finfo(dtype).eps) * wanted.abs()
        if not math.isfinite(found[r].sum()) or not ((found[r].double() - wanted).abs() <= limit).all():
            return "its results are wrong on this processor"
    return None
