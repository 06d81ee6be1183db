"""The widgets of the chapters: memory of a model (1), a distribution being filtered (2), a preallocated cache (3), the
replay of a batch and streams side by side (4), the threshold of LLM.int8() (5), the blocks of a paged cache (6).

Invariant: a widget computes with the package's own functions (`memory`, `sampling`), so that it cannot teach anything
else than what the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import torch

from ..engine.trace import StepTrace
from ..generation.params import SamplingParams
from ..generation.sampling import TokenCounts, filtered_logits, penalised
from ..models import memory
from ..models.shapes import SHAPES, shape_config
from . import plots
from .block_replay import block_map
from .outliers import outlier_explorer
from .plots.timelines import account, lanes
from .sliders import Choice, Gallery, Slider, explore
from .streams import stream_side_by_side
from .style import Picture, format_bytes

__all__ = [
    "Choice",
    "Gallery",
    "Slider",
    "batch_replay",
    "block_map",
    "cache_explorer",
    "explore",
    "memory_explorer",
    "outlier_explorer",
    "sampling_explorer",
    "stream_side_by_side",
]

PRECISIONS = {"fp32": 32, "fp16 / bf16": 16, "int8": 8, "int4": 4}
CARDS_GIB = (8, 12, 16, 24, 40, 80, 141)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
AVERAGES = (32, 64, 128, 256, 512, 1024, 2048)
SPREAD = (0.35, 1.6, 0.8, 1.25, 0.5, 1.45, 0.95, 1.1)  # of the average length: eight requests that differ, mean 1


@lru_cache
def _shape(model: str) -> memory.ModelShape:
    return memory.ModelShape.from_config(shape_config(model), model)


# -- chapter 1 ------------------------------------------------------------------------------------------------------


def draw_memory(model: str, precision: str, length: int, requests: int, card: int) -> Picture:
    """What a model takes with so many requests of so many tokens each, against a card of `card` GiB.

    Values of the cache take 2 bytes, 4 with fp32 weights. Activations are those of one prompt computed at once.
    """
    shape, bits = _shape(model), PRECISIONS[precision]
    value = 4 if bits == 32 else 2
    parts = {
        "weights": memory.weight_bytes(shape, bits),
        "KV cache": float(requests * length * memory.kv_bytes_per_token(shape, value)),
        "activations": float(memory.activation_bytes(shape, length, value)),
    }
    budget = card * memory.GIB
    left = budget - sum(parts.values())
    verdict = f"fits, {format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    label = f"{requests:,} × {length:,} tokens"
    return plots.memory_stack(
        {label: parts}, budgets={f"{card} GiB": budget}, scale=1.3 * budget, title=f"{model} in {precision}: {verdict}"
    )


def memory_explorer(model: str = "qwen2.5-7b", card: int = 16) -> Gallery | None:
    """Chapter 1: model, precision, length and number of requests against the memory of a GPU."""
    return explore(
        draw_memory,
        model=Choice(tuple(SHAPES), model, "model", menu=True),
        precision=Choice(tuple(PRECISIONS), "fp16 / bf16", "weights"),
        length=Choice(LENGTHS, 2048, "tokens a request"),
        requests=Choice((1, 2, 4, 8, 16, 32, 64, 128), 1, "requests"),
        card=Choice(CARDS_GIB, card, "GPU memory (GiB)"),
        positions=[{"requests": 1}, {"requests": 32}, {"requests": 32, "precision": "int8"}],
    )


# -- chapter 2 ------------------------------------------------------------------------------------------------------


def sampling_explorer(
    logits: torch.Tensor, tokens: Sequence[str] | Callable[[int], str], seen: Collection[int] = ()
) -> Gallery | None:
    """Chapter 2: the distribution of the next token while temperature and filters move.

    logits: [vocab], of a real step. tokens: the text of each id, or a function that gives it. seen: ids of prompt and
    answer so far, which is what the repetition penalty looks at. All pictures share one scale, and what a filter keeps
    is weighed by the probabilities that it sees: after penalty and temperature.
    """
    logits = logits.detach().float().flatten().cpu()  # [vocab]
    before = logits.softmax(-1)
    text = tokens if callable(tokens) else tokens.__getitem__
    named = [""] * len(logits)
    for token in before.topk(min(8, len(logits))).indices.tolist():
        named[token] = text(token)

    def draw(temperature: float, repetition_penalty: float, **filters: float) -> Picture:
        shaped = {"temperature": temperature, "repetition_penalty": repetition_penalty}
        unfiltered, after = (next_token_distribution(logits, SamplingParams(**shaped, **extra), seen)
                             for extra in ({}, filters))  # fmt: skip
        kept = int((after > 0).sum())
        held = float(unfiltered[after > 0].sum())
        title = None if kept == len(after) else f"{kept:,} of {len(after):,} kept; unfiltered: {held:.1%}"
        return plots.filtered_bars(named, before.tolist(), after.tolist(), most=8, width=4.7, longest=1.0, title=title)

    return explore(
        draw,
        temperature=Slider(0.0, 2.0, 0.05, 1.0),
        top_k=Slider(0, 50, 1, 0),
        top_p=Slider(0.05, 1.0, 0.05, 1.0),
        min_p=Slider(0.0, 0.5, 0.01, 0.0),
        repetition_penalty=Slider(1.0, 2.0, 0.05, 1.0, "repetition penalty"),
        positions=[{"temperature": 0.5}, {"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9},
                   {"temperature": 1.5, "min_p": 0.1}],
    )  # fmt: skip


def next_token_distribution(logits: torch.Tensor, params: SamplingParams, seen: Collection[int] = ()) -> torch.Tensor:
    """Probabilities [vocab] that `Sampler` draws a token from, for one row of logits [vocab]."""
    if params.penalises:
        logits = penalised(logits, TokenCounts.of_prompt(list(seen), logits), params)
    if params.temperature == 0:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    return filtered_logits(logits[None], [params])[0].softmax(-1)


# -- chapter 3 ------------------------------------------------------------------------------------------------------


def draw_cache(model: str, dtype: str, limit: int, average: int, requests: int) -> Picture:
    """A cache of `limit` tokens for each request, with requests of different lengths of which `average` is the mean."""
    size = memory.kv_bytes_per_token(_shape(model), 4 if dtype == "fp32" else 2)
    used = [min(limit, round(average * SPREAD[n % len(SPREAD)])) for n in range(requests)]
    reserved = format_bytes(requests * limit * size)
    empty = 1 - sum(used) / (requests * limit)
    return plots.cache_fill(
        used, limit, title=f"{model}: {reserved} reserved, {format_bytes(sum(used) * size)} used, {empty:.0%} empty"
    )


def cache_explorer(model: str = "smollm2-135m") -> Gallery | None:
    """Chapter 3: what a cache preallocated to the limit reserves, and how little of it short requests use."""
    return explore(
        draw_cache,
        model=Choice(tuple(SHAPES), model, "model", menu=True),
        dtype=Choice(("fp32", "fp16 / bf16"), "fp32", "cache in"),
        limit=Choice((256, 512, 1024, 2048, 4096, 8192), 2048, "limit (max_model_len)"),
        average=Choice(lambda limit, **_: [n for n in AVERAGES if n <= limit], 256, "average length"),
        requests=Choice((1, 2, 4, 8), 4, "requests"),
        positions=[{"average": 256}, {"average": 1024}, {"average": 256, "limit": 512}],
    )


# -- chapter 4 ------------------------------------------------------------------------------------------------------


def batch_replay(steps: Sequence[StepTrace]) -> Gallery | None:
    """Chapter 4: the timeline of a run up to a step, and one line about it: who waits, prefills, decodes, leaves.

    steps: of an engine with trace=True. The static picture shows the liveliest step and the one at three quarters.
    """
    recorded = tuple(steps)
    telling = telling_steps(recorded)
    return explore(
        lambda step: plots.gantt(recorded, upto=step), step=Slider(1, len(recorded), 1, telling[0]),
        positions=[{"step": step} for step in telling],
    )  # fmt: skip


def telling_steps(steps: Sequence[StepTrace]) -> tuple[int, ...]:
    """The first of the steps with most of waiting, prefill, decode and an end in it, and the one at three quarters."""
    run = lanes(steps)
    lines = [account(run, steps, step) for step in range(1, len(steps) + 1)]
    lively = [sum(word in line for word in (" wait", " prefill", " decode", " leave")) for line in lines]
    return tuple(dict.fromkeys((lively.index(max(lively)) + 1, max(1, round(0.75 * len(steps))))))
