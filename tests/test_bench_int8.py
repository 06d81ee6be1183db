"""INT8 in the benchmarks: its rungs, what is said of its rows, its bytes, its memory, and its files."""

import copy
import dataclasses
import io
import json
import subprocess
import sys

import pytest
import torch

from minfer_lib import CachedEngine, LLMEngine, describe_int8, load_model, quantize_int8, save_int8
from minfer_lib.bench import (
    Cells,
    HFStaticBatch,
    Result,
    cheaper,
    compare,
    comparison,
    decode_step_bytes,
    decode_step_flops,
    fixed_lengths,
    ladder,
    load,
    load_recorded,
    make_engine,
    peak_memory,
    probe_memory,
    quality,
    weight_bytes_read,
)
from minfer_lib.bench.comparison import Measured, timed_run
from minfer_lib.bench.machine import weights_name
from minfer_lib.bench.roofline import kv_token_bytes
from minfer_lib.bench.tables import written
from minfer_lib.errors import InvalidParameter, UnsupportedModel
from minfer_lib.models.memory import measured_weight_bytes
from minfer_lib.quant.linear import Int8Linear
from minfer_lib.quant.products import DYNAMIC, why_not

IDS = torch.tensor([[5, 6, 7, 8, 9]])
EVERYTHING = {"skip": (), "embedding": True}


