"""Several threads over one engine, and several engines over one model: everybody gets the answers they get alone.

Every thread is given a time to end in, so that one that hangs fails its test.
"""

import contextlib
import faulthandler
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from engines import (
    KINDS,
    MIX,
    acting,
    alone,
    assert_idle,
    by_id,
    free,
    run,
    settle,
    skip_without_backend,
    tokens,
    watched,
)
from families import hf_generate

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, NaiveEngine, SamplingParams, load_model
from minfer_lib.errors import GenerationFailed, InvalidParameter, MinferError
from minfer_lib.models import hf_compat

Family = Callable[[str], LanguageModel]
Make = Callable[..., LLMEngine]


@pytest.fixture(params=["slots", "pages, compiled", "few pages"])
def make(request: pytest.FixtureRequest) -> Make:
    skip_without_backend(KINDS[request.param])
    return lambda lm, **options: watched(lm, **(KINDS[request.param] | options))


@pytest.fixture()
def eager_switching() -> Iterator[None]:
    """Python takes turns between threads as often as it can, so that what can go wrong does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def ends_in_time() -> Iterator[None]:
    """The main thread, too: it is shown where it hangs, and the process ends."""
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


class Threads:
    """with Threads(...) as threads: the functions run at the same time; at the end all must have returned in time."""

    def __init__(self, *functions: Callable[[], object], seconds: float = 120) -> None:
        self.errors: list[BaseException] = []
        self.ends = time.monotonic() + seconds
        self.threads = [threading.Thread(target=self._run, args=(f,), daemon=True) for f in functions]

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self.errors.append(error)

    def alive(self) -> bool:
        assert time.monotonic() < self.ends, "a thread hangs"
        return any(thread.is_alive() for thread in self.threads)

    def __enter__(self) -> "Threads":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self.threads:
            thread.join(max(0.0, self.ends - time.monotonic()))
        if any(thread.is_alive() for thread in self.threads):
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError("a thread hangs")
        if self.errors:
            raise self.errors[0]


def run_threads(*functions: Callable[[], object]) -> None:
    with Threads(*functions):
        pass


# -- one engine, several threads --------------------------------------------------------------------------------------


def test_threads_that_generate_share_their_steps(family: Family, make: Make):
    lm = family("llama")
    engine, prompts = make(lm), [MIX[1], MIX[3], MIX[7]]

    def ask(prompt: list[int]) -> None:
        expected = alone(lm, prompt, 8)
        for _ in range(30):
            output = engine.generate([prompt], free(8))[0]
            assert (output.token_ids, output.finish_reason) == (expected, "length")

    run_threads(*(lambda prompt=prompt: ask(prompt) for prompt in prompts))
    assert_idle(engine)
    assert engine.stats()["steps"] < 0.75 * 3 * 30 * 8  # one after the other would take all of these


def test_nothing_that_is_added_or_aborted_meanwhile_is_lost(tiny: LanguageModel, make: Make, eager_switching: None):
    engine, count = make(tiny, max_num_seqs=256, max_num_batched_tokens=512), 800
    expected = {letter: hf_generate(tiny, [letter], 2) for letter in range(97, 101)}

    def add(letter: int) -> None:
        for i in range(count):
            name = engine.add_request([letter], free(2), request_id=f"{letter} {i}")
            if i % 3 == 0:
                engine.abort(name)

    outputs = []
    with Threads(*(lambda letter=letter: add(letter) for letter in expected)) as threads:
        while threads.alive() or engine.has_unfinished():
            outputs += engine.step()
    said = by_id(outputs)
    assert len(said) == 4 * count
    for output in outputs:
        letter, i = map(int, output.request_id.split())
        assert output.token_ids == expected[letter][: len(output.token_ids)]
        assert output.finish_reason == "length" or (output.finish_reason == "abort" and i % 3 == 0)
    assert_idle(engine)


def test_ids_are_taken_once(tiny: LanguageModel, eager_switching: None):
    """Of several threads that want the same id at the same time one gets it; ids that are made are all different."""
    engine, taken, made = watched(tiny), [], []

    def add() -> None:
        for i in range(100):
            made.append(engine.add_request("a", free(1)))
            with contextlib.suppress(InvalidParameter):
                taken.append(engine.add_request("a", free(1), request_id=f"r{i}"))

    run_threads(*[add] * 4)
    assert sorted(taken) == sorted(f"r{i}" for i in range(100)) and len(set(made)) == 400
    assert sorted(by_id(run(engine))) == sorted([*taken, *made])


def test_no_stream_is_cut_in_silence(tiny: LanguageModel, make: Make):
    engine, prompts = make(tiny), [[97 + i, 98] for i in range(24)]
    expected = [hf_generate(tiny, prompt, 8) for prompt in prompts]

    def read(i: int) -> None:
        pieces = list(engine.stream(prompts[i], free(8)))
        assert [token for piece in pieces for token in piece.token_ids] == expected[i]
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]

    run_threads(*(lambda i=i: read(i) for i in range(24)))
    assert_idle(engine)


def test_a_stream_that_another_thread_aborts_says_so(tiny: LanguageModel, make: Make):
    engine = make(tiny)
    streams = [engine.stream([97 + i], free(50)) for i in range(4)]
    pieces = [[next(stream)] for stream in streams]

    def read(i: int) -> None:
        pieces[i] += streams[i]

    def abort() -> None:
        for stream in streams[::2]:
            engine.abort(stream.request_id)

    run_threads(*(lambda i=i: read(i) for i in range(4)), abort)
    assert [p[-1].finish_reason in (("abort", "length") if i % 2 == 0 else ("length",)) for i, p in enumerate(pieces)]
    for i, mine in enumerate(pieces):
        said = [token for piece in mine for token in piece.token_ids]
        assert said == hf_generate(tiny, [97 + i], 50)[: len(said)]
        assert mine[-1].finish_reason == "length" or (i % 2 == 0 and mine[-1].finish_reason == "abort")
    assert_idle(engine)


def test_threads_that_step_hand_each_output_out_once(family: Family, make: Make, eager_switching: None):
    lm = family("llama")
    engine, got = make(lm), []
    for i in range(40):
        engine.add_request(MIX[i % 8], free(6), request_id=str(i))

    def step() -> None:
        while engine.has_unfinished():
            got.append(engine.step())

    run_threads(*[step] * 4)
    outputs = [output for outputs in got for output in outputs]
    assert by_id(outputs) == {str(i): alone(lm, MIX[i % 8], 6) for i in range(40)}
    assert_idle(engine)


def test_threads_that_step_hand_failures_out_once(tiny: LanguageModel, make: Make, eager_switching: None):
    engine, got, count = make(tiny, max_num_seqs=4), [], itertools.count(1)
    forward = engine.runner.forward

    def broken(inputs: object) -> object:
        if next(count) % 2:
            raise RuntimeError("a shape is wrong")
        return forward(inputs)

    engine.runner.forward = broken
    for i in range(120):
        engine.add_request([97 + i % 20], free(1), request_id=str(i))

    def step() -> None:
        while engine.has_unfinished():
            try:
                got.extend(engine.step())
            except GenerationFailed as failure:
                got.extend(failure.outputs)

    run_threads(*[step] * 6)
    assert sorted(by_id(got)) == sorted(map(str, range(120)))
    assert {output.finish_reason for output in got} == {"error", "length"}


def test_what_a_step_refuses_to_its_own_logits_processor_changes_nothing(family: Family, make: Make):
    lm = family("llama")
    engine = make(lm)
    stream = engine.stream(MIX[1], free(10))
    said = list(next(stream).token_ids)
    messages = []

    def try_all() -> None:
        for call in (engine.step, lambda: next(stream), lambda: engine.generate(MIX[2], free(6))):
            with pytest.raises(MinferError, match="in the middle of a step") as caught:
                call()
            messages.append(str(caught.value))

    engine.add_request(MIX[0], free(10, logits_processors=[acting(try_all, 4)]), request_id="a")
    pieces = list(stream)
    said += [token for piece in pieces for token in piece.token_ids]
    assert said == alone(lm, MIX[1], 10) and pieces[-1].finish_reason == "length" and len(messages) == 3
    assert by_id(run(engine)) == {"a": alone(lm, MIX[0], 10)}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this system")
def test_a_thread_whose_steps_are_broken_off_costs_the_others_nothing(family: Family, make: Make):
    lm = family("llama")
    engine, struck = make(lm), 0

    class TimeUp(BaseException):
        pass

    def end(*_: object) -> None:
        raise TimeUp

    def ask(prompt: list[int]) -> None:
        for _ in range(30):
            assert tokens(engine.generate([prompt], free(8))) == [alone(lm, prompt, 8)]

    for prompt in MIX[:3]:
        alone(lm, prompt, 8)
    before = signal.signal(signal.SIGALRM, end)
    try:
        with Threads(*(lambda prompt=prompt: ask(prompt) for prompt in MIX[:3])) as threads:
            for i in itertools.count():
                if not threads.alive():
                    break
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + i % 13))
                    engine.generate(MIX[4], free(20))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except TimeUp:
                    struck += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck >= 3
    settle(engine)


@pytest.mark.parametrize("engine", ["llm_engine", "serial"])
def test_no_lock_of_others_is_taken_by_who_asks_for_no_progress(tiny: LanguageModel, monkeypatch, engine: str):
    """tqdm has one for the whole process, which an exception in the wrong moment leaves taken."""
    monkeypatch.setattr(f"minfer_lib.engine.{engine}.tqdm", lambda *args, **options: 1 / 0)
    make = LLMEngine if engine == "llm_engine" else CachedEngine
    assert make(tiny).generate("ab", free(3))[0].token_ids == hf_generate(tiny, [97, 98], 3)


# -- one model, several users at the same time ------------------------------------------------------------------------


class Attention:
    """Looks all the while at which attention function a model has."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.names, self.over = lm, {hf_compat.attention_of(lm.model.config)}, False

    def watch(self) -> None:
        while not self.over:
            self.names.add(hf_compat.attention_of(self.lm.model.config))
            time.sleep(1e-4)


