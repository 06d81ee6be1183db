"""Linear layers that read the same input, as q, k and v do, computed as one product over one merged matrix.

A product over few tokens is as fast as its weights are read, and one long matrix is read faster than three short ones.
An engine runs a view of a model (see attention/view.py), so it can put `FusedPart`s where the view had the layers.

Invariant: the merged matrix owns the memory, and the parameters of the model's own layers are slices of it. No weight
is there twice, and for whoever runs the model itself nothing has changed: names, values, dtypes, identity. A part
computes what its layer computes, whatever it is given and in whatever order parts are called.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from . import hf_compat

_MERGING = threading.Lock()  # two engines that are made at the same time merge one after the other


class InputGroups:
    """Which layers are always called one after the other with the very same tensor, unchanged in between."""

    def __init__(self) -> None:
        self._runs: list[list[str]] = []
        self._last: tuple[torch.Tensor, int] | None = None

    def note(self, name: str, x: torch.Tensor) -> None:
        """The layer `name` is called with x."""
        version = hf_compat.version_of(x)
        if self._last is not None and self._last[0] is x and self._last[1] == version:
            self._runs[-1].append(name)
        else:
            self._runs.append([name])
        self._last = x, version

    def end(self) -> None:
        """A forward pass is over; its tensors are not kept."""
        self._last = None

    def groups(self) -> list[list[str]]:
        """All layers that were called, in order; those alone that share no input, or not always with the same ones."""
        runs = dict.fromkeys(map(tuple, self._runs))
        count = Counter(name for run in runs for name in run)
        found: dict[tuple[str, ...], None] = {}
        for run in runs:
            always = all(count[name] == 1 for name in run)
            found |= dict.fromkeys([run] if always else [(name,) for name in run])
        return [list(group) for group in found]


class _StandIn(nn.Module):
    """Stands in a view where a layer stood, with its parameters, buffers, hooks and attributes under the same names."""

    layer: nn.Module

    @classmethod
    def of(cls, layer: nn.Module) -> _StandIn:
        stand_in = object.__new__(cls)
        stand_in.__dict__ = layer.__dict__ | {"layer": layer}  # no child, so that names stay what they are
        return stand_in


class _Watcher(_StandIn):
    name: str
    inputs: InputGroups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.note(self.name, x)
        return self.layer.forward(x)


class FusedPart(_StandIn):
    """One of several layers that read the same input: the first computes all of them, the others find theirs."""

    fused: FusedLinear
    index: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused.part(self.index, x)


class FusedLinear:
    """One product in place of several layers [.., in] -> [.., out_i], which hold slices of its matrix.

    `whole` is the layer over all outputs; None while the layers cannot be merged, when each computes for itself.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self.whole: nn.Module | None = None
        self.merge()

    def merge(self) -> None:
        """Lays the layers' tensors one below the other and gives the layers slices; what lies so already stays.

        To be called again when `intact` says no: after `model.to(...)`, `weight.data = ...` and the like.
        """
        self._waiting: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None
        self.sizes = [len(layer.weight) for layer in self.layers]
        with _MERGING, torch.inference_mode(False), torch.no_grad():
            self.whole = self._merged() if _can_merge(self.layers) else None
        self._places = [(layer, name, _place(layer, name)) for layer in self.layers for name in row_tensors(layer)]

    def _merged(self) -> nn.Module | None:
        first, merged = self.layers[0], {}
        ours = set() if self.whole is None else set(map(hf_compat.storage_key, _tensors(self.whole)))
        for name in row_tensors(first):
            parts = [getattr(layer, name) for layer in self.layers]
            if all(part is None for part in parts):
                continue
            whole = _adjacent(parts, self.sizes)
            if whole is None:
                if any(
                    part is not None and not (_fills(part) or hf_compat.storage_key(part) in ours) for part in parts
                ):
                    return None  # slices of something that we do not know
                like = next(part for part in parts if part is not None)
                zeros = [like.new_zeros(size, *like.shape[1:]) for size in self.sizes]  # a bias that some do not have
                whole = torch.cat([z if part is None else part for part, z in zip(parts, zeros, strict=True)])
                slices = [whole.narrow(0, sum(self.sizes[:i]), size) for i, size in enumerate(self.sizes)]
                for i, part in enumerate(parts):
                    if part is not None and not _replace(part, slices[i]):
                        for done, slice_ in zip(parts[:i], slices, strict=False):  # back to memory of their own
                            _ = done is None or _replace(done, slice_.clone())
                        return None
            merged[name] = whole
        return hf_compat.with_tensors(first, merged, out_features=sum(self.sizes))

    def intact(self) -> bool:
        """Whether the tensors are where they were when they were merged, and no layer got a forward of its own."""
        if self.whole is not None and any("forward" in vars(layer) for layer in self.layers):
            return False
        return all(_place(layer, name) == place for layer, name, place in self._places)

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What layer `index` computes of x [.., in]."""
        if self.whole is None:
            return self.layers[index].forward(x)
        if index == 0:
            results = dict(enumerate(self.whole.forward(x).split(self.sizes, -1)))
            result = results.pop(0)
            self._waiting = x, results
            return result
        waiting = self._waiting  # read once, since other threads may run the same view
        if waiting is not None and waiting[0] is x:
            result = waiting[1].pop(index, None)
            if not waiting[1]:
                self._waiting = None
            if result is not None:
                return result
        return self.layers[index].forward(x)


def shared_inputs(view: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Groups of dotted names of linear layers that read the very same tensor, in the order of their calls.

    view: of a model, with containers of its own. run: runs the view once. Watchers stand in the view meanwhile, and
    nothing is hooked to the model's own modules, which others may be using; afterwards the view is as it was.
    """
    inputs = InputGroups()
    layers = {name: module for name, module in view.named_modules() if row_tensors(module)}
    try:
        for name, layer in layers.items():
            watcher = _Watcher.of(layer)
            watcher.name, watcher.inputs = name, inputs
            view.set_submodule(name, watcher)
        run()
    finally:
        for name, layer in layers.items():
            view.set_submodule(name, layer)
    return [group for group in inputs.groups() if len(group) > 1]


