"""Results as tables: numbers for pandas, and the same as text for a terminal and as HTML for a notebook.

Invariant: everything shown is read from a `Result`; a figure that is not known is left empty rather than zero, a column
that nobody knows is left out, the spread of the runs stands beside the figure, reported figures are marked and have
their source below, and fast mode, warnings and losses are shown wherever the figures are.
"""

from __future__ import annotations

import dataclasses
import functools
import html as escaping
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..errors import InvalidParameter, one_of
from .settings import FAST_LABEL

if TYPE_CHECKING:
    from .results import Result

MIB = 1024**2


@dataclass(frozen=True)
class Column:
    """A heading with its unit, the value of a row, how it is written, what it means, and whether only `all` has it."""

    heading: str
    value: Callable[[Any], Any]
    write: Callable[[Any], str]
    meaning: str = ""
    wide: bool = False


UNSTEADY = 1.2  # times that one measurement of the read bandwidth may be another


def number(value: float | None, digits: int | None = None) -> str:
    """Three significant digits, or so many decimals; empty for None."""
    if value is None or pd.isna(value):
        return ""
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share of 1 as per cent; empty for None."""
    return "" if share is None else f"{number(100 * share, 0 if share >= 0.1 else 1)} %"


def low_to_high(values: tuple[float, float] | None) -> str:
    """The spread of the runs; empty where there is none."""
    return "" if values is None else f"{number(values[0])} to {number(values[1])}"


def _figure(name: str) -> Callable[[Any], Any]:
    return lambda row: getattr(row, name)


def _spread(name: str) -> Callable[[Any], Any]:
    return lambda row: row.spread(name) if len(row.counted) > 1 else None


def _mib(name: str) -> Callable[[Any], Any]:
    return lambda row: None if getattr(row, name) is None else getattr(row, name) / MIB


TEXT = str
LADDER = [
    Column("weights", _figure("weights"), TEXT),
    Column("tokens/s", _figure("tokens_per_s"), number, "output tokens of all requests / wall time, median"),
    Column("low to high", _spread("tokens_per_s"), low_to_high, "the slowest and the fastest run"),
    Column("runs", lambda row: len(row.counted) or None, lambda runs: number(runs, 0), wide=True),
    Column("ratio", lambda row: None, TEXT, "tokens/s over those of the first row"),
    Column("steps", _figure("steps"), lambda v: number(v, 0), "calls of the model"),
    Column("tokens a step", _figure("tokens_per_step"), number, "output tokens / steps"),
    Column("padding", _figure("padding_share"), percent, "of the token rows computed, those that no request needed"),
    Column("TTFT ms", _figure("ttft_ms"), number, "from arrival to the first token, median over the requests"),
    Column("TTFT p95", _figure("ttft_p95_ms"), number, "95th percentile over the requests, from 20 on", wide=True),
    Column("TPOT ms", _figure("tpot_ms"), number, "mean time between later tokens, median over the requests"),
    Column("TPOT low to high", _spread("tpot_ms"), low_to_high, wide=True),
    Column("TPOT p95", _figure("tpot_p95_ms"), number, wide=True),
    Column("of floor", _figure("share"), percent, "reading a step's bytes at the bandwidth measured / TPOT"),
    Column("weights MiB", _mib("weight_bytes"), number, wide=True),
    Column("KV reserved MiB", _mib("kv_reserved"), number, "set aside for keys and values"),
    Column("KV held MiB", _mib("kv_held"), number, "owned by requests at the fullest moment", wide=True),
    Column("KV used MiB", _mib("kv_used"), number, "filled with their tokens then"),
    Column("peak MiB", _mib("peak_bytes"), number, "memory at its highest, weights included"),
    Column("tokens", _figure("tokens"), TEXT, "against the first run of the first row"),
]
SWEEP = [
    Column("requests/s", _figure("requests_per_s"), number, "answered"),
    Column("tokens/s", _figure("tokens_per_s"), number, "output tokens of all requests / wall time"),
    Column("low to high", _spread("tokens_per_s"), low_to_high, "the slowest and the fastest run"),
    Column("queue ms", _figure("queue_ms"), number, wide=True),
    Column("TTFT ms", _figure("ttft_ms"), number, "from arrival to the first token, queue included, median"),
    Column("TTFT low to high", _spread("ttft_ms"), low_to_high),
    Column("TTFT p95", _figure("ttft_p95_ms"), number, "95th percentile over the requests, from 20 on"),
    Column("TPOT ms", _figure("tpot_ms"), number, "mean time between later tokens, median over the requests"),
    Column("end to end ms", _figure("e2e_ms"), number),
    Column("end to end p95", _figure("e2e_p95_ms"), number, wide=True),
]
QUALITY = [
    Column("dtype", _figure("dtype"), TEXT),
    Column("weights MB", lambda row: row.bytes / 1e6, number),
    Column("perplexity", _figure("perplexity"), lambda v: f"{v:,.2f}", "exp of the mean negative log-likelihood"),
    Column("change %", lambda row: 100 * row.perplexity_change, lambda v: f"{v:+.2f}", "against the first row"),
    Column("KL nats", _figure("kl"), lambda v: f"{v:.5f}", "KL(first row || this row), mean over predictions"),
    Column("same top-1 %", lambda row: 100 * row.top1, lambda v: f"{v:.1f}", "positions with the same likeliest token"),
    Column("± %", lambda row: 100 * row.top1_stderr, lambda v: f"{v:.1f}", "standard error of that share"),
]
COLUMNS = {"ladder": LADDER, "latency": SWEEP, "frontier": SWEEP, "quality": QUALITY}
X = {"latency": "rate/s", "frontier": "at once"}


def columns(result: Result, all: bool) -> list[Column]:
    """Those of this kind that some row has a figure for, and that do not just repeat what the title says."""
    rows = result.rows
    known = []
    for column in COLUMNS[result.kind]:
        if column.heading == "ratio":
            column = dataclasses.replace(column, value=functools.partial(_ratio, result))
        values = [column.value(row) for row in rows]
        if (column.wide and not all) or not any(value not in (None, "") for value in values):
            continue
        if column.heading == "weights" and len(set(filter(None, values))) == 1:
            continue
        known.append(column)
    return known


def _ratio(result: Result, row: Any) -> str:
    return result.compared(row.engine, result.rows[0].engine) if row.kind == "measured" else ""


def _index(result: Result) -> pd.Index | pd.MultiIndex:
    names = [label(row) for row in result.rows]
    if result.kind not in X:
        return pd.Index(names, name="model" if result.kind == "quality" else "engine")
    return pd.MultiIndex.from_tuples(
        [(name, row.x) for name, row in zip(names, result.rows, strict=True)], names=["engine", X[result.kind]]
    )


def label(row: Any) -> str:
    """A row's name, marked if its figures were not measured in this run."""
    return f"{row.engine} *" if getattr(row, "kind", "measured") == "reported" else row.engine


