"""memory: every formula against the measurement of the same name, and against published sizes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from minfer_lib import load_model
from minfer_lib.errors import InvalidParameter
from minfer_lib.models.memory import (
    GB,
    GIB,
    ModelShape,
    PeakMemory,
    activation_bytes,
    kv_bytes_per_token,
    measured_activation_bytes,
    measured_kv_bytes_per_token,
    measured_weight_bytes,
    weight_bytes,
)
from minfer_lib.models.shapes import SHAPES, shape_config

PUBLISHED = {  # parameters in millions, as the models' cards give them
    "smollm2-135m": 134.5,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1_544,
    "qwen2.5-7b": 7_616,
    "qwen3-0.6b": 596,
    "llama-3.2-1b": 1_236,
    "llama-3.1-8b": 8_030,
    "llama-2-7b": 6_738,
    "mistral-7b": 7_248,
    "gemma-2-2b": 2_614,
    "phi-3-mini": 3_821,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_by_formula_are_those_of_the_model(name):
    config = shape_config(name)
    with torch.device("meta"):  # the whole model without its memory
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config, name)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.parameters / 1e6 == pytest.approx(PUBLISHED[name], rel=0.001)


def test_the_well_known_gibibyte():
    llama = ModelShape.from_config(shape_config("llama-2-7b"))
    assert 2048 * kv_bytes_per_token(llama, 2) == GIB


def test_grouped_query_attention_counts_kv_heads():
    qwen = ModelShape.from_config(shape_config("qwen2.5-7b"))
    assert (qwen.heads, qwen.kv_heads, qwen.head_dim) == (28, 4, 128)
    assert kv_bytes_per_token(qwen, 2) == 2 * 28 * 4 * 128 * 2


def test_weights_of_a_7b():
    qwen = ModelShape.from_config(shape_config("qwen2.5-7b"))
    assert [round(weight_bytes(qwen, bits) / GB, 1) for bits in (32, 16, 8, 4)] == [30.5, 15.2, 7.6, 3.8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_formulas_against_measurements(dtype):
    lm = load_model("tiny-random", dtype=dtype, device="cpu")
    shape, size = ModelShape.from_config(lm.model.config), lm.dtype.itemsize
    assert measured_weight_bytes(lm.model) == pytest.approx(weight_bytes(shape, 8 * size), rel=0.001)
    assert measured_kv_bytes_per_token(lm) == kv_bytes_per_token(shape, size)
    for tokens in (1, 7, 200):
        assert measured_activation_bytes(lm, tokens) == pytest.approx(activation_bytes(shape, tokens, size), rel=0.05)


def test_a_tied_output_layer_is_counted_once():
    config = shape_config("smollm2-135m")
    config.num_hidden_layers, config.vocab_size = 2, 512
    tied = AutoModelForCausalLM.from_config(config)
    config.tie_word_embeddings = False
    untied = AutoModelForCausalLM.from_config(config)
    table = 512 * config.hidden_size * 4
    assert measured_weight_bytes(untied) - measured_weight_bytes(tied) == table


def test_peak_memory_follows_what_is_alive():
    with PeakMemory() as memory:
        a = torch.ones(1000)  # 4,000 bytes
        b = a + 1
        assert memory.live_bytes == 8000
        view = b[10:]
        b.add_(1)
        assert memory.live_bytes == 8000  # views and in-place results are no new memory
        del a
        assert memory.live_bytes == 4000
        del b
        assert memory.live_bytes == 4000  # the view keeps it alive
        del view
        assert memory.live_bytes == 0
    assert memory.peak_bytes == 8000


def test_too_many_tokens_are_refused():
    lm = load_model("tiny-random", device="cpu")
    with pytest.raises(InvalidParameter, match="1 to 2048"):
        measured_activation_bytes(lm, lm.max_model_len + 1)
