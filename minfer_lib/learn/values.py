"""Comparing what a learner's function gave with what was expected, and showing both in a line of text.

Invariant: nothing here raises, whatever it is given.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any


def difference(got: Any, expected: Any, tolerance: float = 1e-5) -> str | None:
    """None if `got` is what was expected, else one sentence on how it differs. Never raises.

    Numbers are compared by value (NaN equals NaN), tensors and arrays by their elements, tuples and lists alike.
    """
    try:
        return _difference(_plain(got), _plain(expected), tolerance)
    except Exception:
        return f"the result, of type {type(got).__name__}, cannot be compared with what was expected."


def _plain(value: Any) -> Any:
    """Tensors and arrays as numbers and nested lists."""
    if hasattr(value, "tolist"):
        return value.detach().tolist() if hasattr(value, "detach") else value.tolist()
    return value


def _difference(got: Any, expected: Any, tolerance: float) -> str | None:
    if expected is None or got is None:
        return None if got is expected else f"{shown(expected)} was expected and {shown(got)} came."
    if isinstance(expected, tuple | list):
        kind = "tuple" if isinstance(expected, tuple) else "list"
        if not isinstance(got, tuple | list):
            return f"a {kind} of {len(expected)} values was expected and one {type(got).__name__} came."
        if len(got) != len(expected):
            return f"a {kind} of {len(expected)} values was expected and {len(got)} came."
        parts = (difference(g, e, tolerance) for g, e in zip(got, expected, strict=True))
        return next((f"at position {n}: {part}" for n, part in enumerate(parts) if part), None)
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or set(got) != set(expected):
            return f"a dict with the keys {shown(list(expected))} was expected."
        parts = ((key, difference(got[key], expected[key], tolerance)) for key in expected)
        return next((f"at key {key!r}: {part}" for key, part in parts if part), None)
    if isinstance(expected, numbers.Number) and not isinstance(expected, bool):
        if not isinstance(got, numbers.Number) or isinstance(got, bool):
            return f"a number was expected and a {type(got).__name__} came."
        if math.isnan(got) or math.isnan(expected):
            return (
                None
                if math.isnan(got) and math.isnan(expected)
                else f"{shown(expected)} was expected, not {shown(got)}."
            )
        exact = isinstance(expected, int)
        equal = got == expected or (not exact and math.isclose(got, expected, rel_tol=tolerance, abs_tol=1e-9))
        return None if equal else f"{shown(expected)} was expected and {shown(got)} came."
    return None if got == expected else f"{shown(expected)} was expected and {shown(got)} came."


def shown(value: Any, limit: int = 90) -> str:
    """A value as a diagnosis shows it: numbers with separators and six digits, everything cut at `limit` characters."""
    try:
        value = _plain(value)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            text = repr(value)
        elif isinstance(value, numbers.Integral):
            text = f"{value:,}" if abs(value) >= 10_000 else str(value)
        elif isinstance(value, numbers.Real):
            large = math.isfinite(value) and value == int(value) and 10_000 <= abs(value) < 1e15
            text = f"{value:,.0f}" if large else f"{value:.6g}"
        elif isinstance(value, tuple | list):
            inside = ", ".join(shown(part) for part in value)
            text = f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        else:
            text = " ".join(repr(value).split())
    except Exception:
        text = f"something of type {type(value).__name__}"
    return shortened(text, limit)


def shortened(text: str, limit: int = 90) -> str:
    """The text, cut at `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