def fuse(view: nn.Module, groups: Sequence[Sequence[str]]) -> list[FusedLinear]:
    """Merges each group of layers that may be merged, and puts `FusedPart`s into the view; `groups`: dotted names.

    Left as they are: parameters that require gradients or share memory with others (tied weights, slices of something),
    layers of a class of their own or with hooks or a forward of their own, and those of another dtype, device or
    quantisation than the first of their group.
    """
    owners = Counter(
        hf_compat.storage_key(tensor)
        for module in view.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )
    fused = []
    for group in groups:
        layers = {name: view.get_submodule(name) for name in group}
        if not _lie_together(list(layers.values())):  # else an earlier engine has merged just these
            layers = {name: layer for name, layer in layers.items() if _can_merge([layer]) and _owns(layer, owners)}
            layers = {name: m for name, m in layers.items() if _can_merge([next(iter(layers.values())), m])}
        if len(layers) < 2:
            continue
        whole = FusedLinear(list(layers.values()))
        if whole.whole is None:
            continue
        for index, (name, layer) in enumerate(layers.items()):
            part = FusedPart.of(layer)
            part.fused, part.index = whole, index
            view.set_submodule(name, part)
        fused.append(whole)
    return fused


def row_tensors(layer: nn.Module) -> tuple[str, ...]:
    """The tensors of a linear layer that have a row for each output; () for what is no plain linear layer."""
    return ("weight", "bias") if type(layer) is nn.Linear else getattr(type(layer), "row_tensors", ())


def _can_merge(layers: list[nn.Module]) -> bool:
    """Whether one product may compute all of them, and nothing else sees or changes what a layer does."""
    first = layers[0]
    return all(
        bool(tensors := _tensors(layer))
        and type(layer) is type(first)
        and not hf_compat.has_hooks(layer)
        and "forward" not in vars(layer)
        and all(type(t) in (torch.Tensor, nn.Parameter) and not t.requires_grad and not t.is_meta for t in tensors)
        and (layer.weight.dtype, layer.weight.device) == (first.weight.dtype, first.weight.device)
        and layer.weight.shape[1:] == first.weight.shape[1:]
        and (type(layer) is nn.Linear or layer.merges_with(first))
        for layer in layers
    )


def _owns(layer: nn.Module, owners: Counter[int]) -> bool:
    """Whether nobody else has the memory of a layer's tensors."""
    return all(owners[hf_compat.storage_key(tensor)] == 1 and _fills(tensor) for tensor in _tensors(layer))


def _fills(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _tensors(layer: nn.Module) -> list[torch.Tensor]:
    return [tensor for name in row_tensors(layer) if (tensor := getattr(layer, name)) is not None]


def _lie_together(layers: list[nn.Module]) -> bool:
    """Whether the layers are merged already."""
    if not _can_merge(layers):
        return False
    sizes = [len(layer.weight) for layer in layers]
    named = [[getattr(layer, name) for layer in layers] for name in row_tensors(layers[0])]
    return all(_adjacent(parts, sizes) is not None for parts in named if any(part is not None for part in parts))


def _adjacent(parts: list[torch.Tensor | None], sizes: list[int]) -> torch.Tensor | None:
    """The tensor of which these are the slices, if together they are all of its memory."""
    first = next(part for part in parts if part is not None)
    storage, row, at = first.untyped_storage(), first[:1].nbytes, 0
    for part, size in zip(parts, sizes, strict=True):
        here = None if part is None else (part.data_ptr(), part.dtype, part.shape, part.is_contiguous())
        if here not in (None, (storage.data_ptr() + at * row, first.dtype, (size, *first.shape[1:]), True)):
            return None
        at += size
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    return whole.set_(storage, 0, (at, *first.shape[1:])) if storage.nbytes() == at * row else None


def _replace(tensor: torch.Tensor, by: torch.Tensor) -> bool:
    """Gives a tensor other memory while it stays the same object. False if somebody else holds on to its old memory.

    `tensor.data = by` would free that under the hands of a thread that multiplies with it at this moment; swapping is
    refused as long as one does, which is for milliseconds.
    """
    new = nn.Parameter(by, requires_grad=False) if isinstance(tensor, nn.Parameter) else by
    for _ in range(200):
        try:
            torch.utils.swap_tensors(tensor, new)
            return True
        except RuntimeError:
            time.sleep(0.001)
    return False


def _place(layer: nn.Module, name: str) -> int | None:
    tensor = getattr(layer, name)
    return None if tensor is None else tensor.data_ptr()
