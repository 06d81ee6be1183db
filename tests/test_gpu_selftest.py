"""The self-test for GPUs, as far as a CPU can run it: its lines, its exit code, and that it notices what is broken."""

import os
import subprocess
import sys

import pytest
import torch
from transformers.utils import logging

from minfer_lib.attention.torch_backend import TorchBackend
from minfer_lib.bench import gpu_selftest, load

CPU = torch.device("cpu")
INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

# Kernels that forget something, run by Triton's interpreter in a process of its own.
BROKEN = """
import sys, torch
from minfer_lib.bench import gpu_selftest
from minfer_lib.kernels.triton import int8_linear, paged_attention
decode, prefill, product = paged_attention.paged_decode, paged_attention.paged_prefill, int8_linear.int8_linear
paged_attention.paged_decode = lambda *a, **k: decode(*a, **k | {"window": None, "sinks": None})
paged_attention.paged_prefill = lambda *a, **k: prefill(*a, **k | {"softcap": None})
int8_linear.int8_linear = lambda x, w, s, b, **k: product(x, w, s, None, **k)
for only in ("decode", "prefill", "1 row"):
    gpu_selftest.run_checks(torch.device("cpu"), only)
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(before)


def states(lines: str) -> dict[str, str]:
    """Name -> state of each line."""
    return {line[9:].split(":")[0]: line[:8].strip() for line in lines.splitlines() if line[8:9] == " "}


def interpreted(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], env=INTERPRETED, capture_output=True, text=True, timeout=300)


def test_kernels_and_a_family_pass_and_are_kept(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "selftest.json"
    done = interpreted("-m", "minfer_lib.bench.gpu_selftest", "--device", "cpu", "--only", "ll", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = states(done.stdout)
    assert [found.pop(f"llama, {way}") for way in ("fused", "compiled", "graph")] == ["skipped"] * 3, done.stdout
    assert len(found) == 8 and set(found.values()) == {"ok"} and "8 ok, 0 FAILED" in done.stdout, done.stdout
    assert "llama" in found and "attention by triton" in done.stdout
    result = load(path)
    assert result.row("llama").values["passed"] == 1 and "attention by triton" in str(result)


def test_kernels_that_forget_something_fail():
    pytest.importorskip("triton")
    found = states(interpreted("-c", BROKEN).stdout)
    assert {name for name, state in found.items() if state == "FAILED"} == {
        "decode attention, window", "decode attention, sinks", "decode attention, window, softcap and sinks",
        "prefill attention, softcap", "prefill attention, window, softcap and sinks",
        "int8 product, 1 row, matvec", "int8 product, 1 row, as planned",
    }  # fmt: skip
    assert found["decode attention, plain"] == found["prefill attention, plain"] == "ok"


def test_other_tokens_fail_and_what_a_gpu_alone_shows_is_skipped(monkeypatch, capsys):
    class Blind(TorchBackend):
        """Knows of no window."""

        def attend(self, *args, window=None, **options):
            return super().attend(*args, **options)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu_selftest, "backend_on", lambda device: Blind())
    assert [gpu_selftest.run_checks(CPU, name)[0].state for name in ("llama", "mistral")] == ["ok", "FAILED"]
    assert gpu_selftest.main(["--device", "cpu", "--only", "mistral"]) == 1
    assert gpu_selftest.main(["--device", "cpu", "--only", "memory"]) == 0
    found = states(capsys.readouterr().out)
    assert (
        found.items() >= {"llama": "ok", "mistral": "FAILED", "mistral, fused": "FAILED", "memory": "skipped"}.items()
    )
    checks = gpu_selftest.run_checks(CPU, "decode")
    assert {check.state for check in checks} == {"skipped"} and len(checks) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_selftest.main([]) == 2 and "sees no GPU" in capsys.readouterr().out
    checks = gpu_selftest.run_checks(CPU, "memory")
    assert [check.state for check in checks] == ["skipped"]
    assert gpu_selftest.as_result(checks, CPU).row("memory").values["passed"] is None
