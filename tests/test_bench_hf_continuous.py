"""transformers' continuous batching gives what `generate` gives, within its limit, and leaves the model as it was."""

import dataclasses
import threading

import pytest
import torch
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching import continuous_api

from minfer_lib import LLMEngine
from minfer_lib.bench import HFContinuousBatch, HFSerial, compare, make_engine, mixed_lengths, serve
from minfer_lib.bench.probe_memory import recipe
from minfer_lib.bench.roofline import kv_token_bytes
from minfer_lib.errors import BadEnvironment, GenerationFailed, InvalidParameter, PromptTooLong, UnsupportedModel
from minfer_lib.generation.params import SamplingParams
from minfer_lib.models.load import load_model

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 3, 21], [40, 41, 42, 43, 44]]
LENGTHS = (6, 3, 9, 1)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


@pytest.fixture(scope="module")
def engine(lm):
    return HFContinuousBatch(lm, 2)


@pytest.fixture(scope="module")
def wanted(lm):
    return tokens(HFSerial(lm).generate(PROMPTS, fixed(*LENGTHS)))


@pytest.fixture(autouse=True)
def untouched(lm):
    """Whatever a test does, the model's attention function is the one before, and no thread of the library is left."""
    threads = set(threading.enumerate())
    yield
    assert lm.model.config._attn_implementation == "sdpa"
    assert getattr(lm.model, "_cached_continuous_batching_manager", None) is None
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= threads  # tqdm's is one


def fixed(*lengths):
    return [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]


def tokens(outputs):
    return [out.token_ids for out in outputs]


def test_tokens_are_those_of_generate_call_after_call(engine, wanted):
    for _ in range(3):
        outputs = engine.generate(PROMPTS, fixed(*LENGTHS))
        assert tokens(outputs) == wanted
        assert all(out.finish_reason == "length" and out.error is None for out in outputs)
    assert [out.prompt_token_ids for out in outputs] == PROMPTS


def test_no_more_run_at_once_than_allowed(lm, engine):
    def most(outputs):
        spans = [(out.metrics.first_scheduled, out.metrics.finished) for out in outputs]
        return max(sum(a <= moment < b for a, b in spans) for moment, _ in spans)

    prompts, params = [[i, 2, 3] for i in range(8)], fixed(*range(4, 12))
    assert most(engine.generate(prompts, params)) == 2
    assert most(HFContinuousBatch(lm, 5).generate(prompts, params)) == 5


def test_steps_are_counted(lm):
    """Three at once, of the same lengths: as many steps as tokens, once for each three."""
    engine = HFContinuousBatch(lm, 3)
    before = engine.num_steps
    engine.generate([[i, 2, 3] for i in range(6)], fixed(*[7] * 6))
    assert engine.num_steps - before == 14


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_how_it_was_set_is_told(lm, wanted, attention):
    engine = HFContinuousBatch(lm, 3, max_batch_tokens=99, attention=attention)
    assert tokens(engine.generate(PROMPTS, fixed(*LENGTHS))) == wanted
    told = engine.settings
    assert f"attention={attention}" in told and "max_batch_tokens=99, max_requests_per_batch=3" in told
    assert "transformers 5." in told and "num_blocks=" in told
    assert HFContinuousBatch(lm, 2, cuda_graph=True)._config([]).use_cuda_graph is True  # a CPU has none all the same
    with pytest.raises(InvalidParameter, match="there are `sdpa`, `eager` and None"):
        HFContinuousBatch(lm, 2, attention="flash")


def test_a_prompt_beyond_a_steps_budget_comes_in_pieces(lm):
    prompt = [list(range(3, 103))]
    outputs = HFContinuousBatch(lm, 2, max_batch_tokens=16).generate(prompt, fixed(5))
    assert tokens(outputs) == tokens(HFSerial(lm).generate(prompt, fixed(5)))