@pytest.fixture(autouse=True)
def full_length(monkeypatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


def int8_of(lm, **options):
    return quantize_int8(cheaper.copied(lm, "cpu"), progress=False, **options)


def logits(lm):
    with torch.no_grad():
        return lm.model(IDS).logits


# -- copies and rungs -----------------------------------------------------------------------------------------------


def test_a_copy_is_the_model_as_it_is_now_and_shares_no_weight(family):
    lm = family("qwen2")
    changed = cheaper.copied(lm, "cpu")
    with torch.no_grad():
        changed.model.get_input_embeddings().weight.mul_(1.5)
    again = cheaper.copied(changed, "cpu")
    assert torch.equal(logits(again), logits(changed)) and not torch.equal(logits(again), logits(lm))
    places = [{t.data_ptr() for t in (*m.model.parameters(), *m.model.buffers())} for m in (lm, changed, again)]
    assert len(set.union(*places)) == sum(map(len, places)) and len({len(each) for each in places}) == 1
    assert (again.name, again.eos_ids, again.dtype, again.tokenizer) == (lm.name, lm.eos_ids, lm.dtype, lm.tokenizer)


def test_a_tied_output_layer_is_tied_in_a_copy(family):
    lm = family("gemma2")
    model = cheaper.copied(lm, "cpu").model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert measured_weight_bytes(model) == measured_weight_bytes(lm.model)


@pytest.mark.parametrize(("name", "label"), [("int8", "int8"), ("bnb-int8", "bitsandbytes int8")])
def test_a_rung_with_other_weights_leaves_the_model_as_it_was(lm, name, label):
    if name == "bnb-int8":
        pytest.importorskip("bitsandbytes")
    before = logits(lm)
    engine = make_engine(name, lm, max_model_len=64)
    assert isinstance(engine, LLMEngine) and engine.name == label and engine.lm is not lm
    assert measured_weight_bytes(engine.lm.model) < measured_weight_bytes(lm.model)
    assert torch.equal(logits(lm), before) and lm.quantization is None and not torch.equal(logits(engine.lm), before)


def test_the_int8_rung_runs_a_quantised_model_as_it_is(lm):
    int8 = int8_of(lm, activations="none")
    assert make_engine("int8", int8).lm is int8 and int8.quantization["activations"] == "none"


def test_engines_over_the_same_other_weights_share_a_model(lm, monkeypatch):
    copies, copied = [], cheaper.copied
    monkeypatch.setattr(cheaper, "copied", lambda *args: copies.append(copied(*args)) or copies[-1])
    found = ladder(lm, ["slots", "int8", "paged", "paged-int8"], fixed_lengths(lm, 2, 8, 6), repeats=1, show=False)
    assert len(copies) == 1 and not found.warnings
    assert [row.engine for row in found.rows] == ["slots", "int8", "paged", "paged + int8"]
    sizes = [row.weight_bytes for row in found.rows]
    assert sizes[0] == sizes[2] == measured_weight_bytes(lm.model) > sizes[1] == sizes[3]
    assert sizes[1] == measured_weight_bytes(copies[0].model)


def test_the_ladder_says_of_int8_what_it_is(lm):
    found = ladder(lm, ["slots", "int8"], fixed_lengths(lm, 2, 8, 6), repeats=1, show=False)
    row = found.row("int8")
    assert found.row("slots").tokens == ""
    assert row.tokens == "same" or row.tokens.endswith("% until they part")
    assert [each.weights for each in found.rows] == ["float32", "int8 dynamic, rest float32"]
    assert row.floor_ms < found.row("slots").floor_ms
    assert any(note.startswith("int8: 14 layers in int8") and "kernel" in note for note in found.notes)
    assert "weights" in written(found)[0].columns and "in float32: " in found.title


def test_rows_of_one_model_say_its_weights_once_in_the_title(lm):
    int8 = int8_of(lm)
    work = fixed_lengths(lm, 1, 4, 2)
    found = compare(LLMEngine(int8), CachedEngine(int8), workload=work, repeats=1, show=False)
    assert "weights" not in written(found)[0].columns
    assert found.title.startswith("tiny-random in int8 dynamic, rest float32: ")
    assert found.provenance["weights"] == "int8 dynamic, rest float32" and found.provenance["dtype"] == "float32"
    assert any(note.startswith("slots, cached: 14 layers in int8") for note in found.notes)


def test_a_model_that_cannot_be_quantised_is_left_out_with_its_reason(lm):
    other = cheaper.copied(lm, "cpu")
    other.model.config = copy.deepcopy(other.model.config)
    other.model.config.quantization_config = {"quant_method": "another"}
    found = ladder(other, ["cached", "int8"], fixed_lengths(lm, 1, 3, 2), repeats=1, show=False)
    assert [row.engine for row in found.rows] == ["cached"]
    assert any(note.startswith("int8 left out: tiny-random is quantised already") for note in found.notes)
    with pytest.raises(UnsupportedModel, match="quantised already"):
        make_engine("int8", other)


# -- verdicts -------------------------------------------------------------------------------------------------------


class Altered(CachedEngine):
    """Changes the third token of each answer."""

    def generate(self, prompts, params=None, **options):
        outputs = super().generate(prompts, params, **options)
        return [dataclasses.replace(o, token_ids=[*o.token_ids[:2], 0, *o.token_ids[3:]]) for o in outputs]


@pytest.mark.parametrize(("activations", "judged"), [("none", True), ("dynamic", False)])
def test_tokens_are_judged_unless_activations_are_rounded(lm, activations, judged):
    int8 = int8_of(lm, activations=activations)
    work = fixed_lengths(lm, 2, 5, 4)
    found = compare(CachedEngine(int8), ("altered", Altered(int8)), workload=work, repeats=1, show=False)
    assert found.row("altered").tokens == ("DIFFER" if judged else "50 % until they part")
    assert bool(found.warnings) == judged


def test_engines_over_one_weight_only_model_give_the_same_tokens(lm):
    int8 = int8_of(lm, activations="none")
    engines = CachedEngine(int8), LLMEngine(int8), HFStaticBatch(int8, 2)
    found = compare(*engines, workload=fixed_lengths(lm, 3, 7, 6), repeats=1, show=False)
    assert [row.tokens for row in found.rows] == ["", "same", "same"] and not found.warnings


# -- bytes ----------------------------------------------------------------------------------------------------------


def kernels():
    return [name for name in DYNAMIC if why_not(name) is None]


@pytest.mark.parametrize("kernel", kernels())
def test_a_step_reads_a_byte_for_each_weight(lm, kernel):
    int8 = int8_of(lm, activations="dynamic", smoothing=0.0, kernel=kernel)
    config = lm.model.config
    hidden, wide, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv = config.num_key_value_heads * hidden // heads
    weights = config.num_hidden_layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide)
    channels = config.num_hidden_layers * (hidden + 2 * kv + hidden + 2 * wide + hidden)
    norms = (2 * config.num_hidden_layers + 1) * hidden
    head = config.vocab_size * hidden
    rotary = sum(buffer.nbytes for buffer in lm.model.buffers())  # frequencies, and the copy that RoPE starts from
    assert weight_bytes_read(int8.model) == weights + 4 * (channels + norms + head) + rotary
    assert decode_step_flops(int8, 3) == decode_step_flops(lm, 3) == 3 * 2 * (weights + head)
    assert decode_step_bytes(int8, 2, 10) == weight_bytes_read(int8.model) + 20 * kv_token_bytes(lm)
    # smoothing adds a vector for each input that layers share: of q, k, v; of o; of gate and up; of down
    smooth = int8_of(lm, activations="dynamic", smoothing=0.5, kernel=kernel)
    vectors = config.num_hidden_layers * (3 * hidden + wide)
    assert weight_bytes_read(smooth.model) == weight_bytes_read(int8.model) + 4 * vectors
    # the model holds the embedding beside what a step reads, and nothing else
    assert measured_weight_bytes(int8.model) == weight_bytes_read(int8.model) + 4 * head


