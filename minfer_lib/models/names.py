"""What a model's name may be, as far as that can be told before torch is loaded.

Invariant: this module imports neither torch nor transformers, so that the command line answers a misspelt name at
once, and not after the seconds that those two take.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InvalidParameter, ModelNotFound, shown

MODEL_NAME = "SmolLM2-135M-Instruct"  # the packaged model
TINY = "tiny-random"
SHAPE_PREFIX = "shape:"
OTHERS = (
    f"`{TINY}`, a shape such as `{SHAPE_PREFIX}qwen2.5-7b`, a local folder, a hub id such as "
    "`Qwen/Qwen2.5-0.5B-Instruct`"
)
POSSIBLE = f"{OTHERS}, or no name at all for {MODEL_NAME}"


def resolve_name(name: str | os.PathLike[str] | None) -> str:
    """The name as text; None stands for what MINFER_MODEL names, else the packaged model.

    Raises `InvalidParameter` for what is neither text nor a path.
    """
    if name is None:
        return os.environ.get("MINFER_MODEL") or MODEL_NAME
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str) or not text:  # a path may be one of bytes
        raise InvalidParameter(
            f"The model {shown(name)} was asked for, and a model is named by a text or a path: {POSSIBLE}."
        )
    return text


def folder_of(name: str) -> Path | None:
    """The local folder that a name stands for; None for a name known here, and for a hub id.

    Raises `ModelNotFound` for a file, and for what can be neither.
    """
    if name.lower() in (TINY, MODEL_NAME.lower()) or name.lower().startswith(SHAPE_PREFIX):
        return None
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise ModelNotFound(
            f"`{short(name)}` is a file, and a model is a folder that holds config.json beside the weights. Name its "
            f"folder, `{short(os.path.dirname(name) or '.')}`, if it is such a one."
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):  # no "owner/model", so it was meant as a folder
        raise ModelNotFound(
            f"There is no model `{short(name)}`: no such folder, and no name known here. Possible are {POSSIBLE}."
        )
    return None


def short(name: str) -> str:
    """A name as a message shows it."""
    return name if len(name) <= 200 else f"{name[:200]}... ({len(name):,} characters)"
