"""Compiles the C kernels beside this file for the processor at hand, once, and loads them.

Invariant: what is loaded was compiled from the source as it is now, with the compiler and for the processor that are
there now; everything else is compiled again or refused. Without a compiler the library goes on without these kernels.

The kernels share torch's threads: OpenMP's symbols are left open when linking and resolved to the runtime that torch
has loaded. A second runtime would bring threads of its own, which wait for work by spinning on the same cores.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from ..models.packaged import cache_root

COMPILER = "MINFER_CC"  # the variable that names the C compiler; empty: none, and no compiled kernels
# A product and the sum it goes into may be rounded together, errno and traps are given up; the order of sums is kept.
COMMON = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
TARGETS = (["-march=native"], ["-mcpu=native"], [])
THREADS = (["-fopenmp"], [])  # Apple's compiler has no OpenMP; one thread is still worth having
TIMEOUT_S = 60


class CannotCompile(Exception):
    """Why there is no compiled kernel; the caller has others, and shows the reason in `info`."""


@cache
def library(name: str = "int8_linear") -> ctypes.CDLL:
    """The kernels of `name`.c. Raises `CannotCompile` with the reason."""
    compiler = os.environ.get(COMPILER, "cc")
    if not compiler:
        raise CannotCompile(f"{COMPILER} is empty")
    if shutil.which(compiler) is None:
        raise CannotCompile(f"no C compiler `{compiler}` on this machine")
    source = Path(__file__).parent / "c" / f"{name}.c"
    reason = "it cannot even preprocess an empty file"
    for target in TARGETS:
        processor = _macros(compiler, target)
        if processor is None:
            continue  # this compiler does not know the option
        for threads in THREADS:
            options = [*COMMON, *target, *threads]
            key = hashlib.sha256(source.read_bytes() + processor + repr((compiler, options)).encode()).hexdigest()[:16]
            try:
                place = _built(compiler, source, options, key)
                try:
                    return _load(place)
                except OSError:
                    place.unlink(missing_ok=True)  # not what was compiled here, or no threads to share
                    raise
            except (OSError, subprocess.SubprocessError) as error:
                text = getattr(error, "stderr", None) or str(error)
                reason = str(text).strip().splitlines()[-1] if str(text).strip() else type(error).__name__
    raise CannotCompile(f"`{compiler}` failed: {reason}")


def _macros(compiler: str, target: list[str]) -> bytes | None:
    """What the compiler takes this processor for; None if it does not know the option."""
    try:
        result = subprocess.run(
            [compiler, *target, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def _built(compiler: str, source: Path, options: list[str], key: str) -> Path:
    """The path of the compiled library, from the cache if it is there."""
    place = cache_root() / "kernels" / f"{source.stem}-{key}.so"
    mark = place.with_suffix(".sha256")  # a library that was cut off would end the process when it is loaded
    if place.is_file() and mark.is_file() and mark.read_text() == _digest(place):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".partial-", dir=place.parent)
    except OSError:  # a cache that cannot be written: compiled for this process alone
        folder = tempfile.mkdtemp(prefix="minfer-")
        place = Path(tempfile.mkdtemp(prefix="minfer-")) / place.name
        atexit.register(shutil.rmtree, place.parent, ignore_errors=True)
    try:
        parts = Path(folder) / "part.o", Path(folder) / "part.so"
        # two steps, so that OpenMP is not named when linking
        _run([compiler, *options, "-c", str(source), "-o", str(parts[0])])
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        _run([compiler, "-shared", *undefined, str(parts[0]), "-lm", "-o", str(parts[1])])
        written = Path(folder) / "part.sha256"
        written.write_text(_digest(parts[1]))
        os.replace(parts[1], place)  # whole or not at all, whoever else compiles at this moment
        os.replace(written, place.with_suffix(".sha256"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return place


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)


def _load(path: Path) -> ctypes.CDLL:
    """Loads with all symbols resolved now, so that a missing one is an error here and not an abort later."""
    return ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOW", 0))
