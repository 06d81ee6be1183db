"""Memory for keys and values that many requests share, and what a cache says about a part of it.

Invariant: a pool has a row for each token that it has room for, in an order that the cache which owns it decides; rows
that were never written hold zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of a token: kv_heads keys of key_dim and as many values of value_dim numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass
class KVPool:
    """Room for the keys and values of `tokens` tokens of one layer: keys [tokens, kv_heads, key_dim], values alike."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, shape: LayerShape, tokens: int, device: torch.device) -> KVPool:
        """A pool of zeros."""
        return cls(
            zeros((tokens, shape.kv_heads, shape.key_dim), shape.dtype, device),
            zeros((tokens, shape.kv_heads, shape.value_dim), shape.dtype, device),
        )

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts new keys [new, kv_heads, key_dim] and values into the given rows [new] of the pool."""
        self.keys.index_copy_(0, rows, keys)
        self.values.index_copy_(0, rows, values)


@dataclass(frozen=True)
class Prefix:
    """The first `tokens` tokens of a request, where a cache holds them already: in these blocks.

    keys: of its full blocks, for a cache that finds blocks by what they hold. forked: whether it is that of another
    answer to the same prompt, at work now.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    forked: bool = False


NO_PREFIX = Prefix()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros, which on a CPU costs no memory before it is written to.

    NumPy asks the system for zeroed pages, which exist once they are touched; torch would write every zero itself.
    """
    with torch.inference_mode(False):  # a tensor made inside a caller's inference mode could not be written outside
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
