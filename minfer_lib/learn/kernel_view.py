"""`show_kernel(file, ...)`: the source of a kernel, which may be in C, or in a module that only a GPU can import.

Invariant: as with `show`, every line is read from the file at this moment and carries its number there. The file is
read, never compiled or imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import InvalidParameter, one_of
from .code_view import Source
from .source import _with_gaps

FOLDER = Path(__file__).parent.parent / "kernels"


def show_kernel(file: str, *names: str) -> Source:
    """The named functions and macros of a file in `minfer_lib/kernels`, such as "c/int8_linear.c"; all without names.

    The comment or decorator that stands right above a function is shown with it. Raises `InvalidParameter` for a file
    or a name that is not there.
    """
    path = FOLDER / file
    sources = sorted(
        p.relative_to(FOLDER).as_posix()
        for p in FOLDER.rglob("*")
        if p.suffix in (".c", ".py") and p.stem != "__init__"
    )
    if file not in sources:
        raise InvalidParameter(f"show_kernel({file!r}) is not possible: there are {one_of(sources)}.")
    text = path.read_text(encoding="utf-8")
    texts = text.splitlines()
    blocks = dict(_blocks(texts))
    missing = [name for name in names if name not in blocks]
    if missing:
        raise InvalidParameter(f"show_kernel({missing[0]!r}) is not possible: {file} has {one_of(sorted(blocks))}.")
    wanted = {n for name in names for n in blocks[name]} if names else set(range(1, len(texts) + 1))
    shown = list(_with_gaps(texts, wanted, 1))
    numbers = [number for number, _ in shown if number is not None]
    caption = f"minfer_lib/kernels/{file}, lines {numbers[0]}-{numbers[-1]}"
    return Source(caption, tuple(shown), whole=text, first=1, language="c" if path.suffix == ".c" else "python")


def _blocks(texts: list[str]) -> Iterable[tuple[str, range]]:
    """Name and line numbers of what begins in the first column: functions, macros and structures."""
    head = re.compile(r"^(?:#define (\w+)|(?:class|def) (\w+)|(?!typedef|return|else)[a-z].*?[\s*](\w+)\([^;]*$)")
    for at, line in enumerate(texts):
        found = head.match(line)
        if not found:
            continue
        begin, end = at, at
        if line.startswith("#define"):
            while texts[end].endswith("\\"):
                end += 1
        elif line.startswith(("def ", "class ")):
            while end + 1 < len(texts) and (not texts[end + 1].strip() or texts[end + 1][0] in " )"):
                end += 1
            while not texts[end].strip():
                end -= 1
        else:
            while texts[end] != "}":
                end += 1
        while begin > 0 and texts[begin - 1].startswith(("/*", "   ", "@", " *")) and texts[begin - 1].strip() != "}":
            begin -= 1
        yield next(filter(None, found.groups())), range(begin + 1, end + 2)
