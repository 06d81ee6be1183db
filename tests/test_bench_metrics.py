"""Metrics by hand-worked numbers, and what a machine says about itself."""

import dataclasses
import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minfer_lib.bench import Row, machine, metrics, watch
from minfer_lib.errors import InvalidParameter
from minfer_lib.generation.request import RequestMetrics, RequestOutput


def answer(prompt: int, tokens: int, first: float, last: float, finished: float | None = None, arrival: float = 0.0):
    """An output of `tokens` tokens whose first came at `first` and whose last came at `last` seconds."""
    times = RequestMetrics(arrival, arrival, first, last, last if finished is None else finished, tokens)
    return RequestOutput("0", 0, [1] * prompt, [2] * tokens, "", "length", None, None, None, times)


def test_definitions_on_one_request():
    run = metrics.measure([answer(prompt=10, tokens=5, first=0.3, last=0.7, arrival=0.1)], wall_s=0.8)
    assert run.ttft_ms == pytest.approx(200)
    assert run.tpot_ms == pytest.approx(100)  # 0.4 s over the four later tokens
    assert run.e2e_ms == pytest.approx(600)
    assert run.tokens_per_s == pytest.approx(5 / 0.8)
    assert (run.prompt_tokens, run.output_tokens) == (10, 5) and run.tokens_per_step is None
    assert metrics.measure([answer(10, 6, 0.3, 0.7)], 0.8, steps=3).tokens_per_step == 2


def test_one_token_outputs_have_no_tpot_and_divide_nothing_by_zero():
    run = metrics.measure([answer(3, 1, 0.2, 0.2), answer(3, 1, 0.2, 0.2)], wall_s=0.0)
    assert run.tpot_ms is None and run.tpot_p95_ms is None
    assert run.ttft_ms == pytest.approx(200)
    assert run.tokens_per_s == 0.0 and run.concurrency == 1.0 and run.kv_tokens == 0.0


def test_requests_without_a_token_count_as_failed_and_not_as_times():
    broken = RequestOutput("1", 0, [1], [], "", "error", None, "out of memory", None, RequestMetrics(0.0, finished=9.0))
    run = metrics.measure([answer(3, 2, 0.2, 0.4), broken], wall_s=1.0)
    assert run.failed == 1 and run.requests == 2
    assert run.e2e_ms == pytest.approx(400)
    assert metrics.measure([broken], 1.0).ttft_ms is None


def test_no_outputs_are_refused():
    with pytest.raises(InvalidParameter, match="without any output"):
        metrics.measure([], 1.0)


@pytest.mark.parametrize("values", [[5.0], [1.0, 2.0], [3.0, 1.0, 2.0], [4.0, 9.0, 1.0, 7.0, 2.5]])
@pytest.mark.parametrize("percent", [0, 50, 95, 100])
def test_percentile_is_that_of_numpy(values, percent):
    assert metrics.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_concurrency():
    assert metrics.mean_concurrency([(0, 1), (1, 2), (5, 6)]) == 1  # one after the other, with a pause
    assert metrics.mean_concurrency([(0, 2)] * 3) == 3  # a batch
    assert metrics.mean_concurrency([(0, 2), (1, 3)]) == pytest.approx(4 / 3)  # two at once for one of three seconds
    assert metrics.mean_concurrency([(0, 3), (1, 2)]) == pytest.approx(4 / 3)  # one inside the other
    assert metrics.mean_concurrency([]) == 1


def test_kv_tokens_by_counting():
    # prompt 10, 4 tokens: the three decode steps look at 11, 12 and 13 entries
    assert metrics.mean_kv_tokens([(10, 4)]) == pytest.approx((11 + 12 + 13) / 3)
    # with prompt 2, 2 tokens beside it: one more step, which looks at 3
    assert metrics.mean_kv_tokens([(10, 4), (2, 2)]) == pytest.approx((11 + 12 + 13 + 3) / 4)


