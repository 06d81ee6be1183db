"""Was this machine ours while we measured? The CPU time that others took, and the time that a container held us back.

Invariant: it only looks at counters that the operating system keeps anyway, before and after, and touches nothing.

A run is disturbed when others took more CPUs than our threads leave free, or when a quota stopped us for longer than a
hundredth of it. Two programs that compute on two cores each make the other several times slower, not twice: threads
that wait for each other at the end of every product wait for the one that is not running.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil
import torch

from ..models import host

SPARE = 0.15  # CPUs that others may have even so: a desktop, a browser with a notebook, the kernel of one
TOO_LONG = 0.01  # of the run, throttled


@dataclass(frozen=True)
class Disturbance:
    """What came between. others_cpus: CPUs that other processes kept busy on average, those of this process's CPUs;
    throttled_s: seconds in which a quota stopped this process; seconds: how long was looked."""

    others_cpus: float = 0.0
    throttled_s: float = 0.0
    seconds: float = 0.0
    free_cpus: float = 0.0  # that our own threads leave

    @property
    def matters(self) -> bool:
        """Whether it is likely to show in what was measured meanwhile."""
        return self.others_cpus > self.free_cpus + SPARE or self.throttled_s > TOO_LONG * self.seconds

    def figures(self) -> dict[str, float | bool]:
        """What a `Run` keeps of it, by the names of its fields."""
        return {
            "others_cpus": round(self.others_cpus, 3),
            "throttled_s": round(self.throttled_s, 3),
            "disturbed": self.matters,
        }

    def __str__(self) -> str:
        parts = [f"other programs kept {self.others_cpus:.1f} CPUs busy"] if self.others_cpus > self.free_cpus else []
        parts += [f"a quota held this process back for {self.throttled_s:.1f} s"] if self.throttled_s else []
        return " and ".join(parts) or "nothing else ran"


class Watch:
    """From its making on until `seen()`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._busy, self._own, self._throttled = _busy_seconds(), _own_seconds(), host.cpu_throttled_s()

    def seen(self) -> Disturbance:
        """What disturbed us since this object was made."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        others = max(0.0, _busy_seconds() - self._busy - (_own_seconds() - self._own))
        free = max(0.0, host.cpus_allowed() - torch.get_num_threads())
        # The counters tick in hundredths of a second: in a shorter time than some of them they say nothing.
        others_cpus = others / seconds if seconds >= 0.5 else 0.0
        return Disturbance(others_cpus, max(0.0, host.cpu_throttled_s() - self._throttled), seconds, free)


def _busy_seconds() -> float:
    """CPU seconds spent by anybody on the CPUs that this process may run on, those taken by a host machine included."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    total = 0.0
    for number, cpu in enumerate(psutil.cpu_times(percpu=True)):
        if allowed is None or number in allowed:
            total += sum(getattr(cpu, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return total


def _own_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
