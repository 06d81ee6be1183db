"""Exercises of chapter 3, the KV cache: one decode step, the mask of several new tokens, grouped heads, empty bytes.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package or the solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

Tensor = torch.Tensor

# -- one step of decoding ---------------------------------------------------------------------------------------------


def decode_step(keys: Tensor, values: Tensor, length: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The attention output [head_dim] of one head for one new token.

    keys, values: tables [max_len, head_dim], whose rows [0, length) hold the tokens so far. query, key, value:
    [head_dim], those of the new token.
    """
    keys[length], values[length] = key, value
    scores = keys[: length + 1] @ query / query.shape[-1] ** 0.5  # [length + 1]
    return scores.softmax(-1) @ values[: length + 1]


def _attention(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    return (keys @ query / len(query) ** 0.5).softmax(-1) @ values


def _whole_table(keys: Tensor, values: Tensor, length: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    keys[length], values[length] = key, value
    return _attention(keys, values, query)


def _decode_case(
    keys: list, values: list, length: int, query: list, key: list, value: list, output: list, about: str
) -> Case:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in (keys, values, query, key, value, output)]
    return Case((*tensors[:2], length, *tensors[2:5]), tensors[5], about)


def _draw_decode_step(decode_step: Function) -> Any:
    """With row n of the values being one at place n and zero elsewhere, the output is the weights themselves."""
    from .. import plots

    room = 6
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    keys, values = torch.full((room, 2), 2.0), torch.ones(room, room) / room  # what an earlier request has left
    weights = []
    for n, token in enumerate(tokens):
        output = decode_step(keys, values, n, token, token, torch.eye(room)[n])
        weights.append([float(weight) for weight in output[: n + 1]])
    sums = ", ".join(f"{sum(line):.2f}" for line in weights)
    return plots.attention_weights(weights, room=room, title=f"Your weights add up to {sums}")


SECOND = 1 / (1 + math.exp(-math.sqrt(2)))  # weight of the second row if its score is sqrt(2) and the first's is 0
check_decode_step = Exercise(
    decode_step,
    cases=(
        # the weights are 1/2 and 1/2
        _decode_case([[1, 0], [7, 7]], [[2, 0], [9, 9]], 1, [0, 0], [0, 1], [0, 4], [1, 2], "both score 0"),
        # the weight of a single token is 1, whatever its score
        _decode_case([[3], [3]], [[9], [9]], 0, [1], [2], [5], [5], "the first token"),
        # scores 0 and 2 / sqrt(2)
        _decode_case([[0, 0]] * 2, [[1, 0], [0, 0]], 1, [2, 0], [1, 0], [0, 1], [1 - SECOND, SECOND], "scores differ"),
        # scores 0, 0 and 0: the mean of 3, 6 and 9
        _decode_case([[1], [2], [0], [0]], [[3], [6], [0], [0]], 2, [0], [1], [9], [6], "one row stays empty"),
        # scores 0 and 1 / sqrt(1), so the weights are 1 : e
        _decode_case([[0], [7]], [[2], [9]], 1, [1], [1], [4], [(2 + 4 * math.e) / (1 + math.e)], "a head_dim of 1"),
    ),
    mistakes=(
        Mistake(
            "Divide the scores by the square root of head_dim before the softmax. Without it the weights are too "
            "sharp.",
            lambda keys, values, n, query, *new: decode_step(keys, values, n, query * len(query) ** 0.5, *new),
        ),
        Mistake(
            "2**0.5 was right for the toy, whose head_dim is 2. Divide by the square root of this query's own size: "
            "len(query) ** 0.5.",
            lambda keys, values, n, query, *new: decode_step(keys, values, n, query * (len(query) / 2) ** 0.5, *new),
        ),
        Mistake(
            "Rows behind the newest token take part. They hold nothing, or what another request has left. Zeros do no "
            "better: a score of 0 gets a weight too. Read only the rows 0 to `length`.",
            _whole_table,
        ),
        Mistake(
            "The new token is missing. A token looks at itself too: write its key and value first, then read "
            "length + 1 rows.",
            lambda keys, values, n, query, *new: _attention(keys[:n], values[:n], query),
        ),
        Mistake(
            "You wrote to row length - 1, which holds the token before. Rows are numbered from 0, so the next free one "
            "is row `length`.",
            lambda keys, values, n, *new: decode_step(keys, values, n - 1, *new),
        ),
    ),
    hints=(
        "The token looks at itself too, so what do you do before you read? And how many rows do you read then?",
        "Four lines: write row `length`, score the rows 0 to `length` (divide by the root of head_dim), take the "
        "softmax, weigh the values of the same rows.",
    ),
    solved="Nothing behind the newest row was touched, so the buffer may hold what another request has left.",
    draw=_draw_decode_step,
)


# -- the mask of several new tokens -----------------------------------------------------------------------------------


def causal_mask(q_len: int, kv_len: int) -> Tensor:
    """Booleans [q_len, kv_len], True where a new token may look at a key; the new tokens are the last of the text."""
    query_positions = torch.arange(kv_len - q_len, kv_len)
    key_positions = torch.arange(kv_len)
    return key_positions[None, :] <= query_positions[:, None]


def _draw_causal_mask(causal_mask: Function) -> Any:
    from .. import plots

    return plots.attention_mask([[bool(seen) for seen in row] for row in causal_mask(3, 8)])


check_causal_mask = Exercise(
    causal_mask,
    cases=(
        Case((1, 1), [[True]], "a prompt of one token"),
        Case((1, 4), [[True] * 4], "a decode step"),
        Case((3, 3), [[True, False, False], [True, True, False], [True, True, True]], "an empty cache"),
        Case((2, 4), [[True, True, True, False], [True, True, True, True]], "two tokens enter a cache of two"),
    ),
    mistakes=(
        Mistake(
            "Your triangle starts in the top left corner, as if the new tokens were the first of the text. They are "
            "the last: the first of them stands at position kv_len - q_len, and sees itself and everything before.",
            lambda q, kv: torch.ones(q, kv).tril().bool(),
        ),
        Mistake(
            "A token may look at itself. In your mask each sees only what stands before it.",
            lambda q, kv: torch.ones(q, kv).tril(kv - q - 1).bool(),
        ),
        Mistake(
            "Each token sees one that comes after it. In training that would be reading the answer.",
            lambda q, kv: torch.ones(q, kv).tril(kv - q + 1).bool(),
        ),
        Mistake(
            "Everybody sees everything. That is right for one new token; of several, the earlier ones look ahead.",
            lambda q, kv: torch.ones(q, kv).bool(),
        ),
        Mistake(
            "The other way round: True means that a token may look at a key, and yours marks the hidden ones.",
            lambda q, kv: ~causal_mask(q, kv),
        ),
    ),
    hints=(
        "Where in the text does the first of the new tokens stand? Up to which key may it look?",
        "New token i stands at position kv_len - q_len + i, and sees the keys up to and including that position.",
    ),
    solved="With one new token the mask is a full row: this is why a decode step needs no mask at all.",
    draw=_draw_causal_mask,
)


# -- the KV head of a query head --------------------------------------------------------------------------------------


def kv_head_of(query_head: int, query_heads: int, kv_heads: int) -> int:
    """The number of the KV head that a query head reads."""
    group = query_heads // kv_heads
    return query_head // group


def _draw_kv_head_of(kv_head_of: Function) -> Any:
    from .. import plots

    reads = [kv_head_of(head, 9, 3) for head in range(9)]
    readers = [reads.count(head) for head in range(3)]
    return plots.head_groups(9, 3, reads=reads, title=f"Your function: KV heads 0, 1, 2 have {readers} readers")


check_kv_head_of = Exercise(
    kv_head_of,
    cases=(
        Case((1, 9, 3), 0, "SmolLM2: three share one"),
        Case((5, 9, 3), 1, "SmolLM2: three share one"),
        Case((8, 9, 3), 2, "the last head"),
        Case((13, 28, 4), 1, "Qwen2.5-7B: seven share one"),
        Case((5, 32, 32), 5, "as many KV heads as query heads"),
        Case((6, 8, 1), 0, "one for all"),
    ),
    mistakes=(
        Mistake(
            "You deal the query heads out like cards, head % kv_heads. Neighbours share: the first group of query "
            "heads reads KV head 0, the next KV head 1. The model was trained that way; dealt out it talks nonsense.",
            lambda head, query_heads, kv_heads: head % kv_heads,
        ),
        Mistake(
            "You divided by the number of KV heads. Divide by the size of a group, query_heads // kv_heads. In SmolLM2 "
            "both are 3, so only other models show the difference.",
            lambda head, query_heads, kv_heads: head // kv_heads,
        ),
        Mistake(
            "That is the place of the head inside its group. We want the number of the group.",
            lambda head, query_heads, kv_heads: head % (query_heads // kv_heads),
        ),
        Mistake(
            "A head is a whole number: round down, with // in place of /.",
            lambda head, query_heads, kv_heads: head / (query_heads // kv_heads),
        ),
    ),
    hints=(
        "Neighbours share a KV head. How many query heads are in such a group?",
        "query_heads // kv_heads neighbours form a group; the number of the group is the KV head.",
    ),
    solved="That is what repeat_interleave does to the keys, and a kernel reads the right head without repeating any.",
    draw=_draw_kv_head_of,
)


# -- what stays empty -------------------------------------------------------------------------------------------------


def empty_bytes(lengths: Sequence[int], max_len: int, bytes_per_token: int) -> tuple[int, float]:
    """(bytes, share) of a preallocated cache that hold nothing; the share is 0 if there is no request.

    lengths: the tokens of each request. Each has a buffer of max_len tokens to itself.
    """
    reserved = len(lengths) * max_len
    empty = reserved - sum(lengths)
    return empty * bytes_per_token, empty / reserved if reserved else 0.0


def _draw_empty_bytes(empty_bytes: Function) -> Any:
    from .. import plots
    from ..style import format_bytes

    lengths, room = [53, 120, 356, 40], 2048
    empty, share = empty_bytes(lengths, room, 46_080)
    return plots.cache_fill(lengths, room, title=f"Your function says: {format_bytes(empty)} empty, {share:.0%}")


check_empty_bytes = Exercise(
    empty_bytes,
    cases=(
        Case(([10], 100, 1), (90, 0.9), "one request"),
        # 2 * 2048 reserved, 1536 used: 2560 tokens are empty
        Case(([512, 1024], 2048, 2), (5120, 0.625), "two requests"),
        Case(([2048, 2048], 2048, 2), (0, 0.0), "both reach the limit"),
        Case(([356], 2048, 57_344), (1692 * 57_344, 1692 / 2048), "Qwen2.5-7B, 356 of 2,048"),
        Case(([], 2048, 2), (0, 0.0), "no request at all"),
    ),
    mistakes=(
        Mistake(
            "You counted one buffer. Each request has one of its own, so len(lengths) * max_len tokens are reserved.",
            lambda n, room, size: ((room - sum(n)) * size, (room - sum(n)) / room),
        ),
        Mistake(
            "That is the part in use. We want the rest: what was reserved and holds no token.",
            lambda n, room, size: (sum(n) * size, sum(n) / (room * len(n))),
        ),
        Mistake(
            "You divided by the used part. A share is of the whole: empty / reserved.",
            lambda n, room, size: ((room * len(n) - sum(n)) * size, (room * len(n) - sum(n)) / sum(n)),
        ),
        Mistake(
            "You counted tokens. Each takes bytes_per_token bytes.",
            lambda n, room, size: empty_bytes(n, room, 1),
        ),
        Mistake(
            "With no request nothing is reserved, and we call the share 0: do not divide by it.",
            lambda n, room, size: ((room * len(n) - sum(n)) * size, 1 - sum(n) / (room * len(n))),
        ),
    ),
    hints=(
        "How many tokens are reserved for all requests together? How many of them are in use?",
        "Empty is len(lengths) * max_len - sum(lengths), in tokens; the share is empty / reserved. And if nothing is "
        "reserved?",
    ),
    solved="Nobody knows beforehand how long an answer gets, so a buffer in one piece has to be as long as the limit.",
    draw=_draw_empty_bytes,
)


EXERCISES = (check_decode_step, check_causal_mask, check_kv_head_of, check_empty_bytes)