def test_peak_kv_tokens():
    serial = [answer(10, 5, 0.1, 0.2), answer(20, 3, 0.3, 0.4)]
    assert metrics.peak_kv_tokens(serial) == 22  # the longer one alone; its last token is never fed back
    batch = [answer(10, 5, 0.1, 0.2), answer(20, 5, 0.1, 0.2)]
    assert metrics.peak_kv_tokens(batch) == 38
    late = [answer(10, 11, 0.0, 1.0), answer(20, 11, 0.5, 1.5)]
    assert metrics.peak_kv_tokens(late) == 20 + 25  # when the first ends, the second is half way


def test_median_is_taken_field_by_field_and_keeps_losses():
    runs = [metrics.measure([answer(3, 5, first, first + 0.4)], wall) for first, wall in ((0.1, 3), (0.3, 1), (0.2, 2))]
    runs[1] = dataclasses.replace(runs[1], preemptions=2, failed=1)
    row = Row("x", tuple(runs))
    assert row.ttft_ms == pytest.approx(200) and row.wall_s == 2
    assert (row.preemptions, row.failed) == (2, 1)
    assert row.spread("ttft_ms") == pytest.approx((100, 300)) and row.tokens_per_s == pytest.approx(2.5)
    quiet = Row("x", (*runs[:2], dataclasses.replace(runs[2], disturbed=True)))
    assert quiet.counted == tuple(runs[:2]) and quiet.wall_s == 2 and len(quiet.runs) == 3
    with pytest.raises(AttributeError, match="speed"):
        row.speed  # noqa: B018


def test_a_tail_takes_twenty_requests():
    outputs = [answer(3, 5, 0.1 + n / 100, 1.0) for n in range(20)]
    assert metrics.measure(outputs, 1.0).ttft_p95_ms == pytest.approx(
        np.percentile([100 + 10 * n for n in range(20)], 95)
    )
    assert metrics.measure(outputs[1:], 1.0).ttft_p95_ms is None and metrics.measure(outputs[1:], 1.0).ttft_ms


def test_goodput_counts_requests_within_both_limits():
    outputs = [answer(3, 5, 0.1, 0.5), answer(3, 5, 0.9, 1.3), answer(3, 5, 0.1, 4.1), answer(3, 1, 0.1, 0.1)]
    run = metrics.measure(outputs, wall_s=2.0)  # TTFT 100, 900, 100, 100 ms; TPOT 100, 100, 1,000 and none
    assert run.goodput(500, 500) == 1.0 and run.goodput(1000, 500) == 1.5 and run.goodput(50, 500) == 0
    assert run.goodput(1000, 1000) == run.requests_per_s == 2.0
    failed = dataclasses.replace(run, failed=3)  # none of which was answered, whatever came of it first
    assert failed.goodput(1000, 1000) == failed.requests_per_s == 0.5


# -- machine --------------------------------------------------------------------------------------------------------


def test_provenance_is_json_and_names_no_person_and_no_computer():
    facts = machine.provenance("cpu", torch.bfloat16)
    text = json.dumps(facts)
    assert facts["dtype"] == "bfloat16" and facts["torch"] == torch.__version__ and facts["gpu"] is None
    assert facts["threads"] == torch.get_num_threads() and facts["date"].endswith("+00:00")
    assert socket.gethostname() not in text.split('"') and os.path.expanduser("~") not in text
    assert getpass.getuser() not in text.split('"')


@pytest.fixture()
def each_takes_a_second(monkeypatch):
    """Whatever is run takes a second; returns what was run and waited for, in order."""
    calls, now = [], [0.0]
    monkeypatch.setattr(machine, "_BEST", {})
    monkeypatch.delenv("MINFER_FAST", raising=False)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machine, "synchronize", lambda device: calls.append("wait"))

    def second(*args):
        calls.append("run")
        now[0] += 1.0

    return calls, second


def test_bandwidth_counts_the_bytes_that_were_read(each_takes_a_second, monkeypatch):
    calls, second = each_takes_a_second
    read = []
    monkeypatch.setattr(machine.torch, "mv", lambda matrix, vector: second(read.append(matrix.nbytes)))
    monkeypatch.setattr(torch.Tensor, "sum", lambda self: second())
    assert machine.measure_bandwidth("cpu") == read[0] == 512 << 20  # all of it in one second
    assert calls[:4] == ["run", "wait", "run", "wait"]  # once to warm up; before and after each the device is done
    assert machine.read_bandwidth("cpu") == 512 << 20 and len(read) == 9  # kept, not measured again


