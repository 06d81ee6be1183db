"""`show(obj)`: the real source of what a chapter talks about, with the file and the lines where it stands.

Invariant: every line shown is read from the file at this moment and carries its number there; what is left out is
marked where it is missing. Text and package can therefore not drift apart. The caption names the file from the
package's own folder on, wherever that is installed, so that an executed notebook holds no path of a machine.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InvalidParameter, one_of
from .code_view import Source


def show(
    obj: Any, *, only: str | Sequence[str] | None = None, lines: tuple[int, int] | None = None, docstring: bool = True
) -> Source:
    """The source of a function, class, method, property or module, to be displayed as the last line of a cell.

    only: names of methods of a class, or of functions and classes of a module; the rest is left out.
    lines: (first, last) line numbers of the file, both included.
    docstring: False leaves of docstrings over two lines only the first line.

    Raises `InvalidParameter` for what has no Python source (built-ins, instances) and for names or lines that are not
    in it.
    """
    target = _unwrapped(obj)
    text, first, filename = _read(obj, target)
    tree = ast.parse(textwrap.dedent(text))
    last = first + len(text.splitlines()) - 1
    wanted = set(range(first, last + 1))
    if only is not None:
        wanted = _lines_of(tree, [only] if isinstance(only, str) else list(only), first, getattr(obj, "__name__", "it"))
    if lines is not None:
        begin, end = lines
        if not first <= begin <= end <= last:
            raise InvalidParameter(
                f"show(lines=({begin}, {end})) is not possible: this source has the lines {first} to {last}, and the "
                "first of the two may not be larger than the second."
            )
        wanted &= set(range(begin, end + 1))
    if not docstring:
        wanted -= _long_docstrings(tree, first)
    shown = list(_with_gaps(textwrap.dedent(text).splitlines(), wanted, first))
    numbers = [number for number, _ in shown if number is not None]
    where = f"{filename}, " + (f"line {numbers[0]}" if len(numbers) == 1 else f"lines {numbers[0]}-{numbers[-1]}")
    return Source(where, tuple(shown), whole=textwrap.dedent(text), first=first)


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
    name = (
        getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or f"an instance of {type(obj).__name__}"
    )
    if not isinstance(target, type | types.ModuleType | types.FunctionType):
        builtin = isinstance(
            target, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
        )
        has_class = type(target).__module__ != "builtins"
        advice = (
            "It is written in C." if builtin else f"Use show({type(target).__name__}), its class." if has_class else ""
        )
        raise InvalidParameter(
            f"show() was asked for {name}, which has no Python source of its own. "
            f"{advice} show() takes functions, classes, methods, properties and modules.".replace("  ", " ")
        )
    try:
        text, first = _text_and_line(target)
    except (OSError, TypeError, SyntaxError) as error:
        raise InvalidParameter(
            f"show() was asked for {name}, whose source cannot be read: it is written in C, or was typed where nothing "
            "keeps it. show() takes functions, classes, methods, properties and modules of a file or of a cell."
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
        raise InvalidParameter(f"show(only={missing[0]!r}) is not possible: {owner} has {one_of(sorted(members))}.")
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
