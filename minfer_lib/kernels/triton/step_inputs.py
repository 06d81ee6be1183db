"""What the host says of a decode step, as the tensors that a model reads: one small kernel at the start of a graph.

Invariant: nothing here depends on the host knowing the tokens of the step before, so that it need not wait for them. A
row that does nothing (position -1) has length 0 and writes to the spare row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width", "table_stride", "spare_row"])
def step_inputs_kernel(
    source_ptr, token_ptr, position_ptr, table_ptr, chosen_ptr, tables_ptr,
    ids_ptr, positions_ptr, slots_ptr, lengths_ptr, out_tables_ptr, width, table_stride, spare_row,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One row of the batch a program: its numbers, and a copy of its block table."""
    row = tl.program_id(0)
    source = tl.load(source_ptr + row)
    given = tl.load(token_ptr + row).to(tl.int64)
    chosen = tl.load(chosen_ptr + tl.maximum(source, 0))
    told = tl.load(position_ptr + row)
    position = tl.maximum(told, 0)
    table = tables_ptr + tl.load(table_ptr + row).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    slot = tl.where(told >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, spare_row)
    tl.store(ids_ptr + row, tl.maximum(tl.where(source >= 0, chosen, given), 0))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(slots_ptr + row, slot)
    tl.store(lengths_ptr + row, told + 1)
    for begin in range(0, width, TILE):
        at = begin + tl.arange(0, TILE)
        tl.store(out_tables_ptr + row.to(tl.int64) * width + at, tl.load(table + at, mask=at < width), mask=at < width)


def step_inputs(
    source: torch.Tensor, token: torch.Tensor, position: torch.Tensor, table: torch.Tensor, chosen: torch.Tensor,
    tables: torch.Tensor, block_size: int, spare_row: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As `reference_step.step_inputs`."""
    rows, width = len(source), tables.shape[1]
    ids, positions, slots = (torch.empty(rows, dtype=torch.int64, device=tables.device) for _ in range(3))
    lengths = torch.empty(rows, dtype=torch.int32, device=tables.device)
    block_tables = torch.empty(rows, width, dtype=torch.int32, device=tables.device)
    step_inputs_kernel[(rows,)](
        source, token, position, table, chosen, tables, ids, positions, slots, lengths, block_tables,
        width, tables.stride(0), spare_row, BLOCK_SIZE=block_size, TILE=128, num_warps=1,
    )  # fmt: skip
    return ids, positions, slots, lengths, block_tables
