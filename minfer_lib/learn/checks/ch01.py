"""Exercises of chapter 1, what an engine does: bytes of a cache, a token from logits, latency, what a step waits for.

Invariant: expected values were worked out by hand from the formulas in the chapter; none comes from the package or the
solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

# -- the bytes of a KV cache ------------------------------------------------------------------------------------------


def kv_bytes(layers: int, query_heads: int, kv_heads: int, head_dim: int, tokens: int, bytes_per_value: int) -> int:
    """Bytes of a KV cache that holds so many tokens."""
    return 2 * layers * kv_heads * head_dim * tokens * bytes_per_value


def _draw_kv_bytes(kv_bytes: Function) -> Any:
    from .. import plots

    per_token = {f"{heads} KV heads": kv_bytes(32, 32, heads, 128, 1, 2) for heads in (32, 8)}
    return plots.kv_growth(per_token, lengths=[0, 4096], mark=2048)


check_kv_bytes = Exercise(
    kv_bytes,
    cases=(
        Case((1, 4, 1, 1, 1, 1), 2, "one number for the key, one for the value"),
        Case((32, 32, 32, 128, 2048, 2), 1_073_741_824, "32 layers, 32 heads, fp16"),
        Case((32, 32, 8, 128, 2048, 2), 268_435_456, "the same with grouped-query attention"),
        Case((30, 9, 3, 64, 1, 4), 46_080, "one token of SmolLM2-135M in fp32"),
    ),
    mistakes=(
        Mistake(
            "That is exactly half. Each layer keeps two tensors, keys and values.",
            lambda layers, q, kv, dim, n, size: layers * kv * dim * n * size,
        ),
        Mistake(
            "You counted the query heads. Only keys and values are kept, and with grouped-query attention there are "
            "fewer heads of those: several query heads read the same one.",
            lambda layers, q, kv, dim, n, size: 2 * layers * q * dim * n * size,
        ),
        Mistake(
            "That is the cache of one layer. Every layer has keys and values of its own.",
            lambda layers, q, kv, dim, n, size: 2 * kv * dim * n * size,
        ),
        Mistake(
            "You counted numbers. A number takes bytes_per_value bytes: 4 in fp32, 2 in fp16 and bf16.",
            lambda layers, q, kv, dim, n, size: 2 * layers * kv * dim * n,
        ),
    ),
    hints=(
        "Count for one token in one layer first: how many heads are kept, and how many numbers does each have?",
        "Two tensors per layer, keys and values. Each holds kv_heads x head_dim numbers per token, and a number takes "
        "bytes_per_value bytes.",
    ),
    solved="With 8 heads of keys and values in place of 32, the same text takes a quarter of the memory.",
    draw=_draw_kv_bytes,
)


# -- from logits to a token -------------------------------------------------------------------------------------------


def first_token(logits: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(id, probability) of the token that greedy decoding takes; `logits` is a tensor [vocab] of floats."""
    probs = (logits - logits.max()).exp()
    probs = probs / probs.sum()
    token = int(probs.argmax())
    return token, probs[token]


def _naive_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.exp() / logits.exp().sum()


def _overflow_in_python(logits: torch.Tensor) -> tuple[int, float]:
    exps = [math.exp(x) for x in logits.tolist()]
    return int(logits.argmax()), max(exps) / sum(exps)


def _draw_first_token(first_token: Function) -> Any:
    from .. import plots

    shifts = list(range(-120, 121, 4))
    values = [float(first_token(torch.tensor([1.0, 2.0, 0.0]) + shift)[1]) for shift in shifts]
    return plots.curves(
        shifts, {"the likeliest token": values}, xlabel="added to all three logits", ylabel="its probability",
        y_range=(0, 1.05), title="Adding the same to every logit must change nothing",
    )  # fmt: skip


check_first_token = Exercise(
    first_token,
    cases=(
        Case((torch.tensor([0.0, math.log(2), math.log(5)]),), (2, 0.625), "5 parts of 8"),
        Case((torch.tensor([1000.0, 1001.0, 999.0]),), (1, 0.665241), "large logits"),
        Case((torch.tensor([-1000.0, -1001.0]),), (0, 0.731059), "very negative logits"),
        Case((torch.tensor([3.0]),), (0, 1.0), "a vocabulary of one"),
    ),
    mistakes=(
        Mistake(
            "exp(1000) is larger than any float can be, and exp(-1000) is 0: infinity / infinity and 0 / 0 are not "
            "numbers. Subtract the largest logit before exp; that changes no probability, since it cancels.",
            lambda logits: (int(logits.argmax()), _naive_softmax(logits).max()),
            lambda logits: (int(_naive_softmax(logits).argmax()), _naive_softmax(logits).max()),
            _overflow_in_python,
        ),
        Mistake(
            "The largest comes out as 1 every time. Divide by the sum over all tokens, so that they add up to 1.",
            lambda logits: (int(logits.argmax()), 1.0),
        ),
        Mistake(
            "Logits may be negative and do not add up; a probability is exp(logit) / the sum of all exp(logit).",
            lambda logits: (int(logits.argmax()), (logits / logits.sum()).max()),
        ),
        Mistake(
            "That is the logit of the token. Put the logits through a softmax to get probabilities.",
            lambda logits: (int(logits.argmax()), logits.max()),
        ),
        Mistake(
            "Both numbers are right but swapped: the token's id comes first, its probability second.",
            lambda logits: (logits.softmax(-1).max(), int(logits.argmax())),
        ),
    ),
    hints=(
        "Which id has the largest logit? And what turns logits into numbers that are positive and add up to 1?",
        "argmax gives the id; softmax, computed from logits minus their maximum, gives its probability.",
    ),
    solved="Subtracting the maximum keeps every exponent at 0 or below, and the largest probability never overflows.",
    draw=_draw_first_token,
)


