"""From the logits of a step to one token per row, where every row may have its own parameters.

Invariant: a row's token is a function of that row's logits, its `SamplingParams`, its own tokens and (seed, position)
alone. Neither the other rows of the batch nor any generator's state takes part, so that a request gives the same
answer alone, in company, and when it is computed again.

The steps, in order: penalties, bias, the caller's own processors, min_tokens, temperature, top_k, top_p, min_p, draw.
Top-k: Fan et al. 2018; top-p (nucleus): Holtzman et al. 2020; min-p: Nguyen et al. 2024; repetition penalty: Keskar et
al. 2019 (CTRL). All arithmetic is in float32 or better, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .params import LogitsProcessor, SamplingParams

MIN_TEMPERATURE = 1e-6  # below it float32 cannot tell a row from a greedy one
MAX_TEMPERATURE = 1e30  # above it lies float32's infinity, which would make a banned token's -inf a NaN
TOP_P_SLACK = 1e-6  # float32 probabilities are right to about this; keeps .5 + .3 from missing a top_p of .8
SORT_FIRST = 1024  # candidates that are sorted before the whole vocabulary is


class Row(Protocol):
    """What the sampler reads of a request (see `request.Request`)."""

    params: SamplingParams
    prompt_token_ids: list[int]
    token_ids: list[int]  # generated so far; its length is the position that is drawn now
    seed: int


@dataclass
class Samples:
    """One step's result, all lists one entry a row; where `errors` has a row, its token means nothing."""

    token_ids: list[int]
    logprobs: list[dict[int, float] | None]
    errors: dict[int, Exception] = field(default_factory=dict)


class Sampler:
    """Draws one token for each row of a batch of logits.

    `eos_ids` are the ids that `min_tokens` holds back beside a row's own stop ids.
    """

    def __init__(self, eos_ids: Collection[int] = ()) -> None:
        self.eos_ids = frozenset(eos_ids)

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> Samples:
        """`logits` [rows, vocab], any float dtype, is left unchanged; returns one token id a row.

        A processor that raises, or logits that leave nothing to choose (all -inf, or NaN), are reported in `errors`
        for that row alone.
        """
        raw = logits.to(sampling_device(logits.device)).float()
        if all(plain_greedy(row.params) for row in rows):
            tokens, errors = raw.argmax(-1), {}
        else:
            edited, errors = adjusted_logits(raw, rows, self.eos_ids)
            tokens = draw(edited, rows)
            raw_max = edited.amax(-1)
            errors |= undefined_rows(raw_max, errors)
        errors |= undefined_rows(raw.amax(-1), errors)
        return Samples(tokens.tolist(), top_logprobs(raw, tokens, rows), errors)


def sampling_device(device: torch.device) -> torch.device:
    """Where rows are drawn: on their own device, but for Apple's GPUs, which lack the float64 that sums up a line."""
    return torch.device("cpu") if device.type == "mps" else device


def plain_greedy(params: SamplingParams) -> bool:
    """Whether nothing but the largest logit matters to this row."""
    return params.temperature == 0 and not params.edits_logits


def undefined_rows(largest: torch.Tensor, known: dict[int, Exception]) -> dict[int, Exception]:
    """Rows whose largest logit [rows] is not a number to choose by; NaN anywhere in a row makes its maximum NaN."""
    bad = (~torch.isfinite(largest)).nonzero().flatten().tolist()
    return {
        row: ValueError(
            f"the largest logit of this step is {largest[row].item()}: there is no token to choose. Either every token "
            "was banned (logit_bias, a logits processor, min_tokens), or the model overflowed: try float32 or bfloat16."
        )
        for row in bad
        if row not in known
    }


# -- steps on logits ------------------------------------------------------------------------------------------------


