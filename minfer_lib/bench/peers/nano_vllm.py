"""nano-vllm on random weights in the shape of a Qwen3 model, from a checkout of its source, unchanged.

Settings: its own defaults with CUDA graphs, max_model_len 4,096. It cannot be greedy: temperature 0.6 throughout, as in
its bench.py. Without the package flash-attn its calls go to the FlashAttention 3 that the vLLM wheel bundles, as they
did when we ran commit bb823b3.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import BadEnvironment
from ...models.shapes import byte_tokenizer
from ..results import Result
from .common import Peer, measure, parser, peer_module, run, shape_folder

INSTALL = "Clone github.com/GeeeekExplorer/nano-vllm and name the folder with --source."
TEMPERATURE = 0.6
LONGEST = 4096


def measured(args: argparse.Namespace) -> Result:
    if args.source:
        sys.path.insert(0, args.source)
    if importlib.util.find_spec("nanovllm") is None:
        raise BadEnvironment(f"nanovllm cannot be imported. {INSTALL}")
    if not torch.cuda.is_available():
        raise BadEnvironment("nano-vllm needs an NVIDIA GPU, and torch sees none.")
    attention = "flash-attn" if importlib.util.find_spec("flash_attn") else stand_in_for_flash_attn()
    runner = peer_module("nanovllm.engine.model_runner", INSTALL)
    nanovllm = peer_module("nanovllm", INSTALL)
    runner.load_model = random_weights
    with tempfile.TemporaryDirectory() as folder:
        sizes = shape_folder(args.shape, folder)
        byte_tokenizer().save_pretrained(folder)  # it wants one; prompts are ids and nothing is decoded in time
        llm = nanovllm.LLM(folder, enforce_eager=False, max_model_len=LONGEST)

        def generate(prompts: list[list[int]], lengths: list[int], temperature: float) -> list[int]:
            params = [nanovllm.SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lengths]
            return [len(out["token_ids"]) for out in llm.generate(prompts, params, use_tqdm=False)]

        settings = f"nano-vllm: max_model_len={LONGEST}, CUDA graphs, temperature={TEMPERATURE}, attention: {attention}"
        peer = Peer("nano-vllm", sizes, settings, generate, ["nano-vllm"], torch.device("cuda"), "bfloat16")
        return measure(peer, args)


def random_weights(model: torch.nn.Module, path: str) -> None:
    """In place of its `load_model`."""
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)


def stand_in_for_flash_attn() -> str:
    """A module `flash_attn` with the two functions that nano-vllm calls, answered by vLLM's FlashAttention 3."""
    attend = peer_module("vllm.vllm_flash_attn", "Install flash-attn, or vllm.").flash_attn_varlen_func
    ends = torch.arange(0, 1025, dtype=torch.int32, device="cuda")

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_k: Any, block_table: Any = None, **options: Any) -> Any:
        if block_table is None:
            return attend(q, k, v, cu_seqlens_k=cu_seqlens_k, fa_version=3, **options)
        used = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        return attend(q, k, v, block_table=block_table, seqused_k=used, fa_version=3, **options)

    def with_cache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any, softmax_scale: float, causal: bool
    ) -> Any:
        return attend(
            q.squeeze(1), k_cache, v_cache, max_seqlen_q=1, cu_seqlens_q=ends[: len(q) + 1], max_seqlen_k=LONGEST,
            seqused_k=cache_seqlens, block_table=block_table, softmax_scale=softmax_scale, causal=causal, fa_version=3,
        )  # fmt: skip

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, with_cache
    sys.modules["flash_attn"] = module
    return "FlashAttention 3 of vLLM"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("nano_vllm", __doc__, "qwen3-0.6b")
    options.add_argument("--source", metavar="FOLDER", help="a checkout of nano-vllm, if it is not installed")
    return run(measured, options.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
