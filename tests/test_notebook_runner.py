"""The program that executes the chapters: what it writes, what it refuses, and that a refusal leaves the file alone."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minfer_lib.learn import notebooks


def save(path: Path, *sources: str, **metadata: object) -> Path:
    cells = [new_markdown_cell("# A tiny chapter", id="title")]
    cells += [new_code_cell(source, id=f"code-{number}") for number, source in enumerate(sources)]
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def texts(nb: nbformat.NotebookNode) -> list[str]:
    return [text for cell in nb.cells for text in notebooks._texts(cell)]


def test_executes_in_place_and_normalises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(
        tmp_path / "01_tiny.ipynb",
        "import sys, os\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\nprint('more')\n"
        "os.path.basename(os.getcwd())",
        "import sys, pathlib\npathlib.Path('python.txt').write_text(sys.executable)",
        kernelspec={"display_name": "Somebody's kernel", "language": "python", "name": "not-here"},
        language_info={"name": "python", "version": "3.99.0"},
    )
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].metadata = {"execution": {"iopub.execute_input": "yesterday"}, "tags": ["keep"], "collapsed": False}
    nbformat.write(nb, path)

    assert notebooks.main([str(path)]) == 0
    assert "01_tiny.ipynb: written" in capsys.readouterr().out
    nb = nbformat.read(path, as_version=4)
    assert nb.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell.id for cell in nb.cells] == ["title", "code-0", "code-1"]
    assert nb.cells[1].metadata == {"tags": ["keep"]}
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2]
    streams = {o.name: o.text for o in nb.cells[1].outputs if o.output_type == "stream"}
    assert streams == {"stdout": "to stdout\nmore\n", "stderr": "to stderr\n"}  # one output each
    # It ran in its own folder, under this very Python.
    assert nb.cells[1].outputs[-1].data["text/plain"] == repr(tmp_path.name)
    assert (tmp_path / "python.txt").read_text() == sys.executable

    before = path.read_bytes()
    assert notebooks.main([str(path)]) == 0
    assert "01_tiny.ipynb: unchanged" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["01_tiny.ipynb", "python.txt"]  # nothing left behind


def test_a_failing_cell_is_shown_and_the_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "02_broken.ipynb", "x = 0", "print('before')\n1 / x", "print('never reached')")
    before = path.read_bytes()
    assert notebooks.main([str(path)]) == 1
    message = capsys.readouterr().err
    assert "02_broken.ipynb, cell 3 failed:\n    print('before')\n    1 / x\n" in message
    assert "ZeroDivisionError: division by zero" in message
    assert "\x1b" not in message  # no colours of a terminal
    assert path.read_bytes() == before


def test_a_cell_that_takes_too_long_and_one_that_kills_the_kernel(tmp_path: Path) -> None:
    slow = save(tmp_path / "slow.ipynb", "1", "import time; time.sleep(60)")
    with pytest.raises(notebooks.NotebookFailed, match=r"(?s)slow.ipynb, cell 3 failed.*timed out"):
        notebooks.execute(slow, timeout_s=1)
    dead = save(tmp_path / "dead.ipynb", "import os; os._exit(1)")
    with pytest.raises(notebooks.NotebookFailed, match=r"(?s)dead.ipynb, cell 2 failed.*Kernel died"):
        notebooks.execute(dead)


def test_check_executes_but_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a.ipynb", "import pathlib\n_ = pathlib.Path('ran').write_text('')")
    before = path.read_bytes()
    assert notebooks.main(["--check", str(path)]) == 0
    assert (tmp_path / "ran").exists()
    assert path.read_bytes() == before
    assert "a.ipynb: ran without an error" in capsys.readouterr().out


def test_progress_bars_and_live_widgets_leave_nothing_that_changes(tmp_path: Path) -> None:
    path = save(
        tmp_path / "bars.ipynb",
        "from tqdm import tqdm\nfor _ in tqdm(range(3)): pass\nfor _ in tqdm(range(3), leave=False): pass\n"
        "print('done')",
        "from tqdm.auto import tqdm as auto\nfor _ in auto(range(3), disable=False, leave=False): pass\n"
        "with auto(unit='token', disable=False) as bar: bar.update(3)",
        "import ipywidgets\nipywidgets.IntSlider(3)",
    )
    nb = notebooks.execute(path, progress=False)
    assert [o.text for o in nb.cells[1].outputs] == ["done\n"]
    assert nb.cells[2].outputs == []
    assert [o.data for o in nb.cells[3].outputs] == [{"text/plain": notebooks.WIDGET_LINE}]
    assert "widgets" not in nb.metadata


def test_an_error_inside_a_widget_is_not_lost(tmp_path: Path) -> None:
    output = save(
        tmp_path / "widget.ipynb",
        "import ipywidgets as w\nslider = w.IntSlider(3)\ndef draw(n): raise KeyError('no such block')\n"
        "w.interactive_output(draw, {'n': slider})",
    )
    ours = save(
        tmp_path / "ours.ipynb",
        "from minfer_lib.learn import plots, widgets\ndef draw(n):\n    return plots.cache_fill([n], 8 // (n - 3))\n"
        "widgets.explore(draw, positions=[{'n': 5}], n=widgets.Slider(1, 8, 1, 3))",
    )
    for path in (output, ours):
        with pytest.raises(notebooks.NotebookFailed, match="a widget shows an error"):
            notebooks.execute(path, progress=False)


def test_a_widget_and_its_picture_are_one_output_and_two_when_stored() -> None:
    data = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "image/png": "AA==", "text/plain": "a line"}
    nb = new_notebook(cells=[new_code_cell("...", outputs=[new_output("display_data", data)])])
    for _ in range(2):  # what is normalised stays as it is
        notebooks.normalise(nb)
        assert [output.data for output in nb.cells[0].outputs] == [
            {"text/plain": notebooks.WIDGET_LINE}, {"image/png": "AA==", "text/plain": "a line"},
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "complaint"),
    [
        (str(notebooks.PROJECT / "minfer_lib" / "naive.py"), "cell 1 prints a path of a machine"),
        (f"loaded from {Path.home() / 'models'}", "cell 1 prints a path of a machine"),
        (sys.prefix + "/lib/python", "cell 1 prints a path of a machine"),
        ("File /Users/ada/minfer/x.py", "cell 1 prints a path of a machine"),
        (r"C:\Users\ada", "cell 1 prints a path of a machine"),
        ("<minfer_lib.NaiveEngine object at 0x7f12ab34cd56>", "cell 1 prints an address of memory"),
        ("x" * notebooks.MAX_BYTES, "the most is in cell 1"),
    ],
)
def test_outputs_that_have_no_place_in_a_committed_notebook(printed: str, complaint: str) -> None:
    nb = new_notebook(cells=[new_code_cell("...", outputs=[new_output("stream", text=printed)])])
    assert [complaint in problem for problem in notebooks.problems(nb)] == [True]


def test_harmless_outputs_are_not_refused() -> None:
    harmless = (
        "minfer_lib/naive.py:12, ~/.cache/minfer, 0x1F, https://example.org" + str(Path.home()) + "-page, tokens/s"
    )
    picture = new_output("display_data", {"image/png": str(Path.home()) + "/", "text/plain": "<Figure size 640x480>"})
    nb = new_notebook(cells=[new_code_cell("...", outputs=[new_output("stream", text=harmless), picture])])
    assert list(notebooks.problems(nb)) == []


def test_unusual_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.ipynb").write_text("no notebook")
    (tmp_path / "empty.ipynb").write_text("{}")
    for name in ("absent.ipynb", "text.ipynb", "empty.ipynb"):
        assert notebooks.main([str(tmp_path / name)]) == 1
        message = capsys.readouterr().err
        assert name in message and "cannot be read as a notebook" in message
    with pytest.raises(notebooks.NotebookFailed, match="`nothing/` has no"):
        notebooks.find_notebooks(tmp_path / "nothing")


def test_chapters_come_before_solutions(tmp_path: Path) -> None:
    (tmp_path / "solutions").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("02_b.ipynb", "01_a.ipynb", "solutions/01_a.ipynb", ".ipynb_checkpoints/01_a-checkpoint.ipynb"):
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in notebooks.find_notebooks(tmp_path)]
    assert found == ["01_a.ipynb", "02_b.ipynb", "solutions/01_a.ipynb"]
