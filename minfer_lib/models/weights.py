"""Have the weights of a model changed since somebody looked? Cached keys and values are worth nothing then.

Optimisers, averaging and merging of adapters change weights in place, mostly through `.data`, which leaves no trace in
the tensor. So a few numbers of each tensor are looked at as well: what rewrites a tensor as a whole rewrites them.

Invariant: nothing is changed, and what was seen costs a few numbers a tensor. A change of single weights that are not
among those numbers, made through `.data`, is not noticed.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from . import hf_compat

SAMPLES = 8  # numbers of a tensor


class WeightWatch:
    """Remembers where the tensors of a model are, what they hold here and there, and which hooks stand around them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[object] = []
        self._views: dict[object, list[torch.Tensor]] = {}  # a few numbers of each tensor, by dtype and device
        self._numbers: list[torch.Tensor] = []
        self.changed()

    def changed(self) -> bool:
        """Whether anything is different from what it was at the last call, or when the watch was made."""
        tensors = list(itertools.chain(self._model.parameters(), self._model.buffers()))
        places: list[object] = [(tensor.data_ptr(), hf_compat.version_of(tensor)) for tensor in tensors]
        places += [hook for module in self._model.modules() for hook in hf_compat.hooks_of(module)]
        moved = places != self._places
        if moved:
            self._places, self._views = places, {}
            for tensor in tensors:
                self._views.setdefault((tensor.dtype, tensor.device), []).append(_few(tensor.detach()))
        numbers = [torch.cat(views) for views in self._views.values()]
        same = not moved and all(map(_same_bits, numbers, self._numbers))
        self._numbers = numbers
        return not same


class Surroundings:
    """Of the modules that a model has now: where their tensors are, and what stands around them or in their place.

    Looked at each time a request joins, so that a captured graph, which knows nothing of both, can be given up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(model.modules())
        self._places = [place for module in self._layers for place in hf_compat.tensor_places(module)]

    def addresses(self) -> list[tuple[int, int]]:
        """Where each tensor is; of codes in int8, from which more is derived, also how often they were written to."""
        tensors = [kept.get(name) for kept, name in self._places]
        return [(0, 0) if tensor is None else (tensor.data_ptr(), _writes(tensor)) for tensor in tensors]

    def calls(self) -> list[object]:
        """Hooks, and forwards that modules were given."""
        hooked = filter(hf_compat.has_hooks, self._layers)
        hooks = [hook for module in hooked for hook in hf_compat.hooks_of(module)]
        return hooks + [module.__dict__["forward"] for module in self._layers if "forward" in module.__dict__]


def _writes(tensor: torch.Tensor) -> int:
    return hf_compat.version_of(tensor) if tensor.dtype == torch.int8 else 0


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few numbers of a tensor, from all over it where it lies in one piece."""
    if tensor.is_contiguous():
        return tensor.view(-1)[:: max(1, tensor.numel() // SAMPLES)][:SAMPLES]
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((min(SAMPLES, room) if tensor.numel() else 0,), (1,))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # NaN is equal to itself here
