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
from minfer_lib.fast import graphs

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

# What `make quick` leaves out, by a part of a test's name, beside all that run the real model: seconds each, or
# pictures and measurements, which few changes touch.
SLOW = (
    "test_paged_triton.py", "test_int8_triton.py",  # through Triton's interpreter
    "test_fast_kernels.py", "test_fast_products.py", "test_fused_parts.py", "test_fast.py::test_compiled",
    "test_kv_int8.py::test_compiled",
    "pages, graphs", "slots, fast",  # kinds of engines that differ little from those that stay
    "test_bench_", "test_learn_batching.py", "test_learn_int8.py", "test_learn_paged.py", "test_learn_plots.py",
    "test_learn_widgets.py", "test_learn_comparison.py", "test_notebook_runner.py", "test_bitsandbytes_int8.py",
    "test_environment.py::test_what_is_optional", "test_imports.py::test_the_engine_runs_where",
    "test_cli.py::test_a_copy_without", "test_cli.py::test_a_reader_that_goes", "test_cli.py::test_bytes_that_are_no",
    "test_cli.py::test_quality", "test_cli.py::test_an_interrupted_ladder", "test_cli.py::test_ladder",
    "test_int8_kernels.py::test_two_processes", "test_int8_kernels.py::test_a_cache_from", "test_packaged.py",
    "test_int8_kernels.py::test_compilers_of_several", "test_int8_kernels.py::test_a_library_that",
    "test_paged_compiled.py::test_a_kernel_that_a_compiler", "test_int8_exactness.py::test_smollm2",
    "test_llm_engine_events.py::test_an_interrupt_at_any_line", "test_llm_engine_events.py::test_time_limits",
    "test_llm_engine.py::test_an_interrupt_in_a_step", "test_threads.py::test_all_kinds", "test_threads.py::test_cont",
    "test_loading.py::test_a_loaded_model_does", "test_loading.py::test_a_shape", "test_loading.py::test_the_packaged",
    "test_learn_decomposition.py", "test_pictures_can_be_drawn", "test_other_systems.py",
    "test_learn_style.py::test_the_core_and_learn", "test_paged_compiled.py::test_cpus_with_less",
    "test_exactness.py::test_other_families", "test_int8_files.py::test_every_family", "test_quantize_int8.py::test_sm",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        real = "smollm2" in getattr(item, "fixturenames", ()) or "smollm2" in item.name
        if real or any(name in item.nodeid for name in SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def sizes_of_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast paths fill batches up here as they do on a GPU; a module with EXACT_ROWS is about CPUs, which need not."""
    monkeypatch.setattr(graphs, "PADS_ON_CPU", not getattr(request.module, "EXACT_ROWS", False))


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
