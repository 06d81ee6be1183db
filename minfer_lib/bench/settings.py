"""One switch: `MINFER_FAST=1` makes every benchmark short, and labels what it shows.

Invariant: fast mode changes how much is measured, never what is measured, and no table of it goes without its label.
It is there so that CI can execute every chapter; its figures are not to be quoted.
"""

from __future__ import annotations

import os

FAST_LABEL = "fast mode: as short and as seldom as it goes; do not quote these figures"


def fast_mode() -> bool:
    """Whether the environment variable MINFER_FAST asks for short runs (anything but empty, 0, false, no or off)."""
    return os.environ.get("MINFER_FAST", "").strip().lower() not in ("", "0", "false", "no", "off")


def shorten(length: int) -> int:
    """A number of tokens as fast mode runs it: an eighth, but 4 to 64, and never more than was asked."""
    return min(length, 64, max(4, length // 8)) if fast_mode() else length
