"""Peak memory of one engine on one workload, in a process that did nothing else.

`python -m minfer_lib.bench.probe_memory` reads a job from standard input; `peak_memory` starts it and is what to call.

Invariant: the process that is measured holds one model and one engine, the same ones as here. In a process that has run
others before, memory that was freed but not given back to the system, and everything else it holds, would be counted.

On a CPU the figure is resident memory as the operating system counts it: Python, PyTorch and the weights are in it,
nothing is subtracted, and what the process held after its imports is reported beside it. On Linux the kernel's mark
is lowered once the model is loaded (and quantised), so that the peak is that of generating and not that of reading a
file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, MinferError
from ..generation.params import SamplingParams
from ..models.load import load_model
from ..models.memory import measured_weight_bytes
from ..quant.quantize import quantize_int8
from .machine import PACKAGE, dtype_name
from .workloads import Workload


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of resident memory: after the imports, with the model loaded, and at most while generating."""

    base: int
    loaded: int
    peak: int


def peak_memory(engine: Any, workload: Workload, timeout_s: float = 1800) -> PeakMemory:
    """Peak resident memory of a copy of `engine`, made in a fresh process on the CPU, over a workload.

    A model that `quantize_int8` made is quantised again there, before the figure counts. Raises `MinferError` if the
    engine or its model cannot be made again (a model that was changed otherwise after it was loaded, an engine defined
    in a notebook), or with the last line of what that process said if it failed.
    """
    lm = engine.lm
    job = {
        "engine": recipe(engine),
        "model": lm.model.config.name_or_path or lm.name,  # the folder or hub id it came from, else a name of ours
        "dtype": dtype_name(lm.dtype),
        "quantization": lm.quantization,
        "weight_bytes": measured_weight_bytes(lm.model),
        "prompts": workload.prompts,
        "max_tokens": [params.max_tokens for params in workload.params],
    }
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "minfer_lib.bench.probe_memory"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise MinferError(f"Measuring the peak memory of {engine.name!r} took over {timeout_s:.0f} s.") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MinferError(f"The process that was to measure the peak memory of {engine.name!r} failed: {said}")
    return PeakMemory(**json.loads(done.stdout.strip().splitlines()[-1]))


def recipe(engine: Any) -> dict[str, Any]:
    """How to make an engine again: its class, and the options it holds under the names of its parameters.

    Its cache may hold them too. An attention backend stands for its name, and a part whose class is the default is left
    out. Raises `InvalidParameter` for an engine that cannot be made from what can be written down.
    """
    cls = type(engine)
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # the first is the model
    names = [p.name for p in parameters if p.name != "clock" and type(getattr(engine, p.name, None)) is not p.default]
    holders = (getattr(engine, "cache", None), engine)
    options = {name: getattr(holder, name) for holder in holders for name in names if hasattr(holder, name)}
    options = {name: value.name if hasattr(value, "attend") else value for name, value in options.items()}
    writable = all(value is None or isinstance(value, int | float | str) for value in options.values())
    if len(options) < len(names) or not writable or cls.__module__ == "__main__":
        raise InvalidParameter(
            f"{cls.__name__} cannot be made again in a fresh process: its class must stand in a module, and hold each "
            "option as an attribute of the same name. Leave memory=True out for it."
        )
    return {"module": cls.__module__, "cls": cls.__qualname__, "options": options}


def resident_bytes() -> int:
    """Resident memory of this process now; its peak so far where the system tells no more than that."""
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most resident memory this process had, since its start or the last `lower_peak`.

    Not `ru_maxrss` on Linux: a child inherits there what its parent had, so a small process started by a large one
    would look large.
    """
    if (mark := _status_bytes("VmHWM")) is not None:
        return mark
    try:
        import resource  # Unix only
    except ImportError:
        raise MinferError(
            "Resident memory was to be measured, which is possible on Linux and macOS only. Leave memory=True out."
        ) from None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def lower_peak() -> bool:
    """Lowers the kernel's mark to what is resident now; False where that is not possible (only Linux can)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Returns memory that was freed to the system: what loading and quantising needed is not the engine's."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # of glibc; other systems have no such call
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def main() -> None:
    """Reads a job from standard input, runs it, prints a `PeakMemory` as one line of JSON."""
    job = json.load(sys.stdin)
    recipe = job["engine"]
    make = getattr(import_module(recipe["module"]), recipe["cls"])
    base = resident_bytes()
    lm = load_model(job["model"], device="cpu", dtype=job["dtype"])
    if job["quantization"] is not None and lm.quantization is None:  # a folder of save_int8 is in int8 already
        lm = quantize_int8(lm, **job["quantization"], progress=False)
    if measured_weight_bytes(lm.model) != job["weight_bytes"]:
        raise SystemExit(f"{lm.name} was changed after it was loaded, so that its name does not bring it back")
    engine = make(lm, **recipe["options"])
    give_back()
    loaded = resident_bytes()
    lower_peak()
    engine.generate(job["prompts"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in job["max_tokens"]])
    print(json.dumps(asdict(PeakMemory(base=base, loaded=loaded, peak=peak_resident_bytes()))))


if __name__ == "__main__":
    main()
