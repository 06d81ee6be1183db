"""When requests come: all at once, at random moments of a given rate, or as somebody recorded them.

Invariant: arrivals are seconds from the start of a run, one for each request, and a function of the numbers they were
asked with. They are fixed before the run begins and do not wait for the system under load: a slow one gets the next
request at the same moment as a fast one (an open loop). A client that waits for an answer before it sends the next
request would spare a slow server the queue that it has earned.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter, shown
from ..generation.params import SamplingParams
from .results import write_whole
from .settings import fast_mode, shorten
from .workloads import Workload, prompts_of

if TYPE_CHECKING:
    from ..models.load import LanguageModel

TRACE_FORMAT = (
    "A trace is a JSON list with an object for each request: arrival_s (seconds from the start), prompt_len (tokens) "
    "or prompt_token_ids (a list of ids), and output_len (tokens)."
)
FIELDS = {"arrival_s", "prompt_len", "prompt_token_ids", "output_len"}


def all_at_once(n: int) -> tuple[float, ...]:
    """`n` requests that are all there at the start."""
    return (0.0,) * _count(n)


def poisson_arrivals(n: int, rate: float, seed: int = 0) -> tuple[float, ...]:
    """`n` moments of a Poisson process with `rate` requests a second: the gaps between them, the first one included,
    are independent and exponentially distributed with mean 1 / rate.

    The same seed gives the same pattern at every rate, only stretched in time, so that a curve over rates compares like
    with like. rate=math.inf is all at once. Raises `InvalidParameter` for a rate of 0 or less.
    """
    known = isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0
    if not known or (isinstance(rate, int) and rate > sys.float_info.max):
        raise InvalidParameter(f"rate={shown(rate)} is not possible: it must be requests a second, more than 0.")
    rng = random.Random(seed)  # of Python, not of torch: the same numbers on every version and device
    moments, now = [], 0.0
    for _ in range(_count(n)):
        now += rng.expovariate(1.0)
        moments.append(now / rate)
    return tuple(moments)


def read_trace(path: str | os.PathLike[str], lm: LanguageModel) -> Workload:
    """A workload with arrivals from a JSON file: a list with an object for each request, for example

        [{"arrival_s": 0.0, "prompt_len": 64, "output_len": 32},
         {"arrival_s": 0.8, "prompt_token_ids": [17, 4, 256], "output_len": 16}]

    Prompts of which only the length is known are cut from the bundled book. Answers are as long as asked: EOS is
    ignored. Fast mode shortens the lengths, not the times. Raises `InvalidParameter` for anything else, with the number
    of the entry.
    """
    path = Path(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(
            f"A trace was to be read from {path.name!r}, which is not there or is no JSON: {error}. {TRACE_FORMAT}"
        ) from error
    if not isinstance(entries, list) or not entries:
        raise InvalidParameter(f"{path.name}: a list with at least one request was expected. {TRACE_FORMAT}")
    for place, entry in enumerate(entries):
        if problem := _problem(entry, lm):
            raise InvalidParameter(f"{path.name}, entry {place}: {problem}. {TRACE_FORMAT}")
    known = [entry.get("prompt_token_ids") for entry in entries]
    lengths = [shorten(len(ids) if ids else entry["prompt_len"]) for ids, entry in zip(known, entries, strict=True)]
    cut = iter(prompts_of(lm, [length for length, ids in zip(lengths, known, strict=True) if not ids]))
    outputs = [shorten(entry["output_len"]) for entry in entries]
    return Workload(
        name=f"trace {path.stem}",
        prompts=[ids[:length] if ids else next(cut) for ids, length in zip(known, lengths, strict=True)],
        params=[SamplingParams(max_tokens=length, ignore_eos=True) for length in outputs],
        description=f"{len(entries)} requests of the trace {path.stem}, prompts of {min(lengths)} to {max(lengths)}, "
        f"outputs of {min(outputs)} to {max(outputs)} tokens",
        fast=fast_mode(),
        arrivals=tuple(float(entry["arrival_s"]) for entry in entries),
    )


def write_trace(path: str | os.PathLike[str], workload: Workload, *, token_ids: bool = False) -> Path:
    """Write a workload as a file that `read_trace` reads; `token_ids` keeps the prompts, not just their lengths.

    Without arrivals all requests come at 0. Raises `InvalidParameter` if answers have no fixed lengths.
    """
    lengths = workload.output_lens
    if lengths is None:
        raise InvalidParameter(
            "A workload whose answers may end at EOS was to be written as a trace, which holds fixed lengths. Make its "
            "SamplingParams with ignore_eos=True."
        )
    arrivals = workload.arrivals or all_at_once(len(workload.prompts))
    entries = [
        {"arrival_s": moment, **({"prompt_token_ids": ids} if token_ids else {"prompt_len": len(ids)}), "output_len": n}
        for moment, ids, n in zip(arrivals, workload.prompts, lengths, strict=True)
    ]
    lines = ",\n ".join(json.dumps(entry) for entry in entries)  # one request a line
    return write_whole(path, f"[{lines}]\n")


def _problem(entry: Any, lm: LanguageModel) -> str | None:
    """What is wrong with one entry of a trace; None if nothing is."""
    if not isinstance(entry, dict):
        return f"an object was expected, not {entry!r}"
    if unknown := sorted(entry.keys() - FIELDS):
        return f"there is no field {unknown[0]!r}"
    arrival = entry.get("arrival_s")
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival <= sys.float_info.max:
        return f"arrival_s must be seconds, 0 or more, not {arrival!r}"
    if ("prompt_len" in entry) == ("prompt_token_ids" in entry):
        return "one of prompt_len and prompt_token_ids must be given"
    for name in ("prompt_len", "output_len"):
        if (name == "output_len" or name in entry) and not _is_count(entry.get(name)):
            return f"{name} must be an integer of 1 or more, not {entry.get(name)!r}"
    ids = entry.get("prompt_token_ids", [0])
    if not isinstance(ids, list) or not ids or not all(_is_count(i + 1) if type(i) is int else False for i in ids):
        return "prompt_token_ids must be a list of token ids, with at least one"
    if max(ids) >= lm.vocab_size:
        return f"token id {max(ids)} is not in the vocabulary of {lm.name}, which has {lm.vocab_size}"
    total = entry.get("prompt_len", len(ids)) + entry["output_len"]
    if total > lm.max_model_len:
        return f"its {total} tokens are more than the {lm.max_model_len} that {lm.name} takes"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _count(n: int) -> int:
    if not _is_count(n):
        raise InvalidParameter(f"Arrivals of {n!r} requests were asked for; it must be an integer of 1 or more.")
    return n
