"""`show(obj)`: the real source of what a chapter talks about, with the file and the lines where it stands;
`show_kernel(file, ...)`: that of a kernel, which may be in C, or in a module that only a GPU can import.

Invariant: every line shown is read from the file at this moment and carries its number there; what is left out is
marked where it is missing. Text and package can therefore not drift apart. The caption names the file from the
package's own folder on, wherever that is installed, so that an executed notebook holds no path of a machine.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InvalidParameter, one_of
from .code_view import Source

KERNELS = Path(__file__).parent.parent / "kernels"
MARKER = re.compile(r"/\* \[(\w+)\] \*/")  # of a part of a file in C


def show(obj: Any, *, only: str | Sequence[str] | None = None, docstring: bool = True) -> Source:
    """The source of a function, class, method, property or module, to be displayed as the last line of a cell.

    only: names of methods of a class, or of functions and classes of a module; the rest is left out.
    docstring: False leaves of docstrings over two lines only the first line.

    Raises `InvalidParameter` for what has no Python source (built-ins, instances) and for names that are not in it.
    """
    text, first, filename = _read(obj, _unwrapped(obj))
    tree = ast.parse(textwrap.dedent(text))
    wanted = set(range(first, first + len(text.splitlines())))
    if only is not None:
        wanted = _lines_of(tree, [only] if isinstance(only, str) else list(only), first, getattr(obj, "__name__", "it"))
    if not docstring:
        wanted -= _long_docstrings(tree, first)
    return _source(filename, textwrap.dedent(text), wanted, first)


def show_kernel(file: str, *names: str) -> Source:
    """The named parts of a file in `minfer_lib/kernels`, such as "c/products.c"; all of it without names.

    Of a file in Python the names are those of its functions. A file in C has markers, `/* [name] */` above a part and
    `/* [end] */` below it. Raises `InvalidParameter` for a file or a name that is not there.
    """
    files = [path for path in KERNELS.rglob("*.*") if path.suffix in (".c", ".py") and path.stem != "__init__"]
    sources = sorted(path.relative_to(KERNELS).as_posix() for path in files)
    if file not in sources:
        raise InvalidParameter(f"show_kernel({file!r}) is not possible: there are {one_of(sources)}.")
    text = (KERNELS / file).read_text(encoding="utf-8")
    wanted = set(range(1, len(text.splitlines()) + 1))
    if file.endswith(".py"):
        wanted = _lines_of(ast.parse(text), names, 1, file) if names else wanted
        return _source(f"minfer_lib/kernels/{file}", text, wanted, 1)
    parts: dict[str, set[int]] = {}
    here = "end"
    for number, line in enumerate(text.splitlines(), 1):
        if marker := MARKER.search(line):
            here = marker[1]
        elif here != "end":
            parts.setdefault(here, set()).add(number)
    missing = [name for name in names if name not in parts]
    if missing:
        raise InvalidParameter(f"{missing[0]!r} cannot be shown: {file} has {one_of(sorted(parts))}.")
    wanted = set().union(*(parts[name] for name in names)) if names else wanted
    return _source(f"minfer_lib/kernels/{file}", text, wanted, 1, "c")


def _source(filename: str, text: str, wanted: set[int], first: int, language: str = "python") -> Source:
    shown = tuple(_with_gaps(text.splitlines(), wanted, first))
    numbers = [number for number, _ in shown if number is not None]
    where = f"line {numbers[0]}" if len(numbers) == 1 else f"lines {numbers[0]}-{numbers[-1]}"
    return Source(f"{filename}, {where}", shown, whole=text, first=first, language=language)


# -- finding it -----------------------------------------------------------------------------------------------------


def _unwrapped(obj: Any) -> Any:
    """The function, class or module behind decorators, properties and bound methods."""
    if isinstance(obj, property):
        obj = obj.fget
    elif isinstance(obj, functools.cached_property):
        obj = obj.func
    elif isinstance(obj, functools.partial):
        return _unwrapped(obj.func)
    elif isinstance(obj, types.MethodType | staticmethod | classmethod):
        obj = obj.__func__
    return inspect.unwrap(obj) if callable(obj) else obj


def _read(obj: Any, target: Any) -> tuple[str, int, str]:
    """Source text, number of its first line and the name of its file, as a caption may show it."""
    name = next(filter(None, (getattr(obj, n, None) for n in ("__qualname__", "__name__"))), None)
    name = name or f"an instance of {type(obj).__name__}"
    takes = "show() takes functions, classes, methods, properties and modules of a file or of a cell."
    if not isinstance(target, type | types.ModuleType | types.FunctionType):
        advice = "" if type(target).__module__ == "builtins" else f"Use show({type(target).__name__}), its class. "
        raise InvalidParameter(f"show() was asked for {name}, which has no Python source of its own. {advice}{takes}")
    try:
        text, first = _text_and_line(target)
    except (OSError, TypeError, SyntaxError) as error:
        raise InvalidParameter(
            f"show() was asked for {name}, whose source cannot be read: it is written in C, or was typed where nothing "
            f"keeps it. {takes}"
        ) from error
    return text, first, _file_caption(target)


def _text_and_line(target: Any) -> tuple[str, int]:
    if isinstance(target, types.ModuleType):
        return inspect.getsource(target), 1
    if isinstance(target, type) and target.__module__ == "__main__":  # a class of a notebook has no file to look in
        code = next(m.__code__ for m in vars(target).values() if isinstance(m, types.FunctionType))
        whole = "".join(linecache.getlines(code.co_filename))
        node = next(n for n in ast.walk(ast.parse(whole)) if isinstance(n, ast.ClassDef) and n.name == target.__name__)
        return "\n".join(whole.splitlines()[_first_line(node) - 1 : node.end_lineno]), _first_line(node)
    found, first = inspect.getsourcelines(target)
    return "".join(found), first


def _file_caption(target: Any) -> str:
    """`minfer_lib/naive.py` from the module's name, or where a cell or a script was typed."""
    module = target if isinstance(target, types.ModuleType) else sys.modules.get(target.__module__)
    if module is None or module.__name__ == "__main__":
        return "this notebook" if "ipykernel" in sys.modules else "this script"
    path = PurePosixPath(*module.__name__.split("."))
    is_package = Path(getattr(module, "__file__", None) or "").name == "__init__.py"
    return str(path / "__init__.py") if is_package else f"{path}.py"