def frame(result: Result, all: bool = False) -> pd.DataFrame:
    """The numbers of a result, a line for each row."""
    if result.kind == "table":
        return pd.concat({title: cells_frame(result, title) for title in titles(result)})
    data = {
        column.heading: [column.value(row) for row in result.rows]
        for column in columns(result, all)
        if column.write is not low_to_high
    }
    spreads = {c.heading: [c.value(row) for row in result.rows] for c in columns(result, all) if c.write is low_to_high}
    for heading, pairs in spreads.items():
        kind = heading.removesuffix("low to high") or "tokens/s "
        data |= {f"{kind}{end}": [pair and pair[i] for pair in pairs] for i, end in enumerate(("low", "high"))}
    return pd.DataFrame(data, index=_index(result))


def titles(result: Result) -> list[str]:
    """Titles of the tables of a result of kind "table"."""
    return list(dict.fromkeys(row.table for row in result.rows))


def cells_frame(result: Result, title: str | None = None) -> pd.DataFrame:
    """One table of a result of kind "table"."""
    known = titles(result) if result.kind == "table" else []
    if title is None and len(known) == 1:
        title = known[0]
    if title not in known:
        raise InvalidParameter(f"The table {title!r} was asked for; there are {one_of(known) if known else 'none'}.")
    rows = {row.engine: dict(row.values) for row in result.rows if row.table == title}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(title)


