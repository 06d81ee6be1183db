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

from .errors import InvalidParameter, MinferError, ModelNotFound
from .int8_kernels import usable
from .int8_linear import Int8Embedding, Int8Linear, SharedInput
from .loading import DTYPES, TOKENIZER_FILES, LanguageModel
from .model_facts import has_softcap

MANIFEST = "int8.json"
WEIGHTS = "int8.safetensors"
FORMAT = 1  # raise it when the files change, so that an older library says so instead of reading them wrong


def save_int8(lm: LanguageModel, folder: str | os.PathLike[str]) -> Path:
    """Writes a model that `quantize_int8` made to a folder, which `load_model(folder)` reads; returns its path.

    The folder appears when it is complete; one of an earlier save is replaced, any other that is not empty is refused.
    Raises `InvalidParameter` for a model that is not quantised by us and for a folder that cannot be written.
    """
    if lm.quantization is None:
        raise InvalidParameter(f"{lm.name} is not quantised: call quantize_int8(lm) before save_int8.")
    folder = Path(folder).expanduser()
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
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise InvalidParameter(f"The model could not be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


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
        with init_empty_weights(include_buffers=False):  # buffers that no file holds are computed: rotary frequencies
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=DTYPES[manifest["dtype"]],
                attn_implementation="eager" if has_softcap(config) else None,
            )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        has_files = any((folder / file).is_file() for file in TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if has_files else None
        with safe_open(folder / WEIGHTS, framework="pt", device=str(device)) as file:
            _fill(model, manifest, file)
    except MinferError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ModelNotFound(
            f"The int8 model in {folder.name} could not be loaded: {reason}. Its {MANIFEST}, {WEIGHTS} and config.json "
            "belong together; write them again with save_int8."
        ) from error
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing:
        raise ModelNotFound(
            f"{WEIGHTS} in {folder.name} lacks {len(missing)} tensors, the first is `{missing[0]}`. Write the folder "
            "again with save_int8."
        )
    model.to(device)
    if dtype is not None:
        model.to(dtype)
    lm = LanguageModel.of(model, tokenizer, manifest["name"])
    lm.dtype = dtype or DTYPES[manifest["dtype"]]
    lm.quantization = manifest["quantization"]
    return lm


def _parts(lm: LanguageModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor once, and what cannot be seen from the tensors."""
    tensors: dict[str, torch.Tensor] = {}
    linear: dict[str, dict[str, Any]] = {}
    embedding: dict[str, Any] = {}
    groups: dict[int, list[str]] = {}
    codes_of_embedding = None
    for name, module in lm.model.named_modules():
        if isinstance(module, Int8Embedding):
            codes_of_embedding, embedding = module.weight, {"name": name, "factor": module.factor}
            tensors |= {f"{name}.weight": module.weight, f"{name}.scale": module.scale}
    for name, module in lm.model.named_modules():
        if not isinstance(module, Int8Linear):
            continue
        tied = codes_of_embedding is not None and module.weight is codes_of_embedding
        linear[name] = {"activations": module.activations, "tied": tied, "kernel": module.kernel_name}
        if module.shared is not None:
            groups.setdefault(id(module.shared), []).append(name)
        kept = {"bias": module.bias, "smoothing": module.smoothing}
        if not tied:
            kept |= {"weight": module.codes(), "scale": module.scale}
        tensors |= {f"{name}.{key}": tensor for key, tensor in kept.items() if tensor is not None}
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


def _fill(model: Any, manifest: dict[str, Any], file: Any) -> None:
    """Puts the layers of the manifest into an empty model, and every other tensor into its place."""
    held = set(file.keys())
    dtype = DTYPES[manifest["dtype"]]
    if embedding := manifest["embedding"]:
        name = embedding["name"]
        old = model.get_submodule(name)
        made = Int8Embedding(
            file.get_tensor(f"{name}.weight"), file.get_tensor(f"{name}.scale"), dtype,
            padding_idx=getattr(old, "padding_idx", None), factor=embedding["factor"],
        )  # fmt: skip
        model.set_submodule(name, made)
        held -= {f"{name}.weight", f"{name}.scale"}
    for name, facts in manifest["linear"].items():
        source = manifest["embedding"]["name"] if facts["tied"] else name
        parts = {
            key: file.get_tensor(f"{name}.{key}") if f"{name}.{key}" in held else None for key in ("bias", "smoothing")
        }
        if facts["tied"]:
            codes, scale = model.get_submodule(source).weight, model.get_submodule(source).scale
        else:
            codes, scale = file.get_tensor(f"{name}.weight"), file.get_tensor(f"{name}.scale")
        kernel = facts["kernel"]  # asked for by name, and taken again where it can be
        if kernel is not None and isinstance(usable(kernel), str):
            kernel = None
        layer = Int8Linear(
            codes, scale, parts["bias"], activations=facts["activations"], smoothing=parts["smoothing"], dtype=dtype,
            kernel=kernel, keep_rows=facts["tied"],
        )  # fmt: skip
        model.set_submodule(name, layer)
        held -= {f"{name}.{key}" for key in ("weight", "scale", "bias", "smoothing")}
    for group in manifest["groups"]:
        SharedInput([model.get_submodule(name) for name in group])
    model.load_state_dict({name: file.get_tensor(name) for name in held}, strict=False, assign=True)
    model.tie_weights()
