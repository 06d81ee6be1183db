"""A quantised model as a folder: written once, loaded without the full-precision weights ever being there.

Invariant: what is loaded is bit for bit what was saved. The weights stand under a name of their own, so that
transformers finds none in such a folder rather than reading codes as if they were weights. A folder is whole or not
there, and nothing is ever lost in replacing one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..errors import InvalidParameter, ModelNotFound, must_be, shown
from ..models.checks import check_counts, has_softcap
from ..models.load import DTYPES, TOKENIZER_FILES, LanguageModel
from .linear import Int8Embedding, Int8Linear

MANIFEST = "int8.json"
WEIGHTS = "int8.safetensors"
CONFIG = "config.json"
LAYERS = re.compile("layers?$")  # what a config calls the count of them
FORMAT = 1  # raise it when the files change, so that an older library says so instead of reading them wrong


def save_int8(lm: LanguageModel, folder: str | os.PathLike[str]) -> Path:
    """Writes a model that `quantize_int8` made to a folder, which `load_model(folder)` reads; returns its path.

    The folder appears when it is complete; one of an earlier save is replaced, any other that is not empty is refused.
    Raises `InvalidParameter` for a model that is not quantised by us and for a folder that cannot be written.
    """
    if not isinstance(lm, LanguageModel) or lm.quantization is None:
        name = getattr(lm, "name", shown(lm))
        raise InvalidParameter(f"{name} is no quantised model: call quantize_int8(lm) before save_int8.")
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise must_be("folder", "a path", folder)
    folder = Path(folder).expanduser().resolve()  # so that `.` has a name and a parent
    _check_replaceable(folder)
    tensors, manifest = _parts(lm)
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        new = temporary / "new"
        new.mkdir()
        for part in (lm.model.config, lm.model.generation_config, lm.tokenizer):
            if part is not None:
                part.save_pretrained(new)
        save_file(tensors, new / WEIGHTS)
        manifest["files"] = sorted([MANIFEST, *(path.name for path in new.iterdir())])
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (new, *new.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        _take_place(new, folder, temporary / "old")
    except Exception as error:  # of the disk; tokenizers and safetensors raise kinds of their own when it is full
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0].rstrip(".")
        raise InvalidParameter(f"The int8 model cannot be written to {folder}: {reason}.") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _check_replaceable(folder: Path) -> None:
    """Raises `InvalidParameter` for a file, and for a folder with anything that no earlier `save_int8` wrote."""
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    try:
        ours = set(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if folder.is_file() or there - ours:
        what = "is a file" if folder.is_file() else f"holds something else ({min(there - ours)})"
        raise InvalidParameter(f"{folder} {what}. Name a folder that is new, empty, or as save_int8 wrote it.")


def _take_place(new: Path, folder: Path, old: Path) -> None:
    """Renames `new` to `folder`; what was there goes to `old`, and comes back whatever may interrupt the renaming."""
    try:
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise


def load_int8(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of a folder that `save_int8` wrote; `load_model` calls this. dtype None: as it was saved.

    Every tensor goes from the file to the device it is for. Raises `ModelNotFound` for a folder that is not whole.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("format") != FORMAT:
            raise ModelNotFound(
                f"{folder.name} was written in format {shown(manifest.get('format'))} of int8 folders, and this "
                f"library reads {FORMAT}. Quantise the model again with the version that is installed."
            )
        saved = DTYPES[manifest["dtype"]]
        precision = dtype or saved
        with safe_open(folder / WEIGHTS, framework="pt", device=str(device)) as file:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            check_counts(values, folder.name)  # before anything of that size is made
            check_counts(values, folder.name, len(file.keys()), LAYERS)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with init_empty_weights(include_buffers=False):  # buffers that no file holds are computed: frequencies
                model = AutoModelForCausalLM.from_config(
                    config,
                    dtype=precision,
                    attn_implementation="eager" if has_softcap(config) else None,
                    trust_remote_code=False,  # left open, it asks on the terminal whether to run code of the folder
                )
            _fill(model, manifest, file, saved, precision)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        has_files = any((folder / name).is_file() for name in TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if has_files else None
        missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
        if missing:
            raise ModelNotFound(f"{WEIGHTS} lacks {len(missing)} tensors, the first is `{missing[0]}`.")
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # json, safetensors and the validators of configs raise kinds of their own
        first, *rest = str(error).strip().split("\n")
        reason = (f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first).rstrip(".")
        raise ModelNotFound(
            f"The int8 model in {folder.name} could not be loaded: {reason}. Its {MANIFEST}, {WEIGHTS} and {CONFIG} "
            "belong together; write them again with save_int8."
        ) from error
    model.to(device)  # the buffers that were computed; never to a dtype, since rotary frequencies stay float32
    lm = LanguageModel.of(model, tokenizer, manifest["name"])
    lm.quantization = manifest["quantization"]
    return lm


def _parts(lm: LanguageModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor once, and what cannot be seen from the tensors."""
    named = list(lm.model.named_modules())
    embedding = next(
        ({"name": name, "factor": module.factor} for name, module in named if isinstance(module, Int8Embedding)), {}
    )
    codes = lm.model.get_input_embeddings().weight
    linear = {
        name: {
            "activations": module.activations, "tied": module.weight is codes, "kernel": module.asked_kernel,
            "parts": [key for key in ("bias", "smoothing") if getattr(module, key) is not None],
        }
        for name, module in named
        if isinstance(module, Int8Linear)
    }  # fmt: skip
    tied = {f"{name}.{key}" for name, facts in linear.items() if facts["tied"] for key in ("weight", "scale")}
    tensors, seen = {}, set()
    for name, tensor in lm.model.state_dict().items():
        int8 = name.rpartition(".")[0] in linear  # layers that share an input have their own names for its factors
        if name not in tied and (int8 or tensor.data_ptr() not in seen):  # a tied output layer is its embedding
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, {
        "format": FORMAT, "name": lm.name, "dtype": str(lm.dtype).removeprefix("torch."),
        "quantization": lm.quantization, "linear": linear, "embedding": embedding,
    }  # fmt: skip


