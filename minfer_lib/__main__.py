"""The engine from a shell: `minfer generate | chat | bench | quantize | info`, or `python -m minfer_lib ...`.

Invariant: standard output carries the answer (or the table, or the JSON) and nothing else; what is said about it goes
to standard error. An error of this package is one sentence there, in the words of the command line, and exit code 2, an
interrupt is 130, and nobody sees a traceback for their own mistake. All but `bench` works without the folder bench/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .errors import BadEnvironment, GenerationFailed, InvalidParameter, InvalidPrompt, MinferError, PromptTooLong
from .generation.options import add_sampling_options, in_options, sampling
from .models import host
from .models.environment import check_versions
from .models.names import folder_of, resolve_name

if TYPE_CHECKING:  # what needs torch is imported where it is used, so that --help is quick
    from .generation.params import SamplingParams
    from .generation.request import RequestOutput, StreamPiece
    from .models.load import LanguageModel

    Messages = list[dict[str, str]]

ENGINES = ("naive", "cached", "slots", "paged", "naive-int8", "cached-int8", "int8", "paged-int8")  # int8: over slots
NEWEST = "paged"
FAST = {"auto": "auto", "on": True, "off": False, "fused": "fused", "compiled": "compiled", "graph": "graph"}
HAS_BENCH = (Path(__file__).parent / "bench" / "cli.py").is_file()  # asked of the folder: imports may find another copy
INT8_MANIFEST = "int8.json"  # the file by which `save_int8` and `load_model` know a folder of theirs
CHAT_HELP = "/exit or Ctrl-D ends, /reset forgets the conversation, Ctrl-C stops an answer."
ENDED_BADLY = {"abort": 130, "error": 1}  # exit codes
REASONS = {
    "length": "(cut off at the longest length; see --max-tokens)",
    "abort": "(stopped)",
    "error": "(the model failed; `generate --json` shows the error)",
}


# -- commands ----------------------------------------------------------------------------------------------------------


def add_model_options(command: argparse.ArgumentParser, device: bool = True) -> None:
    """--model, --device and --dtype, the arguments of `load_model`; without --device for what runs on the CPU."""
    command.add_argument(
        "--model", metavar="NAME", help="hub id, folder, shape:NAME or tiny-random (default: MINFER_MODEL or SmolLM2)"
    )
    if device:
        command.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    command.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU)")


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    program = "python -m minfer_lib" if __name__ == "__main__" else "minfer"
    top = argparse.ArgumentParser(program, description="An LLM inference engine, built chapter by chapter")
    top.add_argument("--version", action="version", version=version_line())

    def commands_of(owner: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
        subparsers = owner.add_subparsers(required=True, metavar="COMMAND")

        def command(name: str, run: Callable[..., int] | None, text: str) -> argparse.ArgumentParser:
            parser = subparsers.add_parser(name, help=text, description=text)
            parser.set_defaults(run=run)
            return parser

        return command

    command = commands_of(top)
    one = command("generate", generate, "answer one prompt")
    one.add_argument("prompt", help="the text, or - for standard input; token ids for a model without a tokenizer")
    form = one.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="as a user's message (default for models with a template)")
    form.add_argument("--raw", action="store_true", help="as text to be continued, without a chat template")
    one.add_argument("--json", action="store_true", help="at the end, each answer as a record on a line of its own")
    one.add_argument("--stats", action="store_true", help="say how long it took")
    talk = command("chat", chat, f"talk with the model. {CHAT_HELP}")
    for answering in (one, talk):
        add_model_options(answering)
        answering.add_argument("--engine", choices=ENGINES, default=NEWEST, help=f"default: {NEWEST}")
        answering.add_argument(
            "--fast", choices=FAST, default="auto",
            help="for slots and paged: CUDA graphs with fused or compiled layers (default: auto, on with a GPU)",
        )  # fmt: skip
        answering.add_argument(
            "--kv-cache-dtype", choices=("int8",),
            help="for slots and paged: keys and values in 8 bits (default: in the model's dtype)",
        )  # fmt: skip
        answering.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    add_sampling_options(one)
    add_sampling_options(talk, without=("n", "logprobs"))
    add_quantize(command)
    command("info", info, "what is installed, and what this machine can do")
    if HAS_BENCH:
        from .bench.cli import add_bench

        add_bench(commands_of(command("bench", None, "measure the engines")), add_model_options)
    else:
        command("bench", no_bench, "not in this copy").add_argument("rest", nargs=argparse.REMAINDER)
    return top


def version_of(package: str) -> str:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "a copy" if package == "minfer" else "not installed"


def version_line() -> str:
    """What --version prints."""
    return f"minfer {version_of('minfer')}, torch {version_of('torch')}, transformers {version_of('transformers')}"


# -- running a command ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    if sys.stderr is None:  # closed, as by 2>&-; print would turn to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # What a terminal cannot show becomes a question mark, and what could not be read is refused by `check_readable`.
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "replace"), (sys.stdin, "surrogateescape")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)
    args = parser().parse_args(arguments)
    try:
        if sys.stdout is None:
            raise BadEnvironment("Standard output is closed, so that there is nowhere to write to. Leave out `>&-`.")
        check_versions()
        if hasattr(args, "model"):
            folder_of(resolve_name(args.model))  # a misspelt name is answered before torch is loaded
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: note(f"warning: {message}")  # no line of source
            code = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        return code
    except MinferError as error:
        note(f"minfer: {in_options(str(error), args)}")
        return 2
    except KeyboardInterrupt:
        note("")
        return 130
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing it at exit would fail again
        return 141
    except OSError as error:  # a full disk, a folder that may not be written
        note(f"minfer: {error}")
        return 2


def note(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def typed() -> TextIO:
    """Standard input. Raises `BadEnvironment` if it is closed."""
    if sys.stdin is None:
        raise BadEnvironment("This reads from standard input, which is closed. Leave out `<&-`.")
    return sys.stdin


def check_readable(*texts: str) -> None:
    """Raises `InvalidPrompt` for bytes that could not be read as text, which Python keeps as lone surrogates."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise InvalidPrompt(
            f"A text was given that cannot be read as {sys.getfilesystemencoding()}, the encoding of this terminal. "
            "Give it in that encoding, or set LC_ALL to another one (C.UTF-8, for instance)."
        ) from None


