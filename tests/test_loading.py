"""Every kind of model name, and every way in which one can be wrong: a model that is right, or one clear sentence."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import BASE, hf_generate
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from minfer_lib import CachedEngine, LanguageModel, MinferError, NaiveEngine, SamplingParams, load_model
from minfer_lib.errors import (
    BadEnvironment,
    DeviceNotAvailable,
    InvalidParameter,
    InvalidPrompt,
    ModelNotFound,
    UnsupportedModel,
)
from minfer_lib.models import load
from minfer_lib.models.checks import check_causal, first_bad_tensor, has_softcap, position_limit
from minfer_lib.models.shapes import SHAPES, shape_config


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def save_random(folder: Path, model_type: str, **values: object) -> Path:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(BASE | values))).save_pretrained(folder)
    return folder


# -- names ------------------------------------------------------------------------------------------------------------


def test_tiny_random_is_the_same_each_time_and_leaves_torchs_seed_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = load_model("tiny-random"), load_model("TINY-random")
    assert torch.equal(torch.rand(3), expected)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and one.name == "tiny-random"
    assert (one.eos_ids, one.max_model_len, one.vocab_size) == (frozenset({258}), 2048, 259)
    assert not one.model.training and not any(p.requires_grad for p in one.model.parameters())


def test_tiny_random_encodes_every_byte(tiny: LanguageModel):
    text = "".join(map(chr, range(256))) + "你👍"
    assert tiny.encode(text) == list(text.encode()) and tiny.decode(list(text.encode())) == text


def test_a_folder_is_loaded_as_it_was_saved(tiny: LanguageModel, folder: Path):
    lm = load_model(folder)
    assert lm.name == "model" and repr(lm) == "LanguageModel(model, float32 on cpu)"
    assert all(torch.equal(a, b) for a, b in zip(lm.model.parameters(), tiny.model.parameters(), strict=True))
    assert (lm.eos_ids, lm.max_model_len, lm.vocab_size) == (tiny.eos_ids, tiny.max_model_len, tiny.vocab_size)
    assert lm.encode("né") == tiny.encode("né") and lm.chat_ids("Hi") == tiny.chat_ids("Hi")
    assert not lm.model.training and not any(p.requires_grad for p in lm.model.parameters())


def test_a_folder_as_text_relative_and_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.parent)
    for name in (str(folder), "model", "./model", "model/"):
        assert load_model(name).name == "model"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_model("~/model").name == "model"
    monkeypatch.setenv("MINFER_MODEL", str(folder))
    assert load_model().name == "model"
    assert load_model("tiny-random").name == "tiny-random"  # the argument wins


def test_the_packaged_model_is_the_default(smollm2: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    assert (smollm2.name, smollm2.vocab_size, smollm2.eos_ids) == ("SmolLM2-135M-Instruct", 49152, frozenset({2}))
    assert smollm2.max_model_len == 8192 and smollm2.dtype == torch.float32
    asked = []
    monkeypatch.setattr("minfer_lib.models.packaged.packaged_model", lambda: asked.append(1) or (_ for _ in ()).throw(
        ModelNotFound("asked for the package")))  # fmt: skip
    monkeypatch.setenv("MINFER_MODEL", "")  # set, but empty: as if it were not
    for name in (None, "SmolLM2-135M-Instruct", "smollm2-135m-instruct"):
        with pytest.raises(ModelNotFound, match="asked for the package"):
            load_model(name)
    assert len(asked) == 3


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_sizes_they_are_named_after(name: str):
    """Number of parameters against the published one, counted on the meta device, and no rotary surprises."""
    config = shape_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = {
        "smollm2-135m": 0.1345, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.5437, "qwen2.5-7b": 7.6156,
        "qwen3-0.6b": 0.596, "llama-3.2-1b": 1.2358, "llama-3.1-8b": 8.0303, "llama-2-7b": 6.7384,
        "mistral-7b": 7.248, "gemma-2-2b": 2.6143, "phi-3-mini": 3.8211,
    }[name]  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert config.rope_parameters["rope_theta"] >= 10_000
    assert config.rope_parameters["rope_type"] == ("llama3" if "llama-3" in name else "default")
    assert position_limit(config) == config.max_position_embeddings


def test_a_shape_serves_ids_alone():
    lm = load_model("SHAPE:SmolLM2-135M", dtype="bfloat16")
    assert lm.name == "shape:smollm2-135m" and lm.dtype == torch.bfloat16 and lm.tokenizer is None
    output = CachedEngine(lm, max_model_len=16).generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))[0]
    assert len(output.token_ids) == 2 and output.text == ""


@pytest.mark.parametrize("name", ["shape:qwen", "SHAPE:qwen", "shape:", "shape:gpt-4"])
def test_an_unknown_shape_names_those_there_are(name: str):
    with pytest.raises(ModelNotFound, match=r"`llama-2-7b`.*`qwen2\.5-7b`"):
        load_model(name)


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "/no/such", "a/b/c", "~/nothing-here", "tiny"])
def test_no_such_folder_and_no_such_name(name: str):
    with pytest.raises(ModelNotFound, match=r"no such folder.*`tiny-random`.*hub id") as caught:
        load_model(name)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [5, 1.5, True, b"tiny-random", ["tiny-random"], "", object])
def test_what_is_no_name(name: object):
    with pytest.raises(InvalidParameter, match=r"was asked for, and a model is named by a text or a path.*hub id"):
        load_model(name)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_where_a_folder_is_expected(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.parent)
    for name in (folder / file, f"model/{file}"):
        with pytest.raises(ModelNotFound, match=rf"{file}` is a file, and a model is a folder.*model`"):
            load_model(name)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch):
    """One question, with a time limit and not repeated; after that nobody tries again for half a minute."""
    with pytest.raises(ModelNotFound, match=r"nobody/nothing could not be fetched.*Check the spelling.*network"):
        load_model("nobody/nothing")

    asked: list[float] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(timeout)
            raise OSError("no route to host")

    monkeypatch.setattr(load.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(load, "get_session", Session)
    began = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"nobody/nothing could not be fetched.*Check the spelling.*network"):
        load_model("nobody/nothing")
    assert len(asked) == 1 and asked[0] <= 5 and time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["a" * 10_000, "/" + "a" * 10_000, "owner/" + "a" * 10_000, "shape:" + "a" * 10_000])
def test_a_very_long_name_does_not_bury_the_message(name: str):
    for wrong in ((name,), (name, [name])):
        with pytest.raises(MinferError) as caught:
            load_model(wrong[-1])
        assert len(str(caught.value)) < 1200
    for option in ("device", "dtype"):
        with pytest.raises(InvalidParameter) as caught:
            load_model("tiny-random", **{option: name})
        assert len(str(caught.value)) < 400


# -- device and dtype -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda")])
def test_cuda_asked_for_and_absent(device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceNotAvailable, match=r"device='cuda.*device='cpu'.*pytorch\.org"):
        load_model("tiny-random", device=device)


def test_a_gpu_beyond_those_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceNotAvailable, match=r"'cuda:2' was asked for.*sees 2 GPUs"):
        load_model("tiny-random", device="cuda:2")


def test_mps_asked_for_and_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceNotAvailable, match="no Apple GPU"):
        load_model("tiny-random", device="mps")


@pytest.mark.parametrize("device", ["gpu", "CUDA 0", "", "meta", "xla", 1.5])
def test_devices_that_are_none(device):
    with pytest.raises(InvalidParameter, match=r"is not possible.*cpu"):
        load_model("tiny-random", device=device)


@pytest.mark.parametrize("dtype", ["int8", "fp32", "", torch.int8, torch.float64, 32])
def test_dtypes_that_are_none(dtype):
    with pytest.raises(InvalidParameter, match=r"dtype=.* is not possible.*`float32`, `bfloat16` or `float16`"):
        load_model("tiny-random", dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, torch.float32), ("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), (torch.bfloat16,) * 2],
)
def test_dtype(folder: Path, dtype, expected: torch.dtype):
    edit(folder / "config.json", dtype="bfloat16")
    for name in ("tiny-random", folder):
        lm = load_model(name, dtype=dtype, device="cpu")
        assert lm.dtype == expected and {p.dtype for p in lm.model.parameters()} == {expected}


def test_torchs_default_dtype_changes_nothing(tiny: LanguageModel, folder: Path):
    """Loading a half-precision model elsewhere sets it for a while; an error or another thread may leave it there."""
    try:
        torch.set_default_dtype(torch.bfloat16)
        models = load_model("tiny-random", device="cpu"), load_model(folder, device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    for lm in models:
        assert lm.dtype == torch.float32
        for (name, ours), theirs in zip(lm.model.state_dict().items(), tiny.model.state_dict().values(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
        for (name, ours), theirs in zip(lm.model.named_buffers(), tiny.model.buffers(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


# -- a loaded model is on its own -------------------------------------------------------------------------------------

IN_A_CHILD = """
import sys
from pathlib import Path
import torch
from minfer_lib import CachedEngine, SamplingParams, load_model
torch.set_num_threads(1)
folder = Path(sys.argv[1])

