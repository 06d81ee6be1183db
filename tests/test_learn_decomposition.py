"""Pictures of why a step takes so long and of engines under load: captions are computed, labels keep apart."""

import pytest
from pictures import check_picture, drawn_texts, head

from minfer_lib.bench.metrics import Run
from minfer_lib.bench.results import Cells, Result, Row
from minfer_lib.bench.roofline import Roofline
from minfer_lib.errors import InvalidParameter
from minfer_lib.learn.plots.decomposition import decomposition
from minfer_lib.learn.plots.frontier import frontier
from minfer_lib.learn.plots.labels import label_points
from minfer_lib.learn.plots.memory import roofline
from minfer_lib.learn.plots.saturation import goodput, knee, saturation
from minfer_lib.learn.style import canvas

FACTS = {"model": "m", "dtype": "float32", "gpu": None, "cpu": "c", "threads": 2, "date": "2026-01-01"}


def step(name, *parts, low=0.95, high=1.2):
    names = ("reading ms", "arithmetic ms", "slow kernels ms", "launching ms")
    spread = {"step ms": sum(parts), "low": low * sum(parts), "high": high * sum(parts), "launches": 9.0}
    return Cells("A decode step", name, dict(zip(names, parts, strict=True)) | spread)


def run(tokens_per_s, tpot, ttft=100.0, requests=24, requests_per_s=1.0):
    wall = requests / requests_per_s
    times = tuple(ttft * (0.5 + i / requests) for i in range(requests))
    return Run(requests, 0, 100, round(tokens_per_s * wall), wall, ttft=times, tpot=(tpot,) * requests)


def result(kind, curves):
    rows = [Row(name, tuple(runs), x=float(x)) for name, points in curves.items() for x, runs in points]
    return Result(kind, rows, {"description": "d"}, FACTS)


def sharing(speed, at_once=(1, 2, 4, 8, 16, 32), noise=0.05):
    """An engine that slows by a twelfth with each further request."""
    points = []
    for n in at_once:
        tpot = 1000 / speed * (1 + (n - 1) / 12)
        points.append((n, [run(n * 1000 / tpot * f, tpot / f) for f in (1 - noise, 1, 1 + noise)]))
    return points


def serving(capacity, rates=(0.5, 1, 2, 4, 8), requests=24, tpot=40.0):
    return [
        (x, [run(10.0, tpot, 150 * max(1, x / capacity) ** 3, requests, min(x, capacity) * f) for f in (0.97, 1, 1.02)])
        for x in rates
    ]


FRONTIER = result(
    "frontier", {"slots": sharing(20), "int8": sharing(36), "cached": [(n, [run(12, 80)]) for n in (1, 8)]}
)
CROWD = result("frontier", {name: sharing(50 + i, noise=0.3) for i, name in
                            enumerate(("paged", "slots", "int8", "HF static", "HF continuous", "fast"))})  # fmt: skip
LOAD = result("latency", {"cached": serving(0.8), "paged": serving(2.2), "int8": serving(3.4, tpot=30.0)})
CALM = result("latency", {"paged": serving(90, rates=(1, 2, 3), requests=8)})
LADDER = {"HF generate": (0.5, 6e9), "HF padded batch": (1.9, 2.1e10), "HF continuous": (1.95, 1.4e10),
          "naive": (0.5, 1.2e9), "cached": (0.5, 7e9), "cached (HF cache)": (0.5, 6.5e9), "slots": (1.9, 1.9e10),
          "int8": (5.1, 3.6e10), "paged": (1.9, 1.8e10), "paged + int8": (5.1, 3.4e10)}  # fmt: skip
STEPS = [step("cached, 1 request", 11.0, 0.0, 18.0, 8.0), step("slots, 8 requests", 11.6, 8.0, 30.0, 9.0)]

