"""The exercises of chapter 3: stubs fail, solutions pass, every typical mistake is told apart from the others."""

from typing import ClassVar

import pytest
import torch
from exercise_checks import ExerciseChecks
from torch.nn.functional import scaled_dot_product_attention

from minfer_lib import CachedEngine, SamplingParams, load_model
from minfer_lib.cache.contiguous import KVCacheLayer
from minfer_lib.learn.checks import ch03
from minfer_lib.models.memory import ModelShape, kv_bytes_per_token

# -- how a learner might solve them ---------------------------------------------------------------------------------


def decode_step(keys, values, length, query, key, value):
    keys[length], values[length] = key, value
    scores = keys[: length + 1] @ query / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ values[: length + 1]


def causal_mask(q_len, kv_len):
    query_positions = torch.arange(kv_len - q_len, kv_len)
    return torch.arange(kv_len)[None, :] <= query_positions[:, None]


def kv_head_of(query_head, query_heads, kv_heads):
    return query_head // (query_heads // kv_heads)


def empty_bytes(lengths, max_len, bytes_per_token):
    reserved = len(lengths) * max_len
    empty = reserved - sum(lengths)
    return empty * bytes_per_token, empty / reserved if reserved else 0.0


class TestExercises(ExerciseChecks):
    chapter = ch03
    solutions: ClassVar = {f.__name__: f for f in (decode_step, causal_mask, kv_head_of, empty_bytes)}


# -- the solutions against torch and the package --------------------------------------------------------------------


def test_decode_steps_are_full_attention_row_by_row():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 7, 16)
    full = scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True)[0]  # [7, 16]
    table_k, table_v = torch.full((2, 9, 16), 1e3)
    steps = [decode_step(table_k, table_v, n, queries[n], keys[n], values[n]) for n in range(7)]
    assert torch.allclose(torch.stack(steps), full, atol=1e-6)
    assert torch.equal(table_k[:7], keys) and (table_k[7:] == 1e3).all()


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (4, 4), (3, 8)])
def test_the_mask_gives_the_last_rows_of_full_attention(q_len, kv_len):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 1, kv_len, 8)
    full = scaled_dot_product_attention(queries, keys, values, is_causal=True)[:, -q_len:]
    chunk = scaled_dot_product_attention(queries[:, -q_len:], keys, values, attn_mask=causal_mask(q_len, kv_len))
    assert torch.allclose(chunk, full, atol=1e-6)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(9, 3), (28, 4), (8, 8), (8, 1)])
def test_heads_are_grouped_as_torch_groups_them(query_heads, kv_heads):
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, query_heads, 1, 8), *torch.randn(2, 1, kv_heads, 5, 8)
    grouped = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    owners = [kv_head_of(head, query_heads, kv_heads) for head in range(query_heads)]
    assert torch.allclose(scaled_dot_product_attention(query, keys[:, owners], values[:, owners]), grouped, atol=1e-6)


def test_what_is_empty_is_what_the_engine_reserves_beyond_its_tokens():
    lm = load_model("tiny-random", device="cpu")
    engine = CachedEngine(lm, max_model_len=64)
    engine.generate([1, 2, 3, 4], SamplingParams(max_tokens=1, ignore_eos=True))
    per_token = kv_bytes_per_token(ModelShape.from_config(lm.model.config), 4)
    empty, share = empty_bytes([4], 64, per_token)
    assert engine.kv_bytes() - 4 * per_token == empty and share == 60 / 64


def test_the_layer_of_the_package_is_the_table_of_the_exercise():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 3, 5, 8)
    layer = KVCacheLayer(max_len=6)
    for n in range(5):
        rows = layer.update(keys[:, :, n : n + 1], values[:, :, n : n + 1])
        assert torch.equal(rows[0], keys[:, :, : n + 1]) and torch.equal(rows[1], values[:, :, : n + 1])


def test_answers_may_be_written_in_other_ways():
    def with_lists(q_len, kv_len):
        return [[key <= kv_len - q_len + row for key in range(kv_len)] for row in range(q_len)]

    def with_cat(keys, values, length, query, key, value):
        keys, values = torch.cat([keys[:length], key[None]]), torch.cat([values[:length], value[None]])
        return scaled_dot_product_attention(query[None], keys, values)[0]

    assert ch03.check_causal_mask.check(with_lists) and ch03.check_decode_step.check(with_cat)
    assert ch03.check_causal_mask.check(lambda q, kv: torch.ones(q, kv).tril(kv - q).bool())
