"""Imports point up the table of folders, and the engine can be copied without what measures and explains it.

Read from the source, so that a fault is named by file, wherever in a function it hides. The few imports that point
down are lazy, and listed here one by one.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import minfer_lib

ROOT = Path(minfer_lib.__file__).parent
# Each level imports those before it. Kernels stand below models, since attention and int8 weights run on them.
LEVELS = ["errors", "models", "kernels", "generation", "cache", "attention", "engine", "quant", "fast", "serve"]
MEASURING = ["bench", "learn"]  # one level: each draws on the other, and the engine on neither
# What points down because somebody asked for it by name: (file, module), imported inside a function.
LAZY = {
    ("models/load.py", "quant.files"),  # a folder that holds int8 weights
    ("models/memory.py", "cache.contiguous"),  # the memory of a cache, by the cache's own formula
    ("engine/llm_engine.py", "fast"),  # LLMEngine(lm, fast=True)
}
COMMAND_LINE = "__main__.py"  # reaches everything, bench and serve inside functions alone
ON_REQUEST = {"bench", "learn", "serve", "fast"}


def imports(file: str, source: str) -> Iterator[tuple[str, bool]]:
    """Each module of the package that a file imports, as a path inside the package, and whether at once."""
    package = file.split("/")[:-1]

    def walk(node: ast.AST, at_once: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            names: list[list[str]] = []
            if isinstance(child, ast.Import):
                names = [name.name.split(".") for name in child.names]
                names = [name[1:] for name in names if name[0] == "minfer_lib"]
            elif isinstance(child, ast.ImportFrom):
                module = child.module.split(".") if child.module else []
                if child.level:
                    base = package[: len(package) - child.level + 1] + module
                    names = [[*base, name.name] for name in child.names]
                elif module[0] == "minfer_lib":
                    names = [[*module[1:], name.name] for name in child.names]
            elif isinstance(child, ast.Call) and getattr(child.func, "attr", "") == "import_module":
                written = child.args[0].value if isinstance(child.args[0], ast.Constant) else ""
                names = [written.split(".")[1:]] if written.startswith("minfer_lib.") else []
            yield from ((".".join(name), at_once) for name in names if name)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, at_once and not inside)

    yield from walk(ast.parse(source), True)


def complaints(sources: Mapping[str, str]) -> list[str]:
    """`sources`: text by path inside the package."""
    rank = {name: i for i, name in enumerate(LEVELS)} | dict.fromkeys(MEASURING, len(LEVELS))
    found = []
    for file, source in sources.items():
        own = file.split("/")[0].removesuffix(".py")
        for module, at_once in imports(file, source):
            level = module.split(".")[0]
            if file == COMMAND_LINE:
                wrong = level in ON_REQUEST and at_once
            elif own == "__init__":  # lazily by a table of names
                wrong = level in ON_REQUEST
            elif own not in rank:
                wrong = True  # a folder that nobody has given a place
            elif level not in rank:
                wrong = True
            else:
                lazy = not at_once and any(
                    file == asking and (module == asked or module.startswith(asked + ".")) for asking, asked in LAZY
                )
                wrong = rank[level] > rank[own] and not lazy
            if wrong:
                found.append(f"{file} imports {module}")
    return found


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


def test_imports_point_up():
    assert complaints(sources()) == []


def test_every_folder_has_a_place_and_is_read():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= {*LEVELS, *MEASURING}
    assert {file.split("/")[0] for file in sources() if "/" in file} == folders


def test_what_points_down_is_still_there():
    """A line of the list that nothing needs any more would let a fault through."""
    there = {(file, module) for file, text in sources().items() for module, _ in imports(file, text)}
    for asking, asked in LAZY:
        if (ROOT / asked.split(".")[0]).exists():
            assert any(file == asking and (m + ".").startswith(asked + ".") for file, m in there), (asking, asked)


def test_names_of_the_package_lead_into_the_engine():
    assert {home.split(".")[0] for home in minfer_lib._HOME.values()} <= set(LEVELS) - ON_REQUEST


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("engine/runner.py", "from ..cache.pool import KVPool", []),
        ("engine/runner.py", "from .scheduler import Plan", []),
        ("engine/runner.py", "import minfer_lib.errors, os", []),
        ("bench/rungs.py", "from ..learn import style\nfrom ..engine import serial", []),
        ("learn/replay.py", "from ..bench.results import load", []),
        ("serve/app.py", "from ..engine.llm_engine import LLMEngine", []),
        ("cache/pool.py", "from ..engine.scheduler import Plan", ["engine.scheduler.Plan"]),
        ("cache/pool.py", "def f():\n    from ..engine import scheduler", ["engine.scheduler"]),
        ("cache/pool.py", "class A:\n    import minfer_lib.engine.runner", ["engine.runner"]),
        ("kernels/triton/device.py", "from ...attention.batch import Batch", ["attention.batch.Batch"]),
        ("kernels/compiled.py", "from ..quant import linear", ["quant.linear"]),
        ("fast/graphs.py", "from ..serve import app", ["serve.app"]),
        ("engine/llm_engine.py", "def f():\n    from ..fast.graphs import Graphs", []),
        ("engine/llm_engine.py", "from ..fast.graphs import Graphs", ["fast.graphs.Graphs"]),
        ("models/load.py", "def f():\n    from ..quant.files import load_int8", []),
        ("models/load.py", "def f():\n    from ..quant.filesystem import x", ["quant.filesystem.x"]),
        ("models/load.py", "from ..quant.files import load_int8", ["quant.files.load_int8"]),
        ("engine/runner.py", "def f():\n    from .. import learn", ["learn"]),
        ("engine/runner.py", "if True:\n    from minfer_lib.bench import machine", ["bench.machine"]),
        (
            "engine/runner.py",
            "import importlib\nimportlib.import_module('minfer_lib.bench.machine')",
            ["bench.machine"],
        ),
        ("serve/app.py", "from ..bench.metrics import Run", ["bench.metrics.Run"]),
        ("extra/idea.py", "from ..errors import MinferError", ["errors.MinferError"]),
        ("engine/runner.py", "from ..extra import idea", ["extra.idea"]),
        ("__main__.py", "def f():\n    from .bench.cli import add_bench", []),
        ("__main__.py", "from .bench.cli import add_bench", ["bench.cli.add_bench"]),
        ("__main__.py", "from .serve.app import serve", ["serve.app.serve"]),
        ("__init__.py", "from .learn import show", ["learn.show"]),
    ],
)
def test_planted_faults(file: str, source: str, wrong: list[str]):
    assert complaints({file: source}) == [f"{file} imports {module}" for module in wrong]


ALONE = """
import importlib, sys
absent, modules = {absent}, {modules}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("minfer_lib.") and name.split(".")[1] in absent:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
for name in modules:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith(("minfer_lib.kernels.triton", "bitsandbytes"))])
from minfer_lib import LLMEngine, SamplingParams, load_model
engine = LLMEngine(load_model("tiny-random", device="cpu"), kv_cache="paged", max_model_len=32)
print(len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
"""


def test_the_engine_runs_where_nothing_else_is():
    """Without bench, learn, fast and serve every module of the engine loads, without Triton, and an engine answers."""
    absent = {*ON_REQUEST, "__main__"}
    files = [file for file in sources() if re.split(r"[/.]", file)[0] not in absent and "kernels/triton" not in file]
    modules = ["minfer_lib." + file.removesuffix(".py").replace("/", ".") for file in files if "__init__" not in file]
    program = ALONE.format(absent=sorted(absent), modules=modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT.parent)
    assert done.stdout == "[]\n3\n", done.stdout + done.stderr
