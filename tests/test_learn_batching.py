"""Pictures of chapter 4, the replay of a run and streams side by side: drawn from real runs and counted again here."""

import functools
import itertools

import nbformat
import numpy as np
import pytest
import test_learn_ch04 as solutions
from matplotlib.patches import Rectangle
from nbformat.v4 import new_code_cell, new_notebook
from pictures import check_picture, head

from minfer_lib import LLMEngine, SamplingParams, load_model
from minfer_lib.engine.trace import StepTrace, TracedChunk
from minfer_lib.errors import InvalidParameter, PromptTooLong
from minfer_lib.learn import notebooks, plots, widgets
from minfer_lib.learn.checks import ch04
from minfer_lib.learn.plots.timelines import account, lanes
from minfer_lib.learn.widgets import telling_steps


@functools.cache
def run(requests, most, budget, prompts=(4, 30), answers=(3, 12)):
    """(steps, outputs, engine) of a real run; the clock counts 10 ms a call, so that pictures are always the same."""
    ticks = itertools.count()
    engine = LLMEngine(
        load_model("tiny-random", device="cpu"), max_num_seqs=most, max_num_batched_tokens=budget, max_model_len=256,
        trace=True, clock=lambda: next(ticks) * 0.01,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 200, rng.integers(*prompts)).tolist() for _ in range(requests)]
    params = [SamplingParams(max_tokens=int(rng.integers(*answers)), ignore_eos=True) for _ in range(requests)]
    return engine.steps, engine.generate(ids, params), engine


def small():
    return run(6, 3, 16)[0]


def large():
    return run(32, 8, 64, (16, 128), (16, 128))[0]