# -- choosing lines -------------------------------------------------------------------------------------------------


def _first_line(node: ast.AST) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _lines_of(tree: ast.Module, names: Sequence[str], first: int, owner: str) -> set[int]:
    """Line numbers of the named members, and of the header of the class they are in."""
    outer = tree.body[0] if len(tree.body) == 1 and isinstance(tree.body[0], ast.ClassDef) else None
    members: dict[str, list[ast.stmt]] = {}
    for node in (outer or tree).body:
        for name in _names(node):
            members.setdefault(name, []).append(node)
    missing = [name for name in names if name not in members]
    if missing:
        raise InvalidParameter(f"{missing[0]!r} cannot be shown: {owner} has {one_of(sorted(members))}.")
    wanted: set[int] = set()
    if outer is not None:
        wanted |= set(range(_first_line(outer), outer.body[0].lineno)) or {outer.lineno}
    for node in (node for name in names for node in members[name]):
        wanted |= set(range(_first_line(node), node.end_lineno + 1))
    return {first + number - 1 for number in wanted}


def _names(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def _long_docstrings(tree: ast.Module, first: int) -> set[int]:
    """Lines of docstrings behind their first, except the one that closes them."""
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            starts_below = text.value.value.startswith("\n")  # the quotes stand on a line of their own
            hidden |= {first + number - 1 for number in range(text.lineno + 1 + starts_below, text.end_lineno)}
    return hidden


def _with_gaps(texts: Sequence[str], wanted: set[int], first: int) -> Iterable[tuple[int | None, str]]:
    """(number, text) of the wanted lines, with a note in each place where lines are missing; none blank at the end."""
    numbers = sorted(wanted)
    while numbers and not texts[numbers[-1] - first].strip():
        numbers.pop()
    previous = numbers[0] - 1
    for number in numbers:
        missing = number - previous - 1
        text = texts[number - first]
        if any(texts[n - first].strip() for n in range(previous + 1, number)):
            indent = " " * (len(text) - len(text.lstrip()))
            yield None, f"{indent}⋯ {missing} line{'s' if missing > 1 else ''}"
        elif missing:
            yield number - 1, ""
        yield number, text
        previous = number
