"""The kernels of paged attention, in Triton: decoding, the merge of its parts, and prompts.

Invariant: a key or value is found through its request's block table and nowhere else, and is never repeated for the
query heads that share it; what no query of a program may see is not loaded: whatever stands in free blocks or behind a
request's length, NaN too, cannot reach a result. Sums are float32 and run in a fixed order, so equal inputs give equal
bits. `paged_attention` launches the kernels and checks what they get.

Three ideas, one on top of the other. *Following the table* (Kwon et al. 2023, PagedAttention, arXiv:2309.06180): the
token at position p lies in row table[p // block_size] * block_size + p % block_size of the pools. The *online softmax*
(Milakov and Gimelshein 2018, arXiv:1805.02867; for attention Dao et al. 2022, FlashAttention, arXiv:2205.14135): keys
come in tiles, and a running maximum, sum and average stand for all of the tiles so far, so that no row of scores is
ever written out. *Split and merge* (Dao et al. 2023, Flash-Decoding): such running results of parts of the keys can be
merged into that of all of them, so several programs may share one long context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import wait_for_dot

LOWEST = tl.constexpr(-3e38)  # where a running maximum starts: finite, since -inf - -inf would be NaN
LOG2_E = tl.constexpr(1.4426950408889634)
# How float32 is multiplied: as three products of tf32 halves, as exact as the float32 units and several times as fast.
PRECISION = tl.constexpr("tf32x3" if torch.version.hip is None else "ieee")


@triton.jit
def _pool_rows(table, positions, seen, BLOCK_SIZE: tl.constexpr):
    """Rows of the pools that hold the tokens at these positions, as int64: a pool may have more than 2**31 numbers."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def _load_rows(pool, rows, seen, STRIDE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of a pool; zeros past DIM and in what is not seen, since a weight of 0 times NaN is NaN."""
    dims = tl.arange(0, PADDED)
    inside = seen[:, None] if PADDED == DIM else seen[:, None] & (dims < DIM)[None, :]
    return tl.load(pool + rows[:, None] * STRIDE + dims[None, :], mask=inside, other=0)


@triton.jit
def _scores(query, keys, scale, cap, CAPPED: tl.constexpr):
    """[queries, keys] query . key * scale, in float32 and in units of log2(e): exp2 is the instruction that GPUs have.

    scale: a number, or one for each key [1, keys]. CAPPED: cap * tanh(scale * query . key).
    """
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
    if CAPPED:
        small = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))  # exp(-2 |x|); tanh |x| is (1 - it) / (1 + it)
        scores = cap * tl.where(scores < 0, small - 1.0, 1.0 - small) / (1.0 + small)
    return scores


