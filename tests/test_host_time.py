"""What a step costs beside the model: counted in calls, which no busy machine changes, and bounded in time, widely.

On a GPU the model takes a millisecond or two a step, and the bookkeeping of all requests has to fit beside it.
"""

import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest

from minfer_lib import LanguageModel, LLMEngine, SamplingParams
from minfer_lib.generation.sampling import Samples

CALLS_A_REQUEST = 24  # of functions, Python's and C's; 18 when this was written
CALLS_A_STEP = 100  # whatever runs; 72 when this was written
MICROSECONDS_A_REQUEST = 50  # 1 on a machine of 2025


def decoding(lm: LanguageModel, kv_cache: str, count: int, generated: int) -> LLMEngine:
    """An engine in which `count` requests have generated so many tokens each, and a model that takes no time."""
    room = count if kv_cache == "slots" else 16 * count
    options = dict(max_num_seqs=count, max_num_batched_tokens=8192, max_model_len=256, num_blocks=room)
    engine = LLMEngine(lm, kv_cache=kv_cache, backend="torch", **options)
    engine.runner.execute = lambda plan: Samples([65] * len(plan), [None] * len(plan))
    for i in range(count):
        engine.add_request([3 + i] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(generated):
        engine.step()
    assert engine.stats()["running"] == count
    return engine


def calls_of(act: Callable[[], object]) -> int:
    calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("kv_cache", ["slots", "paged"])
def test_calls_of_a_step(tiny: LanguageModel, kv_cache: str):
    """So many a request and so many a step, however long the answers have become."""
    for count in (1, 8, 64):
        early, late = (calls_of(decoding(tiny, kv_cache, count, generated).step) for generated in (6, 102))
        assert early == late <= CALLS_A_STEP + CALLS_A_REQUEST * count, count
        assert late >= 5 * count  # they were counted


@pytest.mark.parametrize("kv_cache", ["slots", "paged"])
def test_time_of_a_step(tiny: LanguageModel, kv_cache: str):
    engine, count = decoding(tiny, kv_cache, 64, 5), 64
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    assert min(times) < count * MICROSECONDS_A_REQUEST * 1e-6, f"{min(times) / count * 1e6:.1f} us a request"
