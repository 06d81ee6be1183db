"""Widgets: what they compute is what the package computes, they live without a front end, and leave nothing behind."""

import builtins
import io
import itertools

import nbformat
import numpy as np
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from minfer_lib import SamplingParams
from minfer_lib.errors import InvalidParameter
from minfer_lib.generation.sampling import Sampler, uniform
from minfer_lib.learn import explore as explore_lazily
from minfer_lib.learn import notebooks, plots, widgets
from minfer_lib.learn.sliders import Choice, Gallery, Slider, explore, gallery, live
from minfer_lib.learn.style import Picture
from minfer_lib.models import memory
from minfer_lib.models.shapes import SHAPES


def draw(length: int, name: str) -> Picture:
    if length == 13:
        raise ValueError("thirteen")
    return plots.cache_fill([length], 48, labels=[name])


CONTROLS = {"length": Slider(1, 48, 1, 12), "name": Choice(("a", "b"), "a", "called")}


def test_outside_of_a_notebook_the_picture_is_returned():
    pictures = explore(draw, positions=[{}, {"length": 30}, {"length": 5, "name": "b"}], **CONTROLS)
    assert isinstance(pictures, Gallery) and explore_lazily is explore
    assert pictures.captions == ("where the controls begin", "length 30", "length 5, called b")
    assert repr(pictures).startswith(
        "where the controls begin: 36 of 48 reserved tokens hold nothing: 75%\nlength 30: "
    )


def test_a_position_of_an_unknown_control_is_refused():
    with pytest.raises(InvalidParameter, match=r"'size', which is no control\. The controls are length, name"):
        gallery(draw, CONTROLS, [{"size": 3}])


def test_the_picture_is_one_image_with_every_position_on_it():
    one, two = (gallery(draw, CONTROLS, [{}] * n) for n in (1, 2))
    sizes = [Image.open(io.BytesIO(g.png())).size for g in (one, two)]
    assert sizes[0][0] == sizes[1][0] and 1.8 < sizes[1][1] / sizes[0][1] < 2.1
    assert one.png() == gallery(draw, CONTROLS, [{}]).png()
    data, metadata = one._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"} and metadata["image/png"]["width"] == round(sizes[0][0] / 2)


def test_pictures_stand_side_by_side_where_the_page_is_wide_enough():
    def narrow(inches):
        return plots.filtered_bars("ab", [0.5, 0.5], [1, 0], width=inches)

    one, two, three = (
        Image.open(io.BytesIO(gallery(narrow, {"inches": Slider(4, 7, 1, 4)}, [{}] * n).png())).size for n in (1, 2, 3)
    )
    assert two[1] == one[1] and 1.9 < two[0] / one[0] < 2.0
    assert three[0] == two[0] and 1.9 < three[1] / one[1] < 2.0


def test_moving_a_control_replaces_the_one_image():
    box = live(draw, CONTROLS)
    length, _name, message, image = box.children
    before = image.value
    assert Image.open(io.BytesIO(before)).format == "PNG" and image.width == "672"
    length.value = 30
    assert image.value != before and message.value == "" and len(box.children) == 4


def test_a_control_ends_where_the_others_make_it_end():
    drawn = []

    def follow(step, size):
        drawn.append((step, size))
        return draw(step, "a")

    controls = {
        "step": Slider(1, lambda step, size: 4 * size, 1, 8, play=True),
        "size": Choice(lambda step, size: (2, 3) if step > 15 else (2, 3, 5), 5),
    }
    box = live(follow, controls)
    (step, button), size = box.children[0].children, box.children[1]
    assert (step.max, button.max, drawn) == (20, 20, [(8, 5)])
    step.value = 16
    assert [option for _, option in size.options] == [2, 3] and drawn[-1][1] == size.value == 3
    size.value = 2
    assert step.max == 8 and drawn[-1] == (8, 2) and len(drawn) == 3  # one picture for one movement


def test_no_position_of_a_slider_of_the_cache_repeats_another(monkeypatch):
    seen = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, positions, **controls: seen.update(draw=draw, **controls))
    widgets.cache_explorer()
    box = live(seen.pop("draw"), seen)
    _, _, limit, average, _, _, image = box.children
    for tokens in (256, 2048):
        limit.value = tokens
        pictures = []
        for _, length in average.options:
            average.value = length
            pictures.append(image.value)
        assert len(set(pictures)) == len(pictures) > 3


def test_a_value_that_cannot_be_drawn_is_reported_in_place_and_forgotten():
    box = live(draw, CONTROLS)
    length, _name, message, image = box.children
    before = image.value
    length.value = 13
    assert "ValueError" in message.value and "thirteen" in message.value and image.value == before
    length.value = 14
    assert message.value == "" and image.value != before


