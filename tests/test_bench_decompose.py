"""Decode steps in parts: what the profiler's events are made into, and that the parts of real steps add up."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from minfer_lib import CachedEngine, LLMEngine, NaiveEngine, load_model, quantize_int8
from minfer_lib.bench import decomposition
from minfer_lib.bench.decomposition import PARTS, Decomposition, decompose
from minfer_lib.bench.results import Cells
from minfer_lib.errors import InvalidParameter
from minfer_lib.kernels import compiled_attention
from minfer_lib.quant import products


def step(wall=(10.0, 12.0, 11.0), kernel=8.0, bytes_ms=3.0, flops=1.0, **changes):
    return Decomposition("paged, 1 request", 1, 64, wall, kernel, bytes_ms, flops, launches=7, **changes)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, (3, 0, 5, 3)),  # the arithmetic hides behind reading
        ({"flops": 5.0}, (3, 2, 3, 3)),
        ({"flops": 50.0}, (3, 5, 0, 3)),  # no more than the time that kernels took
        ({"bytes_ms": 20.0}, (8, 0, 0, 3)),  # weights that stay in a cache
        ({"kernel": 30.0}, (3, 0, 8, 0)),  # the profiler's steps were slower than those that were timed
    ],
)
def test_parts_add_up_to_the_median_step_and_none_explains_twice(changes, parts):
    found = step(**changes).parts
    assert tuple(found.values()) == pytest.approx(parts) and tuple(found) == PARTS
    assert sum(parts) == step().step_ms == 11


def test_a_step_becomes_lines_of_tables():
    found = step(top=(decomposition.Operator("aten::mm", 6.0, 121.0),))
    whole, slowest = found.cells()
    assert whole == Cells("A decode step", "paged, 1 request", found.values)
    assert (whole.values["low"], whole.values["high"], whole.values["launches"]) == (10, 12, 7)
    assert slowest == Cells("Slowest in paged, 1 request", "aten::mm", {"ms": 6.0, "calls": 121.0})


def event(name, start, end, device=DeviceType.CUDA, annotation=False, self_us=0.0, parent=None):
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end), is_user_annotation=annotation,
        self_cpu_time_total=self_us, cpu_parent=parent,
    )  # fmt: skip


def test_kernels_of_a_gpu_that_overlap_count_once():
    events = [
        event("void gemm<float>", 100, 300), event("copy", 250, 400), event("tiny", 260, 270),
        event("gemm", 1000, 1500),
        event("range", 0, 2000, annotation=True), event("aten::mm", 0, 5000, DeviceType.CPU, self_us=5000),
    ]  # fmt: skip
    ms, launches, operators = decomposition._kernels(events, "cuda", {})
    assert ms == pytest.approx((300 + 500) / 1000) and launches == 4
    assert operators["us", "gemm"] == 700 and operators["calls", "gemm"] == 2 and ("us", "range") not in operators


def test_operators_of_a_cpu_count_without_what_starting_one_costs():
    outer = event("aten::linear", 0, 60, DeviceType.CPU, self_us=2.0)
    events = [outer, event("aten::mm", 2, 58, DeviceType.CPU, self_us=56.0, parent=outer),
              event("aten::view", 60, 61, DeviceType.CPU, self_us=1.0)]  # fmt: skip
    ms, launches, operators = decomposition._kernels(events, "cpu", {"aten::mm": 5.0, "": 2.0})
    assert ms == pytest.approx(51 / 1000) and launches == 2  # as Python called them
    slowest = decomposition._slowest([operators, operators], most=1)
    assert slowest == (decomposition.Operator("aten::mm", 0.051, 1.0),)


@pytest.fixture(scope="module")
def many(tiny):
    return LLMEngine(tiny, "paged", max_num_seqs=8, max_model_len=256, backend="torch")


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Those of some machine: what it can do here and now is not what these tests are about."""
    monkeypatch.setattr(decomposition, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(decomposition, "peak_flops", lambda device, dtype: 1e11)


@pytest.mark.parametrize("kind", ["model", "cached", "many"])
def test_a_tiny_model_spends_its_steps_on_python(kind, tiny, many):
    """Its kernels have a thousandth of the work of a real one's, and Python has as many of them to start."""
    engine = {"model": tiny, "cached": CachedEngine(tiny), "many": many}[kind]
    tries = []
    while len(tries) < 5 and not any(each.parts["launching"] > each.step_ms / 2 for each in tries):
        found = decompose(engine, context=32, steps=9)  # anew where a neighbour was in the middle of a kernel
        assert len(found.wall_ms) == 9 and min(found.parts.values()) >= 0
        assert sum(found.parts.values()) == pytest.approx(found.step_ms)
        assert found.launches > 100 and len(found.top) <= 5 and found.provenance["model"] == tiny.name
        tries.append(found)
    assert tries[-1].parts["launching"] > tries[-1].step_ms / 2
    assert tries[-1].bytes_ms + tries[-1].flops_ms < 0.2 * tries[-1].step_ms


def test_more_requests_have_more_arithmetic_and_read_the_weights_once(many):
    one, eight = (decompose(many, requests, context=32, steps=2) for requests in (1, 8))
    assert eight.flops_ms == pytest.approx(8 * one.flops_ms)
    assert one.bytes_ms < eight.bytes_ms < 2 * one.bytes_ms
    assert (one.engine, eight.engine) == ("paged, 1 request", "paged, 8 requests")
    assert not many.has_unfinished()  # its requests have left


def test_an_engine_without_a_cache_computes_every_token_and_reads_no_keys(tiny):
    naive, cached = (decompose(kind(tiny), context=40, steps=2) for kind in (NaiveEngine, CachedEngine))
    assert naive.bytes_ms < cached.bytes_ms and naive.flops_ms > 20 * cached.flops_ms


def test_kernels_in_c_are_seen_and_left_as_they_were(tiny):
    lm = quantize_int8(load_model("tiny-random", device="cpu"))
    wanted = {"products (C)": products.choose(True, "cpu") == "compiled",
              "paged_decode (C)": compiled_attention.why_not(torch.float32) is None}  # fmt: skip
    engine = LLMEngine(lm, "paged", max_num_seqs=2, max_model_len=256)
    finders = {module: module.c_function for module in decomposition.C_KERNELS}
    stream = engine.stream([5] * 16)
    next(stream)
    events = decomposition._profiled(engine.step, lm.device)
    stream.close()
    names = [each.name for each in events]
    layers = tiny.model.config.num_hidden_layers
    assert names.count("paged_decode (C)") == layers * wanted["paged_decode (C)"]
    assert (names.count("products (C)") >= 4 * layers) == wanted["products (C)"]
    assert finders == {module: module.c_function for module in finders}


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("cached", {"requests": 2}, "one after the other"),
        ("many", {"requests": 9}, "decode at once"),
        ("many", {"requests": 0}, "requests"),
        ("many", {"context": 4}, "context"),
        ("cached", {"context": 2041}, "room"),
        ("many", {"context": 250}, "room"),
        ("a name", {}, "stream"),
    ],
)
def test_what_is_no_decode_step_of_so_many_requests_is_refused(tiny, many, engine, options, message):
    engine = {"cached": CachedEngine(tiny), "many": many}.get(engine, engine)
    with pytest.raises(InvalidParameter, match=message):
        decompose(engine, **{"context": 32, "steps": 2} | options)
    assert not many.has_unfinished()