@pytest.mark.parametrize("kernel", kernels())
def test_an_embedding_in_int8_is_read_only_where_it_is_the_output_layer(lm, family, kernel):
    apart = int8_of(lm, **EVERYTHING, kernel=kernel)
    unread = measured_weight_bytes(apart.model) - weight_bytes_read(apart.model)
    assert unread == lm.vocab_size * (lm.model.config.hidden_size + 4)
    assert decode_step_flops(apart) == decode_step_flops(lm)
    tied = int8_of(family("gemma2"), **EVERYTHING, kernel=kernel)
    assert weight_bytes_read(tied.model) == measured_weight_bytes(tied.model)
    assert decode_step_flops(tied) == decode_step_flops(family("gemma2"))


def test_bitsandbytes_layers_count_with_their_scales(lm):
    pytest.importorskip("bitsandbytes")
    other = cheaper.bitsandbytes(lm)
    scales = sum(module.out_features for module in int8_of(lm).model.modules() if isinstance(module, Int8Linear))
    matrices = (decode_step_flops(lm) - 2 * lm.model.lm_head.weight.numel()) / 2
    assert weight_bytes_read(lm.model) - weight_bytes_read(other.model) == 3 * matrices - 4 * scales
    assert decode_step_flops(other) == decode_step_flops(lm)


def test_the_gpu_peak_of_a_row_is_what_its_run_added_and_its_own_weights_and_cache(lm, monkeypatch):
    inner = CachedEngine(lm, max_model_len=64)

    class OnGPU:
        name, kv_bytes = "on a GPU", inner.kv_bytes
        lm = dataclasses.replace(inner.lm, device=torch.device("cuda"))

        def generate(self, prompts, params):
            return inner.generate(prompts, params)

    other = 5 * 10**8  # what everything else in this process has on the device
    monkeypatch.setattr(comparison, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: other)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: other + 10**6)
    each = Measured("on a GPU", OnGPU())
    timed_run(each, fixed_lengths(lm, 1, 4, 2))
    assert each.cuda_peak == 10**6 + measured_weight_bytes(lm.model) + inner.kv_bytes()


# -- peak memory in a fresh process ---------------------------------------------------------------------------------


def job_of(engine, monkeypatch):
    """What `peak_memory` hands to the fresh process."""
    sent = {}

    def run(command, input, **options):
        sent.update(json.loads(input))
        return subprocess.CompletedProcess(command, 0, '{"base": 1, "loaded": 2, "peak": 3}\n', "")

    with monkeypatch.context() as patch:
        patch.setattr(probe_memory.subprocess, "run", run)
        peak_memory(engine, fixed_lengths(engine.lm, 1, 8, 4))
    return sent