def written(result: Result, all: bool = False) -> list[pd.DataFrame]:
    """The tables of a result with every cell as text."""
    if result.kind == "table":
        return [_headed(cells_frame(result, title).map(number)) for title in titles(result)]
    data = {
        column.heading: ["" if (v := column.value(row)) is None or v == "" else column.write(v) for row in result.rows]
        for column in columns(result, all)
    }
    table = pd.DataFrame(data, index=_index(result))
    if result.kind in X:
        names, xs = table.index.get_level_values(0), table.index.get_level_values(1)
        table.index = pd.MultiIndex.from_tuples(
            [(n, f"{x:g}") for n, x in zip(names, xs, strict=True)], names=table.index.names
        )
        return [table]
    return [_headed(table)]


def _headed(table: pd.DataFrame) -> pd.DataFrame:
    """The name of the index beside the headings rather than in a line of its own."""
    return table.rename_axis(index=None, columns=table.index.name)


def footnotes(result: Result) -> list[str]:
    """What stands below a table: sources, how it was measured, on what, and what is doubtful about it."""
    facts = result.provenance
    sources = dict.fromkeys(row.source for row in result.rows if getattr(row, "kind", "") == "reported")
    lines = [f"* not measured in this run: {source}" for source in sources]
    lines += [note for note in result.notes if note != FAST_LABEL]
    if any(getattr(row, "floor_ms", None) for row in result.rows) and facts.get("bandwidth_gb_per_s"):
        found = facts["bandwidth_gb_per_s"]
        both = found if isinstance(found, list | tuple) else [found]
        told = " before and after the runs" if len(both) > 1 else ""
        doubt = ", so far apart that shares of the floor are rough" if max(both) > UNSTEADY * min(both) else ""
        lines.append(f"read bandwidth{told}: {' and '.join(f'{value:g}' for value in both)} GB/s{doubt}")
    versions = [f"{key} {facts[key]}" for key in ("python", "torch", "transformers", "triton") if facts.get(key)]
    commit = f"commit {facts['commit']}" if facts.get("commit") else "no commit"
    return [*lines, ", ".join([*versions, commit, str(facts["date"])])]


def text(result: Result, all: bool = False) -> str:
    """The table for a terminal, with its footnotes."""
    fast = [FAST_LABEL] if result.workload.get("fast") else []
    tables = [table.to_string() for table in written(result, all)]
    warnings = [f"WARNING: {warning}" for warning in result.warnings]
    return "\n".join([result.title, *fast, *tables, *footnotes(result), *warnings])


def html(result: Result, all: bool = False) -> str:
    """The table for a notebook: what the columns mean can be unfolded below it."""
    escape = escaping.escape
    fast = f"<br><strong>{escape(FAST_LABEL)}</strong>" if result.workload.get("fast") else ""
    tables = "".join(table.to_html(border=0) for table in written(result, all))
    meanings = [] if result.kind == "table" else [c for c in columns(result, all) if c.meaning]
    told = "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.meaning)}</dd>" for c in meanings)
    folded = f"<details><summary>What the columns mean</summary><dl>{told}</dl></details>" if told else ""
    lines = [escape(line) for line in footnotes(result)]
    lines += [f"<strong>WARNING: {escape(warning)}</strong>" for warning in result.warnings]
    below = f"<p><small>{'<br>'.join(lines)}</small></p>"
    return f"<p><strong>{escape(result.title)}</strong>{fast}</p>{tables}{folded}{below}"
