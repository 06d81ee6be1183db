"""What the host says of a decode step, as the tensors that a model reads: in torch, for any device.

Invariant: as in `triton.step_inputs`, whose oracle this is.
"""

from __future__ import annotations

import torch


def step_inputs(
    source: torch.Tensor, token: torch.Tensor, position: torch.Tensor, table: torch.Tensor, chosen: torch.Tensor,
    tables: torch.Tensor, block_size: int, spare_row: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(ids int64 [B], positions int64 [B], slots int64 [B], lengths int32 [B], block tables int32 [B, W]).

    source, token, position, table int32 [B]: a row takes the token that the step before chose for its row `source`, or
    `token` where source is -1; position -1 marks a row that does nothing: length 0, slot spare_row. table: its row of
    `tables` int32 [rows, W]. chosen int64: tokens of the step before; a row of it that has none says -1, and a row that
    goes on from there computes something that nobody reads.
    """
    ids = torch.where(source >= 0, chosen[source.clamp(min=0).long()], token.long()).clamp(min=0)
    positions = position.clamp(min=0).long()
    block_tables = tables.index_select(0, table)
    blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slots = torch.where(position >= 0, blocks * block_size + positions % block_size, spare_row)
    return ids, positions, slots, position + 1, block_tables
