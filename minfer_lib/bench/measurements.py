"""Measurements that are neither a comparison of engines nor a curve: small tables of numbers, with their provenance.

Invariant: as with every result, what is shown was measured, carries where and with what, and cannot be edited by hand
without being refused when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, one_of
from .draw import aligned, html_grid
from .latency import digits
from .machine import machine_name
from .results import save, sealed, unsealed

KIND = "minfer measurements"
PARTS = ("tables", "provenance", "notes")


@dataclass(frozen=True, repr=False)
class Table:
    """Named rows of numbers under named columns; None where nothing was measured.

    title: what the numbers are, with their unit. about: the line above, machine and date. notes: lines below.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    about: str = ""
    notes: tuple[str, ...] = ()

    def value(self, row: str, column: str) -> float | None:
        """One number; raises `InvalidParameter` for what is not there."""
        if row not in self.rows:
            raise InvalidParameter(f"There is no row {row!r} in {self.title!r}; there are {one_of(list(self.rows))}.")
        if column not in self.columns:
            raise InvalidParameter(
                f"There is no column {column!r} in {self.title!r}; there are {one_of(self.columns)}."
            )
        return self.rows[row][self.columns.index(column)]

    def ratio(self, row: str, other: str, column: str) -> float:
        """How many times the number of `other` that of `row` is."""
        return self.value(row, column) / self.value(other, column)

    def cells(self) -> list[list[str]]:
        """The headings, and then each row, as texts."""
        texts = {
            name: ["" if value is None else f"{value:,.{digits(value)}f}" for value in values]
            for name, values in self.rows.items()
        }
        return [[self.title, *self.columns], *([name, *values] for name, values in texts.items())]

    def __str__(self) -> str:
        return "\n".join([self.about, *aligned(self.cells()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_grid(self.about, self.cells(), self.notes)


@dataclass(frozen=True, repr=False)
class Measurements:
    """Tables that were measured together.

    tables: title -> {"columns": names, "rows": {name: numbers}, "notes": lines}. provenance: as `machine.provenance`
    gives it, with the model. notes: lines that hold for all tables.
    """

    tables: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any]
    notes: Sequence[str] = ()
    recorded: bool = field(default=False, compare=False)

    def table(self, title: str) -> Table:
        """One table; raises `InvalidParameter` with the titles there are."""
        if title not in self.tables:
            raise InvalidParameter(f"There is no table {title!r} here; there are {one_of(list(self.tables))}.")
        made, facts = self.tables[title], self.provenance
        about = f"{facts['model']}; {machine_name(dict(facts))}"
        if self.recorded:
            about = f"Recorded on {str(facts['date'])[:10]}. {about}"
        versions = ", ".join(f"{key} {facts[key]}" for key in ("torch", "transformers", "triton") if facts.get(key))
        return Table(
            title,
            tuple(made["columns"]),
            {name: tuple(values) for name, values in made["rows"].items()},
            about,
            (*made.get("notes", ()), *self.notes, f"{versions}, commit {facts.get('commit') or 'none'}"),
        )

    @property
    def title(self) -> str:
        """One line: the model and the machine."""
        return self.table(next(iter(self.tables))).about if self.tables else "nothing measured"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; the file appears whole or not at all. Returns the path."""
        return save(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with kind, schema version and hash."""
        tables = {title: {key: made[key] for key in made} for title, made in self.tables.items()}
        return sealed(KIND, {"tables": tables, "provenance": dict(self.provenance), "notes": list(self.notes)})

    def __str__(self) -> str:
        return "\n\n".join(str(self.table(title)) for title in self.tables)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(self.table(title)._repr_html_() for title in self.tables)


def from_dict(data: Any, name: str = "these results") -> Measurements:
    """The reverse of `Measurements.to_dict`, marked as recorded. Raises `InvalidParameter` as `results.load` does."""
    return unsealed(
        data, KIND, PARTS, name,
        lambda: Measurements(data["tables"], data["provenance"], tuple(data["notes"]), recorded=True),
    )  # fmt: skip
