"""A comparison measures what it says, checks what it compares, and says what is not equal."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from minfer_lib import CachedEngine, NaiveEngine, bench
from minfer_lib.bench import (
    HFSerial,
    HFStaticBatch,
    Result,
    Row,
    compare,
    comparison,
    course,
    fixed_lengths,
    ladder,
    load,
    load_recorded,
    make_engine,
    mixed_lengths,
    peak_memory,
    probe_memory,
    reported,
    reported_rows,
    rungs,
    tables,
)
from minfer_lib.bench.comparison import Interrupted, held_between_runs
from minfer_lib.bench.results import RECORDED
from minfer_lib.bench.roofline import floor_ms, kv_token_bytes
from minfer_lib.bench.settings import FAST_LABEL
from minfer_lib.bench.verify import judge_lengths, judge_tokens
from minfer_lib.bench.watch import Disturbance
from minfer_lib.errors import InvalidParameter, MinferError, UnsupportedModel
from minfer_lib.models.load import load_model


@pytest.fixture(autouse=True, scope="module")
def full_length():
    """Of the module, since `found` is too: CI sets MINFER_FAST, which would shorten the workload that it measures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MINFER_FAST", raising=False)
        yield


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


@pytest.fixture(scope="module")
def found(lm) -> Result:
    """Baselines and both engines on unequal lengths."""
    engines = HFSerial(lm), HFStaticBatch(lm, 2), NaiveEngine(lm), CachedEngine(lm)
    return compare(*engines, workload=mixed_lengths(lm, 3, (3, 20), (2, 6)), repeats=2, show=False)


class Altered:
    """An engine around another that spoils its answers."""

    name = "altered"

    def __init__(self, lm, change):
        self.lm, self.change, self.calls = lm, change, 0
        self.inner = CachedEngine(lm)

    def generate(self, prompts, params):
        self.calls += 1
        return [self.change(out) for out in self.inner.generate(prompts, params)]


def with_tokens(change):
    return lambda out: dataclasses.replace(out, token_ids=change(out.token_ids))


# -- running --------------------------------------------------------------------------------------------------------


def test_rows_hold_what_was_measured(lm, found):
    assert [row.engine for row in found.rows] == ["HF generate", "HF padded batch", "naive", "cached"]
    assert [row.tokens for row in found.rows] == ["", "same", "same", "same"]
    assert all("disturbed" in warning for warning in found.warnings)
    work = mixed_lengths(lm, 3, (3, 20), (2, 6))
    for row in found.rows:
        assert len(row.runs) >= 2 and row.output_tokens == sum(work.output_lens) and row.requests == 3
        low, high = row.spread()
        assert 0 < low <= row.tokens_per_s <= high and {low, high} <= {run.tokens_per_s for run in row.runs}
        assert len(row.runs[0].ttft) == 3 and row.ttft_p95_ms is None  # three requests have no 95th percentile
        assert row.floor_ms == pytest.approx(floor_ms(lm, row.concurrency, row.kv_tokens), rel=0.9)
        assert row.share == pytest.approx(row.floor_ms / row.tpot_ms)
    ratio = found.row("cached").tokens_per_s / found.row("naive").tokens_per_s
    assert found.ratio("cached", "naive") == pytest.approx(ratio)
    assert found.row("cached").steps == sum(work.output_lens) == found.row("HF generate").steps
    assert found.row("HF padded batch").tokens_per_step > 1 == found.row("cached").tokens_per_step
    assert [round(row.concurrency, 6) for row in found.rows if row.engine != "HF padded batch"] == [1, 1, 1]
    with pytest.raises(InvalidParameter, match="there are `HF generate`"):
        found.row("nobody")


