"""Scripts for other systems: the workloads are ours, every run is kept; recorded figures have a source."""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from minfer_lib import load_model
from minfer_lib.bench import fixed_lengths, load, nano_vllm, reported_rows
from minfer_lib.bench.articles import FILES
from minfer_lib.bench.peers import common, hf, llama_cpp, vllm
from minfer_lib.bench.peers import nano_vllm as nano_peer
from minfer_lib.bench.results import RECORDED
from minfer_lib.errors import BadEnvironment
from minfer_lib.models import packaged


class Clock:
    """A peer that takes one second for prompts and two for each later token, on a clock of its own."""

    def __init__(self, monkeypatch, short=0):
        self.now, self.calls, self.short = 0.0, [], short
        monkeypatch.setattr(common.time, "perf_counter", lambda: self.now)

    def generate(self, prompts, lengths, temperature):
        self.calls.append((prompts, lengths, temperature))
        self.now += 1 + 2 * (max(lengths) - 1)
        return [n - self.short * (n > 1) for n in lengths]


@pytest.fixture(autouse=True)
def full_length(monkeypatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)


def peer_of(clock):
    sizes = common.Sizes("shape:x", 500, 4096)
    return common.Peer("x", sizes, "x: as it is", clock.generate, ["torch", "no-such"], torch.device("cpu"), "float32")


def asked(*options):
    return common.parser("x", "A peer.").parse_args(list(options))


