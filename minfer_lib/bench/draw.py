"""A comparison as a table and as bars. Everything shown is read from a `Comparison`; nothing is typed here.

Invariant: a figure that is not known is left empty rather than zero, a column that nobody knows is left out, reported
figures stand apart from measured ones with their source, and fast mode, warnings and losses are shown wherever the
figures are. A terminal gets the same table as a notebook.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .settings import FAST_LABEL

if TYPE_CHECKING:
    from .results import Comparison, Row


@dataclass(frozen=True)
class Column:
    """A heading, how a row's cell is written (empty if not known), and what the heading means.

    told_once: the title says it already if it is the same for all rows that were measured.
    """

    heading: str
    cell: Callable[[Row], str]
    meaning: str = ""
    told_once: bool = False


def number(value: float | None, digits: int | None = None) -> str:
    """Three significant digits, or so many decimals; empty for None."""
    if value is None:
        return ""
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def bytes_text(count: float | None) -> str:
    """Bytes in powers of 1,024 with three significant digits: 45.0 KiB, 1.00 GiB; empty for None."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{number(count)} {unit}"
        count /= 1024
    raise AssertionError("unreachable: GiB returns")


def percent(share: float | None) -> str:
    """A share of 1 as per cent; empty for None."""
    return "" if share is None else f"{number(100 * share, 0 if share >= 0.1 else 1)} %"


def _peak(row: Row) -> str:
    if row.kind == "reported" and row.peak_bytes is not None:
        return f"{row.peak_bytes / 1e9:.2f} GB"  # as it was reported
    return bytes_text(row.peak_bytes)


COLUMNS = [
    Column("weights", lambda r: r.weights, told_once=True),
    Column("TTFT ms", lambda r: number(r.ttft_ms), "from arrival to the first token, median over the requests"),
    Column("TPOT ms", lambda r: number(r.tpot_ms), "mean time between later tokens, median over the requests"),
    Column("tokens/s", lambda r: number(r.tokens_per_s), "output tokens of all requests / wall time"),
    Column("ratio", lambda r: "" if r.ratio is None else f"{number(r.ratio)}x"),
    Column("floor ms", lambda r: number(r.floor_ms), "bytes a decode step must read / read bandwidth of this machine"),
    Column("share", lambda r: percent(r.share), "floor / TPOT"),
    Column("KV reserved", lambda r: bytes_text(r.kv_reserved)),
    Column("KV used", lambda r: bytes_text(r.kv_used), "at the fullest moment"),
    Column("peak memory", lambda r: _peak(r)),
    Column("tokens", lambda r: r.tokens, "against the first run of the first row"),
]


def table(comparison: Comparison) -> tuple[list[Column], list[tuple[Row, list[str]]]]:
    """The columns that somebody has a figure for and that tell something, and each row with its cells."""
    measured = [row for row in comparison.rows if row.kind == "measured"]
    columns = [
        column
        for column in COLUMNS
        if any(column.cell(row) for row in comparison.rows)
        and not (column.told_once and len({column.cell(row) for row in measured}) == 1)
    ]
    return columns, [(row, [column.cell(row) for column in columns]) for row in comparison.rows]


def caption(comparison: Comparison) -> str:
    """The title, which says of a model that is only a shape that its weights are random."""
    model = str(comparison.provenance["model"])
    if not model.startswith("shape:"):
        return comparison.title
    return comparison.title.replace(model, f"Shape of {model.removeprefix('shape:')}, random weights,", 1)


def footnotes(comparison: Comparison, columns: list[Column]) -> list[str]:
    """What stands below a table: the meaning of its headings, how it was measured, and what is doubtful about it."""
    facts = comparison.provenance
    lines = [
        "; ".join(
            column.meaning if column.meaning.startswith(column.heading) else f"{column.heading}: {column.meaning}"
            for column in columns if column.meaning
        )
    ]  # fmt: skip
    lines += list(comparison.notes)
    if any(row.floor_ms is not None for row in comparison.rows):
        lines.append(f"read bandwidth measured: {facts['bandwidth_gb_per_s']} GB/s")
    base = [row.base_bytes for row in comparison.rows if row.base_bytes]
    if base:
        lines.append(
            f"peak memory: resident memory of a fresh process while generating; {bytes_text(base[0])} of it was there "
            "after the imports, before the model"
        )
    elif any(row.peak_bytes for row in comparison.rows if row.kind == "measured"):
        lines.append("peak memory: torch's CUDA counter during the run, less caches and weights of other rows alone")
    versions = [f"{key} {facts[key]}" for key in ("python", "torch", "transformers") if facts.get(key)]
    commit = f"commit {facts['commit']}" if facts.get("commit") else "no commit"
    lines.append(", ".join([*versions, commit, facts["date"]]))
    return lines + [f"WARNING: {warning}" for warning in comparison.warnings]


def text_table(comparison: Comparison) -> str:
    """The table for a terminal, with its footnotes."""
    columns, rows = table(comparison)
    lines = [caption(comparison)]
    if comparison.workload["fast"] and FAST_LABEL not in comparison.notes:
        lines.append(FAST_LABEL)
    cells = [["engine", *(column.heading for column in columns)]]
    cells += [[text_label(row), *texts] for row, texts in rows]
    lines += [*aligned(cells), *sources(comparison)]
    return "\n".join([*lines, *footnotes(comparison, columns)])