def test_kv_memory_reserved_and_used(lm, found):
    per_token = kv_token_bytes(lm)
    work = mixed_lengths(lm, 3, (3, 20), (2, 6))
    longest = max(p + n - 1 for p, n in zip(work.prompt_lens, work.output_lens, strict=True))
    cached = found.row("cached")
    assert (cached.kv_reserved, cached.kv_used) == (2048 * per_token, longest * per_token)
    assert found.row("HF generate").kv_used == longest * per_token
    assert found.row("HF padded batch").kv_reserved > found.row("HF padded batch").kv_used
    assert found.row("naive").kv_reserved is None
    # what stays on the device while others run: the buffer of "own", nothing of what is made for each call
    engines = HFStaticBatch(lm, 2), CachedEngine(lm, "hf"), NaiveEngine(lm), CachedEngine(lm, max_model_len=64)
    for engine in engines:
        engine.generate([[1, 2, 3]])
    assert [held_between_runs(engine) for engine in engines] == [0, 0, 0, 64 * per_token]


def test_every_engine_has_its_turn_in_every_round(lm):
    order = []

    class Watched(CachedEngine):
        def generate(self, prompts, params=None, **options):
            order.append(self.name)
            return super().generate(prompts, params, **options)

    engines = [Watched(lm) for _ in "abc"]
    for engine, name in zip(engines, "abc", strict=True):
        engine.name = name
    compare(*engines, workload=fixed_lengths(lm, 1, 3, 2), repeats=3, show=False)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # warm-up, then three rounds


class Scripted:
    """An engine each of whose runs takes as long as a script says, on a clock that stands still otherwise."""

    def __init__(self, lm, clock, name, seconds, disturbed=()):
        self.lm, self.clock, self.name, self.inner = lm, clock, name, CachedEngine(lm)
        self.seconds, self.disturbed, self.lengths = itertools.chain([0.0], itertools.cycle(seconds)), disturbed, []

    def generate(self, prompts, params):
        self.lengths.append(params[0].max_tokens)
        outputs = self.inner.generate(prompts, params)
        self.clock.now += next(self.seconds)
        return outputs


