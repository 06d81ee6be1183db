"""Every plot: its labels are on the card and apart from each other, and its captions are computed from the data."""

import numpy as np
import pytest
from pictures import check_picture, drawn_texts, head

from minfer_lib.errors import InvalidParameter
from minfer_lib.learn import plots
from minfer_lib.learn.plots import maps
from minfer_lib.learn.plots.parts import balanced
from minfer_lib.learn.plots.tokens import visible
from minfer_lib.learn.style import colour_of
from minfer_lib.models.memory import ModelShape
from minfer_lib.models.shapes import SHAPES, shape_config

GIB = 2**30
STEP = ("decode", 1, 0.018)
LENGTHS = list(range(16, 512, 16))
KING = ["once", "upon", "a", "time", "there", "was", "a", "king"]
BEFORE, KEPT = [0.5, 0.3, 0.15, 0.05], [0.62, 0.38, 0, 0]
WORDS = ["<|im_start|>", "user", "\n", "The", " cat", " cost", " $", "5", " é", "日本", " comfortable", " $x_1$", "\t"]

EXAMPLES = {
    "token_boxes": lambda: plots.token_boxes(WORDS * 3, list(range(1, 40)), special=[1]),
    "token_boxes, two": lambda: plots.token_boxes(["The", " cat"], [504, 2644]),
    "top_tokens": lambda: plots.top_tokens(WORDS, [0.4, 0.2, 0.1, 0.05, 0.0004] + [0.01] * 8, chosen=0),
    "filtered_bars, narrow": lambda: plots.filtered_bars(WORDS[:4], BEFORE, [1.0, 0, 0, 0], width=4.7),
    "filtered_bars, top_p": lambda: plots.filtered_bars(
        WORDS[:4], [0.5, 0.3, 0.15, 0.05], [0.62, 0.38, 0, 0], cumulative=True
    ),
    "memory_stack": lambda: plots.memory_stack(
        {"fp32": {"weights": 28e9, "KV cache": 2e9}, "int8": {"weights": 7e9, "KV cache": 1e9, "activations": 3e8}},
        budgets={"16 GiB": 16 * GIB, "8 GiB": 8 * GIB},
    ),
    "kv_growth": lambda: plots.kv_growth(
        {"32 KV heads": 524288, "8 KV heads": 131072, "4 KV heads": 65536}, lengths=[0, 4096], mark=2048
    ),
    "kv_growth, one": lambda: plots.kv_growth({"this model": 46080}, lengths=[0, 2048], mark=1024),
    "roofline": lambda: plots.roofline(
        1e15, 4e12, {"decode": (1, 2e12), "batch 64": (60, None), "prefill": (2000, 6e14)}
    ),
    "roofline of a CPU": lambda: plots.roofline(3e11, 27e9, {"decode": (0.5, 9e9), "prefill": (200, 2.2e11)}),
    "time_by_operator": lambda: plots.time_by_operator(
        ["aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", *(f"aten::op{n}" for n in range(12))],
        [60, 10, *range(12, 0, -1)],
        ["products", "attention"] + ["other"] * 12,
    ),
    "prefill_decode_timeline": lambda: plots.prefill_decode_timeline([("prefill", 256, 0.35)] + [STEP] * 30),
    "prefill_decode_timeline, chunks": lambda: plots.prefill_decode_timeline(
        [("prefill", 8, 0.03), ("prefill", 8, 0.03), ("decode", 1, 0.028)]
    ),
    "step_times, one": lambda: plots.step_times({"naive": (LENGTHS, [20 + 0.4 * n for n in LENGTHS])}),
    "step_times, three": lambda: plots.step_times(
        {
            "naive": (LENGTHS, [20 + 0.4 * n for n in LENGTHS]),
            "cached": (LENGTHS, [30.0] * len(LENGTHS)),
            "hf generate": (LENGTHS, [31.0] * len(LENGTHS)),
        },
        fit={"naive": 2, "cached": 1},
        title="A finding",
    ),
    "gain_vs_length": lambda: plots.gain_vs_length([16, 64, 256], [0.9, 1.7, 5.4], engine="cached", over="naive"),
    "bars_by_engine": lambda: plots.bars_by_engine({"hf generate": 13.0, "naive": 2.0, "fast": 120.0}, unit="tokens/s"),
    "unit_line": lambda: plots.unit_line(["mat", "sofa", "floor", "moon"], [0.5, 0.3, 0.19, 0.01], u=0.9),
    "unit_line, at its ends": lambda: plots.unit_line(["a", "b"], [0.4, 0.6], u=0.0),
    "curves, five that end together": lambda: plots.curves(
        [0, 1], {f"w{n}": [1 - n / 4, 0.2 + n / 100] for n in range(5)}, xlabel="x", ylabel="y", y_range=(0, 1)
    ),
    "curves": lambda: plots.curves([1, 2, 4], {"a": [1, np.nan, 3], "b": [3, 2, 1]}, xlabel="x", ylabel="y"),
    "curves, logarithmic": lambda: plots.curves(
        [1, 32, 1024], {"step": [3.5, 3.5, 14.3]}, xlabel="requests", ylabel="ms", log_x=True, log_y=True
    ),
    "recomputed_keys": lambda: plots.recomputed_keys(prompt=5, steps=6),
    "recomputed_keys, many": lambda: plots.recomputed_keys(prompt=60, steps=40),
    "causal_mask": lambda: plots.causal_mask(3, 8),
    "causal_mask, words": lambda: plots.causal_mask(3, 8, key_labels=KING, query_labels=KING[-3:]),
    "attention_mask": lambda: plots.attention_mask([[True, False, True], [False, True, True]]),
    "attention_weights": lambda: plots.attention_weights([[1.0], [0.2, 0.8], [0.1, 0.3, 0.6]], room=4),
    "cache_fill": lambda: plots.cache_fill([12, 30, 7], 48),
    "cache_fill, long": lambda: plots.cache_fill([300, 1200], [2048, 4096], bytes_per_token=46080, labels=["a", "b"]),
    "head_groups": lambda: plots.head_groups(28, 4),
    **{f"engine_map, {part}": lambda part=part: plots.engine_map(part) for part in maps.PARTS},
    "engine_map": lambda: plots.engine_map(),
    "engine_map, several": lambda: plots.engine_map(["cache", "attention"], layers=28, title="Mine"),
    **{f"decoder_layer, {model}": lambda model=model: plots.decoder_layer(shape_config(model)) for model in SHAPES},
    "head_groups, mistaken": lambda: plots.head_groups(9, 3, reads=[n % 3 for n in range(9)], title="Not like this"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_labels_are_inside_of_the_card_and_do_not_cover_each_other(name):
    check_picture(EXAMPLES[name])


def fills(figure):
    return [patch.get_facecolor() for patch in figure.axes[0].patches]


def test_the_map_is_the_same_everywhere_but_for_what_is_lit():
    plain = plots.engine_map()
    for part in maps.PARTS:
        lit = plots.engine_map([part])
        changed = [n for n, (one, other) in enumerate(zip(fills(plain), fills(lit), strict=True)) if one != other]
        assert len(changed) == 1
        assert [t.get_text() for t in lit.axes[0].texts] == [t.get_text() for t in plain.axes[0].texts]
        assert part in head(lit) and lit.alt.startswith(head(lit))
    assert len(set(maps.PARTS)) == 13
    with pytest.raises(InvalidParameter, match=r"lit='warp'.*`attention`"):
        plots.engine_map("warp")


def test_a_layer_has_the_shapes_of_its_config():
    shape = ModelShape.from_config(shape_config("smollm2-135m"))
    figure = plots.decoder_layer(shape)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert {"576 → 9 × 64", "2 × [S, 3, 64]", "[9, n, S] scores", "9 × 64 → 576", "1,536 → 576"} <= set(texts)
    assert texts.count("576 → 3 × 64") == texts.count("576 → 1,536") == 2
    per_layer = (shape.parameters - shape.vocab * shape.hidden - shape.hidden) / shape.layers - 2 * shape.hidden
    share = 3 * 576 * 1536 / per_layer
    assert head(figure) == f"One of 30 layers: {per_layer / 1e6:.1f} M weights, {share:.0%} of them feed-forward"


def test_recomputed_keys_counts_what_it_draws():
    for prompt, steps in ((5, 6), (1, 1), (7, 3)):
        figure = plots.recomputed_keys(prompt, steps)
        repeated, new = (len(squares.get_paths()) for squares in figure.axes[0].collections)
        lengths = [prompt + step for step in range(steps)]
        assert new == lengths[-1] and new + repeated == sum(lengths)
        assert head(figure) == f"{new} new, {repeated} repeated"
    assert head(plots.recomputed_keys(prompt=5, steps=6)) == "10 new, 35 repeated"


@pytest.mark.parametrize(("q", "kv", "seen"), [(3, 8, 21), (4, 4, 10), (1, 9, 9)])
def test_causal_mask_ends_in_the_bottom_right_corner(q, kv, seen):
    assert np.tril(np.ones((q, kv), dtype=bool), kv - q).sum() == seen
    assert head(plots.causal_mask(q, kv)) == f"{q} new of {kv} tokens: {seen} of {q * kv} pairs are seen"


def test_the_mistaken_mask_hides_what_came_before():
    assert head(plots.causal_mask(3, 8, bottom_right=False)) == "3 new of 8 tokens: 6 of 24 pairs are seen"


def test_any_mask_can_be_drawn_and_is_counted():
    assert head(plots.attention_mask([[1, 0, 1], [0, 1, 1]])) == "2 new of 3 tokens: 4 of 6 pairs are seen"


def test_attention_weights_leave_unread_rows_empty():
    figure = plots.attention_weights([[1.0], [0.25, 0.75]], room=4)
    assert len(figure.axes[0].patches) == 8  # two steps over four rows
    numbers = [t.get_text() for t in figure.axes[0].texts if "." in t.get_text()]
    assert numbers == ["1.00", "0.25", "0.75"]
    assert head(figure) == "2 steps read 3 of 8 rows"


def test_head_groups_draw_the_assignment_they_are_given():
    for reads, expected in ((None, [0, 0, 0, 1, 1, 1, 2, 2, 2]), ([n % 3 for n in range(9)], [0, 1, 2] * 3)):
        lines = plots.head_groups(9, 3, reads=reads).axes[0].lines
        assert [round((line.get_xdata()[1] - 1.5) / 3) for line in lines] == expected


def test_captions_are_computed():
    assert head(plots.cache_fill([12, 30, 7], 48)) == "95 of 144 reserved tokens hold nothing: 66%"
    assert "201 MiB" in head(plots.cache_fill([300, 1200, 77], 2048, bytes_per_token=46080))
    assert head(plots.token_boxes(["ab", "c"], [7, 8])) == "2 tokens, 3 characters"
    assert head(plots.token_boxes(["<s>", "abc"], [1, 8], special={1})) == "2 tokens, 3 characters"
    assert head(plots.head_groups(9, 3)) == "9 query heads read 3 KV heads, 3 share each"
    stack = plots.memory_stack({"a": {"weights": 9 * GIB}, "b": {"weights": 7 * GIB}}, budgets={"8 GiB": 8 * GIB})
    assert head(stack) == "1 of 2 fit (8 GiB)"
    growth = plots.kv_growth({"32": 524288, "8": 131072}, lengths=[0, 4096], mark=2048)
    assert head(growth) == "At 2,048 tokens the cache takes from 256 MiB to 1.00 GiB"
    roof = plots.roofline(1e15, 4e12, {"decode": (1, None)})
    assert head(roof) == "Below 250 FLOP for each byte, this machine waits for memory"
    bars = plots.filtered_bars(["a", "b", "c"], [0.5, 0.3, 0.2], [0.625, 0.375, 0.0])
    assert head(bars) == "2 of 3 tokens kept; they held 80.0%"
    assert head(plots.filtered_bars(["a", "b"], [0.5, 0.5], [0.9, 0.1])) == "All 2 tokens kept"


def test_timeline_tells_ttft_from_tpot():
    figure = plots.prefill_decode_timeline([("prefill", 8, 0.1), ("prefill", 8, 0.4)] + [("decode", 1, 0.05)] * 4)
    texts = " ".join(t.get_text() for t in figure.axes[0].texts)
    assert "TTFT 500 ms" in texts and "4 steps, TPOT 50.0 ms" in texts
    assert head(figure) == "The first token took as long as 10.0 later ones"


def test_fitted_curves_write_their_formula():
    figure = plots.step_times({"naive": ([10, 20, 40], [7.0, 9.0, 13.0])}, fit=1)
    assert figure.alt == "step time: naive fit: 5 + 0.2 n ms"
    square = plots.step_times({"naive": ([1, 2, 3, 4], [2 - n + 3 * n * n for n in (1, 2, 3, 4)])}, fit=2)
    assert square.alt == "step time: naive fit: 2 − 1 n + 3 n² ms"
    assert plots.step_times({"naive": ([1, 2], [1, 2])}, fit=2).alt == "step time: naive not fitted"


def test_the_arrow_falls_on_the_token_whose_stretch_holds_u():
    words, probs = ["mat", "sofa", "floor"], [0.5, 0.3, 0.2]
    for u, word in ((0.0, "mat"), (0.4999, "mat"), (0.5, "sofa"), (0.79, "sofa"), (0.81, "floor"), (0.999, "floor")):
        figure = plots.unit_line(words, probs, u=u)
        assert head(figure) == f"The arrow falls on '{word}'" and figure.alt.endswith(f"{u:.3f} falls on {word}")
    assert plots.unit_line(words, probs).alt == "a line from 0 to 1: mat 50.0%, sofa 30.0%, floor 20.0%"


def test_every_curve_is_named_where_they_end_together():
    for values in ([1, 30], [30, 1], [1, 1]):
        figure = plots.curves([1, 9], {"arrived": values, "released": values, "c": values}, xlabel="x", ylabel="y")
        assert {"arrived", "released", "c"} <= {text.get_text() for text, _ in drawn_texts(figure)}


def test_an_engine_has_its_colour_among_curves():
    figure = plots.curves([1, 2], {"naive": [1, 2], "each token once": [1, 1]}, xlabel="x", ylabel="y")
    naive, other = (line.get_color() for line in figure.axes[0].lines)
    assert naive == colour_of("naive") and other != naive


def test_profile_shares_count_what_is_not_drawn():
    figure = plots.time_by_operator(["a", "b", "c"], [50, 30, 20], most=1)
    assert figure.alt == "time: a 50%, 2 others 50%"


def test_tokens_are_made_visible():
    assert visible(" a\n") == "·a↵"
    assert visible("日") == "U+65E5" and visible("\x00") == "U+0000"
    assert len(visible("x" * 100)) == 24


def test_labels_that_crowd_are_moved_apart_about_their_middle():
    assert balanced([0.0, 5.0, 9.0], 1.0) == [0.0, 5.0, 9.0]
    assert balanced([5.0, 5.0, 5.0], 1.0) == [4.0, 5.0, 6.0]
    moved = balanced([0.31, 0.26, 0.19, 0.13, 0.11], 0.08)
    assert sum(moved) == pytest.approx(1.0) and moved == sorted(moved, reverse=True)
    assert np.diff(moved[::-1]).min() > 0.0799


def test_narrow_stretches_are_named_above_the_line():
    figure = plots.unit_line(["mat", "moon"], [0.97, 0.03], u=0.5)
    heights = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts}
    assert heights["mat"] < 1 < heights["moon"]