# -- generate and chat ------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> tuple[LanguageModel, Any]:
    """The model and the engine that were asked for."""
    from .engine.llm_engine import LLMEngine
    from .engine.serial import CachedEngine, NaiveEngine
    from .models.load import load_model
    from .quant.quantize import quantize_int8

    serial = {"naive": NaiveEngine, "cached": CachedEngine}
    kind = args.engine.removesuffix("int8").removesuffix("-") or "slots"
    if kind in serial and args.kv_cache_dtype is not None:
        raise InvalidParameter(
            f"kv_cache_dtype={args.kv_cache_dtype} was given for --engine {args.engine}, which has no such cache. Take "
            "--engine paged or slots, or leave it out."
        )
    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    if args.engine.endswith("int8") and lm.quantization is None:
        quantize_int8(lm, progress=sys.stderr.isatty())
    if kind in serial:
        return lm, serial[kind](lm)
    return lm, LLMEngine(lm, kv_cache=kind, kv_cache_dtype=args.kv_cache_dtype, fast=FAST[args.fast])


def prompt_of(lm: LanguageModel, text: str, system: Messages, *, raw: bool, chat: bool) -> str | list[int]:
    """A prompt as the engine takes it: in the chat template if the model has one, as it is with `raw`."""
    if lm.tokenizer is None:
        try:
            if ids := [int(part) for part in text.replace(",", " ").split()]:
                return ids
            raise ValueError("no ids at all")
        except ValueError:
            raise InvalidPrompt(
                f"{lm.name} has no tokenizer, so its prompt is a list of token ids such as '11 48 7'; "
                f"{text[:60]!r} is not."
            ) from None
    has_template = getattr(lm.tokenizer, "chat_template", None) is not None
    if raw or not (chat or system or has_template):
        return text
    return lm.chat_ids([*system, {"role": "user", "content": text}])


def asked_in(args: argparse.Namespace) -> tuple[Messages, SamplingParams]:
    """The beginning of a conversation, with a system message if one was given, and how to answer."""
    check_readable(args.system or "", *getattr(args, "stop", ()))
    return [{"role": "system", "content": args.system}] if args.system else [], sampling(args)


def generate(args: argparse.Namespace) -> int:
    """Answers as they come, or the records of them."""
    if args.raw and args.system:
        raise InvalidParameter(
            "--raw and --system were both given, and raw text has no place for a system message. Leave one of them out."
        )
    if hasattr(args, "logprobs") and not args.json:
        raise InvalidParameter("--logprobs was given, and only --json shows them. Add --json, or leave it out.")
    text = typed().read() if args.prompt == "-" else args.prompt
    check_readable(text)
    system, params = asked_in(args)
    if params.n > 1 and not params.temperature:
        print(f"--n {params.n} without --temperature: all answers are the same.", file=sys.stderr)
    lm, engine = load(args)
    prompt = prompt_of(lm, text, system, raw=args.raw, chat=args.chat)
    if args.json:
        outputs = engine.generate(prompt, params)
        ascii_only = "utf" not in (sys.stdout.encoding or "").lower()  # other encodings would turn letters into ?
        for output in outputs:
            print(json.dumps(record(output, lm, args.engine), ensure_ascii=ascii_only))
        reasons = [output.finish_reason for output in outputs]
    else:
        reasons = [reason for _, reason in speak(engine, lm, prompt, params, stats=args.engine if args.stats else "")]
    return max(ENDED_BADLY.get(reason, 0) for reason in reasons)


