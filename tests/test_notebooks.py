"""The chapters as they are stored: executed, whole, and in the form that is kept. nbval executes them anew."""

import copy
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minfer_lib.learn import notebooks

FOLDER = notebooks.PROJECT / "notebooks"
CHAPTERS = sorted(path for path in FOLDER.glob("**/*.ipynb") if ".ipynb_checkpoints" not in path.parts)


def complaints(nb: NotebookNode) -> list[str]:
    """What a reader on the web, or the next person to commit, would stumble over."""
    found = list(notebooks.problems(nb))
    code = [(n, cell) for n, cell in enumerate(nb.cells, 1) if cell.cell_type == "code" and cell.source.strip()]
    if [cell.execution_count for _, cell in code] != list(range(1, len(code) + 1)):
        found.append("it was not executed once from top to bottom")
    for number, cell in code:
        if any(output.output_type == "error" for output in cell.outputs):
            found.append(f"cell {number} shows an error")
        if any(output.output_type == "stream" and output.name == "stderr" for output in cell.outputs):
            found.append(f"cell {number} prints to standard error")
    kept = copy.deepcopy(nb)
    notebooks.normalise(kept)
    if kept != nb:
        found.append("it is not normalised: `make notebooks` writes it as it should be")
    return found


def test_there_are_chapters() -> None:
    assert [path.name for path in CHAPTERS][:1] == ["01_what_an_engine_does.ipynb"]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_stored_notebook_is_executed_and_clean(path: Path) -> None:
    assert complaints(notebooks.read(path)) == []


def test_planted_faults() -> None:
    def notebook(**code: object) -> NotebookNode:
        cells = [new_markdown_cell("# One"), new_code_cell("1", **{"execution_count": 1, **code})]
        nb = new_notebook(cells=cells)
        notebooks.normalise(nb)
        return nb

    assert complaints(notebook()) == []
    assert complaints(notebook(execution_count=None)) == ["it was not executed once from top to bottom"]
    assert complaints(notebook(execution_count=7)) == ["it was not executed once from top to bottom"]
    error = new_output("error", ename="E", evalue="", traceback=[])
    assert complaints(notebook(outputs=[error])) == ["cell 2 shows an error"]
    warning = new_output("stream", name="stderr", text="FutureWarning: soon")
    assert complaints(notebook(outputs=[warning])) == ["cell 2 prints to standard error"]
    path = new_output("stream", text="/home/ada/minfer")
    assert complaints(notebook(outputs=[path]))[0].startswith("cell 2 prints a path of a machine")
    nb = notebook()
    nb.metadata.language_info.version = "3.11.7"
    assert complaints(nb) == ["it is not normalised: `make notebooks` writes it as it should be"]
