"""Served requests are timed from their intended arrival, on clocks that tests turn; waste and occupancy by counting."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from minfer_lib import CachedEngine, LLMEngine
from minfer_lib.bench import (
    HFSerial,
    HFStaticBatch,
    compare,
    fixed_lengths,
    frontier,
    ladder,
    latency_curve,
    load,
    mixed_lengths,
    padding_share,
    poisson_arrivals,
    serve,
    sweeps,
)
from minfer_lib.bench.probe_memory import recipe
from minfer_lib.bench.roofline import kv_token_bytes
from minfer_lib.bench.settings import FAST_LABEL
from minfer_lib.bench.workloads import Workload
from minfer_lib.engine.scheduler import Scheduler
from minfer_lib.errors import InvalidParameter
from minfer_lib.generation.params import SamplingParams
from minfer_lib.generation.request import RequestMetrics, RequestOutput
from minfer_lib.models.load import load_model


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def full_length(monkeypatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


class Clock:
    """Time that passes only where a test lets it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now, self.slept = now, []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


class Batches:
    """A static batch that takes ten seconds: its first tokens come after one, its answers at the end."""

    name = "batches"

    def __init__(self, lm, clock, batch_size=None):
        self.lm, self.clock, self.calls, self.reason = lm, clock, [], "length"
        if batch_size is not None:
            self.batch_size = batch_size

    def generate(self, prompts, params):
        self.calls.append(len(prompts))
        began = self.clock.now
        self.clock.now += 10
        return [
            RequestOutput(
                "0", 0, prompt, [1] * p.max_tokens, "", self.reason, None, None, None,
                RequestMetrics(began, began, began + 1, began + 5, began + 10, p.max_tokens),
            )
            for prompt, p in zip(prompts, params, strict=True)
        ]  # fmt: skip


class Steps(LLMEngine):
    """Our engine, each of whose steps takes a second of the test's clock."""

    def step(self):
        self.clock.now += 1.0
        return super().step()


def work_of(n: int, output_len: int = 3) -> Workload:
    params = [SamplingParams(max_tokens=output_len, ignore_eos=True)] * n
    return Workload("test", [[i + 1, 2, 3] for i in range(n)], params, "")


def times(served, name):
    return [getattr(out.metrics, name) for out in served.outputs]


# -- how requests are handed in -------------------------------------------------------------------------------------


def test_static_batches_take_who_has_arrived_when_the_one_before_ended(lm):
    clock = Clock()
    engine = Batches(lm, clock, batch_size=2)
    served = serve(engine, work_of(5), [0, 1, 2, 3, 40], sleep=clock.sleep)
    assert engine.calls == [1, 2, 1, 1] and served.began == 100.0
    assert times(served, "arrival") == [100, 101, 102, 103, 140]
    assert times(served, "queue_s") == [0, 9, 8, 17, 0]
    assert times(served, "ttft_s") == [1, 10, 9, 18, 1]
    assert times(served, "e2e_s") == [10, 19, 18, 27, 10]
    assert clock.slept == [10.0] and served.metrics.wall_s == 50  # idle from 30 to 40
    assert served.metrics.queue_ms == 8000 and served.metrics.ttft_ms == 9000
    assert served.requests_per_s == pytest.approx(5 / 50) and served.metrics.tokens_per_s == pytest.approx(15 / 50)


def test_an_engine_without_batches_gets_one_after_the_other_in_order_of_arrival(lm):
    clock = Clock()
    engine = Batches(lm, clock)
    served = serve(engine, work_of(3), [5, 0, 5], sleep=clock.sleep)
    assert engine.calls == [1, 1, 1]
    assert times(served, "queue_s") == [5, 0, 15]  # of equal arrivals the first of the workload goes first
    assert [out.prompt_token_ids[0] for out in served.outputs] == [1, 2, 3]


