"""What can be wrong with the files of a model, each said in one sentence that names the file and the way out.

Invariant: weights that pass `check_weights` are all there, all used, and of the sizes of the config: transformers
would fill what is missing with random numbers, drop what is left over, and mention both in a table at most.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import BadEnvironment, MinferError, ModelNotFound, UnsupportedModel
from .names import MODEL_NAME, short

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


# -- before anything is allocated -------------------------------------------------------------------------------------

MOST_PARTS = 10_000  # layers, or experts of a layer: far more than any model has
PARTS = re.compile(r"layer|block|expert|depth")
Stored = dict[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> dtype and shape in the file


def stored_tensors(files: Iterable[Path]) -> Stored:
    """What the files hold, read from their headers alone; a dtype is "F32", "BF16", "I8" and so on."""
    stored: Stored = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118, since it is no dict
                    part = file.get_slice(key)
                    stored[key] = (part.get_dtype(), tuple(part.get_shape()))
        else:
            for key, tensor in torch.load(path, map_location="meta", weights_only=True).items():
                kind = "F" if tensor.is_floating_point() else "I"
                stored[key] = (f"{kind}{8 * tensor.element_size()}", tuple(tensor.shape))
    return stored


def check_counts(values: Any, name: str, most: int = MOST_PARTS, parts: re.Pattern[str] = PARTS) -> None:
    """Raises `ModelNotFound` where config.json, as it was read, counts more layers or experts than can be."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        counts = isinstance(value, int) and parts.search(str(key)) and not str(key).endswith(("size", "dim"))
        if isinstance(value, dict | list):
            check_counts(value, name, most, parts)
        elif counts and value > most:
            limit = f"no model has more than {most:,}" if most == MOST_PARTS else f"the weights are {most:,} tensors"
            raise ModelNotFound(
                f"config.json of {name} asks for {short(str(value))} parts (`{key}`), and {limit}. Fetch the model "
                "again."
            )


