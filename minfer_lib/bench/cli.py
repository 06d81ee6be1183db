"""The commands `info` and `bench` of `python -m minfer_lib`, and `quantize` with `int8_cli`.

Invariant: `add_commands` needs neither torch nor transformers, so that --help is quick; what runs imports them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadEnvironment, InvalidParameter, one_of
from .int8_cli import add_quality, add_quantize, kernel_lines
from .rungs import RUNNING, UNEQUAL, find, ladder, names, newest

if TYPE_CHECKING:
    from .results import Results

UNEQUAL_TEXT = "{n} of unequal lengths, {running} at once".format(**UNEQUAL, running=RUNNING)
PICTURES = (".svg", ".png", ".pdf")


def add_model_options(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """--model, --device and --dtype, the arguments of `load_model`; without --device for what runs on the CPU."""
    parser.add_argument(
        "--model", metavar="NAME", help="hub id, folder, shape:NAME or tiny-random (default: MINFER_MODEL or SmolLM2)"
    )
    if device:
        parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU)")


def add_commands(
    command: Callable[..., argparse.ArgumentParser], group: Callable[..., Callable[..., argparse.ArgumentParser]]
) -> None:
    """Adds `info`, `quantize` and `bench ...`: `command(name, run, text)` makes one, `group(name, text)` many."""
    command("info", info, "what is installed, and what this machine can do")
    add_model_options(add_quantize(command), device=False)
    bench = group("bench", "measure the engines")
    steps = bench("ladder", run_ladder, "all engines so far on one workload")
    add_model_options(steps)
    steps.add_argument("--engines", metavar="A,B", help=f"some of {', '.join(names())}; the first is the baseline")
    steps.add_argument("--batch", type=int, metavar="N", help=f"N requests of equal length; without it, {UNEQUAL_TEXT}")
    steps.add_argument("--prompt-len", type=int, metavar="N", help="tokens of each prompt, if equal (default: 64)")
    steps.add_argument("--output-len", type=int, metavar="N", help="tokens of each answer, if equal (default: 64)")
    steps.add_argument("--repeats", type=int, default=3, help="timed runs of each engine (default: %(default)s)")
    steps.add_argument("--memory", action="store_true", help="on a CPU: peak memory too, in a fresh process for each")
    kept = add_quality(bench)
    add_model_options(kept)
    for each in (steps, kept):
        each.add_argument("--json", metavar="FILE", help="keep the results, with where they come from")
    shown = bench("show", show_results, "a table from kept results")
    shown.add_argument("file", help="as --json wrote it")
    for each in (steps, shown):
        each.add_argument("--all", action="store_true", help="all columns: percentiles, and what of the cache was used")
    for each in (steps, kept, shown):
        each.add_argument("--svg", metavar="FILE", help="draw the results to a file")


def info(args: argparse.Namespace) -> int:
    """Versions, device, model, the read bandwidth that rooflines stand on, and the kernels."""
    import torch

    from ..attention.backends import describe_kernels
    from ..models import packaged
    from . import machine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = machine.provenance(device)
    if packaged.is_intact(packaged.cache_root() / packaged.MODEL_NAME.lower()):
        state = "converted, ready to load"
    elif importlib.util.find_spec(packaged.PACKAGE.replace("-", "_")):
        state = "installed; it is converted when first loaded"
    else:
        state = "not installed; run `make model`"
    lines = {
        "minfer": facts["minfer"] or "a copy, not installed",
        "commit": facts["commit"] or "none: not part of a git repository",
        "python": facts["python"],
        "torch": facts["torch"],
        "transformers": facts["transformers"],
        "gpu": facts["gpu"] or "none that this torch can use",
        "cpu": f"{facts['cpu']}; {facts['cores']} cores, torch uses {facts['threads']} threads",
        "read bandwidth": f"{machine.read_bandwidth(device) / 1e9:.1f} GB/s, measured just now",
        "default model": f"{packaged.MODEL_NAME}: {state}",
        "MINFER_MODEL": os.environ.get("MINFER_MODEL") or "not set",
        "cache": home_as_tilde(str(packaged.cache_root())),
        "engines": f"{', '.join(names())} (used by default: {newest()})",
        "paged attention": describe_kernels(torch.device(device), torch.float32),
        **kernel_lines(device),
    }
    for name, value in lines.items():
        print(f"{name:<{max(map(len, lines))}}  {value}")
    return 0


def home_as_tilde(path: str) -> str:
    """A path that can be shown to others: ~ for the home folder."""
    home = os.path.expanduser("~").rstrip(os.sep)
    return "~" + path[len(home) :] if home and (path + os.sep).startswith(home + os.sep) else path


def run_ladder(args: argparse.Namespace) -> int:
    """Measures the ladder and prints it; keeps and draws it if asked."""
    wanted = [name.strip() for name in args.engines.split(",") if name.strip()] if args.engines else None
    for name in wanted or ():
        find(name)  # a mistake is answered before torch is loaded, and long before something was measured in vain
    check_target(args.json)
    check_picture(args.svg)
    from ..models.load import load_model
    from .wide_table import scoreboard
    from .workloads import fixed_lengths

    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    asked = {"batch": args.batch, "prompt_len": args.prompt_len, "output_len": args.output_len}
    asked = {name: value for name, value in asked.items() if value is not None}
    workload = fixed_lengths(lm, **asked) if asked else None
    found = ladder(lm, wanted, workload, repeats=args.repeats, memory=args.memory, show=False)
    print(scoreboard(found) if args.all else found)
    if args.json:
        found.save(args.json)
    draw(found, args.svg)
    return 0


def show_results(args: argparse.Namespace) -> int:
    """Prints the table of a results file, and draws it if asked."""
    check_picture(args.svg)
    from .results import Comparison, load
    from .wide_table import scoreboard

    found = load(args.file)
    if args.all and not isinstance(found, Comparison):
        raise InvalidParameter(f"All columns of {args.file!r} were asked for: only a ladder has more than are shown.")
    draw(found, args.svg)
    print(scoreboard(found) if args.all else found)
    return 0


def draw(found: Results, name: str | None) -> None:
    """Draws results to a file if one was named. Raises `InvalidParameter` for those that have no picture."""
    if name is not None:
        if not hasattr(found, "plot"):
            raise InvalidParameter(f"A picture was to be drawn to {name!r}: these results are tables only.")
        Path(name).absolute().parent.mkdir(parents=True, exist_ok=True)
        found.plot(save=name)


def check_target(name: str | None) -> None:
    """Raises `InvalidParameter` unless a file of this name could be written, its folder being made if need be."""
    if name is None:
        return
    path = Path(name).absolute()
    folder = next(parent for parent in path.parents if os.path.lexists(parent))  # the root exists
    if not path.name or path.is_dir():
        problem = "is a folder"
    elif not folder.is_dir():
        problem = f"would lie in {str(folder)!r}, which is a file"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "may not be written"
    else:
        return
    raise InvalidParameter(f"The results were to be written to {name!r}, which {problem}. Name another file.")


def check_picture(name: str | None) -> None:
    """Raises `InvalidParameter` or `BadEnvironment` unless a picture of this name could be drawn."""
    if name is None:
        return
    check_target(name)
    if Path(name).suffix.lower() not in PICTURES:
        raise InvalidParameter(f"A picture was to be drawn to {name!r}: its name must end in {one_of(PICTURES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadEnvironment("Drawing needs matplotlib, which is not installed. Run `pip install matplotlib`.")