def test_times_are_in_order_and_leave_out_the_start(engine):
    outputs = engine.generate(PROMPTS, fixed(*LENGTHS))
    for out in outputs:
        times = out.metrics
        assert times.arrival <= times.first_scheduled < times.first_token <= times.last_token <= times.finished
        assert times.num_tokens == len(out.token_ids) and (times.tpot_s is None) == (len(out.token_ids) == 1)
    assert len({out.metrics.arrival for out in outputs}) == 1 and engine.aside_s > 0
    assert outputs[2].metrics.first_scheduled > outputs[0].metrics.first_token  # it waited for a place


def test_eos_counts_for_those_who_do_not_ignore_it(lm, engine, wanted):
    free = tokens(engine.generate(PROMPTS, fixed(*[9] * 4)))
    end = free[2][3]
    ending = dataclasses.replace(lm, eos_ids=frozenset({end}))
    params = [SamplingParams(max_tokens=9, ignore_eos=i % 2 == 0) for i in range(4)]
    params[2] = SamplingParams(max_tokens=9)
    outputs = HFContinuousBatch(ending, 4).generate(PROMPTS, params)
    assert tokens(outputs) == tokens(HFSerial(ending).generate(PROMPTS, params))
    assert outputs[2].token_ids[-1] == end and outputs[2].finish_reason == "stop"
    assert tokens(outputs)[0] == free[0]


def test_stop_strings_cut_as_in_every_engine(lm, engine):
    text = HFSerial(lm).generate("Hello", SamplingParams(max_tokens=12, ignore_eos=True))[0].text
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=text[3:5])
    ours, theirs = engine.generate("Hello", params)[0], HFSerial(lm).generate("Hello", params)[0]
    assert (ours.text, ours.token_ids, ours.stop_reason) == (theirs.text, theirs.token_ids, text[3:5])


def test_what_it_cannot_do_is_refused(lm, engine):
    with pytest.raises(InvalidParameter, match="greedy"):
        engine.generate([1], SamplingParams(temperature=0.7))
    with pytest.raises(InvalidParameter, match="min_tokens"):
        engine.generate([1], SamplingParams(max_tokens=5, min_tokens=2))
    with pytest.raises(PromptTooLong):
        HFContinuousBatch(lm, max_model_len=8).generate([1] * 8)
    for wrong in (0, 2.5, True):
        with pytest.raises(InvalidParameter, match="max_running"):
            HFContinuousBatch(lm, wrong)


def test_arrivals_are_obeyed(lm, engine, wanted):
    served = serve(engine, dataclasses.replace(mixed_lengths(lm, 4), prompts=PROMPTS, params=fixed(*LENGTHS)),
                   [0.15, 0.0, 0.0, 0.05])  # fmt: skip
    assert tokens(served.outputs) == wanted
    times = [out.metrics for out in served.outputs]
    assert [round(t.arrival - served.began, 9) for t in times] == [0.15, 0.0, 0.0, 0.05]
    assert all(t.first_scheduled >= t.arrival for t in times) and served.metrics.padding_share is None
    assert served.metrics.wall_s >= 0.15


def test_a_comparison_and_a_fresh_process_can_have_it(lm, engine):
    work = mixed_lengths(lm, 4, (3, 20), (2, 9))
    found = compare(HFSerial(lm), engine, workload=work, repeats=1, show=False)
    row = found.row("HF continuous")
    assert row.tokens == "same" and not found.warnings and row.kv_reserved >= row.kv_used
    assert row.kv_used >= max(p + n - 1 for p, n in zip(work.prompt_lens, work.output_lens, strict=True)) * (
        kv_token_bytes(lm)
    )
    assert any("HF continuous: up to" in note and "starting and stopping" in note for note in found.notes)
    made = recipe(HFContinuousBatch(lm, 3, max_batch_tokens=99, max_model_len=70))
    assert made["options"] == {
        "max_running": 3, "max_batch_tokens": 99, "max_model_len": 70, "cuda_graph": None, "attention": None
    }  # fmt: skip
    assert make_engine("hf-continuous", lm, max_running=3).max_running == 3


