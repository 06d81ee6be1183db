"""The commands `quantize` and `bench quality` of `python -m minfer_lib`, and what `info` says of int8.

Invariant: as for the other commands, adding them needs neither torch nor transformers, and a mistake that can be seen
without them is answered before they are loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import BadEnvironment, InvalidParameter, UnsupportedModel

MANIFEST = "int8.json"  # the file by which `save_int8` and `load_model` know a folder of theirs


def add_quantize(command: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds `quantize`; returns its parser, for --model and --dtype."""
    made = command("quantize", run_quantize, "put a model into int8 and keep it in a folder, for --model")
    made.add_argument("folder", metavar="OUT", help="a new folder, or one that this command wrote before")
    made.add_argument(
        "--activations", choices=("dynamic", "none"), default="dynamic",
        help="dynamic (default): rounded to int8 too, for processors; none: left as they are, for GPUs",
    )  # fmt: skip
    made.add_argument("--all", action="store_true", help="the embedding and the output layer too")
    made.add_argument(
        "--keep", action="append", default=[], metavar="NAME",
        help="leave this layer as it is, e.g. down_proj or layers.0; may be given repeatedly",
    )  # fmt: skip
    return made


def run_quantize(args: argparse.Namespace) -> int:
    """Quantises on the CPU; the report goes to standard error, the folder's name to standard output."""
    check_folder(args.folder)
    from ..models.load import load_model
    from ..quant.files import save_int8
    from ..quant.quantize import HEAD, describe_int8, quantize_int8

    lm = load_model(args.model, device="cpu", dtype=args.dtype)
    skip = [*([] if args.all else [HEAD]), *args.keep]
    quantize_int8(lm, activations=args.activations, skip=skip, embedding=args.all, progress=sys.stderr.isatty())
    save_int8(lm, args.folder)
    print(f"{lm.name}: {describe_int8(lm)}", file=sys.stderr)
    print(args.folder)
    return 0


def check_folder(name: str) -> None:
    """Raises `InvalidParameter` unless `save_int8` could write a folder of this name."""
    folder = Path(name).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))  # the root exists
    if not there.is_dir():
        problem = "is a file" if there == folder else f"would lie in {str(there)!r}, which is a file"
    elif there == folder and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        problem = "holds something else"
    elif not os.access(there.parent if there == folder else there, os.W_OK):
        problem = "may not be written"
    else:
        return
    raise InvalidParameter(f"The int8 model was to be written to {name!r}, which {problem}. Name a new folder.")


def add_quality(command: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds `quality` to the group `bench`; returns its parser, for what the other benchmarks have too."""
    made = command("quality", run_quality, "what int8 changes in a model's predictions")
    made.add_argument("--tokens", type=int, help="tokens of the bundled text to read (default: 8192)")
    made.add_argument("--window", type=int, default=512, help="tokens seen at once (default: %(default)s)")
    return made


def run_quality(args: argparse.Namespace) -> int:
    """The model against copies of it in int8: by `quantize_int8` in both ways, and by bitsandbytes if it is there."""
    from .cli import check_picture, check_target, draw

    check_target(args.json)
    check_picture(args.svg)
    from ..models.load import load_model
    from . import cheaper
    from .quality_scores import windows_of
    from .quality_table import quality

    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    windows_of([lm], args.tokens, args.window, None, None)  # lengths that are not possible, before the work
    models = {
        "int8 dynamic": cheaper.int8(lm, activations="dynamic"),
        "int8 weight-only": cheaper.int8(lm, activations="none"),
    }
    try:
        models["bitsandbytes int8"] = cheaper.bitsandbytes(lm)
    except (BadEnvironment, UnsupportedModel) as error:
        print(f"bitsandbytes int8 left out: {error}", file=sys.stderr)
    found = quality(lm, models, tokens=args.tokens, window=args.window, progress=sys.stderr.isatty())
    print(found)
    if args.json:
        found.save(args.json)
    draw(found, args.svg)
    return 0


def kernel_lines(device: str) -> dict[str, str]:
    """For `info`: which int8 kernels this machine can use, how fast, the chosen ones, and why not the others."""
    import torch

    from ..quant.products import DYNAMIC, WEIGHT_ONLY, choose, timings, usable
    from .machine import dtype_name

    lines = {"int8 kernels": "microseconds for a layer of 1,024 x 1,024, mean of 1, 8 and 32 tokens; * is used"}
    for dynamic, kind in ((True, "int8 dynamic"), (False, "int8 weight-only")):
        for dtype in (torch.float32, torch.bfloat16):
            times = timings(dynamic, dtype, torch.get_num_threads())
            used = choose(dynamic, dtype, torch.device("cpu")).name
            each = [f"{name}{'*' * (name == used)} {times[name]:,.0f}" for name in sorted(times, key=times.__getitem__)]
            lines[f"{kind}, {dtype_name(dtype)}"] = ", ".join(each)
    if device == "cuda":
        from ..kernels.cuda import triton_product

        weight_only = "triton" if triton_product() is not None else "plain torch, since Triton is not installed"
        of_gpu = choose(True, torch.bfloat16, torch.device("cuda")).name
        lines["int8 on the GPU"] = f"weight-only {weight_only}, dynamic {of_gpu}"
    home = os.path.expanduser("~").rstrip(os.sep)
    for name in dict.fromkeys(kernel.name for kernel in (*DYNAMIC, *WEIGHT_ONLY)):
        if isinstance(reason := usable(name), str):
            lines[f"int8 without {name}"] = reason.replace(home, "~") if home else reason
    return lines
