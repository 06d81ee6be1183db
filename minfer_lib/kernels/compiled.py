"""Compiles the C kernels beside this file for the CPU at hand, once, and loads them.

Invariant: what is loaded was compiled from the source as it is now, with the compiler and for the CPU that are there
now, and nobody but root and the user can have written it; everything else is compiled again or refused. Without a
compiler the library goes on without these kernels.

The kernels share torch's threads: OpenMP's symbols are left open when linking and resolved to the runtime that torch
has loaded. A second runtime would bring threads of its own, which wait for work by spinning on the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..models.packaged import cache_root

COMPILER = "MINFER_CC"  # the variable that names the C compiler; empty: none, and no compiled kernels
# A product and the sum it goes into may be rounded together, errno and traps are given up; the order of sums is kept.
COMMON = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
TARGETS = (["-march=native"], ["-mcpu=native"], [])
THREADS = (["-fopenmp"], [])  # Apple's compiler has no OpenMP, clang's is not torch's; one thread is still worth having
TIMEOUT_S = 60
UNUSED_DAYS = 30  # a kernel that nobody loaded for so long is removed from the cache
_LOCK = threading.Lock()  # threads that need a kernel at the same time compile it once


class CannotCompile(Exception):
    """Why there is no compiled kernel; the caller has others, and shows the reason in `info`."""


@cache
def library(name: str = "products") -> ctypes.CDLL:
    """The kernels of `name`.c. Raises `CannotCompile` with the reason.

    `library(name).has_threads` tells whether they share torch's threads, or run in one.
    """
    with _LOCK:
        return _library(name)


def _library(name: str) -> ctypes.CDLL:
    command = shlex.split(os.environ.get(COMPILER, "cc"), posix=os.name != "nt")
    if not command:
        raise CannotCompile(f"{COMPILER} is empty")
    if shutil.which(command[0]) is None:
        raise CannotCompile(f"no C compiler `{command[0]}` on this machine")
    source, kernels = Path(__file__).parent / "c" / f"{name}.c", cache_root() / "kernels"
    for stem, options in _variants(command, source):
        for path in kernels.glob(f"{stem}-*.so"):
            try:
                if _is_safe(path) and path.stem.endswith(_digest(path)):  # cut off, it would end the process
                    os.utime(path)
                    return _load(path, options)
            except OSError:  # of others, or on a mount from which nothing may be run
                continue
    reason = "it cannot even preprocess an empty file"
    for stem, options in _variants(command, source):
        for folder in (kernels, None):  # None: the system's temporary folder, for this process alone
            try:
                return _build(command, source, options, stem, folder)
            except (OSError, subprocess.SubprocessError) as error:
                text = str(getattr(error, "stderr", None) or error).strip()
                reason = text.splitlines()[-1] if text else type(error).__name__
    raise CannotCompile(f"`{shlex.join(command)}` failed: {reason}")


def _variants(command: list[str], source: Path) -> Iterator[tuple[str, list[str]]]:
    """Ways to compile, the best first: a name that stands for source, compiler, CPU and options, and the options."""
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    for target in TARGETS:
        macros = [*command, *target, "-dM", "-E", "-x", "c", os.devnull]  # what the compiler takes this CPU for
        try:
            cpu = subprocess.run(macros, capture_output=True, timeout=TIMEOUT_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue  # it does not know the option
        for threads in THREADS:
            options = [*COMMON, *target, *threads]
            key = hashlib.sha256(text + cpu + repr((command, options)).encode()).hexdigest()[:16]
            yield f"{source.stem}-{key}", options


def _build(command: list[str], source: Path, options: list[str], stem: str, cache: Path | None) -> ctypes.CDLL:
    """Compiles in a new folder that only this user can enter, loads the result, and keeps it if there is a cache."""
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        _close(cache)
        if not _is_safe(cache):
            raise PermissionError("others may write to the cache")
        _clean(cache)
    folder = Path(tempfile.mkdtemp(prefix="minfer-" if cache is None else ".partial-", dir=cache))
    try:
        compiled, linked = folder / "kernel.o", folder / "kernel.so"
        # two steps, so that OpenMP is not named when linking
        _run([*command, *options, "-c", str(source), "-o", str(compiled)])
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        _run([*command, "-shared", *undefined, str(compiled), "-lm", "-o", str(linked)])
        _close(linked)
        kernels = _load(linked, options)
        if cache is not None:
            os.replace(linked, cache / f"{stem}-{_digest(linked)}.so")  # whole or not at all, whoever else compiles
        return kernels
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays loaded


def _is_safe(path: Path) -> bool:
    """Whether only root and this user can have written a file, and put it into its folder; or write to a folder."""
    if not hasattr(os, "getuid"):
        return True  # Windows, where a user's folders are closed to others
    states = [path.lstat()] if path.is_dir() else [path.lstat(), path.parent.stat()]
    return all(state.st_uid in (0, os.getuid()) and not state.st_mode & 0o022 for state in states)


def _close(path: Path) -> None:
    """Takes from others the right to write that the umask of some systems gives a group."""
    if hasattr(os, "getuid") and path.stat().st_uid == os.getuid():
        path.chmod(path.stat().st_mode & ~0o022)


def _clean(cache: Path) -> None:
    """Removes what compilations that were killed left behind, and kernels that nobody uses any longer."""
    now = time.time()
    for pattern, age in ((".partial-*", 3600), ("*.so", UNUSED_DAYS * 86400), ("*.sha256", 0)):
        for path in cache.glob(pattern):
            try:
                if now - path.stat().st_mtime > age:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError:  # another process was faster
                continue


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)


def _load(path: Path, options: list[str]) -> ctypes.CDLL:
    """Loads with all symbols resolved now, so that a missing one is an error here and not an abort later."""
    kernels = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOW", 0))
    kernels.has_threads = "-fopenmp" in options
    return kernels
