"""The pictures of the comparison: what they say is what the rows hold, and a row without a figure has no mark."""

import dataclasses

import pytest

from minfer_lib.bench.metrics import RunMetrics
from minfer_lib.bench.results import Comparison, Row
from minfer_lib.errors import InvalidParameter
from minfer_lib.learn import plots
from minfer_lib.learn.style import Picture

MIB = 2**20


def row(engine, speed, ttft, tpot, kv=(None, None, None), weights=500, **changes):
    metrics = RunMetrics(
        requests=10, failed=0, prompt_tokens=300, output_tokens=150, prompt_len=(16, 48), output_len=(4, 28),
        wall_s=10.0, tokens_per_s=speed,
        ttft_ms=ttft, ttft_p95_ms=2 * ttft, tpot_ms=tpot, tpot_p95_ms=1.5 * tpot, e2e_ms=1.0,
        e2e_p95_ms=2.0, concurrency=4, kv_tokens=40, kv_peak_tokens=200, preemptions=0,
    )  # fmt: skip
    reserved, held, used = (None if size is None else size * MIB for size in kv)
    return Row(
        engine, ttft_ms=ttft, tpot_ms=tpot, tokens_per_s=speed, tokens_per_s_range=(0.9 * speed, 1.1 * speed),
        kv_reserved=reserved, kv_held=held, kv_used=used, weight_bytes=weights * MIB, metrics=metrics, **changes,
    )  # fmt: skip


@pytest.fixture
def found():
    rows = [
        row("HF continuous", 20.0, 900, 110, kv=(80, None, 8)),
        row("naive", 5.0, 9000, 230),
        row("cached", 12.0, 4000, 70, kv=(90, 90, 2)),
        row("slots", 30.0, 700, 100, kv=(360, 360, 9)),
        row("int8", 40.0, 500, 80, kv=(360, 360, 9), weights=210),
        row("paged", 29.0, 710, 103, kv=(360, 10, 9)),
        Row("elsewhere", "reported", "somebody", tokens_per_s=1000.0),
    ]
    return Comparison(rows, {"fast": False}, {})


STEPS = {"KV cache": ("naive", "cached"), "batching": ("cached", "slots"), "paging": ("slots", "paged")}


@pytest.mark.parametrize(
    "draw",
    [
        lambda found: plots.throughput_ladder(found),
        lambda found: plots.throughput_ladder(found, base="naive"),
        plots.latency_spread,
        plots.memory_of_engines,
        lambda found: plots.gains_and_costs(found, STEPS),
    ],
)
def test_pictures_are_drawn_without_what_is_reported(draw, found):
    picture = draw(found)
    assert isinstance(picture, Picture) and "elsewhere" not in picture.alt and len(picture.png()) < 120_000


def texts(picture):
    return " ".join(text.get_text() for text in picture.findobj(lambda artist: hasattr(artist, "get_text")))


def test_headlines_are_computed(found):
    assert "int8: 8.0 times the tokens/s of naive" in texts(plots.throughput_ladder(found, base="naive"))
    slower = dataclasses.replace(found, rows=[found.row("int8"), found.row("naive")])
    assert "No row is faster than int8" in texts(plots.throughput_ladder(slower))
    assert "int8, 1.0 s" in texts(plots.latency_spread(found))
    memory = texts(plots.memory_of_engines(found))
    assert "cached leaves 98% empty, paged 10%" in memory and "held: not told" in memory and "none kept" in memory
    assert "batching gained most in tokens/s here, 2.5 times" in texts(plots.gains_and_costs(found, STEPS))


def test_factors_are_over_one_where_it_got_better(found):
    factors = plots.step_factors(found, "cached", "slots")
    assert factors == pytest.approx(
        {"tokens/s": 2.5, "TTFT p95": 4000 / 700, "TPOT": 0.7, "cache held": 0.25, "weights": 1.0}
    )
    assert "cache held" not in plots.step_factors(found, "naive", "cached")  # the naive engine holds none


def test_what_cannot_be_drawn_is_refused(found):
    nothing = dataclasses.replace(found, rows=found.rows[-1:])
    for draw in (plots.throughput_ladder, plots.latency_spread, plots.memory_of_engines):
        with pytest.raises(InvalidParameter, match="nothing to draw"):
            draw(nothing)
    with pytest.raises(InvalidParameter, match="no row here"):
        plots.throughput_ladder(found, base="warp")
    with pytest.raises(InvalidParameter, match="no row 'warp'"):
        plots.gains_and_costs(found, {"warp": ("naive", "warp")})