@triton.jit
def _online_step(top, total, average, scores, values, ASYNCHRONOUS: tl.constexpr):
    """One more tile of the online softmax.

    top [queries]: the highest score so far; total [queries]: sum of exp2(score - top); average [queries, dims]: sum of
    exp2(score - top) * value, which divided by total is the result. A higher top shrinks what was summed before it.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    average = average * shrink[:, None]
    average = tl.dot(weights.to(values.dtype), values, average, input_precision=PRECISION)
    if ASYNCHRONOUS:  # the weights are the left operand, in registers: the tensor cores must be done with them
        average = wait_for_dot(average)
    return new_top, total, average


@triton.jit
def _attend(
    query, table, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_head, begin, end, own, window, scale, cap,
    top, total, average,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_KEY: tl.constexpr, PADDED_VALUE: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr,
    HIDE: tl.constexpr, DOT_DTYPE: tl.constexpr, ASYNCHRONOUS: tl.constexpr,
):  # fmt: skip
    """The loop of both kernels: queries [queries, PADDED_KEY] over a request's keys from position `begin` to `end`.

    With scales, keys and values are codes. A key's is multiplied into its scores; a value's into the value, since
    a weight that is multiplied by it may be too small for float16.

    HIDE: what of a tile must not be seen: "nothing", or what lies behind the "end", or what the "position" `own`
    [queries] of a query and its window forbid.
    """
    for at in range(begin, end, TILE):
        positions = at + tl.arange(0, TILE)
        seen = positions < end
        rows = _pool_rows(table, positions, seen, BLOCK_SIZE)
        keys = _load_rows(keys_ptr + kv_head * KEY_DIM, rows, seen, KV_HEADS * KEY_DIM, KEY_DIM, PADDED_KEY)
        values = _load_rows(values_ptr + kv_head * VALUE_DIM, rows, seen, KV_HEADS * VALUE_DIM, VALUE_DIM, PADDED_VALUE)
        factor = scale
        if key_scales_ptr is not None:
            scales_at = rows * KV_HEADS + kv_head
            factor = scale * tl.load(key_scales_ptr + scales_at, mask=seen, other=0.0)[None, :]
            values = values.to(tl.float32) * tl.load(value_scales_ptr + scales_at, mask=seen, other=0.0)[:, None]
        scores = _scores(query.to(DOT_DTYPE), keys.to(DOT_DTYPE), factor, cap, CAPPED)
        if HIDE == "end":
            scores = tl.where(seen[None, :], scores, float("-inf"))
        if HIDE == "position":
            age = own[:, None] - positions[None, :]
            scores = tl.where((age >= 0) & (age < window), scores, float("-inf"))
        top, total, average = _online_step(top, total, average, scores, values.to(DOT_DTYPE), ASYNCHRONOUS)
    return top, total, average


@triton.jit
def _merge(
    partial_ptr, out_ptr, first_row, in_group, parts, splits,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The online softmax over the parts of some heads of a request, AT_ONCE at a time, in order.

    The parts were written by other programs of this launch: they are read past the L1 cache.
    """
    dims = tl.arange(0, PADDED_VALUE)
    row = first_row + in_group
    top, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    average = tl.zeros((ROWS, PADDED_VALUE), tl.float32)
    for at in range(0, parts, AT_ONCE):
        i = at + tl.arange(0, AT_ONCE)
        seen = (i < parts)[:, None] & (in_group < GROUP)[None, :]
        part = partial_ptr + (row[None, :] * splits + i[:, None]) * (VALUE_DIM + 2)  # [AT_ONCE, ROWS]
        tops = tl.load(part + VALUE_DIM, mask=seen, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(part + VALUE_DIM + 1, mask=seen, other=0.0, cache_modifier=".cg")
        inside = seen[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        averages = tl.load(part[:, :, None] + dims[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights, shrink = tl.exp2(tops - new_top[None, :]), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(totals * weights, 0)
        average = average * shrink[:, None] + tl.sum(averages * weights[:, :, None], 0)
        top = new_top
    average /= tl.where(total == 0.0, 1.0, total)[:, None]
    inside = (in_group < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out_ptr + row[:, None] * VALUE_DIM + dims[None, :], average.to(out_ptr.dtype.element_ty), mask=inside)


# Where a batch begins in a persistent table must not compile a kernel anew: hence nothing about alignment.
@triton.jit(
    do_not_specialize=["table_stride", "keys_per_split", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"],
)
def decode_kernel(
    query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, lens_ptr, sinks_ptr, out_ptr,
    partial_ptr, tickets_ptr,
    token_stride, head_stride, table_stride, keys_per_split, window, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_KEY: tl.constexpr, PADDED_VALUE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr, DOT_DTYPE: tl.constexpr,
) -> None:  # fmt: skip
    """One new token per request: a program takes one part of one request's keys, for the heads that share a key head.

    PARTS: "one": the result goes to out [R, heads, VALUE_DIM]. Else the running top, total and average go to partial
    [R, heads, splits, VALUE_DIM + 2] in float32: for `merge_kernel` ("many"), or with "few" for the last program of a
    request and key head to come, told by a ticket, which merges them; it leaves the ticket at zero.
    """
    parts: tl.constexpr = (GROUP + ROWS - 1) // ROWS  # of a group: 1 up to 32 heads
    kv_head, split, request = tl.program_id(0) // parts, tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + request)
    begin = tl.maximum(length - window, 0) + split * keys_per_split  # what is older than the window is skipped
    end = tl.minimum(begin + keys_per_split, length)
    # A short request has fewer parts. The first is there even for one of length 0, which gets zeros.
    if begin >= length and (PARTS == "many" or split > 0):
        return

    # The heads of the group are the rows of a small matrix, padded to the 16 that tensor cores take.
    in_group, dims = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_KEY)
    heads = kv_head * GROUP + in_group
    query_at = request.to(tl.int64) * token_stride + heads.to(tl.int64) * head_stride
    query_at = query_at[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_at, mask=(in_group < GROUP)[:, None] & (dims < KEY_DIM)[None, :], other=0.0)

    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    average = tl.zeros((ROWS, PADDED_VALUE), tl.float32)
    if SINKS and split == 0:  # one more score, without a value: the sum starts with it
        top = tl.load(sinks_ptr + heads, mask=in_group < GROUP, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    table = tables_ptr + request.to(tl.int64) * table_stride
    top, total, average = _attend(
        query, table, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_head, begin, end, None, None, scale,
        cap, top, total, average,
        KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, PADDED_KEY, PADDED_VALUE, TILE, CAPPED, "end", DOT_DTYPE, False,
    )  # fmt: skip

    dims = tl.arange(0, PADDED_VALUE)
    out_row = request.to(tl.int64) * (KV_HEADS * GROUP) + heads
    inside = (in_group < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    written = tl.cdiv(tl.minimum(length, window), keys_per_split)  # parts of this request
    if PARTS == "one" or (PARTS == "few" and written <= 1):
        average /= tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = out_row[:, None] * VALUE_DIM + dims[None, :]
        tl.store(out_ptr + out_at, average.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        splits = tl.num_programs(1)
        part = partial_ptr + (out_row * splits + split) * (VALUE_DIM + 2)
        tl.store(part[:, None] + dims[None, :], average, mask=inside)
        tl.store(part + VALUE_DIM, top, mask=in_group < GROUP)
        tl.store(part + VALUE_DIM + 1, total, mask=in_group < GROUP)
        if PARTS == "few":
            tl.debug_barrier()  # all threads have stored before one of them takes the ticket
            ticket = tickets_ptr + request * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(ticket, 1, sem="acq_rel") == written - 1:  # all others are done
                tl.store(ticket, 0)
                first = request.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
                _merge(
                    partial_ptr, out_ptr, first, in_group, written, splits, GROUP, VALUE_DIM, PADDED_VALUE, ROWS,
                    AT_ONCE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["keys_per_split", "splits", "window"], do_not_specialize_on_alignment=["lens_ptr"])
def merge_kernel(
    partial_ptr, lens_ptr, out_ptr, keys_per_split, splits, window,
    VALUE_DIM: tl.constexpr, PADDED_VALUE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """out [R, heads, VALUE_DIM] from partial [R, heads, splits, VALUE_DIM + 2]: the online softmax over parts.

    A program takes one head of one request, and TILE parts at a time, in order.
    """
    head, request = tl.program_id(0), tl.program_id(1)
    row = request.to(tl.int64) * tl.num_programs(0) + head
    length = tl.minimum(tl.load(lens_ptr + request), window)
    parts = tl.cdiv(length, keys_per_split)  # the others wrote nothing
    dims = tl.arange(0, PADDED_VALUE)
    top, total = tl.full((1,), LOWEST, tl.float32), tl.zeros((1,), tl.float32)
    average = tl.zeros((PADDED_VALUE,), tl.float32)
    for at in range(0, parts, TILE):
        split = at + tl.arange(0, TILE)
        seen = split < parts
        part = partial_ptr + (row * splits + split) * (VALUE_DIM + 2)
        averages = tl.load(part[:, None] + dims, mask=seen[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
        tops = tl.load(part + VALUE_DIM, mask=seen, other=LOWEST)
        totals = tl.load(part + VALUE_DIM + 1, mask=seen, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights, shrink = tl.exp2(tops - new_top), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(totals * weights, 0)
        average = average * shrink + tl.sum(averages * weights[:, None], 0)
        top = new_top
    average /= tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_DIM + dims, average.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"])
def prefill_kernel(
    query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, lens_ptr, starts_ptr, sinks_ptr,
    out_ptr,
    token_stride, head_stride, table_stride, window, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_KEY: tl.constexpr, PADDED_VALUE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    DOT_DTYPE: tl.constexpr, ASYNCHRONOUS: tl.constexpr,
) -> None:  # fmt: skip
    """New tokens of requests, some or many of each: a program takes ROWS pairs of (new token, head of a group).

    The pairs of a request are counted through with the heads innermost, so that keys that are fetched once meet all
    heads that share them and no row is lost where the size of a group is no power of two.
    """
    request, kv_head = tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tokens see the most keys: they start first
    start = tl.load(starts_ptr + request)
    new = tl.load(starts_ptr + request + 1) - start
    if tile * ROWS >= new * GROUP:
        return  # the grid is made for the longest chunk
    length = tl.load(lens_ptr + request)
    pairs = tile * ROWS + tl.arange(0, ROWS)
    tokens, heads = pairs // GROUP, kv_head * GROUP + pairs % GROUP
    inside = pairs < new * GROUP
    own = length - new + tokens  # the positions of the tokens: the last new one is the last of the request
    first_own = length - new + tile * ROWS // GROUP
    begin = tl.maximum(first_own - window + 1, 0)
    end = tl.minimum(length, length - new + (tile * ROWS + ROWS - 1) // GROUP + 1)  # later keys nobody here sees

    dims = tl.arange(0, PADDED_KEY)
    query_at = (start + tokens).to(tl.int64) * token_stride + heads.to(tl.int64) * head_stride
    query_at = query_at[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_at, mask=inside[:, None] & (dims < KEY_DIM)[None, :], other=0.0)

    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    average = tl.zeros((ROWS, PADDED_VALUE), tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
        total += 1.0
    table = tables_ptr + request.to(tl.int64) * table_stride
    # Up to the first own position all queries see all keys, unless a window bites: most tiles need no mask.
    border = tl.where(length <= window, (first_own + 1) // TILE * TILE, begin)
    top, total, average = _attend(
        query, table, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_head, begin, border, own, window,
        scale, cap, top, total, average,
        KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, PADDED_KEY, PADDED_VALUE, TILE, CAPPED, "nothing", DOT_DTYPE,
        ASYNCHRONOUS,
    )  # fmt: skip
    top, total, average = _attend(
        query, table, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, kv_head, border, end, own, window, scale,
        cap, top, total, average,
        KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, PADDED_KEY, PADDED_VALUE, TILE, CAPPED, "position", DOT_DTYPE,
        ASYNCHRONOUS,
    )  # fmt: skip

    average /= tl.where(total == 0.0, 1.0, total)[:, None]
    dims = tl.arange(0, PADDED_VALUE)
    out_row = (start + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    out_at = out_row[:, None] * VALUE_DIM + dims[None, :]
    tl.store(out_ptr + out_at, average.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dims < VALUE_DIM)[None, :])