# -- TTFT and TPOT ----------------------------------------------------------------------------------------------------


def split_latency(arrival: float, token_times: Sequence[float]) -> tuple[float, float | None]:
    """(TTFT, TPOT), all in seconds; TPOT is None with one token."""
    ttft = token_times[0] - arrival
    if len(token_times) == 1:
        return ttft, None
    return ttft, (token_times[-1] - token_times[0]) / (len(token_times) - 1)


def _with_tpot(tpot: Function) -> Function:
    """The right TTFT beside a wrong TPOT."""
    return lambda arrival, times: (times[0] - arrival, tpot(arrival, times))


def _draw_split_latency(split_latency: Function) -> Any:
    from .. import plots

    ends = [0.35 + 0.018 * n for n in range(25)]
    ttft, tpot = split_latency(0.0, ends)
    steps = [("prefill", 256, ends[0])] + [("decode", 1, 0.018)] * 24
    return plots.prefill_decode_timeline(
        steps, title=f"Your function says: TTFT {1e3 * ttft:.0f} ms, TPOT {1e3 * tpot:.1f} ms"
    )


check_split_latency = Exercise(
    split_latency,
    cases=(
        Case((0.0, [0.35, 0.368, 0.386]), (0.35, 0.018)),
        Case((100.0, [100.5, 100.6, 100.7, 100.8]), (0.5, 0.1), "the clock did not start at 0"),
        Case((10.0, [10.25, 10.35, 10.75, 11.15]), (0.25, 0.3), "steps of unequal length"),
        Case((5.0, [5.2]), (0.2, None), "one token only"),
    ),
    mistakes=(
        Mistake(
            "TTFT counts from the arrival of the request, not from the zero of the clock.",
            lambda arrival, times: (times[0], split_latency(arrival, times)[1]),
        ),
        Mistake(
            "Your TPOT counts the first token too. TTFT covers that one; TPOT is the mean of the later ones.",
            _with_tpot(lambda arrival, times: (times[-1] - arrival) / len(times)),
            _with_tpot(lambda arrival, times: (times[-1] - arrival) / max(1, len(times) - 1)),
        ),
        Mistake(
            "Between n tokens lie n - 1 steps: three tokens arrive in two steps after the first.",
            _with_tpot(lambda arrival, times: (times[-1] - times[0]) / len(times)),
        ),
        Mistake(
            "With a single token there is no gap to measure, so there is no mean either: return None for TPOT.",
            _with_tpot(lambda arrival, times: (times[-1] - times[0]) / (len(times) - 1)),
            _with_tpot(lambda arrival, times: (times[-1] - times[0]) / max(1, len(times) - 1)),
            _with_tpot(lambda arrival, times: (times[-1] - times[0]) / (len(times) - 1) if times[1:] else math.nan),
        ),
        Mistake(
            "Both numbers are right but swapped: TTFT comes first, TPOT second.",
            lambda arrival, times: split_latency(arrival, times)[::-1],
        ),
    ),
    hints=(
        "Draw the times as dots on a line. Which gap does a user wait for once, and which ones at every token?",
        "TTFT is the gap before the first dot; TPOT is last minus first, divided by the number of gaps between dots.",
    ),
    solved="A user waits for TTFT once and for TPOT at every word, which is why the two are never mixed into one mean.",
    draw=_draw_split_latency,
)


# -- how many tokens fit ----------------------------------------------------------------------------------------------


