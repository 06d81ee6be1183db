"""Pictures of chapter 5 and the threshold under a slider: labels are apart, and captions are counted again here."""

import functools
import math

import numpy as np
import pytest
import test_learn_ch05 as solutions
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from pictures import check_picture, head, texts_of

from minfer_lib.bench.results import QualityRow, Result
from minfer_lib.errors import InvalidParameter
from minfer_lib.learn import outliers, plots, widgets
from minfer_lib.learn.checks import ch05
from minfer_lib.learn.plots.numbers import Grid
from minfer_lib.learn.plots.parts import fitting
from minfer_lib.learn.style import colour_of
from minfer_lib.quant import absmax

MIB = 2**20
NUMBERS = [-2.6, -1.1, -0.3, 0.42, 1.9, 3.1]


@functools.cache
def layer(tokens=40, features=300, out=64, seed=0):
    """(activations, weight) with what real layers show: a few features far above the others, uneven channels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator)
    x[:, 17] *= 8
    x[3, 200] = -9.5
    weight = torch.randn(out, features, generator=generator) / 10
    weight *= torch.linspace(0.2, 2.0, out)[:, None]
    return x, weight


def matrix(rows=4, columns=4, scale=1.0):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * scale
    values[1] *= 0.01
    return values


def smoothing(x, weight):
    peak = x.abs().amax(0)
    return peak, weight.abs().amax(0), absmax.smoothing_factors(peak, weight)


def ways(rows=(1, 8, 32), names=8):
    labels = ["float32", "bfloat16", "int8, dequantised first", "torch._int_mm", "oneDNN, u8", "oneDNN, s8",
              "weight-only int8pack", "int8 (ours)"]  # fmt: skip
    times = {label: {r: 0.3 * r**0.5 * (1 + 7 * n % 5) for r in rows} for n, label in enumerate(labels)}
    return dict(list(times.items())[-names:])


MOVED = {
    "bf16": {"weights": 54 * MIB},
    "int8, dequantised first": {"int8 weights": 27 * MIB, "fp copy written": 54 * MIB, "fp copy read": 54 * MIB},
    "int8, fused": {"int8 weights": 27 * MIB},
}
LAYERS, TABLE, CACHE = 6.525e9, 0.545e9, 0.235e9
BUDGET = {
    "bf16": {"layers": 2 * LAYERS, "embedding": 2 * TABLE, "head": 2 * TABLE, "KV cache": CACHE, "activations": 5e7},
    "int8 layers": {"int8 layers": LAYERS, "embedding": 2 * TABLE, "head": 2 * TABLE, "KV cache": CACHE},
    "all in int8": {"int8 layers": LAYERS, "embedding": TABLE, "head": TABLE, "KV cache": CACHE},
}
QUALITY = [
    {"name": name, "bytes": size, "perplexity": ppl, "kl": kl, "top1": top1}
    for name, size, ppl, kl, top1 in (
        ("float32", 538e6, 22.30, 0.0, 1.0), ("bf16", 269e6, 22.31, 0.0004, 0.984),
        ("int8 weights only", 166e6, 22.41, 0.0021, 0.968), ("int8, W8A8 plain", 166e6, 22.98, 0.03, 0.900),
        ("int8 (SmoothQuant)", 167e6, 22.47, 0.0061, 0.949), ("bitsandbytes LLM.int8()", 166e6, 22.8, 0.02, 0.91),
        ("int8, head too", 136e6, 22.5, 0.0071, 0.945),
    )
]  # fmt: skip
STEPS = {
    "bf16": {1: 110.0, 8: 180.0, 32: 320.0},
    "int8": {1: 62.0, 8: 90.0, 32: 200.0},
    "int8, head too": {1: 50.0, 8: 80.0, 32: 170.0},
    "bitsandbytes": {1: 166.0, 8: 258.0, 32: 472.0},
}

EXAMPLES = {
    "quantization_grid": lambda: plots.quantization_grid(NUMBERS, bits=4),
    "quantization_grid, clipped": lambda: plots.quantization_grid([*NUMBERS[:5], 9.1], bits=3, clip=3.0),
    "quantization_grid, zero point": lambda: plots.quantization_grid([0.1, 0.35, 0.42, 1.9], bits=3, zero_point=True),
    "quantization_grid, 8 crowded": lambda: plots.quantization_grid([-127.4, 3.1, 3.11, 0.3, 0.36, 0.37, 0.0, 1.9]),
    "quantization_grid, one": lambda: plots.quantization_grid(torch.tensor([0.0]), bits=2),
    "matrix_steps": lambda: plots.matrix_steps(matrix(), absmax.absmax_quantize(matrix())),
    "matrix_steps, a scale a row": lambda: plots.matrix_steps(matrix(), absmax.absmax_quantize(matrix(), dim=-1)),
    "matrix_steps, zero points": lambda: plots.matrix_steps(matrix(), absmax.zero_point_quantize(matrix(), dim=-1)),
    "matrix_steps, 5 x 6": lambda: plots.matrix_steps(
        matrix(5, 6, 200.0), absmax.zero_point_quantize(matrix(5, 6, 200.0))
    ),
    "matrix_steps, 2 x 2": lambda: plots.matrix_steps(matrix(2, 2), absmax.absmax_quantize(matrix(2, 2), bits=3)),
    "channel_ranges": lambda: plots.channel_ranges(layer()[1]),
    "channel_ranges, alike": lambda: plots.channel_ranges(torch.ones(4, 300)),
    "feature_peaks": lambda: plots.feature_peaks(layer()[0]),
    "feature_peaks, threshold": lambda: plots.feature_peaks(layer()[0], threshold=6.0),
    "feature_peaks, near the median": lambda: plots.feature_peaks(layer()[0], threshold=2.3, label_top=8),
    "feature_peaks, none reaches it": lambda: plots.feature_peaks(layer()[0], threshold=100.0),
    "smoothing_effect": lambda: plots.smoothing_effect(*smoothing(*layer())),
    "smoothing_effect, 1536": lambda: plots.smoothing_effect(*smoothing(*layer(features=1536))),
    "bytes_moved": lambda: plots.bytes_moved(MOVED),
    "ways_timed": lambda: plots.ways_timed(ways()),
    "ways_timed, 4 counts": lambda: plots.ways_timed(ways((1, 8, 32, 128))),
    "ways_timed, gaps": lambda: plots.ways_timed({"a": {1: 2.0, 8: 3.0}, "b": {8: 1.0}}, highlight=()),
    "ways_timed, one": lambda: plots.ways_timed(ways((1,), 3), unit="µs"),
    "memory_budget": lambda: plots.memory_budget(BUDGET),
    "memory_budget, all fit": lambda: plots.memory_budget(BUDGET, budget=24e9),
    "quality_map": lambda: plots.quality_map(QUALITY),
    "quality_map, perplexity": lambda: plots.quality_map(
        [{k: v for k, v in row.items() if k not in ("kl", "top1")} for row in QUALITY[1:]]
    ),
    "quality_map, ms": lambda: plots.quality_map(
        [{k: v for k, v in row.items() if k != "bytes"} | {"ms": row["bytes"] / 5e6} for row in QUALITY]
    ),
    "quality_map, one": lambda: plots.quality_map(QUALITY[:1]),
    "step_times_by_batch": lambda: plots.step_times_by_batch(STEPS),
    "step_times_by_batch, two": lambda: plots.step_times_by_batch({k: STEPS[k] for k in ("bf16", "int8")}),
    "step_times_by_batch, 20 bars": lambda: plots.step_times_by_batch(
        {k: v | {64: 1.7 * v[32]} for k, v in (STEPS | {"int8, weights only": STEPS["bf16"]}).items()}
    ),
    "outliers": lambda: outliers.draw_outliers(*layer(), 6.0),
    "outliers, every feature": lambda: outliers.draw_outliers(*layer(), 0.1),
    "outliers, none": lambda: outliers.draw_outliers(*layer(), 50.0),
    **{
        f"exercise {exercise.name}": lambda exercise=exercise: exercise.draw(getattr(solutions, exercise.name))
        for exercise in ch05.EXERCISES
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_labels_are_inside_of_the_card_and_do_not_cover_each_other(name):
    check_picture(EXAMPLES[name])


def test_a_title_replaces_what_was_computed():
    assert head(plots.quantization_grid(NUMBERS, title="Mine")) == "Mine"
    assert head(plots.memory_budget(BUDGET, title="Mine")) == head(plots.quality_map(QUALITY, title="Mine")) == "Mine"


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_grid_drawn_is_the_one_of_the_package(bits):
    x = torch.randn(50, generator=torch.Generator().manual_seed(bits)) * 3 + 1
    for values in (x, x.abs(), torch.zeros(3)):
        numbers = values.double().numpy()
        grid, quantized = Grid.of(numbers, bits, None, False), absmax.absmax_quantize(values, bits=bits)
        assert grid.scale == pytest.approx(float(quantized.scale), rel=1e-6)
        assert grid.codes(numbers).tolist() == quantized.values.tolist()
        if bits == 8:
            grid, quantized = Grid.of(numbers, 8, None, True), absmax.zero_point_quantize(values)
            assert grid.zero_point == int(quantized.zero_point)
            assert grid.codes(numbers).tolist() == quantized.values.tolist()


def test_the_table_below_the_grid_adds_up():
    # 2.1 / 7 = 0.3 a step: -0.9 is 3 of them, 1.0 lies 0.1 from the third
    figure = plots.quantization_grid([2.1, -0.9, 1.0], bits=4)
    assert head(figure) == "15 grid points, 0.3 apart; largest error 0.1"
    texts = texts_of(figure)
    assert texts[:4] == ["2.1", "7", "2.1", "0"] and texts[8:12] == ["1", "3", "0.9", "-0.1"]
    clipped = plots.quantization_grid([2.1, -0.9, 1.0], bits=4, clip=1.4)  # 0.2 a step, up to 1.4
    assert head(clipped) == "15 grid points, 0.2 apart; largest error 0.7; 1 of 3 numbers is clipped"


def test_a_grid_that_cannot_be_drawn_is_refused():
    for wrong in (lambda: plots.quantization_grid([]), lambda: plots.quantization_grid([1.0], bits=9)):
        with pytest.raises(InvalidParameter, match="one number or more, 2 to 8 bits"):
            wrong()


def test_the_steps_of_a_matrix_are_its_values_codes_and_errors():
    values = torch.tensor([[1.27, -0.5], [0.002, 0.3]])
    figure = plots.matrix_steps(values, absmax.absmax_quantize(values))
    assert len([p for p in figure.axes[0].patches if isinstance(p, Rectangle)]) == 16
    texts = texts_of(figure)
    assert texts[:5] == ["values", "1.27", "-0.50", "0.00", "0.30"]
    assert texts[5:11] == ["codes", "127", "-50", "0", "30", "× 0.01"]
    share = absmax.quantization_error(values, absmax.absmax_quantize(values)).relative
    assert figure.alt == f"One scale for the matrix: the error is {share:.1%} of the values, 1 of 4 numbers became 0"
    by_row = plots.matrix_steps(values, absmax.absmax_quantize(values, dim=-1))
    assert by_row.alt.startswith("2 scales, one a row: ") and "became" not in by_row.alt
    assert {"× 0.01", "× 0.00236"} <= set(texts_of(by_row))


# -- channels ---------------------------------------------------------------------------------------------------------


def test_a_channel_uses_what_its_own_largest_weight_reaches():
    weight = torch.diag(torch.tensor([1.0, 0.5, 0.25, 0.1, -0.05]))
    figure = plots.channel_ranges(weight)
    assert head(figure) == "With one scale the median channel uses 32 of the 127 steps"  # 127 / 4
    assert "channel 2: 32 steps" in texts_of(figure, 1)


@pytest.mark.parametrize("threshold", [2.0, 6.0, 9.5, 100.0])
def test_features_that_reach_the_threshold_are_counted_and_coloured(threshold):
    x, _ = layer()
    figure = plots.feature_peaks(x, threshold=threshold)
    count = len(absmax.outlier_features(x, threshold))
    assert head(figure).startswith(f"{count} of 300 features ({count / 300:.1%}) reach")
    assert f" {threshold:g}; the largest is " in head(figure)
    ordinary, marked = figure.axes[0].collections
    assert (len(ordinary.get_segments()), len(marked.get_segments())) == (300 - count, count)
    assert to_hex(marked.get_color()[0]) == colour_of("int8")


def test_without_a_threshold_the_largest_features_are_named():
    x, _ = layer()
    peaks = x.abs().amax(0)
    figure = plots.feature_peaks(x, label_top=2)
    top = peaks.topk(2).indices.sort().values.tolist()
    assert texts_of(figure)[:2] == [str(n) for n in top]
    times = float(peaks.max()) / float(np.median(peaks))
    assert (
        head(figure) == f"Feature {int(peaks.argmax())} reaches {float(peaks.max()):.3g}, {times:.0f} times the median"
    )


def test_smoothing_draws_both_sides_before_and_after():
    peak, weight_peak, factors = (t.double().numpy() for t in smoothing(*layer()))
    figure = plots.smoothing_effect(peak, weight_peak, factors)
    order = np.argsort(peak, kind="stable")
    expected = [peak, peak / factors, weight_peak, weight_peak * factors]
    drawn = [line.get_ydata() for ax in figure.axes for line in ax.lines]
    assert all(np.allclose(line, want[order]) for line, want in zip(drawn, expected, strict=True))
    before, after = (float(v.max() / np.median(v)) for v in expected[:2])
    assert head(figure).startswith(f"Largest over median: activations {before:.3g} → {after:.3g}, ")
    assert after < before


# -- precision --------------------------------------------------------------------------------------------------------


def test_bytes_are_stacked_and_compared_with_the_first_way():
    figure = plots.bytes_moved(MOVED)
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == (54 + 135 + 27) * MIB
    assert head(figure) == "Bytes against bf16: int8, dequantised first: 2.5×; int8, fused: 0.5×"
    assert {"135 MiB, 2.5×", "27.0 MiB, 0.5×"} <= set(texts_of(figure))
    two = plots.bytes_moved({name: MOVED[name] for name in ("bf16", "int8, dequantised first")})
    assert head(two) == "“int8, dequantised first” moves 2.5× the bytes of “bf16”"
    assert plots.bytes_moved({"bf16": MOVED["bf16"]}).alt == "bytes moved: bf16 54.0 MiB"


def test_the_fastest_way_is_named_at_each_number_of_rows():
    times = {"float32": {1: 2.0, 8: 4.0}, "int8 (ours)": {1: 1.0, 8: 5.0}, "slow": {1: 40.0}}
    figure = plots.ways_timed(times)
    assert head(figure) == "Fastest: int8 (ours) at 1 row; float32 at 8 rows"
    assert texts_of(figure) == ["2", "1", "40"] and texts_of(figure, 1) == ["4", "5", "not measured"]
    assert [t.get_weight() for t in figure.axes[0].texts] == ["normal", "bold", "normal"]
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [to_hex(dot.get_color()) == colour_of("int8") for dot in dots] == [False, True, False]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [2.0, 1.0, 40.0]


def test_a_headline_that_would_leave_the_card_is_said_shorter():
    assert fitting("a" * 100, "b" * 90, "short") == "short" and fitting("", "b", "c") == "b"
    many = {f"a way with a long name, number {n}": {2**k: 1.0 + (k != n) for k in range(4)} for n in range(4)}
    assert head(plots.ways_timed(many)) == "The fastest are in bold"


def test_the_budget_counts_what_fits_in_powers_of_ten():
    figure = plots.memory_budget(BUDGET, budget=8e9)
    assert head(figure) == "1 of 3 fits in 8 GB"
    ends = [t for t in texts_of(figure) if " GB, " in t]
    assert ends == ["15.52 GB, 7.52 too much", "8.94 GB, 0.94 too much", "7.85 GB, 0.15 left"]
    assert head(plots.memory_budget(BUDGET, budget=9e9)) == "2 of 3 fit in 9 GB"


def test_quality_is_drawn_at_its_size_and_its_divergence():
    figure = plots.quality_map(QUALITY)
    points = {(round(float(x), 6), float(y)) for line in figure.axes[0].lines
              if line.get_marker() == "o" for x, y in line.get_xydata()}  # fmt: skip
    assert len(points) == len(QUALITY)
    for row in QUALITY:
        if row["kl"] > 0:
            assert (round(row["bytes"] / 269e6, 6), row["kl"]) in points
    assert head(figure) == "int8, head too: 51% of bf16's bytes, perplexity 22.31 → 22.50"
    texts = texts_of(figure)
    assert "bitsandbytes LLM.int8()\nppl 22.80, top-1 91.0%" in texts
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels[0] == "0"  # where the reference stands, whose divergence has no logarithm


def test_quality_takes_the_tables_of_bench():
    rows = [
        QualityRow(engine=name, perplexity=ppl, perplexity_change=0.0, kl=kl, top1=0.9, top1_stderr=0.01, tokens=100,
                   bytes=size, dtype="float32")
        for name, ppl, kl, size in (("bfloat16", 20.0, 0.0, 100), ("int8", 21.0, 0.01, 60))
    ]  # fmt: skip
    figure = plots.quality_map(Result("quality", rows, {}, {}))
    assert head(figure) == "int8: 60% of bfloat16's bytes, perplexity 20.00 → 21.00"
    with pytest.raises(InvalidParameter, match="'fp64' is no row of the table"):
        plots.quality_map(rows, base="fp64")
    with pytest.raises(InvalidParameter, match="nothing to draw"):
        plots.quality_map([{"name": "bf16"}])


def test_steps_are_compared_with_the_base_at_each_batch():
    figure = plots.step_times_by_batch(STEPS)
    assert [bar.get_height() for bar in figure.axes[0].patches] == [ms for way in STEPS.values() for ms in way.values()]
    assert {"110", "62\n0.56×", "50\n0.45×", "166\n1.51×"} <= set(texts_of(figure))
    assert head(figure) == "int8, head too: 0.44 to 0.53 of bf16's time, by batch"
    alone = plots.step_times_by_batch({"int8": {1: 5.0}})
    assert not alone.texts and texts_of(alone) == ["5"]


# -- the slider -------------------------------------------------------------------------------------------------------


def test_errors_of_the_three_products_are_those_of_the_package():
    x, weight = layer()
    exact = x @ weight.T
    tensor, token, split = outliers.product_errors(x, weight, 6.0).values()
    whole = absmax.absmax_quantize(x).dequantize() @ absmax.absmax_quantize(weight, dim=-1).dequantize().T
    assert tensor == pytest.approx(float((whole - exact).norm() / exact.norm()), rel=1e-3)
    for error, threshold in ((token, math.inf), (split, 6.0)):
        y = absmax.llm_int8_linear(x, weight, threshold=threshold)
        assert error == pytest.approx(float((y - exact).norm() / exact.norm()), rel=1e-3)
    assert split < token < tensor


@pytest.fixture
def asked(monkeypatch):
    """What `outlier_explorer` hands to `explore`: (draw, the slider, the positions of the static picture)."""

    def get(*tensors):
        seen = {}
        monkeypatch.setattr(outliers, "explore", lambda draw, **rest: seen.update(draw=draw, **rest))
        widgets.outlier_explorer(*tensors)
        return seen["draw"], seen["threshold"], [position["threshold"] for position in seen["positions"]]

    return get


def test_the_explorer_begins_where_few_features_stay_in_float(asked):
    x, weight = layer()
    draw, slider, (few, tenth) = asked(x, weight)
    counts = [len(absmax.outlier_features(x, threshold)) for threshold in (few, tenth)]
    assert few == outliers.PAPER and 1 <= counts[0] <= 15 < counts[1] <= 45
    assert slider.low <= slider.value <= slider.high and slider.high > float(x.abs().max())
    for end in (slider.low, few, tenth, slider.high):
        count = len(absmax.outlier_features(x, end))
        assert head(draw(end)).startswith(f"{count} of 300 features")


@pytest.mark.parametrize("size", [1e-3, 0.3, 1.0, 40.0, 3e4])
def test_thresholds_suit_activations_of_any_size(asked, size):
    x = layer()[0] * size
    _, slider, positions = asked(x, layer()[1])
    assert 20 <= (slider.high - slider.low) / slider.step <= 220
    assert all(slider.low <= threshold <= float(x.abs().max()) for threshold in positions)
    assert positions == sorted(positions, reverse=True)


def test_tensors_that_do_not_belong_together_are_refused():
    x, weight = layer()
    with pytest.raises(InvalidParameter, match="do not belong together"):
        widgets.outlier_explorer(x, weight.T)
    with pytest.raises(InvalidParameter, match="all zero"):
        widgets.outlier_explorer(torch.zeros(3, 300), weight)
