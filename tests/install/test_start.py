"""A reader's Jupyter elsewhere, such as Colab: chapter 1 installs the package there, and runs, torch as it was.

Not part of `make test`: it makes an environment of its own and needs the network for it. `make test-install` runs it,
and so does the workflow. The address of the project leads to the last commit here.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import doors
import nbformat
import pytest
from nbformat.v4 import new_code_cell

# What such places have: libraries older than ours, and of transformers one that is too old for us.
THERE = ["transformers<5", "ipywidgets<8", "pandas<3", "matplotlib", "ipykernel", "nbclient", "jupyter-core"]
# The last cell: what the other chapters need beside what this one has used.
MORE = """\
import importlib.metadata, importlib.util
from pathlib import Path

import minfer_lib
from minfer_lib.bench import load_recorded
from minfer_lib.kernels import compiled
from minfer_lib.quant import bitsandbytes

home = Path(minfer_lib.__file__).parent
recorded = [load_recorded(path.stem).title for path in (home / "bench" / "recorded").glob("*.json")]
try:
    kernels = all(compiled.library(name) for name in ("parts", "products", "paged_decode"))
except compiled.CannotCompile as reason:
    kernels = str(reason)
files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*.*") if path.suffix != ".pyc")
print({
    "recorded": len(recorded), "kernels": kernels, "files": files, "model": minfer_lib.load_model().name,
    "version": importlib.metadata.version("minfer"), "bitsandbytes": bool(importlib.util.find_spec("bitsandbytes")),
})"""


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", repository, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of a new environment that has torch and Jupyter, in an empty folder; returns what it printed."""
    root = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    git(doors.ROOT, "clone", "--quiet", "--bare", ".", str(root / "minfer.git"))
    config = f'[url "{(root / "minfer.git").as_uri()}"]\n\tinsteadOf = {doors.ADDRESS}\n[safe]\n\tdirectory = *\n'
    (root / "gitconfig").write_text(config)
    (root / "empty").mkdir()
    programs = root / "venv" / ("Scripts" if os.name == "nt" else "bin")
    unset = {"PYTHONPATH", "HF_HUB_OFFLINE", "MINFER_MODEL", "PIP_CONSTRAINT"}
    env = {name: value for name, value in os.environ.items() if name not in unset} | {
        "GIT_CONFIG_GLOBAL": str(root / "gitconfig"),
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "MINFER_CACHE": str(root / "cache"),
        "MINFER_FAST": "1",
    }

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [programs / program, *arguments], env=env, cwd=root / "empty", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("python", "-m", "pip", "install", "-q", "-c", str(doors.ROOT / "constraints.txt"), "torch")
    run("python", "-m", "pip", "install", "-q", *THERE)
    run.folder, run.repository = root / "empty", root / "minfer.git"
    return run


def test_chapter_1_runs_in_a_jupyter_that_has_torch_and_leaves_it_alone(elsewhere: Callable[..., str]) -> None:
    chapter = shutil.copy(doors.CHAPTERS[0], elsewhere.folder / "chapter.ipynb")
    nb = nbformat.read(chapter, as_version=4)
    nb.cells.append(new_code_cell(MORE))
    nbformat.write(nb, chapter)

    def versions() -> dict[str, str]:
        lines = elsewhere("python", "-m", "pip", "list", "--format=freeze").split()
        return dict(line.split("==") for line in lines)

    before = versions()
    elsewhere("jupyter", "execute", "--inplace", "--timeout=600", str(chapter))
    after = versions()
    replaced = {name for name in before if before[name] != after.get(name)}
    print("\nreplaced:", {name: (before[name], after.get(name)) for name in sorted(replaced)})
    print("new:", sorted(after.keys() - before.keys()))
    assert before["torch"] == after["torch"]
    assert not [name for name in after.keys() - before.keys() if name.startswith("nvidia")]
    assert {name.replace("_", "-") for name in replaced} <= {"transformers", "tokenizers", "huggingface-hub"}

    cells = [cell for cell in nbformat.read(chapter, as_version=4).cells if cell.cell_type == "code"]
    found = ast.literal_eval(cells[-1].outputs[-1].text)
    tracked = git(elsewhere.repository, "ls-tree", "-r", "--name-only", "HEAD:minfer_lib").split()
    assert found.pop("files") == sorted(tracked)
    print(found)
    assert found["recorded"] == sum(name.startswith("bench/recorded/") for name in tracked) > 0
    assert f"+g{git(elsewhere.repository, 'rev-parse', '--short=7', 'HEAD').strip()}" in found["version"]
    assert found["kernels"] is True or "no C compiler" in found["kernels"]
    assert found["model"] == "SmolLM2-135M-Instruct" and found["bitsandbytes"]


def test_where_the_package_is_there_the_cell_does_nothing(elsewhere: Callable[..., str]) -> None:
    nb = nbformat.v4.new_notebook(cells=[new_code_cell(doors.FIRST_CELL)])
    nbformat.write(nb, elsewhere.folder / "again.ipynb")
    elsewhere("jupyter", "execute", "--inplace", "again.ipynb")
    assert nbformat.read(elsewhere.folder / "again.ipynb", as_version=4).cells[0].outputs == []
