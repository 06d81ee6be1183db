"""How much of a model's answers a cheaper version of it keeps: perplexity, KL divergence and top-1 agreement.

Invariant: every row of a table is about the same predictions, made by all of its models in one call; a table never
travels without the text, the counts and the machine that it was made with, nor without the label of fast mode.

Perplexity is exp of the mean negative log-likelihood of each next token. KL divergence is sum p ln(p / q) over the
vocabulary, p of the reference and q of the model, in nats, averaged over positions. Top-1 agreement is the share of
positions at which both would choose the same token greedily.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, one_of
from ..models.load import LanguageModel
from ..models.memory import measured_weight_bytes
from .draw import aligned, html_grid, keep
from .machine import dtype_name, provenance_of
from .quality_scores import perplexity_of, scores, windows_of
from .results import save, sealed, title_of, unsealed
from .settings import FAST_LABEL

KIND = "minfer quality"
PARTS = ("rows", "workload", "provenance", "notes")


@dataclass(frozen=True)
class QualityRow:
    """One model against the reference. Shares are 0..1; the reference itself has change 0, KL 0 and agreement 1."""

    name: str
    perplexity: float
    perplexity_change: float  # its perplexity / the reference's - 1
    kl: float  # KL(reference || model), nats per token
    top1: float
    top1_stderr: float  # of the share, as if positions were independent
    tokens: int  # predictions that the figures are means over
    bytes: int  # of all parameters and buffers, shared ones once
    dtype: str  # that it computes in


@dataclass(frozen=True, repr=False)
class QualityTable:
    """Rows of several models, the reference first. Shown in a notebook it is a table; `print` gives it as text."""

    rows: list[QualityRow]
    workload: dict[str, Any]  # description, tokens, window, predictions, fast
    provenance: dict[str, Any]  # machine, versions, commit, date; model and dtype are the reference's
    notes: tuple[str, ...] = ()
    recorded: bool = field(default=False, compare=False)  # read from a file rather than measured here and now

    def row(self, name: str) -> QualityRow:
        """The row of a model by its name; raises `InvalidParameter` for a name that is not there."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InvalidParameter(f"There is no row {name!r} here; there are {one_of([r.name for r in self.rows])}.")

    @property
    def title(self) -> str:
        """One line: model, dtype of the reference, text, machine, and whether it was recorded elsewhere."""
        return title_of(self.workload, self.provenance, self.recorded)

    def plot(self, *, save: str | os.PathLike[str] | None = None) -> Any:
        """Quality against size, a point for each row, as a figure; `save` writes it to a file."""
        from ..learn import plots  # drawing needs matplotlib, data does not

        picture = plots.quality_map(self.rows, base=self.rows[0].name)
        if save is not None:
            keep(picture, save)
        return picture

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; the file appears whole or not at all. Returns the path."""
        return save(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with kind, schema version and hash."""
        body = {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "workload": self.workload,
            "provenance": self.provenance,
            "notes": list(self.notes),
        }
        return sealed(KIND, body)

    def footnotes(self) -> list[str]:
        """What stands below the table: what the columns mean, how it was measured, with which versions."""
        facts = self.provenance
        meanings = "; ".join(f"{heading}: {meaning}" for heading, _, meaning in COLUMNS if meaning)
        versions = [f"{key} {facts[key]}" for key in ("python", "torch", "transformers") if facts.get(key)]
        return [meanings, *self.notes, ", ".join([*versions, f"commit {facts.get('commit') or 'none'}", facts["date"]])]

    def cells(self) -> list[list[str]]:
        """The headings, and then each row, as texts."""
        heads = ["model", *(heading for heading, _, _ in COLUMNS)]
        return [heads, *([row.name, *(cell(row) for _, cell, _ in COLUMNS)] for row in self.rows)]

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned(self.cells()), *self.footnotes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_grid(self.title, self.cells(), self.footnotes())