def answer(lm):
    return CachedEngine(lm).generate([3, 4, 5], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids

lm = load_model(folder, device="cpu")
expected = answer(lm)
weights = folder / "model.safetensors"
with weights.open("r+b") as file:
    file.seek(weights.stat().st_size // 2)
    file.write(b"x" * (weights.stat().st_size // 2))
assert answer(lm) == expected
weights.open("wb").close()
assert answer(lm) == expected
lm.model.save_pretrained(folder)
assert answer(load_model(folder, device="cpu")) == expected
print("the same")
"""


def test_a_loaded_model_does_not_depend_on_its_file(folder: Path):
    """Written over it would say other things, and cut it would end the process with a bus error."""
    child = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, str(folder)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(load.__file__).parents[2])},
    )  # fmt: skip
    assert (child.returncode, child.stdout) == (0, "the same\n"), child.stderr


def test_only_what_is_a_map_of_a_file_is_copied(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights that were converted on their way are in memory of their own already."""
    copied: list[bool] = []
    own = load._own_memory

    def watched(model: torch.nn.Module) -> None:
        before = [p.data_ptr() for p in model.parameters()]
        own(model)
        copied.append(before != [p.data_ptr() for p in model.parameters()])

    monkeypatch.setattr(load, "_own_memory", watched)
    lm = load_model(folder, device="cpu")
    load_model(folder, device="cpu", dtype="bfloat16")
    assert copied == [True, False]
    assert all(p.untyped_storage().resizable() for p in lm.model.parameters())


def test_a_cast_after_loading_is_noticed(folder: Path, family: Callable[[str], LanguageModel]):
    """It rounds the rotary frequencies, which loading with a dtype leaves in float32."""
    load_model(folder, dtype="bfloat16").check_unchanged()
    lm = load_model(folder)
    lm.check_unchanged()
    lm.model.to(torch.bfloat16)
    assert lm.dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32):  # also where it was cast back: the values are rounded
        lm.model.to(dtype)
        with pytest.raises(InvalidParameter, match=r"cast after it was loaded.*rotary.*load_model\(\.\.\., dtype='"):
            lm.check_unchanged()
    other = load_model(folder)
    other.model.double()
    other.check_unchanged()  # nothing is rounded
    no_rotary = LanguageModel.of(AutoModelForCausalLM.from_config(family("gpt2").model.config), None, "gpt2")
    no_rotary.model.to(torch.bfloat16)
    no_rotary.check_unchanged()
    assert no_rotary.dtype == torch.bfloat16


def test_frequencies_that_change_by_themselves_are_no_cast(tmp_path: Path):
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
    lm = load_model(save_random(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=32))
    before = dict(lm.model.named_buffers())["model.rotary_emb.inv_freq"]
    with torch.no_grad():
        lm.model(torch.zeros(1, 50, dtype=torch.long))
    assert dict(lm.model.named_buffers())["model.rotary_emb.inv_freq"] is not before
    lm.check_unchanged()
    lm.model.bfloat16()
    with pytest.raises(InvalidParameter, match="rotary"):
        lm.check_unchanged()


def test_training_mode_and_another_device_are_noticed(folder: Path):
    lm = load_model(folder)
    lm.model.train()
    with pytest.raises(InvalidParameter, match="training mode"):
        lm.check_unchanged()
    lm.model.eval()
    lm.model.to("meta")
    with pytest.raises(InvalidParameter, match=r"moved from cpu to meta.*load_model\(\.\.\., device='meta'\)"):
        lm.check_unchanged()


# -- facts about a model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (dict(eos_token_id=0), 5, {0}),  # the classic `eos or default`
        (dict(eos_token_id=[0, 7]), 5, {0, 7}),
        (dict(temperature=0.5), 0, {0}),
        (dict(temperature=0.5), [3, 4], {3, 4}),
        (None, [3], {3}),
        (None, None, set()),
    ],
)
def test_eos_from_the_generation_config_else_the_config(folder: Path, generation, config, expected: set[int]):
    edit(folder / "config.json", eos_token_id=config)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    lm = load_model(folder)
    assert lm.eos_ids == expected
    output = NaiveEngine(lm).generate([1], SamplingParams(max_tokens=3, logit_bias={0: 1e4}))[0]
    assert output.token_ids == ([0] if 0 in expected else [0, 0, 0])


def test_the_vocabulary_is_the_rows_of_the_embedding(tiny: LanguageModel, tmp_path: Path):
    save_random(tmp_path, "llama", vocab_size=300)
    tiny.tokenizer.save_pretrained(tmp_path)
    lm = load_model(tmp_path)
    assert lm.vocab_size == 300 > len(lm.tokenizer)
    assert NaiveEngine(lm).generate([299], SamplingParams(max_tokens=1))[0].prompt_token_ids == [299]
    with pytest.raises(InvalidPrompt, match="0 to 299"):
        NaiveEngine(lm).generate([300])


@pytest.mark.parametrize("leave", [(), ("tokenizer_config.json",)])
def test_a_folder_without_tokenizer_files_serves_ids(folder: Path, leave: tuple[str, ...]):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if file not in leave:
            (folder / file).unlink(missing_ok=True)
    lm = load_model(folder)
    assert lm.tokenizer is None
    output = CachedEngine(lm).generate([104, 105], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert output.text == "" and output.token_ids == hf_generate(lm, [104, 105], 4)
    with pytest.raises(InvalidPrompt, match="model, which has no tokenizer"):
        CachedEngine(lm).generate("hi")


@pytest.mark.parametrize(
    ("model_type", "values", "limit"),
    [
        ("llama", dict(max_position_embeddings=77), 77),
        ("gpt2", dict(n_positions=55), 55),
        ("mpt", dict(max_seq_len=66), 66),
        ("mamba", {}, 2048),
        ("phi3", dict(max_position_embeddings=64, original_max_position_embeddings=32, rope_parameters=dict(
            rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, rope_theta=1e4,
            original_max_position_embeddings=32)), 32),
        ("llama", dict(max_position_embeddings=88, rope_parameters=dict(rope_type="dynamic", factor=4.0,
                                                                          rope_theta=1e4)), 88),
        ("gemma3_text", dict(max_position_embeddings=99), 99),  # one rotary embedding for each kind of layer
        ("gemma3_text", dict(max_position_embeddings=99, head_dim=16, rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(rope_type="longrope", factor=3.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8,
                                rope_theta=1e4, original_max_position_embeddings=33))), 33),
    ],
)  # fmt: skip
def test_position_limit(model_type: str, values: dict, limit: int):
    values = BASE | values if model_type == "phi3" else values
    assert position_limit(AutoConfig.for_model(model_type, **values)) == limit


def test_longrope_is_right_up_to_the_length_where_it_would_switch(tmp_path: Path):
    """Beyond it other frequencies apply, and keys in a cache would no longer fit: that length is the limit."""
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, rope_theta=1e4,
                original_max_position_embeddings=32)  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("phi3", **(BASE | dict(
        max_position_embeddings=64, original_max_position_embeddings=32, rope_parameters=rope)))  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
    model.save_pretrained(tmp_path)
    lm = load_model(tmp_path)
    assert lm.max_model_len == 32
    prompt = list(range(5, 25))
    expected = hf_generate(lm, prompt, 12)
    for engine in (NaiveEngine(lm), CachedEngine(lm, "own"), CachedEngine(lm, "hf")):
        output = engine.generate(prompt, SamplingParams(max_tokens=99, ignore_eos=True))[0]
        assert (output.token_ids, output.finish_reason) == (expected, "length")
    with pytest.raises(InvalidParameter, match="from 2 to 32"):
        NaiveEngine(lm, max_model_len=33)