def run_here(job, monkeypatch, capsys):
    """Runs such a job in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
    monkeypatch.setattr(probe_memory, "lower_peak", lambda: None)
    probe_memory.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "options", [{"activations": "none", **EVERYTHING}, *({"kernel": name} for name in [None, *kernels()])]
)
def test_the_fresh_process_quantises_as_here(lm, monkeypatch, capsys, options):
    int8 = int8_of(lm, **options)
    job = job_of(LLMEngine(int8, max_model_len=64), monkeypatch)
    assert job["quantization"] == int8.quantization and job["weight_bytes"] == measured_weight_bytes(int8.model)
    found = run_here(job, monkeypatch, capsys)
    assert 0 < found["loaded"] <= found["peak"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({**job, "quantization": None})))
    with pytest.raises(SystemExit, match="was changed after it was loaded"):
        probe_memory.main()


def test_a_folder_in_int8_is_loaded_as_it_is(lm, monkeypatch, capsys, tmp_path):
    save_int8(int8_of(lm), tmp_path / "int8")
    int8 = load_model(tmp_path / "int8", device="cpu")
    job = job_of(LLMEngine(int8, max_model_len=64), monkeypatch)
    assert job["model"] == str(tmp_path / "int8")

    def again(*args, **options):
        raise AssertionError("quantised twice")

    monkeypatch.setattr(probe_memory, "quantize_int8", again)
    run_here(job, monkeypatch, capsys)


def test_peak_memory_of_int8_in_a_real_process(lm):
    work = fixed_lengths(lm, 1, 8, 4)
    found = compare(LLMEngine(int8_of(lm), max_model_len=64), workload=work, repeats=1, memory=True, show=False)
    assert not found.warnings and 10_000_000 < found.rows[0].base_bytes < found.rows[0].peak_bytes


# -- names and files ------------------------------------------------------------------------------------------------


def test_weights_have_a_name(lm):
    half = load_model("tiny-random", device="cpu", dtype="bfloat16")
    assert weights_name(lm) == "float32" and weights_name(half) == "bfloat16"
    assert weights_name(int8_of(lm)) == "int8 dynamic, rest float32"
    assert weights_name(int8_of(half, activations="none")) == "int8 weight-only, rest bfloat16"
    assert weights_name(int8_of(lm, **EVERYTHING)) == "int8 dynamic + head + embedding, rest float32"
    assert weights_name(int8_of(lm, skip=["lm_head", "down_proj"])) == "int8 dynamic - down_proj, rest float32"


def test_bitsandbytes_has_a_name_too(lm):
    pytest.importorskip("bitsandbytes")
    assert weights_name(cheaper.bitsandbytes(lm)) == "bitsandbytes int8, rest float32"


def test_results_know_their_weights_from_a_file(lm, tmp_path):
    found = compare(CachedEngine(lm), ("int8", CachedEngine(int8_of(lm))),
                    workload=fixed_lengths(lm, 1, 4, 2), repeats=1, show=False)  # fmt: skip
    again = load(found.save(tmp_path / "run.json"))
    assert again == found and again.row("int8").weights == "int8 dynamic, rest float32"


def test_tables_of_other_numbers_and_of_quality_are_kept_like_any_result(lm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = quality(lm, {"int8": int8_of(lm)}, tokens=64, window=32, progress=False)
    found.save("results/quality.json")
    again = load_recorded("quality")
    assert again == found and again.recorded and again.title.startswith("Recorded on ")
    assert found.provenance["weights"] == "float32" and again.row("int8").kl == found.row("int8").kl
    cells = [Cells("t", "r", {"c": 1.0, "d": None}), Cells("t", "s", {"c": 2.0}), Cells("u", "r", {"e": 3.0})]
    tables = Result("table", cells, {}, found.provenance)
    tables.save("results/tables.json")
    assert load("results/tables.json") == tables and tables.table("t").loc["s", "c"] == 2.0
    assert "u" in str(tables) and len(tables.to_frame()) == 3
    with pytest.raises(InvalidParameter, match="there are `t` or `u`"):
        tables.table()
    with pytest.raises(InvalidParameter, match="have none"):
        tables.plot()


def test_the_report_of_the_notes_is_that_of_the_model(lm):
    int8 = int8_of(lm)
    found = compare(CachedEngine(int8), workload=fixed_lengths(lm, 1, 4, 2), repeats=1, show=False)
    assert f"cached: {describe_int8(int8)}" in found.notes
