"""The commands `minfer bench ladder | quality | show`.

Invariant: `add_bench` needs neither torch nor transformers, so that --help is quick, and a mistake that can be seen
without them is answered before they are loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadEnvironment, InvalidParameter, UnsupportedModel, one_of
from .rungs import find, ladder, names

if TYPE_CHECKING:
    from .results import Result

PICTURES = (".svg", ".png", ".pdf")


def add_bench(bench: Callable[..., argparse.ArgumentParser], add_model_options: Callable[..., None]) -> None:
    """Adds the commands: `bench(name, run, text)` makes one, `add_model_options(parser)` adds those of `load_model`."""
    steps = bench(
        "ladder", run_ladder, "all engines so far on one workload; Ctrl-C prints what was measured until then"
    )
    add_model_options(steps)
    steps.add_argument("--engines", metavar="A,B", help=f"some of {', '.join(names())}; the first is the baseline")
    steps.add_argument(
        "--batch", type=int, metavar="N", help="N requests of equal length; without it, the course workload"
    )
    steps.add_argument("--prompt-len", type=int, metavar="N", help="tokens of each prompt, if equal (default: 64)")
    steps.add_argument("--output-len", type=int, metavar="N", help="tokens of each answer, if equal (default: 64)")
    steps.add_argument(
        "--repeats", type=int, help="timed runs of each (default: until they agree within 10 %%, at most 10)"
    )
    steps.add_argument("--memory", action="store_true", help="on a CPU: peak memory too, in a fresh process for each")
    kept = bench("quality", run_quality, "what int8 changes in a model's predictions")
    kept.add_argument("--tokens", type=int, help="tokens of the bundled text to read (default: 8192)")
    kept.add_argument("--window", type=int, default=512, help="tokens seen at once (default: %(default)s)")
    add_model_options(kept)
    for command in (steps, kept):
        command.add_argument("--json", metavar="FILE", help="keep the results, with where they come from")
    shown = bench("show", show_results, "a table from kept results")
    shown.add_argument("file", help="as --json wrote it")
    for command in (steps, shown):
        command.add_argument(
            "--all", action="store_true", help="all columns: percentiles, and what of the cache was used"
        )
    for command in (steps, kept, shown):
        command.add_argument("--svg", metavar="FILE", help="draw the results to a file")


def run_ladder(args: argparse.Namespace) -> int:
    """Measures the ladder and prints it; keeps and draws it if asked. An interrupt ends it with the rows there are."""
    wanted = [name.strip() for name in args.engines.split(",") if name.strip()] if args.engines else None
    for name in wanted or ():
        find(name)  # a mistake is answered before torch is loaded, and long before something was measured in vain
    check_target(args.json)
    check_picture(args.svg)
    from ..models.load import load_model
    from .comparison import Interrupted
    from .tables import text
    from .workloads import fixed_lengths

    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    asked = {"batch": args.batch, "prompt_len": args.prompt_len, "output_len": args.output_len}
    asked = {name: value for name, value in asked.items() if value is not None}
    workload = fixed_lengths(lm, **asked) if asked else None
    code = 0
    try:
        found = ladder(lm, wanted, workload, repeats=args.repeats, memory=args.memory, show=False)
    except Interrupted as interrupted:
        found, code = interrupted.comparison, 130
    print(text(found, args.all))
    if args.json:
        found.save(args.json)
    draw(found, args.svg)
    return code


def run_quality(args: argparse.Namespace) -> int:
    """The model against copies of it in int8: by `quantize_int8` in both ways, and by bitsandbytes if it is there."""
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
    found = quality(lm, models, tokens=args.tokens, window=args.window)
    print(found)
    if args.json:
        found.save(args.json)
    draw(found, args.svg)
    return 0


def show_results(args: argparse.Namespace) -> int:
    """Prints the table of a results file, and draws it if asked."""
    check_picture(args.svg)
    from .results import load
    from .tables import text

    found = load(args.file)
    draw(found, args.svg)
    print(text(found, args.all))
    return 0


def draw(found: Result, name: str | None) -> None:
    """Draws a result to a file if one was named. Raises `InvalidParameter` for a kind that has no picture."""
    if name is not None:
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
