"""The new tokens of a step, side by side in one row, and where the keys and values of their requests are kept.

Invariant: token t of the row belongs to exactly one request; a request's tokens are neighbours and follow each other in
position, and its row of the block tables covers all of its tokens, the new ones included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..cache.pool import KVPool

if TYPE_CHECKING:
    from .backends import AttentionBackend


@dataclass(eq=False)
class PackedBatch:
    """T new tokens of R requests. Requests with a single new token, the decoding ones, come first.

    pools: for each layer index the pool that keys and values of this step are written to and read from.
    block_size: tokens in a block of the pools. trash_row: a row of the pools that holds zeros.
    q_lens: [R] new tokens of each request. kv_lens: [R] tokens of each request in the cache once the new ones are.
    num_decodes: requests at the beginning that have a single new token.

    On the model's device: slot_mapping int64 [T], the row of the pools that each new token's key and value go to;
    block_tables int32 [R, blocks], whose entries behind a request's own blocks mean nothing; lengths int32 [R], as
    kv_lens; starts int32 [R - num_decodes + 1], where the tokens of each other request begin among all of theirs.

    backend: what attends. derived: what it works out once a step, for all layers. attended: layers that have attended.
    """

    pools: dict[int, KVPool]
    block_size: int
    trash_row: int
    q_lens: list[int]
    kv_lens: list[int]
    num_decodes: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    backend: AttentionBackend
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    attended: int = 0

    @property
    def device(self) -> torch.device:
        return self.slot_mapping.device
