"""vLLM on random weights of a public model's shape: the ceiling to aim at on a GPU.

Settings: bfloat16, prefix caching off (the workloads share no prefixes), as many running as there are requests, up to
256, CUDA graphs and compilation as it sets them by itself, in this process. We ran 0.24.0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence

import torch

from ...errors import BadEnvironment
from ..results import Result
from .common import Peer, measure, parser, peer_module, run, shape_folder

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no second process between the clock and the engine
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
DEVICE = torch.device("cuda")
LONGEST = 4096
MOST = 256  # running at once


def measured(args: argparse.Namespace) -> Result:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm = peer_module("vllm", "Run `pip install vllm` in an environment of its own, with this package beside it.")
    if not torch.cuda.is_available():
        raise BadEnvironment("This measurement of vLLM needs an NVIDIA GPU, and torch sees none.")
    with tempfile.TemporaryDirectory() as folder:
        sizes = shape_folder(args.shape, folder)
        running = min(MOST, max(args.batch) if args.workload == "batch" else MOST)
        options = {"max_model_len": LONGEST, "max_num_seqs": running, "enable_prefix_caching": False}
        llm = vllm.LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **options)

        def generate(prompts: list[list[int]], lengths: list[int], temperature: float) -> list[int]:
            params = [
                vllm.SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False)
                for n in lengths
            ]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return [len(out.outputs[0].token_ids) for out in outputs]

        settings = ", ".join(f"{name}={value}" for name, value in options.items())
        peer = Peer("vLLM", sizes, f"vLLM: {settings}", generate, ["vllm"], DEVICE, "bfloat16")
        return measure(peer, args)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(measured, parser("vllm", __doc__, "qwen2.5-7b").parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
