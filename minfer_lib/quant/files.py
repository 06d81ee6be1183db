"""A quantised model as a folder: written once, loaded without the full-precision weights ever being there.

Invariant: what is loaded is bit for bit what was saved. The weights stand under a name of their own, so that
transformers finds none in such a folder rather than reading codes as if they were weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..errors import InvalidParameter, ModelNotFound
from ..models.checks import has_softcap
from ..models.load import DTYPES, TOKENIZER_FILES, LanguageModel
from .linear import Int8Embedding, Int8Linear, SharedInput
from .products import usable

MANIFEST = "int8.json"
WEIGHTS = "int8.safetensors"
CONFIG = "config.json"
FORMAT = 1  # raise it when the files change, so that an older library says so instead of reading them wrong


def save_int8(lm: LanguageModel, folder: str | os.PathLike[str]) -> Path:
    """Writes a model that `quantize_int8` made to a folder, which `load_model(folder)` reads; returns its path.

    The folder appears when it is complete; one of an earlier save is replaced, any other that is not empty is refused.
    Raises `InvalidParameter` for a model that is not quantised by us and for a folder that cannot be written.
    """
    if not isinstance(lm, LanguageModel) or lm.quantization is None:
        name = getattr(lm, "name", repr(lm))
        raise InvalidParameter(f"{name} is no quantised model: call quantize_int8(lm) before save_int8.")
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise InvalidParameter(f"The folder {folder!r} is not possible: it must be a path.")
    folder = Path(folder).expanduser().resolve()  # so that `.` has a name and a parent
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise InvalidParameter(f"{folder} holds something else. Name a folder that is new, empty or an int8 model's.")
    tensors, manifest = _parts(lm)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InvalidParameter(f"The model cannot be written to {folder}: {error.strerror or error}.") from error
    try:
        lm.model.config.save_pretrained(temporary)
        if lm.model.generation_config is not None:
            lm.model.generation_config.save_pretrained(temporary)
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(temporary)
        save_file(tensors, temporary / WEIGHTS)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (temporary, *temporary.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        _take_place(temporary, folder)
    except (OSError, ValueError, SafetensorError) as error:  # transformers refuses some generation configs
        raise InvalidParameter(f"The model could not be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _take_place(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`; what was there is removed last, and put back if the renaming fails."""
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "old"
    try:
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def load_int8(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of a folder that `save_int8` wrote; `load_model` calls this. dtype None: as it was saved.

    Every tensor goes from the file to the device it is for. Raises `ModelNotFound` for a folder that is not whole.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("format") != FORMAT:
            raise ModelNotFound(
                f"{folder.name} was written in format {manifest.get('format')} of int8 folders, and this library "
                f"reads {FORMAT}. Quantise the model again with the version that is installed."
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        saved = DTYPES[manifest["dtype"]]
        precision = dtype or saved
        with init_empty_weights(include_buffers=False):  # buffers that no file holds are computed: rotary frequencies
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=precision,
                attn_implementation="eager" if has_softcap(config) else None,
            )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        has_files = any((folder / file).is_file() for file in TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if has_files else None
        with safe_open(folder / WEIGHTS, framework="pt", device=str(device)) as file:
            _fill(model, manifest, file, saved, precision)
    except (torch.OutOfMemoryError, MemoryError, ModelNotFound):
        raise
    except Exception as error:  # json, safetensors and the validators of configs raise kinds of their own
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ModelNotFound(
            f"The int8 model in {folder.name} could not be loaded: {reason}. Its {MANIFEST}, {WEIGHTS} and {CONFIG} "
            "belong together; write them again with save_int8."
        ) from error
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing:
        raise ModelNotFound(
            f"{WEIGHTS} in {folder.name} lacks {len(missing)} tensors, the first is `{missing[0]}`. Write the folder "
            "again with save_int8."
        )
    model.to(device)  # the buffers that were computed; never to a dtype, since rotary frequencies stay float32
    lm = LanguageModel.of(model, tokenizer, manifest["name"])
    lm.dtype = precision
    lm.quantization = manifest["quantization"]
    return lm


def _parts(lm: LanguageModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor once, and what cannot be seen from the tensors."""
    tensors: dict[str, torch.Tensor] = {}
    linear: dict[str, dict[str, Any]] = {}
    embedding: dict[str, Any] = {}
    groups: dict[int, list[str]] = {}
    for name, module in lm.model.named_modules():
        if isinstance(module, Int8Embedding):
            embedding = {"name": name, "factor": module.factor}
            tensors |= {f"{name}.weight": module.weight, f"{name}.scale": module.scale}
    for name, module in lm.model.named_modules():
        if not isinstance(module, Int8Linear):
            continue
        tied = embedding != {} and module.keep_rows
        kept = {key: getattr(module, key) for key in ("bias", "smoothing") if getattr(module, key) is not None}
        linear[name] = {
            "activations": module.activations, "tied": tied, "kernel": module.kernel_name, "parts": list(kept),
        }  # fmt: skip
        if peers := module.partners if module.shared is None else module.shared.layers:
            groups.setdefault(id(peers[0]), []).append(name)
        if not tied:
            kept |= {"weight": module.codes(), "scale": module.scale}
        tensors |= {f"{name}.{key}": tensor for key, tensor in kept.items()}
    own = tuple(f"{name}." for name in [*linear, *([embedding["name"]] if embedding else [])])
    seen = set()
    for name, tensor in lm.model.state_dict().items():
        if not name.startswith(own) and tensor.data_ptr() not in seen:  # a tied output layer is its embedding
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    manifest = {
        "format": FORMAT, "name": lm.name, "dtype": str(lm.dtype).removeprefix("torch."),
        "quantization": lm.quantization, "linear": linear, "embedding": embedding, "groups": list(groups.values()),
    }  # fmt: skip
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, manifest


def _fill(model: Any, manifest: dict[str, Any], file: Any, saved: torch.dtype, dtype: torch.dtype) -> None:
    """Puts every tensor of an empty model into its place, those saved as `saved` in `dtype`, then the int8 layers."""

    def read(name: str) -> torch.Tensor:
        """From the file into memory of its own: a view of the file may begin at any byte, and sums of floats depend on
        how their numbers are aligned."""
        tensor = file.get_tensor(name)
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    held = set(file.keys())
    own = [*manifest["linear"], *([manifest["embedding"]["name"]] if manifest["embedding"] else [])]
    plain = {}
    for name in held - {f"{layer}.{key}" for layer in own for key in ("weight", "scale", "bias", "smoothing")}:
        tensor = read(name)
        plain[name] = tensor.to(dtype) if tensor.dtype == saved else tensor
    keys = model.load_state_dict(plain, strict=False, assign=True)
    buffers = {name for name, _ in model.named_buffers()}  # they stand there already, with values of their own
    if wrong := [*keys.unexpected_keys, *(name for name in keys.missing_keys if name in buffers)]:
        raise ModelNotFound(
            f"{WEIGHTS} does not fit {CONFIG}: see `{wrong[0]}`. Write the folder again with save_int8."
        )
    model.tie_weights()  # before the int8 layers are there: an output layer in int8 of its own is tied to nothing
    used: set[str] = set()
    if embedding := manifest["embedding"]:
        name = embedding["name"]
        used |= {f"{name}.weight", f"{name}.scale"}
        old = model.get_submodule(name)
        made = Int8Embedding(
            read(f"{name}.weight"), read(f"{name}.scale"), dtype,
            padding_idx=getattr(old, "padding_idx", None), factor=embedding["factor"],
        )  # fmt: skip
        _check_shape(name, made.weight, old)
        model.set_submodule(name, made)
    for name, facts in manifest["linear"].items():
        parts = {key: read(f"{name}.{key}") for key in facts["parts"]}
        if facts["tied"]:
            source = model.get_submodule(manifest["embedding"]["name"])
            codes, scale = source.weight, source.scale
        else:
            codes, scale = read(f"{name}.weight"), read(f"{name}.scale")
            used |= {f"{name}.weight", f"{name}.scale"}
        _check_shape(name, codes, model.get_submodule(name))
        kernel = facts["kernel"]  # asked for by name, and taken again where it can be
        if kernel is not None and isinstance(usable(kernel), str):
            kernel = None
        layer = Int8Linear(
            codes, scale, activations=facts["activations"], dtype=dtype, kernel=kernel, keep_rows=facts["tied"], **parts
        )
        model.set_submodule(name, layer)
        used |= {f"{name}.{key}" for key in facts["parts"]}
    if unused := held - used - set(plain):
        raise ModelNotFound(f"{MANIFEST} does not name `{min(unused)}`. Write the folder again with save_int8.")
    for group in manifest["groups"]:
        SharedInput([model.get_submodule(name) for name in group])


def _check_shape(name: str, codes: torch.Tensor, layer: torch.nn.Module) -> None:
    """Codes stand as [out, in], the weights of GPT-2's layers the other way round."""
    if sorted(codes.shape) != sorted(layer.weight.shape):
        raise ModelNotFound(
            f"{WEIGHTS} does not fit {CONFIG}: `{name}` is {list(codes.shape)} in one and {list(layer.weight.shape)} "
            "in the other. Write the folder again with save_int8."
        )
