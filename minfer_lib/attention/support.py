"""Can this model be run with the tokens of many requests in one row? Asked of the model itself, not of a list.

Invariant: a model that passes gives, packed, the logits that it gives by itself; every other one is refused by name and
reason. Configs cannot be trusted with this: families name their heads differently, some keep attention code of their
own that never calls a registered function, some drop what is passed along.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from ..cache.contiguous import CACHEABLE_LAYERS
from ..cache.pool import LayerShape
from ..cache.slots import SlotKVCache
from ..engine.interrupts import held_interrupts
from ..errors import MinferError, UnsupportedModel
from ..models.checks import position_limit
from .interface import NAME, PackedBatch, attention_configs, implementation

PROBE = "minfer_probe"
PROMPTS = ((3, 4, 5, 6), (5, 3))  # of the self-test: unequal, and neither begins as the other does
TOLERANCE = {torch.float32: 2e-3}  # of the largest logit; half precision rounds much more
HALF_TOLERANCE = 0.1


def attention_layers(model: PreTrainedModel, name: str) -> dict[int, LayerShape]:
    """What each attention layer keeps of a token: {layer index: shape}, seen by running one token through the model.

    Raises `UnsupportedModel` for a model whose layers are not all attention, or whose attention is its own code.
    """
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - CACHEABLE_LAYERS
    if other:
        raise refused(model, name, f"it has layers of another kind ({', '.join(sorted(other))})")
    if "dynamic" in rope_types(config):
        raise refused(model, name, 'its rotary embedding ("dynamic") depends on the longest request of a batch')
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refused(model, name, "it cannot be told the positions of its tokens")
    if not model._can_set_attn_implementation():
        raise refused(model, name, "its attention is code of its own, which no registered function replaces")
    seen: dict[int, tuple[LayerShape, int | None]] = {}
    token = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with (
        held_interrupts() as interrupts,  # so that what is switched here is switched back
        implementation(attention_configs(model), PROBE),
        torch.no_grad(),
        interrupts.let_through(),
    ):
        model(input_ids=token, position_ids=token, use_cache=False, minfer_probe=seen)
    if len(seen) != config.num_hidden_layers or None in seen:
        raise refused(
            model, name, f"only {len(seen)} of its {config.num_hidden_layers} layers call the registered function"
        )
    for index, (_, told) in seen.items():
        window = layer_window(config, index)
        if told is None and window is not None and window < position_limit(config):
            raise refused(
                model, name, f"its window of {window} tokens stands in its masks alone, and the function is not told it"
            )
    return {index: shape for index, (shape, _) in seen.items()}


def rounds_activations(model: PreTrainedModel) -> bool:
    """Whether layers may round their input to codes, where the smallest difference can become one of a whole step."""
    return any(t.dtype == torch.int8 for t in (*model.parameters(), *model.buffers()))


def check_packed(model: PreTrainedModel, name: str, layers: dict[int, LayerShape]) -> None:
    """Raises `UnsupportedModel` unless two prompts in one row give the logits that each gives alone.

    The prompts go in in two parts, so that the second has to find the first in the cache.
    """
    embedding = model.get_input_embeddings().weight
    device, vocab = embedding.device, embedding.shape[0]
    longest = max(map(len, PROMPTS))
    cache = SlotKVCache(layers, len(PROMPTS), longest, device)
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    prompts = [[(t if t != pad else 7) % vocab for t in prompt] for prompt in PROMPTS]
    for i, prompt in enumerate(prompts):
        cache.allocate(i, len(prompt))
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for begin, end in ((0, 1), (1, longest)):
        parts = [(i, prompt[begin:end]) for i, prompt in enumerate(prompts)]
        parts.sort(key=lambda part: len(part[1]) > 1)  # rows of one token first
        ids = [token for _, part in parts for token in part]
        positions = [begin + i for _, part in parts for i in range(len(part))]
        rows = [cache.block_table(i)[0] * longest + begin + j for i, part in parts for j in range(len(part))]
        batch = PackedBatch(
            cache.pools, longest, [cache.block_table(i) for i, _ in parts], [len(part) for _, part in parts],
            [begin + len(part) for _, part in parts], torch.tensor(rows, device=device),
        )  # fmt: skip
        logits = packed_forward(model, ids, positions, batch)
        for i, part in parts:
            found[i] += logits[: len(part)]
            logits = logits[len(part) :]
    changes = []  # of each token, as a share of the largest logit of its prompt
    for prompt, packed in zip(prompts, found, strict=True):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0].float()
        changes.append((torch.stack(packed) - alone).abs().amax(-1) / alone.abs().max())  # [tokens]
    change = torch.cat(changes)
    if model.dtype in TOLERANCE and not rounds_activations(model):
        wrong = not change.max() <= TOLERANCE[model.dtype]
    else:  # rounding may cross a border between two codes or two experts; a wrong mask or position changes nearly all
        wrong = not change.median() <= HALF_TOLERANCE
    if wrong:
        raise refused(model, name, f"its logits change by {change.max():.1%} when two prompts share a row")


def packed_forward(model: PreTrainedModel, ids: list[int], positions: list[int], batch: PackedBatch) -> torch.Tensor:
    """Logits [T, vocab] in float32 of all tokens of a packed row."""
    with (
        held_interrupts() as interrupts,
        implementation(attention_configs(model), NAME),
        torch.no_grad(),
        interrupts.let_through(),
    ):
        output = model(
            input_ids=torch.tensor([ids], device=batch.device),
            position_ids=torch.tensor([positions], device=batch.device),
            use_cache=False,
            minfer=batch,
        )
    return output.logits[0].float()


def supported_layers(model: PreTrainedModel, name: str) -> dict[int, LayerShape]:
    """The shapes of a model's attention layers, after both checks. Raises `UnsupportedModel`."""
    try:
        layers = attention_layers(model, name)
        check_packed(model, name, layers)
    except (MinferError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever the code of a model says to arguments that it does not expect
        raise refused(model, name, f"it fails when it is called that way ({type(error).__name__}: {error})") from error
    return layers


def layer_window(config: Any, index: int) -> int | None:
    """How many tokens a layer sees according to the config; None for all of them.

    The self-test cannot find out: its prompts are shorter than any window.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding that a config names; a model may have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return {part.get("rope_type") or part.get("type") for part in parts} - {None}


def refused(model: PreTrainedModel, name: str, reason: str) -> UnsupportedModel:
    kind = model.config.get_text_config().model_type
    return UnsupportedModel(
        f"{name} ({kind}) cannot be run with many requests in one row: {reason}. CachedEngine or NaiveEngine may run "
        "it, one request after the other."
    )


def _probe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    minfer_probe: dict[int, tuple[LayerShape, int | None]] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Notes shape and window in place of attending; query [1, heads, 1, dim], key and value [1, kv_heads, 1, dim]."""
    if minfer_probe is not None:
        index = getattr(module, "layer_idx", None)
        minfer_probe[index] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype), sliding_window
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE, _probe)
