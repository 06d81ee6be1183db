"""Can this model be run with the tokens of many requests in one row? Asked of the model itself, not of a list.

Invariant: a model that passes gives, packed, the logits that it gives by itself; every other one is refused by name and
reason. Configs cannot be trusted with this: families name their heads differently, some keep attention code of their
own that never calls a registered function, some drop what is passed along. The answer is kept on the `LanguageModel`,
so that a second engine asks nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from ..cache.contiguous import CACHEABLE_LAYERS
from ..cache.pool import KVPool, LayerShape
from ..errors import MinferError, UnsupportedModel
from ..models import hf_compat
from ..models.checks import check_finite, position_limit, rope_types
from ..models.fused_linear import shared_inputs
from ..models.load import LanguageModel
from .batch import PackedBatch
from .interface import NAME
from .torch_backend import TorchBackend
from .view import view_of

PROBE = "minfer_probe"
PROMPTS = ((3, 4, 5, 6), (5, 3))  # of the self-test: unequal, and neither begins as the other does
TOLERANCE = {torch.float32: 2e-3}  # of the largest logit; half precision rounds much more
HALF_TOLERANCE = 0.1


def packed_layers(lm: LanguageModel) -> dict[int, LayerShape]:
    """What each attention layer of a model keeps of a token, {layer index: shape}. Raises `UnsupportedModel` for one
    that cannot be run this way."""
    if lm.packed_layers is None:
        view = view_of(lm.model, PROBE)
        try:
            layers: dict[int, LayerShape] = {}
            groups = shared_inputs(view, lambda: layers.update(attention_layers(view, lm.name)))
            check_packed(lm.model, lm.name, layers)
        except (MinferError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever the code of a model says to arguments that it does not expect
            reason = f"it fails when it is called that way ({type(error).__name__}: {error})"
            raise refusal(lm.model, lm.name, reason) from error
        lm.packed_layers, lm.input_groups = layers, groups
    return lm.packed_layers


def attention_layers(view: PreTrainedModel, name: str) -> dict[int, LayerShape]:
    """What each attention layer keeps of a token: {layer index: shape}, seen by running one token through the model.

    view: the model, with PROBE as its attention function. Raises `UnsupportedModel` for a model whose layers are not
    all attention, or whose attention is its own code.
    """
    config = view.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - CACHEABLE_LAYERS
    if other:
        raise refusal(view, name, f"it has layers of another kind ({', '.join(sorted(other))})")
    if "dynamic" in rope_types(config):
        raise refusal(view, name, 'its rotary embedding ("dynamic") depends on the longest request of a batch')
    if "position_ids" not in inspect.signature(view.forward).parameters:
        raise refusal(view, name, "it cannot be told the positions of its tokens")
    if not hf_compat.can_set_attention(view):
        raise refusal(view, name, "its attention is code of its own, which no registered function replaces")
    seen: dict[int, tuple[LayerShape, int | None]] = {}
    token = torch.zeros(1, 1, dtype=torch.long, device=view.get_input_embeddings().weight.device)
    with torch.no_grad():
        view(input_ids=token, position_ids=token, use_cache=False, minfer_probe=seen)
    if len(seen) != config.num_hidden_layers or None in seen:
        raise refusal(
            view, name, f"only {len(seen)} of its {config.num_hidden_layers} layers call the registered function"
        )
    for index, (_, told) in seen.items():
        window = layer_window(config, index)
        if told is None and window is not None and window < position_limit(config):
            raise refusal(
                view, name, f"its window of {window} tokens stands in its masks alone, and the function is not told it"
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
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    prompts = [[(t if t != pad else 7) % vocab for t in prompt] for prompt in PROMPTS]
    longest = max(map(len, prompts))
    pools = {index: KVPool.of(shape, (len(prompts) + 1) * longest, device) for index, shape in layers.items()}
    view = view_of(model, NAME)
    packed: list[list[torch.Tensor]] = [[] for _ in prompts]
    for begin, end in ((0, 1), (1, longest)):
        parts = [(i, prompt[begin:end]) for i, prompt in enumerate(prompts)]
        parts.sort(key=lambda part: len(part[1]) > 1)  # requests of one token first
        ids = [token for _, part in parts for token in part]
        positions = [begin + j for _, part in parts for j in range(len(part))]
        rows = [i * longest + begin + j for i, part in parts for j in range(len(part))]
        batch = batch_of(
            pools, longest, [[i] for i, _ in parts], [len(part) for _, part in parts],
            [begin + len(part) for _, part in parts], rows, device,
        )  # fmt: skip
        with torch.no_grad():
            logits = view(
                input_ids=torch.tensor([ids], device=device), position_ids=torch.tensor([positions], device=device),
                use_cache=False, minfer=batch,
            ).logits[0].float()  # fmt: skip
        for i, part in parts:
            packed[i] += logits[: len(part)]
            logits = logits[len(part) :]
    changes = []  # of each token, as a share of the largest logit of its prompt
    for prompt, found in zip(prompts, packed, strict=True):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0].float()
        check_finite(model, name, alone)
        changes.append((torch.stack(found) - alone).abs().amax(-1) / alone.abs().max())  # [tokens]
    change = torch.cat(changes)
    if model.dtype in TOLERANCE and not rounds_activations(model):
        wrong = not change.max() <= TOLERANCE[model.dtype]
    else:  # rounding may cross a border between two codes or two experts; a wrong mask or position changes nearly all
        wrong = not change.median() <= HALF_TOLERANCE
    if wrong:
        raise refusal(model, name, f"its logits change by {change.max():.1%} when two prompts share a row")


def batch_of(
    pools: dict[int, KVPool], block_size: int, block_tables: list[list[int]], q_lens: list[int], kv_lens: list[int],
    rows: list[int], device: torch.device, backend: Any = None,
) -> PackedBatch:  # fmt: skip
    """A `PackedBatch` from lists; the last row of the pools is the trash row. A runner has a faster way."""
    decodes = next((i for i, new in enumerate(q_lens) if new > 1), len(q_lens))
    starts = [0]
    for new in q_lens[decodes:]:
        starts.append(starts[-1] + new)
    width = max(map(len, block_tables))
    tables = [table + [0] * (width - len(table)) for table in block_tables]
    first = next(iter(pools.values()), None)
    trash_row = 0 if first is None else len(first.keys) - 1

    def on_device(numbers: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    return PackedBatch(
        pools, block_size, trash_row, q_lens, kv_lens, decodes, on_device(rows, torch.int64), on_device(tables),
        on_device(kv_lens), on_device(starts), backend or TorchBackend(),
    )  # fmt: skip


def layer_window(config: Any, index: int) -> int | None:
    """How many tokens a layer sees according to the config; None for all of them.

    The self-test cannot find out: its prompts are shorter than any window.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def refusal(model: PreTrainedModel, name: str, reason: str) -> UnsupportedModel:
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
