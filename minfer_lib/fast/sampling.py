"""The token of each row, drawn on the device that has the logits, in torch; the definition is `generation.sampling`'s.

On a CUDA device `sample` is a pair of kernels (`kernels.triton.sampling`), of which this is the oracle.

Invariant: nothing here waits for the device, and a row's token depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..generation.params import SamplingParams
from ..generation.sampling import filtered_logits, inverse_cdf, rows_at_once

PLAIN = SamplingParams(temperature=1.0)


def sample(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """logits [R, vocab] in floats; temperature float32 [R], 0 for the largest logit, of equals the first; uniform
    float64 [R] in [0, 1). Writes to out int64 [R]: the token, or -1 for a row whose largest logit is NaN or infinite.
    """
    largest, tokens = logits.max(-1)
    if not logits.is_cuda and not temperature.any():  # on a GPU the question would wait for the device
        return out.copy_(torch.where(largest.isfinite(), tokens, -1))
    scaled = (logits.float() - largest.float()[:, None]) / temperature.clamp(min=1e-6)[:, None]
    drawn = inverse_cdf(scaled.softmax(-1), uniform)
    tokens = torch.where(temperature > 0, drawn, tokens)
    return out.copy_(torch.where(largest.isfinite(), tokens, -1))


def sample_filtered(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """As `sample`, with top_k, top_p and min_p: params has the parameters of each row, whose numbers the host knows."""
    step = rows_at_once(logits.shape[-1])
    for begin in range(0, len(params), step):
        rows = slice(begin, begin + step)
        largest, tokens = logits[rows].max(-1)
        random = [p if p.temperature > 0 else PLAIN for p in params[rows]]
        drawn = inverse_cdf(filtered_logits(logits[rows], random).softmax(-1), uniform[rows])
        greedy = [i for i, p in enumerate(params[rows]) if not p.temperature > 0]
        if greedy:
            where = torch.tensor(greedy).to(logits.device, non_blocking=True)
            drawn = drawn.index_copy(0, where, tokens.index_select(0, where))
        out[rows] = torch.where(largest.isfinite(), drawn, -1)
    return out