def record(output: RequestOutput, lm: LanguageModel, engine: str) -> dict[str, Any]:
    """An answer with its times, as JSON values."""
    times = output.metrics
    in_ms = {f"{key}_ms": getattr(times, f"{key}_s") for key in ("queue", "ttft", "tpot", "e2e")}
    values = {
        "model": lm.name,
        "engine": engine,
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": output.error,
        **{key: None if value is None else round(1e3 * value, 3) for key, value in in_ms.items()},
    }
    if output.logprobs is not None:  # JSON has no infinities: a token that cannot come has none
        values["logprobs"] = [{i: p if math.isfinite(p) else None for i, p in at.items()} for at in output.logprobs]
    return values


def speak(
    engine: Any, lm: LanguageModel, prompt: str | list[int], params: SamplingParams, *, stats: str = ""
) -> list[tuple[str, str]]:
    """Prints the first answer as it comes, then the others; returns the text and finish reason of each.

    The reason is "abort" if Ctrl-C stopped it. stats: the name of the engine, to say how long it took.
    """
    answers: list[list[StreamPiece]] = [[] for _ in range(params.n)]
    stamps, began = [], time.perf_counter()

    def say(pieces: Sequence[StreamPiece]) -> None:
        for piece in pieces:
            print(piece.text if lm.tokenizer else "".join(f"{i} " for i in piece.token_ids), end="", flush=True)

    def heading(index: int) -> None:
        if params.n > 1:
            note(f"(answer {index + 1} of {params.n})")

    pieces = engine.stream(prompt, params)
    heading(0)
    try:
        for piece in pieces:
            stamps.append(time.perf_counter() - began)
            answers[piece.index].append(piece)
            if piece.index == 0:
                say([piece])
    except KeyboardInterrupt:
        pieces.close()  # gives back what the request held
    said = []
    for index, parts in enumerate(answers):
        if index > 0:
            heading(index)
            say(parts)
        print(flush=True)
        reason = (parts[-1].finish_reason if parts else None) or "abort"
        if reason in REASONS:
            note(REASONS[reason])
        said.append(("".join(part.text for part in parts), reason))
    if stats and stamps:
        tokens = sum(len(part.token_ids) for parts in answers for part in parts)
        each = f", then {1e3 * (stamps[-1] - stamps[0]) / (tokens - 1):.1f} ms each" if tokens > 1 else ""
        note(f"({stats}: {tokens} token{'s' * (tokens != 1)}, the first after {stamps[0]:.2f} s{each})")
    return said


