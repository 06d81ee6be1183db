"""The README keeps its promises: its commands parse, its example runs, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from minfer_lib.__main__ import parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def make_complaints(text: str, makefile: str) -> list[str]:
    """Every target named as `make target`, or at the start of a line of shell, exists."""
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^|&& )make ([a-z-]+)", text, flags=re.MULTILINE))
    return [f"make {name} does not exist" for name in sorted(named - targets)]


def link_complaints(readme: str, root: Path) -> list[str]:
    """Every relative link or picture of the README leads to a file."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"", readme)
    targets = {a or b for a, b in links if "://" not in (a or b)}
    return [f"{target} does not exist" for target in sorted(targets) if not (root / target).exists()]


def cli_complaints(readme: str) -> list[str]:
    """Every command line that begins with `minfer` is one that the program understands."""
    complaints = []
    for line in re.findall(r"^minfer (.*)$", readme, flags=re.MULTILINE):
        try:
            parser().parse_args(shlex.split(line, comments=True))
        except SystemExit:
            complaints.append(line)
    return complaints


def python_blocks(readme: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)


def test_the_commands_that_texts_name_exist() -> None:
    # Prose may begin a line with "make", so that only what stands in backticks counts in the sources.
    messages = [path.read_text("utf-8").replace("\n", " ") for path in (ROOT / "minfer_lib").rglob("*.py")]
    names = ("environment.yml", ".ci/run", ".github/CONTRIBUTING.md", ".github/pull_request_template.md")
    texts = [README, *((ROOT / name).read_text("utf-8") for name in names), *messages]
    assert make_complaints("\n".join(texts), (ROOT / "Makefile").read_text("utf-8")) == []


def test_the_links_lead_somewhere() -> None:
    assert link_complaints(README, ROOT) == []


def test_the_command_lines_are_understood() -> None:
    assert len(re.findall(r"^minfer ", README, flags=re.MULTILINE)) >= 4
    assert cli_complaints(README) == []


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MINFER_MODEL", "tiny-random")
    blocks = python_blocks(README)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_planted_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "`make lab`, then `make dinner`. I make amends\nmake lab-coats"
    assert make_complaints(text, "lab: x\n\techo dinner: is ready\n") == [
        "make dinner does not exist",
        "make lab-coats does not exist",
    ]
    (tmp_path / "there.md").touch()
    readme = '[a](there.md#part) ![b](gone.svg "title") <img src="lost.png"> [c](https://example.org/x) [d](#here)'
    assert link_complaints(readme, tmp_path) == ["gone.svg does not exist", "lost.png does not exist"]
    assert cli_complaints("minfer info\nminfer dance  # a comment\n") == ["dance  # a comment"]
    capsys.readouterr()  # argparse said so too
