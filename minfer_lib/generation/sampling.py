"""From the logits of a step to one token per row, where every row may have its own parameters.

Invariant: a row's token is a function of that row's logits, its `SamplingParams`, its own tokens and (seed, index,
position) alone. Neither the other rows of the batch nor any generator's state takes part, so that a request gives the
same answer alone, in company, and when it is computed again.

The steps, in order: penalties, bias, the caller's own processors, min_tokens, temperature, top_k, top_p, min_p, draw.
Top-k: Fan et al. 2018; top-p (nucleus): Holtzman et al. 2020; min-p: Nguyen et al. 2024; repetition penalty: Keskar et
al. 2019 (CTRL). All arithmetic is in float32 or better, whatever the model computes in.

Nothing here waits for the device but `PendingSamples.result`: numbers go there through `upload`, whatever decides which
operations run is known on the host, and one small table comes back. Rows that ask for logprobs add a second one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..errors import shown
from .params import LogitsProcessor, SamplingParams

MIN_TEMPERATURE = 1e-6  # below it float32 cannot tell a row from a greedy one
TOP_P_SLACK = 1e-6  # float32 probabilities are right to about this; keeps .5 + .3 from missing a top_p of .8
SORT_FIRST = 1024  # candidates that a CPU sorts before the whole vocabulary
SLICE_VALUES = 2**22  # logits that are filtered and drawn from at once, which bounds the sampler's memory
SLICE_BYTES = 72  # most bytes alive for each of them, sorting included
MOST_LOGPROBS = 1024  # entries a row that `Sampler.peak_bytes` makes room for


class Row(Protocol):
    """What the sampler reads of a request (see `request.Request`)."""

    params: SamplingParams
    prompt_token_ids: list[int]
    token_ids: list[int]  # generated so far; its length is the position that is drawn now
    seed: int
    index: int


@dataclass
class Samples:
    """One step's result, all lists one entry a row; where `errors` has a row, its token means nothing."""

    token_ids: list[int]
    logprobs: list[dict[int, float] | None]
    errors: dict[int, Exception] = field(default_factory=dict)

    def of_rows(self, rows: Sequence[int]) -> Samples:
        """Those of some rows, in this order."""
        errors = {new: self.errors[row] for new, row in enumerate(rows) if row in self.errors}
        return Samples([self.token_ids[row] for row in rows], [self.logprobs[row] for row in rows], errors)


class Sampler:
    """Draws one token for each row of a batch of logits.

    `eos_ids` are the ids that `min_tokens` holds back beside a row's own stop ids.
    """

    def __init__(self, eos_ids: Collection[int] = ()) -> None:
        self.eos_ids = frozenset(eos_ids)
        self._counts: dict[Row, TokenCounts] = {}  # of the rows of the last step that have penalties

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> Samples:
        """One token for each row of `logits` [rows, vocab]; see `launch`."""
        return self.launch(logits, rows).result()

    @torch.no_grad()
    def launch(self, logits: torch.Tensor, rows: Sequence[Row]) -> PendingSamples:
        """Starts to draw one token for each row of `logits` [rows, vocab], at least one row, and does not wait for it.

        `logits` may have any float dtype and are left unchanged. A processor that raises, or logits that leave nothing
        to choose (all -inf, or NaN), are reported in `errors` for that row alone.
        """
        logits = logits.to(sampling_device(logits.device))
        tables, errors = [], {}
        step = rows_at_once(logits.shape[-1])
        for begin in range(0, len(rows), step):
            tables.append(self._table(logits[begin : begin + step], rows[begin : begin + step], begin, errors))
        if self._counts:
            self._counts = {row: self._counts[row] for row in rows if row in self._counts}
        table = torch.cat(tables)
        logprobs = {
            i: top_logprobs(logits[i], table[i : i + 1, 0].long(), row.params.logprobs)
            for i, row in enumerate(rows)
            if row.params.logprobs is not None
        }
        return PendingSamples(table, logprobs, errors)

    def _table(
        self, logits: torch.Tensor, rows: Sequence[Row], first: int, errors: dict[int, Exception]
    ) -> torch.Tensor:
        """[rows, 3] in float64, which holds all of them exactly: the token, the model's largest logit, and the largest
        one after everything that edits logits. An error of row i is entered as that of row first + i."""
        largest, tokens = logits.max(-1)  # of equals the first
        usable = largest
        if edited := [i for i, row in enumerate(rows) if edits(row)]:
            logits = logits.to(torch.float32, copy=True)
            for i in edited:
                try:
                    logits[i] = self.edited(logits[i], rows[i])
                except Exception as error:  # the caller's own code: whatever it raises ends this row, not the batch
                    errors[first + i] = error
            usable, tokens = logits.max(-1)
        tokens = draw(logits, tokens, rows)
        return torch.stack([tokens.double(), largest.double(), usable.double()], 1)

    def edited(self, logits: torch.Tensor, row: Row) -> torch.Tensor:
        """Logits [vocab] (float32) of one row after penalties, bias, processors and min_tokens."""
        params, device = row.params, logits.device
        if params.penalises:
            counts = self._counts.get(row) or TokenCounts.of_prompt(row.prompt_token_ids, logits)
            # only what is new is counted, and kept in one assignment, so that an interrupt counts nothing twice
            self._counts[row] = counts = counts.after(row.token_ids)
            logits = penalised(logits, counts, params)
        if params.logit_bias:
            ids = upload(list(params.logit_bias), torch.long, device)
            logits = logits.index_add(0, ids, upload(list(params.logit_bias.values()), torch.float32, device))
        for processor in params.logits_processors:
            logits = processed(processor, row.token_ids, logits)
        if len(row.token_ids) < params.min_tokens:
            held_back = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_ids)
            ids = [t for t in held_back if 0 <= t < len(logits)]  # some configs write -1 for "no EOS"
            logits = logits.index_fill(0, upload(ids, torch.long, device), -torch.inf)
        return logits

    @staticmethod
    def peak_bytes(rows: int, vocab: int) -> int:
        """Upper bound of the bytes that a step of so many rows needs beside its logits, with the dearest parameters (up
        to 1,024 logprobs a row), and of what penalties keep from step to step."""
        kept = 5 * rows * vocab  # `TokenCounts`
        slice_of_rows = min(rows, rows_at_once(vocab)) * vocab * SLICE_BYTES
        one_row = 40 * vocab  # in `edited` and `top_logprobs`
        return kept + slice_of_rows + one_row + rows * (MOST_LOGPROBS * 48 + 4096)


