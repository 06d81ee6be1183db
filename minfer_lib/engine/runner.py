"""From the plan of a step to one forward pass and its samples.

Invariant: the row that the model sees holds exactly the scheduled tokens, no padding, decoding requests first. Nothing
waits for the device before `Pending.result`: launching a step and waiting for its tokens are two things.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..attention.backends import AttentionBackend
from ..attention.batch import PackedBatch
from ..attention.interface import NAME
from ..attention.support import packed_layers
from ..attention.view import EngineView
from ..cache.pool import BlockStore
from ..errors import UnsupportedModel
from ..generation.request import Request
from ..generation.sampling import Sampler, Samples
from ..models import hf_compat
from ..models.load import LanguageModel
from .scheduler import Plan

if TYPE_CHECKING:
    from ..generation.sampling import PendingSamples


@dataclass(eq=False)
class StepNumbers:
    """One step as the host knows it: for each token of its row id, position and row of the pools; the tokens whose
    logits are wanted, for `sampled`; for each request new tokens, tokens in all and row of the block tables."""

    ids: list[int]
    positions: np.ndarray
    slots: np.ndarray
    rows: list[int]
    q_lens: list[int]
    kv_lens: list[int]
    table_rows: np.ndarray
    num_decodes: int
    sampled: list[Request]


@dataclass(eq=False)
class ModelInput:
    """One step's row: input_ids and position_ids [T]; logits_rows [samples], the rows of it that give a new token
    to `sampled`, in this order."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    batch: PackedBatch
    logits_rows: torch.Tensor
    sampled: list[Request]


