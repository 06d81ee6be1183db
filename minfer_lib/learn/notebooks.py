"""Executes the chapters in place, one after the other: `python -m minfer_lib.learn.notebooks [FILES...] [--check]`.

Invariant: a notebook on disk is either untouched, or executed from top to bottom without an error under the Python that
runs this module, and normalised. Two executions on two machines then differ in what the cells printed and in nothing
else: no time stamps, no version of Python, no random ids of widgets, no progress bars. What cannot be normalised
without changing what a cell said (a path of the machine, an address of memory, too much of everything) is refused.

Widgets: their state is dropped, since it is large, random and shown by no web page that renders notebooks. A short line
takes the place of each, above the static picture that came with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert.preprocessors import ClearMetadataPreprocessor
from nbformat import NotebookNode
from tqdm import tqdm

from minfer_lib.errors import MinferError

PROJECT = Path(__file__).resolve().parents[2]
MAX_BYTES = 2**20
WIDGET_LINE = "(An interactive widget appears here when this cell runs.)"
# JUPYTER_PREFER_ENV_PATH: the kernel of the Python that runs this, whatever others the machine has under the same name
DEFAULTS = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "JUPYTER_PLATFORM_DIRS": "1",
    "JUPYTER_PREFER_ENV_PATH": "1", "TQDM_DISABLE": "1",
}  # fmt: skip

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_BAR = re.compile(r"\d+%\||\d+\S* \[\d+:\d+")  # tqdm's bars that ask to be shown all the same
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ANY_HOME = r"/(?:home|Users|root|tmp)/\w|[A-Z]:\\Users"
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class NotebookFailed(MinferError):
    """A notebook was not written: a cell failed, or an output has no place in a committed notebook."""


def find_notebooks(folder: Path = PROJECT / "notebooks") -> list[Path]:
    """The chapters, then the worked solutions, each in order of their names.

    Raises `NotebookFailed` where there are none.
    """
    found = sorted(folder.glob("*.ipynb")) + sorted((folder / "solutions").glob("*.ipynb"))
    if not found:
        raise NotebookFailed(
            f"No notebooks to execute: `{folder.name}/` has no .ipynb files (a copy of the package alone has no "
            "chapters). Name the files to execute, or run this from a clone of the project."
        )
    return found


def read(path: Path) -> NotebookNode:
    """The notebook in `path`. Raises `NotebookFailed` if the file is not there or is no notebook."""
    try:
        nb = nbformat.read(path, as_version=4)
        nbformat.validate(nb)
    except (OSError, ValueError, KeyError, AttributeError, nbformat.ValidationError) as error:
        raise NotebookFailed(
            f"{path} was to be executed, but it cannot be read as a notebook ({str(error).splitlines()[0]}). "
            "Give the path of an .ipynb file."
        ) from error
    return nb


def execute(path: Path, *, timeout_s: int = 900, progress: bool = True) -> NotebookNode:
    """The notebook in `path`, executed and normalised; the file itself is not changed.

    It runs in its own folder, as JupyterLab and pytest would run it. A cell may take `timeout_s` seconds.

    Raises:
        NotebookFailed: the file is no notebook; a cell raised (and is not tagged `raises-exception`), took too long or
            killed the kernel; a widget cannot be drawn; or an output has no place in a committed notebook.
    """
    nb = read(path)
    code = [(n, cell) for n, cell in enumerate(nb.cells, 1) if cell.cell_type == "code" and cell.source.strip()]
    bar = tqdm(total=len(code), desc=_shown(path), unit="cell", disable=not progress, leave=False)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)  # the kernel inherits them
    client = NotebookClient(
        nb, kernel_name="python3", timeout=timeout_s, resources={"metadata": {"path": str(path.resolve().parent)}},
        coalesce_streams=True, record_timing=False, on_cell_executed=lambda **_: bar.update(),
    )  # fmt: skip
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        number, cell = code[max(client.code_cells_executed, 1) - 1]
        what = error.traceback if isinstance(error, CellExecutionError) else str(error)
        source = "\n".join("    " + line for line in cell.source.splitlines())
        raise NotebookFailed(
            f"{_shown(path)}, cell {number} failed:\n{source}\n\n{_ANSI.sub('', what).strip()}\nThe file is unchanged."
        ) from error
    finally:
        bar.close()
    state = json.dumps(nb.metadata.get("widgets", {}))  # errors in there let the cell pass
    found = ["a widget shows an error"] if "This cannot be drawn" in state or '"output_type": "error"' in state else []
    normalise(nb)
    found += problems(nb)
    if found:
        raise NotebookFailed(
            f"{_shown(path)} ran, but cannot be kept as it is:\n  " + "\n  ".join(found) + "\nThe file is unchanged."
        )
    return nb


def _shown(path: Path) -> str:
    """The path inside the project, since a chapter and its solutions may share a name; else the name."""
    path = path.resolve()
    return path.relative_to(PROJECT).as_posix() if path.is_relative_to(PROJECT) else path.name


def normalise(nb: NotebookNode) -> None:
    """Bring `nb` into the one form in which notebooks are kept (in place): see the top of this module."""
    ClearMetadataPreprocessor(preserve_cell_metadata_mask={"tags", "jupyter"}).preprocess(nb, {})
    nb.metadata.kernelspec = NotebookNode(display_name="Python 3", language="python", name="python3")
    nb.metadata.language_info = NotebookNode(name="python")
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs for kept in _normalised(output)]


def _normalised(output: NotebookNode) -> Iterator[NotebookNode]:
    """`output`; of a widget the line that stands for it, and its picture; nothing of a progress bar."""
    if _WIDGET_VIEW not in output.get("data", {}):
        yield output
    elif not _BAR.search(output.data.get("text/plain", "")):
        yield nbformat.v4.new_output("display_data", {"text/plain": WIDGET_LINE})
        del output.data[_WIDGET_VIEW]
        if len(output.data) > 1:
            yield output


def problems(nb: NotebookNode) -> Iterator[str]:
    """What has no place in a committed notebook, a line each: paths of a machine, addresses of memory, its size."""
    paths = {str(PROJECT), str(Path.home()), tempfile.gettempdir(), sys.prefix, sys.base_prefix} - {"/", ""}
    here = "|".join(re.escape(path) for path in paths)
    machine = re.compile(rf"(?<![\w.])(?:(?:{here})(?![\w-])|{_ANY_HOME})")
    for number, cell in enumerate(nb.cells, 1):
        for text in _texts(cell):
            if match := machine.search(text):
                yield f"cell {number} prints a path of a machine ({_around(text, match)}): make it relative."
            if match := _ADDRESS.search(text):
                yield f"cell {number} prints an address of memory ({_around(text, match)}): print what is there."
    size = len(nbformat.writes(nb).encode())
    if size > MAX_BYTES:
        largest = max(range(len(nb.cells)), key=lambda n: len(str(nb.cells[n].get("outputs", ""))))
        yield f"it has {size / 2**20:.1f} MiB of at most {MAX_BYTES / 2**20:.0f}; the most is in cell {largest + 1}."


def _texts(cell: NotebookNode) -> Iterator[str]:
    """Everything readable in the outputs of `cell`: streams, tracebacks, and data that is not an encoded picture."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield _ANSI.sub("", "\n".join(output.get("traceback", [])))
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/") or kind == "image/svg+xml":
                yield value if isinstance(value, str) else str(value)


