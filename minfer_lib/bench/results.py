"""What was measured, as data: rows with where they come from, to JSON and back, to tables and to pictures.

Invariant: a figure never travels without where it comes from, and no run is dropped: a row keeps every run in the order
in which they were made, and its medians and spreads are computed from them when somebody asks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import InvalidParameter, one_of
from .machine import PACKAGE, machine_name
from .metrics import Run

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 2
RECORDED = Path(__file__).parent / "recorded"
STEADY = 0.10  # of the median, between the quartiles
LOSSES = ("failed", "preemptions", "kv_peak_tokens", "others_cpus", "throttled_s")  # of several runs the largest counts
FIGURES = {f.name for f in dataclasses.fields(Run)} | {n for n, v in vars(Run).items() if isinstance(v, property)}

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One engine's line: its runs, and what is the same in all of them. Memory in bytes; None is "not known".

    Every figure of a `Run` is an attribute of the row too (`row.ttft_ms`, for instance): the median over the runs,
    those left out that others disturbed, as long as there are better ones.
    """

    engine: str
    runs: tuple[Run, ...] = ()
    x: float | None = None  # in a sweep: the rate in requests/s, or how many requests at once
    floor_ms: float | None = None  # what a decode step takes if it only reads its bytes at the measured bandwidth
    kv_reserved: int | None = None  # set aside for the cache
    kv_held: int | None = None  # of it what requests owned at the fullest moment
    kv_used: int | None = None  # of it filled with tokens, at the fullest moment
    peak_bytes: int | None = None
    base_bytes: int | None = None  # of the same process before a model was loaded (CPU only)
    tokens: str = ""  # how its tokens compare with the first row's
    warnings: tuple[str, ...] = ()
    weights: str = ""  # what those of its model are kept in, as `machine.weights_name` says it
    weight_bytes: int | None = None  # of its model, in memory
    kind: str = "measured"  # or "reported": figures that were not measured in this run
    source: str = ""  # of a reported row: who says so, on which hardware and model
    told: Mapping[str, float] = field(default_factory=dict)  # the figures of a reported row, by the names of `Run`

    def __getattr__(self, name: str) -> Any:
        if name in FIGURES:
            return self.median(name)
        raise AttributeError(f"a Row has no attribute {name!r}")

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that medians are taken over: those that nothing disturbed, or all if there are none."""
        return tuple(run for run in self.runs if not run.disturbed) or self.runs

    def values(self, name: str) -> list[float]:
        """One figure of each counted run, in order; those that know it."""
        return [value for run in self.counted if (value := getattr(run, name)) is not None]

    def median(self, name: str) -> Any:
        """One figure of `Run`: the median over the runs, of losses the largest, of times of each request those of the
        first run; None where no run knows it."""
        values = self.values(name)
        if not values:
            return self.told.get(name)
        if name in LOSSES:
            return max(values)
        return values[0] if isinstance(values[0], tuple) else float(np.median(values))

    def spread(self, name: str = "tokens_per_s") -> tuple[float, float] | None:
        """The lowest and the highest of the runs; None where none knows it."""
        values = self.values(name)
        return (min(values), max(values)) if values else None

    @property
    def steady(self) -> bool:
        """Whether there are three runs or more whose tokens/s have their quartiles within 10 % of the median."""
        values = self.values("tokens_per_s")
        if len(values) < 3:
            return False
        low, middle, high = np.percentile(values, (25, 50, 75))
        return bool(high - low <= STEADY * middle)

    @property
    def share(self) -> float | None:
        """Of a decode step the part that reading its bytes takes at least: 1 is as fast as the memory allows."""
        return self.floor_ms / self.tpot_ms if self.floor_ms and self.tpot_ms else None

    @property
    def kv_waste(self) -> float | None:
        """Of the cache that requests owned at the fullest moment, the share that no token filled."""
        return 1 - self.kv_used / self.kv_held if self.kv_held and self.kv_used is not None else None


@dataclass(frozen=True)
class QualityRow:
    """One model against the reference. Shares are 0..1; the reference itself has change 0, KL 0 and agreement 1."""

    engine: str
    perplexity: float
    perplexity_change: float  # its perplexity / the reference's - 1
    kl: float  # KL(reference || model), nats per token
    top1: float
    top1_stderr: float  # of the share, as if positions were independent
    tokens: int  # predictions that the figures are means over
    bytes: int  # of all parameters and buffers, shared ones once
    dtype: str  # that it computes in

    @property
    def name(self) -> str:
        return self.engine


@dataclass(frozen=True)
class Cells:
    """One line of a table of other numbers: the table's title, the line's name, and its numbers by column."""

    table: str
    engine: str
    values: Mapping[str, float | None]


ROWS: dict[str, type] = {"ladder": Row, "latency": Row, "frontier": Row, "quality": QualityRow, "table": Cells}


@dataclass(frozen=True, repr=False)
class Result:
    """Rows that were measured together. In a notebook it is a table; `plot()` draws it, `to_frame()` gives the numbers.

    kind: "ladder" (engines on one workload), "latency" (over rates), "frontier" (over requests at once), "quality"
    (models against a reference), "table" (other numbers).
    """

    kind: str
    rows: list[Any]
    workload: dict[str, Any]  # name, description, prompt_lens, output_lens, fast
    provenance: dict[str, Any]  # machine, versions, commit, date, model, dtype, bandwidth
    notes: tuple[str, ...] = ()
    recorded: bool = field(default=False, compare=False)  # read from a file rather than measured here and now

    def row(self, engine: str, x: float | None = None) -> Any:
        """The row of an engine by its name, in a sweep at `x`; raises `InvalidParameter` for what is not there."""
        for row in self.series(engine):
            if x is None or row.x == x:
                return row
        raise InvalidParameter(
            f"{x!r} was not measured; there are {one_of([f'{r.x:g}' for r in self.series(engine)])}."
        )

    def series(self, engine: str) -> list[Any]:
        """All rows of one engine, in a sweep by their x. Raises `InvalidParameter` for a name that is not there."""
        rows = [row for row in self.rows if row.engine == engine]
        if not rows:
            raise InvalidParameter(f"There is no row {engine!r} here; there are {one_of(self.engines)}.")
        return sorted(rows, key=lambda row: getattr(row, "x", None) or 0)

    @property
    def engines(self) -> list[str]:
        """Names of the rows, each once, in their order."""
        return list(dict.fromkeys(row.engine for row in self.rows))

    @property
    def xs(self) -> list[float]:
        """Rates, or numbers of requests, that a sweep went over, from low to high."""
        return sorted({row.x for row in self.rows})

    def ratio(self, engine: str, baseline: str) -> float | None:
        """How many times the tokens/s of `baseline` an engine reached in this run; None where one is not known."""
        ours, theirs = self.row(engine).tokens_per_s, self.row(baseline).tokens_per_s
        return ours / theirs if ours and theirs else None

    def differs(self, engine: str, baseline: str, figure: str = "tokens_per_s") -> bool:
        """Whether the runs of two rows lie apart in a figure: the lowest of one is above the highest of the other."""
        ours, theirs = self.row(engine).spread(figure), self.row(baseline).spread(figure)
        return ours is not None and theirs is not None and (ours[0] > theirs[1] or theirs[0] > ours[1])

    def compared(self, engine: str, baseline: str) -> str:
        """The ratio of two rows in words: "1.24x", "no difference" where their runs overlap, "" if it is not known."""
        ratio = self.ratio(engine, baseline)
        if ratio is None:
            return ""
        return f"{ratio:.2f}x" if engine == baseline or self.differs(engine, baseline) else "no difference"

    @property
    def warnings(self) -> list[str]:
        """Everything that makes a row doubtful, each with the row's name in front."""
        texts = [f"{row.engine}: {text}" for row in self.rows for text in getattr(row, "warnings", ())]
        return list(dict.fromkeys(texts))

    @property
    def title(self) -> str:
        """One line: model, weights, workload, machine, and whether it was recorded elsewhere."""
        facts = self.provenance
        model, weights = str(facts["model"]), facts.get("weights") or facts.get("dtype")
        if model.startswith("shape:"):
            model = f"Shape of {model.removeprefix('shape:')}, random weights,"
        what = self.workload.get("description")
        line = f"{model} in {weights}" + (f": {what}" if what else "") + f"; {machine_name(facts)}"
        return f"Recorded on {str(facts['date'])[:10]}. {line}" if self.recorded else line

    def to_frame(self, all: bool = False) -> pd.DataFrame:
        """The numbers as a DataFrame, a line for each row; `all` has every column that is known, units in the names."""
        from .tables import frame

        return frame(self, all)

    def table(self, title: str | None = None) -> pd.DataFrame:
        """One table of a result of kind "table" by its title; None: the only one. Raises `InvalidParameter`."""
        from .tables import cells_frame

        return cells_frame(self, title)

    def plot(self, save: str | os.PathLike[str] | None = None) -> Any:
        """The picture of this kind of result as a matplotlib figure; `save` writes it to an SVG, PNG or PDF file.

        Raises `InvalidParameter` for kind "table", which has none.
        """
        from .draw import figure  # drawing needs matplotlib, data does not

        return figure(self, save)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; the file appears whole or not at all. `load` reads it. Returns the path."""
        body = {name: getattr(self, name) for name in ("kind", "workload", "provenance", "notes")}
        rows = [json.dumps(_plain(row), ensure_ascii=False) for row in self.rows]  # a line each, for whoever compares
        head = json.dumps({"minfer": SCHEMA, **body}, indent=1, ensure_ascii=False)
        return write_whole(path, head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n")

    def __str__(self) -> str:
        from .tables import text

        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .tables import html

        return html(self)


def _plain(row: Any) -> dict[str, Any]:
    """A row without what is at its default: files stay small, and new fields do not make old ones unreadable."""
    return {
        f.name: [_plain(run) for run in value] if f.name == "runs" else value
        for f in dataclasses.fields(row)
        if (value := getattr(row, f.name)) != f.default and value not in ({}, ())
    }


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """A row or a run from plain JSON values: lists are tuples there."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if "runs" in values:
        values["runs"] = tuple(_made(Run, run) for run in values["runs"])
    return kind(**values)


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