class PendingSamples:
    """Samples that the device may still be computing."""

    def __init__(self, table: torch.Tensor, logprobs: dict[int, torch.Tensor], errors: dict[int, Exception]) -> None:
        """table: [rows, 3] of `Sampler`. logprobs: [2, entries] of `top_logprobs` for the rows that ask."""
        self._table = Download(table)
        self._entries = {row: entries.shape[1] for row, entries in logprobs.items()}
        self._logprobs = Download(torch.cat(list(logprobs.values()), 1)) if logprobs else None
        self._errors = errors

    def result(self) -> Samples:
        """Waits for the device."""
        table = self._table.wait()
        samples = Samples(table[:, 0].long().tolist(), [None] * len(table), dict(self._errors))
        for row in (~table[:, 1:].isfinite().all(1)).nonzero().flatten().tolist():
            samples.errors.setdefault(row, undefined(*table[row, 1:].tolist()))
        if self._logprobs is not None:
            sizes = list(self._entries.values())
            ids, values = (half.split(sizes) for half in self._logprobs.wait())
            for row, row_ids, row_values in zip(self._entries, ids, values, strict=True):
                # a chosen token among the most likely ones stands there twice, with the same value
                samples.logprobs[row] = dict(zip(row_ids.long().tolist(), row_values.tolist(), strict=True))
        return samples


def undefined(largest: float | str, usable: float = 0.0) -> ValueError:
    """The error of a row whose largest logit is not a number to choose by: NaN (one is enough) or infinite."""
    if isinstance(largest, str) or not abs(largest) < torch.inf:
        return ValueError(
            f"the model's largest logit of this step is {largest}, so there is no token to choose: the model "
            "overflowed. Try float32 or bfloat16."
        )
    return ValueError(
        f"the largest logit of this step is {usable}, so there is no token to choose: logit_bias, penalties, logits "
        "processors or min_tokens banned every token, or took the largest beyond float32."
    )


# -- between host and device ----------------------------------------------------------------------------------------


def sampling_device(device: torch.device) -> torch.device:
    """Where rows are drawn: on their own device, but for Apple's GPUs, which lack the float64 that sums up a line."""
    return torch.device("cpu") if device.type == "mps" else device


def upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor on the device, without waiting for it."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Download:
    """A tensor on its way to the host. Who waits for it waits for what is queued now, not for what comes later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=tensor.is_cuda)  # for CUDA into pinned memory
        self._event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait(self) -> torch.Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def rows_at_once(vocab: int) -> int:
    """Rows of logits that are worked on together."""
    return max(1, SLICE_VALUES // vocab)


# -- what edits the logits of a row -----------------------------------------------------------------------------------


def edits(row: Row) -> bool:
    """Whether anything changes this row's logits before the temperature does."""
    return row.params.edits_logits or len(row.token_ids) < row.params.min_tokens


