"""Everything that is known of each engine, in one wide table: the speed with its tail, the memory, and the quality.

Invariant: it says nothing that the comparison (and the quality table, if one is given) does not hold; what is not known
stays empty, and the notes and warnings of the comparison stand below.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .draw import Column, aligned, caption, footnotes, number, percent, sources, text_label
from .settings import FAST_LABEL

if TYPE_CHECKING:
    from .quality_table import QualityRow
    from .results import Comparison, Row

MIB = 1024**2
PARTING = " until they part"


def _of_metrics(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.metrics is None else number(getattr(row.metrics, name))


def _mib(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = getattr(row, name)
        return "" if value is None else number(value / MIB)

    return cell


TTFT, TPOT, CACHE = "TTFT ms", "TPOT ms", "KV cache MiB"
COLUMNS: list[tuple[str, Column]] = [  # with the heading that several share
    ("", Column("tokens/s", lambda r: number(r.tokens_per_s), "output tokens of all requests / wall time")),
    ("", Column("ratio", lambda r: "" if r.ratio is None else f"{number(r.ratio)}x")),
    (TTFT, Column("p50", lambda r: number(r.ttft_ms), "p50, p95: median and 95th percentile over the requests")),
    (TTFT, Column("p95", _of_metrics("ttft_p95_ms"))),
    (TPOT, Column("p50", lambda r: number(r.tpot_ms))),
    (TPOT, Column("p95", _of_metrics("tpot_p95_ms"))),
    ("", Column("of floor", lambda r: percent(r.share), "bytes a decode step must read / read bandwidth / TPOT")),
    ("", Column("weights MiB", _mib("weight_bytes"))),
    (CACHE, Column("reserved", _mib("kv_reserved"), "set aside")),
    (CACHE, Column("held", _mib("kv_held"), "owned by requests at the fullest moment")),
    (CACHE, Column("used", _mib("kv_used"), "filled with their tokens then")),
    ("", Column("peak MiB", _mib("peak_bytes"))),
    ("", Column("tokens", lambda r: r.tokens.removesuffix(PARTING), "against the first row; in %: before they part")),
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Scoreboard:
    """The table of a comparison with all its columns; shown in a notebook, or printed.

    quality: for each row that runs other weights than the reference, its row of a quality table.
    """

    comparison: Comparison
    quality: Mapping[str, QualityRow] = field(default_factory=dict)

    @property
    def columns(self) -> list[tuple[str, Column]]:
        """Those that some row has a figure for."""
        rows = self.comparison.rows
        columns = [*COLUMNS, ("", Column("perplexity", self._perplexity, "its change by the weights"))]
        return [(group, column) for group, column in columns if any(column.cell(row) for row in rows)]

    def _perplexity(self, row: Row) -> str:
        found = self.quality.get(row.engine)
        return "" if found is None else f"{100 * found.perplexity_change:+.1f} %"

    def _notes(self) -> list[str]:
        return [*sources(self.comparison), *footnotes(self.comparison, [column for _, column in self.columns])]

    def __str__(self) -> str:
        columns = self.columns
        short = {TTFT: "TTFT", TPOT: "TPOT", CACHE: "KV", "": ""}
        cells = [["engine", *(f"{short[group]} {column.heading}".strip() for group, column in columns)]]
        cells += [
            [text_label(row), *(column.cell(row) for _, column in columns)] for row in self.comparison.rows
        ]  # fmt: skip
        fast = [FAST_LABEL] if self.comparison.workload["fast"] and FAST_LABEL not in self.comparison.notes else []
        return "\n".join([caption(self.comparison), *fast, *aligned(cells), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = self.columns
        above, below = '<th rowspan="2" style="text-align:left">engine</th>', ""
        for group, members in itertools.groupby(columns, key=lambda pair: pair[0]):
            headings = [html.escape(column.heading) for _, column in members]
            if not group:
                above += "".join(f'<th rowspan="2" style="text-align:right">{each}</th>' for each in headings)
                continue
            above += f'<th colspan="{len(headings)}" style="text-align:center">{html.escape(group)}</th>'
            below += "".join(f'<th style="text-align:right">{each}</th>' for each in headings)
        body = ""
        for row in self.comparison.rows:
            texts = (html.escape(column.cell(row)) for _, column in columns)
            cells = "".join(f'<td style="text-align:right">{text}</td>' for text in texts)
            body += f'<tr><th style="text-align:left">{html.escape(text_label(row))}</th>{cells}</tr>'
        fast = f"<br><strong>{html.escape(FAST_LABEL)}</strong>" if self.comparison.workload["fast"] else ""
        lines = [html.escape(note) for note in self._notes() if note != FAST_LABEL]
        small = "<br>".join(f"<strong>{line}</strong>" if line.startswith("WARNING") else line for line in lines)
        return (
            f"<p><strong>{html.escape(caption(self.comparison))}</strong>{fast}</p>"
            f"<table><thead><tr>{above}</tr><tr>{below}</tr></thead><tbody>{body}</tbody></table>"
            f"<p><small>{small}</small></p>"
        )


def scoreboard(comparison: Comparison, quality: Mapping[str, QualityRow] | None = None) -> Scoreboard:
    """All that a comparison knows, in one table; `quality` adds how far the perplexity of a row's weights moved.

    quality: {row of the comparison: row of `quality(...)`}. Raises `InvalidParameter` for a row that is not there.
    """
    for name in quality or {}:
        comparison.row(name)
    return Scoreboard(comparison, dict(quality or {}))
