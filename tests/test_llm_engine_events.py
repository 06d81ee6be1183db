"""Any course of events that an engine may see, with a mock in place of the language model: milliseconds a course."""

import gc
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import LanguageModel, LLMEngine, SamplingParams
from minfer_lib.cache import contiguous as kv_cache
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine import llm_engine as engine
from minfer_lib.engine import scheduler, stream
from minfer_lib.engine.interrupts import held_interrupts
from minfer_lib.engine.scheduler import Chunk
from minfer_lib.errors import GenerationFailed
from minfer_lib.generation import request
from minfer_lib.generation.request import Request
from minfer_lib.generation.sampling import Samples

LONGEST = 24
FAILURES = {
    "out of memory": torch.OutOfMemoryError("none left"),
    "broken": RuntimeError("a shape is wrong"),
    "interrupted": KeyboardInterrupt(),
}


def says(prompt: Sequence[int], index: int, count: int) -> list[int]:
    """The answer of the mock: depends on the prompt, on which of n answers it is, and on the position."""
    return [(sum(prompt) * 31 + 17 * index + 7 * position) % 251 for position in range(count)]


class MockRunner:
    """Stands where the model does. It remembers, request by request, which tokens it was fed."""

    def __init__(self) -> None:
        self.fed: dict[Request, list[int]] = {}
        self.failure: BaseException | None = None  # raised by the next step
        self.late = False  # after the tokens were taken in

    def build(self, chunks: list[Chunk]) -> Any:
        return SimpleNamespace(chunks=chunks, sampled=[chunk for chunk in chunks if chunk.samples])

    def forward(self, inputs: Any) -> None:
        if self.failure and not self.late:
            self._fail()
        for chunk in inputs.chunks:
            ids = self.fed.setdefault(chunk.request, [])
            assert chunk.request.num_computed <= len(ids), "it was never fed what it is said to have seen"
            ids[chunk.request.num_computed :] = chunk.request.next_tokens(chunk.num_tokens)
            assert ids == [*chunk.request.prompt_token_ids, *chunk.request.token_ids][: len(ids)]
        if self.failure:
            self._fail()

    def sample(self, logits: None, inputs: Any) -> Samples:
        requests = [chunk.request for chunk in inputs.sampled]
        tokens = [says(r.prompt_token_ids, r.index, len(r.token_ids) + 1)[-1] for r in requests]
        return Samples(tokens, [None] * len(tokens))

    def _fail(self) -> None:
        failure, self.failure = self.failure, None
        raise failure


def engine_of(lm: LanguageModel, slots: int, seqs: int, budget: int, clock: Callable[[], float]) -> LLMEngine:
    cache = SlotKVCache({}, slots, LONGEST, torch.device("cpu"))
    with mock.patch("minfer_lib.engine.core.make_cache", lambda *args, **options: cache):
        made = LLMEngine(lm, max_num_seqs=seqs, max_num_batched_tokens=budget, clock=clock, trace=True)
    made.runner = MockRunner()
    return made


# -- any course of events ---------------------------------------------------------------------------------------------


class Course:
    """Does what it is told to an engine, and keeps account of what everybody got."""

    def __init__(self, lm: LanguageModel, slots: int, seqs: int, budget: int) -> None:
        self.now = 0.0
        self.engine = engine_of(lm, slots, seqs, budget, lambda: self.now)
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
        assert not self.engine.has_unfinished() and not self.engine._owned
        assert self.got.keys() == {(name, i) for name, (_, _, n) in self.asked.items() for i in range(n)}
        assert self.engine.cache.blocks_used == 0
        assert all(0 < step.num_tokens <= self.engine.max_num_batched_tokens for step in self.engine.steps)


ACTS = [
    "add",
    "add",
    "add",
    "step",
    "step",
    "step",
    "fail",
    "abort",
    "open",
    "read",
    "read",
    "leave",
    "generate",
    "tick",
]
acts = st.tuples(st.sampled_from(ACTS), st.integers(1, 9), st.integers(1, 7), st.integers(0, 6))


@pytest.mark.filterwarnings("ignore:Interrupted")
@settings(max_examples=150, deadline=None)
@given(
    course=st.lists(acts, min_size=3, max_size=40),
    slots=st.integers(1, 4),
    seqs=st.integers(1, 4),
    budget=st.sampled_from([1, 2, 5, 50]),
)
def test_any_course_of_events(tiny: LanguageModel, course: list[tuple], slots: int, seqs: int, budget: int):
    gc.disable()  # a forgotten stream is collected when its last name goes, and so the same way each time
    try:
        told = Course(tiny, slots, seqs, budget)
        for act, *numbers in course:
            getattr(told, act)(*numbers)
            told.engine.check_invariants()
        told.engine.runner.failure = None
        told.end()
    finally:
        gc.enable()


