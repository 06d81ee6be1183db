"""minfer: an LLM inference engine, built chapter by chapter.

A folder is a question, in the order of the chapters: `models` (what do I run?), `generation` (what was asked, and which
token comes next?), `cache` (where are keys and values?), `attention` (who sees whom?), `engine` (who runs when?),
`quant` (how few bytes will do?), `kernels` (what does the hardware run?). Imports point up this list, with `kernels`
below `models`. Beside the engine stand `bench`, which measures it, and `learn`, which the notebooks draw and explain
with; the engine imports neither.

Names are imported when they are first used: torch takes seconds to load, which `python -m minfer_lib --help` need not
wait for, and what is installed is checked before it is loaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# OpenMP's threads wait by spinning. Where two programs share the cores, each spins while the other should run, and a
# step takes many times as long. GCC's runtime reads this as torch loads it: a thousand turns, then it sleeps.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

if TYPE_CHECKING:  # for editors
    # ruff: noqa: F401
    from .cache.blocks import BlockAllocator
    from .cache.paged import BlockTable, PagedKVCache
    from .engine.llm_engine import LLMEngine
    from .engine.serial import CachedEngine, NaiveEngine
    from .errors import MinferError
    from .generation.params import SamplingParams
    from .generation.request import RequestMetrics, RequestOutput, StreamPiece
    from .models.load import LanguageModel, load_model
    from .quant.files import save_int8
    from .quant.quantize import describe_int8, quantize_int8

_HOME = {
    "BlockAllocator": "cache.blocks",
    "BlockTable": "cache.paged",
    "CachedEngine": "engine.serial",
    "LLMEngine": "engine.llm_engine",
    "LanguageModel": "models.load",
    "MinferError": "errors",
    "NaiveEngine": "engine.serial",
    "PagedKVCache": "cache.paged",
    "RequestMetrics": "generation.request",
    "RequestOutput": "generation.request",
    "SamplingParams": "generation.params",
    "StreamPiece": "generation.request",
    "describe_int8": "quant.quantize",
    "load_model": "models.load",
    "quantize_int8": "quant.quantize",
    "save_int8": "quant.files",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    from .models.environment import check_versions

    check_versions()  # before anything imports torch or transformers
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
