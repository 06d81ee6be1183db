"""Workloads: which prompts, and how many tokens to make of each.

Invariant: a workload is a function of the model's tokenizer and of the numbers it was asked with, so that every engine
on every machine runs the same one. Its outputs have the lengths asked for: EOS is ignored. Sampling is greedy, but for
the workload of another project, which is kept as it is there.

Prompts are cut from a bundled book of the public domain, each from another place, so that no two share a beginning
unless that is what a workload is about. A model without a tokenizer gets random ids instead: for time and memory only
their number matters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter, integer, must_be
from ..generation.params import SamplingParams
from .settings import fast_mode, shorten

if TYPE_CHECKING:
    from ..models.load import LanguageModel

TEXTS = Path(__file__).parent / "texts"
BOOK = "alice_in_wonderland"  # its header says author, year and why it is in the public domain
END_OF_HEADER = "=====\n"
COURSE_PROMPTS = (9, 22, 32, 13, 26, 8, 17, 30, 11, 24, 15, 19)  # tokens
COURSE_OUTPUTS = (4, 8, 28, 3, 6, 8, 5, 4, 7, 3, 8, 6)
RUNNING = 4  # of these at once


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, one `SamplingParams` a prompt, and what to call it in tables."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    description: str
    fast: bool = False  # shortened by MINFER_FAST, so that its figures are not to be quoted
    arrivals: tuple[float, ...] | None = None  # seconds from the start, one a prompt; None: all are there at once

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.params):
            raise InvalidParameter(
                f"A workload needs at least one prompt and one SamplingParams for each of them; "
                f"got {len(self.prompts)} prompts and {len(self.params)} SamplingParams."
            )
        if self.arrivals is not None:
            check_arrivals(self.arrivals, len(self.prompts))

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def output_lens(self) -> list[int] | None:
        """Tokens each answer must have; None when EOS may end one early, so that lengths cannot be promised."""
        fixed = all(params.ignore_eos or params.min_tokens == params.max_tokens for params in self.params)
        return [params.max_tokens for params in self.params] if fixed else None

    def arriving(self, arrivals: Sequence[float] | None) -> Workload:
        """The same requests, which come at these seconds from the start; `serve` hands them in then."""
        if arrivals is not None and (isinstance(arrivals, str) or not hasattr(arrivals, "__len__")):
            raise must_be("arrivals", "a list of seconds, one for each request", arrivals)
        return replace(self, arrivals=None if arrivals is None else tuple(arrivals))

    def record(self) -> dict[str, Any]:
        """What a result says of the workload that it was measured on."""
        return {
            "name": self.name,
            "description": self.description,
            "prompt_lens": self.prompt_lens,
            "output_lens": [params.max_tokens for params in self.params],
            "fast": self.fast or fast_mode(),
        }

    def warm_up(self) -> Workload:
        """The same prompts with two tokens each: prefill at the same shapes, and one decode step."""
        params = [SamplingParams(max_tokens=min(2, p.max_tokens), ignore_eos=True) for p in self.params]
        return replace(self, params=params)


def check_arrivals(arrivals: Sequence[float], requests: int) -> None:
    """Raises `InvalidParameter` unless there is one moment for each request, and none is negative or endless."""
    if len(arrivals) != requests:
        raise InvalidParameter(f"{len(arrivals)} arrivals were given for {requests} requests. Give one for each.")
    for place, moment in enumerate(arrivals):
        number = isinstance(moment, int | float) and not isinstance(moment, bool)
        if not (number and 0 <= moment < math.inf):
            raise InvalidParameter(
                f"Request {place} is to arrive at {moment!r}; arrivals are seconds from the start, 0 or more."
            )


def course(lm: LanguageModel) -> Workload:
    """The course workload, small enough for every engine of the course: twelve requests that are meant to run four at a
    time (`RUNNING`), of which the third is far longer than the others.

    The long one makes a padded batch wait and a slot stand nearly empty; all are short enough for the naive loop on two
    cores. Fast mode does not shorten it.
    """
    return _workload(lm, "course", list(COURSE_PROMPTS), list(COURSE_OUTPUTS))


def fixed_lengths(lm: LanguageModel, batch: int = 4, prompt_len: int = 64, output_len: int = 64) -> Workload:
    """`batch` prompts of `prompt_len` tokens, all there from the start, and `output_len` tokens for each."""
    prompt_len, output_len = shorten(prompt_len), shorten(output_len)
    return _workload(lm, f"fixed {batch}x{prompt_len}+{output_len}", [prompt_len] * batch, [output_len] * batch)


def mixed_lengths(
    lm: LanguageModel,
    n: int = 16,
    prompt: tuple[int, int] = (16, 128),
    output: tuple[int, int] = (16, 128),
    seed: int = 0,
) -> Workload:
    """`n` requests whose prompt and output lengths are drawn evenly from the two ranges (both ends included)."""
    prompt_lens, output_lens = _drawn(n, prompt, output, seed)
    return _workload(lm, f"mixed {n} requests, seed {seed}", prompt_lens, output_lens)


def nano_vllm(vocab: int, seed: int = 0, n: int = 256) -> Workload:
    """The workload of nano-vllm's `bench.py`: `n` prompts of 100 to 1,024 random ids, answers of as many, sampled.

    With the defaults it is that workload to the token: 142,827 tokens of prompts, 133,966 of answers, temperature 0.6.
    vocab: ids of the model; below 10,000 of them, ids are taken modulo their number. The answers have seeds of their
    own here. Fast mode does not shorten it.
    """
    rng = random.Random(seed)  # its order of draws: for each prompt the length, then the ids; then all answers' lengths
    prompts = [[rng.randint(0, 10000) % vocab for _ in range(rng.randint(100, 1024))] for _ in range(n)]
    lengths = [rng.randint(100, 1024) for _ in range(n)]
    return Workload(
        name="nano-vllm",
        prompts=prompts,
        params=[
            SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, seed=i)
            for i, length in enumerate(lengths)
        ],
        description=f"{n} requests, prompts of {_range(list(map(len, prompts)))}, outputs of {_range(lengths)} tokens",
    )


def _drawn(n: int, first: tuple[int, int], second: tuple[int, int], seed: int) -> tuple[list[int], list[int]]:
    """`n` pairs of lengths from two ranges, both ends included, as two lists."""
    rng = random.Random(seed)  # of Python, not of torch: the same numbers on every version and device
    low_high = [tuple(shorten(end) for end in ends) for ends in (first, second)]
    if any(low > high for low, high in low_high):
        raise InvalidParameter(f"Lengths from {first} and {second} were asked for; each range goes from low to high.")
    lengths = [[rng.randint(low, high) for low, high in low_high] for _ in range(n)]
    return [a for a, _ in lengths], [b for _, b in lengths]


def _workload(lm: LanguageModel, name: str, prompt_lens: list[int], output_lens: list[int]) -> Workload:
    if not prompt_lens or min(prompt_lens + output_lens) < 1:
        raise InvalidParameter("A workload without requests or with empty ones was asked for; all counts start at 1.")
    longest = max(p + o for p, o in zip(prompt_lens, output_lens, strict=True))
    if longest > lm.max_model_len:
        raise InvalidParameter(
            f"A request of {longest} tokens (prompt and output) was asked for, but {lm.name} takes "
            f"{lm.max_model_len} at most. Ask for shorter prompts or outputs."
        )
    requests = f"{len(prompt_lens)} request{'s' * (len(prompt_lens) > 1)}"
    description = f"{requests}, prompts of {_range(prompt_lens)}, outputs of {_range(output_lens)} tokens"
    return Workload(
        name=name,
        prompts=prompts_of(lm, prompt_lens),
        params=[SamplingParams(max_tokens=n, ignore_eos=True) for n in output_lens],
        description=description,
        fast=fast_mode(),
    )


def prompts_of(lm: LanguageModel, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One list of token ids for each length: consecutive pieces of the bundled book; random ids without a tokenizer.

    A model whose tokenizer puts a BOS in front gets it in front of every prompt, within the length. Random ids leave
    out the EOS ids; `seed` is theirs.
    """
    lengths = [integer("lengths", length, at_least=1) for length in lengths]
    if lm.tokenizer is None:
        rng = random.Random(seed)
        allowed = [token for token in range(lm.vocab_size) if token not in lm.eos_ids]
        return [rng.choices(allowed, k=length) for length in lengths]
    ids = lm.encode(english_text())
    bos = ids[:1] if ids[0] == lm.tokenizer.bos_token_id else []
    ids = ids[len(bos) :]
    prompts, start = [], 0
    for length in lengths:
        need = length - len(bos)
        if start + need > len(ids):  # past the end of the book: from its beginning again, but not from the same place
            start = len(prompts) % max(1, len(ids) - need)
        if need > len(ids):
            raise InvalidParameter(f"A prompt of {length} tokens was asked for; the bundled text has {len(ids)}.")
        prompts.append(bos + ids[start : start + need])
        start += need
    return prompts


def english_text() -> str:
    """The bundled book without its header: English prose of the public domain, about 144,000 characters."""
    return (TEXTS / f"{BOOK}.txt").read_text(encoding="utf-8").split(END_OF_HEADER, 1)[1]


def _range(lengths: list[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low} to {high}"
