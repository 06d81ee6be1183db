"""`quantize_int8`: a model whose weights are one byte each, run by every engine as the model was.

Invariant: a layer is either as it was or an `Int8Linear` that computes the same up to the rounding; what is named in
`skip`, what the model did not use when it was watched, and everything that is no plain linear layer stays as it was.
A model whose quantisation broke off says so until it is loaded again: `lm.quantization` is set last.

A model is watched on a text first: which layers read the same input, and how large each input feature gets, which
decides how SmoothQuant shares the difficulty between activations and weights.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from tqdm.auto import tqdm

from ..errors import InvalidParameter, UnsupportedModel, must_be, number, one_of, shown
from ..models import hf_compat
from ..models.hf_compat import Conv1D
from ..models.load import LanguageModel, resolve_device
from ..models.memory import measured_weight_bytes
from .absmax import Quantized, absmax_quantize, pair_safe_quantize, smoothing_factors
from .calibration import calibration_prompts, some_ids, watch
from .linear import ACTIVATIONS, Int8Embedding, Int8Linear
from .products import check_kernel

SLICE = 2**23  # weights that are turned into codes at a time
HEAD = "lm_head"  # what `skip` calls the output layer, whatever a family of models calls it


@dataclass(frozen=True)
class Int8Report:
    """What of a model is in int8. Sizes are bytes; `kernels` counts layers by the kernel that runs them."""

    layers: int
    activations: str
    kernels: dict[str, int]
    int8_bytes: int
    kept_bytes: int
    kept: dict[str, int]  # the largest parts that are not in int8

    def __str__(self) -> str:
        used = ", ".join(f"{name} ({count})" for name, count in self.kernels.items())
        large = {name: size for name, size in self.kept.items() if size > 0.01 * (self.int8_bytes + self.kept_bytes)}
        kept = ", ".join(
            [*(f"{name} {size / 1e6:.1f} MB" for name, size in large.items()), "scales, factors and norms"]
        )
        return (
            f"{self.layers} layers in int8 ({self.int8_bytes / 1e6:.1f} MB), activations {self.activations!r}, "
            f"kernel {used}; not in int8: {self.kept_bytes / 1e6:.1f} MB ({kept})"
        )


def quantize_int8(
    lm: LanguageModel,
    *,
    activations: str | None = None,
    skip: str | Sequence[str] = (HEAD,),
    embedding: bool = False,
    smoothing: float = 0.5,
    calibration: str | Sequence[str | Sequence[int]] | None = None,
    device: str | torch.device | None = None,
    kernel: str | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Puts the weights of a model's linear layers into int8, in place, and returns the model.

    To compare with the model as it was, load it a second time. Layer follows layer, so that never more than one of them
    stands in both forms.

    activations: "dynamic" rounds the input of each layer to int8 too, token by token (W8A8); "none" leaves it as it is
      (W8A16, weight-only). None takes "dynamic" on a CPU, where integers are multiplied faster, and "none" on a GPU.
    skip: names that keep their precision: a layer's, or a part of it between dots ("down_proj", "layers.0"). "lm_head"
      is the output layer under any name.
    embedding: put the embedding into int8 as well. With skip=() and an output layer tied to it, both use one copy.
    smoothing: SmoothQuant's alpha, for "dynamic"; 0 leaves the features as they are and needs no calibration text.
    calibration: text, or prompts (strings or lists of token ids), on which activations are watched; None takes a text
      of our own, or random ids for a model without a tokenizer.
    device: where the layers go as they are quantised; None leaves them where they are. With a model that was loaded
      to the CPU, a GPU never holds more than the quantised one.
    kernel: how products are computed on a CPU: "compiled", "int_mm" (only with "dynamic") or "portable"; None takes
      the first of them that this machine can use.

    Raises `InvalidParameter` for what is not possible and a model that is quantised already, `UnsupportedModel` for one
    without linear layers or with weights that are not finite, `InvalidPrompt` for a calibration that cannot be run.
    Sources: Dettmers et al. 2022 (arXiv 2208.07339), Xiao et al. 2023 (arXiv 2211.10438).
    """
    if not isinstance(lm, LanguageModel):
        raise must_be("lm", "what load_model returns", lm)
    place = lm.device if device is None else resolve_device(device)
    mode = ("dynamic" if place.type == "cpu" else "none") if activations is None else activations
    if mode not in ACTIVATIONS:
        raise must_be("activations", one_of(ACTIVATIONS), activations)
    names = skipped_names(skip)
    if not isinstance(embedding, bool):
        raise must_be("embedding", "True or False", embedding)
    alpha = number("smoothing", smoothing, "a number from 0 (off) to 1", lambda x: 0 <= x <= 1)
    if kernel is not None:
        check_kernel(kernel, mode == "dynamic")
    check_not_quantized(lm)
    options = {"activations": mode, "skip": list(names), "embedding": embedding, "smoothing": alpha, "kernel": kernel}
    try:
        _quantize(lm, place, options, calibration, progress)
        _try_out(lm)
    except BaseException as error:
        changed, name = _has_int8(lm.model), lm.name
        del lm  # whoever keeps the exception, and with it this frame, must not keep the weights
        traceback.clear_frames(error.__traceback__)  # nor layers, in the frames below
        if changed and isinstance(error, Exception):
            raise broken_off(name, error) from error
        raise
    lm.quantization = options
    return lm