def _fill(model: Any, manifest: dict[str, Any], file: Any, saved: torch.dtype, dtype: torch.dtype) -> None:
    """Puts every tensor of an empty model into its place, those saved as `saved` in `dtype`, then the int8 layers."""

    def read(name: str) -> torch.Tensor:
        """From the file into memory of its own: a view of the file may begin at any byte, and sums of floats depend on
        how their numbers are aligned."""
        unread.discard(name)
        tensor = file.get_tensor(name)
        return tensor.clone() if tensor.device.type == "cpu" else tensor

    unread = set(file.keys())
    embedding = manifest["embedding"]
    own = [*manifest["linear"], *([embedding["name"]] if embedding else [])]
    plain = {}
    for name in unread - {f"{layer}.{key}" for layer in own for key in ("weight", "scale", "bias", "smoothing")}:
        tensor = read(name)
        plain[name] = tensor.to(dtype) if tensor.dtype == saved else tensor
    keys = model.load_state_dict(plain, strict=False, assign=True)
    buffers = {name for name, _ in model.named_buffers()}  # they stand there already, with values of their own
    if wrong := [*keys.unexpected_keys, *(name for name in keys.missing_keys if name in buffers)]:
        raise ModelNotFound(f"{WEIGHTS} does not fit {CONFIG}: see `{wrong[0]}`.")
    if not embedding:  # what is missing is tied; weights that are there win over a config that says "tied"
        model.tie_weights(missing_keys=set(keys.missing_keys))
    else:
        old = model.get_submodule(embedding["name"])
        new = Int8Embedding(
            read(f"{embedding['name']}.weight"), read(f"{embedding['name']}.scale"), dtype,
            padding_idx=getattr(old, "padding_idx", None), factor=embedding["factor"],
        )  # fmt: skip
        _check_shape(embedding["name"], new.weight, old)
        model.set_submodule(embedding["name"], new)
    before = None  # the factors of the layer before, which may read the same input
    for name, facts in manifest["linear"].items():
        parts = {key: read(f"{name}.{key}") for key in facts["parts"]}
        smoothing = parts.get("smoothing")
        if before is not None and smoothing is not None and torch.equal(before, smoothing):
            parts["smoothing"] = before
        before = parts.get("smoothing")
        if facts["tied"]:
            source = model.get_submodule(embedding["name"])
            parts |= {"weight": source.weight, "scale": source.scale}
        else:
            parts |= {key: read(f"{name}.{key}") for key in ("weight", "scale")}
        _check_shape(name, parts["weight"], model.get_submodule(name))
        kernel = None if facts["kernel"] is None else str(facts["kernel"])  # taken where this machine can use it
        model.set_submodule(name, Int8Linear(activations=facts["activations"], kernel=kernel, **parts))
    if unread:
        raise ModelNotFound(f"{MANIFEST} does not name `{min(unread)}`.")


def _check_shape(name: str, codes: torch.Tensor, layer: torch.nn.Module) -> None:
    """Codes stand as [out, in], the weights of GPT-2's layers the other way round."""
    if sorted(codes.shape) != sorted(layer.weight.shape):
        raise ModelNotFound(
            f"{WEIGHTS} does not fit {CONFIG}: `{name}` is {list(codes.shape)} in one and {list(layer.weight.shape)} "
            "in the other."
        )
