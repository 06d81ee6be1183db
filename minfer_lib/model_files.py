"""What can be wrong with the files of a model, each said in one sentence that names the file and the way out.

Invariant: weights that pass `check_weights` are all there, all used, and of the sizes of the config: transformers
would fill what is missing with random numbers, drop what is left over, and mention both in a table at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import packaged
from .errors import BadEnvironment, MinferError, ModelNotFound, UnsupportedModel

# Left over in the files of good checkpoints, beside what transformers itself knows for each architecture: buffers that
# older versions saved (causal masks, rotary frequencies, positions), scales of a quantised cache, and heads that say
# something other than the next token.
HARMLESS = re.compile(
    r"(^|\.)(attn|attention)\.(masked_)?bias$|(^|\.)causal_mask$|inv_freq$|(^|\.)position_ids$|\.[kv]_scale$"
    r"|^(v_head|value_head|score)\."
)


def check_weights(report: Mapping[str, Any], name: str) -> None:
    """Raises `ModelNotFound` unless weights and config agree; `report` is what `output_loading_info=True` returns."""
    if wrong := sorted(report["mismatched_keys"], key=str):
        key, found, wanted = wrong[0]
        raise ModelNotFound(
            f"The weights of {name} do not fit its config.json: `{key}` has the shape {list(found)} in the files, and "
            f"{list(wanted)} by the config ({_count(wrong)} of other shapes in all). Fetch both from the same place."
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelNotFound(
            f"The weights of {name} are incomplete: {len(missing)} of its tensors are not in the files, the first is "
            f"`{missing[0]}`. transformers would fill them with random numbers. Fetch the model again."
        )
    if unused := sorted(key for key in report["unexpected_keys"] if not HARMLESS.search(key)):
        raise ModelNotFound(
            f"The weights of {name} hold more than its config.json has a place for: {_count(unused)}, the first is "
            f"`{unused[0]}`. transformers would leave them out. Correct the config (num_hidden_layers, perhaps), or "
            "fetch the model again."
        )


def check_generates(config: Any, name: str) -> None:
    """Raises `UnsupportedModel` for an encoder-decoder, and for a decoder that its config counts no layers for."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is an encoder-decoder, and not a decoder-only language model: its answer "
            "depends on a second input. Choose a decoder, such as `Qwen/Qwen2.5-0.5B-Instruct`."
        )
    text = config.get_text_config()
    counted, real = (getattr(text, key, None) for key in ("num_hidden_layers", "decoder_layers"))
    if None not in (counted, real) and counted != real:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is the decoder of an encoder-decoder: its config counts the {counted} "
            f"layers of an encoder, and the decoder has {real}, so that no cache of transformers fits it. Choose a "
            "model that was made a decoder, such as `Qwen/Qwen2.5-0.5B-Instruct`."
        )


def explained(error: Exception, source: str, name: str, part: str) -> MinferError:
    """What an error of a from_pretrained means for somebody who asked for a model by name.

    source: a folder or a hub id. part: what was being read, such as "its tokenizer".
    """
    first, *rest = str(error).strip().split("\n")
    reason = (f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first).rstrip(".!") + "."
    if isinstance(error, KeyError):  # whose text is the key alone
        reason = f"there is no {reason}"
    unsupported = ("Unrecognized configuration class", "does not recognize this architecture", "Unrecognized model",
                   "trust_remote_code", "contains custom code")  # fmt: skip
    is_folder = Path(source).is_dir()
    if is_folder and not (Path(source) / "config.json").is_file():
        part, reason = "config.json", "it holds no config.json."
    elif isinstance(error, ImportError):
        return BadEnvironment(f"Loading {name} needs a package that is not installed: {reason}")
    elif any(text in str(error) for text in unsupported):
        return UnsupportedModel(
            f"{name} is not a decoder-only language model that this version of transformers can load by itself: "
            f"{reason} Choose a causal language model whose code is part of transformers."
        )
    if is_folder:
        return ModelNotFound(
            f"The folder {name} could not be loaded as a model, because of {part}: {reason} It needs config.json and "
            "the weights (model.safetensors), as save_pretrained writes them; a tokenizer's files and "
            "generation_config.json may be left out, but not be broken."
        )
    return ModelNotFound(
        f"{name} could not be fetched from the Hugging Face hub: {reason} "
        "Check the spelling, whether it is gated (then log in with `hf auth login`), and the network. Without a "
        f"network, load_model() runs {packaged.MODEL_NAME} and load_model('shape:qwen2.5-7b') the shape of a larger "
        "model."
    )


def _count(keys: list[Any]) -> str:
    return "1 tensor" if len(keys) == 1 else f"{len(keys)} tensors"
