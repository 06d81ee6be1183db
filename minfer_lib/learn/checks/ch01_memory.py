"""Exercises of chapter 1 about memory: the bytes of a KV cache, and how many tokens fit beside the weights.

Invariant: expected values were worked out by hand from the formulas in the chapter, none comes from the package.
"""

from __future__ import annotations

import math
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

# -- the bytes of a KV cache ------------------------------------------------------------------------------------------


def _draw_kv_bytes(kv_bytes: Function) -> Any:
    from .. import plots

    per_token = {f"{heads} KV heads": kv_bytes(32, 32, heads, 128, 1, 2) for heads in (32, 8)}
    return plots.kv_growth(per_token, lengths=[0, 4096], mark=2048)


KV_BYTES = Exercise(
    name="kv_bytes",
    parameters=("layers", "query_heads", "kv_heads", "head_dim", "tokens", "bytes_per_value"),
    cases=(
        Case((1, 1, 1, 1, 1, 1), 2, "one number for the key, one for the value"),
        Case((32, 32, 32, 128, 2048, 2), 1_073_741_824, "32 layers, 32 heads, fp16"),
        Case((32, 32, 8, 128, 2048, 2), 268_435_456, "the same with grouped-query attention"),
        Case((30, 9, 3, 64, 1, 4), 46_080, "one token of SmolLM2-135M in fp32"),
    ),
    mistakes=(
        Mistake(
            "keys only",
            "That is exactly half. Each layer keeps two tensors, keys and values.",
            (lambda layers, q, kv, dim, n, size: layers * kv * dim * n * size,),
        ),
        Mistake(
            "query heads",
            "You counted the query heads. Only keys and values are kept, and with grouped-query attention there are "
            "fewer heads of those: several query heads read the same one.",
            (lambda layers, q, kv, dim, n, size: 2 * layers * q * dim * n * size,),
        ),
        Mistake(
            "one layer",
            "That is the cache of one layer. Every layer has keys and values of its own.",
            (lambda layers, q, kv, dim, n, size: 2 * kv * dim * n * size,),
        ),
        Mistake(
            "values, not bytes",
            "You counted numbers. A number takes bytes_per_value bytes: 4 in fp32, 2 in fp16 and bf16.",
            (lambda layers, q, kv, dim, n, size: 2 * layers * kv * dim * n,),
        ),
        Mistake(
            "query and KV heads together",
            "You added the query heads. A query is used in the step that computes it and never again: nobody keeps it.",
            (
                lambda layers, q, kv, dim, n, size: layers * (q + 2 * kv) * dim * n * size,
                lambda layers, q, kv, dim, n, size: 2 * layers * (q + kv) * dim * n * size,
            ),
        ),
    ),
    hint="Count for one token in one layer first: how many heads are kept, and how many numbers has each?",
    solved="With 8 heads of keys and values in place of 32, the same text takes a quarter of the memory.",
    draw=_draw_kv_bytes,
)


# -- how many tokens fit ----------------------------------------------------------------------------------------------


def _draw_tokens_that_fit(tokens_that_fit: Function) -> Any:
    from .. import plots

    budget, parameters, per_token = 8, 7_000_000_000, 131_072
    rows = {}
    for name, bits in (("fp16", 16), ("int8", 8), ("int4", 4)):
        tokens = tokens_that_fit(budget, parameters, bits, per_token)
        rows[f"{name}: {tokens:,} tokens"] = {"weights": parameters * bits / 8, "KV cache": tokens * per_token}
    return plots.memory_stack(rows, budgets={"8 GiB": budget * 2**30})


TOKENS_THAT_FIT = Exercise(
    name="tokens_that_fit",
    parameters=("budget_gib", "parameters", "bits", "kv_bytes_per_token"),
    cases=(
        Case((16, 7_000_000_000, 16, 524_288), 6_065, "a 7B in fp16 on a 16 GiB card"),
        Case((8, 7_000_000_000, 16, 524_288), 0, "the weights alone do not fit"),
        Case((8, 7_000_000_000, 8, 131_072), 12_130, "int8, grouped-query attention"),
        Case((8, 7_000_000_000, 4, 131_072), 38_833, "int4: half a byte for each weight"),
        Case((1, 2**28, 16, 1_024), 524_288, "it fits to the last byte"),
        Case((11, 7_000_000_000, 8, 196_608), 24_470, "nearly one token more"),
    ),
    mistakes=(
        Mistake(
            "GB for GiB",
            "You took 10^9 bytes. GPU memory is given in GiB, and one GiB has 2^30 bytes, over 7 % more.",
            (lambda gib, n, bits, kv: max(0, int((gib * 10**9 - n * bits / 8) // kv)),),
        ),
        Mistake(
            "weights forgotten",
            "The weights have to fit into the same memory. Take them off first; the cache gets what is left.",
            (lambda gib, n, bits, kv: int(gib * 2**30 // kv),),
        ),
        Mistake(
            "bits for bytes",
            "You counted bits as bytes. A byte has 8 bits: 16 bits are 2 bytes, 4 bits are half a byte.",
            (
                lambda gib, n, bits, kv: max(0, int((gib * 2**30 - n * bits) // kv)),
                lambda gib, n, bits, kv: int((gib * 2**30 - n * bits) // kv),
                lambda gib, n, bits, kv: max(0, int((gib * 2**30 - n * (bits // 8)) // kv)),
            ),
        ),
        Mistake(
            "negative",
            "Where the weights alone do not fit, the number of tokens is 0, not negative.",
            (
                lambda gib, n, bits, kv: int((gib * 2**30 - n * bits / 8) // kv),
                lambda gib, n, bits, kv: int((gib * 2**30 - n * bits / 8) / kv),
            ),
        ),
        Mistake(
            "part of a token",
            "A part of a token does not fit: round down to a whole number.",
            (
                lambda gib, n, bits, kv: max(0.0, (gib * 2**30 - n * bits / 8) / kv),
                lambda gib, n, bits, kv: max(0, math.ceil((gib * 2**30 - n * bits / 8) / kv)),
                lambda gib, n, bits, kv: max(0, round((gib * 2**30 - n * bits / 8) / kv)),
            ),
        ),
    ),
    hint="Bring everything to bytes: the budget, minus parameters x bits / 8, divided by the bytes of one token.",
    solved="From 8 to 4 bits for a weight, the room for the cache more than tripled: fewer bits buy longer texts.",
    draw=_draw_tokens_that_fit,
    tolerance=0.0,
)