def test_no_widget_is_an_output_area():
    import ipywidgets

    box = live(draw, CONTROLS)
    assert not any(isinstance(child, ipywidgets.Output) for child in box.children)


def test_without_ipywidgets_there_is_the_picture(monkeypatch, capsys):

    real, shown = builtins.__import__, []

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    import IPython.display

    module = __import__("sys").modules["minfer_lib.learn.sliders"]
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda data, **_: shown.append(data))
    monkeypatch.setattr(builtins, "__import__", without)
    assert explore(draw, positions=[{}], **CONTROLS) is None
    assert "need ipywidgets" in capsys.readouterr().out
    assert [set(data) for data in shown] == [{"image/png", "text/plain"}]


# -- the widgets of the chapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
def test_memory_adds_up_what_memory_says(model):
    figure = widgets.draw_memory(model, "int8", 2048, 4, 16)
    shape = widgets._shape(model)
    total = shape.parameters + 4 * 2048 * memory.kv_bytes_per_token(shape, 2) + memory.activation_bytes(shape, 2048, 2)
    bars = sum(patch.get_width() for patch in figure.axes[0].patches)
    assert bars == pytest.approx(total)
    fits = total <= 16 * memory.GIB
    assert ("fits" in figure.texts[0].get_text()) is fits


def test_fp32_weights_come_with_an_fp32_cache():
    shape = widgets._shape("qwen2.5-7b")
    widths = [patch.get_width() for patch in widgets.draw_memory("qwen2.5-7b", "fp32", 512, 1, 141).axes[0].patches]
    assert widths[:2] == [4 * shape.parameters, 512 * memory.kv_bytes_per_token(shape, 4)]


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(temperature=1.0, repetition_penalty=1.8, top_k=4),
        SamplingParams(temperature=0.0),
    ],
)
def test_the_distribution_drawn_is_the_one_the_sampler_draws_from(params):
    probs = widgets.next_token_distribution(LOGITS, params, seen=[0, 4])
    assert probs.sum() == pytest.approx(1.0)

    class Row:
        def __init__(self, seed):
            self.params, self.seed, self.index, self.prompt_token_ids, self.token_ids = params, seed, 0, [0, 4], []

    rows = [Row(seed) for seed in range(4000)]
    tokens = Sampler()(LOGITS.expand(len(rows), -1), rows).token_ids
    counts = np.bincount(tokens, minlength=len(LOGITS)) / len(rows)
    assert abs(counts - probs.numpy()).max() < 0.03
    assert all((p == 0) <= (c == 0) for p, c in zip(probs.tolist(), counts, strict=True))
    assert uniform([0], [0], [0]).shape == (1,)


def test_sampling_explorer_takes_texts_or_a_function_and_leaves_the_logits_alone():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    named = widgets.sampling_explorer(logits, [f"t{i}" for i in range(50)])
    called = widgets.sampling_explorer(logits, lambda i: f"t{i}", seen=[1])
    assert named.alt == called.alt and len(named.pictures) == 4
    assert torch.equal(logits, before)
    best = int(logits.argmax())
    assert f"t{best} " in named.alt.splitlines()[0]
    for params in (SamplingParams(temperature=1.5, top_p=0.9), SamplingParams(temperature=1.5, min_p=0.1)):
        kept = int((widgets.next_token_distribution(logits, params) > 0).sum())
        assert 1 < kept < 50 and f"{kept} of 50 tokens kept" in named.alt


def test_sampling_explorer_weighs_what_is_kept_as_the_filter_sees_it(monkeypatch):
    seen = {}
    monkeypatch.setattr(widgets, "explore", lambda draw, positions, **controls: seen.update(draw=draw))
    widgets.sampling_explorer(torch.tensor([3.0, 2.0, 1.0, 0.0]), "abcd".__getitem__, seen=[0])
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for changed in ({"temperature": 0.5}, {"temperature": 2.0}, {"repetition_penalty": 2.0}):
        unfiltered = widgets.next_token_distribution(
            torch.tensor([3.0, 2.0, 1.0, 0.0]), SamplingParams(**({"temperature": 1.0} | changed)), seen=[0]
        )
        two = float(unfiltered.sort(descending=True).values[:2].sum())
        figure = seen["draw"](**(off | changed | {"top_k": 2}))
        assert figure.texts[0].get_text() == f"2 of 4 kept; unfiltered: {two:.1%}"
    assert seen["draw"](**off).texts[0].get_text() == "All 4 tokens kept"
    scales = {seen["draw"](**(off | {"temperature": t})).axes[0].get_xlim() for t in (0.5, 2.0)}
    assert len(scales) == 1


