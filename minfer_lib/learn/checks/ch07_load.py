"""The exercise of chapter 7 that turns a load into memory, by Little's law: requests in flight = rate x time they stay.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

from typing import Any

from ..exercises import Case, Exercise, Function, Mistake

KV_7B = 28 * 2 * 4 * 128 * 2  # Qwen2.5-7B: layers, keys and values, heads, dim, bytes


def _load(
    *, seconds: float = 1e-3, prompt: float = 1, output: float = 0.5, block: float = 0.5, stays: str = "output",
) -> Function:  # fmt: skip
    """The right answer, and with other options the wrong ones: shares of each part that a request holds."""

    def cache_for_load(
        rate: float, prompt_len: int, output_len: int, tpot_ms: float, block_size: int, bytes_per_token: int
    ) -> float:
        steps = {"output": output_len, "all": prompt_len + output_len, "one": 1}[stays]
        flight = rate * steps * tpot_ms * seconds
        return flight * (prompt * prompt_len + output * output_len + block * block_size) * bytes_per_token

    return cache_for_load


def _alone(rate: float, prompt: int, output: int, tpot_ms: float, block_size: int, bytes_per_token: int) -> float:
    return (prompt + output / 2 + block_size / 2) * bytes_per_token


def _no_time(rate: float, prompt: int, output: int, tpot_ms: float, block_size: int, bytes_per_token: int) -> float:
    return rate * _alone(rate, prompt, output, tpot_ms, block_size, bytes_per_token)


def _draw(cache_for_load: Function) -> Any:
    from .. import plots

    rates = [0, 2, 4, 8, 16, 32]
    curves = {
        f"{name}, by your function": [cache_for_load(rate, 500, 300, tpot, 16, KV_7B) / 1e9 for rate in rates]
        for name, tpot in (("TPOT 30 ms", 30), ("TPOT 60 ms", 60))
    }
    return plots.curves(
        rates, curves, xlabel="requests a second", ylabel="GB of cache",
        title="Twice the step time holds twice the memory: 500 tokens in, 300 out, a 7B",
    )  # fmt: skip


CACHE_FOR_LOAD = Exercise(
    name="cache_for_load",
    parameters=("rate", "prompt", "output", "tpot_ms", "block_size", "bytes_per_token"),
    cases=(
        # 1 * 10 * 0.1 s = 1 in flight; 10 + 5 + 1 = 16 tokens
        Case((1, 10, 10, 100, 2, 1), 16.0, "one in flight"),
        # 2 * 50 * 0.04 s = 4 in flight; 100 + 25 + 8 = 133 tokens; * 1,000
        Case((2, 100, 50, 40, 16, 1000), 532_000.0, "four in flight"),
        # 0.5 * 20 * 0.05 s = 0.5 in flight; 6 + 10 + 4 = 20 tokens; * 100
        Case((0.5, 6, 20, 50, 8, 100), 1000.0, "half a request, on average"),
        # 10 * 200 * 0.03 s = 60 in flight; 200 + 100 + 8 = 308 tokens; 60 * 308 * 57,344
        Case((10, 200, 200, 30, 16, KV_7B), 1_059_717_120.0, "a 7B at ten requests a second"),
    ),
    mistakes=(
        Mistake("milliseconds", "tpot_ms is in milliseconds and rate in seconds: a factor of 1,000.",
                (_load(seconds=1.0), _load(seconds=1e-6))),
        Mistake("the whole output", "On average a request has half of its output in the cache: it begins with none.",
                (_load(output=1),)),
        Mistake("no output", "The answer lies in the cache too, half of it on average.", (_load(output=0),)),
        Mistake("no tail", "The last block of each request is half empty on average: block_size / 2 tokens more.",
                (_load(block=0),)),
        Mistake("a whole block", "A whole block more is the worst case; on average half of the last one is empty.",
                (_load(block=1),)),
        Mistake("no prompt", "The prompt stays in the cache for as long as its request does.", (_load(prompt=0),)),
        Mistake("one request", "That is what one request holds. How many are there at once? Rate times time.",
                (_alone,)),
        Mistake("no time", "rate alone is no number of requests: times the seconds that each of them stays.",
                (_no_time,)),
        Mistake("one step", "A request stays for all of its output, not for one step.", (_load(stays="one"),)),
        Mistake("the prompt's time", "The prompt is computed in one go; only tokens of the output take a step each.",
                (_load(stays="all"),)),
    ),
    hint="In flight: rate * output * tpot_ms / 1000. Each holds prompt + output / 2 + block_size / 2 tokens.",
    solved="Slower steps need more memory for the same load, since requests stay longer: Little's law.",
    draw=_draw,
)  # fmt: skip
