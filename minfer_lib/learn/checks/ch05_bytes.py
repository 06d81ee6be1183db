"""Exercises of chapter 5 about bytes: what is left beside a model in int8, and what a step moves.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

import math
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

# -- what is left -----------------------------------------------------------------------------------------------------

# Qwen2.5-7B: 28 layers of 233,046,016 weights in their matrices, an embedding and a head of 152,064 x 3,584
LAYERS_7B, EMBEDDING_7B, KV_7B = 28 * 233_046_016, 152_064 * 3_584, 28 * 2 * 4 * 128 * 2


def _left(*, layer: float = 1, embedding: float = 1, head: float = 1, at_least: float = 0,
          flip: bool = False, always: int | None = None, whole: Function = math.floor) -> Function:  # fmt: skip
    """The right answer, and with other options the wrong ones: `layer` ... multiply the bytes that are right."""

    def tokens_left(budget: int, layers: int, embeddings: int, heads: int, kv: int, int8_embeddings: bool) -> float:
        each = always or (1 if int8_embeddings != flip else 2)
        weights = layer * layers + each * (embedding * embeddings + head * heads)
        return max(at_least, whole((budget - weights) / kv))

    return tokens_left


def _draw_tokens_left(tokens_left: Function) -> Any:
    from .. import plots

    rows, said = {}, []
    for name, int8 in (("embedding, head in bf16", False), ("all in int8", True)):
        tokens = tokens_left(8e9, LAYERS_7B, EMBEDDING_7B, EMBEDDING_7B, KV_7B, int8)
        each = 1 if int8 else 2
        rows[name] = {
            "int8 layers": LAYERS_7B, "embedding": each * EMBEDDING_7B, "head": each * EMBEDDING_7B,
            "KV cache": max(0, tokens) * KV_7B,
        }  # fmt: skip
        said.append(f"{tokens:,.0f}")
    return plots.memory_budget(rows, title=f"A 7B in 8 GB, by your function: {said[0]} and {said[1]} tokens of cache")


TOKENS_LEFT = Exercise(
    name="tokens_left",
    parameters=("budget", "layers", "embedding", "head", "kv_bytes", "int8_embeddings"),
    cases=(
        # 1000 - 500 - 100 - 100 = 300
        Case((1000, 500, 100, 100, 10, True), 30, "all in int8"),
        # 1000 - 500 - 200 - 200 = 100
        Case((1000, 500, 100, 100, 10, False), 10, "embedding and head in bf16"),
        # 999 - 500 - 120 - 60 = 319, and 31 whole tokens of 10 bytes in it
        Case((999, 500, 120, 60, 10, True), 31, "a part of a token"),
        # 1000 - 800 - 300 - 300 is less than nothing
        Case((1000, 800, 150, 150, 10, False), 0, "nothing fits"),
        # 8e9 - 6,525,288,448 - 2 * 544,997,376 = 384,716,800; / 57,344 = 6,708.9
        Case((8_000_000_000, LAYERS_7B, EMBEDDING_7B, EMBEDDING_7B, KV_7B, True), 6708, "a 7B in 8 GB"),
    ),
    mistakes=(
        Mistake(
            "no head",
            "The head is missing. It is a matrix of its own, as large as the embedding (where the two are tied it is "
            "stored once, and `head` is 0).",
            (_left(head=0),),
        ),
        Mistake("no embedding", "The embedding is missing: it lies in memory too.", (_left(embedding=0),)),
        Mistake(
            "only the layers",
            "Embedding and head are missing: in a 7B they are over a billion weights.",
            (_left(embedding=0, head=0),),
        ),
        Mistake(
            "layers in two bytes",
            "Your layers take two bytes a weight. They are in int8: one byte.",
            (_left(layer=2),),
        ),
        Mistake(
            "always int8",
            "Embedding and head take one byte a weight in yours, whatever int8_embeddings says. In bf16 it is two.",
            (_left(always=1),),
        ),
        Mistake(
            "never int8",
            "Embedding and head take two bytes a weight in yours, whatever int8_embeddings says. In int8 it is one.",
            (_left(always=2),),
        ),
        Mistake(
            "the flag turned over",
            "The other way round: with int8_embeddings a weight of embedding and head takes one byte, else two.",
            (_left(flip=True),),
        ),
        Mistake(
            "less than nothing",
            "A negative number of tokens: if the weights alone do not fit, the answer is 0.",
            (_left(at_least=-math.inf),),
        ),
        Mistake(
            "rounded up",
            "A token whose keys and values fit only in part does not fit: round down.",
            (_left(whole=math.ceil),),
        ),
        Mistake(
            "a part of a token",
            "That is not a whole number. Half a token cannot be cached: round down, with //.",
            (_left(whole=float),),
        ),
        Mistake(
            "keys and values twice",
            "You counted keys and values, or their two bytes, once more: kv_bytes has both in it.",
            (lambda *a: _left()(*a[:4], 2 * a[4], a[5]), lambda *a: _left()(*a[:4], 4 * a[4], a[5])),
        ),
    ),
    hint="max(0, budget - bytes of all weights) // kv_bytes, with one or two bytes for embedding and head.",
    solved="Both have to go to int8 for a 7B to leave room in 8 GB: in bf16 they would take a gigabyte more.",
    draw=_draw_tokens_left,
)  # fmt: skip


# -- what a step moves ------------------------------------------------------------------------------------------------


def _moves(bf16: float = 2, fused: float = 1, first: float = 5) -> Function:
    """bytes_per_step from the bytes that a weight costs in each of the ways."""
    return lambda weights, way: {"bf16": bf16, "int8 fused": fused}.get(way, first) * weights


def _draw_bytes_per_step(bytes_per_step: Function) -> Any:
    from .. import plots

    weights = 28 * 233_046_016
    rows = {way: {"by your function": bytes_per_step(weights, way)} for way in WAYS}
    return plots.bytes_moved(rows)


WAYS = ("bf16", "int8 dequantised first", "int8 fused")
BYTES_PER_STEP = Exercise(
    name="bytes_per_step",
    parameters=("weights", "way"),
    cases=(
        Case((1000, "bf16"), 2000, "two bytes a weight"),
        Case((1000, "int8 fused"), 1000, "one byte a weight"),
        # codes 1, copy written 2, copy read 2
        Case((1000, "int8 dequantised first"), 5000, "codes and a copy"),
        Case((12_345_678, "int8 dequantised first"), 61_728_390, "a real layer"),
    ),
    mistakes=(
        Mistake(
            "half of the copy",
            "A copy in bf16 passes twice: it is written to memory, two bytes a weight, and the product reads it, two "
            "bytes more. One of the two is missing.",
            (_moves(first=3),),
        ),
        Mistake(
            "codes not read",
            "The copy is there, written and read. To make it the codes have to be read as well, one byte a weight.",
            (_moves(first=4),),
        ),
        Mistake(
            "as if fused",
            "You counted the codes alone. Dequantised first, a copy of two bytes a weight is written and read as well.",
            (_moves(first=1),),
        ),
        Mistake(
            "as bf16",
            "You counted what the product reads, the copy. Before that the codes are read, and the copy is written.",
            (_moves(first=2),),
        ),
        Mistake(
            "four bytes",
            "bf16 takes two bytes a weight; four would be fp32.",
            (_moves(bf16=4), _moves(bf16=4, first=9)),
        ),
        Mistake(
            "fused with a copy",
            "A fused kernel widens codes in its registers: nothing of two bytes a weight touches the memory.",
            (_moves(fused=3), _moves(fused=2), _moves(fused=5)),
        ),
        Mistake("bits", "Those are bits. A byte has eight of them.", (_moves(16, 8, 40),)),
    ),
    hint="2 bytes a weight; 1; and 1 for the codes, 2 for writing the copy, 2 for reading it.",
    solved="Dequantised first, int8 moves two and a half times the bytes of bf16. Fused it moves half of them.",
    draw=_draw_bytes_per_step,
)