# -- when it fails --------------------------------------------------------------------------------------------------


def test_it_runs_beside_an_engine_and_generate_on_the_same_model(lm, engine, wanted):
    """Each has its own attention function, in its own thread, and gives its own tokens."""
    ours, serial = LLMEngine(lm, max_num_seqs=2), HFSerial(lm)
    runs = {"engine": ours, "generate": serial, "continuous": engine}
    answers = {name: [] for name in runs}

    def run(name):
        for _ in range(3):
            answers[name].append(tokens(runs[name].generate(PROMPTS, fixed(*LENGTHS))))

    threads = [threading.Thread(target=run, args=(name,)) for name in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {name: [wanted] * 3 for name in runs}


def test_a_manager_that_a_user_keeps_on_their_model_is_left_alone(lm, engine, wanted):
    """`_cached_continuous_batching_manager`: without it ours would take it over, and end it."""
    theirs = object.__new__(continuous_api.ContinuousBatchingManager)
    lm.model._cached_continuous_batching_manager = theirs
    try:
        assert tokens(engine.generate(PROMPTS, fixed(*LENGTHS))) == wanted
        assert lm.model._cached_continuous_batching_manager is theirs
    finally:
        del lm.model._cached_continuous_batching_manager


def test_a_failing_model_is_refused_and_leaves_nothing_switched(lm, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(lm.model, "forward", broken)
    with pytest.raises(UnsupportedModel, match="no kernel for this"):
        HFContinuousBatch(lm, 2)


def test_a_manager_that_does_not_start_is_refused(lm, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("Implementation odd is not supported")

    monkeypatch.setattr(lm.model, "init_continuous_batching", broken)
    with pytest.raises(UnsupportedModel, match=r"tiny-random with continuous batching.*odd is not supported"):
        HFContinuousBatch(lm, 2)


def test_a_release_without_it_is_named(lm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(configuration_utils, "ContinuousBatchingConfig")
        with pytest.raises(BadEnvironment, match=r"5\.17 to 5\.24 are known"):
            HFContinuousBatch(lm)

    @dataclasses.dataclass
    class Other:
        size: int = 1

    monkeypatch.setattr(configuration_utils, "ContinuousBatchingConfig", Other)
    with pytest.raises(BadEnvironment, match="no continuous batching that can be measured"):
        HFContinuousBatch(lm)


def test_an_interrupt_ends_the_thread_at_once(lm, engine, wanted, monkeypatch):
    steps = []
    hook = lm.model.register_forward_pre_hook(lambda *inputs: steps.append(1))

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, fixed(500, 500, 500, 500))
    hook.remove()
    assert len(steps) < 500  # rather than the thousand that the answers would have taken
    assert tokens(engine.generate(PROMPTS, fixed(*LENGTHS))) == wanted


def test_a_request_that_is_dropped_or_lost_is_an_error(engine, monkeypatch):
    manager = continuous_api.ContinuousBatchingManager
    with monkeypatch.context() as patch:
        patch.setattr(manager, "add_request", lambda self, *args, **options: None)
        with pytest.raises(GenerationFailed, match="takes no requests"):
            engine.generate(PROMPTS, fixed(*LENGTHS))
    with monkeypatch.context() as patch:
        patch.setattr(manager, "get_result", lambda self, **options: None)
        patch.setattr(manager, "is_running", lambda self: False)
        with pytest.raises(GenerationFailed, match="ended with 0 of 4"):
            engine.generate(PROMPTS, fixed(*LENGTHS))


def test_tokens_without_their_moments_are_an_error(engine, monkeypatch):
    from minfer_lib.bench import hf_continuous

    original = hf_continuous.replay

    def without_one(result, request):
        result.timestamps = result.timestamps[1:]
        original(result, request)

    monkeypatch.setattr(hf_continuous, "replay", without_one)
    out = engine.generate([1, 2, 3], fixed(4)[0])[0]
    assert out.finish_reason == "error" and "3 time stamps to 4 tokens" in out.error