def test_softcap_runs_eager(family: Callable[[str], LanguageModel]):
    """PyTorch's fused attention has no softcap; transformers 5.17 would leave it out without a word."""
    gemma = family("gemma2")
    assert has_softcap(gemma.model.config) and gemma.model.config._attn_implementation == "eager"
    assert not has_softcap(family("llama").model.config)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        capped = gemma.model(input_ids=ids).logits
        layers = [layer.self_attn for layer in gemma.model.model.layers]
        caps = [layer.attn_logit_softcapping for layer in layers]
        try:
            for layer in layers:
                layer.attn_logit_softcapping = None
            assert (gemma.model(input_ids=ids).logits - capped).abs().max() > 1e-2  # the cap matters to this model
        finally:
            for layer, cap in zip(layers, caps, strict=True):
                layer.attn_logit_softcapping = cap


# -- folders that are not right ---------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "no file named model.safetensors"),
        (written("config.json", b"{"), "not a valid JSON"),
        (written("model.safetensors", b""), "header"),
        (written("model.safetensors", b"hello"), "header"),
        (truncate, "incomplete"),
        (written("tokenizer.json", b"{"), "because of its tokenizer: .*line 1"),
        (written("tokenizer.json", b"{}"), "because of its tokenizer: there is no 'added_tokens'"),
        (written("tokenizer_config.json", b"{"), "because of its tokenizer: .*line 1"),
        (written("generation_config.json", b"{"), r"because of its generation_config\.json: .*not a valid JSON"),
        (written("generation_config.json", b"[]"), r"because of its generation_config\.json: "),
        (written("generation_config.json", b""), r"because of its generation_config\.json: .*not a valid JSON"),
        (lambda folder: edit(folder / "config.json", hidden_size="x"), "hidden_size"),
        (
            lambda folder: edit(folder / "config.json", vocab_size=300),
            r"lm_head\.weight` has the shape \[259, 64\] in the files, and \[300, 64\] by the config \(2 tensors",
        ),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=3), r"9 of its tensors.*layers\.2\."),
        (
            lambda folder: edit(folder / "config.json", num_hidden_layers=1),
            r"more than its config\.json has a place for: 9 tensors, the first is `model\.layers\.1\.",
        ),
        (drop_a_tensor, r"1 of its tensors.*`model\.layers\.1\.mlp\.up_proj\.weight`.*random numbers"),
    ],
)
def test_a_damaged_folder(folder: Path, damage: Callable[[Path], object], message: str):
    damage(folder)
    with pytest.raises(ModelNotFound, match=message) as caught:
        load_model(folder)
    assert "model" in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("base", [True, False])
