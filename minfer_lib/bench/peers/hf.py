"""transformers on random weights of a public model's shape: `generate` with its two caches, and continuous batching.

Settings: a dynamic cache; a static one, with which it compiles the decode step on a GPU by itself; its continuous
batching as `hf_continuous` sets it; with `--bitsandbytes` also LLM.int8(). These are the baselines of the package, here
side by side and without engines of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from ...models.load import load_model
from .. import cheaper
from ..baselines import HFStaticBatch
from ..comparison import compare
from ..hf_continuous import HFContinuousBatch
from ..results import Result
from ..sweeps import frontier
from .common import parser, run, works


def measured(args: argparse.Namespace) -> Result:
    lm = load_model(args.model or f"shape:{args.shape}", device=args.device, dtype=args.dtype)
    asked = works(args, lm)
    most = max(args.batch) if args.workload == "batch" else min(args.running, len(asked[None].prompts))
    continuous = HFContinuousBatch(lm, most, max_batch_tokens=max(512, most))
    engines = [HFStaticBatch(lm, most), HFStaticBatch(lm, most, static_cache=True), continuous]
    if args.bitsandbytes:
        engines.append(("HF padded batch, bitsandbytes int8", HFStaticBatch(cheaper.bitsandbytes(lm), most)))
    if args.workload == "batch":
        lengths = {"prompt_len": args.prompt_len, "output_len": args.output_len}
        found = frontier(engines, args.batch, repeats=args.repeats, **lengths)
        return dataclasses.replace(found, notes=(*found.notes, f"{continuous.name}: {continuous.settings}"))
    work = asked[None]
    greedy = [dataclasses.replace(params, temperature=0.0) for params in work.params]  # as all baselines are
    return compare(*engines, workload=dataclasses.replace(work, params=greedy), repeats=args.repeats, show=False)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("hf", __doc__, "qwen2.5-7b")
    options.add_argument("--model", metavar="NAME", help="in place of a shape: a hub id, a folder or tiny-random")
    options.add_argument("--device", metavar="NAME", help="a GPU by default, if there is one")
    options.add_argument("--dtype", metavar="NAME", help="bfloat16, float16 or float32")
    options.add_argument("--running", type=int, default=32, metavar="N", help="of mixed and nano at once (%(default)s)")
    options.add_argument("--bitsandbytes", action="store_true", help="LLM.int8() too")
    return run(measured, options.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
