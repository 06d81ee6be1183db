"""Quantised models as folders: what is loaded is bit for bit what was saved, or refused."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minfer_lib import CachedEngine, LanguageModel, SamplingParams, describe_int8, load_model, quantize_int8, save_int8
from minfer_lib.errors import InvalidParameter, MinferError, ModelNotFound
from minfer_lib.models.memory import measured_weight_bytes
from minfer_lib.quant.files import FORMAT, MANIFEST, WEIGHTS, load_int8
from minfer_lib.quant.linear import Int8Embedding, Int8Linear
from minfer_lib.quant.products import why_not

Family = Callable[[str], LanguageModel]
IDS = torch.tensor([families.PROMPTS[0]])
CPU = torch.device("cpu")
VARIANTS: dict[str, dict] = {
    "dynamic": {},
    "none": dict(activations="none"),
    "head": dict(skip=()),
    "everything": dict(skip=(), embedding=True),
    "everything, none": dict(skip=(), embedding=True, activations="none"),
    "plain": dict(smoothing=0),
    "int_mm": dict(kernel="int_mm"),
    "portable": dict(kernel="portable", activations="none"),
    "some": dict(skip=("down_proj", "lm_head")),
}
FAMILIES = ["llama", "qwen2", "gpt2", "gemma2", "gemma3_text", "opt", "qwen3_moe", "gpt_oss", "deepseek_v3", "bloom"]


def logits(lm: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(input_ids=IDS % lm.vocab_size, use_cache=False).logits


def make(source: str | Path, options: dict, dtype: str = "float32") -> LanguageModel:
    if options.get("kernel") and why_not(options["kernel"]):
        pytest.skip(why_not(options["kernel"]))
    return quantize_int8(load_model(source, device="cpu", dtype=dtype), progress=False, **options)


def tensors(lm: LanguageModel) -> dict[str, torch.Tensor]:
    """Everything that the model computes with, buffers that no file holds included."""
    return dict((*lm.model.named_parameters(), *lm.model.named_buffers()))


def assert_same(one: LanguageModel, two: LanguageModel) -> None:
    a, b = tensors(one), tensors(two)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
    # experts are products of floats, which may round by where in memory they stand
    experts = any(t.ndim == 3 for t in a.values())
    torch.testing.assert_close(logits(two), logits(one), rtol=0, atol=1e-5 if experts else 0)
    assert (one.quantization, one.dtype, one.name) == (two.quantization, two.dtype, two.name)
    assert (one.eos_ids, one.max_model_len, one.vocab_size) == (two.eos_ids, two.max_model_len, two.vocab_size)
    assert describe_int8(one).layers == describe_int8(two).layers
    assert describe_int8(one).kernels == describe_int8(two).kernels
    assert measured_weight_bytes(one.model) == measured_weight_bytes(two.model)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sources")

    def get(name: str) -> Path:
        if not (root / name).is_dir():
            families.save(name, root / name)
        return root / name

    return get


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kinds of tensors: biases, smoothing, an int8 embedding; treat it as read-only."""
    folder = tmp_path_factory.mktemp("whole")
    families.save("qwen2", folder / "source")
    return save_int8(make(folder / "source", VARIANTS["everything"]), folder / "int8")


