"""The engine from a shell: `python -m minfer_lib info | generate | chat | quantize | bench`.

Invariant: standard output carries the answer (or the table, or the JSON) and nothing else; what is said about it goes
to standard error. An error of this package is one sentence there and exit code 2, an interrupt is 130, and nobody sees
a traceback for a mistake of his own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from .bench.cli import add_commands, add_model_options
from .bench.rungs import make_engine, names, newest
from .errors import BadEnvironment, GenerationFailed, InvalidParameter, InvalidPrompt, MinferError
from .generation.conversation import fitting, prompt_of, system_message
from .models.environment import check_versions
from .models.names import asked_for, folder_of

if TYPE_CHECKING:  # what needs torch is imported where it is used, so that --help is quick
    from .generation.params import SamplingParams
    from .generation.request import RequestOutput
    from .models.load import LanguageModel

CHAT_HELP = "/exit or Ctrl-D ends, /reset forgets the conversation, Ctrl-C stops an answer."
ENDED_BADLY = {"abort": 130, "error": 1}  # exit codes
REASONS = {
    "length": "(cut off at the longest length; see --max-tokens)",
    "abort": "(stopped)",
    "error": "(the model failed; `generate --json` shows the error)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    if sys.stderr is None:  # closed, as by 2>&-; print would turn to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal cannot show becomes a question mark, not an error
            stream.reconfigure(errors="replace")
    args = parser().parse_args(arguments)
    try:
        if sys.stdout is None:
            raise BadEnvironment("Standard output is closed, so that there is nowhere to write to. Leave out `>&-`.")
        check_versions()
        if hasattr(args, "model"):
            folder_of(asked_for(args.model))  # a misspelt name is answered before torch is loaded
        code = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        return code
    except MinferError as error:
        note(f"minfer: {error}")
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


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        "python -m minfer_lib", description="An LLM inference engine, built chapter by chapter"
    )

    def commands_of(owner: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
        subparsers = owner.add_subparsers(required=True, metavar="COMMAND")

        def command(name: str, run: Callable[..., int] | None, text: str) -> argparse.ArgumentParser:
            made = subparsers.add_parser(name, help=text, description=text)
            made.set_defaults(run=run)
            return made

        return command

    command = commands_of(top)
    one = command("generate", generate, "answer one prompt")
    one.add_argument("prompt", help="the text, or - for standard input; token ids for a model without a tokenizer")
    form = one.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="as a user's message (default for models with a template)")
    form.add_argument("--raw", action="store_true", help="as text to be continued, without a chat template")
    one.add_argument("--json", action="store_true", help="print the whole record at the end instead of the text")
    one.add_argument("--stats", action="store_true", help="say how long it took")
    add_answer_options(one)
    add_answer_options(command("chat", chat, f"talk with the model. {CHAT_HELP}"))
    add_commands(command, lambda name, text: commands_of(command(name, None, text)))
    return top


def add_answer_options(made: argparse.ArgumentParser) -> None:
    """What `generate` and `chat` have in common: the model, the engine, and how to sample."""
    add_model_options(made)
    made.add_argument("--engine", choices=names(), default=newest(), help=f"default: {newest()}")
    made.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    made.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens (default: %(default)s)")
    made.add_argument("--temperature", type=float, default=0.0, help="0, the default, always takes the likeliest token")
    made.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens (0, the default: all)")
    made.add_argument("--top-p", type=float, default=1.0, help="only the likeliest tokens that make up this share")
    made.add_argument("--min-p", type=float, default=0.0, help="only tokens at least so likely beside the likeliest")
    made.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: less of what was said already")
    made.add_argument("--seed", type=int, help="the same seed gives the same answer")
    made.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The options as `SamplingParams`, which checks them."""
    from .generation.params import SamplingParams

    fields = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return SamplingParams(**{name: getattr(args, name) for name in fields})


def load(args: argparse.Namespace) -> tuple[LanguageModel, Any]:
    """The model and the engine that were asked for."""
    from .models.load import load_model

    lm = load_model(args.model, device=args.device, dtype=args.dtype)
    return lm, make_engine(args.engine, lm, in_place=True)  # nobody needs the model as it was