def ask_all(lm: LanguageModel, users: dict[str, Callable[[list[int]], list[int]]], times: int) -> None:
    """Each user in a thread of its own, with the same prompts; their answers, and what they leave behind."""
    prompts = MIX[:4] if lm.vocab_size > 120 else [[3, 4, 5], [5], [7, 8]]
    expected = [hf_generate(lm, prompt, 8) for prompt in prompts]
    attention, names = Attention(lm), hf_compat.attention_of(lm.model.config)
    left = [len(users)]

    def ask(answer: Callable[[list[int]], list[int]]) -> None:
        try:
            for i in range(times):
                assert answer(prompts[i % len(prompts)]) == expected[i % len(prompts)]
        finally:
            left[0] -= 1
            attention.over |= left[0] == 0

    run_threads(*(lambda answer=answer: ask(answer) for answer in users.values()), attention.watch)
    assert attention.names == {names}


@pytest.mark.parametrize("name", ["tiny-random", "gemma2"])
def test_all_kinds_of_users_of_one_model_at_the_same_time(family: Family, name: str, eager_switching: None):
    lm = load_model(name, device="cpu") if name == "tiny-random" else family(name)
    engines = [
        LLMEngine(lm, "paged", enable_prefix_caching=False), LLMEngine(lm, "slots", max_num_seqs=4),
        NaiveEngine(lm), CachedEngine(lm),
    ]  # fmt: skip
    users = {e.name + str(i): lambda p, e=e: e.generate([p], free(8))[0].token_ids for i, e in enumerate(engines)}
    users["generate"] = lambda prompt: generated(lm, prompt)
    ask_all(lm, users, times=40)