def load(path: str | os.PathLike[str]) -> Result:
    """Read a result that `save` wrote. Raises `InvalidParameter` for a file that is not there or is something else."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(
            f"Results were to be read from {path.name!r}, which is not there or is no JSON: {error}."
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or data["kind"] not in ROWS:
        raise InvalidParameter(f"{path.name}: benchmark results were expected, and this JSON is something else.")
    if data.get("minfer") != SCHEMA:
        raise InvalidParameter(
            f"{path.name}: results of schema {data.get('minfer')!r} cannot be read, only of schema {SCHEMA}. "
            "Record them again with this version of the package."
        )
    try:
        rows = [_made(ROWS[data["kind"]], row) for row in data["rows"]]
        found = Result(data["kind"], rows, data["workload"], data["provenance"], tuple(data["notes"]), recorded=True)
        if not isinstance(data["notes"], list) or not all(isinstance(note, str) for note in found.notes):
            raise TypeError("notes are texts in a list")
        str(found)  # what cannot be written out is bad in some other part
        return found
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{path.name}: benchmark results were expected, but a part is bad: {error}.") from error


def folders() -> Iterable[Path]:
    """Where recorded runs are looked for: your own in `results` beside the notebooks, then those of the package."""
    return (Path("results"), Path("notebooks", "results"), PACKAGE.parent / "notebooks" / "results", RECORDED)


def load_recorded(name: str) -> Result:
    """A run that is kept with the package, or with your notebooks, by its name: `load_recorded("cpu_course")`."""
    for folder in folders():
        if (folder / f"{name}.json").is_file():
            return load(folder / f"{name}.json")
    known = sorted({file.stem for folder in folders() if folder.is_dir() for file in folder.glob("*.json")})
    raise InvalidParameter(f"The recorded run {name!r} was asked for; there are {one_of(known)}.")
