"""Exercises of chapter 3 about shapes: which KV head a query head reads, and what a preallocated cache leaves empty.

Invariant: expected values were worked out by hand from the definitions in the chapter, none comes from the package.
"""

from __future__ import annotations

from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

# -- the KV head of a query head --------------------------------------------------------------------------------------


def _draw_kv_head_of(kv_head_of: Function) -> Any:
    from .. import plots

    reads = [kv_head_of(head, 9, 3) for head in range(9)]
    readers = [reads.count(head) for head in range(3)]
    return plots.head_groups(9, 3, reads=reads, title=f"Your function: KV heads 0, 1, 2 have {readers} readers")


KV_HEAD_OF = Exercise(
    name="kv_head_of",
    parameters=("query_head", "query_heads", "kv_heads"),
    cases=(
        Case((0, 9, 3), 0),
        Case((1, 9, 3), 0, "SmolLM2: three share one"),
        Case((5, 9, 3), 1, "SmolLM2: three share one"),
        Case((8, 9, 3), 2, "the last head"),
        Case((13, 28, 4), 1, "Qwen2.5-7B: seven share one"),
        Case((5, 32, 32), 5, "as many KV heads as query heads"),
        Case((6, 8, 1), 0, "one for all"),
    ),
    mistakes=(
        Mistake(
            "dealt out",
            "You deal the query heads out like cards, head % kv_heads. Neighbours share: the first group of query "
            "heads reads KV head 0, the next KV head 1. The model was trained that way; dealt out it says nonsense.",
            (lambda head, query_heads, kv_heads: head % kv_heads,),
        ),
        Mistake(
            "divided by kv_heads",
            "You divided by the number of KV heads. Divide by the size of a group, query_heads // kv_heads; in SmolLM2 "
            "both are 3, so only other models tell.",
            (lambda head, query_heads, kv_heads: head // kv_heads,),
        ),
        Mistake(
            "place in the group",
            "That is the place of the head inside its group. Asked for is which group it is in.",
            (lambda head, query_heads, kv_heads: head % (query_heads // kv_heads),),
        ),
        Mistake(
            "a fraction",
            "A head is a whole number: round down, with // in place of /.",
            (
                lambda head, query_heads, kv_heads: head / (query_heads // kv_heads),
                lambda head, query_heads, kv_heads: head * kv_heads / query_heads,
            ),
        ),
        Mistake(
            "the head itself",
            "There is no KV head of that number: with grouped queries there are fewer KV heads than query heads.",
            (lambda head, query_heads, kv_heads: head,),
        ),
        Mistake(
            "counted from 1",
            "One too many: KV heads are counted from 0, as query heads are.",
            (lambda head, query_heads, kv_heads: head // (query_heads // kv_heads) + 1,),
        ),
    ),
    hint="query_heads // kv_heads neighbours form a group; the number of the group is the KV head.",
    solved="That is what repeat_interleave does to the keys, and a kernel reads the right head without repeating any.",
    draw=_draw_kv_head_of,
)


# -- what stays empty -------------------------------------------------------------------------------------------------


def _draw_empty_bytes(empty_bytes: Function) -> Any:
    from .. import plots
    from ..style import format_bytes

    lengths, room, size = [53, 120, 356, 40], 2048, 46_080
    empty, share = empty_bytes(lengths, room, size)
    return plots.cache_fill(lengths, room, title=f"Your function says: {format_bytes(empty)} empty, {share:.0%}")


EMPTY_BYTES = Exercise(
    name="empty_bytes",
    parameters=("lengths", "max_len", "bytes_per_token"),
    cases=(
        Case(([10], 100, 1), (90, 0.9), "one request"),
        # Small numbers first, since that is where nearly all mistakes show: a pair of them is read at a glance.
        Case(([512, 1024], 2048, 2), (5120, 0.625), "two requests"),
        Case(([512, 1024], 2048, 46_080), (2560 * 46_080, 0.625), "two requests of SmolLM2"),
        Case(([2048, 2048], 2048, 2), (0, 0.0), "both reach the limit"),
        Case(([356], 2048, 57_344), (1692 * 57_344, 1692 / 2048), "Qwen2.5-7B, 356 of 2,048"),
        Case(([], 2048, 2), (0, 0.0), "no request at all"),
    ),
    mistakes=(
        Mistake(
            "what is used",
            "That is the part in use. Asked for is the rest: what was reserved and holds no token.",
            (
                lambda n, room, size: (sum(n) * size, sum(n) / (room * len(n)) if n else 0.0),
                lambda n, room, size: (sum(n) * size, sum(n) / (room * len(n))),
            ),
        ),
        Mistake(
            "the used share",
            "The bytes are those of the empty part, and the share is that of the used one. Both are asked for what is "
            "empty: empty / reserved.",
            (
                lambda n, room, size: ((room * len(n) - sum(n)) * size, sum(n) / (room * len(n)) if n else 0.0),
                lambda n, room, size: ((room * len(n) - sum(n)) * size, sum(n) / (room * len(n))),
            ),
        ),
        Mistake(
            "one buffer for all",
            "You counted one buffer. Each request has one of its own, so len(lengths) * max_len tokens are reserved.",
            (
                lambda n, room, size: ((room - sum(n)) * size, 1 - sum(n) / room),
                lambda n, room, size: (max(0, room - sum(n)) * size, max(0.0, 1 - sum(n) / room)),
                lambda n, room, size: ((room - sum(n)) * size, 1 - sum(n) / (room * len(n)) if n else 0.0),
                lambda n, room, size: ((room - sum(n)) * size, (room - sum(n)) / (room * len(n)) if n else 0.0),
                lambda n, room, size: ((room - max(n, default=0)) * size, 1 - max(n, default=0) / room),
            ),
        ),
        Mistake(
            "what is reserved",
            "That counts all that is reserved. The tokens that are there have to be taken off.",
            (
                lambda n, room, size: (room * len(n) * size, 1 - sum(n) / (room * len(n)) if n else 0.0),
                lambda n, room, size: (room * len(n) * size, 1.0),
            ),
        ),
        Mistake(
            "share of what is used",
            "You divided by the used part. A share is of the whole: empty / reserved.",
            (
                lambda n, room, size: (
                    (room * len(n) - sum(n)) * size,
                    (room * len(n) - sum(n)) / sum(n) if n else 0.0,
                ),
                lambda n, room, size: ((room * len(n) - sum(n)) * size, (room * len(n) - sum(n)) / sum(n)),
            ),
        ),
        Mistake(
            "per cent",
            "Your share is in per cent. Return a fraction of 1: 0.9 for ninety per cent.",
            (
                lambda n, room, size: (
                    (room * len(n) - sum(n)) * size,
                    100 * (1 - sum(n) / (room * len(n))) if n else 0.0,
                ),
            ),
        ),
        Mistake(
            "tokens",
            "You counted tokens. Each takes bytes_per_token bytes.",
            (
                lambda n, room, size: (
                    room * len(n) - sum(n),
                    1 - sum(n) / (room * len(n)) if n else 0.0,
                ),
            ),
        ),
        Mistake(
            "no request",
            "With no request nothing is reserved, and the share is 0 by agreement: do not divide by it.",
            (lambda n, room, size: ((room * len(n) - sum(n)) * size, 1 - sum(n) / (room * len(n))),),
        ),
    ),
    hint="Reserved are max_len tokens for each request, used are sum(lengths); the rest is empty.",
    solved="Nobody knows beforehand how long an answer gets, so a buffer in one piece has to be as long as the limit.",
    draw=_draw_empty_bytes,
)