def _quantize(
    lm: LanguageModel, place: torch.device, options: dict[str, object], calibration: object, progress: bool
) -> None:
    mode, embedding, kernel = options["activations"], options["embedding"], options["kernel"]
    head = _head_name(lm.model)
    layers = linear_layers(lm, options["skip"])
    tied = head is not None and lm.model.get_submodule(head).weight is lm.model.get_input_embeddings().weight
    if embedding and tied and head not in layers:
        raise InvalidParameter(
            f"embedding=True was asked for, and {HEAD} is to be skipped: in {lm.name} both are one matrix, so that it "
            "would be kept twice. Pass skip=() too, or leave embedding out."
        )
    _check_finite(lm, layers | ({"the embedding": lm.model.get_input_embeddings()} if embedding else {}))
    alpha = options["smoothing"] if mode == "dynamic" else 0.0
    peaks, groups = watch(lm, layers, calibration_prompts(lm, calibration) if alpha else [some_ids(lm, 2)])
    layers.clear()  # so that a layer is gone once it is replaced
    if not peaks:
        raise UnsupportedModel(f"{lm.name} calls none of its linear layers, so there is nothing to quantise.")
    with tqdm(total=len(peaks), desc=f"int8 ({lm.name})", unit="layer", disable=not progress, leave=False) as bar:
        if embedding:
            _quantize_embedding(lm, place, head if tied else None, kernel)
            groups = [group for group in groups if not (tied and group == [head])]
        for group in groups:
            # what is lost in front of the output layer goes straight into the logits, so its input is never rounded
            is_head = group == [head]
            _quantize_group(lm, group, "none" if is_head else mode, 0.0 if is_head else alpha, peaks, place, kernel)
            bar.update(len(group))
    lm.model.to(place)  # the rest of it
    lm.device = place


def _try_out(lm: LanguageModel) -> None:
    """Runs the quantised model once: code that reaches for a layer's weights by itself is found here, not later."""
    logits = lm.next_token_logits(torch.tensor([some_ids(lm, 2)], device=lm.device), use_cache=False)
    if not logits.isfinite().all():
        raise UnsupportedModel(f"{lm.name} gives logits that are not finite. Name layers to keep in `skip`.")


