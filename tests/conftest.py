"""Set-up shared by all tests: offline, quiet, and models that are made once."""

import gc
import os

# Before transformers is imported: it reads these at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # models this small only wait for each other's threads, here and in child processes
os.environ.pop("MINFER_MODEL", None)

from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
import transformers

from minfer_lib import LanguageModel, load_model

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def tiny() -> LanguageModel:
    """The two-layer Llama with a tokenizer of bytes; treat it as read-only."""
    return load_model("tiny-random", device="cpu")


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    """The packaged model from the ordinary cache, converted there if it is not yet; treat it as read-only."""
    return load_model(device="cpu")


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LanguageModel]:
    """family(name): a tiny random model of `families.ALL`, saved to a folder and loaded from there as any other."""
    root, loaded = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> LanguageModel:
        if name not in loaded:
            families.save(name, root / name)
            loaded[name] = load_model(root / name, device="cpu")
        return loaded[name]

    return get


@pytest.fixture()
def folder(tiny: LanguageModel, tmp_path: Path) -> Path:
    """tiny-random as a folder of its own, which a test may damage."""
    path = tmp_path / "model"
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


def pytest_collection_finish() -> None:
    """Keeps what is loaded by now out of every later collection of garbage, which else would take a second each."""
    gc.collect()
    gc.freeze()