def adjusted_logits(
    logits: torch.Tensor, rows: Sequence[Row], eos_ids: Collection[int]
) -> tuple[torch.Tensor, dict[int, Exception]]:
    """Penalties, bias, processors and min_tokens: what changes logits one row at a time. [rows, vocab] in and out."""
    logits, errors = logits.clone(), {}
    for i, row in enumerate(rows):
        params = row.params
        if params.penalises:
            logits[i] = penalised(logits[i], row.prompt_token_ids, row.token_ids, params)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[i, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        for processor in params.logits_processors:
            try:
                logits[i] = processed(processor, row.token_ids, logits[i])
            except Exception as error:  # the caller's own code: whatever it raises ends this row, not the batch
                errors[i] = error
                break
        if len(row.token_ids) < params.min_tokens:
            held_back = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
            logits[i, [t for t in held_back if 0 <= t < logits.shape[-1]]] = -torch.inf
    return logits, errors


def processed(processor: LogitsProcessor, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """What the caller's own processor makes of one row of logits [vocab]; a wrong shape would broadcast silently."""
    result = processor(list(token_ids), logits.clone())
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
        returned = f"shape {list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
        raise ValueError(
            f"a logits processor must return the logits, a tensor of shape {list(logits.shape)}; it returned {returned}"
        )
    return result


def penalised(
    logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    """Logits [vocab] with the three penalties: repetition over prompt and output, the other two over the output."""
    output = torch.tensor(output_ids, dtype=torch.long, device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([*prompt_ids, *output_ids], dtype=torch.long, device=logits.device).unique()
        values = logits[seen]
        # dividing a negative logit would raise it: it is multiplied instead
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(output_ids) and (params.presence_penalty or params.frequency_penalty):
        ids, counts = output.unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def scaled_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - max) / temperature. [rows, vocab], [rows] -> [rows, vocab]; the largest becomes exactly 0.

    Subtracting the maximum first changes no probability and keeps a tiny temperature from overflowing.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted / temperature.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE)[:, None]


def keep_largest(logits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Keeps the `count` [rows] largest logits of each row, -inf for the rest; among equals the lowest ids stay."""
    most = int(count.max())
    ordered = logits.topk(most, dim=-1).values  # [rows, most], descending
    smallest_kept = ordered.gather(-1, count[:, None] - 1)  # [rows, 1]
    above, equal = logits > smallest_kept, logits == smallest_kept
    room = count[:, None] - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -torch.inf)


def filter_top_k(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keeps each row's k [rows] (long) most likely tokens; 0 keeps all."""
    vocab = logits.shape[-1]
    return keep_largest(logits, torch.where(k > 0, k, vocab).clamp(max=vocab))


def filter_top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest most likely tokens whose probabilities reach p [rows]; the token that crosses p stays in."""
    vocab = logits.shape[-1]
    total = logits.logsumexp(-1, keepdim=True)
    for width in (min(SORT_FIRST, vocab), vocab):  # a sort of the whole vocabulary is slow and rarely needed
        probs = (logits.topk(width, dim=-1).values - total).exp()  # [rows, width], descending
        mass_before = probs.double().cumsum(-1) - probs  # of all more likely tokens
        count = (mass_before < p[:, None] - TOP_P_SLACK).sum(-1).clamp_min(1)
        if width == vocab or (count < width).all():
            break
    return keep_largest(logits, torch.where(p < 1, count, vocab))


def filter_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keeps tokens at least min_p [rows] times as likely as the most likely one."""
    floor = logits.amax(-1, keepdim=True) + min_p.log()[:, None] - TOP_P_SLACK
    return logits.masked_fill(logits < floor, -torch.inf)


def filtered_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top_k, top_p and min_p over rows [rows, vocab] with one `SamplingParams` each (temperature > 0).

    `softmax(filtered_logits(...))` is the distribution that a token is drawn from.
    """

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=logits.device)

    logits = scaled_logits(logits.float(), column("temperature"))
    if any(p.top_k for p in params):
        k = [min(p.top_k, logits.shape[-1]) for p in params]  # what is asked for may be beyond 64 bits
        logits = filter_top_k(logits, torch.tensor(k, device=logits.device))
    if any(p.top_p < 1 for p in params):
        logits = filter_top_p(logits, column("top_p", torch.float64))
    if any(p.min_p for p in params):
        logits = filter_min_p(logits, column("min_p"))
    return logits


# -- the draw -------------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """One token id for each row [rows] of adjusted logits [rows, vocab]: the largest, or drawn by (seed, position)."""
    tokens = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        chosen = [rows[i] for i in random]
        probs = filtered_logits(logits[random], [row.params for row in chosen]).softmax(-1)
        u = uniform([row.seed for row in chosen], [len(row.token_ids) for row in chosen]).to(logits.device)
        tokens[random] = inverse_cdf(probs, u)
    return tokens


def inverse_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of probs [rows, vocab], in order of ids, passes u [rows] in [0, 1).

    In order of ids, not of probability: two nearly equal tokens may swap ranks when the company of a row changes the
    last bits of its logits, and that must not move every other token on the line.
    """
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1]
    # Rounding may put u * total on the very end of the line. A point before the end is always inside some token's part.
    point = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, point[:, None], right=True)[:, 0]
    return token.clamp(max=probs.shape[-1] - 1)  # a row of NaN; its error is reported elsewhere


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One number in [0, 1) for each (seed, position), float64 [rows]; any Python integers will do.

    A counter-based generator (Salmon et al. 2011) with the mixing function of SplitMix64 (Steele et al. 2014): there is
    no state to carry, so that the 7th token of a request draws the same number whenever it is computed.
    """
    mask = (1 << 64) - 1
    as_int64 = [((seed & mask) ^ (1 << 63)) - (1 << 63) for seed in seeds]  # two's complement
    x = _mix64(torch.tensor(as_int64, dtype=torch.int64)) + torch.tensor(list(positions), dtype=torch.int64)
    return (_mix64(x) >> 11 & ((1 << 53) - 1)).double() * 2.0**-53


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64 on int64 tensors: multiplication wraps; a right shift must be masked, since torch's keeps the sign."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    x = (x ^ (x >> 30 & ((1 << 34) - 1))) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ (x >> 31 & ((1 << 33) - 1))


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[Row]) -> list[dict[int, float] | None]:
    """For each row that asks: log-probabilities of its most likely tokens and of the chosen one, largest first.

    They are the model's own, from raw `logits` [rows, vocab]: before penalties, temperature and filters.
    """
    wanted = [row.params.logprobs for row in rows]
    result: list[dict[int, float] | None] = [None] * len(rows)
    for i in [i for i, k in enumerate(wanted) if k is not None]:
        logprobs = logits[i].log_softmax(-1)
        values, ids = logprobs.topk(min(wanted[i], logits.shape[-1]))
        entry = dict(zip(ids.tolist(), values.tolist(), strict=True))
        entry.setdefault(int(tokens[i]), float(logprobs[tokens[i]]))
        result[i] = entry
    return result
