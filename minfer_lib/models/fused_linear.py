"""Linear layers that read the same input, as q, k and v do, computed as one product over one merged matrix.

A product over few tokens is as fast as its weights are read, and one long matrix is read faster than three short ones.
An engine runs a view of a model (see attention/view.py), so it can put `FusedPart`s where the view had the layers.

Invariant: the merged matrix owns the memory, and the parameters of the model's own layers are slices of it. No weight
is there twice, and for whoever runs the model itself nothing has changed: names, values, dtypes, identity. A part
computes what its layer computes, whatever it is given and in whatever order parts are called.
"""

from __future__ import annotations

import functools
import math
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


class FusedPart(nn.Module):
    """One of several layers that read the same input: the first computes all of them, the others take theirs.

    It stands in a view where its layer stood, with the same parameters, buffers, hooks and attributes.
    """

    def __init__(self, layer: nn.Module, fused: FusedLinear, index: int) -> None:
        # the layer is no child, so that names stay what they are
        self.__dict__ = layer.__dict__ | {"layer": layer, "fused": fused, "index": index}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.fused
        if self.index == 0 and fused.whole is not None:
            first, *others = fused.whole.forward(x).split(fused.sizes, -1)
            fused.waiting = x, dict(enumerate(others, 1))
            return first
        waiting = fused.waiting  # read once, since other threads may run the same view
        if waiting is not None and waiting[0] is x:
            result = waiting[1].pop(self.index, None)
            if not waiting[1]:
                fused.waiting = None
            if result is not None:
                return result
        return self.layer.forward(x)


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
        # an input, and what the layers that were not called with it yet compute of it
        self.waiting: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None
        self.sizes = [len(layer.weight) for layer in self.layers]
        with _MERGING, torch.inference_mode(False), torch.no_grad():
            self.whole = self._merged()
        self._merged_state = self._state()

    def _merged(self) -> nn.Module | None:
        first = self.layers[0]
        if not all(_can_merge(layer, first) for layer in self.layers):
            return None
        ours = set() if self.whole is None else set(map(hf_compat.storage_key, _tensors(self.whole)))
        wholes = _wholes(self.layers)
        for name in [name for name, whole in wholes.items() if whole is None]:
            tensors = [getattr(layer, name) for layer in self.layers]
            like = next(tensor for tensor in tensors if tensor is not None)
            zeros = [like.new_zeros(size, *like.shape[1:]) for size in self.sizes]  # for a bias that some do not have
            parts = [zero if tensor is None else tensor for tensor, zero in zip(tensors, zeros, strict=True)]
            if not all(_fills(part) or hf_compat.storage_key(part) in ours for part in parts):
                return None  # slices of something that we do not know
            wholes[name] = torch.cat(parts)
            if not _replace(parts, wholes[name].split(self.sizes)):
                return None
        return hf_compat.with_tensors(first, wholes, out_features=sum(self.sizes))

    def intact(self) -> bool:
        """Whether the tensors are where they were when they were merged, and no layer got a forward of its own."""
        return self._state() == self._merged_state

    def _state(self) -> list[object]:
        places = [tensor.data_ptr() for layer in self.layers for tensor in _tensors(layer)]
        return [*places, *("forward" in vars(layer) for layer in self.layers)]