class ViewDecoder:
    """The model's own forward pass, through the engine's view of it (`attention.view`).

    Called with ids and positions int64 [T], a batch and the rows whose logits are wanted, None for all of them: logits
    [rows, vocab]. A decoder of another kind (`fast`) has the same three names.
    """

    name = "graph"  # of the way that captures it

    def __init__(self, lm: LanguageModel) -> None:
        packed_layers(lm)  # a model that cannot be run this way is refused
        self.view = EngineView(lm, NAME)
        self._keeps_rows = hf_compat.supports_logits_to_keep(lm.model)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._logits(ids, positions, rows, minfer=batch)

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Logits [rows, vocab]; `options` go to every layer. The model keeps no cache: ours travels with the batch."""
        if self._keeps_rows and rows is not None:
            options["logits_to_keep"], rows = rows, None
        out = self.view(input_ids=ids[None], position_ids=positions[None], use_cache=False, **options)
        logits = out.logits[0]
        return logits if rows is None else logits[rows]

    def refresh(self) -> None:
        """Follows what was done to the model: weights that were moved or replaced."""
        self.view.refresh()


class ModelRunner:
    """Builds the packed row, runs the decoder, samples.

    description: of the fast path, for `LLMEngine.fast_path`.
    """

    description = "none: the model's own modules run"

    def __init__(
        self, lm: LanguageModel, cache: BlockStore, sampler: Sampler, backend: AttentionBackend,
        decoder: Callable[..., torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.lm, self.cache, self.sampler, self.backend = lm, cache, sampler, backend
        self.decoder = decoder or ViewDecoder(lm)

    def execute(self, plan: Plan) -> Samples:
        """Computes a step; one sample for each request whose tokens are all computed then, in the plan's order."""
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> PendingSamples | NothingSampled:
        """Starts a step. Its samples are ready when the device is."""
        inputs = self.build(plan)
        logits = self.forward(inputs)
        if not inputs.sampled:  # of prompts that are not complete yet nothing is sampled
            return NothingSampled()
        return self.sampler.launch(logits, inputs.sampled)

    def refresh(self) -> None:
        """Follows what was done to the model since requests joined last."""
        self.decoder.refresh()

    def numbers(self, plan: Plan) -> StepNumbers:
        """The row of a step. Tokens of a request stay together; requests with one token come first."""
        cache, size = self.cache, self.cache.block_size
        decodes = [request for request, tokens in plan.items() if tokens == 1]
        others = [request for request, tokens in plan.items() if tokens > 1]
        requests = decodes + others
        begins = [request.num_computed for request in requests]
        table_rows = np.array([request.table.index for request in requests])

        position = np.array(begins[: len(decodes)], dtype=np.int64)
        ids = [_next_token(request) for request in decodes]
        positions = [position]
        blocks = [cache.tables[table_rows[: len(decodes)], position // size]]
        for request in others:
            begin, tokens = request.num_computed, plan[request]
            position = np.arange(begin, begin + tokens)
            ids += request.tokens(begin, begin + tokens)
            positions.append(position)
            blocks.append(cache.tables[request.table.index, position // size])
        flat_positions = np.concatenate(positions)
        slots = np.concatenate(blocks) * np.int64(size) + flat_positions % size

        q_lens = [1] * len(decodes) + [plan[request] for request in others]
        kv_lens = [begin + new for begin, new in zip(begins, q_lens, strict=True)]
        ends = dict(zip(requests, itertools.accumulate(q_lens), strict=True))
        sampled = [request for request, tokens in plan.items() if request.num_computed + tokens == request.num_tokens]
        rows = [ends[request] - 1 for request in sampled] or [0]  # of logits that nobody reads where none is the last
        return StepNumbers(
            ids, flat_positions, slots, rows, q_lens, kv_lens, table_rows, num_decodes=len(decodes), sampled=sampled
        )

    def build(self, plan: Plan) -> ModelInput:
        """The row of a step, on the device."""
        step, cache = self.numbers(plan), self.cache
        starts = np.cumsum([0, *step.q_lens[step.num_decodes :]])
        ids, positions, slots, rows, lengths, starts, tables = self._to_device(
            step.ids, step.positions, step.slots, step.rows, step.kv_lens, starts, step.table_rows
        )
        width = cache.blocks_for(max(step.kv_lens))
        batch = PackedBatch(
            cache.pools, cache.block_size, cache.trash_row, step.q_lens, step.kv_lens, step.num_decodes, slots,
            cache.device_tables[:, :width].index_select(0, tables), lengths.int(), starts.int(), self.backend,
        )  # fmt: skip
        return ModelInput(ids, positions, batch, rows, step.sampled)

    def _to_device(self, *numbers: Iterable[int]) -> tuple[torch.Tensor, ...]:
        """The numbers of a step as int64 tensors, and the block tables brought up to date, in one copy."""
        parts = [np.asarray(part, dtype=np.int64) for part in numbers]
        changes = self.cache.changes
        if changes:
            parts += [np.fromiter(changes.keys(), np.int64), np.fromiter(changes.values(), np.int64)]
        sizes = [len(part) for part in parts]
        flat = torch.from_numpy(np.concatenate(parts))
        if self.lm.device.type == "cuda":
            flat = flat.pin_memory()
        tensors = flat.to(self.lm.device, non_blocking=True).split(sizes)
        if changes:
            self.cache.device_tables.view(-1).index_copy_(0, tensors[-2], tensors[-1].int())
            changes.clear()
            tensors = tensors[:-2]
        return tensors

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [samples, vocab]; of one row that nobody reads where no chunk is its prompt's last."""
        with torch.no_grad():
            logits = self.decoder(inputs.input_ids, inputs.position_ids, inputs.batch, inputs.logits_rows)
        if inputs.batch.attended != len(self.cache.pools):
            raise UnsupportedModel(
                f"only {inputs.batch.attended} of {len(self.cache.pools)} layers of {self.lm.name} attended by the "
                "batch: a forward was replaced by one that runs something else. Make a new engine."
            )
        return logits[: len(inputs.sampled)]


class NothingSampled:
    """Stands for the samples of a step that has none."""

    def result(self) -> Samples:
        return Samples([], [])


def _next_token(request: Request) -> int:
    at = request.num_computed - len(request.prompt_token_ids)
    return request.token_ids[at] if at >= 0 else request.prompt_token_ids[at]