# -- an interrupt at any line -----------------------------------------------------------------------------------------

FILES = {module.__file__ for module in (engine, scheduler, kv_cache, request, stream)}


class InterruptAt:
    """Presses Ctrl-C when the engine's own code has run so many lines."""

    def __init__(self, line: int) -> None:
        self.left, self.pressed = line, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.pressed = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def test_an_interrupt_at_any_line_of_a_step_loses_nothing(tiny: LanguageModel):
    """Two slots, three requests: the course has admissions, chunks, decodes and ends in it."""
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 3, 1)]
    lost = []
    for line in itertools.count(1):
        made = engine_of(tiny, 2, 2, 3, lambda: 0.0)
        for i, prompt in enumerate(prompts):
            made.add_request(prompt, params[i], request_id=str(i))
        outputs, interrupt = [], InterruptAt(line)
        try:
            for _ in range(9):  # it takes 7, and one more if one was interrupted
                try:
                    with interrupt:
                        made._advance()
                except KeyboardInterrupt:
                    pass
                outputs, made._outputs = outputs + made._outputs, []
                made.check_invariants()
            said = {o.request_id: (o.token_ids, o.finish_reason) for o in outputs}
            expected = {str(i): (says(p, 0, params[i].max_tokens), "length") for i, p in enumerate(prompts)}
            assert said == expected and len(outputs) == 3 and made.cache.blocks_used == 0
        except Exception as error:
            lost.append((line, interrupt.pressed, repr(error)[:90]))
        if not interrupt.pressed:
            break
    assert line > 300
    assert not lost, "\n".join(map(str, lost))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:Interrupted")
def test_an_interrupt_at_any_line_of_generate_leaves_the_engine_usable(tiny: LanguageModel):
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 3, 1)]
    expected = [says(p, 0, each.max_tokens) for p, each in zip(prompts, params, strict=True)]
    cut = 0
    for line in itertools.count(1, 3):
        made = engine_of(tiny, 2, 2, 3, lambda: 0.0)
        interrupt, outputs = InterruptAt(line), []
        try:
            with interrupt:
                outputs = made.generate(prompts, params)
        except KeyboardInterrupt:
            pass  # before anything was begun, or when all was over
        for output, whole in zip(outputs, expected, strict=False):
            assert output.token_ids == whole[: len(output.token_ids)], interrupt.pressed
            assert (output.finish_reason == "length") == (output.token_ids == whole), interrupt.pressed
        cut += any(output.finish_reason == "abort" for output in outputs)
        made.check_invariants()
        assert made.cache.blocks_used == 0 and not made.has_unfinished() and not made._owned, interrupt.pressed
        assert [output.token_ids for output in made.generate(prompts, params)] == expected, interrupt.pressed
        if not interrupt.pressed:
            break
    assert line > 300 and cut > 50


def test_an_interrupt_that_was_held_comes_right_after():
    lines = []
    with pytest.raises(KeyboardInterrupt), held_interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        lines.append("held")
        with held_interrupts():  # inside another: still held
            signal.raise_signal(signal.SIGINT)
        lines.append("inside another")
        with pytest.raises(KeyboardInterrupt), interrupts.let_through():
            lines.append("never")
        with pytest.raises(KeyboardInterrupt), interrupts.let_through():
            signal.raise_signal(signal.SIGINT)
            lines.append("never")
        signal.raise_signal(signal.SIGINT)
        lines.append("the last")
    assert lines == ["held", "inside another", "the last"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_the_main_thread_and_under_other_handlers(tiny: LanguageModel):
    """A thread may not set a handler; one that is no function of Python's stays as it is."""
    made, said = engine_of(tiny, 2, 2, 3, lambda: 0.0), []
    thread = threading.Thread(target=lambda: said.extend(made.generate([[5, 6]], SamplingParams(max_tokens=4))))
    thread.start()
    thread.join()
    assert [output.token_ids for output in said] == [says([5, 6], 0, 4)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert made.generate([[5, 6]], SamplingParams(max_tokens=4))[0].token_ids == says([5, 6], 0, 4)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
