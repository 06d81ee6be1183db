"""How well models predict a text: its windows, the log-probabilities of each next token, and sums over them.

Invariant: all models read the same tokens in the same windows, in lockstep, so that their sums are about the same
predictions, and nothing is estimated from a part of the vocabulary. Logits are made for a few positions at a time,
turned into log-probabilities in float64, and dropped; those of a whole window stand in memory only if the model leaves
no other way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.support import batch_of, packed_layers
from ..cache.pool import KVPool
from ..engine.cache_size import in_int8
from ..engine.runner import ViewDecoder
from ..errors import InvalidParameter, InvalidPrompt, UnsupportedModel
from ..generation.prompts import prompt_token_ids
from ..models.load import LanguageModel
from .draw import progress_bar
from .machine import dtype_name
from .settings import fast_mode
from .workloads import english_text

TOKENS = 8192  # of the bundled text, if nothing else is asked for
FAST_TOKENS = 512
FIRST_CHAPTER = "CHAPTER V\n"  # where the text for quality begins; prompts of benchmarks come from before it
PIECE = 32  # positions whose logits are there at once: 32 x 49,152 of them are 12.6 MB in float64


def perplexity(
    lm: LanguageModel,
    *,
    tokens: int | None = None,
    window: int = 512,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    progress: bool = True,
) -> float:
    """Perplexity of one model, with the text, the windows and the errors of `quality`; MINFER_FAST shortens it too."""
    windows, workload = windows_of([lm], tokens, window, text, ids)
    return perplexity_of(scores([lm], windows, progress)[0].nll, workload["predictions"])


def kv_int8_perplexity(
    lm: LanguageModel,
    *,
    tokens: int | None = None,
    window: int = 512,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    progress: bool = True,
) -> tuple[float, float]:
    """Perplexity of one model with keys and values in its own dtype, and with keys and values in int8.

    Both times the model runs as in an engine: PIECE tokens at a time, which find those before them in a cache. Text,
    windows and errors are those of `perplexity`; `UnsupportedModel` too for a model that `LLMEngine` cannot run.
    """
    windows, workload = windows_of([lm], tokens, window, text, ids)
    sums = compared([CacheReader(lm), CacheReader(lm, int8=True)], windows, progress)
    full, quantized = (perplexity_of(found.nll, workload["predictions"]) for found in sums)
    return full, quantized


def perplexity_of(nll: float, count: int) -> float:
    """exp(nll / count); infinite where that is beyond any float, as a broken model's may be."""
    return math.exp(nll / count) if nll / count < 700 else math.inf


