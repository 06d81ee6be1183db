"""Whether there is a notebook, and how lines that native code writes behind Python's back are kept out of it.

Invariant: nothing is imported for it. Of `quiet_stderr`: only the file descriptor of standard error is touched, and it
is back in place when the block ends.
"""

from __future__ import annotations

import os
import sys
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


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code, so that there is somebody to show a picture to."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