def tokens_that_fit(budget_gib: float, parameters: int, bits: int, kv_bytes_per_token: int) -> int:
    """Tokens of cache that fit beside the weights; 0 if the weights do not fit."""
    left = budget_gib * 2**30 - parameters * bits / 8
    return max(0, int(left // kv_bytes_per_token))


def _draw_tokens_that_fit(tokens_that_fit: Function) -> Any:
    from .. import plots

    budget, parameters, per_token = 8, 7_000_000_000, 131_072
    rows = {}
    for name, bits in (("fp16", 16), ("int8", 8), ("int4", 4)):
        tokens = tokens_that_fit(budget, parameters, bits, per_token)
        rows[f"{name}: {tokens:,} tokens"] = {"weights": parameters * bits / 8, "KV cache": tokens * per_token}
    return plots.memory_stack(rows, budgets={"8 GiB": budget * 2**30})


check_tokens_that_fit = Exercise(
    tokens_that_fit,
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
            "You counted 10^9 bytes to the GiB. One GiB has 2^30 bytes, over 7 % more.",
            lambda gib, n, bits, kv: max(0, int((gib * 10**9 - n * bits / 8) // kv)),
        ),
        Mistake(
            "The weights have to fit into the same memory. Subtract them first; the cache gets what is left.",
            lambda gib, n, bits, kv: int(gib * 2**30 // kv),
        ),
        Mistake(
            "Check how you get from bits to bytes. A byte has 8 bits: 16 bits are 2 bytes, 4 bits are half a byte.",
            lambda gib, n, bits, kv: max(0, int((gib * 2**30 - n * bits) // kv)),
            lambda gib, n, bits, kv: int((gib * 2**30 - n * bits) // kv),
            lambda gib, n, bits, kv: max(0, int((gib * 2**30 - n * (bits // 8)) // kv)),
        ),
        Mistake(
            "Where the weights alone do not fit, the number of tokens is 0, not negative.",
            lambda gib, n, bits, kv: int((gib * 2**30 - n * bits / 8) // kv),
            lambda gib, n, bits, kv: int((gib * 2**30 - n * bits / 8) / kv),
        ),
        Mistake(
            "A part of a token does not fit: round down to a whole number.",
            lambda gib, n, bits, kv: max(0.0, (gib * 2**30 - n * bits / 8) / kv),
            lambda gib, n, bits, kv: max(0, math.ceil((gib * 2**30 - n * bits / 8) / kv)),
            lambda gib, n, bits, kv: max(0, round((gib * 2**30 - n * bits / 8) / kv)),
        ),
    ),
    hints=(
        "Bring everything to bytes first. What is left of the budget once the weights are in it?",
        "The budget x 2^30, minus parameters x bits / 8, divided by the bytes of one token; round down, never below 0.",
    ),
    solved="From 8 to 4 bits for a weight, the room for the cache more than tripled: fewer bits buy longer texts.",
    draw=_draw_tokens_that_fit,
    tolerance=0.0,
)


# -- memory or arithmetic ---------------------------------------------------------------------------------------------


def step_time(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> tuple[float, str]:
    """(seconds of a step, "memory" or "compute": what it waits for)."""
    computing, reading = flops / peak_flops, bytes_moved / bandwidth
    return max(computing, reading), "memory" if reading > computing else "compute"


def _draw_step_time(step_time: Function) -> Any:
    from .. import plots

    batches = [2**n for n in range(11)]
    ms = [1e3 * step_time(14e9 * batch, 14e9, 1e15, 4e12)[0] for batch in batches]
    return plots.curves(
        batches, {"step": ms}, xlabel="requests in the batch", ylabel="ms per step", log_x=True, log_y=True,
        title=f"One request: {ms[0]:.2f} ms per step; 1,024 requests: {ms[-1]:.2f} ms",
    )  # fmt: skip


check_step_time = Exercise(
    step_time,
    cases=(
        Case((14e9, 14e9, 1e15, 4e12), (0.0035, "memory"), "a 7B decodes one token on a large GPU"),
        Case((448e9, 14e9, 1e15, 4e12), (0.0035, "memory"), "32 requests in one step"),
        Case((28_672e9, 14e9, 1e15, 4e12), (0.028672, "compute"), "a prompt of 2,048 tokens"),
        Case((0.27e9, 0.54e9, 300e9, 27e9), (0.02, "memory"), "SmolLM2 decodes on a CPU"),
    ),
    mistakes=(
        Mistake(
            "You added the two times. The machine reads and computes at the same time, so the longer one decides.",
            lambda f, b, peak, bw: (f / peak + b / bw, step_time(f, b, peak, bw)[1]),
        ),
        Mistake(
            "You took the shorter time. The step is over when both are done: the longer one decides.",
            lambda f, b, peak, bw: (min(f / peak, b / bw), "memory" if b / bw < f / peak else "compute"),
            lambda f, b, peak, bw: (min(f / peak, b / bw), step_time(f, b, peak, bw)[1]),
        ),
        Mistake(
            "You compared FLOP with bytes. A byte takes far longer than a FLOP; compare the two times in seconds.",
            lambda f, b, peak, bw: (max(f / peak, b / bw), "compute" if f > b else "memory"),
        ),
        Mistake(
            'The time is right, but the name is swapped: if reading takes longer, the step waits for "memory".',
            lambda f, b, peak, bw: (max(f / peak, b / bw), "compute" if b / bw > f / peak else "memory"),
        ),
        Mistake(
            "Divide the work by the speed: bytes / (bytes/s) gives seconds, not the other way round.",
            lambda f, b, peak, bw: (max(peak / f, bw / b), "memory" if bw / b > peak / f else "compute"),
        ),
    ),
    hints=(
        "Two things happen at the same time. How long does each take alone, and when is the step over?",
        "Two times: flops / peak_flops and bytes_moved / bandwidth. The step takes the longer one, and waits for that.",
    ),
    solved="On the large GPU, 250 requests could share a step that takes no longer than for one: hence batching.",
    draw=_draw_step_time,
)


EXERCISES = (check_kv_bytes, check_first_token, check_split_latency, check_tokens_that_fit, check_step_time)