def shared_inputs(view: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Groups of dotted names of linear layers that read the very same tensor, in the order of their calls.

    view: of a model, with containers of its own. run: runs the view once. Twins that note what they are given stand in
    the view meanwhile, and nothing is hooked to the model's own modules, which others may be using; afterwards the view
    is as it was.
    """
    inputs = InputGroups()
    layers = {name: module for name, module in view.named_modules() if row_tensors(module)}

    def watch(name: str, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        inputs.note(name, x)
        return layer.forward(x)

    try:
        for name, layer in layers.items():
            watched = hf_compat.with_children(layer, {})
            watched.forward = functools.partial(watch, name, layer)
            view.set_submodule(name, watched)
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

    def can_move(layer: nn.Module) -> bool:
        return all(owners[hf_compat.storage_key(tensor)] == 1 and _fills(tensor) for tensor in _tensors(layer))

    fused = []
    for group in groups:
        layers = {name: view.get_submodule(name) for name in group}
        if not _are_merged(list(layers.values())):  # else an earlier engine has merged just these
            layers = {name: layer for name, layer in layers.items() if _can_merge(layer, layer) and can_move(layer)}
            first = next(iter(layers.values()), None)
            layers = {name: layer for name, layer in layers.items() if _can_merge(layer, first)}
        if len(layers) < 2:
            continue
        whole = FusedLinear(list(layers.values()))
        if whole.whole is None:
            continue
        for index, (name, layer) in enumerate(layers.items()):
            view.set_submodule(name, FusedPart(layer, whole, index))
        fused.append(whole)
    return fused


def row_tensors(layer: nn.Module) -> tuple[str, ...]:
    """The tensors of a linear layer that have a row for each output; () for what is no plain linear layer."""
    return ("weight", "bias") if type(layer) is nn.Linear else getattr(type(layer), "row_tensors", ())


def _tensors(layer: nn.Module) -> list[torch.Tensor]:
    return [tensor for name in row_tensors(layer) if (tensor := getattr(layer, name)) is not None]


def _can_merge(layer: nn.Module, first: nn.Module) -> bool:
    """Whether one product may compute both, and nothing else sees or changes what the layer does."""
    tensors = _tensors(layer)
    return (
        bool(tensors)
        and type(layer) is type(first)
        and not hf_compat.has_hooks(layer)
        and "forward" not in vars(layer)
        and all(type(t) in (torch.Tensor, nn.Parameter) and not t.requires_grad and not t.is_meta for t in tensors)
        and (layer.weight.dtype, layer.weight.device) == (first.weight.dtype, first.weight.device)
        and layer.weight.shape[1:] == first.weight.shape[1:]
        and (type(layer) is nn.Linear or layer.merges_with(first))
    )


def _fills(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _are_merged(layers: list[nn.Module]) -> bool:
    wholes = _wholes(layers) if all(_can_merge(layer, layers[0]) for layer in layers) else {"": None}
    return all(whole is not None for whole in wholes.values())


def _wholes(layers: list[nn.Module]) -> dict[str, torch.Tensor | None]:
    """By name the tensor of which the layers hold the slices, if together they are all of its memory; else None."""
    sizes, wholes = [len(layer.weight) for layer in layers], {}
    for name in row_tensors(layers[0]):
        parts = {i: part for i, layer in enumerate(layers) if (part := getattr(layer, name)) is not None}
        if not parts:
            continue
        like = next(iter(parts.values()))
        storage, shape = like.untyped_storage(), (sum(sizes), *like.shape[1:])
        wholes[name] = None
        if storage.nbytes() == math.prod(shape) * like.itemsize:
            whole = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, shape)
            slices = whole.split(sizes)
            if all(_place(part) == _place(slices[i]) for i, part in parts.items()):
                wholes[name] = whole
    return wholes


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _replace(tensors: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> bool:
    """Gives tensors other memory while they stay the same objects. False if somebody holds on to the old memory of one.

    Then each has memory of its own.
    """
    for i, (tensor, by) in enumerate(zip(tensors, new, strict=True)):
        if not _swap(tensor, by):
            for done in tensors[:i]:
                _swap(done, done.clone())
            return False
    return True


def _swap(tensor: torch.Tensor, by: torch.Tensor) -> bool:
    """`tensor.data = by` would free memory under the hands of a thread that multiplies with it at this moment.

    Swapping is refused as long as one does, which is for milliseconds.
    """
    new = nn.Parameter(by, requires_grad=False) if isinstance(tensor, nn.Parameter) else by
    for _ in range(200):
        try:
            torch.utils.swap_tensors(tensor, new)
            return True
        except RuntimeError:
            time.sleep(0.001)
    return False
