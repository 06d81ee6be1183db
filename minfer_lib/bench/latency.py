"""Latency against load: several systems, each served the same requests at the same moments, at several rates.

Invariant: the points of one rate come from one workload with one pattern of arrivals, so that they differ in nothing
but the system; throughput is what was achieved, never the rate that was offered. Beyond a system's capacity its queue
grows for as long as requests come, so that latencies there say how long the run was; such points are told by a
throughput that stays below the rate.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, one_of
from .arrivals import poisson_arrivals
from .comparison import Engine, checked_repeats, doubts_of, failures, named
from .machine import provenance_of
from .metrics import RunMetrics, median
from .results import metrics_of, save, sealed, title_of, unsealed
from .serving import serve
from .settings import FAST_LABEL, fast_mode
from .usage import begin
from .workloads import Workload

KIND = "minfer latency curve"
PARTS = ("points", "workload", "provenance", "notes")
LATENCIES = {
    "ttft_ms": "TTFT, median",
    "ttft_p95_ms": "TTFT, 95th percentile",
    "tpot_ms": "TPOT, median",
    "tpot_p95_ms": "TPOT, 95th percentile",
    "e2e_ms": "end to end, median",
    "e2e_p95_ms": "end to end, 95th percentile",
    "queue_ms": "queue time, median",
    "queue_p95_ms": "queue time, 95th percentile",
}


@dataclass(frozen=True)
class LatencyPoint:
    """One system at one rate. rate: requests a second that were offered; metrics: the median of the runs.

    The record's figures are attributes of the point too (`ttft_ms`, `e2e_p95_ms`, `tokens_per_s` and so on).
    """

    system: str
    rate: float
    metrics: RunMetrics
    warnings: tuple[str, ...] = ()

    @property
    def requests_per_s(self) -> float:
        """Requests answered in full, by the seconds from the start to the last answer."""
        done = self.metrics.requests - self.metrics.failed
        return done / self.metrics.wall_s if self.metrics.wall_s > 0 else 0.0

    def __getattr__(self, name: str) -> Any:
        if name in {each.name for each in dataclasses.fields(RunMetrics)}:
            return getattr(self.metrics, name)
        raise AttributeError(f"a LatencyPoint has no attribute {name!r}")


@dataclass(frozen=True, repr=False)
class LatencyCurve:
    """Points of several systems at several rates; `plot()` draws latency against rate, `print` gives the table."""

    points: list[LatencyPoint]
    workload: dict[str, Any]  # name, description, prompt_lens, output_lens, fast, seed
    provenance: dict[str, Any]  # machine, versions, commit, date, model, dtype, repeats
    notes: tuple[str, ...] = ()
    recorded: bool = field(default=False, compare=False)  # read from a file rather than measured here and now

    @property
    def systems(self) -> list[str]:
        """Their names, in the order in which they were given."""
        return list(dict.fromkeys(point.system for point in self.points))

    @property
    def rates(self) -> list[float]:
        """Rates that were offered, from low to high."""
        return sorted({point.rate for point in self.points})

    def series(self, system: str) -> list[LatencyPoint]:
        """The points of one system, from the lowest rate on; raises `InvalidParameter` for a name not there."""
        found = sorted((point for point in self.points if point.system == system), key=lambda point: point.rate)
        if not found:
            raise InvalidParameter(f"There is no system {system!r} here; there are {one_of(self.systems)}.")
        return found

    def point(self, system: str, rate: float) -> LatencyPoint:
        """One system at one rate; raises `InvalidParameter` for a name or a rate that was not measured."""
        for point in self.series(system):
            if point.rate == rate:
                return point
        raise InvalidParameter(f"No rate {rate!r} was measured; there are {one_of([f'{r:g}' for r in self.rates])}.")

    @property
    def warnings(self) -> list[str]:
        """Everything that makes a point doubtful, each with its system and rate in front."""
        return [f"{p.system} at {p.rate:.3g}/s: {warning}" for p in self.points for warning in p.warnings]

    @property
    def title(self) -> str:
        """One line: model, dtype, workload, machine, and whether it was recorded elsewhere."""
        return title_of(self.workload, self.provenance, self.recorded)

    def lines(self, latency: str = "ttft_p95_ms") -> dict[str, tuple[list[float], list[float]]]:
        """{system: (rates, seconds)} of one latency, a key of `LATENCIES`; points where it is not known are left out.

        An infinite rate has no place on an axis and is left out too.
        """
        if latency not in LATENCIES:
            raise InvalidParameter(f"The latency {latency!r} was asked for; there are {one_of(list(LATENCIES))}.")
        found = {}
        for system in self.systems:
            known = [p for p in self.series(system) if math.isfinite(p.rate) and getattr(p, latency) is not None]
            found[system] = [p.rate for p in known], [getattr(p, latency) / 1e3 for p in known]
        return found

    def plot(self, latency: str = "ttft_p95_ms", *, save: str | os.PathLike[str] | None = None) -> Any:
        """One latency against the rate, a line for each system, as a figure; `save` writes it to a file."""
        from ..learn import plots  # drawing needs matplotlib, data does not
        from .draw import keep

        picture = plots.latency_curves(self.lines(latency), ylabel=f"{LATENCIES[latency]}, s")
        if save is not None:
            keep(picture, save)
        return picture

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; the file appears whole or not at all. `load` reads it. Returns the path."""
        return save(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with kind, schema version and hash. A rate that is infinite becomes null."""
        points = [dataclasses.asdict(point) for point in self.points]
        for point in points:
            point["rate"] = point["rate"] if math.isfinite(point["rate"]) else None
        body = {"points": points, "workload": self.workload, "provenance": self.provenance, "notes": list(self.notes)}
        return sealed(KIND, body)

    def __str__(self) -> str:
        from .draw import aligned

        cells = [["system", "rate/s", *(heading for heading, _ in COLUMNS)]]
        for rate in self.rates:
            for point in (p for p in self.points if p.rate == rate):
                values = [getattr(point, name) for _, name in COLUMNS]
                texts = ["" if value is None else f"{value:,.{digits(value)}f}" for value in values]
                cells.append([point.system, f"{rate:.3g}", *texts])
        facts = self.provenance
        versions = [f"{key} {facts[key]}" for key in ("python", "torch", "transformers") if facts.get(key)]
        notes = [*self.notes, ", ".join([*versions, f"commit {facts.get('commit') or 'none'}", str(facts["date"])])]
        return "\n".join([self.title, *aligned(cells), *notes, *(f"WARNING: {text}" for text in self.warnings)])

    __repr__ = __str__


COLUMNS = [
    ("answered/s", "requests_per_s"),
    ("tokens/s", "tokens_per_s"),
    ("queue ms", "queue_ms"),
    ("TTFT ms", "ttft_ms"),
    ("TTFT p95", "ttft_p95_ms"),
    ("TPOT ms", "tpot_ms"),
    ("end to end ms", "e2e_ms"),
    ("end to end p95", "e2e_p95_ms"),
]


def digits(value: float) -> int:
    """Decimals for about three significant digits."""
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def from_dict(data: Any, name: str = "these results") -> LatencyCurve:
    """The reverse of `LatencyCurve.to_dict`, marked as recorded. Raises `InvalidParameter` as `results.load` does."""
    return unsealed(
        data,
        KIND,
        PARTS,
        name,
        lambda: LatencyCurve(
            points=[
                LatencyPoint(
                    point["system"],
                    math.inf if point["rate"] is None else point["rate"],
                    metrics_of(point["metrics"]),
                    tuple(point["warnings"]),
                )
                for point in data["points"]
            ],
            workload=data["workload"],
            provenance=data["provenance"],
            notes=tuple(data["notes"]),
            recorded=True,
        ),
    )


def latency_curve(
    engines: Sequence[Engine | tuple[str, Engine]],
    workload: Workload,
    rates: Sequence[float],
    *,
    seed: int = 0,
    repeats: int = 1,
    warm_up: bool = True,
) -> LatencyCurve:
    """Serve the workload at each of `rates` requests a second (Poisson arrivals) with each system in turn.

    engines: engines and baselines, or pairs (label, engine). seed: of the arrivals; each repeat has the next one, so
    that the median is not that of one pattern. warm_up: the workload once before, with two tokens a request.

    Raises `InvalidParameter` for no system, two of one name, no rates or one that is not positive, repeats under 1.
    """
    measured = named(engines)
    repeats = checked_repeats(repeats)
    count = len(workload.prompts)
    rates = list(rates)  # of an array, whose truth is not whether it is empty
    if not rates or len(set(rates)) != len(rates):
        raise InvalidParameter(f"rates={rates!r} is not possible: at least one rate, and each of them once.")
    patterns = {rate: [poisson_arrivals(count, rate, seed + turn) for turn in range(repeats)] for rate in rates}
    lm = measured[0].engine.lm
    if warm_up:
        for each in measured:
            serve(each.engine, workload.arriving(None).warm_up())
    points = []
    for rate in rates:
        for each in measured:
            each.runs, each.tokens, each.warnings = [], [], []
        for turn in range(repeats):
            for each in measured[turn % len(measured) :] + measured[: turn % len(measured)]:
                begin(each.engine)
                served = serve(each.engine, workload, patterns[rate][turn])
                each.runs.append(served.metrics)
                each.tokens.append([out.token_ids for out in served.outputs])
                each.warnings += failures(served.outputs)
        for each in measured:
            warnings = doubts_of(each, measured[0], workload)[1]
            points.append(LatencyPoint(each.name, float(rate), median(each.runs), tuple(warnings)))
    notes = [f"Poisson arrivals, seed {seed}; times from a request's arrival, queue included"]
    notes.append(f"median of {repeats} runs" if repeats > 1 else "one run each")
    if workload.fast or fast_mode():
        notes.append(FAST_LABEL)
    return LatencyCurve(
        points=points,
        workload=workload.record() | {"seed": seed},
        provenance={**provenance_of(lm), "repeats": repeats},
        notes=tuple(notes),
    )
