"""How much of a model's answers a cheaper version of it keeps: perplexity, KL divergence and top-1 agreement.

Invariant: every row of a table is about the same predictions, made by all of its models in one call; a table never
travels without the text, the counts and the machine that it was made with, nor without the label of fast mode.

Perplexity is exp of the mean negative log-likelihood of each next token. KL divergence is sum p ln(p / q) over the
vocabulary, p of the reference and q of the model, in nats, averaged over positions. Top-1 agreement is the share of
positions at which both would choose the same token greedily.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..errors import InvalidParameter
from ..models.load import LanguageModel
from ..models.memory import measured_weight_bytes
from .machine import dtype_name, provenance_of
from .quality_scores import perplexity_of, scores, windows_of
from .results import QualityRow, Result
from .settings import FAST_LABEL


def quality(
    reference: LanguageModel | tuple[str, LanguageModel],
    models: Mapping[str, LanguageModel],
    *,
    tokens: int | None = None,
    window: int = 512,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    progress: bool = True,
) -> Result:
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
    return Result(
        kind="quality",
        rows=rows,
        workload=workload,
        provenance=provenance_of(first),
        notes=(f"means over {count:,} predictions", *([FAST_LABEL] if workload["fast"] else [])),
    )
