"""What an engine has to know about a model: read from its configs, or asked of the model where they cannot be trusted.

Invariant: these functions only look; the model is as it was afterwards.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import UnsupportedModel

DEFAULT_LIMIT = 2048  # tokens, for models whose config names no limit


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end an answer: those of the generation config, else of the config; 0 is an id like any other.

    Raises `UnsupportedModel` where the configs hold something that is no id.
    """
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return frozenset()
    each = ids if isinstance(ids, list | tuple) else [ids]
    if any(isinstance(i, bool) or not hasattr(i, "__index__") for i in each):
        raise UnsupportedModel(
            f"This model's eos_token_id is {ids!r}, so that nobody knows where its answers end: it must be a token id "
            "or a list of them. Correct it in generation_config.json or config.json."
        )
    return frozenset(operator.index(i) for i in each)


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
    limit = next(
        (value for n in names if isinstance(value := getattr(text, n, None), int) and value > 0), DEFAULT_LIMIT
    )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for part in (rope, *(each for each in rope.values() if isinstance(each, dict))):  # or one for each kind of layer
        if "longrope" in (part.get("rope_type"), part.get("type")):
            original = part.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Raises `UnsupportedModel` if an earlier position sees a later one, as in BERT: it would answer, and be wrong.

    The same if it counts positions from elsewhere than 0 when it is not given any, as RoBERTa does.

    transformers loads such models as causal ones too; only two sequences with another second token tell.
    """
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)  # some models count no position for it
    first_id, one, other = [i for i in range(4) if i != pad][:3]
    ids = torch.tensor([[first_id, one], [first_id, other]], device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            first = model(input_ids=ids, use_cache=False).logits[:, 0].float()  # [2, vocab]
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever the code of a model says when a kind of input is missing
        raise UnsupportedModel(f"{name} cannot be run on token ids alone: {type(error).__name__}: {error}.") from error
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05  # of rounding; some kernels add in any order
    if (first[0] - first[1]).abs().max() > tolerance * first.abs().max():
        raise UnsupportedModel(
            f"{name} ({model.config.model_type}) is not a causal language model: what it says of a token depends on "
            "the tokens after it. Choose a decoder, such as `Qwen/Qwen2.5-0.5B-Instruct`."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return
    with torch.no_grad():
        counted = model(
            input_ids=ids, position_ids=torch.arange(2, device=ids.device)[None].expand(2, 2), use_cache=False
        )
    if (counted.logits[:, 0].float() - first).abs().max() > tolerance * first.abs().max():
        raise UnsupportedModel(
            f"{name} ({model.config.model_type}) does not count positions from 0 unless it is told to, so its answers "
            "would differ from those of generate(), which tells it. Choose a model with ordinary positions."
        )