# heading, a row's cell, what the heading means
COLUMNS: list[tuple[str, Callable[[QualityRow], str], str]] = [
    ("dtype", lambda r: r.dtype, ""),
    ("weights MB", lambda r: f"{r.bytes / 1e6:,.{1 if r.bytes < 1e8 else 0}f}", ""),
    ("perplexity", lambda r: f"{r.perplexity:,.2f}", "exp of the mean negative log-likelihood of the next token"),
    ("change", lambda r: f"{100 * r.perplexity_change:+.2f} %", "of the perplexity against the first row"),
    ("KL nats", lambda r: f"{r.kl:.5f}", "KL(first row || this row), mean over predictions"),
    ("same top-1", lambda r: f"{100 * r.top1:.1f} % ± {100 * r.top1_stderr:.1f}",
     "positions with the same most likely token, and the standard error of that share"),
]  # fmt: skip


def from_dict(data: Any, name: str = "this table") -> QualityTable:
    """The reverse of `QualityTable.to_dict`, marked as recorded. Raises `InvalidParameter` as `results.load` does."""
    return unsealed(
        data,
        KIND,
        PARTS,
        name,
        lambda: QualityTable(
            rows=[QualityRow(**values) for values in data["rows"]],
            workload=data["workload"],
            provenance=data["provenance"],
            notes=tuple(data["notes"]),
            recorded=True,
        ),
    )


def quality(
    reference: LanguageModel | tuple[str, LanguageModel],
    models: Mapping[str, LanguageModel],
    *,
    tokens: int | None = None,
    window: int = 512,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    progress: bool = True,
) -> QualityTable:
    """Compares models with a reference on the same text, all of them at once, window by window.

    reference: a model, or (name, model); by itself it is named after its dtype. models: {name: model}; all stay loaded
      until the end. To compare a model with what it was before it was quantised in place, load it twice.
    tokens: how many of the text are read: 8,192 of the bundled text by default (from the fifth chapter of "Alice's
      Adventures in Wonderland" on), all of a text or ids of your own. MINFER_FAST cuts them to 512.
    window: tokens that a model sees at once. Windows follow each other without overlap, and each starts anew, so that
      the first token of a window is given and not predicted: ceil(tokens / window) predictions fewer than tokens. Where
      the tokenizer begins texts with a BOS, each window begins with one, within its length, and every token of the text
      is predicted.
    text, ids: another text, or token ids as they are (no BOS is added); ids are the way for models without a tokenizer.

    Raises `InvalidParameter` for wrong lengths, models with different vocabularies, or a reference that is among the
    models; `InvalidPrompt` where a text is to be read without a tokenizer, or ids are not in the vocabulary;
    `UnsupportedModel` if a model gives logits that are not finite.
    """
    label, first = reference if isinstance(reference, tuple) else (dtype_name(reference.dtype), reference)
    named = {label: first, **models}
    if not models or len(named) != len(models) + 1:
        raise InvalidParameter(
            f"quality compares the reference {label!r} with models of other names; got {list(models) or 'none'}."
        )
    for name, lm in models.items():
        if lm.model is first.model:
            raise InvalidParameter(
                f"{name!r} and the reference are one and the same model. Quantising changes a model in place; call "
                "load_model a second time for the reference."
            )
        if lm.vocab_size != first.vocab_size:
            raise InvalidParameter(
                f"{name!r} has a vocabulary of {lm.vocab_size} tokens, the reference one of {first.vocab_size}; their "
                "probabilities cannot be compared. Compare versions of one model."
            )
        if lm.tokenizer and first.tokenizer and lm.tokenizer.get_vocab() != first.tokenizer.get_vocab():
            raise InvalidParameter(
                f"{name!r} and the reference give their token ids to different texts, so that their probabilities "
                "cannot be compared. Compare versions of one model."
            )
    windows, workload = windows_of(list(named.values()), tokens, window, text, ids)
    sums = scores(list(named.values()), windows, progress)
    count = workload["predictions"]
    base = perplexity_of(sums[0].nll, count)
    rows = []
    for (name, lm), found in zip(named.items(), sums, strict=True):
        value, share = perplexity_of(found.nll, count), found.agreed / count
        rows.append(
            QualityRow(
                name, value, value / base - 1, found.kl / count, share, math.sqrt(share * (1 - share) / count), count,
                measured_weight_bytes(lm.model), dtype_name(lm.dtype),
            )
        )  # fmt: skip
    return QualityTable(
        rows=rows,
        workload=workload,
        provenance=provenance_of(first),
        notes=(f"means over {count:,} predictions", *([FAST_LABEL] if workload["fast"] else [])),
    )
