"""Keeps lines that native code writes behind Python's back out of a notebook.

Invariant: only the file descriptor of standard error is touched, and it is back in place when the block ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discards what C++ libraries write to standard error inside the block, such as the profiler's own log lines.

    Python's `sys.stderr` in a notebook is another channel and stays open, as do exceptions.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