def test_an_adapter_is_refused(folder: Path, base: bool):
    """With or without the package peft: transformers would load the base model alone, or none at all."""
    weights = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight": torch.ones(4, 64) for x in "AB"}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    if not base:
        for file in ("config.json", "model.safetensors", "generation_config.json"):
            (folder / file).unlink()
    with pytest.raises(UnsupportedModel, match=r"model is an adapter.*merge_and_unload\(\)\.save_pretrained"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_integers(folder: Path, dtype: torch.dtype, file: str):
    """Codes of a quantised model whose config was lost: read as floats they answer, and make no sense."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    codes = {**weights, name: (weights[name] * 50).to(dtype)}
    (folder / "model.safetensors").unlink()
    save_file(codes, folder / file, {"format": "pt"}) if file.endswith("s") else torch.save(codes, folder / file)
    with pytest.raises(ModelNotFound, match=r"up_proj\.weight` in the files of model is stored as integers.*config"):
        load_model(folder)


def test_a_config_that_says_how_it_was_quantised_is_believed_if_that_is_known(folder: Path):
    """transformers passes over a method that it does not know, and loads codes as weights."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: (weights[name] * 50).to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", quantization_config={"quant_method": "from-the-future"})
    with pytest.raises(ModelNotFound, match="is stored as integers"):
        load_model(folder)
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 8})
    with pytest.raises(MinferError) as caught:  # of transformers, which lacks a package or a GPU for it
        load_model(folder)
    assert "stored as integers" not in str(caught.value)


