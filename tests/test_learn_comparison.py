"""The pictures of the comparison: what they say is what the rows hold, and a row without a figure has no mark."""

import dataclasses

import pytest
from pictures import check_picture

from minfer_lib.bench.metrics import Run
from minfer_lib.bench.results import Result, Row
from minfer_lib.errors import InvalidParameter
from minfer_lib.learn import plots

MIB = 2**20


def row(engine, speed, ttft, tpot, kv=(None, None, None), weights=500):
    runs = tuple(
        Run(requests=10, failed=0, prompt_tokens=300, output_tokens=150, wall_s=150 / (speed * faster),
            ttft=tuple(ttft / faster * share for share in (0.5, 1, 1, 1, 2)), tpot=(tpot / faster,) * 5)
        for faster in (0.97, 1.0, 1.03)
    )  # fmt: skip
    reserved, held, used = (None if size is None else size * MIB for size in kv)
    return Row(engine, runs, kv_reserved=reserved, kv_held=held, kv_used=used, weight_bytes=weights * MIB)


@pytest.fixture
def found():
    rows = [
        row("HF continuous", 20.0, 900, 110, kv=(80, None, 8)),
        row("naive", 5.0, 9000, 230),
        row("cached", 12.0, 4000, 70, kv=(90, 90, 2)),
        row("slots", 30.0, 700, 100, kv=(360, 360, 9)),
        row("int8", 40.0, 500, 80, kv=(360, 360, 9), weights=210),
        row("paged", 29.5, 710, 102, kv=(360, 10, 9)),
        Row("elsewhere", kind="reported", source="somebody", told={"tokens_per_s": 1000.0}),
    ]
    return Result("ladder", rows, {"fast": False}, {})


STEPS = {"KV cache": ("naive", "cached"), "batching": ("cached", "slots"), "paging": ("slots", "paged")}
PICTURES = [
    plots.throughput_ladder,
    lambda found: plots.throughput_ladder(found, base="naive"),
    plots.latency_spread,
    plots.memory_of_engines,
    lambda found: plots.gains_and_costs(found, STEPS),
]


@pytest.mark.parametrize("draw", PICTURES)
def test_pictures_are_drawn_without_what_is_reported(draw, found):
    check_picture(lambda: draw(found))
    assert "elsewhere" not in draw(found).alt


def texts(picture):
    return " ".join(text.get_text() for text in picture.findobj(lambda artist: hasattr(artist, "get_text")))


def test_headlines_are_computed(found):
    assert "int8: 8.0 times the tokens/s of naive" in texts(plots.throughput_ladder(found, base="naive"))
    slower = dataclasses.replace(found, rows=[found.row("int8"), found.row("naive")])
    assert "No row is faster than int8" in texts(plots.throughput_ladder(slower))
    assert "int8: 1.0 s" in texts(plots.latency_spread(found))
    memory = texts(plots.memory_of_engines(found))
    assert "cached leaves 98% empty, paged 10%" in memory and "held: not told" in memory and "none kept" in memory
    assert "batching gained most in tokens/s here, 2.5 times" in texts(plots.gains_and_costs(found, STEPS))


def test_the_readers_own_engine_is_hatched_and_what_overlaps_has_no_ratio(found):
    mine = dataclasses.replace(found.row("slots"), engine="yours")
    picture = plots.throughput_ladder(dataclasses.replace(found, rows=[found.row("slots"), mine]))
    assert [bool(bar.get_hatch()) for bar in picture.axes[0].patches] == [False, True]
    assert "no difference" in texts(picture)


def test_factors_are_over_one_where_it_got_better(found):
    factors = plots.step_factors(found, "cached", "slots")
    expected = {"tokens/s": 2.5, "TTFT": 4000 / 700, "TPOT": 0.7, "cache held": 0.25, "weights": 1.0}
    assert factors == pytest.approx(expected)
    assert "cache held" not in plots.step_factors(found, "naive", "cached")  # the naive engine holds none
    assert "tokens/s" not in plots.step_factors(found, "slots", "paged")  # their runs overlap


def test_what_cannot_be_drawn_is_refused(found):
    nothing = dataclasses.replace(found, rows=found.rows[-1:])
    for draw in (plots.throughput_ladder, plots.latency_spread, plots.memory_of_engines):
        with pytest.raises(InvalidParameter, match="nothing to draw"):
            draw(nothing)
    with pytest.raises(InvalidParameter, match="no row here"):
        plots.throughput_ladder(found, base="warp")
    with pytest.raises(InvalidParameter, match="no row 'warp'"):
        plots.gains_and_costs(found, {"warp": ("naive", "warp")})