def test_batches_are_our_workloads_and_every_run_is_kept(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    found = common.measure(peer_of(clock), asked("--batch", "1", "4", "--output-len", "5", "--repeats", "2"))
    work = fixed_lengths(common.Sizes("", 500, 4096), 4, 15, 5)
    assert clock.calls[-1] == (work.prompts, [5] * 4, 0.0) and len(clock.calls) == 2 * 2 * 3  # with a warm-up each
    row = found.row("x", 4)
    assert [len(r.runs) for r in found.rows] == [2, 2] and found.kind == "frontier"
    assert (row.ttft_ms, row.tpot_ms, row.tokens_per_s) == pytest.approx((1000, 2000, 4 * 5 / 9))
    assert row.prompt_tokens == 60 and row.failed == 0 and row.concurrency == 4
    assert load(found.save(tmp_path / "x.json")) == found and "x: as it is" in str(found)
    assert found.provenance["torch"] == torch.__version__ and found.provenance["no-such"] is None


def test_unequal_requests_have_no_times_of_their_own(monkeypatch):
    clock = Clock(monkeypatch)
    found = common.measure(peer_of(clock), asked("--workload", "nano", "--repeats", "1"))
    work, row = nano_vllm(500), found.row("x")
    lengths = [params.max_tokens for params in work.params]
    assert clock.calls[-1] == (work.prompts, lengths, 0.6) and found.kind == "ladder"
    assert row.ttft_ms is None and row.tpot_ms is None
    assert row.tokens_per_s == pytest.approx(133_966 / (1 + 2 * (max(lengths) - 1)))


def test_answers_of_other_lengths_are_counted_as_failed(monkeypatch):
    found = common.measure(peer_of(Clock(monkeypatch, short=1)), asked("--batch", "3", "--repeats", "1"))
    assert found.rows[0].failed == 3 and found.rows[0].output_tokens == 3 * 127


def test_a_shape_is_written_as_other_systems_read_it(tmp_path):
    sizes = common.shape_folder("qwen3-0.6b", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen3ForCausalLM"] and config.hidden_size == 1024
    assert (sizes.vocab_size, sizes.max_model_len) == (151936, 40960)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("main", "options", "missing"),
    [(vllm.main, [], "vllm"), (nano_peer.main, [], "nanovllm"), (llama_cpp.main, ["--gguf", "x.gguf"], "llama_cpp")],
)
def test_a_missing_peer_is_a_sentence(monkeypatch, capsys, main, options, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "nanovllm":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(options) == 1
    said = capsys.readouterr().out
    assert f"{missing} cannot be imported" in said and "\n" not in said.strip()


def test_how_vllm_is_set(monkeypatch, tmp_path):
    """Over a stand-in that notes what it is asked for: prompts as ids, EOS ignored, no prefixes kept."""
    made = {}

    class LLM:
        def __init__(self, folder, **options):
            made.update(options, config=AutoConfig.from_pretrained(folder))

        def generate(self, prompts, params, use_tqdm):
            assert all(own["ignore_eos"] and own["temperature"] == 0.0 for own in params)
            made["prompts"] = prompts
            answers = [SimpleNamespace(token_ids=[0] * own["max_tokens"]) for own in params]
            return [SimpleNamespace(outputs=[answer]) for answer in answers]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in vllm.ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    assert vllm.main(["--batch", "2"]) == 1  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm, "DEVICE", torch.device("cpu"))
    assert vllm.main(["--batch", "2", "5", "--output-len", "3", "--json", str(tmp_path / "v.json")]) == 0
    assert made["max_num_seqs"] == 5 and made["enable_prefix_caching"] is False and made["load_format"] == "dummy"
    assert made["config"].model_type == "qwen2" and made["config"].hidden_size == 3584
    assert [len(prompt["prompt_token_ids"]) for prompt in made["prompts"]] == [15] * 5
    assert load(tmp_path / "v.json").row("vLLM", 5).output_tokens == 15


def test_transformers_beside_itself(tmp_path, capsys):
    path = tmp_path / "hf.json"
    shared = ["--model", "tiny-random", "--device", "cpu", "--repeats", "1", "--json", str(path)]
    assert hf.main([*shared, "--batch", "1", "2", "--prompt-len", "5", "--output-len", "4"]) == 0
    found = load(path)
    assert found.engines == ["HF padded batch", "HF padded batch, static cache", "HF continuous"]
    assert found.xs == [1, 2] and not found.warnings and found.row("HF continuous", 2).output_tokens == 8
    assert "HF continuous: " in capsys.readouterr().out


def test_llama_cpp_gives_the_tokens_of_the_same_weights():
    lc = pytest.importorskip("llama_cpp", reason=f"llama.cpp is not installed. {llama_cpp.INSTALL}")
    gguf = str(packaged.find_gguf())
    lm = load_model(device="cpu", dtype="float32")  # the same weights
    prompts = [lm.encode(text) for text in ("The capital of France is", "Alice was beginning to get", "One, two,")]
    lengths = [4, 6, 3]
    with llama_cpp.converted(lc, gguf, "f32") as path:
        llama = llama_cpp.Llama(lc, path, 2, 64, 2, False)  # the third waits for a sequence
        found = llama.answers(prompts, lengths)
        llama.close()
    for prompt, n, answer in zip(prompts, lengths, found, strict=True):
        ids = torch.tensor([prompt])
        out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n,
                                min_new_tokens=n)  # fmt: skip
        assert answer == out[0, len(prompt) :].tolist()


# -- recorded figures -----------------------------------------------------------------------------------------------


def test_every_recorded_table_has_a_source_and_rows_for_a_comparison():
    names = {row.table for file in FILES for row in load(RECORDED / f"{file}.json").rows}
    assert {"mini-infer, batch 1", "series, kv cache", "nano-vllm, README", "nano-vllm, H200"} <= names
    for name in names:
        rows = reported_rows(name)
        assert rows and all(row.kind == "reported" and len(row.source) > 40 for row in rows)
        assert all(row.tokens_per_s or row.tpot_ms for row in rows)
    rows = {row.engine: row for row in reported_rows("qwen2.5-7b, H200, batch 1")}
    assert rows["vLLM 0.24.0"].tpot_ms == 4.73 and rows["vLLM 0.24.0"].tokens_per_s is None


def test_a_name_that_is_none_brings_an_import_error_of_ours():
    with pytest.raises(BadEnvironment, match=r"no_such_peer cannot be imported .* Do this"):
        common.peer_module("no_such_peer", "Do this.")