def describe_int8(lm: LanguageModel) -> Int8Report:
    """What of a model is in int8, and which kernels run it. Raises `InvalidParameter` if nothing is."""
    if not isinstance(lm, LanguageModel):
        raise InvalidParameter(f"describe_int8 was given {type(lm).__name__}: it takes what load_model returns.")
    layers = [module for module in lm.model.modules() if isinstance(module, Int8Linear)]
    if not layers:
        raise InvalidParameter(f"{lm.name} is not quantised: call quantize_int8(lm) first.")
    kernels: dict[str, int] = {}
    for layer in layers:
        kernels[layer.kernel] = kernels.get(layer.kernel, 0) + 1
    kept: dict[str, tuple[int, int]] = {}  # by storage: tied tensors count once
    for name, tensor in (*lm.model.named_parameters(), *lm.model.named_buffers()):
        if tensor.dtype != torch.int8 and tensor.numel() > 1:
            kept.setdefault(tensor.untyped_storage().data_ptr(), (tensor.untyped_storage().nbytes(), name))
    sizes = sorted(((size, name.removesuffix(".weight")) for size, name in kept.values()), reverse=True)
    total, rest = measured_weight_bytes(lm.model), sum(size for size, _ in sizes)
    return Int8Report(
        len(layers), layers[0].activations, kernels, total - rest, rest, {name: size for size, name in sizes[:3]}
    )


def check_not_quantized(lm: LanguageModel) -> None:
    """Raises `InvalidParameter` for a model that is in int8, by us or by another library, wholly or in part."""
    if lm.quantization is None and _has_int8(lm.model):
        raise InvalidParameter(f"{lm.name} was changed by a quantisation that broke off. Load it again.")
    tensors = (*lm.model.named_parameters(), *lm.model.named_buffers())
    narrow = next((name for name, tensor in tensors if tensor.dtype in (torch.int8, torch.uint8)), None)
    if narrow or getattr(lm.model.config, "quantization_config", None) is not None:
        raise InvalidParameter(
            f"{lm.name} is quantised already{f' (see {narrow})' if narrow else ''}. Load it in bfloat16 or float32 and "
            "quantise that."
        )


def broken_off(name: str, error: Exception) -> UnsupportedModel:
    """The error for a model of which some layers were replaced, and others could not be."""
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return UnsupportedModel(f"{name} could not be quantised: {reason}. It was changed on the way: load it again.")


def _has_int8(model: nn.Module) -> bool:
    return any(isinstance(module, Int8Linear | Int8Embedding) for module in model.modules())


# -- what to quantise ----------------------------------------------------------------------------------------------


def _head_name(model: nn.Module) -> str | None:
    head = model.get_output_embeddings()
    return None if head is None else next((name for name, module in model.named_modules() if module is head), None)


def skipped_names(skip: str | Iterable[str]) -> list[str]:
    """What a user names in `skip`, as a list. Raises `InvalidParameter` for what is no name."""
    names = [skip] if isinstance(skip, str) else list(skip) if isinstance(skip, Iterable) else [skip]
    if not all(isinstance(name, str) for name in names):
        raise must_be("skip", "names of layers (() skips none)", skip)
    return names


def linear_layers(lm: LanguageModel, skip: list[str]) -> dict[str, nn.Module]:
    """The linear layers to quantise, by their dotted names, in the order of the model."""
    head = _head_name(lm.model)
    # a subclass, a forward of its own or a hook computes something else
    linear = {
        name: module
        for name, module in lm.model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and not ("forward" in vars(module) or hf_compat.has_hooks(module))
    }
    if unknown := [s for s in skip if s != HEAD and not any(_holds_part(s, name) for name in linear)]:
        some = ", ".join(f"`{name}`" for name in list(linear)[:3])
        raise InvalidParameter(
            f"skip={shown(unknown[0])} names no linear layer of {lm.name}. Its layers are called {some}, ..."
        )
    skipped = {name for name in linear for s in skip if (name == head if s == HEAD else _holds_part(s, name))}
    if not linear.keys() - skipped:
        beside = f" beside what skip={shown(skip)} names" if linear else ""
        raise UnsupportedModel(f"{lm.name} ({lm.model.config.model_type}) has no linear layer to quantise{beside}.")
    return {name: module for name, module in linear.items() if name not in skipped}


