"""A step as one launch: a CUDA graph over tensors that never move, one graph for each size of batch.

A graph repeats kernels with the very addresses and sizes that it was captured with. So all that changes from step to
step is written into tensors that stay where they are, which the first kernel of the graph reads; and batches come in
sizes that there are graphs for, filled up with rows that do nothing. Source: CUDA graphs in PyTorch (Nguyen et al.
2021); sizes of batches as in vLLM and SGLang.

Invariant: a padded row has length 0, so that it attends to nothing, and writes to the spare row of the pools, which
nobody reads; what it computes is finite or not, and reaches no other row. Every static tensor has as many rows as the
largest graph: kernels would write past its end without a word. Nothing waits for the device.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..attention.backends import AttentionBackend
from ..attention.batch import PackedBatch
from ..cache.pool import BlockStore
from ..models.load import LanguageModel

_CAPTURING = threading.Lock()  # one engine after the other
RING = 3  # host copies of a step's numbers: one may be rewritten when its step has been read, two steps later
PROMPT_TOKENS = (16, 32, 64, 128, 256, 512)
PROMPTS = 8  # in one prompt graph
PADS_ON_CPU = False  # where a graph is a call, and batches need no sizes; tests have them there too
MOST_ROWS = 512  # that there are graphs for: more rows take so long that launching them costs little


def decode_buckets(most: int) -> list[int]:
    """Sizes of batches that have a graph: 1, 2, 4, 8, then every 16, and the largest."""
    sizes = [1, 2, 4, 8, *range(16, most, 16)]
    return [*(size for size in sizes if size < most), most]


@dataclass
class RowNumbers:
    """What the host says of the rows of a step, a field a row: numpy views of one host copy, or of the device's tensor.

    uniform float64; source int32: the row of the step before whose token this row continues with, -1 for `token`;
    token, position (-1: a padded row), table (its row of the block tables) int32; temperature float32, 0 for greedy.
    """

    uniform: Any
    source: Any
    token: Any
    position: Any
    table: Any
    temperature: Any

    @staticmethod
    def bytes_of(rows: int) -> int:
        return rows * (8 + 5 * 4)

    @classmethod
    def of(cls, flat: torch.Tensor, rows: int) -> RowNumbers:
        """Views of a flat uint8 tensor."""
        *ints, temperature = flat[8 * rows :].view(5, 4 * rows)
        numbers = (row.view(torch.int32) for row in ints)
        return cls(flat[: 8 * rows].view(torch.float64), *numbers, temperature.view(torch.float32))

    def first(self, count: int) -> RowNumbers:
        return RowNumbers(*(tensor[:count] for tensor in vars(self).values()))

    def numpy(self) -> RowNumbers:
        return RowNumbers(*(tensor.numpy() for tensor in vars(self).values()))


# Runs a captured step over the static tensors. Where there is no GPU it is a call of the step.
Replay = Callable[[], None]


@dataclass
class PromptStep:
    """A captured step over so many tokens of up to PROMPTS prompts, and the numbers that it reads, int64, in one."""

    replay: Replay
    numbers: torch.Tensor
    host: list[torch.Tensor]


@dataclass
class CaptureCost:
    """Of all graphs of an engine: how many, seconds, and bytes of the device that are gone for it."""

    graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass
class StepGraphs:
    """The static tensors of an engine, and the graphs over them.

    decoder: as `engine.runner.ViewDecoder`. rows: the largest batch. longest: tokens that a request may have.
    """

    lm: LanguageModel
    cache: BlockStore
    backend: AttentionBackend
    decoder: Any
    rows: int
    longest: int
    cost: CaptureCost = field(default_factory=CaptureCost)

    @torch.inference_mode(False)  # what is made inside a caller's inference mode could not be written to outside
    def __post_init__(self) -> None:
        device, rows = self.lm.device, max(self.rows, PROMPTS)  # prompt graphs sample so many, whatever the batches
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            from ..kernels.triton.sampling import sample
            from ..kernels.triton.step_inputs import step_inputs
        else:
            from ..kernels.reference_step import step_inputs
            from .sampling import sample
        self.step_inputs, self.sample = step_inputs, sample
        size = RowNumbers.bytes_of(rows)
        self.flat = torch.zeros(size, dtype=torch.uint8, device=device)
        self.numbers = RowNumbers.of(self.flat, rows)
        self.ring = [torch.zeros(size, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(RING)]
        self.host = [RowNumbers.of(flat, rows).numpy() for flat in self.ring]
        self.turn = 0
        self.sent: list[Any] = [None] * RING  # when the device has read each of them
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # that the last step chose
        self.capture()

    # -- capture ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def capture(self) -> None:
        """Captures all graphs, the largest first, so that the others live in its memory."""
        self.tables, self.logits = self.cache.device_tables, None
        if not self.on_gpu:
            self.sizes = decode_buckets(self.rows) if PADS_ON_CPU else list(range(1, self.rows + 1))
            self.decodes, self.prompts = {size: self._capture_decode(size) for size in self.sizes}, {}
            return
        with _CAPTURING, torch.cuda.device(self.lm.device):
            began = time.perf_counter()
            gc.collect()
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self.sizes = decode_buckets(self.rows)
            self.decodes = {size: self._capture_decode(size) for size in reversed(self.sizes)}
            self.prompts = {size: self._capture_prompt(size) for size in reversed(PROMPT_TOKENS)}
            torch.cuda.synchronize()
            gone = max(0, free - torch.cuda.mem_get_info()[0])
            self.cost = CaptureCost(len(self.decodes) + len(self.prompts), time.perf_counter() - began, gone)

    def _capture_decode(self, size: int) -> Replay:
        for numbers in self.host:
            self.pad(numbers, 0, len(self.tokens))
        self.flat.copy_(self.ring[0])
        numbers = self.numbers.first(size)
        kv_lens = [self.longest] * size  # a bound, which grids and splits are made for

        this = weakref.proxy(self)  # which has the step: else neither would be gone before a collection

        def step() -> None:
            ids, positions, slots, lengths, tables = this.step_inputs(
                numbers.source, numbers.token, numbers.position, numbers.table, this.tokens, this.tables,
                this.cache.block_size, this.cache.spare_row,
            )  # fmt: skip
            if not this.on_gpu:  # run anew each time, and by kernels that need to be told
                kv_lens[:] = lengths.clamp(min=1).tolist()
            batch = PackedBatch(
                this.cache.pools, this.cache.block_size, this.cache.trash_row, [1] * size, kv_lens, size, slots, tables,
                lengths, lengths[:1], this.backend,
            )  # fmt: skip
            this._finish(this.decoder(ids, positions, batch), numbers)

        return self._captured(step)

    def _capture_prompt(self, size: int) -> PromptStep:
        count = 3 * size + 4 * PROMPTS + 1
        numbers = torch.zeros(count, dtype=torch.int64, device=self.lm.device)
        host = [torch.zeros(count, dtype=torch.int64, pin_memory=self.on_gpu) for _ in range(RING)]
        ids, positions, slots, rows, lengths, starts, tables = _prompt_parts(numbers, size)
        slots.fill_(self.cache.spare_row)
        sampling = self.numbers.first(PROMPTS)

        this = weakref.proxy(self)  # which has the step: else neither would be gone before a collection

        def step() -> None:
            batch = PackedBatch(
                this.cache.pools, this.cache.block_size, this.cache.trash_row, [size] * PROMPTS,
                [this.longest] * PROMPTS, 0, slots, this.tables.index_select(0, tables), lengths.int(), starts.int(),
                this.backend,
            )  # fmt: skip
            this._finish(this.decoder(ids, positions, batch, rows), sampling)

        return PromptStep(self._captured(step), numbers, host)

    def _finish(self, logits: torch.Tensor, numbers: RowNumbers) -> None:
        """The end of a step: its logits where they can be read, and a token for each row."""
        if not self.on_gpu:
            self.logits = logits
            self.sample(logits, numbers.temperature, numbers.uniform, self.tokens[: len(logits)])
            return
        if self.logits is None:
            self.logits = torch.zeros(len(self.tokens), logits.shape[1], dtype=logits.dtype, device=logits.device)
        kept = self.logits[: len(logits)]
        kept.copy_(logits)
        self.sample(kept, numbers.temperature, numbers.uniform, self.tokens[: len(logits)])

    def _captured(self, step: Callable[[], None]) -> Replay:
        if not self.on_gpu:
            return torch.no_grad()(step)
        with torch.no_grad():
            # Compiles kernels, which a capture cannot; on the stream that steps run on, since kernels share tickets.
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # other threads may use the GPU meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                step()
        return graph.replay

    # -- one step -----------------------------------------------------------------------------------------------------

    def pad(self, numbers: RowNumbers, begin: int, end: int) -> None:
        """Makes rows `begin` to `end` do nothing."""
        numbers.source[begin:end] = -1
        numbers.position[begin:end] = -1
        for name in ("uniform", "token", "table", "temperature"):
            getattr(numbers, name)[begin:end] = 0

    def next_host(self) -> RowNumbers:
        """The host copy that the next step is to be written into."""
        self.turn = (self.turn + 1) % RING
        if self.sent[self.turn] is not None:
            self.sent[self.turn].synchronize()  # over long ago, unless chunks that sample nothing ran far ahead
        return self.host[self.turn]

    def _send(self) -> None:
        """What the host says of this step is on its way to the device."""
        self.flat.copy_(self.ring[self.turn], non_blocking=True)
        if self.on_gpu:
            self.sent[self.turn] = torch.cuda.current_stream(self.lm.device).record_event()

    def decode(self, count: int) -> torch.Tensor:
        """Runs a step of `count` rows, whose numbers stand in the host copy given last: logits [count, vocab]."""
        size = next(size for size in self.sizes if size >= count)
        self.pad(self.host[self.turn], count, size)
        self._send()
        self.decodes[size]()
        return self.logits[:count]

    def prompt_size(self, tokens: int, prompts: int) -> int | None:
        """Tokens of the smallest prompt graph that takes a step; None if there is none."""
        if not self.prompts or prompts > PROMPTS:
            return None
        return next((size for size in PROMPT_TOKENS if size >= tokens), None)

    def prompt(
        self, size: int, ids: list[int], positions: np.ndarray, slots: np.ndarray, rows: list[int], lengths: list[int],
        starts: np.ndarray, tables: np.ndarray,
    ) -> torch.Tensor:  # fmt: skip
        """Runs a step over prompts; what is sampled by stands in the host copy given last: logits [PROMPTS, vocab]."""
        step = self.prompts[size]
        host = step.host[self.turn]
        parts = _prompt_parts(host, size)
        host.zero_()
        parts[2].fill_(self.cache.spare_row)
        parts[5].fill_(len(ids))
        for part, numbers in zip(parts, (ids, positions, slots, rows, lengths, starts, tables), strict=True):
            part[: len(numbers)] = torch.as_tensor(numbers)
        step.numbers.copy_(host, non_blocking=True)
        self._send()
        step.replay()
        return self.logits[:PROMPTS]


def _prompt_parts(numbers: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """ids, positions and slots of tokens; rows of logits, lengths, starts and rows of the block tables of prompts."""
    return numbers.split([size, size, size, PROMPTS, PROMPTS, PROMPTS + 1, PROMPTS])
