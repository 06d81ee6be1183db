"""What a figure was measured on: names and versions, and what the memory and the arithmetic units really give.

Invariant: nothing here identifies a person or a computer (no host name, user or path), and nothing is looked up in a
data sheet: bandwidth and arithmetic are measured on the spot, since a roofline made of advertised numbers flatters
nobody who has to live under it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..models import host
from .settings import fast_mode

if TYPE_CHECKING:
    from ..models.load import LanguageModel

PACKAGE = Path(__file__).resolve().parent.parent


def provenance(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> dict[str, object]:
    """Where and with what something was measured, ready for JSON.

    Keys: device, cpu, gpu (None without), cores, cpu_quota (CPUs that a container grants the time of; None without),
    threads, os, python, torch, transformers, minfer, commit (as `commit` finds it), date (UTC), dtype.
    """
    device = torch.device(device)
    return {
        "device": device.type,
        "cpu": host.cpu_name(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": host.cpus_allowed(),
        "cpu_quota": host.cpu_quota(),
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "minfer": version("minfer"),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": None if dtype is None else dtype_name(dtype),
    }


def provenance_of(lm: LanguageModel) -> dict[str, object]:
    """`provenance` where a model is, with two more keys: model, its name, and weights, as `weights_name` says it."""
    return {**provenance(lm.device, lm.dtype), "model": lm.name, "weights": weights_name(lm)}


def machine_name(facts: dict[str, object]) -> str:
    """One line out of a provenance: the GPU, or the CPU with the threads in use."""
    return str(facts["gpu"] or f"{facts['cpu']}, {facts['threads']} threads")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` rather than `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def weights_name(lm: LanguageModel) -> str:
    """What a model's weights are kept in: `float32`, or `int8 dynamic, rest float32`, where rest is its dtype.

    After "int8" stands what happens to activations, then what else than the usual layers is in int8 or is not.
    """
    dtype = dtype_name(lm.dtype)
    if (options := lm.quantization) is not None:
        kind = "int8 " + ("dynamic" if options["activations"] == "dynamic" else "weight-only")
        kind += "".join([" + head"] * ("lm_head" not in options["skip"]) + [" + embedding"] * options["embedding"])
        kind += "".join(f" - {name}" for name in options["skip"] if name != "lm_head")
    elif any(type(module).__name__ == "Linear8bitLt" for module in lm.model.modules()):
        kind = "bitsandbytes int8"
    else:
        return dtype
    return f"{kind}, rest {dtype}"


def commit() -> str | None:
    """Short hash of the commit that this package was run from, with "-dirty" if it has changes; None if nobody knows.

    Without a git repository it is what MINFER_COMMIT says, for a copy on a rented machine, or what the installed
    package was built from.
    """
    git = ["git", "-C", str(PACKAGE)]
    # A copy installed inside somebody else's checkout is not theirs: only a tracked package has a commit.
    if _output_of([*git, "ls-files", "--error-unmatch", "__init__.py"]) is not None:
        found = _output_of([*git, "describe", "--always", "--dirty", "--exclude", "*"])
        new = found and not found.endswith("-dirty") and _output_of([*git, "status", "--porcelain", "."])
        return f"{found}-dirty" if new else found
    if told := os.environ.get("MINFER_COMMIT"):
        return told
    if (PACKAGE.parent / ".git").exists():  # a repository, and no git that answers
        return None
    if _installed_at() != PACKAGE:  # a copied folder beside another that is installed
        return None
    built = re.search(r"\+g([0-9a-f]+)(\.d\d+)?$", version("minfer") or "")
    return built[1] + "-dirty" * bool(built[2]) if built else None


def _installed_at() -> Path | None:
    """Where the package is that the installed version speaks of."""
    try:
        return Path(str(metadata.distribution("minfer").locate_file("minfer_lib"))).resolve()
    except metadata.PackageNotFoundError:
        return None


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all it was given; before that its time is not yet spent when we look."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def read_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes a second that this device reads from its memory: the best that this process has measured so far.

    The best, because what disturbs a measurement only ever makes it slower; `measure_bandwidth` looks again.
    """
    return _BEST.get(_key(device)) or measure_bandwidth(device)


def measure_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes a second that this device reads from its memory now.

    Two ways of reading a buffer much larger than any cache, the faster one counts: a plain sum, and a matrix times a
    vector, which is what a decode step does with its weights. On an accelerator in bfloat16.
    """
    device = torch.device(device)
    total = (128 << 20) if fast_mode() else (512 << 20)  # bytes, beyond any cache
    if device.type == "cuda":  # larger, but what a model has left of the memory must do
        total = max(total, min(2 << 30, torch.cuda.mem_get_info(device)[0] // 2))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    columns = 8192
    matrix = torch.ones(total // dtype.itemsize // columns, columns, device=device, dtype=dtype)  # [rows, columns]
    vector = torch.ones(columns, device=device, dtype=dtype)
    seconds = min(_best_seconds(way, device) for way in (lambda: matrix.sum(), lambda: torch.mv(matrix, vector)))
    found = matrix.numel() * dtype.itemsize / seconds
    _BEST[_key(device)] = max(found, _BEST.get(_key(device), 0.0))
    return found


def peak_flops(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations a second (a multiply-add is two) of a large matrix product in `dtype`.

    The best that this process has measured so far; `measure_flops` looks again.
    """
    return _BEST.get(_key(device, dtype)) or measure_flops(device, dtype)


def measure_flops(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations a second that a large matrix product in `dtype` reaches now."""
    largest = 512 if fast_mode() else 1024 if torch.device(device).type == "cpu" else 8192
    best, size = 0.0, 256
    while True:  # from small to large: a type that the CPU only emulates takes seconds at full size
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        seconds = _best_seconds(lambda a=a, b=b: a @ b, torch.device(device))
        best = max(best, 2 * size**3 / seconds)
        size *= 2
        if size > largest or seconds > 0.02:
            break
    _BEST[_key(device, dtype)] = max(best, _BEST.get(_key(device, dtype), 0.0))
    return best


_BEST: dict[tuple[object, ...], float] = {}  # bytes, or operations of a dtype, a second; by device, threads, fast mode


def _key(device: torch.device | str, dtype: torch.dtype | None = None) -> tuple[object, ...]:
    return str(torch.device(device)), dtype, torch.get_num_threads(), fast_mode()


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs, after one to warm up: what disturbs a run only ever makes it longer."""
    run()
    best = float("inf")
    at_once = 1 if device.type == "cpu" else 4  # so that waiting for the device is a small part of it
    for _ in range(3 if fast_mode() else 8):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(at_once):
            run()
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / at_once)
    return max(best, 1e-9)


def version(package: str) -> str | None:
    """Of an installed package; None for one that was copied rather than installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # copied rather than installed
        return None


def _output_of(command: list[str]) -> str | None:
    """What a command prints, stripped; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