def _holds_part(part: str, name: str) -> bool:
    """Whether a dotted name holds `part` as whole components."""
    return bool(part) and f".{part}." in f".{name}."


def _check_finite(lm: LanguageModel, layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if layer.weight.numel() and not all(end.isfinite() for end in layer.weight.aminmax()):
            raise UnsupportedModel(
                f"The weights of {name} in {lm.name} hold NaN or infinity, so there is no scale for them. The model is "
                "damaged: fetch it again. Nothing was changed."
            )


def _quantize_group(
    lm: LanguageModel,
    names: list[str],
    mode: str,
    alpha: float,
    peaks: dict[str, torch.Tensor],
    place: torch.device,
    kernel: str | None,
) -> None:
    """Puts `Int8Linear`s in the place of layers that read one input."""
    factors = None
    if alpha:
        largest = [_matrix(lm.model.get_submodule(name)).abs().amax(0, keepdim=True).float() for name in names]
        factors = smoothing_factors(peaks[names[0]], torch.cat(largest), alpha)
    smoothing = None if factors is None else factors.to(place)  # one tensor for the whole group
    for name in names:
        old = lm.model.get_submodule(name)
        quantized = by_slices(pair_safe_quantize if mode == "dynamic" else _per_channel, _matrix(old), factors)
        codes, scale, bias = (None if t is None else t.to(place) for t in (quantized.values, quantized.scale, old.bias))
        layer = Int8Linear(codes, scale, bias, activations=mode, smoothing=smoothing, kernel=kernel)
        lm.model.set_submodule(name, layer.eval())


def _quantize_embedding(lm: LanguageModel, place: torch.device, head: str | None, kernel: str | None) -> None:
    """Puts an `Int8Embedding` in the place of the embedding, and with `head` an output layer over the same codes."""
    old = lm.model.get_input_embeddings()
    # one grid for both uses; the embedding's rows are the output layer's channels
    quantized = by_slices(_per_channel, old.weight)
    factor = getattr(old, "embed_scale", None)  # of Gemma and others, which multiply what they look up
    factor = None if factor is None else float(factor)
    new = Int8Embedding(
        quantized.values, quantized.scale, lm.dtype, padding_idx=getattr(old, "padding_idx", None), factor=factor
    )
    ids = torch.arange(min(64, len(old.weight)), device=old.weight.device)
    with torch.no_grad():
        wanted, found = old(ids).float(), new(ids).float()
    if (found - wanted).abs().max() > 0.05 * wanted.abs().max():
        raise UnsupportedModel(
            f"The embedding of {lm.name} ({type(old).__name__}) does more than look rows up, so that an int8 one would "
            "not give the same. Leave embedding=True out."
        )
    lm.model.set_input_embeddings(new.to(place))
    if head is not None:
        bias = lm.model.get_submodule(head).bias
        layer = Int8Linear(new.weight, new.scale, bias, activations="none", kernel=kernel)
        lm.model.set_submodule(head, layer.to(place).eval())


def _matrix(layer: nn.Module) -> torch.Tensor:
    """The weights as [out, in]; GPT-2's Conv1D keeps them the other way round."""
    return layer.weight.detach().T if isinstance(layer, Conv1D) else layer.weight.detach()


def _per_channel(weight: torch.Tensor) -> Quantized:
    return absmax_quantize(weight, dim=-1)


def by_slices(
    quantize: Callable[[torch.Tensor], Quantized], weight: torch.Tensor, factors: torch.Tensor | None = None
) -> Quantized:
    """Quantises a matrix [out, in], times factors [in], in slices of rows: a float32 copy of it all would be large."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    step = max(1, SLICE // max(1, weight.shape[-1]))
    for at in range(0, len(weight), step):
        rows = weight[at : at + step].detach().float()
        part = quantize(rows if factors is None else rows * factors)
        values[at : at + step], scale[at : at + step] = part.values, part.scale
    return Quantized(values, scale)
