"""From the chunks of a step to one forward pass and its samples.

Invariant: the row that the model sees holds exactly the scheduled tokens, no padding, decoding requests first; the
model itself is left as it was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention.batch import GATHER, AttentionKernels, PackedBatch
from ..attention.interface import NAME, attention_configs, implementation
from ..cache.slots import SlotKVCache
from ..generation.sampling import Sampler, Samples
from ..models.load import LanguageModel
from .interrupts import held_interrupts
from .scheduler import Chunk

if TYPE_CHECKING:
    from ..cache.paged import PagedKVCache

# All but cuDNN's, which compiles a plan for each new shape of its inputs: here every step has one, 37 ms on an H200.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class ModelInput:
    """One step's row: input_ids and position_ids [1, T], and which rows of it [samples] give a new token."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    batch: PackedBatch
    logits_rows: torch.Tensor
    sampled: list[Chunk]  # whose they are


class ModelRunner:
    """Builds the packed row, calls the model, samples."""

    def __init__(
        self, lm: LanguageModel, cache: SlotKVCache | PagedKVCache, sampler: Sampler, kernels: AttentionKernels = GATHER
    ) -> None:
        self.lm, self.cache, self.sampler, self.kernels = lm, cache, sampler, kernels
        self._keeps_rows = lm.model._supports_logits_to_keep()
        self._configs = attention_configs(lm.model)

    def build(self, chunks: Sequence[Chunk]) -> ModelInput:
        """The row of a step. Tokens of a request stay together; those with one token come first, by block."""
        size = self.cache.block_size
        tables = {chunk: self.cache.block_table(chunk.request) for chunk in chunks}
        chunks = sorted(chunks, key=lambda chunk: (chunk.num_tokens > 1, tables[chunk][0]))
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        last: list[int] = []  # where in the row the last token of each chunk stands
        for chunk in chunks:
            begin, table = chunk.request.num_computed, tables[chunk]
            ids += chunk.request.next_tokens(chunk.num_tokens)
            positions += range(begin, begin + chunk.num_tokens)
            rows += [table[p // size] * size + p % size for p in range(begin, begin + chunk.num_tokens)]
            last.append(len(ids) - 1)
        sampled = [chunk for chunk in chunks if chunk.samples]
        logits_rows = [at for at, chunk in zip(last, chunks, strict=True) if chunk.samples] or last[-1:]
        # one copy to the device for all of them
        numbers = torch.tensor(ids + positions + rows + logits_rows).to(self.lm.device, non_blocking=True)
        input_ids, position_ids, slot_mapping, keep = numbers.split([len(ids)] * 3 + [len(logits_rows)])
        batch = PackedBatch(
            self.cache.pools, size, [tables[chunk] for chunk in chunks], [chunk.num_tokens for chunk in chunks],
            [chunk.request.num_computed + chunk.num_tokens for chunk in chunks], slot_mapping, self.kernels,
        )  # fmt: skip
        return ModelInput(input_ids[None], position_ids[None], batch, keep, sampled)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [samples, vocab]; of one row that nobody reads where no chunk is its prompt's last."""
        keep = {"logits_to_keep": inputs.logits_rows} if self._keeps_rows else {}
        with (
            held_interrupts() as interrupts,  # so that what is switched here is switched back
            implementation(self._configs, NAME),
            sdpa_kernel(BACKENDS),
            torch.no_grad(),
            interrupts.let_through(),
        ):
            logits = self.lm.model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,  # ours travels with the batch
                minfer=inputs.batch,
                **keep,
            ).logits[0]
        return logits if self._keeps_rows else logits[inputs.logits_rows]

    def sample(self, logits: torch.Tensor, inputs: ModelInput) -> Samples:
        """One token for each of `inputs.sampled`, in that order."""
        if not inputs.sampled:
            return Samples([], [])
        return self.sampler(logits, [chunk.request for chunk in inputs.sampled])
