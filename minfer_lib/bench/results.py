"""What a comparison found, as data: rows with provenance, to JSON and back. Other results are kept the same way.

Invariant: a figure never travels without where it comes from. A file holds the rows, the workload, the machine and the
versions, a schema version and a hash of all that, so that a figure edited by hand is noticed when it is read. Tables
and plots are drawn from these objects and from nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import InvalidParameter, one_of
from .machine import PACKAGE, machine_name
from .metrics import RunMetrics

if TYPE_CHECKING:
    from .latency import LatencyCurve
    from .measurements import Measurements
    from .quality_table import QualityTable

    Results: TypeAlias = "Comparison | LatencyCurve | QualityTable | Measurements"

SCHEMA = 1
KIND = "minfer benchmark"
PARTS = ("rows", "workload", "provenance", "notes")  # what the hash is of

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One engine's line in the ladder. Times in milliseconds, memory in bytes; None is "not known", never zero."""

    engine: str
    kind: str = "measured"  # or "reported": somebody else's figure, from their machine
    source: str = ""  # of a reported row: who says so, on which hardware and model
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_range: tuple[float, float] | None = None  # lowest and highest of the repeats
    ratio: float | None = None  # tokens/s over that of the first row
    floor_ms: float | None = None  # what a decode step takes if it only reads its bytes at the measured bandwidth
    share: float | None = None  # floor_ms / tpot_ms: 1 is as fast as the memory allows
    kv_reserved: int | None = None  # set aside for the cache
    kv_used: int | None = None  # of it filled with tokens, at the fullest moment
    peak_bytes: int | None = None
    base_bytes: int | None = None  # of the same process before a model was loaded (CPU only)
    tokens: str = ""  # how its tokens compare with the first row's
    warnings: tuple[str, ...] = ()
    metrics: RunMetrics | None = None  # the whole record that the figures above are taken from
    weights: str = ""  # what those of its model are kept in, as `machine.weights_name` says it; "" in older files
    kv_held: int | None = None  # of what is reserved that which requests owned at the fullest moment
    weight_bytes: int | None = None  # of its model, in memory

    @property
    def kv_waste(self) -> float | None:
        """Of the cache that requests owned at the fullest moment, the share that no token filled."""
        return 1 - self.kv_used / self.kv_held if self.kv_held and self.kv_used is not None else None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several engines on one workload in one run. Shown in a notebook it is a table; `plot()` draws its bars."""

    rows: list[Row]
    workload: dict[str, Any]  # name, description, prompt_lens, output_lens, fast
    provenance: dict[str, Any]  # machine, versions, commit, date, model, dtype, repeats, bandwidth
    notes: tuple[str, ...] = ()
    recorded: bool = field(default=False, compare=False)  # read from a file rather than measured here and now

    def row(self, engine: str) -> Row:
        """The row of an engine by its name; raises `InvalidParameter` for a name that is not there."""
        for row in self.rows:
            if row.engine == engine:
                return row
        raise InvalidParameter(f"There is no row {engine!r} here; there are {one_of([r.engine for r in self.rows])}.")

    def ratio(self, engine: str, baseline: str) -> float | None:
        """How many times the tokens/s of `baseline` an engine reached in this run; None where one is not known."""
        ours, theirs = self.row(engine).tokens_per_s, self.row(baseline).tokens_per_s
        return ours / theirs if ours and theirs else None

    @property
    def warnings(self) -> list[str]:
        """Everything that makes a row doubtful, each with the row's name in front."""
        return [f"{row.engine}: {warning}" for row in self.rows for warning in row.warnings]

    @property
    def title(self) -> str:
        """One line: model, weights, workload, machine, and whether it was recorded elsewhere."""
        return title_of(self.workload, self.provenance, self.recorded)

    def plot(self, save: str | os.PathLike[str] | None = None) -> Any:
        """Bars of throughput and of time per token, as a matplotlib figure; `save` writes it to an SVG or PNG file."""
        from .draw import figure  # drawing needs matplotlib, data does not

        return figure(self, save)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; the file appears whole or not at all. Returns the path."""
        return save(self, path)

    def __str__(self) -> str:
        from .draw import text_table

        return text_table(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .draw import html_table

        return html_table(self)


def title_of(workload: dict[str, Any], facts: dict[str, Any], recorded: bool) -> str:
    """The line above a result of either kind, from its workload and its provenance."""
    weights = facts.get("weights") or facts["dtype"]  # older files do not tell them apart
    line = f"{facts['model']} in {weights}: {workload['description']}; {machine_name(facts)}"
    return f"Recorded on {str(facts['date'])[:10]}. {line}" if recorded else line


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain JSON values, with schema version and hash."""
    body = {
        "rows": [dataclasses.asdict(row) for row in comparison.rows],
        "workload": comparison.workload,
        "provenance": comparison.provenance,
        "notes": list(comparison.notes),
    }
    return sealed(KIND, body)