def _around(text: str, match: re.Match[str]) -> str:
    """The line of `text` that holds `match`, shortened to what stands near it."""
    start = max(text.rfind("\n", 0, match.start()) + 1, match.start() - 40)
    return repr(text[start : match.end() + 40].split("\n")[0])


def write(nb: NotebookNode, path: Path) -> bool:
    """Put `nb` in the place of `path` in one step; True if that changed the file."""
    text = nbformat.writes(nb).rstrip("\n") + "\n"
    if path.read_text(encoding="utf-8") == text:
        return False
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 1 after the first notebook that failed."""
    parser = argparse.ArgumentParser("python -m minfer_lib.learn.notebooks", description="Execute notebooks in place.")
    parser.add_argument("files", nargs="*", type=Path, help="notebooks (default: all chapters, then all solutions)")
    parser.add_argument("--check", action="store_true", help="execute and look, but write nothing")
    parser.add_argument("--timeout", type=int, default=900, metavar="S", help="seconds a cell may take (default: 900)")
    args = parser.parse_args(argv)
    try:
        for path in args.files or find_notebooks():
            started = time.perf_counter()
            nb = execute(path, timeout_s=args.timeout, progress=sys.stderr.isatty())
            done = "ran without an error" if args.check else "written" if write(nb, path) else "unchanged"
            print(f"{_shown(path)}: {done} ({len(nb.cells)} cells, {time.perf_counter() - started:.0f} s)", flush=True)
    except NotebookFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