def aligned(cells: list[list[str]]) -> list[str]:
    """Lines of a table, the first one its heading: the first column on the left, the others on the right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        others = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *others]).rstrip())
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def html_grid(title: str, cells: list[list[str]], notes: Sequence[str]) -> str:
    """The same table for a notebook, with a title above it and notes below; fast mode's label is in bold there."""

    def line(tag: str, texts: list[str]) -> str:
        first = f'<th style="text-align:left">{html.escape(texts[0])}</th>'
        others = (f'<{tag} style="text-align:right">{html.escape(text)}</{tag}>' for text in texts[1:])
        return f"<tr>{first}{''.join(others)}</tr>"

    heads, *rows = cells
    body = "".join(line("td", texts) for texts in rows)
    below = [f"<strong>{text}</strong>" if text == FAST_LABEL else html.escape(text) for text in notes]
    return (
        f"<p><strong>{html.escape(title)}</strong></p>"
        f"<table><thead>{line('th', heads)}</thead><tbody>{body}</tbody></table>"
        f"<p><small>{'<br>'.join(below)}</small></p>"
    )


def sources(comparison: Comparison) -> list[str]:
    """One line for each source of reported figures."""
    texts = dict.fromkeys(row.source for row in comparison.rows if row.kind == "reported")
    return [f"* reported, not measured here: {text}" for text in texts]


def text_label(row: Row) -> str:
    """A row's name, marked if its figures are somebody else's."""
    return f"{row.engine} *" if row.kind == "reported" else row.engine


def html_table(comparison: Comparison) -> str:
    """The table for a notebook. Reported rows are set in italics behind a line, with their source below."""
    columns, rows = table(comparison)
    escape = html.escape
    head = "".join(
        f'<th style="text-align:right" title="{escape(c.meaning)}">{escape(c.heading)}</th>' for c in columns
    )
    body, apart = "", False
    for row, texts in rows:
        style = ""
        if row.kind == "reported":
            style = ";font-style:italic" + ("" if apart else ";border-top:2px solid")
            apart = True
        cells = "".join(f'<td style="text-align:right{style}">{escape(text)}</td>' for text in texts)
        body += f'<tr><th style="text-align:left{style}">{escape(text_label(row))}</th>{cells}</tr>'
    fast = f"<br><strong>{escape(FAST_LABEL)}</strong>" if comparison.workload["fast"] else ""
    notes = [note for note in footnotes(comparison, columns) if note != FAST_LABEL]
    lines = [escape(note) for note in [*sources(comparison), *notes]]
    small = "<br>".join(f"<strong>{line}</strong>" if line.startswith("WARNING") else line for line in lines)
    return (
        f"<p><strong>{escape(caption(comparison))}</strong>{fast}</p>"
        f'<table><thead><tr><th style="text-align:left">engine</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"<p><small>{small}</small></p>"
    )


def figure(comparison: Comparison, save: str | os.PathLike[str] | None = None) -> Any:
    """Bars of tokens/s and of TPOT with its floor, one colour an engine; `save` writes an SVG or PNG file."""
    from ..learn.style import drawing

    picture = drawing(_bars)(comparison)
    if save is not None:
        keep(picture, save)
    return picture


def keep(picture: Any, path: str | os.PathLike[str]) -> None:
    """Writes a picture to an SVG, PNG or PDF file; the same figures give the same file."""
    import matplotlib as mpl

    from ..learn.style import STYLE

    with mpl.rc_context({**STYLE, "svg.hashsalt": "minfer", "svg.fonttype": "path"}):  # fixed ids, and no date
        picture.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _bars(comparison: Comparison) -> Any:
    from ..learn.style import INK, SOFT_INK, bar_style, canvas, quiet

    rows = [row for row in comparison.rows if row.kind == "measured"]
    picture, axes = canvas(8.0, 1.35 + 0.34 * len(rows), columns=2, sharey=True)
    panels = [
        (axes[0], "tokens/s (more is better)", [row.tokens_per_s for row in rows]),
        (axes[1], "TPOT, ms (less is better)", [row.tpot_ms for row in rows]),
    ]
    for ax, title, values in panels:
        longest = max([value for value in values if value] or [1])
        for at, (row, value) in enumerate(zip(rows, values, strict=True)):
            ax.barh(at, value or 0, height=0.62, **bar_style(row.engine))
            ax.text((value or 0) + 0.02 * longest, at, number(value) or "none", va="center", color=INK, fontsize=9)
        ax.set_xlim(0, 1.22 * longest)
        ax.set_title(title)
        quiet(ax, spines=("left",))
        ax.set_xticks([])
        ax.tick_params(axis="y", length=0)
    for at, row in enumerate(rows):
        if row.floor_ms is not None and row.tpot_ms:
            axes[1].plot([row.floor_ms] * 2, [at - 0.42, at + 0.42], color=SOFT_INK, lw=1.6, ls=(0, (2, 1)))
    axes[0].set_yticks(range(len(rows)), [row.engine for row in rows])
    axes[0].invert_yaxis()
    label = caption(comparison) + (f"\n{FAST_LABEL}" if comparison.workload["fast"] else "")
    picture.supxlabel(f"{label}\ndashed: what reading the step's bytes takes at least", fontsize=8, color=SOFT_INK)
    figures = ", ".join(f"{row.engine} {number(row.tokens_per_s)} tokens/s" for row in rows)
    picture.alt = f"Bars of throughput and time per token. {figures}."
    return picture


def show(comparison: Comparison) -> None:
    """In a notebook the table and the bars; elsewhere the table as text."""
    if in_notebook():
        from IPython.display import display

        display(comparison)
        display(figure(comparison))
    else:
        print(comparison)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code, so that there is somebody to display HTML for."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