def test_cache_explorer_counts_reserved_and_used():
    figure = widgets.draw_cache("smollm2-135m", "fp32", 2048, 256, 8)
    assert sum(widgets.SPREAD) == pytest.approx(len(widgets.SPREAD))
    assert figure.texts[0].get_text() == "smollm2-135m: 720 MiB reserved, 90.0 MiB used, 87% empty"
    full = widgets.draw_cache("smollm2-135m", "fp16 / bf16", 256, 2048, 2)
    assert full.texts[0].get_text().endswith("0% empty")


@pytest.mark.parametrize("make", [widgets.memory_explorer, widgets.cache_explorer])
def test_every_option_of_every_control_can_be_drawn(make, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        widgets, "explore", lambda draw, positions, **controls: seen.update(draw=draw, controls=controls)
    )
    make()
    begin = {name: control.value for name, control in seen["controls"].items()}
    ends = {name: [option for _, option in control._named(begin)] for name, control in seen["controls"].items()}
    for name, options in ends.items():
        for value in options if name == "model" else (options[0], options[-1]):
            assert isinstance(seen["draw"](**(begin | {name: value})), Picture)
    extremes = [(options[0], options[-1]) for options in ends.values()]
    for values in itertools.islice(itertools.product(*extremes), 8):
        seen["draw"](**dict(zip(ends, values, strict=True))).png(compact=False)


# -- all of it in a notebook ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook with one of everything, executed and normalised as the chapters are."""
    cells = [
        "from minfer_lib.models import memory\n"
        "from minfer_lib.learn import plots, show, use_style, widgets\n"
        "from minfer_lib.learn.checks.ch01 import check_kv_bytes\n"
        "import matplotlib.pyplot as plt\n"
        "use_style()",
        "show(memory.weight_bytes)",
        "plots.recomputed_keys(prompt=5, steps=6)",
        "plt.plot([1, 2]);",
        "plots.recomputed_keys(prompt=5, steps=6)",
        "def kv_bytes(layers, query_heads, kv_heads, head_dim, tokens, bytes_per_value): ...\ncheck_kv_bytes(kv_bytes)",
        "def kv_bytes(layers, query_heads, kv_heads, head_dim, tokens, bytes_per_value):\n"
        "    return layers * kv_heads * head_dim * tokens * bytes_per_value\n"
        "check_kv_bytes(kv_bytes)",
        "def kv_bytes(layers, query_heads, kv_heads, head_dim, tokens, bytes_per_value):\n"
        "    return layers * heads\n"
        "check_kv_bytes(kv_bytes)",
        "widgets.cache_explorer()",
    ]
    path = tmp_path_factory.mktemp("nb") / "one_of_everything.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in cells]), path)
    return notebooks.execute(path, timeout_s=120, progress=False)


def kinds(cell):
    return [set(output.get("data", {})) or output.output_type for output in cell.outputs]


def test_each_cell_shows_one_thing_once(executed):
    cells = executed.cells
    assert kinds(cells[0]) == []
    assert kinds(cells[1]) == [{"text/html", "text/plain"}]
    assert kinds(cells[2]) == kinds(cells[3]) == kinds(cells[4]) == [{"image/png", "text/plain"}]
    assert cells[2].outputs[0].data == cells[4].outputs[0].data  # pyplot, once imported, changes nothing
    assert cells[2].outputs[0].metadata["image/png"]["width"] == 470


def test_an_unsolved_exercise_prints_one_line_and_a_wrong_one_draws(executed):
    unsolved, wrong, broken = executed.cells[5:8]
    assert unsolved.outputs[0].text.startswith(
        "kv_bytes: not solved yet. Replace the ... in it, then run the cell again."
    )
    assert len(unsolved.outputs) == 1
    assert "That is exactly half." in wrong.outputs[0].text
    assert kinds(wrong)[1:] == [{"image/png", "text/plain"}]
    assert "NameError: name 'heads' is not defined\n             in line 2 of your cell: return layers * heads" in (
        broken.outputs[0].text
    )
    assert len(broken.outputs) == 1


def test_a_widget_leaves_a_line_and_its_picture(executed):
    outputs = executed.cells[8].outputs
    assert [set(output.data) for output in outputs] == [{"text/plain"}, {"image/png", "text/plain"}]
    assert outputs[0].data["text/plain"] == notebooks.WIDGET_LINE
    assert "widgets" not in executed.metadata
    assert len(nbformat.writes(executed)) < 400_000
