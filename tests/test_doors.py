"""The ways in from the web agree with each other: one address, the same first cell, links that name what is there."""

import json
import re

import doors
import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_environment import pyproject

README = (doors.ROOT / "README.md").read_text("utf-8")
WORKFLOWS = sorted((doors.ROOT / ".github" / "workflows").glob("*.yml"))
# Of what chapters need, Colab and Kaggle have their own, which ours must not replace.
THEIRS = {"torch", "jupyterlab", "ipykernel", "nbclient", "nbconvert", "nbformat"}


def cell_complaints(cell: str, project: dict) -> list[str]:
    """The first cell asks for what chapters need in any version, as what is there stays."""
    _, line = re.findall(r"%pip install -q (.*)", cell)
    given = {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, line.replace('"', "").split())}
    lines = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["lab"]]
    needed = {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, lines)}
    wanted = {name: needed[name] if name == "transformers" else "" for name in needed.keys() - THEIRS}
    return sorted(
        f"{name}: {given.get(name)!r} in place of {wanted.get(name)!r}"
        for name in given.keys() | wanted.keys()
        if given.get(name) != wanted.get(name)
    )


@pytest.mark.parametrize("chapter", doors.CHAPTERS, ids=lambda path: path.stem)
def test_each_chapter_opens_elsewhere(chapter):
    cells = nbformat.read(chapter, 4).cells
    assert doors.open_line(chapter) in cells[0].source.splitlines()
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert first.source == doors.FIRST_CELL and first.outputs == []


def test_the_first_cell_installs_what_chapters_need():
    assert cell_complaints(doors.FIRST_CELL, pyproject()) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (" gguf", "", "gguf: None in place of ''"),
        (" gguf", " gguf torch", "torch: '' in place of None"),
        (" gguf", " gguf>=0.17", "gguf: '>=0.17' in place of ''"),
        ('"transformers>=5.17,<6"', "transformers", "transformers: '' in place of '<6,>=5.17'"),
    ],
)
def test_planted_first_cells(old, new, complaint):
    assert cell_complaints(doors.FIRST_CELL.replace(old, new, 1), pyproject()) == [complaint]


def test_the_address_is_the_same_everywhere():
    citation = yaml.safe_load((doors.ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["repository-code"] == doors.ADDRESS and f"git clone {doors.ADDRESS} " in README
    texts = [README, *(path.read_text("utf-8") for path in (doors.ROOT / ".github").rglob("*.md"))]
    assert all(f"]({link})" in README for link in re.findall(r"\((.*?)\)", doors.open_line(doors.CHAPTERS[0])))
    named = re.findall(r"(?:github(?:\.com)?|codespaces\.new)/([\w.-]+/minfer)\b", "\n".join(texts))
    assert set(named) == {doors.REPOSITORY}


def test_what_workflows_call_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (doors.ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert WORKFLOWS
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert all("uses" in step or "run" in step for step in steps)
        called = {name for step in steps for name in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)}
        assert called and called <= targets
        files = [name for step in steps for name in re.findall(r"notebooks/\S+\.ipynb", step.get("run", ""))]
        assert all((doors.ROOT / name).is_file() for name in files)


def test_a_codespace_calls_what_is_there():
    container = json.loads((doors.ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    assert container["onCreateCommand"] == "make model" and container["postAttachCommand"][:2] == ["make", "lab"]
    assert f"port={container['forwardPorts'][0]}" in container["postAttachCommand"][2]
