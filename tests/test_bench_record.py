"""Recording: from a clean commit only, by functions that anybody can call again."""

import json

import pytest
import torch

from minfer_lib.bench import load, machine, record
from minfer_lib.bench.results import RECORDED, Cells, Result
from minfer_lib.errors import BadEnvironment, InvalidParameter


@pytest.fixture(autouse=True)
def in_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINFER_FAST", raising=False)  # which CI sets, and no record may be made with


@pytest.fixture()
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of the name "cpu_made" that takes no time, and what was made of it so far."""
    calls = []

    def run() -> Result:
        calls.append("made")
        return Result(
            "table", [Cells("t", "a", {"b": 1.0})], {}, machine.provenance() | {"model": "none", "weights": "none"}
        )

    monkeypatch.setitem(record.RECIPES, "cpu_made", run)
    monkeypatch.setitem(record.RECIPES, "h200_made", run)
    return calls


@pytest.mark.parametrize("commit", ["abc1234-dirty", None])
def test_figures_that_no_code_can_be_tied_to_are_not_recorded(made, monkeypatch, tmp_path, commit, capsys):
    monkeypatch.setattr(machine, "commit", lambda: commit)
    assert record.main(["cpu_made", "--folder", str(tmp_path)]) == 1
    assert "Commit first" in capsys.readouterr().err
    assert made == [] and list(tmp_path.iterdir()) == []


def test_a_clean_commit_is_kept_with_the_figures(made, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "commit", lambda: "abc1234")
    assert record.main(["cpu_made", "--folder", str(tmp_path)]) == 0
    assert load(tmp_path / "cpu_made.json").provenance["commit"] == "abc1234"


def test_code_that_changes_meanwhile_is_noticed(made, monkeypatch, tmp_path):
    commits = iter(["abc1234", "abc1234", "abc1234-dirty"])
    monkeypatch.setattr(machine, "commit", lambda: next(commits))
    with pytest.raises(BadEnvironment, match="changed while"):
        record.record("cpu_made", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_run_of_a_gpu_needs_one(made, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "commit", lambda: "abc1234")
    with pytest.raises(BadEnvironment, match="NVIDIA"):
        record.record("h200_made", tmp_path)


def test_an_unknown_name_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        record.main(["cpu_corse"])
    assert "`cpu_course`" in capsys.readouterr().err


def test_what_was_recorded_since_then_has_a_clean_commit():
    for name in record.RECIPES:
        path = RECORDED / f"{name}.json"
        if path.is_file() and not any("recorded before" in note for note in load(path).notes):
            assert "dirty" not in str(load(path).provenance["commit"]), name


@pytest.mark.parametrize(
    ("variable", "version", "expected"),
    [
        ("abc1234", "0.2.dev3+gfff0000", "abc1234"),
        (None, "0.2.dev3+gfff0000", "fff0000"),
        (None, "0.2.dev3+gfff0000.d20261201", "fff0000-dirty"),
        (None, "0.2.0", None),
        (None, None, None),
    ],
)
def test_the_commit_travels_with_the_code_where_there_is_no_repository(
    tmp_path, monkeypatch, variable, version, expected
):
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "minfer_lib")
    monkeypatch.setattr(machine, "_installed_at", lambda: tmp_path / "minfer_lib")
    monkeypatch.setattr(machine, "_output_of", lambda command: None)
    monkeypatch.setattr(machine, "version", lambda package: version)
    monkeypatch.delenv("MINFER_COMMIT", raising=False)
    if variable:
        monkeypatch.setenv("MINFER_COMMIT", variable)
    assert machine.commit() == expected


def test_a_git_that_does_not_answer_leaves_no_commit_and_not_that_of_the_last_install(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "minfer_lib")
    monkeypatch.setattr(machine, "_installed_at", lambda: tmp_path / "minfer_lib")
    monkeypatch.setattr(machine, "_output_of", lambda command: None)
    monkeypatch.setattr(machine, "version", lambda package: "0.2.dev3+gfff0000")
    monkeypatch.delenv("MINFER_COMMIT", raising=False)
    assert machine.commit() is None


def test_a_new_file_is_a_change_too(monkeypatch):
    said = {"ls-files": "__init__.py", "describe": "abc1234", "status": "?? minfer_lib/new.py"}
    monkeypatch.setattr(machine, "_output_of", lambda command: said[command[3]])
    assert machine.commit() == "abc1234-dirty"
    said["status"] = ""
    assert machine.commit() == "abc1234"


def test_a_short_run_is_not_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "commit", lambda: "abc1234")
    monkeypatch.setenv("MINFER_FAST", "1")
    assert record.main(["cpu_course", "--folder", str(tmp_path)]) == 1
    assert "MINFER_FAST" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "part",
    [{"kind": []}, {"workload": None}, {"provenance": {}}, {"notes": "abc"}, {"rows": [{"engine": "a", "runs": 5}]}],
)
def test_a_damaged_file_is_told(tmp_path, part):
    file = tmp_path / "x.json"
    good = json.loads((RECORDED / "cpu_course.json").read_text())
    file.write_text(json.dumps(good | part))
    with pytest.raises(InvalidParameter, match=r"x\.json"):
        load(file)