def test_our_engine_takes_a_request_after_the_step_in_which_it_came(lm):
    clock = Clock()
    engine = Steps(lm, max_num_seqs=2, clock=clock, trace=True)
    served = serve(engine, work_of(3, output_len=4), [0, 1.5, 30.25], sleep=clock.sleep)
    assert times(served, "arrival") == [100, 101.5, 130.25]
    assert times(served, "ttft_s") == [1, 1.5, 1]  # the second one waits for the step that it came in
    assert times(served, "first_scheduled") == [101, 103, 131.25]
    assert times(served, "finished") == [104, 106, 134.25]
    assert clock.slept == [24.25] and len(served.steps) == len(engine.steps) == 10
    assert [len(step.chunks) for step in served.steps] == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    again = serve(engine, work_of(1, output_len=4), sleep=clock.sleep)
    assert len(again.steps) == 4 and len(engine.steps) == 14


def test_the_arrival_is_the_intended_one_however_late_it_is_noticed(lm):
    """Eight requests at once, one slot, eight steps each; and one that comes in the middle of a step."""
    clock = Clock()
    engine = Steps(lm, max_num_seqs=1, clock=clock)
    served = serve(engine, work_of(8, output_len=8), sleep=clock.sleep)
    assert times(served, "ttft_s") == [1 + 8 * i for i in range(8)]
    assert times(served, "e2e_s") == [8 * (i + 1) for i in range(8)]
    slow_step = Steps(lm, max_num_seqs=1, clock=clock)
    late = serve(slow_step, work_of(2, output_len=1), [0, 0.1], sleep=clock.sleep)
    assert times(late, "ttft_s") == pytest.approx([1, 1.9])  # noticed 0.9 s after it came


def test_tokens_are_those_of_generate_whatever_the_arrivals(lm):
    work = mixed_lengths(lm, 6, (3, 30), (2, 12))
    wanted = [out.token_ids for out in CachedEngine(lm).generate(work.prompts, work.params)]
    arrivals = [0, 0.002, 0.03, 0.001, 0.05, 0.0]
    for engine in (LLMEngine(lm, max_num_seqs=3), HFStaticBatch(lm, 2), HFSerial(lm), CachedEngine(lm)):
        served = serve(engine, work, arrivals)
        assert [out.token_ids for out in served.outputs] == wanted, engine.name
        for out, arrival in zip(served.outputs, arrivals, strict=True):
            moment = out.metrics
            assert moment.arrival == served.began + arrival
            assert moment.arrival <= moment.first_scheduled < moment.first_token <= moment.finished
        run = served.metrics
        assert 0 <= run.queue_ms <= run.ttft_ms <= run.e2e_ms and run.queue_p95_ms is None


def test_arrivals_come_from_the_workload_unless_given(lm):
    clock = Clock()
    work = work_of(2).arriving([0, 50])
    assert times(serve(Batches(lm, clock), work, sleep=clock.sleep), "queue_s") == [0, 0]
    assert times(serve(Batches(lm, clock), work, [0, 0], sleep=clock.sleep), "queue_s") == [0, 10]
    assert times(serve(Batches(lm, clock), work_of(2), sleep=clock.sleep), "queue_s") == [0, 10]


def test_what_cannot_be_served_is_refused(lm):
    with pytest.raises(InvalidParameter, match="3 arrivals were given for 2 requests"):
        serve(CachedEngine(lm), work_of(2), [0, 1, 2])
    two = Workload("two", [[1, 2]], [SamplingParams(n=2, temperature=1.0)], "")
    with pytest.raises(InvalidParameter, match="n > 1"):
        serve(CachedEngine(lm), two)


