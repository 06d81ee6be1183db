"""Does a fast decoder compute what the model computes? Asked on random numbers, before it counts.

Invariant: what is compared is computed by the model's own modules, on the same weights, and on batches as an engine
runs them: prompts, then single tokens that find them in the cache, with rows of the cache in no order. What does not
agree is not used, so that an upgrade of transformers, torch or Triton may cost speed, but never changes results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..attention.backends import AttentionBackend
from ..attention.batch import PackedBatch
from ..attention.support import batch_of
from ..cache.pool import KVPool, LayerShape
from ..engine.runner import ViewDecoder
from ..errors import UnsupportedModel
from ..models.load import LanguageModel
from ..quant.linear import Int8Linear

# Largest difference, as a share of the largest number that it is a difference of, by the dtype of the cache: of one
# layer a few roundings; of all layers, one behind the other, what random weights make of these. In int8 the smallest
# difference can become one of a whole code, 1/127 of the largest: about what bfloat16 rounds.
ONE_LAYER = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01, torch.int8: 0.03}
ALL_LAYERS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05, torch.int8: 0.15}
# Where a model rounds its activations to int8, layer after layer, such codes are everywhere: then it is the norm of the
# difference that is bounded, as a share of the norm.
ROUNDED = 0.1
PROMPTS = (7, 1, 12)  # tokens; more in all than products for few rows take
BLOCK = 4


def prove(
    lm: LanguageModel, decoder: Any, modules: ViewDecoder, backend: AttentionBackend, shapes: Mapping[int, LayerShape]
) -> None:
    """Raises `UnsupportedModel` unless `decoder` agrees with `modules`: each layer, where it shows them, and logits.

    shapes: of the engine's cache, {layer index: shape}.
    """
    generator = torch.Generator().manual_seed(0)
    kept = next(iter(shapes.values())).dtype
    one_layer, all_layers = (limits.get(kept, limits[torch.float32]) for limits in (ONE_LAYER, ALL_LAYERS))
    with torch.no_grad():
        if hasattr(decoder, "layers"):
            for _, positions, batches in _steps(lm, backend, shapes, generator):
                _compare_layers(lm, decoder, modules, batches, positions, generator, one_layer)
        for ids, positions, batches in _steps(lm, backend, shapes, generator):
            wanted, got = (run(ids, positions, batch) for run, batch in zip((modules, decoder), batches, strict=True))
            _compare(lm, decoder, "logits", wanted, got, all_layers)


def _steps(
    lm: LanguageModel, backend: AttentionBackend, shapes: Mapping[int, LayerShape], generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[PackedBatch]]]:
    """Three steps over two caches alike: prompts, then a token of each, then one of the first alone."""
    tables = [list(range(i, 8 * len(PROMPTS), len(PROMPTS))) for i in range(len(PROMPTS))]  # blocks of 4, interleaved
    rows = BLOCK * 8 * len(PROMPTS) + 1
    pools = [{index: KVPool.of(shape, rows, lm.device) for index, shape in shapes.items()} for _ in range(2)]
    shortest_first = sorted(range(len(PROMPTS)), key=PROMPTS.__getitem__)
    for step, requests in enumerate((shortest_first, range(len(PROMPTS)), range(1))):
        parts = [(tables[i], PROMPTS[i] + step - 1, 1) if step else (tables[i], 0, PROMPTS[i]) for i in requests]
        positions = torch.tensor([begin + j for _, begin, n in parts for j in range(n)], device=lm.device)
        ids = torch.randint(0, lm.vocab_size, (len(positions),), generator=generator).to(lm.device)
        yield ids, positions, [_batch(lm, pool, parts, backend) for pool in pools]


def _compare_layers(
    lm: LanguageModel, decoder: Any, modules: ViewDecoder, batches: list[PackedBatch], positions: torch.Tensor,
    generator: torch.Generator, tolerance: float,
) -> None:  # fmt: skip
    """Each layer of its own, on random numbers of the size that hidden states have."""
    base = modules.view.view.model
    hidden = torch.randn(len(positions), lm.model.config.hidden_size, generator=generator).to(lm.device, lm.dtype)
    turns = base.rotary_emb(hidden[None], positions[None])
    for module, layer in zip(base.layers, decoder.layers, strict=True):
        wanted = module(
            hidden[None].clone(), attention_mask=None, position_ids=positions[None], position_embeddings=turns,
            use_cache=False, minfer=batches[0],
        )  # fmt: skip
        got = layer(hidden.clone(), turns[0][0], turns[1][0], batches[1])
        kept = [batch.pools[layer.index].read(batch.slot_mapping, lm.dtype) for batch in batches]
        for name, one, other in zip(("keys", "values"), *kept, strict=True):
            _compare(lm, decoder, f"{name} of layer {layer.index}", one, other, tolerance)
        wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
        _compare(lm, decoder, f"layer {layer.index}", wanted[0], got, tolerance)


def _compare(
    lm: LanguageModel, decoder: Any, what: str, wanted: torch.Tensor, got: torch.Tensor, tolerance: float
) -> None:
    wanted, got = wanted.float(), got.float()
    change = (wanted - got).abs().max() / wanted.abs().max().clamp_min(1e-20)
    if any(type(module) is Int8Linear and not module.weight_only for module in lm.model.modules()):
        change, tolerance = (wanted - got).norm() / wanted.norm().clamp_min(1e-20), ROUNDED
    if not change <= tolerance:
        raise UnsupportedModel(f"{lm.name} cannot be {decoder.name}: {what} would differ by {float(change):.1e}.")


def _batch(
    lm: LanguageModel, pools: dict[int, KVPool], parts: list[tuple[list[int], int, int]], backend: AttentionBackend
) -> PackedBatch:
    rows = [table[p // BLOCK] * BLOCK + p % BLOCK for table, begin, n in parts for p in range(begin, begin + n)]
    tables, q_lens = [table for table, _, _ in parts], [n for _, _, n in parts]
    kv_lens = [begin + n for _, begin, n in parts]
    return batch_of(pools, BLOCK, tables, q_lens, kv_lens, rows, lm.device, backend)