def test_files_of_torch_and_shards_are_looked_at_too(tiny: LanguageModel, folder: Path):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert load_model(folder).eos_ids == tiny.eos_ids
    (folder / "pytorch_model.bin").unlink()
    tiny.model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert load_model(folder).eos_ids == tiny.eos_ids
    edit(folder / "config.json", vocab_size=5_000_000)
    with pytest.raises(ModelNotFound, match=r"\[259, 64\] in the files, and \[5000000, 64\] by the config \(2 tensors"):
        load_model(folder)


def test_a_model_of_a_base_without_its_prefix_is_looked_at_too(tmp_path: Path):
    """GPT-2's files on the hub are those of the model without its output layer."""
    save_random(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4)
    weights = {key.removeprefix("transformer."): w for key, w in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(tmp_path).vocab_size == BASE["vocab_size"]
    edit(tmp_path / "config.json", vocab_size=10**7)
    with pytest.raises(ModelNotFound, match=r"`wte\.weight` has the shape.*\[10000000, 64\] by the config"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(vocab_size=5_000_000), r"\[5000000, 64\] by the config"),
        (dict(intermediate_size=10**9), r"\[64, 1000000000\] by the config"),
        (dict(hidden_size=64 * 10**6), r"by the config"),
        (
            dict(num_hidden_layers=10**12),
            r"asks for 1000000000000 parts \(`num_hidden_layers`\), and no model has more",
        ),
        (dict(num_hidden_layers=10**400), r"asks for 10{199}\.\.\. \(401 characters\) parts"),
        (dict(num_hidden_layers=9_000), r"asks for 9000 parts \(`num_hidden_layers`\), and the weights are 21 tensors"),
        (dict(text_config=[dict(num_experts=10**12)]), r"`num_experts`"),
        (dict(num_hidden_layers=20), r"describes a model of [\d,]+ weights, and the files hold 94,912"),
    ],
)
def test_sizes_of_a_config_are_compared_before_they_are_allocated(
    folder: Path, values: dict, message: str, monkeypatch: pytest.MonkeyPatch
):
    edit(folder / "config.json", **values)

    def allocated(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("minfer_lib.models.load.AutoModelForCausalLM.from_pretrained", allocated)
    with pytest.raises(ModelNotFound, match=message) as caught:
        load_model(folder)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(folder: Path, value: float):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"weights of model are damaged: `model\.layers\.1\.mlp\.up_proj\.weight`"):
        load_model(folder)