@dataclass(frozen=True)
class TokenCounts:
    """Which tokens a prompt has, and how often its answer has each: a function of both, added up as the answer grows.

    in_prompt: bool [vocab]. in_output: float32 [vocab]. output_length: tokens of the answer that are counted.
    """

    in_prompt: torch.Tensor
    in_output: torch.Tensor
    output_length: int = 0

    @classmethod
    def of_prompt(cls, prompt_ids: Sequence[int], logits: torch.Tensor) -> TokenCounts:
        """Of a row that has said nothing yet; on the device of its `logits` [vocab]."""
        in_prompt = torch.zeros_like(logits, dtype=torch.bool)
        in_prompt.index_fill_(0, upload(prompt_ids, torch.long, logits.device), True)
        return cls(in_prompt, torch.zeros_like(logits, dtype=torch.float32))

    def after(self, output_ids: Sequence[int]) -> TokenCounts:
        """Of the row when its answer is `output_ids`, which begin with those that are counted already."""
        new = upload(output_ids[self.output_length :], torch.long, self.in_output.device)
        ones = torch.ones_like(new, dtype=torch.float32)
        return TokenCounts(self.in_prompt, self.in_output.index_add(0, new, ones), len(output_ids))


def penalised(logits: torch.Tensor, counts: TokenCounts, params: SamplingParams) -> torch.Tensor:
    """Logits [vocab] with the three penalties: repetition over prompt and output, the other two over the output."""
    said = counts.in_output > 0
    if params.repetition_penalty != 1.0:
        # dividing a negative logit would raise it: it is multiplied instead
        less = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(counts.in_prompt | said, less, logits)
    if params.presence_penalty or params.frequency_penalty:
        penalty = params.presence_penalty + params.frequency_penalty * counts.in_output
        logits = torch.where(said, logits - penalty, logits)
    return logits