@pytest.fixture()
def clock(monkeypatch):
    """Time for `compare` alone; nothing disturbs a run unless its engine says so."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(comparison, "time", clock)
    monkeypatch.setattr(comparison.Watch, "seen", lambda self: Disturbance())
    return clock


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [([1.0], 3), ([1.0, 1.05, 0.98], 3), ([1.0, 2.0, 3.0, 1.5], 10), ([3.0, *[1.0] * 30], 5)],
    ids=["steady", "within 10 %", "never steady", "one slow run, then steady"],
)
def test_rounds_go_on_until_the_quartiles_lie_within_ten_per_cent(lm, clock, seconds, runs):
    engine = Scripted(lm, clock, "one", seconds)
    row = compare(engine, workload=fixed_lengths(lm, 1, 3, 5), show=False).rows[0]
    script = list(itertools.islice(itertools.cycle(seconds), runs))
    assert [run.wall_s for run in row.runs] == pytest.approx(script) and engine.lengths == [5] * (runs + 1)
    assert row.steady == (runs < 10)


def test_repeats_seconds_and_rows_that_run_once(lm, clock):
    def measured(**options):
        engines = Scripted(lm, clock, "slow", [10.0]), Scripted(lm, clock, "fast", [1.0])
        found = compare(*engines, workload=fixed_lengths(lm, 1, 3, 5), show=False, **options)
        return [len(row.runs) for row in found.rows], [engine.lengths for engine in engines], found

    assert measured(repeats=4)[0] == [4, 4]
    assert measured(seconds=20)[0] == [2, 2] and measured(seconds=0)[0] == [1, 1]
    runs, lengths, found = measured(once=["slow"])
    assert runs == [1, 3] and lengths == [[2, 5], [5, 5, 5, 5]]
    assert "slow: one run, after a short warm-up" in found.notes and "(one run)" not in str(found)
    with pytest.raises(InvalidParameter, match="'warp' was to run once"):
        measured(once=["warp"])
    for wrong in (-1, "long", float("nan")):
        with pytest.raises(InvalidParameter, match="seconds must be"):
            measured(seconds=wrong)


def test_a_disturbed_run_is_made_again_kept_and_left_out(lm, clock, monkeypatch):
    seen = iter([Disturbance(1.5, 0.0, 1.0), *[Disturbance()] * 9])
    monkeypatch.setattr(comparison.Watch, "seen", lambda self: next(seen))
    row = compare(
        Scripted(lm, clock, "one", [9.0, 1.0, 1.0, 1.0]), workload=fixed_lengths(lm, 1, 3, 5), repeats=3, show=False
    ).rows[0]
    assert [run.disturbed for run in row.runs] == [True, False, False, False] and row.spread()[0] == 5.0
    assert row.warnings == ("1 of 4 runs were disturbed, other programs took up to 1.5 CPUs: left out",)


def test_a_machine_that_is_never_quiet_is_said(lm, clock, monkeypatch):
    monkeypatch.setattr(comparison.Watch, "seen", lambda self: Disturbance(1.5, 0.0, 1.0))
    found = compare(Scripted(lm, clock, "one", [1.0]), workload=fixed_lengths(lm, 1, 3, 5), repeats=3, show=False)
    assert len(found.rows[0].runs) == 3 + comparison.AGAIN and "do not trust" in found.warnings[0]
    assert "WARNING: one: 6 of 6 runs were disturbed" in str(found) and "WARNING" in found._repr_html_()


def test_what_a_run_needs_once_is_not_counted(lm, clock):
    engine = Scripted(lm, clock, "one", [3.0])
    engine.aside_s = 2.0
    row = compare(engine, workload=fixed_lengths(lm, 1, 3, 5), repeats=1, show=False).rows[0]
    assert row.runs[0].wall_s == pytest.approx(1.0)


def test_a_device_has_done_its_work_before_and_after_a_run(lm, monkeypatch):
    calls = []
    monkeypatch.setattr(comparison, "synchronize", lambda device: calls.append("wait"))
    engine = Altered(lm, lambda out: calls.append("token") or out)
    compare(engine, workload=fixed_lengths(lm, 1, 3, 2), repeats=1, show=False)
    assert calls == ["token", "wait", "token", "wait"]  # a warm-up, and one timed run


def test_rows_whose_runs_overlap_do_not_differ(lm, clock):
    engines = [Scripted(lm, clock, name, [s, s * 1.3]) for name, s in (("a", 1.0), ("b", 1.2), ("c", 2.0))]
    found = compare(*engines, workload=fixed_lengths(lm, 1, 3, 5), repeats=4, show=False)
    assert found.compared("b", "a") == "no difference" and not found.differs("b", "a")
    assert found.compared("c", "a") == "0.50x" and found.compared("a", "a") == "1.00x"
    for text in (str(found), found._repr_html_()):
        assert "no difference" in text and "0.50x" in text and "3.85 to 5.00" in text
    assert list(found.to_frame()["tokens/s low"]) == pytest.approx([5 / 1.3, 5 / 1.56, 5 / 2.6])


def test_wrong_tokens_are_never_silent(lm):
    work = fixed_lengths(lm, 2, 5, 4)
    wrong = Altered(lm, with_tokens(lambda ids: [*ids[:2], (ids[2] + 1) % 256, *ids[3:]]))
    found = compare(HFSerial(lm), wrong, workload=work, repeats=1, show=False)
    assert found.row("altered").tokens == "DIFFER"
    assert found.warnings == ["altered: its tokens are not those of the first row, from request 0 at token 2 on"]
    for text in (str(found), found._repr_html_()):
        assert "WARNING: altered: its tokens are not those" in text and "DIFFER" in text


def test_missing_tokens_are_never_silent(lm):
    short = Altered(lm, with_tokens(lambda ids: ids[:-1]))
    found = compare(HFSerial(lm), short, workload=fixed_lengths(lm, 2, 5, 4), repeats=1, show=False)
    assert any("request 0 made 3 tokens instead of 4" in warning for warning in found.warnings)


def test_failed_requests_are_never_silent(lm):
    failed = Altered(lm, lambda out: dataclasses.replace(out, finish_reason="error", error="out of memory"))
    found = compare(failed, workload=fixed_lengths(lm, 2, 5, 4), repeats=1, show=False)
    assert found.warnings == ["altered: 2 of 2 requests failed: out of memory"] and found.rows[0].failed == 2


def test_tokens_of_other_weights_are_described_and_not_judged(lm):
    other = load_model("tiny-random", device="cpu")
    found = compare(CachedEngine(lm), ("other", Altered(other, with_tokens(lambda ids: [*ids[:3], 0]))),
                    workload=fixed_lengths(lm, 2, 5, 4), repeats=1, show=False)  # fmt: skip
    assert found.row("other").tokens == "75 % until they part" and not found.warnings
    assert any(note.startswith("other: runs LanguageModel") for note in found.notes)


def test_judgements():
    assert judge_tokens([[[1, 2]], [[1, 2]]], [[1, 2]], exact=True) == ("same", [])
    assert judge_tokens([[[1, 2]], [[1, 3]]], [[1, 2]], exact=False) == ("75 % until they part", [])
    word, warnings = judge_tokens([[[1, 2], [3]]], [[1, 2], [3, 4]], exact=True)
    assert word == "DIFFER" and "from request 1 at token 1 on" in warnings[0]
    assert judge_lengths([[[1], [1, 2]]], [1, 2]) == [] == judge_lengths([[[1]]], None)
    assert "instead of 3" in judge_lengths([[[1], [1, 2]]], [1, 3])[0]
    assert "1 answers to 2 requests" in judge_lengths([[[1]]], [1, 2])[0]


def test_an_interrupt_ends_the_comparison(lm):
    stopped = Altered(lm, lambda out: dataclasses.replace(out, finish_reason="abort"))
    with pytest.raises(KeyboardInterrupt):
        compare(stopped, workload=fixed_lengths(lm, 1, 3, 2), show=False)


def test_an_interrupt_keeps_what_is_done(lm, monkeypatch):
    monkeypatch.setattr(comparison.Watch, "seen", lambda self: Disturbance())

    def stop_in(name, call):
        """An engine whose call of this number is interrupted; the first warms up."""
        calls = iter(range(99))

        class Stopped(CachedEngine):
            def generate(self, prompts, params=None, **options):
                if next(calls) == call:
                    raise KeyboardInterrupt
                return super().generate(prompts, params, **options)

        engine = Stopped(lm)
        engine.name = name
        return engine

    work = fixed_lengths(lm, 1, 3, 2)
    for call, rows, repeats, note in (
        (1, ["first"], [1], "interrupted; not measured: second, third"),
        (3, ["first", "second", "third"], [3, 2, 3], "interrupted"),
    ):
        with pytest.raises(Interrupted) as stopped:
            engines = stop_in("first", None), stop_in("second", call), stop_in("third", None)
            compare(*engines, workload=work, repeats=3, show=False)
        found = stopped.value.comparison
        assert [row.engine for row in found.rows] == rows and found.notes[-1] == note
        assert [len(row.runs) for row in found.rows] == repeats and all(row.tokens_per_s > 0 for row in found.rows)


def test_an_interrupt_while_memory_is_measured_keeps_the_rows(lm, monkeypatch):
    def interrupted(engine, workload):
        raise KeyboardInterrupt

    monkeypatch.setattr(probe_memory, "peak_memory", interrupted)
    with pytest.raises(Interrupted) as stopped:
        compare(CachedEngine(lm), workload=fixed_lengths(lm, 1, 3, 2), repeats=1, memory=True, show=False)
    assert "peak memory is not known" in stopped.value.comparison.notes[-1]


def test_mistakes_are_told_before_anything_is_measured(lm):
    unmeasured = Altered(lm, lambda out: pytest.fail("measured in vain"))
    for options in ({"notes": 5}, {"notes": "one"}, {"notes": [5]}, {"reported": ["row"]}, {"repeats": 0}):
        with pytest.raises(InvalidParameter, match=next(iter(options))):
            compare(unmeasured, **options)
    for pair in ((5, unmeasured), ("a", unmeasured, 3)):
        with pytest.raises(InvalidParameter, match="must be an engine, or"):
            compare(pair)


def test_what_cannot_be_compared_is_refused(lm):
    with pytest.raises(InvalidParameter, match="at least one"):
        compare()
    with pytest.raises(InvalidParameter, match=r"Two engines of the name 'cached'"):
        compare(CachedEngine(lm), CachedEngine(lm))
    for repeats in (0, True, 1.5):
        with pytest.raises(InvalidParameter, match="repeats"):
            compare(CachedEngine(lm), repeats=repeats)


def test_fast_mode_runs_once_and_is_labelled(lm, monkeypatch, capsys, clock):
    monkeypatch.setenv("MINFER_FAST", "1")
    engine = Altered(lm, lambda out: out)
    found = compare(engine, repeats=3)
    assert engine.calls == 2 and len(found.rows[0].runs) == 1 and found.workload["fast"]  # warm-up and one run
    assert capsys.readouterr().out.count(FAST_LABEL) == 1
    assert found._repr_html_().count(FAST_LABEL) == 1 and FAST_LABEL in str(dataclasses.replace(found, notes=()))


def test_reported_rows_stand_apart_with_their_source(lm):
    rows = reported_rows("mini-infer, batch 4")
    found = compare(CachedEngine(lm), workload=fixed_lengths(lm, 1, 3, 2), repeats=1, reported=rows, show=False)
    assert [row.kind for row in found.rows] == ["measured", "reported", "reported"]
    assert all(row.floor_ms is None and row.runs == () for row in found.rows[1:])
    text = str(found)
    assert "serial engine, batch 4 *" in text and "RTX 4090" in text and f"{15.81e9 / 2**20:,.0f}" in text
    assert list(found.to_frame()["ratio"]) == ["1.00x", "", ""]  # a ratio would compare two machines
    assert found._repr_html_().count("* not measured in this run") == 1
    assert "batch 4" not in found.plot().alt  # bars of another machine beside ours would compare the machines
    with pytest.raises(InvalidParameter, match="need a source"):
        reported("x", " ", tokens_per_s=1.0)
    with pytest.raises(InvalidParameter, match="there are `mini-infer, batch 1`"):
        reported_rows("nothing")


# -- peak memory ----------------------------------------------------------------------------------------------------


def test_peak_memory_of_a_fresh_process(lm):
    work = fixed_lengths(lm, 1, 8, 4)
    peak = peak_memory(CachedEngine(lm, max_model_len=64), work)
    assert 10_000_000 < peak.base <= peak.loaded <= peak.peak < peak.base + 10**9


def test_an_engine_is_made_again_with_its_options(lm):
    made = probe_memory.recipe(HFStaticBatch(lm, 3, max_model_len=50))
    assert made["options"] == {
        "batch_size": 3, "order": "arrival", "even": False, "static_cache": False, "max_model_len": 50
    }  # fmt: skip
    assert (made["module"], made["cls"]) == ("minfer_lib.bench.baselines", "HFStaticBatch")
    assert probe_memory.recipe(CachedEngine(lm, "hf"))["options"] == {"cache": "hf", "max_model_len": 2048}
    with pytest.raises(InvalidParameter, match="cannot be made again"):
        probe_memory.recipe(Altered(lm, lambda out: out))


def test_memory_that_cannot_be_measured_is_a_warning(lm):
    found = compare(
        Altered(lm, lambda out: out), workload=fixed_lengths(lm, 1, 3, 2), repeats=1, memory=True, show=False
    )
    assert found.rows[0].peak_bytes is None and "peak memory was not measured" in found.warnings[0]


def test_a_changed_model_is_not_measured_as_the_original(lm, monkeypatch):
    sent = {}

    def run(command, input, **options):
        sent.update(json.loads(input))
        return subprocess.CompletedProcess(command, 1, "", "noise\nthe reason")

    monkeypatch.setattr(probe_memory.subprocess, "run", run)
    with pytest.raises(MinferError, match="the reason"):
        peak_memory(CachedEngine(lm), fixed_lengths(lm, 1, 3, 2))
    sent["weight_bytes"] -= 1
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(sent)))
    with pytest.raises(SystemExit, match="was changed after it was loaded"):
        probe_memory.main()


# -- data and pictures ----------------------------------------------------------------------------------------------


def test_results_survive_a_file(found, tmp_path):
    path = found.save(tmp_path / "folder" / "run.json")
    again = load(path)
    assert again == found and again.recorded and again.title.startswith("Recorded on 20")
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]  # no temporary file is left
    assert path.stat().st_mode & 0o777 == 0o644
    assert again.save(path) and load(path) == found  # and it can be replaced


def test_what_is_no_result_is_refused_in_one_sentence(found, tmp_path):
    path = found.save(tmp_path / "odd.json")
    whole = json.loads(path.read_text())
    rows = whole["rows"]
    for change, complaint in (
        ({"kind": "x"}, "something else"),
        ({"minfer": 1}, "schema 1"),
        ({"rows": None}, "a part is bad"),
        ({"rows": [{**rows[0], "speed": 3}]}, "a part is bad"),
        ({"rows": [{**rows[0], "runs": [{"wall": 1}]}]}, "a part is bad"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(InvalidParameter, match=rf"odd\.json.*{complaint}"):
            load(path)
    for content in (None, "no json", "[]"):
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(InvalidParameter, match=r"odd\.json"):
            load(path)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_run_can_be_shown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # package data are found from anywhere
    found = load_recorded(path.stem)
    assert found.title.startswith("Recorded on 20") and found.provenance["date"] in str(found)
    assert len(found.to_frame(all=True)) == len(found.rows) and "<table" in found._repr_html_()


def test_recorded_runs_are_found_beside_the_notebooks(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found.save("results/some_run.json")
    assert load_recorded("some_run") == found
    with pytest.raises(InvalidParameter, match="some_run"):
        load_recorded("other_run")


def test_text_and_html_hold_the_same_cells(found):
    (table,) = tables.written(found)
    assert "peak MiB" not in table.columns and "TTFT p95" not in table.columns  # nobody has a figure for them
    text, html = str(found), found._repr_html_()
    for name, cells in table.iterrows():
        for cell in filter(None, [name, *cells]):
            assert cell in text and cell in html
    assert html.count("<tr") == 1 + len(found.rows) and "torch 2" in text and found.title in text
    wide = tables.text(found, all=True)
    assert all(heading in wide for heading in ("TPOT low to high", "KV held MiB", "weights MiB", "runs"))
    assert "TPOT low to high" not in text and "What the columns mean" in html


def test_unknown_figures_stay_empty():
    row = Row("nothing known")
    assert all(column.value(row) in (None, "") for column in tables.LADDER)
    assert tables.number(float("nan")) == "" == tables.number(None)


def test_a_picture_is_drawn_the_same_every_time(found, tmp_path):
    pictures = [tmp_path / name for name in ("one.svg", "two.svg")]
    for picture in pictures:
        found.plot(save=picture)
    content = pictures[0].read_bytes()
    assert content == pictures[1].read_bytes() and b"<dc:date>" not in content and content.startswith(b"<?xml")
    assert "cached" in found.plot().alt
    found.plot(save=tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


# -- the ladder -----------------------------------------------------------------------------------------------------


def test_the_ladder_has_every_rung(lm, capsys):
    found = ladder(lm, workload=fixed_lengths(lm, 1, 3, 2), repeats=1)
    expected = [rung.label for rung in rungs.RUNGS if rung.in_ladder and rung.device in ("", "cpu")]
    assert [row.engine for row in found.rows] == expected
    assert all(row.engine in capsys.readouterr().out for row in found.rows[:1])
    some = ladder(lm, ["cached", ("yours", CachedEngine(lm))], fixed_lengths(lm, 1, 3, 2), repeats=1, show=False)
    assert [row.engine for row in some.rows] == ["cached", "yours"]


def test_the_ladders_own_workload_is_that_of_the_course(lm):
    found = ladder(lm, ["naive", "hf-batch", "slots", "paged"], repeats=2, show=False)
    work = course(lm)
    assert found.workload["prompt_lens"] == work.prompt_lens and found.workload["output_lens"] == work.output_lens
    longest = max(p + n for p, n in zip(work.prompt_lens, work.output_lens, strict=True))
    per_token = kv_token_bytes(lm)
    assert found.row("slots").kv_reserved == 4 * longest * per_token  # four run at once
    assert len(found.row("naive").runs) == 1 and not any("token" in warning for warning in found.warnings)
    # What the chapters show with it: padded batches wait for their longest, slots and pages do not
    assert found.row("HF padded batch").steps > 1.4 * found.row("slots").steps
    assert found.row("slots").steps == found.row("paged").steps and found.row("naive").tokens_per_step == 1
    assert (
        found.row("HF padded batch").padding_share > 0.2 and found.row("paged").kv_waste < found.row("slots").kv_waste
    )
    limits = {"max_running": 2, "max_model_len": 80}
    small = ladder(lm, ["slots"], work, **limits, repeats=1, show=False).rows[0]
    assert small.kv_reserved == 2 * 80 * per_token


def test_memory_of_some_rows(lm, monkeypatch):
    asked = []

    def peak(engine, workload):
        asked.append(engine.name)
        return probe_memory.PeakMemory(1, 2, 3)

    monkeypatch.setattr(probe_memory, "peak_memory", peak)
    engines = NaiveEngine(lm), CachedEngine(lm)
    work = fixed_lengths(lm, 1, 3, 2)
    found = compare(*engines, workload=work, repeats=1, memory=["cached"], show=False)
    assert asked == ["cached"] and [row.peak_bytes for row in found.rows] == [None, 3]
    with pytest.raises(InvalidParameter, match="'warp' was asked for, and there is no such row"):
        compare(*engines, workload=work, memory=["warp"], show=False)


def test_rungs_make_the_engines_they_name(lm):
    for rung in rungs.RUNGS:
        engine = make_engine(rung.name, lm, max_model_len=64)
        told = {key: getattr(engine, key) for key in rung.options}
        assert engine.max_model_len == 64
        assert {key: getattr(value, "name", value) for key, value in told.items()} == rung.options
        assert engine.name == rung.label or not rung.in_ladder
    assert rungs.find("HF padded batch").name == "hf-batch"
    with pytest.raises(InvalidParameter, match="there are `hf`"):
        make_engine("warp", lm)


def test_an_engine_that_refuses_the_model_is_left_out_with_its_reason(lm, monkeypatch):
    def refuse(self, lm, **options):
        raise UnsupportedModel("it has no attention.")

    monkeypatch.setattr(CachedEngine, "__init__", refuse)
    found = ladder(lm, ["naive", "cached"], fixed_lengths(lm, 1, 3, 2), repeats=1, show=False)
    assert [row.engine for row in found.rows] == ["naive"]
    assert "cached left out: it has no attention." in found.notes
    with pytest.raises(UnsupportedModel, match="no attention"):
        ladder(lm, ["cached"], fixed_lengths(lm, 1, 3, 2), show=False)


def test_the_ladder_gives_long_workloads_room():
    lm = load_model("tiny-random", device="cpu")
    lm = dataclasses.replace(lm, max_model_len=4000)
    found = ladder(lm, ["hf"], fixed_lengths(lm, 1, 2060, 3), repeats=1, show=False)
    assert found.rows[0].output_tokens == 3


def test_no_module_hides_a_function_of_its_name():
    modules = {path.stem for path in Path(bench.__file__).parent.glob("*.py")}
    assert not modules & set(bench.__all__) and set(dir(bench)) == set(bench.__all__)
    assert all(getattr(bench, name) is not None for name in bench.__all__)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        bench.nothing_of_that_name  # noqa: B018
