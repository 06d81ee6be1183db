"""Any course of events that an engine may see, with a mock in place of the language model: milliseconds a course."""

import gc
import itertools
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from engines import KINDS, MIX, alone, assert_idle, by_id, each, free, settle, tokens, watched
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import LanguageModel, LLMEngine, SamplingParams
from minfer_lib.cache import blocks, paged, pool, slots
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import LayerShape
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine import llm_engine, scheduler
from minfer_lib.engine.scheduler import Plan
from minfer_lib.errors import GenerationFailed, InvalidParameter
from minfer_lib.generation import request as request_module
from minfer_lib.generation.sampling import Samples

LONGEST = 24
CPU = torch.device("cpu")
ONE_NUMBER = {0: LayerShape(1, 1, 1, torch.int64)}  # a layer that keeps one number of each token
FAILURES = {
    "out of memory": torch.OutOfMemoryError("none left"),
    "broken": RuntimeError("a shape is wrong"),
    "interrupted": KeyboardInterrupt(),
}
Cache = SlotKVCache | PagedKVCache


def says(prompt: Sequence[int], index: int, count: int) -> list[int]:
    """The answer of the mock: depends on the prompt, on which of n answers it is, and on the position."""
    return [(sum(prompt) * 31 + 17 * index + 7 * position) % 251 for position in range(count)]


class MockRunner:
    """Stands where the model does. As keys do, what it keeps of a token depends on all tokens up to it."""

    def __init__(self, cache: Cache) -> None:
        self.memory = cache.pools[0].keys.view(-1)
        self.failure: BaseException | None = None  # raised by the next step
        self.late = False  # after the tokens were taken in

    def refresh(self) -> None:  # there is nothing to merge
        pass

    def execute(self, plan: Plan) -> Samples:
        if self.failure and not self.late:
            self._fail()
        said = []
        for request, new in plan.items():
            begin, end = request.num_computed, request.num_computed + new
            ids = request.tokens(0, end)
            rows = torch.tensor([request.table.row(position) for position in range(end)])
            seen = torch.tensor([hash(tuple(ids[: position + 1])) for position in range(end)])
            self.memory[rows[begin:]] = seen[begin:]
            assert torch.equal(self.memory[rows], seen), "it was never fed what it is said to have seen"
            if end == request.num_tokens:
                said.append(says(request.prompt_token_ids, request.index, len(request.token_ids) + 1)[-1])
        if self.failure:
            self._fail()
        return Samples(said, [None] * len(said))

    def _fail(self) -> None:
        failure, self.failure = self.failure, None
        raise failure


def some_slots(count: int) -> SlotKVCache:
    return SlotKVCache(ONE_NUMBER, count, LONGEST, CPU)


def some_pages(count: int, size: int) -> PagedKVCache:
    return PagedKVCache(ONE_NUMBER, count, size, CPU)


def engine_of(lm: LanguageModel, cache: Cache, seqs: int, budget: int, clock: Callable[[], float]) -> LLMEngine:
    with mock.patch.object(llm_engine, "ModelRunner", lambda *_: MockRunner(cache)):
        engine = LLMEngine(
            lm, cache, max_model_len=LONGEST, max_num_seqs=seqs, max_num_batched_tokens=budget, clock=clock, trace=True
        )
    engine.scheduler.watermark = 0  # so that there are preemptions
    return engine


# -- any course of events ---------------------------------------------------------------------------------------------


