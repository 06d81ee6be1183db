"""Which rows of a comparison get a peak of memory from a fresh process, and how it comes into them.

Invariant: a row says that it has no peak, and why, rather than that of something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter, MinferError, one_of
from .results import Row

if TYPE_CHECKING:
    from .workloads import Workload


def probed_rows(memory: bool | Collection[str], labels: Sequence[str]) -> set[str]:
    """Names of the rows whose peak memory is to be measured. Raises `InvalidParameter` for one that is not there."""
    if isinstance(memory, bool):
        return set(labels) if memory else set()
    if unknown := set(memory) - set(labels):
        raise InvalidParameter(
            f"Peak memory of {sorted(unknown)[0]!r} was asked for, and there is no such row: there are "
            f"{one_of(labels)}. memory=True measures that of all."
        )
    return set(memory)


def with_peak(row: Row, engine: Any, workload: Workload) -> Row:
    """Adds the peak of a fresh process; where that cannot be, a warning says why."""
    from .probe_memory import peak_memory  # its process-wide tools are not needed to import this

    try:
        peak = peak_memory(engine, workload)
    except MinferError as error:
        return dataclasses.replace(row, warnings=(*row.warnings, f"peak memory was not measured: {error}"))
    return dataclasses.replace(row, peak_bytes=peak.peak, base_bytes=peak.base)
