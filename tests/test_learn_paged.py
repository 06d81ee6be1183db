"""The replay without a model, the pictures of chapter 6 and its widget: compared with real engines, counted again."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import test_learn_ch06 as solutions
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from pictures import check_picture, head

from minfer_lib import LLMEngine, SamplingParams, load_model
from minfer_lib.engine.scheduler import Scheduler
from minfer_lib.engine.trace import BlockMap, TracedTable
from minfer_lib.errors import InvalidParameter, PromptTooLong
from minfer_lib.learn import block_replay, plots, widgets
from minfer_lib.learn.checks import ch06
from minfer_lib.learn.paged_replay import DEFAULT_REQUESTS, ReplayRequest, replay
from minfer_lib.learn.plots.block_life import preempted_at
from minfer_lib.learn.plots.block_tables import placed_rows
from minfer_lib.learn.plots.blocks import REQUEST_COLOURS, Contents
from minfer_lib.learn.plots.softmax import merged
from minfer_lib.learn.plots.timelines import lanes
from minfer_lib.learn.sliders import live
from minfer_lib.learn.style import colour_of

WORDS = ["The", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "the", "comfortable", "dog"]


@functools.cache
def run(block_size=4, pool=96, **options):
    return replay(DEFAULT_REQUESTS, block_size=block_size, num_blocks=pool // block_size, **options)


@functools.cache
def slots():
    engine = LLMEngine(load_model("tiny-random", device="cpu"), max_num_seqs=2, max_model_len=36, trace=True)
    params = [SamplingParams(max_tokens=asked.output, ignore_eos=True) for asked in DEFAULT_REQUESTS]
    engine.generate([[5] * asked.prompt for asked in DEFAULT_REQUESTS], params)
    return engine.steps


def block(tables, num_blocks=4, size=4, cached=(), **sums):
    """A block map from {name: (blocks, tokens)}."""
    owners = [TracedTable(name, 0, tuple(blocks), tokens) for name, (blocks, tokens) in tables.items()]
    return BlockMap(size, num_blocks, tuple(owners), tuple(cached), **sums)


def many(count=24, num_blocks=256):
    requests = [ReplayRequest(30 + 17 * n % 90, 40, shared=16 * (n % 2), n=1 + n % 3, arrives=n) for n in range(count)]
    return replay(requests, block_size=16, num_blocks=num_blocks)


WASTE = {
    "a static batch": {"tokens": 130, "unfilled": 370, "idle": 500},
    "slots": {"tokens": 400, "unfilled": 560, "free": 40},
    "paged": {"tokens": 890, "unfilled": 4, "idle": 16, "free": 90},
}
MOVED = {
    "gather, then attend": {"read blocks": 4e6, "write copy": 4e6, "read copy": 4e6},
    "follow the table": {"read blocks": 4e6},
}

EXAMPLES = {
    "block_table": lambda: plots.block_table(
        {"A": [7, 1, 4], "B": [3, 0]}, {"A": WORDS[:10], "B": WORDS[:5]}, block_size=4, num_blocks=8
    ),
    "block_table, shared": lambda: plots.block_table(
        {"A": [2, 5, 0], "B": [2, 5, 3], "C": [2]}, {"A": WORDS[:5], "B": WORDS[:6], "C": WORDS[:2]},
        block_size=2, num_blocks=6,
    ),
    "block_table, wide": lambda: plots.block_table(
        {"A": [9, 1], "B": [3, 0, 7, 8], "C": []}, {"A": WORDS, "B": [f" {w}" for w in WORDS] * 2, "C": []},
        block_size=8, num_blocks=12,
    ),
    "block_table, large": lambda: plots.block_table(
        {f"request {n}": [3 * n, 3 * n + 2] for n in range(3)}, {f"request {n}": WORDS * 2 for n in range(3)},
        block_size=16, num_blocks=17,
    ),
    "block_table, one of one": lambda: plots.block_table({"A": [0]}, {"A": ["$x$"]}, block_size=1, num_blocks=1),
    "placed_rows": lambda: placed_rows([8, 9, 2, 3, 6, 7, 0], [4, 1, 3, 0], block_size=2, num_blocks=6),
    "placed_rows, wrong": lambda: placed_rows([8, 9, 2, 2, 6, 30, 0], [4, 1, 3, 0], block_size=2, num_blocks=6),
    "block_map": lambda: plots.block_map(run()[13]),
    "block_map, of its own blocks": lambda: plots.block_map(run()[13].blocks, title="Mine"),
    "block_map, large blocks": lambda: plots.block_map(run(16)[13]),
    "block_map, blocks of one": lambda: plots.block_map(run(1)[20]),
    "block_map, of seven": lambda: plots.block_map(replay(DEFAULT_REQUESTS, block_size=7, num_blocks=11)[15]),
    "block_map, many": lambda: plots.block_map(many()[23]),
    "block_map, 4,096 blocks": lambda: plots.block_map(block({"0": (range(900), 14000)}, 4096, 16)),
    "block_map, nobody": lambda: plots.block_map(block({})),
    "block_map, one block": lambda: plots.block_map(block({"a long name": ([0], 1)}, 1, 1)),
    "block_life": lambda: plots.block_life(run(4, 64)),
    "block_life, two": lambda: plots.block_life({"slots": slots(), "paged": run(4, 64)}),
    "block_life, slots": lambda: plots.block_life(slots()),
    "block_life, one step": lambda: plots.block_life(run()[:1]),
    "kv_waste": lambda: plots.kv_waste(WASTE),
    "kv_waste, one": lambda: plots.kv_waste({"a": {"tokens": 5}}),
    "kv_waste, nothing": lambda: plots.kv_waste({"a": {"tokens": 0}, "b": {"free": 3}}),
    "merged_softmax": lambda: plots.merged_softmax([[2.0, 1.0, 0.5], [5.0, 4.2, 3.0], [-1.0, 0.2, 1.5]]),
    "merged_softmax, an empty part": lambda: plots.merged_softmax([[2.0, 1.0], [], [3, -4, 2.5, 1, 0], [1]]),
    "merged_softmax, eight": lambda: plots.merged_softmax([[2.0, 1.0, 0.3, 0.5]] * 8),
    "merged_softmax, one": lambda: plots.merged_softmax([[0.0]]),
    "merged_softmax, far apart": lambda: plots.merged_softmax([[-3.0, -2.0], [-700.0, -1.0]]),
    "bytes_moved": lambda: plots.bytes_moved(MOVED),
    "the widget": lambda: block_replay.draw_step(run(), 13, 4.7),
    "the widget, last step": lambda: block_replay.draw_step(run(1, 192), len(run(1, 192)), 4.7),
    "the widget, an engine's": lambda: block_replay.draw_step(many(), 20, 7.0),
    **{
        f"exercise {exercise.name}": lambda exercise=exercise: exercise.draw(getattr(solutions, exercise.name))
        for exercise in ch06.EXERCISES
    },
}  # fmt: skip

LARGE = (
    "block_table, wide",
    "block_map, many",
    "merged_softmax, eight",
    "the widget, an engine's",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_labels_are_inside_of_the_card_and_do_not_cover_each_other(name):
    check_picture(EXAMPLES[name], small=name in LARGE)


# -- the replay -------------------------------------------------------------------------------------------------------


def test_a_replay_takes_the_steps_of_an_engine_that_computes(tiny):
    """The same requests, with the forward pass and without: the same tokens in the same blocks at each step."""

    def seen(steps):
        return [
            (step.chunks, step.waiting, step.kv_tokens, step.kv_held, dataclasses.replace(step.blocks, bytes_copied=0))
            for step in steps
        ]

    engine = LLMEngine(tiny, "paged", block_size=4, num_blocks=24, max_model_len=96, trace=True)
    engine.scheduler = Scheduler(engine.cache, max_num_seqs=16, max_num_batched_tokens=64, watermark=1)
    coming = sorted(enumerate(DEFAULT_REQUESTS), key=lambda one: one[1].arrives)
    while coming or engine.has_unfinished():
        while coming and coming[0][1].arrives <= len(engine.steps):
            number, asked = coming.pop(0)
            ids = [3 + n for n in range(asked.shared)]
            ids += [40 + (17 * number + 5 * n) % 200 for n in range(asked.prompt - asked.shared)]
            params = SamplingParams(max_tokens=asked.output, ignore_eos=True, n=asked.n, temperature=1.0, seed=number)
            engine.add_request(ids, params, request_id=str(number), priority=asked.priority)
        engine.step()
    mine = replay(DEFAULT_REQUESTS, num_blocks=24)
    assert seen(mine) == seen(engine.steps) and mine[-1].blocks.preemptions > 0
    assert seen(replay(DEFAULT_REQUESTS, num_blocks=24)) == seen(mine)


def test_steps_in_which_nobody_is_at_work_are_left_out():
    late = [ReplayRequest(4, 2), ReplayRequest(4, 3, arrives=50), ReplayRequest(4, 3, arrives=50)]
    assert [len(step.chunks) for step in replay(late)] == [1, 1, 2, 2, 2]


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(InvalidParameter, match="shares more tokens than its prompt has"):
        replay([ReplayRequest(8, 8, shared=9)])
    with pytest.raises(InvalidParameter, match="max_tokens"):
        replay([ReplayRequest(8, 0)])
    with pytest.raises(PromptTooLong):
        replay(DEFAULT_REQUESTS, num_blocks=4)
    assert replay([]) == []


def test_the_default_requests_show_what_they_are_for():
    waste = {size: sum(s.kv_held - s.kv_tokens for s in run(size)) / sum(s.kv_held for s in run(size))
             for size in (1, 2, 4, 8, 16)}  # fmt: skip
    assert waste[1] == 0 and list(waste.values()) == sorted(waste.values()) and waste[16] > 0.2
    assert run(4, 192)[-1].blocks.preemptions == 0 < run(4, 64)[-1].blocks.preemptions
    assert run()[-1].blocks.hit_tokens > 0 and run()[-1].blocks.forked_tokens > 0
    assert len(run(16, 48)) > len(run(4, 48))  # what is unfilled is not there for others
    assert max(Contents.of(step.blocks).shared for step in run()) >= 3


# -- pictures ---------------------------------------------------------------------------------------------------------


def areas(figure):
    """Summed width x height of the shapes of each colour, in units of the axes."""
    found = {}
    for shapes in figure.axes[0].collections:
        if isinstance(shapes, PolyCollection):
            size = sum(np.ptp(p.vertices[:, 0]) * np.ptp(p.vertices[:, 1]) for p in shapes.get_paths())
            found[to_hex(shapes.get_facecolor()[0])] = found.get(to_hex(shapes.get_facecolor()[0]), 0) + size
    return found


def test_blocks_are_filled_as_far_as_they_hold_tokens():
    figure = plots.block_map(block({"3": ([0, 2], 6), "4": ([1], 4)}, cached=[3]))
    assert head(figure) == "3 of 4 blocks used, 2 of 12 rows unfilled; 0 shared, 1 cached, 0 empty"
    size = areas(figure)
    assert size[REQUEST_COLOURS[0]] / size[REQUEST_COLOURS[1]] == pytest.approx(6 / 4)
    assert {t.get_text() for t in figure.axes[0].texts} == {"0", "3", "4"}


def test_a_shared_block_has_the_colours_of_all_who_hold_it():
    tables = {"0": ([0, 1], 7), "1": ([0, 1], 7), "2": ([0, 3], 5)}
    figure = plots.block_map(block(tables, num_blocks=5))
    assert head(figure) == "3 of 5 blocks used, 4 of 12 rows unfilled; 2 shared, 0 cached, 2 empty"
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert texts.count("×3") == texts.count("×2") == 1 and texts.count("2") == 1
    size = areas(figure)
    third, half = 4 / 3, 3 / 2
    assert size[REQUEST_COLOURS[0]] / size[REQUEST_COLOURS[2]] == pytest.approx((third + half) / (third + 1))
    assert "×n shared" in [t.get_text() for t in figure.legends[0].texts]


def test_requests_are_in_their_order_and_blocks_keep_their_scale():
    several = Contents.of(block({"10": ([0], 1), "9": ([1], 1), "0": ([2], 1)}))
    assert several.names == ("0", "9", "10")
    widths = []
    for size in (4, 8):
        figure = plots.block_map(block({"0": (range(32 // size), 32)}, 64 // size, size))
        shape = next(s for s in figure.axes[0].collections if to_hex(s.get_facecolor()[0]) == REQUEST_COLOURS[0])
        widths.append(np.ptp(shape.get_paths()[0].vertices[:, 0]))
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.06)


def test_slots_have_no_block_map():
    for draw in (plots.block_map, lambda step: widgets.block_map(steps=[step])):
        with pytest.raises(InvalidParameter, match="kv_cache='paged' and trace=True"):
            draw(slots()[0])


def test_a_block_table_is_drawn_entry_by_entry():
    tables, tokens = {"A": [2, 0], "B": [2, 3]}, {"A": ["a", "b", "c"], "B": ["a", "b", "x", "y"]}
    figure = plots.block_table(tables, tokens, block_size=2, num_blocks=5)
    assert head(figure) == "3 of 5 blocks in use, 1 of them shared; 1 cell unfilled"
    arrows = [p for p in figure.axes[0].patches if hasattr(p, "_posA_posB")]
    assert len(arrows) == 4
    heights = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts if text.get_position()[0] > 5.5}
    ends = [arrow._posA_posB[1][1] for arrow in arrows]  # near the middle of the block that the table names
    for end, entry in zip(ends, (2, 0, 2, 3), strict=True):
        nearest = min("01234", key=lambda number: abs(heights[number] - end))
        assert nearest == str(entry)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert texts.count("a") == 3 and texts.count("x") == 2 and "table [2, 3]" in texts and "×2" in texts
    for wrong in ({"A": [5]}, {"A": []}):
        with pytest.raises(InvalidParameter, match="blocks 0 to 4 of 2 tokens"):
            plots.block_table(wrong, {"A": ["a"]}, block_size=2, num_blocks=5)


def test_positions_that_are_elsewhere_are_counted():
    right = [solutions.row_of([4, 1, 3], 2, position) for position in range(5)]
    assert placed_rows(right, [4, 1, 3], block_size=2, num_blocks=5).alt == (
        "all 5 positions are where the table [4, 1, 3] says"
    )
    for rows, wrong in (([9, *right[1:]], 2), ([*right[:4], 10], 1), ([*right[:4], 0], 1)):
        figure = placed_rows(rows, [4, 1, 3], block_size=2, num_blocks=5)
        assert figure.alt == f"{wrong} of 5 positions are not where the table says"


def stacked(ax):
    return [patch for patch in ax.patches if hasattr(patch, "get_data")]


def test_the_rows_of_every_step_add_up():
    for steps in (run(4, 64), slots()):
        figure = plots.block_life(steps)
        filled, unfilled, cached, free = (patch.get_data() for patch in stacked(figure.axes[0]))
        assert filled.values.tolist() == [step.kv_tokens for step in steps]
        assert unfilled.values.tolist() == [step.kv_held for step in steps]
        assert free.values.tolist() == [step.kv_capacity for step in steps]
        expected = [step.kv_held + 4 * len(step.blocks.cached) if step.blocks else step.kv_held for step in steps]
        assert cached.values.tolist() == expected
    share = sum(s.kv_tokens for s in run(4, 64)) / sum(s.kv_held for s in run(4, 64))
    other = sum(s.kv_tokens for s in slots()) / sum(s.kv_held for s in slots())
    count = run(4, 64)[-1].blocks.preemptions
    assert head(plots.block_life(run(4, 64))) == (
        f"{share:.0%} of the rows that requests hold are filled; {count} preemptions"
    )
    both = plots.block_life({"slots": slots(), "paged": run(4, 64)})
    assert head(both) == f"Filled, of the rows that requests hold: slots {other:.0%}, paged {share:.0%}"
    assert [to_hex(stacked(ax)[0].get_facecolor()) for ax in both.axes] == [colour_of("slots"), colour_of("paged")]
    assert both.axes[0].get_xlim() == both.axes[1].get_xlim() and both.axes[0].get_ylim() == both.axes[1].get_ylim()


def test_preemptions_are_marked_where_they_were():
    steps = run(4, 64)
    marks, before = [], 0
    for number, step in enumerate(steps, 1):
        marks += [number] if step.blocks.preemptions > before else []
        before = step.blocks.preemptions
    assert preempted_at(steps) == marks and len(marks) > 1
    assert preempted_at(steps[marks[0] :]) == [number - marks[0] for number in marks[1:]]  # a run from the middle on
    assert preempted_at(slots()) == []
    drawn = [line.get_xdata() for line in plots.block_life(steps).axes[0].lines if line.get_marker() == "v"]
    assert drawn[0].tolist() == marks


def test_without_steps_there_is_no_life():
    for nothing in ([], {}):
        with pytest.raises(InvalidParameter, match="trace=True"):
            plots.block_life(nothing)


def test_waste_is_drawn_to_one_scale_with_its_shares():
    figure = plots.kv_waste(WASTE)
    assert head(figure) == "Rows that hold a token: a static batch 13%, slots 40%, paged 89%"
    texts = [t.get_text() for t in figure.axes[0].texts]
    told = ("tokens 13%, unfilled 37%, of no use 50%", "tokens 40%, unfilled 56%, free 4%",
            "tokens 89%, unfilled <1%, of no use 2%, free 9%")  # fmt: skip
    assert texts == [f"1,000 rows\n{parts}" for parts in told]
    widths = [patch.get_width() for patch in figure.axes[0].patches if patch.get_width()]
    assert widths == [n for parts in WASTE.values() for n in parts.values()]
    with pytest.raises(InvalidParameter, match=r"The part 'wasted' of 'a' is not known\. The parts are tokens"):
        plots.kv_waste({"a": {"wasted": 3}})


@pytest.mark.parametrize("parts", [[[1.0]], [[2.0, 1.0], [5.0, -3.0]], [[], [1000.0, 999.0], [], [-1000.0]]])
def test_merged_weights_are_those_of_one_softmax(parts):
    scores = np.concatenate([np.asarray(part) for part in parts])
    maxima, sums, factors, weights = merged([np.asarray(part, dtype=float) for part in parts])
    expected = np.exp(scores - scores.max())
    assert np.allclose(weights, expected / expected.sum())
    assert max(factors) == 1.0 and len(maxima) == len(sums) == len(parts)
    figure = plots.merged_softmax(parts)
    assert head(figure).endswith(f"the weights of {len(scores)} scores are those of one softmax")
    rings = next(line for line in figure.axes[1].lines if line.get_marker() == "o")
    bars = [patch.get_height() for patch in figure.axes[1].patches]
    assert np.allclose(rings.get_ydata(), bars)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert sum("sum 0" in text for text in texts) == sum(not part for part in parts)


def test_scores_that_have_no_softmax_are_refused():
    for wrong in ([], [[]], [[float("nan")]], [[1.0, float("-inf")]]):
        with pytest.raises(InvalidParameter, match="finite scores, at least one"):
            plots.merged_softmax(wrong)


def test_what_gathering_costs_is_said():
    assert head(plots.bytes_moved(MOVED)) == "“follow the table” moves 0.333× the bytes of “gather, then attend”"


# -- the widget -------------------------------------------------------------------------------------------------------


@pytest.fixture
def controls(monkeypatch):
    """What `widgets.block_map` hands to `explore`: (draw, its controls, the positions of the static picture)."""

    def get(*args, **kwargs):
        seen = {}
        monkeypatch.setattr(
            block_replay, "explore", lambda draw, positions, **c: seen.update(draw=draw, controls=c, at=positions)
        )
        widgets.block_map(*args, **kwargs)
        return seen["draw"], seen["controls"], seen["at"]

    return get


def test_the_picture_beside_the_sliders_shows_small_and_large_blocks_and_a_small_pool():
    gallery = widgets.block_map()
    assert len(gallery.captions) == 4
    assert [caption.split(", ")[1:] for caption in gallery.captions] == [
        [f"block size {size}", f"pool (tokens) {pool}"] for size, pool in ((4, 96), (1, 96), (16, 96), (4, 64))
    ]
    lines = repr(gallery).splitlines()
    assert " 0 of 90 rows unfilled" in lines[1] and "preempted so far" in lines[3] and "3 shared" in lines[0]


def test_the_picture_changes_with_each_slider(controls):
    draw, inputs, _ = controls()
    box = live(draw, inputs)
    step, size, pool, message, image = box.children
    slider, button = step.children
    assert (button.min, button.max, button.interval) == (slider.min, slider.max, 800)
    pictures = [image.value]
    for widget, value in ((slider, 9), (size, 16), (pool, 64)):
        widget.value = value
        assert message.value == "" and image.value not in pictures
        pictures.append(image.value)


def test_the_slider_of_steps_ends_where_the_run_ends(controls):
    draw, inputs, positions = controls()
    step, size, pool, message, _ = live(draw, inputs).children
    slider = step.children[0]
    for block_size, tokens in itertools.product((4, 16, 1), (96, 48, 192)):
        size.value, pool.value = block_size, tokens
        slider.value = slider.max
        assert slider.max == len(run(block_size, tokens)) and message.value == ""
        figure = draw(slider.max, block_size, tokens)
        assert head(figure).startswith(f"Step {slider.max} of {slider.max}: ")
    trace = run(4, 64)[positions[-1]["step"] - 1]
    figure = draw(**positions[-1])
    assert head(figure) == (
        f"Step {positions[-1]['step']} of {len(run(4, 64))}: {len(trace.blocks.tables)} run, "
        f"{len(trace.waiting)} wait, {trace.blocks.preemptions} preempted so far"
    )
    tail = trace.kv_held - trace.kv_tokens
    note = f"{tail} of {trace.kv_held} rows unfilled ({tail / trace.kv_held:.0%}); "
    assert any(t.get_text().startswith(note) for t in figure.texts)


def test_a_real_run_has_a_slider_over_its_steps(tiny):
    engine = LLMEngine(tiny, kv_cache="paged", block_size=4, num_blocks=20, max_model_len=64, trace=True)
    engine.generate([[5] * 9, [5] * 9 + [6], [7] * 20], SamplingParams(max_tokens=12, ignore_eos=True))
    gallery = widgets.block_map(steps=engine.steps)
    assert all(caption.startswith("step ") for caption in gallery.captions) and len(gallery.captions) <= 2
    names = [
        list(block_replay.request_colours([lane.name for lane in lanes(engine.steps[:n]).values()])) for n in (3, None)
    ]
    assert names[1][: len(names[0])] == names[0]  # a request keeps its colour as others come


def test_what_the_widget_cannot_show_is_refused():
    with pytest.raises(InvalidParameter, match="no block maps"):
        widgets.block_map(steps=[])