def test_an_interrupt_ends_the_run_and_leaves_the_engine_empty(lm):
    clock = Clock()
    engine = Steps(lm, clock=clock)

    def interrupt(seconds):
        raise KeyboardInterrupt

    engine.generate([1, 2], SamplingParams(max_tokens=1, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        serve(engine, work_of(2), [0, 50], sleep=interrupt)
    assert not engine.has_unfinished()
    engine.runner.forward, forward = interrupt, engine.runner.forward
    with pytest.raises(KeyboardInterrupt):
        serve(engine, work_of(2, output_len=9))
    engine.runner.forward = forward
    engine.step()
    assert not engine.has_unfinished() and engine.cache.blocks_used == 0
    aborting = Batches(lm, clock, batch_size=1)
    aborting.reason = "abort"  # how a serial engine answers an interrupt
    with pytest.raises(KeyboardInterrupt):
        serve(aborting, work_of(3))
    assert aborting.calls == [1]


def test_other_requests_in_the_engine_do_not_disturb(lm):
    engine = LLMEngine(lm)
    engine.add_request([9, 8, 7], SamplingParams(max_tokens=2, ignore_eos=True), request_id="stranger")
    served = serve(engine, work_of(2))
    assert [out.prompt_token_ids[0] for out in served.outputs] == [1, 2]


# -- padding --------------------------------------------------------------------------------------------------------


def counting_rows(lm, counts):
    """Counts what really goes through the model: rows of token ids."""

    def before(module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        counts.append(ids.numel())

    return lm.model.register_forward_pre_hook(before, with_kwargs=True)


@pytest.mark.parametrize("make", [HFSerial, lambda lm: HFStaticBatch(lm, 4), lambda lm: LLMEngine(lm, max_num_seqs=4)])
def test_padding_share_is_what_the_model_was_given_in_vain(lm, make):
    work = mixed_lengths(lm, 7, (3, 40), (2, 15))
    engine, rows = make(lm), []
    hook = counting_rows(lm, rows)
    try:
        served = serve(engine, work)
    finally:
        hook.remove()
    needed = sum(p + n - 1 for p, n in zip(work.prompt_lens, work.output_lens, strict=True))
    assert served.metrics.padding_share == pytest.approx(1 - needed / sum(rows))
    assert (served.metrics.padding_share > 0.1) == isinstance(engine, HFStaticBatch)
    assert (served.metrics.padding_share == 0) != isinstance(engine, HFStaticBatch)


def test_padding_of_a_static_batch_by_hand(lm):
    baseline = HFStaticBatch(lm, 2)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    baseline.generate([[1] * 2, [1] * 6, [1] * 5], params)
    # the first batch: 2 rows of 6 + 3 steps, of which 2 and 6 + 3 are needed; the second: one row of 5 + 1
    assert baseline.computed_tokens == 18 + 6 and baseline.padding_share() == pytest.approx(7 / 24)
    baseline.generate([[1] * 5], params[:1])
    assert baseline.padding_share() == 0


def test_padding_share_is_in_a_comparison_and_unknown_where_nobody_counts(lm):
    work = mixed_lengths(lm, 4, (3, 20), (2, 9))
    found = compare(HFStaticBatch(lm, 4), LLMEngine(lm), CachedEngine(lm), workload=work, repeats=2, show=False)
    shares = [row.padding_share for row in found.rows]
    assert shares[0] == pytest.approx(share_of_one_batch(work)) and shares[1:] == [0.0, None]
    assert padding_share(0, []) == 0.0


def share_of_one_batch(work):
    rows = len(work.prompts) * (max(work.prompt_lens) + max(work.output_lens) - 1)
    return 1 - sum(p + n - 1 for p, n in zip(work.prompt_lens, work.output_lens, strict=True)) / rows


# -- the rest of the harness knows the engine -----------------------------------------------------------------------


def test_the_row_of_slots_shows_what_slots_reserve(lm):
    work = mixed_lengths(lm, 5, (3, 20), (2, 9))
    engine = LLMEngine(lm, max_num_seqs=8, max_model_len=100)
    row = compare(HFSerial(lm), engine, workload=work, repeats=1, show=False).row("slots")
    assert row.tokens == "same" and not row.warnings and row.concurrency > 1
    assert row.kv_reserved == 8 * 100 * kv_token_bytes(lm)
    longest = max(p + n - 1 for p, n in zip(work.prompt_lens, work.output_lens, strict=True))
    assert longest * kv_token_bytes(lm) < row.kv_used < row.kv_held < row.kv_reserved
    assert row.kv_held == 5 * 100 * kv_token_bytes(lm)  # whole slots, of the five requests alone
    assert row.kv_waste == 1 - row.kv_used / row.kv_held > 0.5


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_row_of_pages_shows_what_its_blocks_hold(lm, block_size):
    work = mixed_lengths(lm, 6, (3, 20), (2, 9))
    slots = LLMEngine(lm, max_num_seqs=3, max_model_len=100)
    paged = LLMEngine(lm, kv_cache="paged", max_num_seqs=3, max_model_len=100, block_size=block_size, trace=True)
    found = compare(slots, paged, workload=work, repeats=2, show=False)
    row, per_token = found.row("paged"), kv_token_bytes(lm)
    fullest = max((step.kv_tokens, step.kv_held) for step in paged.steps)
    assert (row.kv_used, row.kv_held) == (fullest[0] * per_token, fullest[1] * per_token)
    assert row.tokens == "same" and row.kv_used == found.row("slots").kv_used
    assert 0 <= row.kv_held - row.kv_used < 3 * block_size * per_token  # less than a block for each that runs
    assert row.kv_held % (block_size * per_token) == 0 and row.kv_held < found.row("slots").kv_held


def test_a_run_does_not_profit_from_those_before_it(lm):
    work = fixed_lengths(lm, 3, 40, 4)
    engine = LLMEngine(lm, kv_cache="paged", max_model_len=64)
    compare(engine, workload=work, repeats=3, show=False)
    assert engine.stats()["hit_tokens"] == 0  # the same prompts four times
    engine.generate(work.prompts, work.params)
    assert engine.stats()["hit_tokens"] == 3 * 32
    engine.reset_stats()
    assert engine.stats()["kv_peak_used_tokens"] == engine.stats()["blocks_cached"] == 0
    engine.check_invariants()


def test_the_fullest_moment_is_that_of_the_run(lm):
    engine = LLMEngine(lm, max_model_len=64)
    large = compare(engine, workload=fixed_lengths(lm, 4, 30, 8), repeats=1, show=False).rows[0]
    small = compare(engine, workload=fixed_lengths(lm, 1, 5, 3), repeats=1, show=False).rows[0]
    per_token = kv_token_bytes(lm)
    assert large.kv_used == 4 * (30 + 7) * per_token and large.kv_held == 4 * 64 * per_token
    assert small.kv_used == (5 + 2) * per_token and small.kv_held == 64 * per_token


def test_the_ladder_has_slots_and_an_engine_can_be_made_again(lm):
    found = ladder(lm, workload=fixed_lengths(lm, 2, 4, 3), repeats=1, show=False)
    assert found.row("slots").tokens == "same" and found.row("HF continuous").tokens == "same"
    made = recipe(LLMEngine(lm, max_num_seqs=3, max_num_batched_tokens=77, max_model_len=50))
    again = LLMEngine(lm, **made["options"])
    assert (again.max_num_seqs, again.max_num_batched_tokens, again.max_model_len) == (3, 77, 50)
    paged = LLMEngine(lm, "paged", block_size=7, num_blocks=9, enable_prefix_caching=False, backend="torch")
    again = LLMEngine(lm, **recipe(paged)["options"])
    assert (again.cache.block_size, again.cache.num_blocks, again.cache.enable_prefix_caching) == (7, 9, False)
    assert again.backend.name == "torch"
    with pytest.raises(InvalidParameter, match="cannot be made again"):
        recipe(LLMEngine(lm, scheduler=type("Mine", (Scheduler,), {})))


# -- latency against rate -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve(lm):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MINFER_FAST", raising=False)
        engines = [HFStaticBatch(lm, 2), ("ours", LLMEngine(lm, max_num_seqs=2))]
        return latency_curve(engines, mixed_lengths(lm, 4, (3, 10), (2, 5)), [200, 50, math.inf], repeats=2)


def test_a_curve_has_a_row_for_each_engine_and_rate(curve):
    assert curve.kind == "latency" and curve.engines == ["HF padded batch", "ours"] and curve.xs == [50, 200, math.inf]
    assert [row.x for row in curve.series("ours")] == [50, 200, math.inf] and len(curve.rows) == 6
    row = curve.row("ours", 200)
    assert len(row.runs) == 2 and row.e2e_ms > row.ttft_ms > 0 and row.e2e_p95_ms is None
    assert row.requests_per_s == pytest.approx(sum(4 / run.wall_s for run in row.runs) / 2)
    with pytest.raises(InvalidParameter, match="there are `HF padded batch` or `ours`"):
        curve.series("nobody")
    with pytest.raises(InvalidParameter, match="3 was not measured; there are `50`"):
        curve.row("ours", 3)


def test_a_curve_is_kept_shown_and_drawn(curve, tmp_path):
    again = load(curve.save(tmp_path / "curve.json"))
    assert again == curve and again.recorded and again.title.startswith("Recorded on 20")
    text = str(curve)
    assert "Poisson arrivals, seed 0" in text and "inf" in text and "TTFT low to high" in text
    assert list(curve.to_frame().index.names) == ["engine", "rate/s"]
    curve.plot(save=tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_bytes().startswith(b"<?xml")


def test_a_frontier_has_a_row_for_each_number_and_one_for_a_serial_engine(lm):
    engines = [CachedEngine(lm), ("ours", LLMEngine(lm, max_num_seqs=3))]
    found = frontier(engines, (1, 3), prompt_len=5, output_len=4, repeats=2)
    assert [(row.engine, row.x) for row in found.rows] == [("cached", 1), ("ours", 1), ("ours", 3)]
    assert found.row("ours", 3).steps == 4 and found.row("ours", 3).output_tokens == 12
    assert len(found.row("ours", 1).runs) == 2 and "at once" in str(found)
    for wrong in ((), (1, 1), (0,)):
        with pytest.raises(InvalidParameter, match="at_once"):
            frontier(engines, wrong)


def test_each_repeat_has_its_own_pattern_which_all_systems_share(lm, monkeypatch):
    seen = {"a": [], "b": []}

    def on_its_own_clock(engine, work, arrivals=None):
        seen[engine.name].append(arrivals)
        return serve(engine, work, arrivals, sleep=engine.clock.sleep)

    engines = [Batches(lm, Clock()), Batches(lm, Clock())]
    engines[0].name, engines[1].name = seen
    monkeypatch.setattr(sweeps, "serve", on_its_own_clock)
    curve = latency_curve(engines, work_of(2), [0.01, 0.02], repeats=3, seed=7)
    patterns = [poisson_arrivals(2, rate, seed) for rate in (0.01, 0.02) for seed in (7, 8, 9)]
    assert seen == {"a": patterns, "b": patterns} and len(set(patterns)) == 6
    for rate in curve.xs:
        ours, theirs = (curve.row(name, rate) for name in "ab")
        assert [run.ttft for run in ours.runs] == [run.ttft for run in theirs.runs]
    assert "medians of 3 runs" in curve.notes


def test_answers_that_differ_are_said_at_their_point(lm):
    class Altered(LLMEngine):
        name = "altered"

        def step(self):
            return [dataclasses.replace(out, token_ids=[*out.token_ids[:-1], 0, 0]) for out in super().step()]

    curve = latency_curve([LLMEngine(lm), Altered(lm)], work_of(2), [100])
    assert any("altered: its tokens are not those of the first row" in text for text in curve.warnings)
    assert any("made 4 tokens instead of 3" in text for text in curve.warnings) and "WARNING" in str(curve)


def test_what_is_no_curve_is_refused_and_fast_mode_says_so(lm, monkeypatch):
    engine = CachedEngine(lm)
    with pytest.raises(InvalidParameter, match="comparison of nothing"):
        latency_curve([], work_of(1), [1])
    with pytest.raises(InvalidParameter, match="Two engines of the name"):
        latency_curve([engine, engine], work_of(1), [1])
    for rates in ([], [1, 1], [0], [-2], np.array([]), np.array([-1.0, 2.0])):
        with pytest.raises(InvalidParameter, match="rate"):
            latency_curve([engine], work_of(1), rates)
    with pytest.raises(InvalidParameter, match="repeats must be"):
        latency_curve([engine], work_of(1), [1], repeats=0)
    monkeypatch.setenv("MINFER_FAST", "1")
    curve = latency_curve([engine], work_of(1), [1000], repeats=5)
    assert FAST_LABEL in curve.notes and len(curve.rows[0].runs) == 1 and curve.workload["fast"]
