"""llama.cpp on a CPU, through llama-cpp-python (built from source for this CPU), on a GGUF file.

Settings: as many sequences as there are requests, at most `--slots`; one llama_batch a step, with every running request
in it and new prompts as sequences become free, 512 tokens of them a step; greedy, chosen here from its logits. A cache
for each sequence (`--unified`: one for all, which can be faster or slower). Threads as torch would take here. The loop
around its batch API is ours and not its server's: no claim about the server follows from it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import GenerationFailed, InvalidParameter
from ...generation.params import SamplingParams
from ...generation.prompts import make_requests
from ...generation.request import RequestOutput
from ...models.load import LanguageModel
from ..baselines import check_supported
from ..results import Result
from .common import Peer, Sizes, measure, parser, peer_module, run, works

INSTALL = "Run `pip install --no-binary llama-cpp-python llama-cpp-python`, which needs cmake and a C++ compiler."
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
STEP_TOKENS = 512  # of prompts and answers in one step


class Llama:
    """A model file with sequences that run side by side. lc: the module llama_cpp."""

    def __init__(self, lc: Any, path: str, slots: int, longest: int, threads: int, unified: bool) -> None:
        self.lc, self.slots = lc, slots
        lc.llama_backend_init()
        self.model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        if not self.model:
            raise InvalidParameter(f"llama.cpp cannot load {path!r}. Name a GGUF file.")
        params = lc.llama_context_default_params()
        params.n_seq_max, params.kv_unified = slots, unified
        params.n_ctx = slots * (-(-longest // 256) * 256)
        params.n_batch, params.n_ubatch = max(2048, longest), STEP_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocab_size = int(lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model)))
        self.batch = lc.llama_batch_init(params.n_batch, 0, 1)
        self.memory = lc.llama_get_memory(self.context)

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float = 0.0) -> list[int]:
        """Tokens made of each request; temperature has no say."""
        return [len(answer) for answer in self.answers(prompts, lengths)]

    def answers(
        self, prompts: list[list[int]], lengths: list[int], tell: Callable[[int, int], None] | None = None
    ) -> list[list[int]]:
        """The greedy tokens of each request; `tell` hears a request's number and each token as soon as it is there."""
        lc, batch = self.lc, self.batch
        lc.llama_memory_clear(self.memory, True)
        found: list[list[int]] = [[] for _ in prompts]
        waiting, free = list(range(len(prompts)))[::-1], list(range(self.slots))[::-1]
        running: dict[int, int] = {}  # sequence -> request
        while waiting or running:
            batch.n_tokens = 0
            rows = {}  # sequence -> place in the batch of what its next token comes from
            for sequence, at in running.items():
                rows[sequence] = self._add(found[at][-1], len(prompts[at]) + len(found[at]) - 1, sequence, True)
            while waiting and free and (not rows or batch.n_tokens + len(prompts[waiting[-1]]) <= STEP_TOKENS):
                at, sequence = waiting.pop(), free.pop()
                running[sequence] = at
                for place, token in enumerate(prompts[at]):
                    rows[sequence] = self._add(token, place, sequence, place == len(prompts[at]) - 1)
            if code := lc.llama_decode(self.context, batch):
                raise GenerationFailed(f"llama_decode returned {code}")
            for sequence, row in rows.items():
                at = running[sequence]
                logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, row), (self.vocab_size,))
                found[at].append(int(logits.argmax()))
                if tell is not None:
                    tell(at, found[at][-1])
                if len(found[at]) == lengths[at]:
                    lc.llama_memory_seq_rm(self.memory, sequence, -1, -1)
                    del running[sequence]
                    free.append(sequence)
        return found

    def _add(self, token: int, position: int, sequence: int, wanted: bool) -> int:
        """Puts a token into the batch and returns its place there; `wanted`: its logits are."""
        batch, at = self.batch, self.batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens = at + 1
        return at

    def close(self) -> None:
        self.lc.llama_batch_free(self.batch)
        self.lc.llama_free(self.context)
        self.lc.llama_model_free(self.model)


class LlamaCpp:
    """llama.cpp as an engine that is measured beside ours, in one process and in turns.

    lm: the same model as we load it, for its tokenizer and limits. gguf: the file; kind: a key of TYPES.
    """

    def __init__(self, lm: LanguageModel, gguf: str, kind: str, *, slots: int, longest: int) -> None:
        self.lm, self.name = lm, f"llama.cpp, {kind}"
        lc = peer_module("llama_cpp", INSTALL)
        self._quiet = lc.llama_log_callback(lambda *_: None)
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        threads = torch.get_num_threads()
        with converted(lc, gguf, kind) as path:
            self.llama = Llama(lc, path, slots, longest, threads, False)
        self.settings = (
            f"weights {kind}, at most {slots} sequences at once, {threads} threads, a cache for each sequence"
        )
        self._ids, self._longest = map(str, itertools.count()), longest

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Answers in input order; all requests arrive at the call. Greedy only: raises `InvalidParameter` otherwise."""
        began = time.perf_counter()
        requests = make_requests(self.lm, prompts, params, max_model_len=self._longest, now=began, ids=self._ids)
        check_supported(requests)
        for request in requests:
            request.metrics.first_scheduled = began
        self.llama.answers(
            [request.prompt_token_ids for request in requests],
            [request.params.max_tokens for request in requests],
            lambda at, token: requests[at].append(token, None, time.perf_counter()),
        )
        return [request.output() for request in requests]


@contextmanager
def converted(lc: Any, path: str, kind: str | None) -> Iterator[str]:
    """The file with its weights in another type, made for the time of a measurement; None: as it is."""
    if kind is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / f"{kind}.gguf")
        params = lc.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = getattr(lc, f"LLAMA_FTYPE_{TYPES[kind]}"), True
        if lc.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params)):
            raise InvalidParameter(f"llama.cpp cannot convert {path!r} to {kind}. Name a GGUF file.")
        yield out


def measured(args: argparse.Namespace) -> Result:
    lc = peer_module("llama_cpp", INSTALL)
    quiet = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    with converted(lc, args.gguf, args.type) as path:
        name = Path(args.gguf).stem
        asked = works(args, Sizes(name, 2, 2**20)).values()  # for their lengths; the ids follow once it is loaded
        longest = max(max(work.prompt_lens) + max(work.output_lens) for work in asked)
        slots = min(args.slots, max(len(work.prompts) for work in asked))
        threads = args.threads or torch.get_num_threads()
        llama = Llama(lc, path, slots, longest, threads, args.unified)
        kind = args.type or "as it is"
        settings = (
            f"llama.cpp: weights {kind}, at most {slots} sequences at once, {threads} threads, "
            f"{'one cache for all' if args.unified else 'a cache for each sequence'}"
        )
        sizes = Sizes(name, llama.vocab_size, longest)
        peer = Peer(
            f"llama.cpp, {kind}", sizes, settings, llama.generate, ["llama-cpp-python"], torch.device("cpu"), kind,
            {"threads": threads},
        )  # fmt: skip
        try:
            return measure(peer, args)
        finally:
            llama.close()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("llama_cpp", __doc__)
    options.add_argument("--gguf", required=True, metavar="FILE", help="the model")
    options.add_argument("--type", choices=sorted(TYPES), help="convert the weights to this first")
    options.add_argument("--slots", type=int, default=32, metavar="N", help="sequences at once at most (%(default)s)")
    options.add_argument("--threads", type=int, metavar="N", help="as torch's by default")
    options.add_argument("--unified", action="store_true", help="one cache for all sequences")
    return run(measured, options.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
