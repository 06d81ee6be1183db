"""Metrics by hand-worked numbers, and what a machine says about itself."""

import dataclasses
import getpass
import json
import os
import socket

import numpy as np
import pytest
import torch

from minfer_lib.bench import machine, metrics
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
    assert (run.prompt_tokens, run.output_tokens, run.prompt_len, run.output_len) == (10, 5, (10, 10), (5, 5))


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
    middle = metrics.median(runs)
    assert middle.ttft_ms == pytest.approx(200) and middle.wall_s == 2
    assert (middle.preemptions, middle.failed) == (2, 1)
    assert metrics.median(runs[:1]) == runs[0]


# -- machine --------------------------------------------------------------------------------------------------------


def test_provenance_is_json_and_names_no_person_and_no_computer():
    facts = machine.provenance("cpu", torch.bfloat16)
    text = json.dumps(facts)
    assert facts["dtype"] == "bfloat16" and facts["torch"] == torch.__version__ and facts["gpu"] is None
    assert facts["threads"] == torch.get_num_threads() and facts["date"].endswith("+00:00")
    assert socket.gethostname() not in text.split('"') and os.path.expanduser("~") not in text
    assert getpass.getuser() not in text.split('"')


def test_measured_rates_are_plausible_and_measured_once():
    assert 1e8 < machine.read_bandwidth("cpu") < 1e13  # bytes a second: from a very slow memory to more than any
    assert 1e8 < machine.peak_flops("cpu") < 1e16
    assert machine.read_bandwidth("cpu") == machine.read_bandwidth("cpu")


def test_a_copy_inside_another_repository_has_no_commit(tmp_path, monkeypatch):
    assert machine._output_of(["git", "init", "-q", str(tmp_path)]) is None  # it prints nothing
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(machine, "PACKAGE", tmp_path)
    assert machine.commit() is None