def processed(processor: LogitsProcessor, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """What the caller's own processor makes of one row of logits [vocab]; a wrong shape would broadcast silently."""
    result = processor(list(token_ids), logits.clone())
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
        returned = f"shape {list(result.shape)}" if isinstance(result, torch.Tensor) else shown(result)
        raise ValueError(
            f"a logits processor must return the logits, a tensor of shape {list(logits.shape)}; it returned {returned}"
        )
    return result.to(logits.device, logits.dtype)


# -- filters ----------------------------------------------------------------------------------------------------------


def keep_largest(logits: torch.Tensor, ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Keeps the `count` [rows] largest logits of each row, -inf for the rest; among equals the lowest ids stay.

    ordered: [rows, at least count], the largest of each row in descending order.
    """
    smallest_kept = ordered.gather(-1, count[:, None] - 1)  # [rows, 1]
    above, equal = logits > smallest_kept, logits == smallest_kept
    room = count[:, None] - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))), -torch.inf)


def filter_top_k(logits: torch.Tensor, k: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Keeps each row's k [rows] (long, up to vocab) most likely tokens; 0 keeps all. most: the largest k, if known."""
    most = int(k.max()) if most is None else most
    kept = keep_largest(logits, logits.topk(most, dim=-1).values, k.clamp(1, most))
    return torch.where(k[:, None] > 0, kept, logits)


def filter_top_p(logits: torch.Tensor, p: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Keeps the fewest most likely tokens whose probabilities reach p [rows]; the token that crosses p stays in.

    most: how many tokens a row with p < 1 can have left, if that is less than the vocabulary.
    """
    most = logits.shape[-1] if most is None else most
    total = logits.logsumexp(-1, keepdim=True)
    # A CPU rarely needs to sort the whole vocabulary. On a device, to ask whether it must would cost a synchronisation.
    widths = (min(SORT_FIRST, most), most) if logits.device.type == "cpu" else (most,)
    for width in widths:
        ordered = logits.topk(width, dim=-1).values  # [rows, width], descending
        probs = (ordered - total).exp()
        mass_before = probs.cumsum(-1, dtype=torch.float64) - probs  # of all more likely tokens
        count = (mass_before < p[:, None] - TOP_P_SLACK).sum(-1).clamp_min(1)
        if width == most or ((count < width) | (p >= 1)).all():
            break
    return torch.where(p[:, None] < 1, keep_largest(logits, ordered, count), logits)


def filter_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keeps tokens at least min_p [rows] times as likely as the most likely one."""
    floor = logits.amax(-1, keepdim=True) + min_p.log()[:, None] - TOP_P_SLACK
    return logits.masked_fill(logits < floor, -torch.inf)


def filtered_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top_k, top_p and min_p over rows [rows, vocab] with one `SamplingParams` each (temperature > 0).

    `softmax(filtered_logits(...))` is the distribution that a token is drawn from.
    """
    vocab = logits.shape[-1]
    top_ks = [min(p.top_k, vocab) for p in params]  # what is asked for may be beyond 64 bits
    columns = [
        [max(p.temperature, MIN_TEMPERATURE) for p in params],
        top_ks,
        [p.top_p for p in params],
        [p.min_p for p in params],
    ]
    temperature, k, top_p, min_p = upload(columns, torch.float64, logits.device)
    # Taking the maximum off first changes no probability, and keeps a tiny temperature from overflowing.
    logits = (logits.float() - logits.amax(-1, keepdim=True).float()).div_(temperature.float()[:, None])
    if any(top_ks):
        logits = filter_top_k(logits, k.long(), max(top_ks))
    if any(p.top_p < 1 for p in params):
        narrow = all(top_ks[i] for i, p in enumerate(params) if p.top_p < 1)
        logits = filter_top_p(logits, top_p, max(top_ks) if narrow else vocab)
    if any(p.min_p for p in params):
        logits = filter_min_p(logits, min_p.float())
    return logits


# -- the draw -------------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, likeliest: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Token ids [rows] for logits [rows, vocab]: `likeliest` [rows], or drawn where there is a temperature."""
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not random:
        return likeliest
    chosen = [rows[i] for i in random]
    u = uniform([r.seed for r in chosen], [r.index for r in chosen], [len(r.token_ids) for r in chosen])
    u = upload(u, torch.float64, logits.device)
    params = [row.params for row in chosen]
    if len(random) == len(rows):
        return inverse_cdf(filtered_logits(logits, params).softmax(-1), u)
    where = upload(random, torch.long, logits.device)
    drawn = inverse_cdf(filtered_logits(logits.index_select(0, where), params).softmax(-1), u)
    return likeliest.index_copy(0, where, drawn)


def inverse_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of probs [rows, vocab], in order of ids, passes u [rows] in [0, 1).

    In order of ids, not of probability: two nearly equal tokens may swap ranks when the company of a row changes the
    last bits of its logits, and that must not move every other token on the line.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    # Rounding may put u * total on the very end of the line. A point before the end is always inside some token's part.
    point = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, point[:, None], right=True)[:, 0]
    return token.clamp(max=probs.shape[-1] - 1)  # a row of NaN; its error is reported elsewhere


def uniform(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One number in [0, 1) for each (seed, index of the answer, position), float64 [rows]; seeds may be any integers.

    A counter-based generator (Salmon et al. 2011) with the mixing function of SplitMix64 (Steele et al. 2014): there is
    no state to carry, so that the 7th token of a request draws the same number whenever it is computed. Each part is
    mixed in turn, so that neighbouring seeds and indices have nothing in common.
    """
    return numbers_of(streams(seeds, indices), torch.tensor(list(positions), dtype=torch.int64))


def streams(seeds: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
    """int64 [rows]: what of `uniform` does not change while an answer grows."""
    mask = (1 << 64) - 1
    as_int64 = [((seed & mask) ^ (1 << 63)) - (1 << 63) for seed in seeds]  # two's complement
    x = _mix64(torch.tensor(as_int64, dtype=torch.int64)) + torch.tensor(list(indices), dtype=torch.int64)
    return _mix64(x)


def numbers_of(streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rest of `uniform`: float64 [rows] from `streams` and positions, both int64 [rows]."""
    return (_mix64(streams + positions) >> 11 & ((1 << 53) - 1)).double() * 2.0**-53


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64 on int64 tensors: multiplication wraps; a right shift must be masked, since torch's keeps the sign."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    x = (x ^ (x >> 30 & ((1 << 34) - 1))) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ (x >> 31 & ((1 << 33) - 1))


def top_logprobs(logits: torch.Tensor, token: torch.Tensor, count: int) -> torch.Tensor:
    """[2, count + 1] in float64: ids and log-probabilities of the most likely tokens in order, then of `token` [1].

    They are the model's own, from raw `logits` [vocab]: before penalties, temperature and filters.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(count, len(logits)))
    return torch.stack([torch.cat([ids, token]).double(), torch.cat([values, logprobs.gather(0, token)]).double()])
