"""What the chapters use to teach: `show` (the package's real source), `plots`, `widgets`, `checks` of the exercises.

Invariant: importing this package loads nothing of matplotlib, Pygments or ipywidgets; each part is loaded when it is
first used. The core of `minfer_lib` never imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checks, plots, widgets
    from .exercises import claim, yours
    from .quiet import quiet_stderr
    from .sliders import explore
    from .source import show, show_kernel
    from .style import colour_of, use_style

_HOME = {
    "claim": "exercises",
    "quiet_stderr": "quiet",
    "show": "source",
    "show_kernel": "source",
    "colour_of": "style",
    "use_style": "style",
    "explore": "sliders",
    "yours": "exercises",
}
_MODULES = ("checks", "plots", "widgets")

__all__ = [
    "checks",
    "claim",
    "colour_of",
    "explore",
    "plots",
    "quiet_stderr",
    "show",
    "show_kernel",
    "use_style",
    "widgets",
    "yours",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