def test_the_first_bad_tensor(tiny: LanguageModel):
    assert first_bad_tensor(tiny.model) is None
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("ids", torch.tensor([1]))
    assert first_bad_tensor(model) is None
    model.mask[0] = torch.nan
    assert first_bad_tensor(model) == "mask"
    model.bias.data[1] = torch.inf
    assert first_bad_tensor(model) == "bias"


@pytest.mark.parametrize("eos", ["x", [1.5], True, [None], {"a": 1}])
def test_an_end_of_sequence_that_is_no_id(folder: Path, eos: object):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(MinferError, match=r"eos_token_id|generation_config"):
        load_model(folder)


def test_what_good_checkpoints_leave_over_is_no_mistake(tiny: LanguageModel, folder: Path):
    """Buffers that older versions of transformers saved, and heads that say something other than the next token."""
    weights = load_file(folder / "model.safetensors")
    left_over = (
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "model.layers.0.attn.masked_bias",
        "model.layers.0.attn.attention.bias", "model.position_ids", "v_head.summary.weight", "score.weight",
        "model.layers.1.self_attn.k_scale",
    )  # fmt: skip
    save_file(weights | {key: torch.ones(2) for key in left_over}, folder / "model.safetensors", {"format": "pt"})
    assert load_model(folder).eos_ids == tiny.eos_ids
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    with pytest.raises(ModelNotFound, match=r"1 tensor, the first is `model\.layers\.0\.self_attn\.q_proj\.bias`"):
        load_model(folder)


def test_what_transformers_expects_to_be_left_over_is_no_mistake(tmp_path: Path):
    """GPT-2's files on the hub hold the causal mask of each layer, and no output layer: it is the embedding."""
    save_random(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(2)}
    save_file(weights | masks, tmp_path / "model.safetensors", {"format": "pt"})
    lm = load_model(tmp_path)
    assert lm.model.lm_head.weight is lm.model.transformer.wte.weight