class Course:
    """Does what it is told to an engine, and keeps account of what everybody got."""

    def __init__(self, lm: LanguageModel, cache: Cache, seqs: int, budget: int) -> None:
        self.now = 0.0
        self.engine = engine_of(lm, cache, seqs, budget, lambda: self.now)
        self.asked: dict[str, tuple[list[int], int, int]] = {}  # prompt, answer, n of what add_request took
        self.got: dict[tuple[str, int], Any] = {}
        self.streams: list[tuple[Any, list[int], int, list[list[int]], list[str]]] = []
        self.count = itertools.count(1)

    def prompt(self, length: int) -> list[int]:
        return [next(self.count) % 250] * length

    def take(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert output.request_id in self.asked, "an output of somebody else"
            assert key not in self.got, "an output twice"
            self.got[key] = output
            prompt, answer, _ = self.asked[output.request_id]
            full = says(prompt, output.index, answer)
            assert output.token_ids == (full if output.finish_reason == "length" else full[: len(output.token_ids)])

    def guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except GenerationFailed as error:
            return error
        except KeyboardInterrupt:
            return None
        finally:
            self.engine.check_invariants()

    # -- what may happen --

    def add(self, length: int, answer: int, extra: int) -> None:
        prompt, name, n = self.prompt(length), f"r{next(self.count)}", 1 + (extra == 1)
        priority, limit = (extra - 4 if extra > 3 else 0), (float(answer) if extra == 2 else None)
        params = SamplingParams(max_tokens=answer, ignore_eos=True, n=n)
        self.engine.add_request(prompt, params, request_id=name, priority=priority, timeout_s=limit)
        self.asked[name] = prompt, answer, n

    def step(self, *_: int) -> None:
        result = self.guarded(self.engine.step)
        self.take(getattr(result, "outputs", result) or [])

    def fail(self, which: int, late: int, extra: int) -> None:
        self.engine.runner.failure = list(FAILURES.values())[which % 3]
        self.engine.runner.late = bool(late % 2)
        if extra > 2:
            self.step()

    def abort(self, which: int, *_: int) -> None:
        if self.asked:
            self.engine.abort(list(self.asked)[which % len(self.asked)])

    def open(self, length: int, answer: int, extra: int) -> None:
        prompt, n = self.prompt(length), 1 + (extra == 1)
        opened = self.engine.stream(prompt, SamplingParams(max_tokens=answer, ignore_eos=True, n=n))
        self.streams.append((opened, prompt, answer, [[] for _ in range(n)], [""] * n))

    def read(self, which: int, times: int, *_: int) -> None:
        if not self.streams:
            return
        opened, prompt, answer, said, reasons = self.streams[which % len(self.streams)]
        for _ in range(times):
            piece = self.guarded(lambda: next(opened, None))
            if not hasattr(piece, "token_ids"):
                break
            assert not reasons[piece.index], "a piece after the last"
            said[piece.index] += piece.token_ids
            reasons[piece.index] = piece.finish_reason or ""
            full = says(prompt, piece.index, answer)
            assert said[piece.index] == full[: len(said[piece.index])]
            assert piece.finish_reason != "length" or said[piece.index] == full

    def leave(self, which: int, how: int, *_: int) -> None:
        if self.streams:
            opened = self.streams.pop(which % len(self.streams))[0]
            if how % 2:
                opened.close()

    @pytest.mark.filterwarnings("ignore:Interrupted")
    def generate(self, length: int, answer: int, extra: int) -> None:
        prompts = [self.prompt(length), self.prompt(1 + extra)]
        result = self.guarded(lambda: self.engine.generate(prompts, SamplingParams(max_tokens=answer, ignore_eos=True)))
        outputs = getattr(result, "outputs", result)
        assert [o.prompt_token_ids for o in outputs] == prompts
        for output, prompt in zip(outputs, prompts, strict=True):
            full = says(prompt, 0, answer)
            assert output.token_ids == (full if output.finish_reason == "length" else full[: len(output.token_ids)])

    def tick(self, by: int, *_: int) -> None:
        self.now += by

    def end(self) -> None:
        for i in range(len(self.streams)):
            self.read(i, 1000)
        for _ in range(2000):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished() and not self.engine._requests
        assert self.got.keys() == {(name, i) for name, (_, _, n) in self.asked.items() for i in range(n)}
        assert self.engine.cache.blocks_used == 0
        assert all(0 < step.num_tokens <= self.engine.max_num_batched_tokens for step in self.engine.steps)


ACTS = [*["add"] * 3, *["step"] * 3, "fail", "abort", "open", *["read"] * 2, "leave", "generate", "tick"]
acts = st.tuples(st.sampled_from(ACTS), st.integers(1, 9), st.integers(1, 7), st.integers(0, 6))


@pytest.mark.filterwarnings("ignore:Interrupted")
@settings(max_examples=150, deadline=None)
@given(
    course=st.lists(acts, min_size=3, max_size=40),
    cache=st.one_of(
        st.builds(some_slots, st.integers(1, 4)),
        st.builds(some_pages, st.integers(12, 20), st.just(2)),
        st.builds(some_pages, st.integers(5, 9), st.just(5)),
    ),
    seqs=st.integers(1, 4),
    budget=st.sampled_from([1, 2, 5, 50]),
)
def test_any_course_of_events(tiny: LanguageModel, course: list[tuple], cache: Cache, seqs: int, budget: int):
    gc.disable()  # a forgotten stream is collected when its last name goes, and so the same way each time
    try:
        told = Course(tiny, cache, seqs, budget)
        for act, *numbers in course:
            getattr(told, act)(*numbers)
            told.engine.check_invariants()
        told.engine.runner.failure = None
        told.end()
    finally:
        gc.enable()


# -- an interrupt at any line -----------------------------------------------------------------------------------------

FILES = {module.__file__ for module in (llm_engine, scheduler, blocks, paged, pool, slots, request_module)}


TIMES = {1, 2, 5, 13, 34}  # of a line that runs often


class InterruptAt:
    """Presses Ctrl-C when a line of the engine's own code, (file, number), runs for the so-manieth time."""

    def __init__(self, line: tuple[str, int] | None = None, time: int = 0) -> None:
        self.line, self.time, self.pressed = line, time, False
        self.seen: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen[line] += 1
            if line == self.line and self.seen[line] == self.time:
                self.pressed = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> "InterruptAt":
        sys.settrace(None if self.pressed else self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


# Two prompts that begin alike, and two answers to one: there are admissions, chunks, decodes, forks, hits and ends.
PROMPTS = [[1, 2, 3, 4, 5], [5], [1, 2, 3, 4, 6, 7]]
PARAMS = [SamplingParams(max_tokens=count, ignore_eos=True, n=n) for count, n in ((2, 1), (5, 1), (4, 2))]
SAID = {
    (str(i), index): (says(prompt, index, params.max_tokens), "length")
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    for index in range(params.n)
}
CACHES = {
    "slots": lambda: some_slots(2),
    "pages": lambda: some_pages(12, 2),
    "few pages": lambda: some_pages(7, 2),  # fewer than three requests fill
}


@pytest.fixture(params=CACHES)
def fresh(request: pytest.FixtureRequest, tiny: LanguageModel) -> Callable[[], LLMEngine]:
    """fresh(): an engine that has not run yet."""
    return lambda: engine_of(tiny, CACHES[request.param](), 3, 4, lambda: 0.0)


def finish(engine: LLMEngine, interrupt: InterruptAt) -> list:
    """Steps until nothing is left, through an interrupt."""
    outputs = []
    for _ in range(60):
        if not engine.has_unfinished():
            return outputs
        try:
            with interrupt:
                outputs += engine.step()
        except GenerationFailed as failure:
            outputs += failure.outputs
        except KeyboardInterrupt:
            pass
        if not engine._broken:
            engine.check_invariants()
    raise AssertionError("does not end")


def add_all(engine: LLMEngine) -> None:
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(prompt, params, request_id=str(i))


def said_by(outputs: list) -> dict:
    result = {(o.request_id, o.index): (o.token_ids, o.finish_reason) for o in outputs}
    assert len(result) == len(outputs), "an output twice"
    return result


def at_every_line(act: Callable[[InterruptAt], None], least: int) -> None:
    """Runs `act` again and again, with an interrupt at each line that it runs; there are `least` of them or more."""
    dry = InterruptAt()
    gc.collect()
    gc.disable()  # else streams that other tests forgot may end here, in lines that nobody runs again
    try:
        act(dry)
    finally:
        gc.enable()
    assert len(dry.seen) >= least
    lost = {}
    for line, count in dry.seen.items():
        for time in sorted(TIMES & set(range(1, count + 1))):
            interrupt = InterruptAt(line, time)
            try:
                act(interrupt)
                assert interrupt.pressed
            except Exception as error:
                lost[f"{line[0]}:{line[1]}"] = f"{type(error).__name__}: {error}"[:120]
    assert not lost, "\n".join(f"{line}: {error}" for line, error in lost.items())


def test_an_interrupt_at_any_line_of_a_step_loses_nothing(fresh: Callable[[], LLMEngine]):
    def act(interrupt: InterruptAt) -> None:
        engine = fresh()
        add_all(engine)
        assert said_by(finish(engine, interrupt)) == SAID
        engine.check_invariants()
        assert engine.cache.blocks_used == 0 and not engine._requests

    at_every_line(act, least=200)


def test_an_interrupt_at_any_line_of_a_step_that_fails_loses_nothing(fresh: Callable[[], LLMEngine]):
    def act(interrupt: InterruptAt) -> None:
        engine = fresh()
        add_all(engine)
        outputs = engine.step()
        engine.runner.failure = RuntimeError("a shape is wrong")
        said = said_by(outputs + finish(engine, interrupt))
        assert said.keys() == SAID.keys()  # with an error, or computed again
        for key, (token_ids, reason) in said.items():
            whole = SAID[key][0]
            assert token_ids == (whole if reason == "length" else whole[: len(token_ids)])
        assert engine.cache.blocks_used == 0 and not engine._requests

    at_every_line(act, least=200)


def test_an_interrupt_at_any_line_of_adding_and_aborting_loses_nothing(fresh: Callable[[], LLMEngine]):
    """A request whose `add_request` was interrupted is there, or its id is free."""

    def act(interrupt: InterruptAt) -> None:
        engine, expected = fresh(), dict(SAID)
        engine.add_request(PROMPTS[0], PARAMS[0], request_id="0")
        engine.add_request(PROMPTS[1], free(9), request_id="long")
        try:
            with interrupt:
                engine.abort("long")
                engine.add_request(PROMPTS[1], PARAMS[1], request_id="1")
                engine.add_request(PROMPTS[2], PARAMS[2], request_id="2")
        except KeyboardInterrupt:
            engine.abort("long")
            for i in (1, 2):
                with suppress(InvalidParameter):  # "in use": then it runs
                    engine.add_request(PROMPTS[i], PARAMS[i], request_id=str(i))
        expected["long", 0] = [], "abort"
        assert said_by(finish(engine, InterruptAt())) == expected
        assert engine.cache.blocks_used == 0 and not engine._requests

    at_every_line(act, least=20)


@pytest.mark.filterwarnings("ignore:Interrupted")
def test_an_interrupt_at_any_line_of_generate_leaves_the_engine_usable(fresh: Callable[[], LLMEngine]):
    cut = 0

    def act(interrupt: InterruptAt) -> None:
        nonlocal cut
        engine, outputs = fresh(), []
        try:
            with interrupt:
                outputs = engine.generate(PROMPTS, PARAMS)
        except KeyboardInterrupt:
            pass  # before anything was begun, or when all was over
        for output, (whole, _) in zip(outputs, SAID.values(), strict=False):
            assert output.token_ids == whole[: len(output.token_ids)]
            assert (output.finish_reason == "length") == (output.token_ids == whole)
        cut += any(output.finish_reason == "abort" for output in outputs)
        assert finish(engine, interrupt) == []
        engine.check_invariants()
        assert engine.cache.blocks_used == 0
        again = engine.generate(PROMPTS, PARAMS)
        assert [(o.token_ids, o.finish_reason) for o in again] == list(SAID.values())
        assert engine.cache.blocks_used == 0

    at_every_line(act, least=200)
    assert cut > 100


@pytest.mark.filterwarnings("ignore:Interrupted")
def test_an_interrupt_at_any_line_of_a_stream_leaves_the_others_as_they_were(fresh: Callable[[], LLMEngine]):
    def act(interrupt: InterruptAt) -> None:
        engine, said = fresh(), []
        add_all(engine)
        stream = None
        try:
            with interrupt:
                stream = engine.stream([9, 9], free(4))
                for piece in stream:
                    said += piece.token_ids
        except KeyboardInterrupt:
            pass
        assert said == says([9, 9], 0, 4)[: len(said)]
        assert interrupt.pressed or len(said) == 4
        del stream
        assert said_by(finish(engine, interrupt)) == SAID
        engine.check_invariants()
        assert engine.cache.blocks_used == 0

    at_every_line(act, least=200)


# -- exceptions out of signal handlers --------------------------------------------------------------------------------


class TimeUp(BaseException):
    """What the handler of a time limit raises."""


@contextmanager
def time_limit(seconds: float, error: type[BaseException]) -> Iterator[None]:
    def end(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this system")
@pytest.mark.filterwarnings("ignore:Interrupted")
@pytest.mark.parametrize("error", [TimeUp, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["slots", "few pages"])
def test_time_limits_that_strike_anywhere(family: Callable[[str], LanguageModel], kind: str, error: type):
    lm, draw, struck = family("llama"), random.Random(1), 0
    handler = signal.getsignal(signal.SIGINT)
    engine = watched(lm, **KINDS[kind], max_num_batched_tokens=30)
    expected = [alone(lm, prompt, 10) for prompt in MIX]
    for _ in range(25):
        try:
            with time_limit(draw.uniform(0.0005, 0.06), error):
                outputs = engine.generate(MIX, free(10))
        except (error, GenerationFailed) as failure:
            outputs = getattr(failure, "outputs", [])
        struck += any(output.finish_reason != "length" for output in outputs) or not outputs
        for output, whole in zip(outputs, expected, strict=False):
            assert output.token_ids == whole[: len(output.token_ids)]
        settle(engine)
        assert signal.getsignal(signal.SIGINT) is handler
    assert struck >= 5
    assert tokens(engine.generate(MIX, free(10))) == expected


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this system")
@pytest.mark.parametrize("kind", ["slots", "few pages"])
def test_time_limits_around_steps_lose_nothing(family: Callable[[str], LanguageModel], kind: str):
    lm, draw, struck, limit = family("llama"), random.Random(2), 0, 0.001
    engine = watched(lm, **KINDS[kind], max_num_batched_tokens=30)
    for i, prompt in enumerate(MIX):
        engine.add_request(prompt, each()[i], request_id=str(i))
    outputs = []
    while engine.has_unfinished():
        try:
            with time_limit(draw.uniform(0.0001, limit), TimeUp):
                outputs += engine.step()
        except TimeUp:
            struck, limit = struck + 1, limit * 1.05  # until a step has time enough, on any machine
    assert struck > 5
    assert by_id(outputs) == {
        str(i): alone(lm, prompt, params.max_tokens) for i, (prompt, params) in enumerate(zip(MIX, each(), strict=True))
    }
    assert_idle(engine)