def check_stored(stored: Stored, config: PreTrainedConfig, name: str) -> None:
    """Raises `ModelNotFound` where the weights in the files are not the floats, or not of the sizes, that config.json
    tells of.

    The model is made without memory for that (on torch's meta device).
    """
    check_counts(config.to_dict(), name, len(stored), re.compile(r"^(num_hidden_layers|n_layers?|num_layers)$"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    wanted = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    larger = []
    for key, (dtype, shape) in stored.items():
        # files of a base model have no prefix, and those of a model with a head may have one too many
        tensor = next((wanted[k] for k in (key, prefix + key, key.removeprefix(prefix)) if k in wanted), None)
        is_weight = not HARMLESS.search(key) if tensor is None else tensor.is_floating_point()
        if is_weight and not dtype.startswith(("F", "BF")):
            raise ModelNotFound(
                f"`{key}` in the files of {name} is stored as integers ({dtype}), and its config.json does not say "
                "how they were quantised: read as weights they would be nonsense. Fetch the model again, with its "
                "quantization_config, or the one that it was made from."
            )
        if tensor is not None and tensor.numel() > math.prod(shape):
            larger.append((key, shape, tuple(tensor.shape)))
    check_weights({"mismatched_keys": larger, "missing_keys": (), "unexpected_keys": ()}, name)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if numbers > 2 * (held := sum(math.prod(shape) for _, shape in stored.values())):
        raise ModelNotFound(
            f"config.json of {name} describes a model of {numbers:,} weights, and the files hold {held:,}. Fetch both "
            "from the same place."
        )


A_DECODER = "Choose a decoder, such as `Qwen/Qwen2.5-0.5B-Instruct`."


def check_generates(config: Any, name: str) -> None:
    """Raises `UnsupportedModel` for an encoder-decoder, and for a decoder that its config counts no layers for."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is an encoder-decoder, and not a decoder-only language model: its answer "
            f"depends on a second input. {A_DECODER}"
        )
    text = config.get_text_config()
    counted, real = (getattr(text, key, None) for key in ("num_hidden_layers", "decoder_layers"))
    if None not in (counted, real) and counted != real:  # no cache of transformers fits it
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is the decoder of an encoder-decoder: its config counts the {counted} "
            f"layers of an encoder, and the decoder has {real}. {A_DECODER}"
        )


def explain(error: Exception, source: str, name: str, part: str) -> MinferError:
    """What an error of a from_pretrained means for somebody who asked for a model by name.

    source: a folder or a hub id. part: what was being read, such as "its tokenizer".
    """
    first, *rest = str(error).strip().split("\n")
    reason = short((f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first).rstrip(".!")) + "."
    if isinstance(error, KeyError):  # whose text is the key alone
        reason = f"there is no {reason}"
    unsupported = (
        "Unrecognized configuration class|does not recognize this architecture|Unrecognized model|"
        "trust_remote_code|contains custom code"
    )
    is_folder = os.path.isdir(source)  # Path.is_dir raises where a name is too long for a path
    if is_folder and not (Path(source) / "config.json").is_file():
        part, reason = "config.json", "it holds no config.json."
    elif isinstance(error, ImportError):
        return BadEnvironment(f"Loading {name} needs a package that is not installed: {reason}")
    elif re.search(unsupported, str(error)):
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
        f"network, load_model() runs {MODEL_NAME} and load_model('shape:qwen2.5-7b') the shape of a larger "
        "model."
    )


def _count(keys: list[Any]) -> str:
    return "1 tensor" if len(keys) == 1 else f"{len(keys)} tensors"


# -- what an engine has to know about a model -------------------------------------------------------------------------

DEFAULT_LIMIT = 2048  # tokens, for models whose config names no limit


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end an answer: those of the generation config, else of the config; 0 is an id like any other.

    Raises `UnsupportedModel` where the configs hold something that is no id.
    """
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    numbers = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    if any(isinstance(i, bool) or not hasattr(i, "__index__") for i in numbers):
        raise UnsupportedModel(
            f"This model's eos_token_id is {ids!r}, so that nobody knows where its answers end: it must be a token id "
            "or a list of them. Correct it in generation_config.json or config.json."
        )
    return frozenset(operator.index(i) for i in numbers)


def has_softcap(config: Any) -> bool:
    """Whether attention scores are squashed by a tanh, as in Gemma 2."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def position_limit(config: Any) -> int:
    """Tokens that the model can place without its rotary embedding changing under way.

    "longrope" switches to other frequencies beyond the length it was first trained on, which would make the keys in a
    cache disagree with new ones; so that length is the limit. ("dynamic" changes beyond max_position_embeddings.)
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limits = (getattr(text, name, None) for name in names)
    limit = next((value for value in limits if isinstance(value, int) and value > 0), DEFAULT_LIMIT)
    for rope in _ropes(text):
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            key = "original_max_position_embeddings"
            limit = min(limit, rope.get(key) or getattr(text, key, None) or limit)
    return limit


CHANGING_ROPES = {"dynamic", "longrope"}  # rotary embeddings whose frequencies depend on how long a text is


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings that a model has: "default", "llama3", "dynamic" and so on."""
    return {str(part.get("rope_type") or part.get("type")) for part in _ropes(config.get_text_config())}


def _ropes(text: Any) -> list[dict[str, Any]]:
    """The parameters of its rotary embedding, and of those that it has for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def first_bad_tensor(model: PreTrainedModel) -> str | None:
    """Name of the first weight that holds NaN or infinity, or buffer that holds NaN; None if there is none.

    It reads all weights, so it is for when something has gone wrong.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        is_weight = isinstance(tensor, torch.nn.Parameter)  # masks are buffers, and are minus infinity
        if tensor.is_floating_point() and (~tensor.isfinite() if is_weight else tensor.isnan()).any():
            return name
    return None


def check_finite(model: PreTrainedModel, name: str, logits: torch.Tensor) -> None:
    """Raises `ModelNotFound` if the logits are not finite because a weight is not."""
    if not torch.isfinite(logits).all() and (bad := first_bad_tensor(model)) is not None:
        raise ModelNotFound(
            f"The weights of {name} are damaged: `{bad}` holds NaN or infinity, so that no answer could be right. "
            "Fetch the model again."
        )


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Raises `UnsupportedModel` if an earlier position sees a later one, as in BERT: it would answer, and be wrong.

    The same if it counts positions from elsewhere than 0 when it is not given any, as RoBERTa does.

    transformers loads such models as causal ones too; only two sequences with another second token tell.
    """
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)  # some models count no position for it
    first_id, one, other = [i for i in range(4) if i != pad][:3]
    ids = torch.tensor([[first_id, one], [first_id, other]], device=model.get_input_embeddings().weight.device)

    def run(**inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, **inputs).logits[:, 0].float()  # of the first token [2, vocab]

    try:
        first = run()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever the code of a model says when a kind of input is missing
        raise UnsupportedModel(f"{name} cannot be run on token ids alone: {type(error).__name__}: {error}.") from error
    check_finite(model, name, first)
    # rounding; some kernels add in any order
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.05) * first.abs().max()
    if (first[0] - first[1]).abs().max() > tolerance:
        raise UnsupportedModel(
            f"{name} ({model.config.model_type}) is not a causal language model: what it says of a token depends on "
            f"the tokens after it. {A_DECODER}"
        )
    counts = "position_ids" in inspect.signature(model.forward).parameters
    if counts and (run(position_ids=torch.tensor([[0, 1]] * 2, device=ids.device)) - first).abs().max() > tolerance:
        raise UnsupportedModel(
            f"{name} ({model.config.model_type}) does not count positions from 0 unless it is told to, so its answers "
            "would differ from those of generate(), which tells it. Choose a model with ordinary positions."
        )
