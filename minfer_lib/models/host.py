"""The machine around this process: its CPU, and how many CPUs and how much memory a container leaves of it.

Invariant: what stands here is what the operating system says; nothing is measured, and torch is not needed to ask.
A limit is the smallest of this process's control group and of all groups above it (Linux, cgroup v1 and v2).
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from pathlib import Path

# What decides how fast a CPU multiplies, as /proc/cpuinfo spells it on x86 and on ARM.
INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def cpu_name() -> str:
    """The CPU's model name as the operating system knows it."""
    if platform.system() == "Darwin":
        try:
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown CPU"


def instruction_sets() -> list[str]:
    """Those of `INSTRUCTION_SETS` that this CPU has; empty where there is no /proc/cpuinfo."""
    flags = (_cpuinfo("flags") or _cpuinfo("features")).split()
    return [name for name in INSTRUCTION_SETS if name in flags]


def cpus_allowed() -> int:
    """CPUs that this process may run on: all, or those of its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """CPUs' worth of time that a container grants, 1.5 for instance; None without a limit."""
    quotas = []
    for folder in _control_groups("cpu"):
        text = _read(folder / "cpu.max")
        text = text or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():  # no limit is "max" in version 2 and -1 in version 1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cpu_throttled_s() -> float:
    """Seconds in which a container's quota stopped its processes, since it was made; 0 where nothing is counted."""
    longest = 0.0
    for folder in _control_groups("cpu"):
        counters = dict(line.split(" ", 1) for line in _read(folder / "cpu.stat").splitlines() if " " in line)
        microseconds = counters.get("throttled_usec") or int(counters.get("throttled_time") or 0) // 1000
        longest = max(longest, int(microseconds) / 1e6)
    return longest


def describe_threads(threads: int) -> str:
    """So many threads beside the CPUs that they may have, with a warning if there are more: a quota stops them all."""
    cpus, quota = cpus_allowed(), cpu_quota()
    most = min(cpus, math.ceil(quota or cpus))
    line = f"{threads}, on {cpus} CPU{'s' * (cpus != 1)}"
    line += f" of which a container grants the time of {quota:g}" if quota else ""
    return f"{line}; WARNING: they wait for each other, set OMP_NUM_THREADS={most}" if threads > most else line


def memory_limit() -> int | None:
    """Bytes of memory that a container grants; None without a limit."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_left() -> int | None:
    """Bytes of memory that a container still has to give; None without a limit. Files it could drop count as free."""
    return min((max(0, left) for _, left in _memory()), default=None)


def _memory() -> list[tuple[int, int]]:
    """Of each control group with a limit: its bytes, and how many of them are left."""
    groups = []
    for folder in _control_groups("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes") or "0"
        if limit.isdigit() and int(limit) < 1 << 60:  # no limit is "max" in version 2 and nearly 2^63 in version 1
            stats = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
            dropped = int(stats.get("total_inactive_file") or stats.get("inactive_file") or 0)
            groups.append((int(limit), int(limit) - int(used) + dropped))
    return groups


def home_as_tilde(text: str) -> str:
    """A text that can be shown to others: ~ for the home folder."""
    home = os.path.expanduser("~").rstrip(os.sep)
    return re.sub(rf"(?<![\w.-]){re.escape(home)}(?!\.?[\w-])", "~", text) if home else text


def _control_groups(controller: str, root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Folders of this process's control group and of those above it, for one controller."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")  # inside a container it may name a place outside, which is not there
        folders += [place for place in (folder, *folder.parents) if place.is_relative_to(top)]
    return folders


def _cpuinfo(key: str) -> str:
    """The first value of a key in /proc/cpuinfo, or nothing."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    """A small file of the operating system, or nothing where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