def at_work():
    """An engine in the middle of three requests, a fourth in the queue, two slots still free."""
    engine = LLMEngine(load_model("tiny-random", device="cpu"), max_num_seqs=5, num_blocks=5, max_model_len=64)
    for length in (3, 20, 9):
        engine.add_request([7] * length, SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    return engine


def step(chunks, waiting=(), **times):
    """A trace from (request, tokens, decodes)."""
    parts = tuple(TracedChunk(name, 0, 0, tokens, decodes, True, 0) for name, tokens, decodes in chunks)
    return StepTrace(parts, tuple((name, 0) for name in waiting), 0, 0, **times)


PROMPTS, ANSWERS = [16, 128, 40, 77] * 8, [128, 16, 90, 33] * 8
STATIC = {"A": "pdddxxxx", "B": "pdxxxxxx", "C": "pddddddd", "D": "wwwwwwwwpdd"}
CONTINUOUS = {"A": "pddd", "B": "pd", "C": "pddddddd", "D": "wwpdd"}
RATES = [0.5, 1, 2]

EXAMPLES = {
    "static_batch_waste": lambda: plots.static_batch_waste([4, 9, 2, 7], [3, 8, 12, 5]),
    "static_batch_waste, 32": lambda: plots.static_batch_waste(PROMPTS, ANSWERS),
    "packed_row": lambda: plots.packed_row(
        [1, 1, 6, 3], ["A", "B", "C", "D"], first_positions=[9, 4, 0, 8], last_rows=[0, 1, 7, 10]
    ),
    "packed_row, plain": lambda: plots.packed_row([5, 2, 3]),
    "packed_row, long": lambda: plots.packed_row(
        [1, 1, 1, 16, 12], ["decode 1", "decode 2", "decode 3", "a prompt", "b"], first_positions=[100, 9, 31, 0, 128]
    ),
    "step_composition": lambda: plots.step_composition(small(), budget=16),
    "step_composition, large": lambda: plots.step_composition(large()),
    "iteration_timeline": lambda: plots.iteration_timeline({"static": STATIC, "continuous": CONTINUOUS}),
    "gantt": lambda: plots.gantt(small()),
    "gantt, up to a step": lambda: plots.gantt(small(), upto=5),
    "gantt, 32": lambda: plots.gantt(large()),
    "gantt, 32, up to a step": lambda: plots.gantt(large(), upto=100),
    "gantt, one step": lambda: plots.gantt([step([("a", 5, False)])]),
    "request_life": lambda: plots.request_life(
        "Explain in one sentence why the sky over $the$ sea is 青", run(6, 3, 16)[1][3], small()
    ),
    "request_life, many chunks": lambda: plots.request_life("Hi", run(3, 3, 4)[1][2], run(3, 3, 4)[0]),
    **{
        f"exercise {exercise.name}": lambda exercise=exercise: exercise.draw(getattr(solutions, exercise.name))
        for exercise in ch04.EXERCISES
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_labels_are_inside_of_the_card_and_do_not_cover_each_other(name):
    check_picture(EXAMPLES[name])


# -- batches ----------------------------------------------------------------------------------------------------------


def test_waste_is_counted_column_by_column():
    prompts, answers = PROMPTS[:10], ANSWERS[:10]
    padding = waiting = total = 0
    for p, o in zip(prompts, answers, strict=True):
        row = ["pad"] * (max(prompts) - p) + ["prompt"] * p + ["fed back"] * (o - 1) + ["waits"] * (max(answers) - o)
        padding, waiting, total = padding + row.count("pad"), waiting + row.count("waits"), total + len(row)
    figure = plots.static_batch_waste(prompts, answers)
    assert head(figure).startswith(
        f"{total:,} positions computed: {padding / total:.0%} are padding, {waiting / total:.0%}"
    )
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == total


def test_requests_that_are_alike_waste_nothing():
    assert head(plots.static_batch_waste([5, 5], [3, 3])).endswith("0% are padding, 0% wait for the longest")
    assert head(plots.static_batch_waste([5], [1])).startswith("5 positions computed: 0% are padding, 0% wait")


def test_the_packed_row_has_each_token_once_and_its_position():
    figure = plots.packed_row([1, 3], first_positions=[9, 4], last_rows=[0, 3])
    squares = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(squares) == 2 + 2 * 4 + 2  # padding, each token in the rectangle and in the row, outlines
    numbers = [t.get_text() for t in figure.axes[0].texts if t.get_text().isdigit()]
    assert sorted(numbers) == sorted(["9", "4", "5", "6"] * 2)
    assert head(figure) == "6 squares padded, 4 packed: 33% of the rectangle is padding"


def test_step_composition_counts_both_kinds():
    steps = [step([("a", 7, False)]), step([("a", 1, True), ("b", 3, False)]), step([("a", 1, True), ("b", 1, True)])]
    figure = plots.step_composition(steps, budget=8)
    assert head(figure) == "3 steps of at most 7 tokens; 1 of them mix prefill and decode"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["decode: 3 tokens", "prefill: 10 tokens"]


# -- lanes and timelines ----------------------------------------------------------------------------------------------


def test_lanes_hold_every_chunk_and_every_wait_of_the_traces():
    steps, outputs, _ = run(6, 3, 16)
    run_lanes = lanes(steps)
    assert list(run_lanes) == [(out.request_id, out.index) for out in outputs]
    for out, lane in zip(outputs, run_lanes.values(), strict=True):
        assert sum(tokens for _, tokens, decodes in lane.chunks if not decodes) == len(out.prompt_token_ids)
        assert sum(decodes for _, _, decodes in lane.chunks) == len(out.token_ids) - 1
    assert sum(len(lane.waited) for lane in run_lanes.values()) == sum(len(one.waiting) for one in steps) > 0


def test_what_happens_says_who_waits_prefills_decodes_and_leaves():
    steps = [
        step([("a", 4, False)], ["b", "c"]),
        step([("a", 1, True), ("b", 2, False), ("c", 5, False)]),
        step([("b", 1, True), ("c", 1, True)]),
    ]
    assert account(lanes(steps), steps, 1) == "Step 1 of 3: 2 wait, 1 prefills 4 tokens"
    assert account(lanes(steps), steps, 2) == "Step 2 of 3: 2 prefill 7 tokens, 1 decodes, request a leaves"
    assert account(lanes(steps), steps, 3) == "Step 3 of 3: 2 decode, 2 leave"
    for wrong in (0, 4):
        with pytest.raises(InvalidParameter, match="there are 3 steps, counted from 1"):
            account(lanes(steps), steps, wrong)
    assert telling_steps(steps) == (2,)


def test_a_request_that_is_aborted_while_it_waits_has_a_lane_and_leaves():
    steps = [step([("a", 4, False)], ["b"]), step([("a", 1, True)])]
    assert account(lanes(steps), steps, 1).endswith("1 waits, 1 prefills 4 tokens, request b leaves")
    assert len(plots.gantt(steps, upto=1).axes[0].get_yticks()) == 2


def area(figure, faded):
    """Summed widths of the bars of a gantt that are, or are not, faded."""
    bars = [c for c in figure.axes[0].collections if (c.get_alpha() < 1.0) == faded]
    return sum(np.ptp(path.vertices[:, 0]) for c in bars for path in c.get_paths())


def test_the_replay_fades_what_comes_later_and_loses_nothing():
    for steps in (small(), large()):
        whole = area(plots.gantt(steps), False)
        n = len(steps) // 2
        figure = plots.gantt(steps, upto=n)
        assert area(figure, True) > 0.1 * whole
        assert area(figure, True) + area(figure, False) == pytest.approx(whole, rel=0.02)
        assert head(figure) == account(lanes(steps), steps, n)


def test_toy_timelines_count_steps_and_waste():
    figure = plots.iteration_timeline({"static": STATIC, "continuous": CONTINUOUS})
    texts = {t.get_text() for t in figure.axes[0].texts}
    assert "static: 11 steps, 10 of 27 computed squares are waste" in texts
    assert "continuous: 8 steps, no square is waste" in texts
    assert head(figure) == "static 11 steps, continuous 8 steps"
    with pytest.raises(InvalidParameter, match="The state 'q' is not known"):
        plots.iteration_timeline({"a": {"A": "pq"}})


def test_without_steps_there_is_nothing_to_draw():
    for draw in (plots.gantt, widgets.batch_replay):
        with pytest.raises(InvalidParameter, match="trace=True"):
            draw([])


def test_the_life_of_a_request_has_its_own_numbers():
    steps, outputs, _ = run(6, 3, 16)
    for out in outputs:
        figure = plots.request_life("Why?", out, steps)
        texts = {t.get_text() for t in figure.axes[0].texts}
        decodes = len(out.token_ids) - 1
        expected = {f"{len(out.prompt_token_ids)} tokens", f"id {out.token_ids[0]}", "4 characters",
                    f"{decodes} steps, a token each", f"TTFT {out.metrics.ttft_s * 1e3:,.1f} ms",
                    f"holds {len(out.prompt_token_ids) + decodes} tokens at the end", "ends with “length”"}  # fmt: skip
        assert expected <= texts
    with pytest.raises(InvalidParameter, match="trace=True"):
        plots.request_life("Why?", outputs[0], [step([("other", 1, False)])])


# -- widgets ----------------------------------------------------------------------------------------------------------


def test_the_replay_shows_telling_steps_beside_the_slider():
    steps = large()
    gallery = widgets.batch_replay(steps)
    first, late = telling_steps(steps)
    assert gallery.captions == (f"step {first}", f"step {late}") and late == round(0.75 * len(steps))
    assert all(word in repr(gallery).splitlines()[0] for word in (" wait", " prefill", " decode", " leave"))


def test_streams_side_by_side_give_what_generate_gives(capsys):
    engine = LLMEngine(load_model("tiny-random", device="cpu"), max_model_len=64, trace=True)
    prompts = ["One, two", "<b>three</b>", [5, 6, 7]]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    expected = engine.generate(prompts, params)
    engine.steps.clear()
    texts = widgets.stream_side_by_side(engine, prompts, params)
    assert texts == [out.text for out in expected]
    assert max(len(one.chunks) for one in engine.steps) == 3 and not engine.has_unfinished()  # they shared their steps
    printed = capsys.readouterr().out
    assert printed.startswith("One, two\n") and "(9 tokens, length)" in printed and "3 token ids" in printed


def test_streams_are_closed_whatever_happens():
    engine = LLMEngine(load_model("tiny-random", device="cpu"), max_model_len=64)

    with pytest.raises(InvalidParameter, match="n > 1"):
        widgets.stream_side_by_side(engine, ["a"], SamplingParams(n=2, temperature=1.0))
    with pytest.raises(PromptTooLong):  # the first prompt, whose stream was open, must not be left in the engine
        widgets.stream_side_by_side(engine, ["a", [5] * 100])
    assert not engine.has_unfinished() and engine.stats()["running"] == 0


def test_in_a_notebook_the_boxes_are_updated_in_place_and_kept(tmp_path):
    cells = [
        "from minfer_lib import LLMEngine, SamplingParams, load_model\n"
        "from minfer_lib.learn import widgets\n"
        "engine = LLMEngine(load_model('tiny-random', device='cpu'), max_model_len=64, trace=True)\n"
        "params = SamplingParams(max_tokens=12, ignore_eos=True)",
        "widgets.stream_side_by_side(engine, ['<i>One</i>', 'Two'], params)",
        "widgets.batch_replay(engine.steps)",
    ]
    path = tmp_path / "streams.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in cells]), path)
    _, streams, replay = notebooks.execute(path, timeout_s=120, progress=False).cells
    assert len(streams.outputs) == 1 and set(streams.outputs[0].data) == {"text/html", "text/plain"}
    text, page = streams.outputs[0].data["text/plain"], streams.outputs[0].data["text/html"]
    assert text.count("(12 tokens, length)") == 2 and page.count("12 tokens, length") == 2
    assert "&lt;i&gt;One&lt;/i&gt;" in page and "<i>" not in page
    assert [set(output.data) for output in replay.outputs] == [{"text/plain"}, {"image/png", "text/plain"}]
    assert replay.outputs[0].data["text/plain"] == notebooks.WIDGET_LINE