GAIN = "32 at once: 8.9 times the tokens/s of 1, each at 28% speed"
PICTURES = {
    "steps": (lambda: decomposition(STEPS), "Largest in each step: kernels that reach neither limit, 49% to 51%"),
    "steps that differ": (
        lambda: decomposition(
            [step("naive, 1 request", 11.0, 120.0, 100.0, 8.0, high=9), step("fast, 1 request", 0.5, 0.0, 0.04, 0.01)]
        ),
        "naive, 1 request: 50% arithmetic; fast, 1 request: 91% reading",
    ),
    "frontier": (lambda: frontier(FRONTIER), f"int8, {GAIN}"),
    "frontier, many that lie close": (lambda: frontier(CROWD), f"fast, {GAIN}"),
    "frontier, one point": (
        lambda: frontier(result("frontier", {"paged": sharing(40, at_once=(4,))})),
        "paged is fastest with 4 at once: 128 tokens/s",
    ),
    "saturation": (lambda: saturation(LOAD), "int8 answers most, 3.4 requests/s, and has its knee at 4 offered"),
    "no saturation": (lambda: saturation(CALM), "No engine is saturated at 3 requests/s"),
    "goodput": (lambda: goodput(LOAD, 400, 50), "int8 serves most in time: 3.4 requests/s, at 4 offered"),
    "no goodput": (lambda: goodput(LOAD, 1, 50), "No engine meets these limits at any rate"),
    "roofline": (
        lambda: roofline(224e9, 48.5e9, LADDER),
        "cached comes nearest to the roof: 29% of what it could reach",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_headlines_are_computed_and_labels_keep_apart(name):
    draw, caption = PICTURES[name]
    check_picture(draw)
    assert head(draw()) == caption


def test_bars_of_a_step_are_as_long_as_its_parts():
    bars = [bar for bar in decomposition(STEPS).axes[0].patches if bar.get_width() or bar.get_x()]
    assert [bar.get_width() for bar in bars[:3]] == [11, 0, 18] and bars[3].get_x() == 29
    assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(58.6)


def test_points_that_lie_on_each_other_have_one_number():
    texts = [text.get_text() for text, _ in drawn_texts(frontier(FRONTIER))]
    assert "1 to 8" in texts and texts.count("32") == 2


def test_labels_stay_within_the_axes():
    figure, ax = canvas(4, 3)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    label_points(figure, ax, [("a long name", x, y) for x in (0, 1) for y in (0, 1)])
    frame = ax.get_window_extent()
    assert all(frame.x0 <= text.get_window_extent().x0 and text.get_window_extent().x1 <= frame.x1 for text in ax.texts)


@pytest.mark.parametrize(
    ("rates", "reached", "expected"),
    [
        ((0.5, 1, 2, 4, 8), (0.5, 0.95, 1.8, 2.1, 2.2), 2),
        ((1, 2, 4, 8), (1, 2, 2, 1.5), 2),  # and falls behind later
        ((1, 2, 4), (1, 2, 4), None),
        ((1, 2, 4), (0.95, 1.8, 3.4), None),  # the last requests of a short run take their time: no knee
        ((3,), (1,), None),
    ],
)
def test_a_knee_is_where_more_load_gives_little_more(rates, reached, expected):
    assert knee(rates, reached) == expected


def test_goodput_falls_where_the_queue_breaks_the_limit():
    paged = goodput(LOAD, 400, 50).axes[0].lines[1]
    assert list(paged.get_xdata()) == [0.5, 1, 2, 4, 8]
    assert list(paged.get_ydata())[2:] == pytest.approx([2.0, 0.0, 0.0], abs=0.2)
    slow = goodput(LOAD, 400, 35).axes[0].lines
    assert max(slow[1].get_ydata()) == 0 < max(slow[2].get_ydata())  # TPOT of 40 and of 30 ms


def test_what_cannot_be_drawn_is_refused():
    empty = Result("frontier", [Row("paged", (Run(1, 0, 1, 1, 1.0),), x=1.0)], {}, FACTS)
    for draw in (frontier, saturation, lambda none: goodput(none, 1, 1), lambda none: decomposition([])):
        with pytest.raises(InvalidParameter, match="nothing to draw"):
            draw(empty)
    with pytest.raises(InvalidParameter, match="cached, 1 request"):
        decomposition(STEPS + STEPS)


def test_a_roof_without_engines_says_where_its_ridge_is():
    machine = Roofline(bandwidth=4e12, flops=1e15)
    found = roofline(machine.flops, machine.bandwidth, {"decode": (1, None), "prefill": (2000, 6e14)})
    assert head(found) == "Below 250 FLOP for each byte, this machine waits for memory"
    assert "of the roof" not in found.alt