def test_a_missing_output_layer_is_noticed_where_it_is_not_the_embedding(folder: Path):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"1 of its tensors.*`lm_head\.weight`"):
        load_model(folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    lm = load_model(folder)
    assert lm.model.lm_head.weight is lm.model.model.embed_tokens.weight


def test_a_package_that_a_folder_needs_and_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("this tokenizer requires sentencepiece")

    monkeypatch.setattr("minfer_lib.models.load.AutoTokenizer.from_pretrained", missing)
    with pytest.raises(BadEnvironment, match=r"needs a package that is not installed.*sentencepiece"):
        load_model(folder)


# -- models that cannot be served -------------------------------------------------------------------------------------


def test_an_architecture_that_transformers_does_not_know(folder: Path):
    edit(folder / "config.json", model_type="from-the-future")
    with pytest.raises(UnsupportedModel, match=r"model is not a decoder-only.*from-the-future"):
        load_model(folder)


def test_code_that_comes_with_a_model_is_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Left to itself transformers would ask on the terminal, and a line of piped input might say yes."""
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    modules = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    edit(folder / "config.json", model_type="own-code", auto_map=modules)
    (folder / "code.py").write_text(f"open({str(folder / 'it ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(UnsupportedModel, match="model is not a decoder-only"):
        load_model(folder)
    assert not (folder / "it ran").exists()


OWN_AND_HARMLESS = ("GenerationConfig", "ModelShape")  # the former is data alone, the latter ours


def test_no_call_of_the_package_may_run_code_of_a_model():
    """Every from_pretrained and from_config says so; what is left open, somebody answers with a line of piped input."""
    calls = 0
    for path in Path(load.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value).split(".")[-1]
            if node.func.attr in ("from_pretrained", "from_config") and of not in OWN_AND_HARMLESS:
                calls += 1
                said = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert said.get("trust_remote_code") == "False", f"{path.name}:{node.lineno}"
    assert calls >= 6


def test_an_encoder_decoder(tmp_path: Path):
    AutoConfig.for_model("t5", d_model=8, num_layers=1, vocab_size=20).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="not a decoder-only language model"):
        load_model(tmp_path)


BART = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=50,
)  # fmt: skip


def test_an_encoder_decoder_whose_decoder_transformers_would_load(tmp_path: Path):
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **BART)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"\(bart\) is an encoder-decoder.*Choose a decoder"):
        load_model(tmp_path)


@pytest.mark.parametrize("model_type", ["bart", "blenderbot-small"])
def test_a_decoder_whose_config_counts_the_layers_of_its_encoder(tmp_path: Path, model_type: str):
    """Every cache of transformers would have one layer for two; `generate` itself fails on it."""
    values = BART | dict(encoder_layers=1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"\({model_type}\).*counts the 1 layers.*the decoder has 2"):
        load_model(tmp_path)


def test_a_decoder_of_its_own_right_is_served(tmp_path: Path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", **BART)).save_pretrained(tmp_path)
    lm = load_model(tmp_path)
    output = CachedEngine(lm).generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert output.token_ids == hf_generate(lm, [5, 6, 7], 5)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra", "roformer", "xlnet", "xlm"])
def test_a_model_that_sees_the_future(tmp_path: Path, model_type: str):
    """transformers loads these as causal language models, with at most a warning, and they attend to both sides."""
    values = dict(bert={}, roberta={}, electra={}, roformer={}, xlnet=dict(d_model=64, n_head=4, n_layer=2, d_inner=96),
                  xlm=dict(emb_dim=64, n_layers=2, n_heads=4))[model_type]  # fmt: skip
    if model_type in ("xlnet", "xlm"):
        config = AutoConfig.for_model(model_type, vocab_size=50, **values)
    else:
        config = AutoConfig.for_model(model_type, **(BASE | values))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{model_type}.*not a causal language model"):
        load_model(tmp_path)


def test_the_same_architecture_as_a_decoder_is_served(tmp_path: Path):
    lm = load_model(save_random(tmp_path, "bert", is_decoder=True))
    output = NaiveEngine(lm).generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert output.token_ids == hf_generate(lm, [5, 6, 7], 5)


@pytest.mark.parametrize("model_type", ["roberta", "camembert"])
def test_a_decoder_that_counts_positions_from_elsewhere(tmp_path: Path, model_type: str):
    with pytest.raises(UnsupportedModel, match=f"{model_type}.*positions"):
        load_model(save_random(tmp_path, model_type, is_decoder=True))


def test_a_model_that_needs_more_than_ids(monkeypatch: pytest.MonkeyPatch):
    model = load_model("tiny-random", device="cpu").model

    def forward(self: object, **kwargs: object) -> None:
        raise ValueError("You have to specify pixel_values")

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"cannot be run on token ids alone.*pixel_values"):
        check_causal(model, "eyes")


def test_accelerate_and_gguf_are_there():
    """What `pyproject.toml` promises beside torch and transformers: loading straight to a GPU, and converting."""
    assert importlib.util.find_spec("accelerate") and importlib.util.find_spec("gguf")


def test_every_refusal_is_one_of_ours(tmp_path: Path):
    for name in ("no-such", "shape:no-such", "no/such", str(tmp_path)):
        with pytest.raises(MinferError) as caught:
            load_model(name)
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