def test_the_best_bandwidth_so_far_counts(monkeypatch):
    monkeypatch.setattr(machine, "_BEST", {})
    monkeypatch.setenv("MINFER_FAST", "1")
    best = max(machine.measure_bandwidth("cpu") for _ in range(2))
    assert machine.read_bandwidth("cpu") == best > 1e8


def test_arithmetic_counts_a_multiply_add_as_two(each_takes_a_second, monkeypatch):
    _, second = each_takes_a_second
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: second())
    assert machine.measure_flops("cpu") == 2 * 256**3 == machine.peak_flops("cpu")


def test_an_accelerator_is_waited_for_and_a_cpu_is_not(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: waited.append(str(device)))
    for device in ("cpu", "cuda", "mps", "cuda:1"):
        machine.synchronize(device)
    assert waited == ["cuda", "mps", "cuda:1"]


# -- what others do meanwhile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "own", "throttled", "seconds", "threads", "others", "matters"),
    [
        (2.0, 2.0, 0.0, 1.0, 2, 0.0, False),  # all that ran was ours
        (2.0, 1.0, 0.0, 1.0, 2, 1.0, True),  # another took one of our two CPUs
        (2.0, 1.0, 0.0, 1.0, 1, 1.0, False),  # and with one thread we had no use for it
        (2.0, 1.9, 0.0, 1.0, 2, 0.1, False),  # a little is always there
        (0.2, 0.1, 0.0, 0.1, 2, 0.0, False),  # too short a time to tell by counters that tick in hundredths
        (2.0, 2.0, 0.5, 1.0, 2, 0.0, True),  # a quota stopped us
    ],
)
def test_a_run_is_disturbed_by_what_takes_its_cpus(
    monkeypatch, busy, own, throttled, seconds, threads, others, matters
):
    now = {"busy": 10.0, "own": 5.0, "throttled": 1.0, "time": 0.0}
    monkeypatch.setattr(watch, "_busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(watch, "_own_seconds", lambda: now["own"])
    monkeypatch.setattr(watch.host, "cpu_throttled_s", lambda: now["throttled"])
    monkeypatch.setattr(watch.host, "cpus_allowed", lambda: 2)
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now["time"])
    monkeypatch.setattr(watch.torch, "get_num_threads", lambda: threads)
    looking = watch.Watch()
    now = {"busy": 10.0 + busy, "own": 5.0 + own, "throttled": 1.0 + throttled, "time": seconds}
    seen = looking.seen()
    assert seen.others_cpus == pytest.approx(others) and seen.matters is matters
    assert str(seen) == "nothing else ran" or matters or others


def test_the_counters_of_this_machine_move(monkeypatch):
    before = watch._busy_seconds(), watch._own_seconds()
    while watch._own_seconds() < before[1] + 0.05:
        sum(range(10000))
    assert watch._busy_seconds() > before[0]


def test_time_that_a_quota_took_is_read_from_both_versions_of_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.host, "_control_groups", lambda controller: [tmp_path])
    assert watch.host.cpu_throttled_s() == 0.0
    (tmp_path / "cpu.stat").write_text("nr_throttled 3\nthrottled_usec 2500000\n")
    assert watch.host.cpu_throttled_s() == 2.5
    (tmp_path / "cpu.stat").write_text("nr_throttled 3\nthrottled_time 1500000000\n")
    assert watch.host.cpu_throttled_s() == 1.5


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux lowers the mark")
def test_the_mark_of_memory_is_lowered_to_what_is_resident():
    program = """
from minfer_lib.bench import probe_memory
block = bytearray(200 << 20)
block[::4096] = b"x" * len(block[::4096])
del block
high = probe_memory.peak_resident_bytes()
probe_memory.lower_peak()
print(high - probe_memory.peak_resident_bytes() > 150 << 20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_copy_inside_another_repository_has_no_commit(tmp_path, monkeypatch):
    assert machine._output_of(["git", "init", "-q", str(tmp_path)]) is None  # it prints nothing
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(machine, "PACKAGE", tmp_path)
    monkeypatch.setattr(machine, "version", lambda package: None)
    assert machine.commit() is None
