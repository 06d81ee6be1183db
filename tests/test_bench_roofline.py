"""Rooflines by counted bytes and operations, and where engines stand below them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minfer_lib.bench import machine, roofline
from minfer_lib.bench.metrics import Run
from minfer_lib.bench.results import Row
from minfer_lib.errors import InvalidParameter


class Toy(nn.Module):
    """An embedding, a matrix and an output layer that may share the embedding's weights."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.matrix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_the_output_layer_but_not_the_embedding_table(tied):
    assert roofline.weight_bytes_read(Toy(tied)) == 4 * (8 * 8 + 8 + 800)  # either way the head once, the table never


def test_quantised_weights_count_as_they_are_stored():
    toy = Toy(tied=False)
    del toy.matrix.weight
    toy.matrix.register_buffer("weight", torch.zeros(8, 8, dtype=torch.int8))
    assert roofline.weight_bytes_read(toy) == 8 * 8 + 4 * (8 + 800)


def test_bytes_of_a_decode_step_of_a_real_model(tiny):
    table = tiny.model.get_input_embeddings().weight
    everything = sum(p.nbytes for p in tiny.model.parameters()) + sum(b.nbytes for b in tiny.model.buffers())
    assert roofline.weight_bytes_read(tiny.model) == everything - table.nbytes
    assert roofline.kv_token_bytes(tiny) == 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv_heads, head_dim, float32
    alone, batch = roofline.decode_step_bytes(tiny), roofline.decode_step_bytes(tiny, requests=3, kv_tokens=10)
    assert batch - alone == 3 * 10 * roofline.kv_token_bytes(tiny)
    assert roofline.floor_ms(tiny) == pytest.approx(1e3 * alone / machine.read_bandwidth("cpu"))


def test_operations_of_a_step_are_those_of_its_products_and_of_attention(tiny):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tiny.model(input_ids=torch.arange(12)[None], use_cache=False, logits_to_keep=1)
    counted = counter.get_flop_counts()["Global"]  # by torch, from the shapes of products
    products = sum(flops for operator, flops in counted.items() if "attention" not in str(operator))
    pairs, per_pair = 12 * 13 / 2, 2 * 2 * 2 * 4 * 16  # a product each for scores and values: layers, heads, head_dim
    assert roofline.decode_step_flops(tiny, 1, kv_tokens=12, new_tokens=12) == products + pairs * per_pair
    matrices = sum(p.numel() for p in tiny.model.parameters() if p.dim() > 1)
    matrices -= tiny.model.get_input_embeddings().weight.numel()
    assert roofline.decode_step_flops(tiny, 3, kv_tokens=12) == 3 * (2 * matrices + 12 * per_pair)


def test_attainable_is_a_slope_and_then_flat():
    line = roofline.Roofline(bandwidth=10.0, flops=200.0)
    assert line.ridge == 20
    assert [line.attainable(x) for x in (1, 20, 100)] == [10, 200, 200]


def row(engine: str, tpot: float | None, weights: str = "float32", concurrency: float = 1.0) -> Row:
    run = Run(4, 0, 40, 40, 1.0, ttft=(1.0,) * 4, tpot=(tpot,) * 4, concurrency=concurrency, kv_tokens=20.0)
    return Row(engine, (run,), weights=weights)


def test_points_of_engines_have_the_place_of_their_decode_steps(tiny):
    rows = [row("cached", 2.0), row("paged", 2.0, concurrency=4.0), row("int8", 1.0, "int8"), row("one token", None)]
    found = roofline.points(SimpleNamespace(rows=rows), tiny)
    assert set(found) == {"cached", "paged"}  # int8's bytes are those of a model that was not given
    (x, y), (x4, y4) = found["cached"], found["paged"]
    flops = roofline.decode_step_flops(tiny, 1, 20)
    assert x == pytest.approx(flops / roofline.decode_step_bytes(tiny, 1, 20)) and y == pytest.approx(flops / 2e-3)
    assert y4 == pytest.approx(4 * y) and x < x4 < 4 * x  # the weights are read once for all, keys are not
    with pytest.raises(InvalidParameter, match="float32"):
        roofline.points(SimpleNamespace(rows=rows[2:]), tiny)
