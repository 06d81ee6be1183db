"""Figures that were not measured in this run, to stand beside ours in a table: never mixed with them.

They are recorded as tables: `articles`, what others published, and `peers_h200` and `peers_cpu`, other systems that we
ran at some other time with the scripts in `peers`. A table's name stands before its source in the notes of its file.

Invariant: a reported row says where it comes from and on which hardware, and has no ratio, no floor and no share,
since those would compare two machines.
"""

from __future__ import annotations

from ..errors import InvalidParameter, one_of
from .results import RECORDED, Row, load

FILES = ("articles", "peers_h200", "peers_cpu")


def reported(engine: str, source: str, **figures: float) -> Row:
    """A row of figures from elsewhere, for `compare(reported=...)`.

    source: who measured it, on which hardware, which model. figures: by their names in `Run`, such as ttft_ms, tpot_ms
    and tokens_per_s, and peak_gb, in units of 10**9 bytes.
    """
    if not source.strip():
        raise InvalidParameter(f"Reported figures of {engine!r} need a source: who measured them, on which hardware.")
    peak = figures.pop("peak_gb", None)
    bytes_at_peak = None if peak is None else round(peak * 1e9)
    return Row(engine, kind="reported", source=source, told=figures, peak_bytes=bytes_at_peak)


def reported_rows(name: str) -> list[Row]:
    """Rows by the name of the table they come from, for instance "mini-infer, batch 1" (or 4, 8), "series, kv cache",
    "nano-vllm, README", "nano-vllm, H200" or "qwen2.5-7b, H200, batch 8". Raises `InvalidParameter` with all names."""
    known = []
    for found in (load(RECORDED / f"{file}.json") for file in FILES):
        names = list(dict.fromkeys(row.table for row in found.rows))
        if name in names:
            source = next(note for note in found.notes if note.startswith(f"{name}: ")).removeprefix(f"{name}: ")
            return [reported(row.engine, source, **row.values) for row in found.rows if row.table == name]
        known += names
    raise InvalidParameter(f"No reported figures are kept under {name!r}; there are {one_of(known)}.")
