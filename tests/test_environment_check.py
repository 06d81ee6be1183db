"""An environment that cannot run the package is told so in one sentence, before torch or transformers is imported."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import minfer_lib
from minfer_lib.errors import BadEnvironment
from minfer_lib.models import environment

GOOD = {"torch": "2.13.0+cpu", "transformers": "5.24.0"}


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Makes this Python look as if it had these versions; None for a package that is missing."""

    def version(package: str) -> str:
        if (found := (GOOD | versions)[package]) is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(environment.metadata, "version", version)


@pytest.mark.parametrize(
    "versions",
    [
        {},
        dict(torch="2.11.0", transformers="5.17.0"),
        dict(torch="2.11.0+cu130", transformers="5.17.0.dev0"),
        dict(torch="3.0", transformers="6.0.0"),
        dict(torch="2.11", transformers="5.100.1"),
    ],
)
def test_good_enough(monkeypatch: pytest.MonkeyPatch, versions: dict):
    installed(monkeypatch, **versions)
    environment.check_versions()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            dict(torch="2.10.1"),
            r"needs torch 2\.11 or newer, and this Python has torch 2\.10\.1\..*pip install -U 'torch",
        ),
        (dict(torch="1.13"), "has torch 1.13"),
        (dict(transformers="5.16.9"), r"needs transformers 5\.17 or newer.*has transformers 5\.16\.9.*make lab"),
        (dict(transformers="4.57.1"), "has transformers 4.57.1"),
        (dict(transformers="5.2.0"), "has transformers 5.2.0"),  # 2 is less than 17, although "2" is more than "17"
        (dict(torch=None), r"this Python has no torch\..*pip install 'torch>=2\.11'"),
        (dict(transformers=None), r"has no transformers\..*'transformers>=5\.17'"),
    ],
)
def test_not_good_enough(monkeypatch: pytest.MonkeyPatch, versions: dict, message: str):
    installed(monkeypatch, **versions)
    with pytest.raises(BadEnvironment, match=message):
        environment.check_versions()


def test_importing_the_package_says_it_before_anything_else(tmp_path: Path):
    """A fresh Python in which transformers is too old: the error is ours, and torch was not even imported."""
    (tmp_path / "transformers-4.40.0.dist-info").mkdir()
    (tmp_path / "transformers-4.40.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 4.40.0\n"
    )
    code = (
        "import sys\n"
        "try:\n    from minfer_lib import load_model\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    root = Path(minfer_lib.__file__).parents[1]
    paths = os.pathsep.join([str(tmp_path), str(root)])
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.startswith("BadEnvironment minfer_lib needs transformers 5.17 or newer"), result
    assert "4.40.0" in result.stdout and result.stdout.rstrip().endswith("False False")
