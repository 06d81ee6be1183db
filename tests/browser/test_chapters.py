"""Every chapter in a real browser: all cells run, every control changes its picture, an exercise is answered.

What there is to do is found in page and notebook: a widget has sliders or menus, an exercise is a cell that defines `f`
and calls `check_f(f)`, and its answer is the same cell of the solutions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

if TYPE_CHECKING:
    from lab import Chapter
    from playwright.sync_api import Locator

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CHAPTERS = sorted(path.relative_to(FOLDER.parent).as_posix() for path in FOLDER.glob("[0-9]*.ipynb"))
Visit = Callable[..., "Chapter"]


@pytest.fixture()
def visit(page, folder: Path, address: str, log) -> Iterator[Visit]:
    """visit("notebooks/01_....ipynb"): that notebook in the browser, with all its cells run."""
    from lab import Chapter

    def opened(path: str, **options: float) -> Chapter:
        chapter = Chapter(page, Path(path).stem, log, **options)
        chapter.open(address.format(name=chapter.name, path=path))
        chapter.run_all()
        return chapter

    yield opened
    page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: Path(path).stem)
def test_a_chapter(path: str, visit: Visit, folder: Path) -> None:
    stored = nbformat.read(folder / path, as_version=4)
    (solved,) = (folder / "notebooks/solutions").glob(f"{Path(path).stem[:2]}*.ipynb")
    solutions = nbformat.read(solved, as_version=4)
    chapter = visit(path)
    assert chapter.problems == []
    assert chapter.page.locator("body").get_attribute("data-jp-theme-light") == "true"
    use_widgets(chapter, expected=any(re.search(r"import .*\bwidgets\b", cell.source) for cell in stored.cells))
    answers = exercises(solutions)
    name, number = next(found for found in exercises(stored).items() if found[0] in answers)
    answer_exercise(chapter, number, name, stored.cells[number].source, solutions.cells[answers[name]].source)
    assert chapter.problems == []


# -- widgets --------------------------------------------------------------------------------------------------------


def use_widgets(chapter: Chapter, expected: bool) -> None:
    found = chapter.widgets(expected)
    if expected and not found:
        chapter.problem("there is no widget")
    for number, controls in found.items():
        use_widget(chapter, number, controls)


def use_widget(chapter: Chapter, number: int, controls: Sequence[Locator]) -> None:
    """Moves every control of a widget to the next place and back, and plays what can be played."""
    for control in controls:
        label = control.evaluate("e => e.closest('.widget-inline-hbox').querySelector('label').innerText")
        begin = chapter.pictures(number)
        for what, act in there_and_back(control):
            chapter.changes(number, f"{label}, {what}", act)
        if chapter.pictures(number) != begin:
            chapter.problem(f"cell {number + 1}: {label!r} stands where it began, and the picture is another")
    play = chapter.cell(number).locator(".widget-hbox:has(.widget-play)")
    for box in play.all():
        slider, button = box.locator(".noUi-handle"), box.locator(".widget-play button").first
        chapter.changes(number, "the last position", lambda slider=slider: slider.press("End"))
        chapter.changes(number, "the one before it", lambda slider=slider: slider.press("ArrowLeft"))
        chapter.changes(number, "the first position", lambda slider=slider: slider.press("Home"))
        chapter.changes(number, "Play", button.click)
        button.click()


def there_and_back(control: Locator) -> list[tuple[str, Callable[[], object]]]:
    """What moves a control by one place, and what moves it back."""
    if control.evaluate("e => e.tagName") == "SELECT":
        places = [control.evaluate("e => e.selectedIndex")]
        places.insert(0, places[0] - 1 if places[0] else 1)
        return [(f"entry {place + 1}", lambda place=place: control.select_option(index=place)) for place in places]
    keys = ["ArrowRight", "ArrowLeft"]
    if control.get_attribute("aria-valuenow") == control.get_attribute("aria-valuemax"):
        keys.reverse()
    return [(key, lambda key=key: control.press(key)) for key in keys]


# -- exercises ------------------------------------------------------------------------------------------------------


def exercises(nb: nbformat.NotebookNode) -> dict[str, int]:
    """By name, the first cell that defines `f` and calls `check_f(f)`."""
    found: dict[str, int] = {}
    for number, cell in enumerate(nb.cells):
        called = re.search(r"^check_(\w+)\(\1\)", cell.source, re.MULTILINE) if cell.cell_type == "code" else None
        if called and f"def {called[1]}(" in cell.source:
            found.setdefault(called[1], number)
    return found


def answer_exercise(chapter: Chapter, number: int, name: str, source: str, right: str) -> None:
    """Sees what is said of the unsolved exercise, then types a wrong answer and sees its diagnosis, then the right one.

    source: of the exercise's cell, whose function is made to return 0 for the wrong answer.
    """
    tree = ast.parse(source)
    function = next(part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == name)
    function.body = [ast.Return(ast.Constant(0))]
    for answer, verdict in ((None, "not solved yet"), (ast.unparse(tree), "not right yet"), (right, "right, in all")):
        said = chapter.text(number) if answer is None else chapter.rewrite(number, answer)
        if f"{name}: {verdict}" in said:
            chapter.log(f"cell {number + 1}: {said.splitlines()[0]}")
        else:
            chapter.problem(f"cell {number + 1}: {name} is to be told {verdict!r}, and is told {said!r}")


# -- faults that must be seen ---------------------------------------------------------------------------------------

STILL = """import io, ipywidgets
from PIL import Image
buffer = io.BytesIO()
Image.new("RGB", (20, 20)).save(buffer, "png")
ipywidgets.VBox([ipywidgets.IntSlider(3, 0, 9, description="stuck"), ipywidgets.Image(value=buffer.getvalue())])"""
EXERCISE = """def half(x):
    ...