def generate(args: argparse.Namespace) -> int:
    """One answer as it comes, or the record of it."""
    if args.raw and args.system:
        raise InvalidParameter(
            "--raw and --system were both given, and raw text has no place for a system message. Leave one of them out."
        )
    text = typed().read() if args.prompt == "-" else args.prompt
    params = sampling(args)
    lm, engine = load(args)
    prompt = prompt_of(lm, text, system=args.system, raw=args.raw, chat=args.chat)
    if args.json:
        output = engine.generate(prompt, params)[0]
        ascii_only = "utf" not in (sys.stdout.encoding or "").lower()  # other encodings would turn letters into ?
        print(json.dumps(record(output, lm, args.engine), ensure_ascii=ascii_only))
        return ENDED_BADLY.get(output.finish_reason, 0)
    reason = speak(engine, lm, prompt, params, stats=args.stats)[1]
    return ENDED_BADLY.get(reason, 0)


def typed() -> TextIO:
    """Standard input. Raises `BadEnvironment` if it is closed."""
    if sys.stdin is None:
        raise BadEnvironment("This reads from standard input, which is closed. Leave out `<&-`.")
    return sys.stdin


def record(output: RequestOutput, lm: LanguageModel, engine: str) -> dict[str, Any]:
    """An answer with its times, as JSON values."""
    times = output.metrics
    in_ms = {f"{key}_ms": getattr(times, f"{key}_s") for key in ("queue", "ttft", "tpot", "e2e")}
    return {
        "model": lm.name,
        "engine": engine,
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": output.error,
        **{key: None if value is None else round(1e3 * value, 3) for key, value in in_ms.items()},
    }


def speak(
    engine: Any, lm: LanguageModel, prompt: Any, params: SamplingParams, *, stats: bool = False
) -> tuple[str, str]:
    """Prints an answer as it comes; returns its text and its finish reason, which is "abort" if Ctrl-C stopped it."""
    text, reason, stamps, tokens, known, began = "", "abort", [], 0, None, time.perf_counter()
    # the baselines do not stream: their answer is one piece
    stream = engine.stream if hasattr(engine, "stream") else engine.generate
    pieces = (piece for piece in stream(prompt, params))
    try:
        for piece in pieces:
            tokens, text = tokens + len(piece.token_ids), text + piece.text
            stamps.append(time.perf_counter() - began)
            known = getattr(piece, "metrics", None)  # a whole answer brings its own times
            print(piece.text if lm.tokenizer else "".join(f"{i} " for i in piece.token_ids), end="", flush=True)
            reason = piece.finish_reason or reason
    except KeyboardInterrupt:
        pieces.close()  # gives back what the request held
    print(flush=True)
    if reason in REASONS:
        note(REASONS[reason])
    if stats and stamps:
        first, each = stamps[0], (stamps[-1] - stamps[0]) / (tokens - 1) if len(stamps) > 1 and tokens > 1 else None
        if known is not None:
            first, each = known.ttft_s, known.tpot_s
        start = "the time of the first is not known" if first is None else f"the first after {first:.2f} s"
        pace = "" if each is None else f", then {1e3 * each:.1f} ms each"
        note(f"({engine.name}: {tokens} tokens, {start}{pace})")
    return text, reason


def chat(args: argparse.Namespace) -> int:
    """A conversation: each turn runs all of it again, in the model's chat template."""
    source = typed()
    params = sampling(args)
    lm, engine = load(args)
    system, turns = system_message(args.system), []
    lm.chat_ids([*system, {"role": "user", "content": "Hello"}])  # a model without a template is refused now
    note(f"{lm.name} through {args.engine}. {CHAT_HELP}")
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
                prompt, kept = fitting(lm, system, asked, engine.max_model_len, params.max_tokens)
                if gone := len(asked) - len(kept):
                    note(f"(the conversation grew too long: the {gone} oldest messages are forgotten)")
                answer, _ = speak(engine, lm, prompt, params)
            except (InvalidPrompt, GenerationFailed) as error:
                note(f"minfer: {error}")
                continue
            turns = [*kept, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    sys.exit(main())
