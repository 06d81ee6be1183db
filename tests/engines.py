"""`LLMEngine`s of every kind for tests: looked at after each step, run until nothing is left, broken in the middle.

Beside them the requests that they are given, and what `model.generate` answers to each of these alone.
"""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from families import PROMPTS, hf_generate

from minfer_lib import LanguageModel, LLMEngine, RequestOutput, SamplingParams
from minfer_lib.kernels.compiled_attention import why_not
from minfer_lib.models import hf_compat

# Prompts of 1 to 37 tokens, and answers of 6 to 12, so that they join and leave at different steps.
MIX = [*PROMPTS, list(range(20, 57)), [7, 7], list(range(100, 119)), [11, 3, 11, 3, 5]]
ANSWERS = [10, 12, 7, 9, 6, 11, 8, 10]
LONGEST = 64

KINDS = {
    "slots": dict(kv_cache="slots", backend="torch"),
    "slots, compiled": dict(kv_cache="slots", backend="compiled"),
    "pages": dict(kv_cache="paged", backend="torch", block_size=4),
    "pages, compiled": dict(kv_cache="paged", backend="compiled", block_size=16),
    "pages, graphs": dict(kv_cache="paged", backend="torch", block_size=4, fast="graph"),
    "slots, fast": dict(kv_cache="slots", backend="torch", fast=True),
    "few pages, fast": dict(kv_cache="paged", backend="auto", block_size=2, num_blocks=26, fast=True),
    "few pages": dict(kv_cache="paged", backend="auto", block_size=2, num_blocks=26),  # which preempts
}
NO_COMPILED = why_not(torch.float32)

_oracles: dict[tuple, tuple[int, list[int]]] = {}  # how many tokens were asked for, and what came


def skip_without_backend(options: dict[str, object]) -> None:
    if options.get("backend") == "compiled" and NO_COMPILED is not None:
        pytest.skip(f"no kernel here: {NO_COMPILED}")


# -- requests and their answers ---------------------------------------------------------------------------------------


def alone(lm: LanguageModel, prompt: Sequence[int], count: int, eos_ids: frozenset[int] = frozenset()) -> list[int]:
    """What `model.generate` says, asked once for each prompt to a model that nobody changes."""
    key = (lm.name, lm.dtype, tuple(prompt), eos_ids)
    if _oracles.get(key, (0, []))[0] < count:
        asked = max(count, 12)
        _oracles[key] = asked, hf_generate(lm, prompt, asked, eos_ids)
    return _oracles[key][1][:count]


def answers(lm: LanguageModel) -> list[list[int]]:
    return [alone(lm, prompt, count) for prompt, count in zip(MIX, ANSWERS, strict=True)]


def free(count: int = 8, **others: object) -> SamplingParams:
    """Greedy, EOS ignored."""
    return SamplingParams(**(dict(max_tokens=count, ignore_eos=True) | others))


def each() -> list[SamplingParams]:
    return [free(count) for count in ANSWERS]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def by_id(outputs: Sequence[RequestOutput]) -> dict[str, list[int]]:
    result = {output.request_id: output.token_ids for output in outputs}
    assert len(result) == len(outputs), "an output twice"
    return result


# -- engines ----------------------------------------------------------------------------------------------------------


def watched(lm: LanguageModel, **options: object) -> LLMEngine:
    """An engine that is looked at after each step, and after each recovery from one that was broken off.

    Its pages are given to requests that join until there are none left, so that few of them soon run out.
    """
    engine = LLMEngine(lm, **(dict(max_model_len=LONGEST) | options))
    engine.scheduler.watermark = 0
    step, recover, implementation = engine._step, engine._recover, hf_compat.attention_of(lm.model.config)

    def checked_step() -> None:
        step()
        check(engine)
        assert hf_compat.attention_of(lm.model.config) == implementation != "minfer"

    def checked_recover() -> None:
        recover()
        engine.scheduler.check_invariants()

    engine._step, engine._recover = checked_step, checked_recover
    return engine


def check(engine: LLMEngine) -> None:
    """What holds between two steps."""
    engine.scheduler.check_invariants()
    stats, cache, running = engine.stats(), engine.cache, engine.scheduler.running
    assert len(running) <= engine.max_num_seqs
    assert stats["blocks_used"] + stats["blocks_free"] == cache.num_blocks
    assert stats["kv_bytes_used"] == cache.tokens_used(running) * cache.bytes_per_token <= stats["kv_bytes_held"]
    if engine.kv_cache == "paged":  # all the waste there is are the ends of last blocks
        most = cache.block_size - (1 if engine.ahead is None else 0)  # a step in flight has room, and counts later
        assert 0 <= stats["kv_tail_tokens"] <= len(running) * most
        assert stats["kv_bytes_held"] - stats["kv_bytes_used"] == stats["kv_tail_tokens"] * cache.bytes_per_token


def run(engine: LLMEngine, most: int = 1000) -> list[RequestOutput]:
    """Steps until nothing is left."""
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        most -= 1
        assert most, "does not end"
    assert_idle(engine)
    return outputs


def settle(engine: LLMEngine) -> None:
    """Steps until nothing is left of what a caller who was interrupted may have left behind."""
    for _ in range(1000):
        if not engine.has_unfinished():
            break
        engine.step()
    assert not engine.has_unfinished(), "does not end"
    engine.check_invariants()
    assert engine.cache.blocks_used == 0


def assert_idle(engine: LLMEngine) -> None:
    """Nothing of anybody is left, and every block has come back."""
    engine.check_invariants()
    stats = engine.stats()
    assert stats["waiting"] == stats["running"] == stats["blocks_used"] == stats["kv_bytes_used"] == 0
    assert not engine.has_unfinished() and engine.step() == [] and not engine._requests
    for pool in engine.cache.pools.values():
        assert not any(part[engine.cache.trash_row].any() for part in vars(pool).values() if part is not None)


# -- what breaks ------------------------------------------------------------------------------------------------------


def break_forward(engine: LLMEngine, at: int, error: BaseException, after_it: bool = False) -> None:
    """The model raises in the engine's `at`-th step from now, before or after the keys were written."""
    count = itertools.count(1)

    def breaking(forward: Callable[[object], torch.Tensor]) -> Callable[[object], torch.Tensor]:
        def broken(inputs: object) -> torch.Tensor:
            now = next(count) == at
            if now and not after_it:
                raise error
            logits = forward(inputs)
            if now:
                raise error
            return logits

        return broken

    engine.runner.forward = breaking(engine.runner.forward)
    if engine.ahead is not None:
        engine.runner.graphs.decode = breaking(engine.runner.graphs.decode)


def raising(error: BaseException, after: int, once: bool = False) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A logits processor that raises when so many tokens have been generated."""
    left = [1 if once else 10**9]

    def fail() -> None:
        if left[0]:
            left[0] -= 1
            raise error

    return acting(fail, after)


def acting(act: Callable[[], object], after: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A logits processor that does something when so many tokens have been generated."""

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == after:
            act()
        return logits

    return processor
