"""Exercises of chapter 3 about attention over a cache: one step of decoding, and the mask of several new tokens.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

# -- one step of decoding ---------------------------------------------------------------------------------------------


def _step(
    keys: torch.Tensor, values: torch.Tensor, length: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    *, write: bool = True, beyond: int | None = 1, scale: float | None = None, softmax: bool = True,
) -> torch.Tensor:  # fmt: skip
    """The right answer, and with other options the wrong ones: `beyond` rows behind `length` are read (None: all)."""
    if write:
        keys[length], values[length] = key, value
    rows = len(keys) if beyond is None else length + beyond
    scores = keys[:rows] @ query * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.softmax(-1) if softmax else scores) @ values[:rows]


def _overwrites_the_last(
    keys: torch.Tensor, values: torch.Tensor, length: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    keys[length - 1], values[length - 1] = key, value
    return _step(keys, values, length, query, key, value, write=False, beyond=0)


def _keys_for_values(
    keys: torch.Tensor, values: torch.Tensor, length: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    return _step(keys, keys, length, query, key, key)


def _divided_by_head_dim(
    keys: torch.Tensor, values: torch.Tensor, length: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    return _step(keys, values, length, query, key, value, scale=1 / len(query))


def _draw_decode_step(decode_step: Function) -> Any:
    """With row n of the values being one at place n and zero elsewhere, the output is the weights themselves."""
    from .. import plots

    room = 6
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    keys, values = torch.full((room, 2), 2.0), torch.ones(room, room) / room  # what a request before has left
    weights = []
    for position, token in enumerate(tokens):
        one = torch.zeros(room)
        one[position] = 1.0
        weights.append([float(w) for w in decode_step(keys, values, position, token, token, one)])
    read = [line[: n + 1] for n, line in enumerate(weights)]
    sums = ", ".join(f"{sum(line):.2f}" for line in read)
    return plots.attention_weights(read, room=room, title=f"Your weights add up to {sums}")


ODDS = math.exp(math.sqrt(2.0))
DECODE_STEP = Exercise(
    name="decode_step",
    parameters=("keys", "values", "length", "query", "key", "value"),
    cases=(
        # scores 0 and 0: the mean of both values
        Case(
            (
                torch.tensor([[1.0, 0.0], [7.0, 7.0]]),
                torch.tensor([[2.0, 0.0], [9.0, 9.0]]),
                1,
                torch.zeros(2),
                torch.tensor([0.0, 1.0]),
                torch.tensor([0.0, 4.0]),
            ),
            torch.tensor([1.0, 2.0]),
            "both score 0",
        ),
        # one token only: its weight is 1 whatever the score
        Case(
            (
                torch.tensor([[3.0], [3.0]]),
                torch.tensor([[9.0], [9.0]]),
                0,
                torch.tensor([1.0]),
                torch.tensor([2.0]),
                torch.tensor([5.0]),
            ),
            torch.tensor([5.0]),
            "the first token",
        ),
        # scores 0 and 2 / sqrt(2), so the weights are 1 : e^sqrt(2)
        Case(
            (
                torch.tensor([[0.0, 0.0], [0.0, 0.0]]),
                torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
                1,
                torch.tensor([2.0, 0.0]),
                torch.tensor([1.0, 0.0]),
                torch.tensor([0.0, 1.0]),
            ),
            torch.tensor([1 / (1 + ODDS), ODDS / (1 + ODDS)]),
            "the second row scores more",
        ),
        # scores 0, 0, 0 with one row left empty
        Case(
            (
                torch.tensor([[1.0], [2.0], [0.0], [0.0]]),
                torch.tensor([[3.0], [6.0], [0.0], [0.0]]),
                2,
                torch.tensor([0.0]),
                torch.tensor([1.0]),
                torch.tensor([9.0]),
            ),
            torch.tensor([6.0]),
            "one row stays empty",
        ),
        # scores 0 and 1 / sqrt(1), so the weights are 1 : e
        Case(
            (
                torch.tensor([[0.0], [7.0]]),
                torch.tensor([[2.0], [9.0]]),
                1,
                torch.tensor([1.0]),
                torch.tensor([1.0]),
                torch.tensor([4.0]),
            ),
            torch.tensor([(2 + 4 * math.e) / (1 + math.e)]),
            "a head_dim of 1",
        ),
    ),
    mistakes=(
        Mistake(
            "no scaling",
            "The scores have to be divided by the square root of head_dim before the softmax; without it the weights "
            "are too sharp.",
            (partial(_step, scale=1.0),),
        ),
        Mistake(
            "the head_dim of the toy",
            "2**0.5 was right for the toy, whose head_dim is 2. Divide by the square root of this query's own size: "
            "len(query) ** 0.5.",
            (partial(_step, scale=2**-0.5),),
        ),
        Mistake(
            "divided by head_dim",
            "You divided by head_dim. It is its square root that keeps scores of any head size in the same range.",
            (_divided_by_head_dim,),
        ),
        Mistake(
            "empty rows read",
            "Rows behind the newest token take part. They hold nothing, or what another request has left, and a zero "
            "is no protection: a score of 0 gets a weight as well. Read only the rows 0 to `length`.",
            (partial(_step, beyond=None),),
        ),
        Mistake(
            "itself left out",
            "The new token is missing. A token looks at itself too: write its key and value first, then read "
            "length + 1 rows.",
            (partial(_step, beyond=0), partial(_step, beyond=0, write=False)),
        ),
        Mistake(
            "not written",
            "You read row `length` without writing it: what stands there is old. Write first, then read.",
            (partial(_step, write=False), partial(_step, write=False, beyond=None)),
        ),
        Mistake(
            "last row overwritten",
            "You wrote to row length - 1, which holds the token before. Rows are numbered from 0, so the next free one "
            "is row `length`.",
            (_overwrites_the_last,),
        ),
        Mistake(
            "no softmax",
            "The scores are no weights yet. A softmax makes them positive, with a sum of 1.",
            (partial(_step, softmax=False),),
        ),
        Mistake(
            "keys for values",
            "The output is made of keys. Scores come from the keys, and what they weigh is the values.",
            (_keys_for_values,),
        ),
    ),
    hint="Four lines: write the row, score the rows 0 to `length`, softmax, weigh the values of the same rows.",
    solved="Nothing behind the newest row was touched, so the buffer may hold what another request has left.",
    draw=_draw_decode_step,
)


# -- the mask of several new tokens -----------------------------------------------------------------------------------


def _mask(q_len: int, kv_len: int, offset: int) -> torch.Tensor:
    """Row i sees the keys up to offset + i."""
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(offset)


def _only_new(q_len: int, kv_len: int) -> torch.Tensor:
    return _mask(q_len, kv_len, kv_len - q_len) & (torch.arange(kv_len) >= kv_len - q_len)


def _additive(q_len: int, kv_len: int) -> torch.Tensor:
    return torch.zeros(q_len, kv_len).masked_fill(~_mask(q_len, kv_len, kv_len - q_len), -math.inf)


def _draw_causal_mask(causal_mask: Function) -> Any:
    from .. import plots

    seen = causal_mask(3, 8)
    return plots.attention_mask([[bool(s) for s in row] for row in seen])


CAUSAL_MASK = Exercise(
    name="causal_mask",
    parameters=("q_len", "kv_len"),
    cases=(
        Case((1, 1), [[True]], "a prompt of one token"),
        Case((1, 4), [[True] * 4], "a decode step"),
        Case((3, 3), [[True, False, False], [True, True, False], [True, True, True]], "an empty cache"),
        Case((2, 4), [[True, True, True, False], [True, True, True, True]], "two tokens enter a cache of two"),
    ),
    mistakes=(
        Mistake(
            "top left",
            "Your triangle starts in the top left corner, as if the new tokens were the first of the text. They are "
            "the last: the first of them stands at position kv_len - q_len, and sees itself and everything before.",
            (lambda q, kv: _mask(q, kv, 0),),
        ),
        Mistake(
            "itself hidden",
            "A token may look at itself. In your mask each sees only what stands before it.",
            (lambda q, kv: _mask(q, kv, kv - q - 1),),
        ),
        Mistake(
            "one too far",
            "Each token sees one that comes after it. In training that would be reading the answer.",
            (lambda q, kv: _mask(q, kv, kv - q + 1),),
        ),
        Mistake(
            "no mask",
            "Everybody sees everything. That is right for one new token, and with several the earlier ones look ahead.",
            (lambda q, kv: _mask(q, kv, kv),),
        ),
        Mistake(
            "upside down",
            "The other way round: True is to mean that a key may be looked at, and yours marks the hidden ones.",
            (lambda q, kv: ~_mask(q, kv, kv - q),),
        ),
        Mistake(
            "old keys hidden",
            "The new tokens see each other, and not the keys that were in the cache already.",
            (_only_new,),
        ),
        Mistake(
            "numbers to add",
            "That is a mask to be added to the scores, of 0 and minus infinity. Asked for was one of True and False.",
            (_additive,),
        ),
        Mistake(
            "mirrored",
            "Your triangle is mirrored: early tokens see much and late ones little. It is the last row that sees all.",
            (lambda q, kv: _mask(q, kv, kv - q).flip(0), lambda q, kv: _mask(q, kv, kv - q).flip(1)),
        ),
    ),
    hint="New token i stands at position kv_len - q_len + i, and sees the keys up to and including that position.",
    solved="With one new token the mask is a full row: this is why a decode step needs no mask at all.",
    draw=_draw_causal_mask,
)
