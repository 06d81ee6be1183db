"""bitsandbytes' LLM.int8() through its own interface: equal to what transformers loads, quiet, and refusing clearly."""

import copy
import gc
import logging
import math
import subprocess
import sys

import pytest
import torch
from families import hf_generate
from torch import nn

pytest.importorskip("bitsandbytes")

from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, NaiveEngine, SamplingParams, load_model
from minfer_lib.errors import BadEnvironment, InvalidParameter, UnsupportedModel
from minfer_lib.models.memory import PeakMemory, measured_weight_bytes
from minfer_lib.quant import bitsandbytes as module
from minfer_lib.quant.bitsandbytes import bitsandbytes_int8

IDS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


def copied(lm: LanguageModel) -> LanguageModel:
    return LanguageModel.of(copy.deepcopy(lm.model), lm.tokenizer, lm.name)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


def loaded_by_transformers(folder, dtype, **config):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=BitsAndBytesConfig(load_in_8bit=True, **config)
    ).eval()


def kinds(lm):
    return {name for name, layer in lm.model.named_modules() if type(layer).__name__ == "Linear8bitLt"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2"])
def test_logits_equal_those_of_the_model_that_transformers_loads(family, tmp_path, name, dtype):
    family(name).model.save_pretrained(tmp_path)
    ours = bitsandbytes_int8(load_model(tmp_path, device="cpu", dtype=dtype), threshold=3.0)
    theirs = loaded_by_transformers(tmp_path, ours.dtype, llm_int8_threshold=3.0)
    assert torch.equal(logits(ours.model), logits(theirs))
    assert not torch.equal(logits(ours.model), logits(load_model(tmp_path, device="cpu", dtype=dtype).model))
    assert str(ours.dtype) == f"torch.{dtype}" and logits(ours.model).dtype == ours.dtype


def test_smollm2_is_what_transformers_loads(smollm2):
    from minfer_lib.models.packaged import packaged_model

    ids = [smollm2.encode("The capital of France is Paris, and the capital of Spain is")]
    for dtype in ("float32", "bfloat16"):
        ours = bitsandbytes_int8(load_model(device="cpu", dtype=dtype))
        theirs = loaded_by_transformers(packaged_model(), ours.dtype)
        assert torch.equal(logits(ours.model, ids), logits(theirs, ids))
    found = logits(ours.model, ids)[0, -1].argmax().item()
    assert found == logits(smollm2.model, ids)[0, -1].argmax().item() and ours.decode([found]) == " Madrid"


def test_engines_and_generate_run_it(tiny):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    lm = bitsandbytes_int8(copied(tiny))
    expected = hf_generate(lm, IDS[0], max_new_tokens=8)
    for engine in (NaiveEngine(lm), CachedEngine(lm), CachedEngine(lm, "hf")):
        assert engine.generate(IDS, params)[0].token_ids == expected
    packed = LLMEngine(lm).generate([IDS[0], [3, 4], [100] * 9], params)
    assert [len(out.token_ids) for out in packed] == [8] * 3 and not any(out.error for out in packed)
    assert LLMEngine(lm).generate(IDS, params)[0].token_ids == expected  # by itself it has no company to depend on


def test_random_weights_in_half_precision():
    lm = load_model("tiny-random", device="cpu", dtype="bfloat16")
    bitsandbytes_int8(lm)
    assert lm.dtype == lm.model.dtype == torch.bfloat16 and logits(lm.model).dtype == torch.bfloat16
    assert len(kinds(lm)) == 2 * 7


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        (["lm_head"], {"lm_head"}),
        ([], set()),
        ("mlp", {f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")}),
        (["layers.1", "lm_head"], None),
        (["self_attn.q_proj"], {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
    ],
)
def test_names_skip_whole_parts(tiny, skip, kept):
    lm = copied(tiny)
    linear = {name for name, layer in lm.model.named_modules() if isinstance(layer, nn.Linear)}
    bitsandbytes_int8(lm, skip=skip)
    if kept is None:
        kept = {name for name in linear if name.startswith("model.layers.1.")} | {"lm_head"}
        assert len(kept) == 8
    assert linear - kinds(lm) == kept
    assert torch.isfinite(logits(lm.model)).all()


def test_the_output_layer_is_skipped_whatever_its_name(family):
    lm = copied(family("llama"))
    lm.model.set_submodule("out", nn.Identity())
    lm.model.out = lm.model.lm_head
    del lm.model.lm_head
    lm.model.get_output_embeddings = lambda: lm.model.out
    bitsandbytes_int8(lm)
    assert type(lm.model.out) is nn.Linear and len(kinds(lm)) == 14


def test_a_tied_head_stays_the_embedding_unless_asked_and_then_gets_weights_of_its_own(smollm2):
    lm = bitsandbytes_int8(load_model("shape:smollm2-135m", device="cpu", dtype="bfloat16"))
    assert lm.model.lm_head.weight is lm.model.get_input_embeddings().weight
    before = measured_weight_bytes(lm.model)
    lm = load_model("shape:smollm2-135m", device="cpu", dtype="bfloat16")
    table = lm.model.get_input_embeddings().weight
    bitsandbytes_int8(lm, skip=())
    assert "lm_head" in kinds(lm) and lm.model.get_input_embeddings().weight is table and table.dtype == torch.bfloat16
    assert measured_weight_bytes(lm.model) == before + 49152 * 576 + 49152 * 4


def test_bytes_are_counted_with_their_scales(tiny):
    lm = copied(tiny)
    linear = [layer for name, layer in lm.model.named_modules() if type(layer) is nn.Linear and name != "lm_head"]
    spared = sum(layer.weight.nbytes - layer.weight.numel() - 4 * layer.out_features for layer in linear)
    before = measured_weight_bytes(lm.model)
    bitsandbytes_int8(lm)
    assert measured_weight_bytes(lm.model) == before - spared
    logits(lm.model)  # the library moves its tensors about in the first call
    assert measured_weight_bytes(lm.model) == before - spared


def test_the_peak_is_one_layer_above_the_model():
    lm = load_model("shape:smollm2-135m", device="cpu", dtype="float32")
    largest = max(layer.weight.numel() for layer in lm.model.model.layers.modules() if isinstance(layer, nn.Linear))
    all_int8 = sum(layer.weight.numel() for layer in lm.model.model.layers.modules() if isinstance(layer, nn.Linear))
    before = measured_weight_bytes(lm.model)
    with PeakMemory() as peak:
        bitsandbytes_int8(lm)
    # the new weights, and of one layer float16 and the library's own float32 intermediates
    assert peak.peak_bytes < all_int8 * 1.02 + 16 * largest < 2 * all_int8
    gc.collect()
    assert measured_weight_bytes(lm.model) < before - 2.9 * all_int8  # the old ones are gone


def test_rows_of_zeros_stay_zeros(tiny):
    lm = copied(tiny)
    lm.model.model.layers[0].mlp.gate_proj.weight.data[3] = 0
    lm.model.model.layers[1].mlp.up_proj.weight.data[:] = 0
    bitsandbytes_int8(lm)
    found = lm.model.model.layers[0].mlp.gate_proj(torch.randn(1, 4, lm.model.config.hidden_size))
    assert (found[..., 3] == 0).all() and (found[..., 4] != 0).all()
    assert torch.isfinite(logits(lm.model)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e5])
def test_weights_that_float16_cannot_hold_are_refused_before_anything_changes(tiny, value):
    lm = copied(tiny)
    lm.model.model.layers[1].self_attn.o_proj.weight.data[2, 3] = value
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.o_proj of tiny-random has weights from"):
        bitsandbytes_int8(lm)
    assert not kinds(lm)
    bitsandbytes_int8(lm, skip=("o_proj", "lm_head"))
    assert len(kinds(lm)) == 12


def test_models_that_are_quantised_already_are_refused(tiny, folder):
    lm = bitsandbytes_int8(copied(tiny))
    with pytest.raises(InvalidParameter, match="quantised already"):
        bitsandbytes_int8(lm)
    theirs = LanguageModel.of(loaded_by_transformers(folder, torch.float32), None, "theirs")
    with pytest.raises(InvalidParameter, match="theirs is quantised already"):
        bitsandbytes_int8(theirs)


@pytest.mark.parametrize("threshold", [-1, math.nan, "6", None, True])
def test_thresholds_that_are_not_possible(tiny, threshold):
    with pytest.raises(InvalidParameter, match="at least 0"):
        bitsandbytes_int8(tiny, threshold=threshold)


def test_names_that_are_not_there(tiny, family):
    for skip in (("gate", "lm_head"), "", [""]):
        with pytest.raises(InvalidParameter, match="names no linear layer of tiny-random"):
            bitsandbytes_int8(tiny, skip=skip)
    with pytest.raises(InvalidParameter, match="skip must be names"):
        bitsandbytes_int8(tiny, skip=[3])
    with pytest.raises(UnsupportedModel, match=r"\(llama\) has no linear layer to quantise beside"):
        bitsandbytes_int8(family("llama"), skip=("layers", "lm_head"))
    assert not kinds(tiny)


@pytest.mark.parametrize("at", [0, 3])
def test_a_model_that_was_changed_in_part_says_so(tiny, monkeypatch, at):
    lm, calls, converted = copied(tiny), [], module.converted

    def breaking(*args):
        calls.append(1)
        if len(calls) > at:
            raise RuntimeError("no memory")
        return converted(*args)

    monkeypatch.setattr(module, "converted", breaking)
    kind, message = (
        (RuntimeError, "^no memory") if at == 0 else (UnsupportedModel, r"no memory\. It was changed on the")
    )
    with pytest.raises(kind, match=message):
        bitsandbytes_int8(lm)
    assert len(kinds(lm)) == at


def test_a_logger_whose_level_somebody_chose_keeps_it(tiny, monkeypatch):
    logger = logging.getLogger(module.NOISE_OF_PRODUCTS)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    bitsandbytes_int8(copied(tiny))
    assert logger.level == logging.DEBUG


def test_the_threshold_reaches_the_library(tiny):
    found = [logits(bitsandbytes_int8(copied(tiny), threshold=t).model) for t in (0, 0.5, 6.0)]
    exact = logits(tiny.model)
    assert not torch.equal(found[0], found[1])
    # with more features in float32 less is lost
    assert (found[1] - exact).abs().mean() < 0.8 * (found[0] - exact).abs().mean()


def test_a_missing_library_is_named_and_nothing_changes(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BadEnvironment, match="pip install bitsandbytes"):
        bitsandbytes_int8(tiny)
    assert not kinds(tiny)


def test_it_says_nothing_and_leaves_other_loggers_alone(tmp_path):
    script = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "import torch\n"
        "from minfer_lib import load_model\n"
        "from minfer_lib.quant.bitsandbytes import bitsandbytes_int8\n"
        "lm = bitsandbytes_int8(load_model('tiny-random', device='cpu'))\n"
        "lm.model(torch.tensor([[5, 6, 7]]))\n"
        "levels = {n: l.level for n, l in logging.root.manager.loggerDict.items() if isinstance(l, logging.Logger)}\n"
        "print({n: l for n, l in levels.items() if n.startswith('bitsandbytes') and l})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({module.NOISE_OF_PRODUCTS: logging.ERROR})
    assert "MatMul8bitLt" not in done.stderr and "gemm_4bit" not in done.stderr


def test_one_logger_is_silenced_for_a_while():
    logger = logging.getLogger(module.NOISE_OF_IMPORT)
    before = logger.level
    with module.silenced(module.NOISE_OF_IMPORT):
        assert not logger.isEnabledFor(logging.WARNING)
        assert logging.getLogger("bitsandbytes.cextension").isEnabledFor(logging.WARNING)
    assert logger.level == before