def sealed(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Results as plain JSON values, with kind, schema version and hash in front."""
    body = json.loads(json.dumps(body))  # tuples become lists here, so that the hash is that of what will be read
    return {"kind": kind, "schema": SCHEMA, "sha256": digest(body, tuple(body)), **body}


def digest(body: dict[str, Any], parts: Sequence[str] = PARTS) -> str:
    """SHA-256 of the canonical JSON of these parts."""
    kept = {key: body[key] for key in parts}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def from_dict(data: Any, name: str = "these results") -> Comparison:
    """The reverse of `to_dict`, marked as recorded. Raises `InvalidParameter` for anything else or changed since."""
    return unsealed(
        data,
        KIND,
        PARTS,
        name,
        lambda: Comparison(
            rows=[_row(values) for values in data["rows"]],
            workload=data["workload"],
            provenance=data["provenance"],
            notes=tuple(data["notes"]),
            recorded=True,
        ),
    )


def unsealed(data: Any, kind: str, parts: Sequence[str], name: str, make: Callable[[], T]) -> T:
    """What `make` makes of data that `sealed` gave, once kind, schema version and hash were checked."""
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise InvalidParameter(f"{name}: benchmark results were expected, and this JSON is something else.")
    if data.get("schema") != SCHEMA:
        raise InvalidParameter(
            f"{name}: results of schema {data.get('schema')!r} cannot be read, only of schema {SCHEMA}. "
            "Record them again with this version of the package."
        )
    try:
        if data["sha256"] != digest(data, parts):
            raise InvalidParameter(
                f"{name}: the figures do not match the hash that was recorded with them, so they were changed since. "
                "Restore the file, or record the run again."
            )
        return make()
    except (KeyError, TypeError) as error:
        raise InvalidParameter(f"{name}: benchmark results were expected, but a part is missing ({error}).") from error


def _row(values: dict[str, Any]) -> Row:
    values = dict(values)
    metrics = values.pop("metrics")
    if metrics is not None:
        metrics = metrics_of(metrics)
    spread = values.pop("tokens_per_s_range")
    warnings = tuple(values.pop("warnings"))
    spread = None if spread is None else tuple(spread)
    return Row(**values, metrics=metrics, warnings=warnings, tokens_per_s_range=spread)


def metrics_of(values: dict[str, Any]) -> RunMetrics:
    """A record of one run out of JSON; what an older file does not have is not known."""
    return RunMetrics(**{**values, **{key: tuple(values[key]) for key in ("prompt_len", "output_len")}})


def save(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write results as JSON; the file appears whole or not at all. Returns the path."""
    data = to_dict(results) if isinstance(results, Comparison) else results.to_dict()
    return write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file through a temporary one beside it, so that no reader meets half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def load(path: str | os.PathLike[str]) -> Results:
    """Read results that `save` wrote. Raises `InvalidParameter` if there are none or they were changed by hand."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameter(
            f"Results were to be read from {path.name!r}, which is not there or is no JSON: {error}."
        ) from error
    from . import latency, measurements, quality_table

    for module in (latency, quality_table, measurements):
        if isinstance(data, dict) and data.get("kind") == module.KIND:
            return module.from_dict(data, path.name)
    return from_dict(data, path.name)


def load_recorded(name: str) -> Results:
    """A run that is kept with the project, by its name: `load_recorded("h200_ladder")` reads results/h200_ladder.json.

    Looked for beside the notebooks, wherever the caller stands: ./results, ./notebooks/results, and the same folder
    next to this package.
    """
    folders = [Path("results"), Path("notebooks", "results"), PACKAGE.parent / "notebooks" / "results"]
    for folder in folders:
        if (folder / f"{name}.json").is_file():
            return load(folder / f"{name}.json")
    known = sorted({file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.json")})
    possible = f"there are {one_of(known)}" if known else "there are none yet"
    raise InvalidParameter(f"The recorded run {name!r} was asked for; in notebooks/results {possible}.")
