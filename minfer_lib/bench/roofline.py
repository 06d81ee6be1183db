"""How fast could it be? The time that a decode step needs to read its bytes, and the share of it that was reached.

Invariant: the floor counts only what no implementation can avoid: every weight that takes part once, whatever the
batch, and the keys and values of every request once. Both are divided by the bandwidth measured on this machine. So a
share over 1 would mean that something here is wrong (or that the weights fit into a cache), and is not hidden.

The model is that of Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import InvalidParameter
from ..models.load import LanguageModel
from ..models.memory import ModelShape, kv_bytes_per_token
from ..quant.linear import Int8Embedding
from .machine import peak_flops, read_bandwidth, weights_name

if TYPE_CHECKING:
    from .results import Result


@dataclass(frozen=True)
class Roofline:
    """What a machine can do: `bandwidth` in bytes read a second, `flops` in floating-point operations a second."""

    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """Operations per byte from which on arithmetic, no longer memory, sets the pace."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """The most operations a second at so many operations per byte."""
        return min(self.flops, intensity * self.bandwidth)


def machine_roofline(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Roofline:
    """The roofline of a device, measured on the spot with `machine.read_bandwidth` and `machine.peak_flops`."""
    return Roofline(read_bandwidth(device), peak_flops(device, dtype))


def weight_bytes_read(model: nn.Module) -> int:
    """Bytes of weights that one decode step reads, whatever its batch.

    Everything the model holds, but not its embedding tables, of which a step reads one row per token. If the table
    serves as output layer too (tied weights), it is read whole there, once. Quantised weights count as they are
    stored: codes of one byte, and their scales. Of a mixture of experts all count, though a small batch reads only
    some: there the floor is too high.
    """
    return sum(tensor.nbytes for tensor in _tensors_read(model))


def decode_step_bytes(
    lm: LanguageModel, requests: float = 1, kv_tokens: float = 0, token_bytes: int | None = None
) -> float:
    """Bytes that one decode step reads for `requests` requests that look back at `kv_tokens` tokens each.

    token_bytes: of a token in the cache; None for one in the model's own dtype.
    """
    token_bytes = kv_token_bytes(lm) if token_bytes is None else token_bytes
    return weight_bytes_read(lm.model) + requests * kv_tokens * token_bytes


def kv_token_bytes(lm: LanguageModel) -> int:
    """Bytes that one token takes in a cache of the model's own dtype, by the formula of `memory`."""
    return kv_bytes_per_token(ModelShape.from_config(lm.model.config), lm.dtype.itemsize)


def decode_step_flops(lm: LanguageModel, requests: float = 1, kv_tokens: float = 0, new_tokens: float = 1) -> float:
    """Operations of one step for `requests` requests that look back at `kv_tokens` tokens each, the new one included.

    Two for each weight of a matrix and each token, and in each layer four for each query head, dimension and pair of
    tokens: a product for the score, another for the weighted sum. new_tokens: that each request computes, of which
    only the last goes through the output layer; an engine without a cache computes them all. Every layer counts as if
    it saw the whole context, and of a mixture of experts all count.
    """
    shape = ModelShape.from_config(lm.model.config)
    matrices = sum(tensor.numel() for tensor in _tensors_read(lm.model) if tensor.dim() > 1)
    head = shape.vocab * shape.hidden
    pairs = new_tokens * max(0.0, kv_tokens - (new_tokens - 1) / 2)  # a token sees itself and those before it
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return requests * (2 * (new_tokens * (matrices - head) + head) + attention)


def floor_ms(lm: LanguageModel, requests: float = 1, kv_tokens: float = 0, token_bytes: float | None = None) -> float:
    """Milliseconds that a decode step takes at the least: its bytes / the measured read bandwidth.

    token_bytes: of the cache, a token; None takes keys and values in the model's dtype.
    """
    return 1e3 * decode_step_bytes(lm, requests, kv_tokens, token_bytes) / read_bandwidth(lm.device)


def points(result: Result, *models: LanguageModel) -> dict[str, tuple[float, float]]:
    """Where each engine of a ladder stands under the roofline: {name: (operations per byte, operations a second)}.

    Both are those of its decode step, at the concurrency and the context that it had on average, in its TPOT. `models`
    are those that the rows ran, one for each kind of weights: `points(result, lm, int8_lm)`. A row of other weights, or
    without a TPOT, is left out. Raises `InvalidParameter` where that leaves nothing. `plots.roofline` draws them.
    """
    by_weights = {weights_name(lm): lm for lm in models}
    found = {}
    for row in result.rows:
        lm = by_weights.get(row.weights)
        if lm is not None and row.tpot_ms:
            flops = decode_step_flops(lm, row.concurrency, row.kv_tokens)
            bytes_read = decode_step_bytes(lm, row.concurrency, row.kv_tokens)
            found[row.engine] = (flops / bytes_read, flops / (row.tpot_ms / 1e3))
    if not found:
        raise InvalidParameter(
            "No engine has a place under the roofline: no row has a TPOT and the weights of a model that was given "
            f"({', '.join(by_weights) or 'none was'})."
        )
    return found


def _tensors_read(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers without the embedding tables, unless the output layer shares its table."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | Int8Embedding)]
    left_out = {_place(tensor) for table in tables for tensor in _held(table)}
    left_out -= set() if head is None else {_place(tensor) for tensor in _held(head)}
    # by place, since tied weights count once: a quantised output layer has tensors of its own over the same memory
    return [tensor for place, tensor in {_place(t): t for t in _held(model)}.items() if place not in left_out]


def _held(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies in memory; one without any (on the device "meta") is told by itself."""
    return (tensor.data_ptr(), tensor.nbytes) if tensor.data_ptr() else (id(tensor), 0)
