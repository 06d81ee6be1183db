"""Exercises of chapter 4 about numbers: what padding costs, and what a second row of a batch gains.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

Lengths = Sequence[int]

# -- what nobody needed -----------------------------------------------------------------------------------------------


def _computed(prompts: Lengths, outputs: Lengths) -> int:
    return len(prompts) * (max(prompts) + max(outputs) - 1)


def _needed(prompts: Lengths, outputs: Lengths) -> int:
    return sum(p + o - 1 for p, o in zip(prompts, outputs, strict=True))


def _last_token_too(prompts: Lengths, outputs: Lengths) -> float:
    return 1 - (sum(prompts) + sum(outputs)) / (len(prompts) * (max(prompts) + max(outputs)))


def _longest_request(prompts: Lengths, outputs: Lengths) -> float:
    longest = max(p + o - 1 for p, o in zip(prompts, outputs, strict=True))
    return 1 - _needed(prompts, outputs) / (len(prompts) * longest)


def _only_padding(prompts: Lengths, outputs: Lengths) -> float:
    return (len(prompts) * max(prompts) - sum(prompts)) / _computed(prompts, outputs)


def _only_waiting(prompts: Lengths, outputs: Lengths) -> float:
    return (len(outputs) * max(outputs) - sum(outputs)) / _computed(prompts, outputs)


def _draw_padding_share(padding_share: Function) -> Any:
    from .. import plots

    prompts, outputs = [12, 90, 31, 55], [60, 20, 110, 35]
    share = padding_share(prompts, outputs)
    return plots.static_batch_waste(prompts, outputs, title=f"Your function says: {share:.0%} of this was not needed")


PADDING_SHARE = Exercise(
    name="padding_share",
    parameters=("prompt_lens", "output_lens"),
    cases=(
        Case(([7], [9]), 0.0, "one request"),
        Case(([4, 4], [3, 3]), 0.0, "all alike"),
        # 2 rows of 4 + 3 - 1 = 6 columns, needed 4 and 6
        Case(([2, 4], [3, 3]), 2 / 12, "prompts differ"),
        # 2 rows of 4 + 5 - 1 = 8 columns, needed 4 and 8
        Case(([4, 4], [1, 5]), 4 / 16, "answers differ"),
        # 2 rows of 128 + 128 - 1 = 255 columns, needed 143 twice
        Case(([16, 128], [128, 16]), 224 / 510, "short prompt, long answer and the reverse"),
        # 3 rows of 10 columns, needed 3, 5 and 10: there is no second pass
        Case(([3, 5, 10], [1, 1, 1]), 12 / 30, "one token each"),
    ),
    mistakes=(
        Mistake(
            "the last token is not fed back",
            "You counted a column for every token of an answer. The pass over the prompts gives the first one, and the "
            "last is never fed back: an answer of n tokens takes n - 1 columns.",
            (_last_token_too,),
        ),
        Mistake(
            "the longest request",
            "You took the columns of the longest request. Prompts end in the same column, so the longest prompt and "
            "the longest answer count, even where they belong to two requests.",
            (_longest_request,),
        ),
        Mistake(
            "only the padding",
            "That is the padding before the prompts. Rows whose answer is done are computed on until the longest is.",
            (_only_padding,),
        ),
        Mistake(
            "only the waiting",
            "That is what rows compute after their answer is done. The padding before short prompts is missing.",
            (_only_waiting,),
        ),
        Mistake(
            "what was needed",
            "That is the share that was needed. Asked for is the rest.",
            (lambda p, o: _needed(p, o) / _computed(p, o),),
        ),
        Mistake(
            "divided by what was needed",
            "You divided by what was needed. The share is of everything that was computed.",
            (lambda p, o: (_computed(p, o) - _needed(p, o)) / _needed(p, o),),
        ),
        Mistake(
            "positions",
            "You counted positions. Divide by all that were computed.",
            (lambda p, o: _computed(p, o) - _needed(p, o),),
        ),
        Mistake(
            "per cent",
            "Your share is in per cent. Return a fraction of 1: 0.25 for a quarter.",
            (lambda p, o: 100 * (1 - _needed(p, o) / _computed(p, o)),),
        ),
    ),
    hint="Computed: a row for each request, of longest prompt + longest answer - 1 columns. Needed: p + o - 1 of each.",
    solved="More rows make it worse: the longest of many is longer. A packed row has no columns to fill.",
    draw=_draw_padding_share,
)


# -- tokens a second --------------------------------------------------------------------------------------------------


def _draw_throughput_bound(throughput_bound: Function) -> Any:
    from .. import plots

    batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    rates = [throughput_bound(15e9, 60e6, batch, 4e12) for batch in batches]
    return plots.curves(
        batches, {"your function": rates}, xlabel="requests in the batch", ylabel="tokens a second", log_x=True,
        title=f"Your function: {rates[0]:,.0f} tokens/s alone, {rates[-1]:,.0f} with 256",
    )  # fmt: skip


THROUGHPUT_BOUND = Exercise(
    name="throughput_bound",
    parameters=("weight_bytes", "kv_bytes_per_request", "batch", "bandwidth"),
    cases=(
        # 100 bytes a step at 1,000 bytes/s: 10 steps a second
        Case((100, 0, 1, 1000), 10.0, "no cache, one request"),
        Case((100, 0, 8, 1000), 80.0, "no cache: every row is free"),
        # 100 + 4 * 25 = 200 bytes a step: 5 steps a second of 4 tokens
        Case((100, 25, 4, 1000), 20.0, "as much cache as weights"),
        # 100 + 25 bytes: 8 steps a second of one token
        Case((100, 25, 1, 1000), 8.0, "one request with a cache"),
        # 16e9 + 64 * 250e6 = 32e9 bytes at 4e12: 125 steps a second of 64 tokens
        Case((16e9, 250e6, 64, 4e12), 8000.0, "a model of 8 billion parameters, 64 requests"),
    ),
    mistakes=(
        Mistake(
            "weights once for each request",
            "You read the weights once for each request. One pass over them serves all rows: that is the whole gain.",
            (lambda w, kv, n, bw: n / (n * (w + kv) / bw), lambda w, kv, n, bw: bw / (w + kv)),
        ),
        Mistake(
            "one cache for all",
            "You read the cache of one request. Nobody shares keys and values: each row reads its own.",
            (lambda w, kv, n, bw: n / ((w + kv) / bw),),
        ),
        Mistake(
            "no cache",
            "The cache is missing. Every step reads it too, and with many or long requests it outgrows the weights.",
            (lambda w, kv, n, bw: n / (w / bw),),
        ),
        Mistake(
            "steps a second",
            "Those are steps a second. Each gives every request a token.",
            (lambda w, kv, n, bw: bw / (w + n * kv),),
        ),
        Mistake(
            "seconds",
            "That is a time: seconds for one step. Asked for are tokens a second.",
            (lambda w, kv, n, bw: (w + n * kv) / bw, lambda w, kv, n, bw: (w + n * kv) / bw / n),
        ),
        Mistake(
            "batch twice",
            "You multiplied by the number of requests twice. The bytes of a step are those of all of them already.",
            (lambda w, kv, n, bw: n * n / ((w + n * kv) / bw),),
        ),
    ),
    hint="Seconds of a step: (weights + batch * cache of one) / bandwidth. In that time come `batch` tokens.",
    solved="In proportion to the batch while weights are most of the bytes; never above bandwidth / cache of one.",
    draw=_draw_throughput_bound,
)
