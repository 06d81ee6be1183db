"""Every error this package raises on purpose is a `MinferError`.

Invariant: the message alone is enough to act on. It says what was asked, what is possible and what to do, in that
order, so that a learner never has to read a traceback to find out. The kinds exist so that a program can tell them
apart; those that report a bad value are `ValueError`s too, since that is what a caller would try to catch.
"""

from __future__ import annotations

from collections.abc import Sequence
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
