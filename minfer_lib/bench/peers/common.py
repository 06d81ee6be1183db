"""What all peers share: the workloads, how a run is timed, and how it is kept.

Invariant: a peer runs the requests that our engines run, as many at once, with EOS ignored, and is timed from the
outside: one run that makes a single token a request gives the time to the first token, the run itself the rest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import BadEnvironment, MinferError
from ...models import hf_compat
from ...models.shapes import shape_config
from ..machine import provenance, synchronize, version
from ..metrics import Run, mean_kv_tokens
from ..results import Result, Row
from ..watch import Watch
from ..workloads import Workload, fixed_lengths, mixed_lengths, nano_vllm


@dataclass(frozen=True)
class Sizes:
    """What a workload has to know of a model that is not loaded here: its prompts are random ids."""

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer: None = None
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Peer:
    """A system under measurement.

    generate: (prompts, tokens to make of each, temperature) -> tokens made of each; all requests are there at once.
    settings: a line about how it was set. packages: whose versions are kept.
    """

    name: str
    sizes: Sizes
    settings: str
    generate: Callable[[list[list[int]], list[int], float], list[int]]
    packages: Sequence[str]
    device: torch.device
    dtype: str
    more: dict[str, Any] = field(default_factory=dict)  # provenance


def parser(name: str, text: str, default_shape: str | None = None) -> argparse.ArgumentParser:
    """The options that all peers have; `default_shape` for those that run a shape."""
    made = argparse.ArgumentParser(prog=f"python -m minfer_lib.bench.peers.{name}", description=text.splitlines()[0])
    if default_shape:
        made.add_argument("--shape", default=default_shape, help="a public model's shape, random weights (%(default)s)")
    made.add_argument(
        "--workload", choices=("batch", "mixed", "nano"), default="batch",
        help="batch: requests of equal lengths; mixed: 32 of 16 to 128 tokens; nano: the 256 of nano-vllm's bench.py",
    )  # fmt: skip
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="requests at once (1 8)")
    made.add_argument("--prompt-len", type=int, default=15, metavar="N", help="tokens, of batch (%(default)s)")
    made.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens, of batch (%(default)s)")
    made.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (%(default)s)")
    made.add_argument("--json", metavar="FILE", help="keep the results; `minfer bench show FILE` prints them")
    return made


def peer_module(name: str, install: str) -> Any:
    """The peer's own module. Raises `BadEnvironment` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadEnvironment(f"{name} cannot be imported ({error}). {install}") from error


def shape_folder(shape: str, folder: str | Path) -> Sizes:
    """Writes a shape's config.json to a folder, as other systems read it, and returns its sizes."""
    config = shape_config(shape)
    values = config.to_dict() | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    values["architectures"] = [hf_compat.causal_class_name(config)]
    (Path(folder) / "config.json").write_text(json.dumps(values))
    return Sizes(f"shape:{shape}", config.vocab_size, config.max_position_embeddings)


def works(args: argparse.Namespace, sizes: Sizes) -> dict[float | None, Workload]:
    """The workloads that were asked for, by the requests at once; one of unequal lengths has no such number."""
    if args.workload == "batch":
        return {float(n): fixed_lengths(sizes, n, args.prompt_len, args.output_len) for n in args.batch}
    return {None: mixed_lengths(sizes, 32) if args.workload == "mixed" else nano_vllm(sizes.vocab_size)}


def measure(peer: Peer, args: argparse.Namespace) -> Result:
    """Every workload that was asked for: once to warm up, then `--repeats` runs that are all kept."""
    rows, asked = [], works(args, peer.sizes)
    for x, work in asked.items():
        timed_run(peer, work)
        rows.append(Row(peer.name, tuple(timed_run(peer, work) for _ in range(args.repeats)), x=x))
    facts = provenance(peer.device) | {"model": peer.sizes.name, "dtype": peer.dtype, "commit": None} | peer.more
    facts |= {package: version(package) for package in peer.packages}
    last = list(asked.values())[-1]
    return Result("frontier" if args.workload == "batch" else "ladder", rows, last.record(), facts, (peer.settings,))


def timed_run(peer: Peer, work: Workload) -> Run:
    """One run, with one of single tokens before it."""
    lengths = [params.max_tokens for params in work.params]
    temperature = work.params[0].temperature
    first, _ = _seconds(peer, work, [1] * len(lengths), temperature)
    watch = Watch()
    wall, made = _seconds(peer, work, lengths, temperature)
    disturbance = watch.seen()
    equal = len(set(lengths)) == 1  # else a request's own times cannot be told from outside
    count, each = len(lengths), lengths[0]
    tpot = (1e3 * (wall - first) / (each - 1),) * count if equal and each > 1 else ()
    return Run(
        requests=count,
        failed=sum(found != wanted for found, wanted in zip(made, lengths, strict=True)),
        prompt_tokens=sum(work.prompt_lens),
        output_tokens=sum(made),
        wall_s=wall,
        ttft=(1e3 * first,) * count if equal else (),
        tpot=tpot,
        e2e=(1e3 * wall,) * count if equal else (),
        concurrency=float(count) if equal else 1.0,
        kv_tokens=mean_kv_tokens(list(zip(work.prompt_lens, lengths, strict=True))),
        **disturbance.figures(),
    )


def _seconds(peer: Peer, work: Workload, lengths: list[int], temperature: float) -> tuple[float, list[int]]:
    synchronize(peer.device)
    began = time.perf_counter()
    made = peer.generate(work.prompts, lengths, temperature)
    synchronize(peer.device)
    return time.perf_counter() - began, made


def run(measured: Callable[[argparse.Namespace], Result], args: argparse.Namespace) -> int:
    """Measures, prints and keeps; a sentence and exit code 1 where the peer or its hardware is missing."""
    try:
        result = measured(args)
    except MinferError as error:
        print(error)
        return 1
    print(result)
    if args.json:
        result.save(args.json)
    return 0