def chat(args: argparse.Namespace) -> int:
    """A conversation: each turn runs all of it again, in the model's chat template."""
    source = typed()
    system, params = asked_in(args)
    lm, engine = load(args)
    lm.chat_ids([*system, {"role": "user", "content": "Hello"}])  # a model without a template is refused now
    note(f"{lm.name} through {args.engine}. {CHAT_HELP}")
    turns: Messages = []
    while True:
        try:
            message = input("> " if source.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            note("")
            message = "/help"
        if message == "/exit":
            return 0
        if message == "/reset":
            turns = []
        elif message.startswith("/"):
            note(CHAT_HELP)
        elif message:
            asked = [*turns, {"role": "user", "content": message}]
            try:
                check_readable(message)
                prompt, kept = fitting(lm, system, asked, engine.max_model_len, params.max_tokens)
                if gone := len(asked) - len(kept):
                    note(f"(the conversation grew too long: the {gone} oldest messages are forgotten)")
                [(answer, _)] = speak(engine, lm, prompt, params)
            except (InvalidPrompt, GenerationFailed) as error:
                note(f"minfer: {in_options(str(error), args)}")
                continue
            turns = [*kept, {"role": "assistant", "content": answer}]


def fitting(
    lm: LanguageModel, system: Messages, turns: Messages, limit: int, wanted: int
) -> tuple[list[int], Messages]:
    """Token ids of a conversation, and its turns: the oldest are dropped until `wanted` more tokens have room.

    Raises `PromptTooLong` if the last message alone leaves no room within `limit` tokens.
    """
    room = min(wanted, limit // 2)
    while len(prompt := lm.chat_ids(system + turns)) + room > limit and len(turns) > 1:
        turns = turns[2:]  # a question with its answer
    if len(prompt) >= limit:
        raise PromptTooLong(f"This message takes {len(prompt)} tokens, and the limit is {limit}. Send a shorter one.")
    return prompt, turns


# -- quantize ---------------------------------------------------------------------------------------------------------


def add_quantize(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The command `quantize`."""
    parser = command("quantize", quantize, "put a model into int8 and keep it in a folder, for --model")
    parser.add_argument("folder", metavar="OUT", help="a new folder, or one that this command wrote before")
    parser.add_argument(
        "--activations", choices=("dynamic", "none"), default="dynamic",
        help="dynamic (default): rounded to int8 too, for CPUs; none: left as they are, for GPUs",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="the embedding and the output layer too")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="NAME",
        help="leave this layer as it is, e.g. down_proj or layers.0; may be given repeatedly",
    )  # fmt: skip
    add_model_options(parser, device=False)


def quantize(args: argparse.Namespace) -> int:
    """Quantises on the CPU; the report goes to standard error, the folder's name to standard output."""
    check_folder(args.folder)
    from .models.load import load_model
    from .quant.files import save_int8
    from .quant.quantize import HEAD, describe_int8, quantize_int8

    lm = load_model(args.model, device="cpu", dtype=args.dtype)
    skip = [*([] if args.all else [HEAD]), *args.keep]
    quantize_int8(lm, activations=args.activations, skip=skip, embedding=args.all, progress=sys.stderr.isatty())
    save_int8(lm, args.folder)
    note(f"{lm.name}: {describe_int8(lm)}")
    print(args.folder)
    return 0


def check_folder(name: str) -> None:
    """Raises `InvalidParameter` unless `save_int8` could write a folder of this name."""
    folder = Path(name).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))  # the root exists
    if not there.is_dir():
        problem = "is a file" if there == folder else f"would lie in {str(there)!r}, which is a file"
    elif there == folder and any(folder.iterdir()) and not (folder / INT8_MANIFEST).is_file():
        problem = "holds something else"
    elif not os.access(there.parent if there == folder else there, os.W_OK):
        problem = "may not be written"
    else:
        return
    raise InvalidParameter(f"The int8 model was to be written to {name!r}, which {problem}. Name a new folder.")


# -- info and bench ---------------------------------------------------------------------------------------------------


def info(args: argparse.Namespace) -> int:
    """Versions, what the machine has and what a container leaves of it, and which of our ways can run here."""
    import torch

    from .attention.backends import describe_backends
    from .engine.cache_size import available_bytes
    from .kernels.compiled_parts import why_not as no_compiled_parts
    from .models import packaged
    from .models.memory import GB
    from .quant.products import DYNAMIC, describe_products, why_not

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if packaged.is_intact(packaged.cache_root() / packaged.MODEL_NAME.lower()):
        state = "converted, ready to load"
    elif importlib.util.find_spec(packaged.PACKAGE.replace("-", "_")):
        state = "installed; it is converted when first loaded"
    else:
        state = "not installed; run `make model`"
    limit = host.memory_limit()
    kernels = f"torch: {reason}" if (reason := no_compiled_parts()) else "C"
    lines = {
        "minfer": version_of("minfer"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none that this torch can use",
        "cpu": f"{host.cpu_name()}; {', '.join(host.instruction_sets()) or 'instruction sets unknown'}",
        "threads": host.describe_threads(torch.get_num_threads()),
        "memory": f"{available_bytes(torch.device('cpu')) / GB:.1f} GB free"
        + (f"; a container allows {limit / GB:.1f} GB in all" if limit else ""),
        "default model": f"{packaged.MODEL_NAME}: {state}",
        "MINFER_MODEL": os.environ.get("MINFER_MODEL") or "not set",
        "cache": str(packaged.cache_root()),
        "engines": f"{', '.join(ENGINES)} (used by default: {NEWEST})",
        "attention": describe_backends(device, torch.float32),
        "fast path": "on by default: fused layers where they can be, else compiled, in CUDA graphs"
        if device.type == "cuda"
        else f"off by default without a GPU; --fast on fuses layers, with kernels in {kernels}",
        "int8": describe_products(device.type),
    }
    lines |= {f"int8 without {name}": reason for name in DYNAMIC if (reason := why_not(name))}
    if HAS_BENCH:
        from .bench.machine import commit, read_bandwidth

        lines["commit"] = commit() or "none: not part of a git repository"
        lines["read bandwidth"] = f"{read_bandwidth(device) / 1e9:.1f} GB/s, measured just now"
    for name, value in lines.items():
        print(f"{name:<{max(map(len, lines))}}  {host.home_as_tilde(value)}")
    return 0


def no_bench(args: argparse.Namespace) -> int:
    """Says what a copy without bench/ lacks."""
    raise BadEnvironment("This copy of minfer_lib has no folder bench/, which measures. Copy it too, from the project.")


if __name__ == "__main__":
    sys.exit(main())
