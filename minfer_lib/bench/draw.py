"""Showing a result: in a notebook its table and its picture, elsewhere the table as text; and pictures as files."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..errors import InvalidParameter
from ..learn.quiet import in_notebook

if TYPE_CHECKING:
    from .results import Result

PICTURE = {"ladder": "throughput_ladder", "latency": "saturation", "frontier": "frontier", "quality": "quality_map"}


def figure(result: Result, save: str | os.PathLike[str] | None = None) -> Any:
    """The picture of this kind of result; `save` writes it to a file. Raises `InvalidParameter` where there is none."""
    from ..learn import plots

    name = PICTURE.get(result.kind)
    if name is None and any("step ms" in row.values for row in result.rows):
        name = "decomposition"
    if name is None:
        raise InvalidParameter("A picture of tables was asked for; they have none. `table(title)` gives their numbers.")
    picture = getattr(plots, name)(result)
    if save is not None:
        keep(picture, save)
    return picture


def keep(picture: Any, path: str | os.PathLike[str]) -> None:
    """Writes a picture to an SVG, PNG or PDF file; the same figures give the same file."""
    import matplotlib as mpl

    from ..learn.style import STYLE

    with mpl.rc_context({**STYLE, "svg.hashsalt": "minfer", "svg.fonttype": "path"}):  # fixed ids, and no date
        picture.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def progress_bar(total: int, unit: str, progress: bool, what: str = "") -> tqdm:
    """A bar for whoever waits longer than five seconds at a terminal or in a notebook; a log file gets none."""
    watched = progress and (in_notebook() or sys.stderr.isatty())
    return tqdm(total=total, desc=what, unit=unit, delay=5, leave=False, disable=not watched)


def show(result: Result) -> None:
    """In a notebook the table and the picture; elsewhere the table as text."""
    if in_notebook():
        from IPython.display import display

        display(result)
        display(figure(result))
    else:
        print(result)