@pytest.fixture()
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "int8"))


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_every_variant_comes_back_bit_for_bit(sources, tmp_path: Path, name: str, variant: str):
    made = make(sources(name), VARIANTS[variant])
    assert save_int8(made, tmp_path / "int8") == tmp_path / "int8"
    assert_same(made, load_model(tmp_path / "int8", device="cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["dynamic", "head", "everything, none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back_bit_for_bit(sources, tmp_path: Path, name: str, variant: str, dtype: str):
    made = make(sources(name), VARIANTS[variant], dtype)
    save_int8(made, tmp_path / "int8")
    assert_same(made, load_model(tmp_path / "int8", device="cpu", dtype=dtype))
    assert load_int8(tmp_path / "int8", CPU).dtype == made.dtype  # as it was saved


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize(("saved", "asked"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_another_dtype_is_for_what_is_not_in_int8(sources, tmp_path: Path, name: str, saved: str, asked: str):
    made = make(sources(name), VARIANTS["dynamic"], saved)
    save_int8(made, tmp_path / "int8")
    loaded = load_model(tmp_path / "int8", device="cpu", dtype=asked)
    assert str(loaded.dtype) == f"torch.{asked}"
    like = load_model(sources(name), device="cpu", dtype=asked)  # as transformers loads it in that dtype
    of_like = dict(like.model.named_parameters()) | dict(like.model.named_buffers())
    for key, tensor in (*loaded.model.named_parameters(), *loaded.model.named_buffers()):
        if tensor.dtype == torch.int8 or (key.endswith(("scale", "smoothing")) and key not in of_like):
            assert tensor.dtype in (torch.int8, torch.float32)
        elif not isinstance(loaded.model.get_submodule(key.rpartition(".")[0]), Int8Linear):
            assert tensor.dtype == of_like[key].dtype, key  # rotary frequencies stay float32
    a, b = logits(made).float(), logits(loaded).float()
    assert ((a - b).square().mean() / a.square().mean()).sqrt() < 0.15


def test_a_tied_matrix_is_kept_once(sources, tmp_path: Path):
    made = make(sources("gemma2"), VARIANTS["everything"])
    loaded = load_model(save_int8(made, tmp_path / "int8"), device="cpu")
    embedding, head = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    assert isinstance(embedding, Int8Embedding) and head.weight is embedding.weight
    rows = families.VOCAB * families.BASE["hidden_size"]
    names = [n for n, t in load_file(tmp_path / "int8" / WEIGHTS).items() if t.numel() == rows]
    assert names == ["model.embed_tokens.weight"]
    default = save_int8(make(sources("gemma2"), {}), tmp_path / "default")
    names = [n for n, t in load_file(default / WEIGHTS).items() if t.numel() == rows]
    assert len(names) == 1
    model = load_model(default, device="cpu").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_model_with_a_tokenizer_serves_text_as_before(tmp_path: Path):
    made = quantize_int8(load_model("tiny-random", device="cpu"), progress=False)
    loaded = load_model(save_int8(made, tmp_path / "a" / "b" / "int8"), device="cpu")
    assert_same(made, loaded)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    answers = [CachedEngine(lm).generate("Hello", params)[0] for lm in (made, loaded)]
    assert answers[0].token_ids == answers[1].token_ids and answers[0].text == answers[1].text
    assert loaded.chat_ids("Hello") == made.chat_ids("Hello")


@pytest.mark.parametrize("change", ["copied", "used and copied", "sent to bfloat16 and back", "loaded before"])
def test_whatever_was_done_with_a_model_it_can_be_saved(sources, tmp_path: Path, change: str):
    for variant in ("everything", "int_mm"):
        made = other = make(sources("qwen2"), VARIANTS[variant])
        if "copied" in change:
            if "used" in change:
                logits(made)
            other = copy.deepcopy(made)
        elif "bfloat16" in change:
            made = copy.deepcopy(made)
            for module in other.model.modules():
                if isinstance(module, Int8Linear | Int8Embedding):
                    module.to(torch.bfloat16).to(torch.float32)
        else:
            other = load_model(save_int8(made, tmp_path / "first"), device="cpu")
        save_int8(other, tmp_path / variant)
        loaded = load_model(tmp_path / variant, device="cpu")
        assert_same(made, loaded)


def test_an_earlier_save_is_replaced(sources, tmp_path: Path):
    first, second = make(sources("llama"), {}), make(sources("qwen2"), VARIANTS["head"])
    folder = tmp_path / "int8"
    folder.mkdir()  # empty ones are fine too
    save_int8(first, folder)
    save_int8(second, str(folder))
    assert_same(second, load_model(folder, device="cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def raising(kind: type[BaseException], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.replace` breaks off after so many renames."""
    replace, calls = os.replace, []

    def breaking(*args):
        calls.append(1)
        if len(calls) > at:
            monkeypatch.undo()
            raise kind("broken")
        replace(*args)
        if len(calls) == at:
            monkeypatch.undo()
            raise kind("broken")

    monkeypatch.setattr("os.replace", breaking)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_earlier_save_survives_an_interrupt(
    sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], at: int
):
    first, second = make(sources("llama"), {}), make(sources("llama"), VARIANTS["head"])
    save_int8(first, tmp_path / "int8")
    raising(kind, at, monkeypatch)
    with pytest.raises((kind, InvalidParameter)):
        save_int8(second, tmp_path / "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]
    assert_same(second if at == 2 else first, load_model(tmp_path / "int8", device="cpu"))


def test_files_that_somebody_put_there_are_not_lost(sources, tmp_path: Path):
    made = make(sources("llama"), {})
    folder = save_int8(made, tmp_path / "int8")
    (folder / "my_notes.md").write_text("mine")
    with pytest.raises(InvalidParameter, match=r"holds something else \(my_notes.md\)"):
        save_int8(made, folder)
    assert (folder / "my_notes.md").read_text() == "mine"
    assert_same(made, load_model(folder, device="cpu"))


@pytest.mark.parametrize("what", ["save_file", "tokenizer"])
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    made = quantize_int8(load_model("tiny-random", device="cpu"), progress=False)

    def full(*args, **options):
        raise Exception("No space left on device (os error 28)")  # as tokenizers says it

    if what == "save_file":
        monkeypatch.setattr("minfer_lib.quant.files.save_file", full)
    else:
        monkeypatch.setattr(type(made.tokenizer), "save_pretrained", full)
    with pytest.raises(InvalidParameter, match=r"cannot be written to .*: No space left on device"):
        save_int8(made, tmp_path / "int8")
    assert not [*tmp_path.iterdir()]


# -- refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_or_where(sources, tmp_path: Path, tiny: LanguageModel):
    with pytest.raises(InvalidParameter, match="no quantised model"):
        save_int8(tiny, tmp_path / "int8")
    made = make(sources("llama"), {})
    other, file = tmp_path / "other", tmp_path / "file"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    file.write_text("mine")
    for place, what in ((other, r"holds something else \(notes.txt\)"), (file, "is a file")):
        with pytest.raises(InvalidParameter, match=what):
            save_int8(made, place)
    with pytest.raises(InvalidParameter, match="cannot be written"):
        save_int8(made, file / "below")
    for place in (3, "", None, b"x"):
        with pytest.raises(InvalidParameter, match="must be a path"):
            save_int8(made, place)
    assert (other / "notes.txt").read_text() == file.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_folder_can_be_saved_over_from_inside_itself(sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = make(sources("llama"), {})
    folder = save_int8(made, tmp_path / "int8")
    monkeypatch.chdir(folder)
    assert save_int8(made, ".") == folder.resolve()
    assert (folder / MANIFEST).is_file() and [path.name for path in tmp_path.iterdir()] == ["int8"]


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return apply


def without(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        del held[name]
        save_file(held, folder / WEIGHTS)

    return apply


def reshaped(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        held[name] = held[name][:-1].clone()
        save_file(held, folder / WEIGHTS)

    return apply


def floats(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        save_file(held | {name: held[name].float()}, folder / WEIGHTS)

    return apply


def other_config(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return apply


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


Q = "model.layers.0.self_attn.q_proj"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "manifest is empty": cut(MANIFEST, 0),
    "manifest is cut off": cut(MANIFEST, 100),
    "manifest is a list": lambda folder: (folder / MANIFEST).write_text("[1]"),
    "manifest is no text": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe{"),
    "no dtype": edit(lambda m: m.pop("dtype")),
    "unknown dtype": edit(lambda m: m.update(dtype="float7")),
    "no layers": edit(lambda m: m.update(linear={})),
    "layers of another type": edit(lambda m: m.update(linear=5)),
    "embedding of another type": edit(lambda m: m.update(embedding="model.embed_tokens")),
    "a layer is missing": edit(lambda m: m["linear"].pop(Q)),
    "a layer too many": edit(lambda m: m["linear"].update({"model.layers.7.q": m["linear"][Q]})),
    "unknown activations": edit(lambda m: m["linear"][Q].update(activations="int4")),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "weights are cut off": cut(WEIGHTS, 5000),
    "weights are empty": cut(WEIGHTS, 0),
    "no codes": without(f"{Q}.weight"),
    "no scale": without(f"{Q}.scale"),
    "no bias": without(f"{Q}.bias"),
    "no smoothing": without(f"{Q}.smoothing"),
    "no norm": without("model.norm.weight"),
    "no embedding": without("model.embed_tokens.weight"),
    "codes of another shape": reshaped(f"{Q}.weight"),
    "scales of another shape": reshaped(f"{Q}.scale"),
    "smoothing of another shape": reshaped(f"{Q}.smoothing"),
    "a norm of another shape": reshaped("model.norm.weight"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "an embedding of floats": floats("model.embed_tokens.weight"),
    "codes that are floats": floats(f"{Q}.weight"),
    "sizes of another world": other_config(vocab_size=5_000_000),
    "layers of another world": other_config(num_hidden_layers=10**12, layer_types=None),
    "layers that are no number": other_config(num_hidden_layers="many", layer_types=None),
    "config of a smaller model": other_config(num_hidden_layers=1, layer_types=["full_attention"]),
    "config of a larger model": other_config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "config that is not possible": other_config(num_hidden_layers=3),
    "config of a wider model": other_config(intermediate_size=128),
    "config of another family": other_config(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folders(damaged: Path, kind: str):
    DAMAGE[kind](damaged)
    with pytest.raises(ModelNotFound) as caught:
        load_model(damaged, device="cpu")
    assert "save_int8" in str(caught.value)


@pytest.mark.parametrize("number", [0, FORMAT + 1, None, "1"])
def test_another_format(damaged: Path, number: object):
    edit(lambda m: m.update(format=number))(damaged)
    with pytest.raises(ModelNotFound, match=f"format {number!r} of int8 folders.*reads {FORMAT}"):
        load_model(damaged, device="cpu")


@pytest.mark.parametrize("kernel", ["fbgemm", "int8pack_mm", "cublas", 5, None])
def test_a_kernel_that_this_machine_lacks_is_replaced(damaged: Path, kernel: object):
    edit(lambda m: [layer.update(kernel=kernel) for layer in m["linear"].values()])(damaged)
    loaded = load_model(damaged, device="cpu")
    assert logits(loaded).isfinite().all() and describe_int8(loaded).layers


def test_a_folder_of_the_time_of_groups_is_read(whole: Path, damaged: Path):
    edit(lambda m: m.update(groups=[[Q, Q.replace("q_proj", "k_proj")]]) or m.pop("files"))(damaged)
    assert_same(load_model(whole, device="cpu"), load_model(damaged, device="cpu"))


def test_code_that_a_folder_brings_is_not_run(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "evil.M"}}
    (damaged / "config.json").write_text(json.dumps(config))
    (damaged / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass M: pass\n")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked whether to run code"))
    with pytest.raises(ModelNotFound, match=r"int8 model in int8 could not be loaded.*(custom code|ViTConfig|trust)"):
        load_model(damaged, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_weights_win_over_a_config_that_says_tied(tmp_path: Path):
    families.save("llama", tmp_path / "source")
    other_config(tie_word_embeddings=True)(tmp_path / "source")  # its head and its embedding differ
    for name, options in (("kept", dict(activations="none")), ("in int8", VARIANTS["everything"])):
        made = make(tmp_path / "source", options)
        assert not torch.equal(load_model(tmp_path / "source", device="cpu").model.lm_head.weight,
                               made.model.get_input_embeddings().weight)  # fmt: skip
        loaded = load_model(save_int8(made, tmp_path / name), device="cpu")
        assert_same(made, loaded)
        assert_same(made, load_model(save_int8(loaded, tmp_path / f"{name} again"), device="cpu"))


def test_transformers_does_not_take_codes_for_weights(whole: Path):
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(whole)


@pytest.mark.parametrize("variant", ["dynamic", "none", "int_mm", "everything", "everything, none"])
def test_saved_by_transformers_it_is_refused(sources, tmp_path: Path, variant: str):
    """`save_pretrained` of a quantised model, where it does not fail, writes codes under the names of weights."""
    made = make(sources("llama"), VARIANTS[variant])
    with pytest.raises((MinferError, RuntimeError), match=r"stored as integers|shared tensors"):
        made.model.save_pretrained(tmp_path / "saved")
        load_model(tmp_path / "saved", device="cpu")
