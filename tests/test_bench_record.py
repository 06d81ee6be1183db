"""Recording: from a clean commit only, by functions that anybody can call again."""

import pytest
import torch

from minfer_lib.bench import load, machine, record
from minfer_lib.bench.results import RECORDED, Cells, Result
from minfer_lib.errors import BadEnvironment


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
def test_the_commit_travels_with_the_code_where_there_is_no_repository(monkeypatch, variable, version, expected):
    monkeypatch.setattr(machine, "_output_of", lambda command: None)
    monkeypatch.setattr(machine, "version", lambda package: version)
    monkeypatch.delenv("MINFER_COMMIT", raising=False)
    if variable:
        monkeypatch.setenv("MINFER_COMMIT", variable)
    assert machine.commit() == expected