def windows_of(
    lms: Sequence[LanguageModel], tokens: int | None, window: int, text: str | None, ids: Sequence[int] | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """The windows of token ids that all `lms` read, and the record of what they are. Raises as `quality` does."""
    first, limit = lms[0], min(lm.max_model_len for lm in lms)
    if not is_count(window) or not 2 <= window <= limit:
        raise InvalidParameter(f"window={window!r} is not possible: it must be an integer from 2 to {limit}.")
    if text is not None and ids is not None:
        raise InvalidParameter("Both text and ids were given. Give one of them, or none for the bundled text.")
    bos: list[int] = []
    if ids is not None:
        all_ids, what = prompt_token_ids(first, ids, sys.maxsize), "the ids given"
    else:
        what = "the text given" if text is not None else "Alice's Adventures in Wonderland, from chapter V on"
        if first.tokenizer is None:
            raise InvalidPrompt(
                f"Quality was to be measured on a text, but {first.name} has no tokenizer. Pass token ids instead: ids="
                f"[...], integers from 0 to {first.vocab_size - 1}."
            )
        whole = english_text() if text is None else text
        all_ids = first.encode(whole[whole.index(FIRST_CHAPTER) :] if text is None else whole)
        if all_ids and all_ids[0] == first.tokenizer.bos_token_id:
            bos, all_ids = all_ids[:1], all_ids[1:]
    if tokens is None:
        tokens = len(all_ids) if text is not None or ids is not None else TOKENS
    if not is_count(tokens) or not 2 <= tokens <= len(all_ids):
        raise InvalidParameter(f"tokens={tokens!r} is not possible: {what} has {len(all_ids)}, and it takes 2 or more.")
    if fast_mode():
        tokens = min(tokens, FAST_TOKENS)
    step = window - len(bos)
    windows = [bos + all_ids[at : min(at + step, tokens)] for at in range(0, tokens, step)]
    windows = [each for each in windows if len(each) > 1]  # a last token by itself predicts nothing
    record = {
        "description": f"{tokens:,} tokens of {what}, in windows of {min(window, tokens)}",
        "tokens": tokens,
        "window": window,
        "predictions": sum(len(each) - 1 for each in windows),
        "fast": fast_mode(),
    }
    return windows, record


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class Sums:
    """What a model's figures are made of, summed over predictions."""

    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0


def scores(lms: Sequence[LanguageModel], windows: Sequence[list[int]], progress: bool) -> list[Sums]:
    """Sums of each model; KL and agreement are those with the first one."""
    return compared([Reader(lm, windows[0]) for lm in lms], windows, progress)


def compared(readers: Sequence[Reader | CacheReader], windows: Sequence[list[int]], progress: bool) -> list[Sums]:
    """The same of models that are read in one way or another."""
    lms = [reader.lm for reader in readers]
    for lm in lms:
        if lm.model.training:
            raise InvalidParameter(
                f"{lm.name} is in training mode, where dropout changes what it says. Call lm.model.eval() first."
            )
    sums = [Sums() for _ in lms]
    # float64, so that the KL of two nearly equal models is more than rounding; Apple's GPUs have none
    precise = torch.float32 if lms[0].device.type == "mps" else torch.float64
    total = sum(map(len, windows)) * len(lms)
    with progress_bar(total, "token", progress, "quality") as bar, torch.no_grad():
        for ids in windows:
            says = []
            for reader in readers:
                says.append(reader.read(ids))
                bar.update(len(ids))
            for begin in range(0, len(ids) - 1, PIECE):
                rows = slice(begin, min(begin + PIECE, len(ids) - 1))
                targets = torch.tensor(ids[rows.start + 1 : rows.stop + 1], device=lms[0].device)
                expected = best = None
                for lm, logits_of, found in zip(lms, says, sums, strict=True):
                    logits = logits_of(rows).to(lms[0].device)  # [rows, vocab]
                    if not torch.isfinite(logits).all():
                        raise UnsupportedModel(
                            f"{lm.name} in {dtype_name(lm.dtype)} gives logits that are not finite, so that it has no "
                            "probabilities to compare. Load it in another dtype, or quantise it in another way."
                        )
                    log_q = F.log_softmax(logits.to(precise), dim=-1)
                    top = logits.argmax(-1)  # [rows]
                    if expected is None:
                        expected, best = log_q, top
                    else:
                        found.kl += F.kl_div(log_q, expected, reduction="sum", log_target=True).item()
                    found.nll += F.nll_loss(log_q, targets, reduction="sum").item()
                    found.agreed += int((top == best).sum())
    return sums


class Reader:
    """Runs one model over windows, and gives the logits of some positions of a window when asked for them."""

    def __init__(self, lm: LanguageModel, sample: Sequence[int]) -> None:
        self.lm = lm
        self.body, self.head = lm.model.base_model, lm.model.get_output_embeddings()
        # Some models do more after the head (Gemma 2 squashes its logits): then only the whole model gives them.
        self.in_pieces = self._head_is_all(self._tensor(sample[:8]))

    def read(self, ids: Sequence[int]) -> Callable[[slice], torch.Tensor]:
        """Runs a window; the function returned gives logits [rows, vocab] of a slice of its positions."""
        if not self.in_pieces:
            logits = self.lm.model(input_ids=self._tensor(ids), use_cache=False).logits[0]  # [window, vocab]
            return lambda rows: logits[rows]
        hidden = self.body(input_ids=self._tensor(ids), use_cache=False).last_hidden_state[0]  # [window, hidden]
        return lambda rows: self.head(hidden[None, rows])[0]

    def _head_is_all(self, ids: torch.Tensor) -> bool:
        """Whether the output layer, given what comes before it, says exactly what the model says."""
        if self.head is None or self.body is self.lm.model:
            return False
        with torch.no_grad():
            hidden = getattr(self.body(input_ids=ids, use_cache=False), "last_hidden_state", None)
            whole = self.lm.model(input_ids=ids, use_cache=False).logits
            try:
                return hidden is not None and torch.equal(self.head(hidden), whole)
            except RuntimeError:  # the shapes do not fit: something stands between the two
                return False

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self.lm.device)


class CacheReader:
    """As `Reader`, but with keys and values in a cache; the slices asked for have to follow each other."""

    def __init__(self, lm: LanguageModel, int8: bool = False) -> None:
        self.lm, self.decoder = lm, ViewDecoder(lm)
        self.layers = in_int8(packed_layers(lm)) if int8 else packed_layers(lm)

    def read(self, ids: Sequence[int]) -> Callable[[slice], torch.Tensor]:
        device, size = self.lm.device, len(ids)
        pools = {index: KVPool.of(shape, size + 1, device) for index, shape in self.layers.items()}

        def logits_of(rows: slice) -> torch.Tensor:
            position = list(range(rows.start, rows.stop))
            batch = batch_of(pools, size, [[0]], [len(position)], [rows.stop], position, device)
            return self.decoder(torch.tensor(ids[rows], device=device), torch.tensor(position, device=device), batch)

        return logits_of