def check_half(f):
    print("half: not solved yet")

check_half(half)"""


def plant(folder: Path, name: str, *sources: str) -> str:
    (folder / "planted").mkdir(exist_ok=True)
    kernel = {"name": "python3", "display_name": "Python 3"}
    nb = new_notebook(cells=[new_code_cell(source) for source in sources], metadata={"kernelspec": kernel})
    nbformat.write(nb, folder / "planted" / f"{name}.ipynb")
    return f"planted/{name}.ipynb"


def test_faults_of_page_widget_and_exercise_are_seen(visit: Visit, folder: Path) -> None:
    page = "from IPython.display import HTML, Javascript, display\ndisplay(HTML('<img src=\"/files/none.png\">'))\n"
    page += "display(Javascript('setTimeout(() => { throw new Error(\"planted\") })'))"
    chapter = visit(plant(folder, "faults", page, STILL, EXERCISE), patience_s=3)
    use_widgets(chapter, expected=True)
    answer_exercise(chapter, 2, "half", EXERCISE, EXERCISE)
    found = "\n".join(chapter.problems)
    for fault in (
        "console: Failed to load resource: the server responded with a status of 404",
        "an image is broken: http",
        "error in the page: planted",
        "cell 2: stuck, ArrowRight does not change the picture",
        "cell 3: half is to be told 'not right yet', and is told 'half: not solved yet",
    ):
        assert fault in found


def test_errors_of_cells_are_seen(visit: Visit, folder: Path) -> None:
    chapter = visit(plant(folder, "error", "1", "1 / 0", "2"), patience_s=3)
    use_widgets(chapter, expected=True)
    assert chapter.problems == [
        "not every cell ran, in order",
        "cell 2 shows an error: ZeroDivisionError: division by zero",
        "there is no widget",
    ]


def test_the_death_of_a_kernel_is_seen(visit: Visit, folder: Path) -> None:
    chapter = visit(plant(folder, "death", "1", "import os; os._exit(1)", "2"))
    assert any("the kernel died" in problem for problem in chapter.problems)
