"""The ways in from the web agree with each other: one address, the same first cell, links that name what is there."""

import json
import re

import doors
import nbformat
import pytest
import yaml

README = (doors.ROOT / "README.md").read_text("utf-8")
WORKFLOWS = sorted((doors.ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("chapter", doors.CHAPTERS, ids=lambda path: path.stem)
def test_each_chapter_opens_elsewhere(chapter):
    cells = nbformat.read(chapter, 4).cells
    assert doors.open_line(chapter) in cells[0].source.splitlines()
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert first.source == doors.FIRST_CELL and first.outputs == []


def test_the_address_is_the_same_everywhere():
    citation = yaml.safe_load((doors.ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["repository-code"] == doors.ADDRESS and f"git clone {doors.ADDRESS} " in README
    others = set(re.findall(r"https://github\.com/[\w-]+/minfer\b", README)) - {doors.ADDRESS}
    assert not others


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