def generated(lm: LanguageModel, prompt: list[int]) -> list[int]:
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        said = lm.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return said[0, len(prompt) :].tolist()


def test_engines_are_made_while_others_run(family: Family):
    """Making one asks the model some things and merges projections, under the hands of those who run it."""
    lm = family("qwen3")
    engine = LLMEngine(lm, "paged")
    users = {
        "runs": lambda prompt: engine.generate([prompt], free(8))[0].token_ids,
        "makes": lambda prompt: LLMEngine(lm, "slots", max_num_seqs=2).generate([prompt], free(8))[0].token_ids,
        "plain": lambda prompt: NaiveEngine(lm).generate([prompt], free(8))[0].token_ids,
    }
    ask_all(lm, users, times=12)


def test_continuous_batching_of_transformers_beside_engines(tiny: LanguageModel):
    try:
        from minfer_lib.bench.hf_continuous import HFContinuousBatch
    except ImportError as error:
        pytest.skip(f"bench/ is being rebuilt: {error}")
    theirs, engine, plain = HFContinuousBatch(tiny), LLMEngine(tiny, "paged"), NaiveEngine(tiny)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    users = {
        "theirs": lambda prompt: theirs.generate([prompt], params)[0].token_ids,
        "ours": lambda prompt: engine.generate([prompt], params)[0].token_ids,
        "plain": lambda prompt: plain.generate([prompt], params)[0].token_ids,
    }
    ask_all(tiny, users, times=6)
