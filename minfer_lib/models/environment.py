"""Is what is installed enough to run this package? Asked before anything else is imported.

Invariant: this module imports neither torch nor transformers, so that a library that is missing or too old is named in
one sentence, instead of failing at some import deep inside.
"""

from __future__ import annotations

from importlib import metadata

from ..errors import BadEnvironment

MINIMUM = {"torch": (2, 11), "transformers": (5, 17)}  # pyproject.toml says the same; a test compares the two


def check_versions() -> None:
    """Raises `BadEnvironment` if torch or transformers is missing or older than this package was tested with."""
    for package, minimum in MINIMUM.items():
        wanted = f"{package} {'.'.join(map(str, minimum))} or newer"
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise BadEnvironment(
                f"minfer_lib needs {wanted}, and this Python has no {package}. "
                f"Install it with `pip install '{package}>={'.'.join(map(str, minimum))}'`, or run `make lab`, "
                "which sets up an environment of its own."
            ) from None
        if _release(found) < minimum:
            raise BadEnvironment(
                f"minfer_lib needs {wanted}, and this Python has {package} {found}. "
                f"Upgrade it with `pip install -U '{package}>={'.'.join(map(str, minimum))}'`, or run `make lab`, "
                "which sets up an environment of its own."
            )


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    numbers = []
    for part in version.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
