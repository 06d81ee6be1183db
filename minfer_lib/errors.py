"""Every error this package raises on purpose is a `MinferError`.

Invariant: the message alone is enough to act on. It says what was asked, what is possible and what to do, in that
order, so that a learner never has to read a traceback to find out. The kinds exist so that a program can tell them
apart; those that report a bad value are `ValueError`s too, since that is what a caller would try to catch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any


class MinferError(Exception):
    """Base of all errors of this package."""


class BadEnvironment(MinferError):
    """The installed software cannot run this: a library is missing or too old."""


class DeviceNotAvailable(MinferError):
    """A device was asked for that this machine or this build of torch does not have."""


class ModelNotFound(MinferError):
    """No model under that name: not packaged, no such folder, not on the hub or the hub cannot be reached."""


class UnsupportedModel(MinferError):
    """The model exists, but the engine that was asked to run it could not run it correctly."""


class InvalidParameter(MinferError, ValueError):
    """An argument of an engine or of `SamplingParams` is outside of what it may be."""


class InvalidPrompt(MinferError, ValueError):
    """A prompt that cannot be run: empty, of the wrong type, or with ids that the vocabulary does not have."""


class PromptTooLong(InvalidPrompt):
    """A prompt that leaves no room for a single new token within `max_model_len`."""


class NoFreeBlock(MinferError):
    """A `BlockAllocator` was asked for a block, and all are in use. The engine never lets it come to that."""


class InvariantBroken(MinferError):
    """What must hold between the steps of an engine does not: a fault of this package, found by `check_invariants`."""


class GenerationFailed(MinferError):
    """Something broke while generating; `outputs` holds what was generated until then, in input order.

    The exception that caused it is in `__cause__`.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


def one_of(names: Sequence[str]) -> str:
    """Names as a readable choice for a message: `a`, `b` or `c`."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def shown(value: Any, limit: int = 80) -> str:
    """A value as a message shows it: its repr on one line, cut where it would bury the sentence around it."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of more digits than Python writes, an object whose own repr fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def must_be(name: str, possible: str, value: Any) -> InvalidParameter:
    """The error for one value. Its name comes first: a command line, where it has another, can put that there."""
    return InvalidParameter(f"{name} must be {possible}; it is {shown(value)}.")


def integer(name: str, value: Any, at_least: int | None = None, at_most: int | None = None, *, hint: str = "") -> int:
    """The value as a Python integer; those of NumPy and torch will do. Raises `InvalidParameter` for anything else."""
    possible = "an integer"
    if at_least is not None:
        possible += f" of {at_least} or more" if at_most is None else f" from {at_least} to {at_most}"
    possible += f" ({hint})" if hint else ""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # which refuses 3.0 and "3"
    except TypeError:
        number = None
    if number is None or (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise must_be(name, possible, value)
    return number


def number(
    name: str, value: Any, possible: str = "a finite number", allowed: Callable[[float], bool] = lambda x: True
) -> float:
    """The value as a finite Python float; other libraries' numbers will do. Raises `InvalidParameter` for any other."""
    try:
        result = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        result = math.nan
    if not math.isfinite(result) or not allowed(result):
        raise must_be(name, possible, value)
    return result
