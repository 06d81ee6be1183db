"""What all engines share: `generate` and `stream`, limits, metrics, and what is left when something breaks."""

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from types import MethodType

import pytest
import torch
from families import hf_generate, saying
from test_stream_decoder import TEXTS
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, NaiveEngine, RequestOutput, SamplingParams, load_model
from minfer_lib.cache.contiguous import KVCache, KVCacheLayer
from minfer_lib.engine.serial import Engine, SerialEngine
from minfer_lib.errors import GenerationFailed, InvalidParameter, InvalidPrompt, PromptTooLong, UnsupportedModel

ENGINES: dict[str, Callable[..., SerialEngine]] = {
    "naive": NaiveEngine,
    "own": lambda lm, **options: CachedEngine(lm, "own", **options),
    "hf": lambda lm, **options: CachedEngine(lm, "hf", **options),
}


EVERY: dict[str, Callable[..., Engine]] = ENGINES | {
    "slots": lambda lm, **options: LLMEngine(lm, "slots", **options),
    "paged": lambda lm, **options: LLMEngine(lm, "paged", block_size=4, **options),
}


@pytest.fixture(params=EVERY)
def any_engine(request: pytest.FixtureRequest, tiny: LanguageModel) -> Engine:
    return EVERY[request.param](tiny, max_model_len=64)


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Callable[..., SerialEngine]:
    return ENGINES[request.param]


@pytest.fixture()
def engine(make: Callable[..., SerialEngine], tiny: LanguageModel) -> SerialEngine:
    return make(tiny, max_model_len=64)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def free(**params: object) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=6, ignore_eos=True) | params))


class Calls:
    """Watches a model's forward passes, and may break one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lm: LanguageModel) -> None:
        self.shapes: list[int] = []
        self.break_at: dict[int, BaseException] = {}
        forward = lm.model.forward

        def watched(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
            self.shapes.append(kwargs["input_ids"].shape[1])
            if error := self.break_at.get(len(self.shapes)):
                raise error
            return forward(*args, **kwargs)

        # the signature stays: engines read from it how the model calls its cache
        watched.__wrapped__ = type(lm.model).forward
        monkeypatch.setattr(lm.model, "forward", MethodType(watched, lm.model))


@pytest.fixture()
def calls(monkeypatch: pytest.MonkeyPatch, tiny: LanguageModel) -> Calls:
    return Calls(monkeypatch, tiny)


# -- generate and stream ----------------------------------------------------------------------------------------------


def test_outputs_come_in_input_order(engine: SerialEngine):
    prompts = ["abc", [1], "x" * 20]
    outputs = engine.generate(prompts, [free(max_tokens=n) for n in (3, 5, 1)])
    assert [o.request_id for o in outputs] == ["0", "1", "2"] and [o.index for o in outputs] == [0, 0, 0]
    assert [len(o.token_ids) for o in outputs] == [3, 5, 1]
    assert [o.prompt_token_ids for o in outputs] == [[97, 98, 99], [1], [120] * 20]
    assert [o.finish_reason for o in outputs] == ["length"] * 3
    assert tokens(outputs) == [hf_generate(engine.lm, o.prompt_token_ids, len(o.token_ids)) for o in outputs]
    assert engine.generate("a", free())[0].request_id == "3"
    assert engine.generate([]) == []


def test_a_stream_is_generate_in_pieces(engine: SerialEngine):
    whole = engine.generate("abc", free(temperature=1.0, seed=3, max_tokens=12))[0]
    pieces = list(engine.stream("abc", free(temperature=1.0, seed=3, max_tokens=12)))
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids and len(pieces) == 12
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.finish_reason for p in pieces] == [None] * 11 + ["length"]
    assert {(p.request_id, p.index) for p in pieces} == {("1", 0)}


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_unicode(tiny: LanguageModel, name: str):
    """The model is made to say the text byte by byte; every piece is whole, and they join to the full decode."""
    ids = tiny.encode(TEXTS[name])
    for make_engine in ENGINES.values():
        pieces = list(make_engine(tiny).stream("say: ", saying([*ids, 258])))
        assert "".join(p.text for p in pieces) == TEXTS[name] == tiny.decode([t for p in pieces for t in p.token_ids])
        assert len(pieces) == len(ids) + 1 and not any("\ufffd" in p.text for p in pieces)


def test_streamed_unicode_of_the_real_tokenizer(smollm2: LanguageModel):
    ids = smollm2.encode(TEXTS["emoji"])[:8]
    pieces = list(CachedEngine(smollm2, max_model_len=64).stream("Say:", saying(ids)))
    shown = "".join(p.text for p in pieces)
    assert shown == smollm2.decode(ids).rstrip("\ufffd") and "👍" in shown and "\ufffd" not in shown


def test_stop_strings_in_a_stream(engine: SerialEngine):
    pieces = list(engine.stream("say: ", saying(list(b"one STOP two"), stop=["STOP", "never"])))
    assert "".join(p.text for p in pieces) == "one " and pieces[-1].finish_reason == "stop"
    output = engine.generate("say: ", saying(list(b"one STOP two"), stop=["STOP", "never"]))[0]
    assert (output.text, output.stop_reason, output.token_ids) == ("one ", "STOP", list(b"one STOP"))


def test_n_answers(engine: SerialEngine):
    outputs = engine.generate(["ab", "c"], free(n=3, temperature=2.0, seed=7, max_tokens=8))
    assert [(o.request_id, o.index) for o in outputs] == [(r, i) for r in "01" for i in range(3)]
    assert len({tuple(t) for t in tokens(outputs)}) == 6
    again = [
        engine.generate(p, free(n=3, temperature=2.0, seed=7, max_tokens=8)) for p in ("ab", "c")
    ]  # in any company
    assert tokens(outputs) == tokens([o for outputs in again for o in outputs])
    one = engine.generate("ab", free(temperature=2.0, seed=7, max_tokens=8))[0]
    assert one.token_ids == outputs[0].token_ids  # the first is what a single answer would be
    greedy = engine.generate("ab", free(n=2))
    assert greedy[0].token_ids == greedy[1].token_ids
    pieces = list(engine.stream("ab", free(n=2, max_tokens=3)))
    assert [p.index for p in pieces] == [0, 0, 0, 1, 1, 1]
    assert [p.finish_reason for p in pieces] == [None, None, "length"] * 2


def test_seeded_sampling_is_the_same_in_any_company_and_engine(tiny: LanguageModel):
    prompts = ["one", "another", "x"]
    params = [SamplingParams(temperature=1.3, top_p=0.9, seed=s, max_tokens=10) for s in (1, 2, 3)]
    expected = None
    for make_engine in ENGINES.values():
        engine = make_engine(tiny)
        together = tokens(engine.generate(prompts, params))
        alone = [engine.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        backwards = tokens(engine.generate(prompts[::-1], params[::-1]))[::-1]
        assert together == alone == backwards
        expected = expected or together
        assert together == expected
    assert tokens(engine.generate(prompts, [dataclasses.replace(p, seed=9) for p in params])) != expected


def test_answers_and_seeds_are_independent(any_engine: Engine):
    """No answer to one seed is an answer to another; equal prompts of one call share what their seed says."""
    hot = dict(temperature=1.5, max_tokens=8, n=4)
    seven, eight = (tokens(any_engine.generate("abc", free(seed=seed, **hot))) for seed in (7, 8))
    assert len({tuple(answer) for answer in seven + eight}) == 8
    first, second = any_engine.generate(["abc", "abc"], free(seed=7, temperature=1.5, max_tokens=8))
    assert first.token_ids == second.token_ids == seven[0]


class Counts:
    """A logits processor with a state: its first call says A, its second B, ..."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.full_like(logits, -math.inf).index_fill(0, torch.tensor([64 + self.calls]), 0.0)


def test_each_answer_has_logits_processors_of_its_own(any_engine: Engine):
    processor = Counts()
    params = free(max_tokens=4, logits_processors=[processor])
    outputs = any_engine.generate("a", dataclasses.replace(params, n=2)) + any_engine.generate(["a", "b"], params)
    assert [output.text for output in outputs] == ["ABCD"] * 4 and processor.calls == 0


@pytest.fixture(scope="module")
def wide() -> LanguageModel:
    """ByT5's tokenizer, which raises for ids beyond its 384, under a vocabulary of 400."""
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LanguageModel.of(LlamaForCausalLM(config), ByT5Tokenizer(), "wide")


@pytest.mark.parametrize(
    ("name", "stop"),
    [(name, stop) for name in EVERY for stop in (None, "never")],
)
def test_an_answer_that_the_tokenizer_cannot_decode_ends_alone(wide: LanguageModel, name: str, stop: str | None):
    engine, letters = EVERY[name](wide), [ord(c) + 3 for c in "abcdef"]
    with pytest.raises(ValueError, match="399"):
        wide.decode([399])
    scripts = [letters, letters, [*letters[:2], 399, *letters[2:5]], *[letters] * 4]
    outputs = engine.generate([letters[:2]] * 7, [saying(script, stop=stop) for script in scripts])
    assert [output.finish_reason for output in outputs] == ["length"] * 2 + ["error"] + ["length"] * 4
    assert "cannot decode" in outputs[2].error and outputs[2].text in ("", "ab")
    assert [output.text for output in outputs if output is not outputs[2]] == ["abcdef"] * 6
    pieces = list(engine.stream(letters[:2], saying(scripts[2], stop=stop)))
    assert pieces[-1].finish_reason == "error"
    assert tokens(engine.generate([letters[:2]], saying(letters))) == [letters]


def test_conversations(any_engine: Engine):
    """A string, a list of messages, or a list of either; the answers are those to the template's tokens."""
    message = [{"role": "user", "content": "hi"}]
    expected = any_engine.generate([any_engine.lm.chat_ids(message)], free())[0].token_ids
    assert tokens(any_engine.chat(message, free())) == tokens(any_engine.chat("hi", free())) == [expected]
    assert tokens(any_engine.chat([message, "hi"], [free(), free(max_tokens=2)])) == [expected, expected[:2]]
    assert tokens(any_engine.chat(["hi", "hi"], free())) == [expected] * 2 and any_engine.chat([]) == []
    with pytest.raises(InvalidPrompt):
        any_engine.chat([{"role": "user"}], free())


def test_without_a_seed_answers_differ(engine: SerialEngine):
    hot = free(temperature=5.0, max_tokens=8)
    assert engine.generate("a", hot)[0].token_ids != engine.generate("a", hot)[0].token_ids


@pytest.mark.parametrize("penalty", [0.3, 3.0])
def test_repetition_penalty_is_that_of_transformers(engine: SerialEngine, penalty: float):
    """Over prompt and answer; the one below 1 makes the model repeat itself, so that many tokens change."""
    for prompt in ([97, 98, 97, 99], [5] * 9):
        expected = hf_generate(engine.lm, prompt, 12, repetition_penalty=penalty)
        output = engine.generate(prompt, free(repetition_penalty=penalty, max_tokens=12))[0]
        assert output.token_ids == expected
        assert penalty > 1 or expected != hf_generate(engine.lm, prompt, 12)


def test_min_tokens_against_eos(engine: SerialEngine):
    output = engine.generate("a", SamplingParams(max_tokens=9, min_tokens=3, logit_bias={258: 1e4}))[0]
    assert len(output.token_ids) == 4 and output.token_ids[-1] == 258 and 258 not in output.token_ids[:3]
    output = engine.generate("a", SamplingParams(max_tokens=3, min_tokens=3, logit_bias={258: 1e4}))[0]
    assert 258 not in output.token_ids and output.finish_reason == "length"


def test_logprobs_are_those_of_the_model(engine: SerialEngine):
    output = engine.generate("abc", free(temperature=2.0, seed=1, logprobs=3))[0]
    ids = output.prompt_token_ids + output.token_ids
    with torch.no_grad():
        expected = engine.lm.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids)
    for step, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = expected[len(output.prompt_token_ids) + step - 1]
        assert token in entry and list(entry)[:3] == row.topk(3).indices.tolist()
        assert list(entry.values()) == sorted(entry.values(), reverse=True)
        assert list(entry.values()) == pytest.approx([row[t].item() for t in entry], abs=1e-3)


def test_the_model_is_left_as_it_was(engine: SerialEngine):
    lm = engine.lm
    before = lm.model.config._attn_implementation, lm.model.generation_config, lm.model.training
    weights = {name: value.clone() for name, value in lm.model.state_dict().items()}
    engine.generate("abc", free())
    next(engine.stream("abc", free()))
    assert before == (lm.model.config._attn_implementation, lm.model.generation_config, lm.model.training)
    assert all(torch.equal(weights[name], value) for name, value in lm.model.state_dict().items())


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_everything_is_checked_before_the_first_token(engine: SerialEngine, calls: Calls):
    for prompts, params, error in [
        (["fine", ""], None, InvalidPrompt),
        (["fine", [999]], None, InvalidPrompt),
        (["fine", "x" * 64], None, PromptTooLong),
        (["fine", "fine"], [free()], InvalidParameter),
        ("fine", SamplingParams(stop_token_ids=[300]), InvalidParameter),
    ]:
        with pytest.raises(error):
            engine.generate(prompts, params)
    assert calls.shapes == []


def test_a_stream_is_checked_when_it_is_called(engine: SerialEngine, calls: Calls):
    for prompt in ("", ["a", "b"], []):
        with pytest.raises(InvalidPrompt):
            engine.stream(prompt)
    with pytest.raises(PromptTooLong):
        engine.stream("x" * 64)
    assert next(engine.stream(iter([97, 98]), free())).token_ids and next(engine.stream(["a"], free())).token_ids
    assert calls.shapes == [2, 1]


def test_engine_arguments(tiny: LanguageModel, make: Callable[..., SerialEngine]):
    for limit in (0, 1, 2049, "all"):
        with pytest.raises(InvalidParameter, match="max_model_len"):
            make(tiny, max_model_len=limit)
    assert make(tiny).max_model_len == 2048
    with pytest.raises(InvalidParameter, match=r"cache must be .own. or .hf.; it is 'paged'"):
        CachedEngine(tiny, "paged")


def test_a_model_that_ignores_the_cache_is_refused_by_its_first_step(family: Callable[[str], LanguageModel]):
    for cache in ("own", "hf"):
        engine = CachedEngine(family("openai-gpt"), cache)
        with pytest.raises(UnsupportedModel, match=r"openai-gpt.*does not use the cache"):
            engine.generate([1, 2, 3], free())
        with pytest.raises(UnsupportedModel, match="NaiveEngine runs it"):
            list(engine.stream([1, 2, 3], free()))


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [2, 3, 20])
def test_prompts_around_the_limit(tiny: LanguageModel, make: Callable[..., SerialEngine], limit: int):
    engine = make(tiny, max_model_len=limit)
    output = engine.generate([97] * (limit - 1), free(max_tokens=50))[0]
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (1, "length", None)
    assert output.token_ids == hf_generate(tiny, [97] * (limit - 1), 1)
    for length in (limit, limit + 1):
        with pytest.raises(PromptTooLong, match=f"{length} tokens"):
            engine.generate([97] * length)
        with pytest.raises(PromptTooLong):
            engine.stream([97] * length)
    assert engine.generate([97] * (limit - 1), free())[0].token_ids == output.token_ids


def test_generation_that_reaches_the_limit(tiny: LanguageModel, make: Callable[..., SerialEngine]):
    engine = make(tiny, max_model_len=16)
    output = engine.generate([97] * 5, free(max_tokens=1000))[0]
    assert output.token_ids == hf_generate(tiny, [97] * 5, 11) and output.finish_reason == "length"
    output = engine.generate([97] * 5, free(max_tokens=11))[0]
    assert len(output.token_ids) == 11 and output.finish_reason == "length"


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_models_own_limit(family: Callable[[str], LanguageModel], make: Callable[..., SerialEngine], name: str):
    """Learned positions end there: one token more would be an index error, or a wrong embedding."""
    lm = family(name)
    assert lm.max_model_len == 256
    prompt = [i % 190 + 3 for i in range(250)]
    output = make(lm).generate(prompt, free(max_tokens=99))[0]
    assert len(output.token_ids) == 6 and output.token_ids == hf_generate(lm, prompt, 6)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_by_a_clock_that_ticks_when_it_is_read(tiny: LanguageModel, make: Callable[..., SerialEngine]):
    ticks = itertools.count()
    engine = make(tiny, clock=lambda: float(next(ticks)))
    first, second = (o.metrics for o in engine.generate(["a", "bc"], free(max_tokens=4)))
    for m in (first, second):
        assert m.arrival < m.first_scheduled < m.first_token < m.last_token <= m.finished
        assert m.num_tokens == 4 and m.preemptions == 0
        assert m.queue_s + (m.first_token - m.first_scheduled) == m.ttft_s
        assert m.tpot_s == (m.last_token - m.first_token) / 3 > 0
        assert m.ttft_s + 3 * m.tpot_s <= m.e2e_s
    assert first.arrival == second.arrival and second.first_scheduled >= first.finished  # one after the other
    assert second.queue_s > first.queue_s


def test_a_stream_arrives_when_it_is_called(tiny: LanguageModel, make: Callable[..., SerialEngine]):
    now = [10.0]
    engine = make(tiny, clock=lambda: now[0])
    made, make_requests = [], engine._requests

    def noted(*args: object) -> list:
        made.append(make_requests(*args))
        return made[-1]

    engine._requests = noted
    stream = engine.stream("a", free(max_tokens=3))
    for now[0] in (20.0, 30.0, 50.0):
        next(stream)
    metrics = made[0][0].metrics
    assert (metrics.arrival, metrics.first_token, metrics.last_token, metrics.finished) == (10.0, 20.0, 50.0, 50.0)
    assert (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.e2e_s) == (10.0, 10.0, 15.0, 40.0)
    stream = engine.stream("a", free(n=2))
    next(stream)
    stream.close()  # the reader goes away
    assert [(r.finish_reason, r.metrics.finished) for r in made[1]] == [("abort", 50.0)] * 2


# -- what a step computes ---------------------------------------------------------------------------------------------


def test_how_many_tokens_a_step_computes(tiny: LanguageModel, calls: Calls):
    NaiveEngine(tiny).generate([97] * 5, free(max_tokens=4))
    assert calls.shapes == [5, 6, 7, 8]
    for cache in ("own", "hf"):
        calls.shapes.clear()
        CachedEngine(tiny, cache).generate([97] * 5, free(max_tokens=4))
        assert calls.shapes == [5, 1, 1, 1]


def test_the_cache_holds_key_value_heads_not_heads(tiny: LanguageModel):
    engine = CachedEngine(tiny, max_model_len=32)
    assert engine.kv_bytes() == 0
    stream = engine.stream([97] * 5, free())
    next(stream), next(stream)
    cache = engine._caches[0]
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 32, 16)] * 2  # 4 heads, 2 of keys and values
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values x layers x heads x head size x bytes of a float32
    assert cache.nbytes_reserved == engine.kv_bytes() == 32 * per_token
    assert cache.nbytes_used == 6 * per_token  # the prompt and the first answer's token; the newest is not in it yet
    stream.close()
    assert cache.nbytes_used == 0 and engine.kv_bytes() == 32 * per_token


def test_caches_are_reused_and_as_many_as_run_at_once(tiny: LanguageModel):
    engine = CachedEngine(tiny, max_model_len=32)
    engine.generate(["a"] * 4, free(max_tokens=2))
    assert len(engine._caches) == 1
    streams = [engine.stream("a", free()) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert len(engine._caches) == 3
    for _ in streams[0]:
        pass
    streams[1].close()
    del stream, streams[2]  # abandoned without a word
    gc.collect()
    assert len(engine._free) == 3
    engine.generate(["a"] * 4, free(max_tokens=2))
    assert len(engine._caches) == 3


def test_a_cache_made_in_inference_mode_serves_outside_of_it(tiny: LanguageModel):
    engine = CachedEngine(tiny, max_model_len=32)
    with torch.inference_mode():
        inside = engine.generate("ab", free())[0].token_ids
    assert engine.generate("ab", free())[0].token_ids == inside == hf_generate(tiny, [97, 98], 6)


def test_kv_cache_layer_by_hand():
    layer = KVCacheLayer(4)
    keys = torch.arange(12.0).view(1, 2, 3, 2)
    seen, _ = layer.update(keys, keys + 100)
    assert torch.equal(seen, keys) and layer.get_seq_length() == 3 and layer.get_mask_sizes(1) == (4, 0)
    more = torch.full((1, 2, 1, 2), -1.0)
    seen, values = layer.update(more, more)
    assert torch.equal(seen, torch.cat([keys, more], 2)) and torch.equal(values[:, :, :3], keys + 100)
    assert seen.data_ptr() == layer.keys.data_ptr()  # a view: nothing is copied
    with pytest.raises(IndexError, match="room for 4 tokens, and token 5"):
        layer.update(more, more)
    assert layer.get_seq_length() == 4
    layer.reset()
    assert torch.equal(layer.update(more, more)[0], more) and layer.get_max_length() == 4


def test_kv_cache_of_other_sizes_of_values():
    """DeepSeek's values are shorter than its keys."""
    cache = KVCache(1, 8)
    cache.update(torch.zeros(1, 2, 3, 6), torch.zeros(1, 2, 3, 4), 0)
    assert cache.nbytes_reserved == 8 * 2 * (6 + 4) * 4 and cache.nbytes_used == 3 * 2 * (6 + 4) * 4
    assert cache.get_seq_length() == 3


# -- when something breaks --------------------------------------------------------------------------------------------


@pytest.fixture()
def broken_model() -> Iterator[LanguageModel]:
    """A model that says NaN whenever token 7 is the newest."""
    lm = load_model("tiny-random", device="cpu")
    lm.model.get_input_embeddings().weight.data[7] = math.nan
    yield lm


def test_logits_that_are_not_numbers_end_one_answer(broken_model: LanguageModel, make: Callable[..., SerialEngine]):
    engine = make(broken_model)
    for params in (free(), free(temperature=1.0, seed=1), free(min_tokens=1)):
        good, bad, other = engine.generate([[1, 2], [1, 7], [3]], params)
        assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "") and "nan" in bad.error
        assert good.finish_reason == other.finish_reason == "length" and good.error is None
    pieces = list(engine.stream([1, 7], free()))
    assert [(p.token_ids, p.finish_reason) for p in pieces] == [([], "error")]
    midway = engine.generate([1], saying([5, 7, 9]))[0]  # two tokens, then what follows 7 is not a number
    assert midway.finish_reason == "error" and midway.token_ids == [5, 7] and midway.metrics.finished is not None


def test_a_processor_that_raises_ends_its_own_answer(engine: SerialEngine):
    def third_time(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 2:
            raise RuntimeError("enough")
        return logits

    bad, good = engine.generate(["a", "b"], [free(logits_processors=[third_time]), free()])
    assert (bad.finish_reason, bad.error, len(bad.token_ids)) == ("error", "RuntimeError: enough", 2)
    assert good.finish_reason == "length"


def test_banning_everything_is_an_error_and_not_a_token(engine: SerialEngine):
    output = engine.generate("a", free(logits_processors=[lambda ids, logits: torch.full_like(logits, -math.inf)]))[0]
    assert output.finish_reason == "error" and "banned" in output.error and output.token_ids == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate 5 GiB"), MemoryError("no more")])
def test_out_of_memory_ends_one_answer(tiny: LanguageModel, make, calls: Calls, error: BaseException):
    engine = make(tiny)
    expected = tokens(engine.generate(["a", "b"], free()))
    calls.shapes.clear()
    calls.break_at[3] = error
    first, second = engine.generate(["a", "b"], free())
    assert first.finish_reason == "error" and "out of memory" in first.error and str(error) in first.error
    assert first.token_ids == expected[0][:2] and second.token_ids == expected[1]


def test_a_model_that_breaks(tiny: LanguageModel, make, calls: Calls):
    engine = make(tiny)
    expected = tokens(engine.generate(["a", "b", "c"], free()))
    calls.shapes.clear()
    calls.break_at[9] = error = RuntimeError("a shape is wrong")
    with pytest.raises(GenerationFailed, match=r"tiny-random failed.*RuntimeError: a shape is wrong") as caught:
        engine.generate(["a", "b", "c"], free())
    assert caught.value.__cause__ is error
    outputs = caught.value.outputs
    assert tokens(outputs) == [expected[0], expected[1][:2], []]
    assert [o.finish_reason for o in outputs] == ["length", "abort", "abort"]
    assert tokens(engine.generate(["a", "b", "c"], free())) == expected  # nothing of it is left in the engine


def test_a_model_that_breaks_in_a_stream(tiny: LanguageModel, make, calls: Calls):
    engine, said = make(tiny), []
    calls.break_at[3] = RuntimeError("a shape is wrong")
    with pytest.raises(GenerationFailed, match="a shape is wrong") as caught:
        for piece in engine.stream("a", free()):
            said += piece.token_ids
    assert len(said) == 2 and tokens(caught.value.outputs) == [said]
    assert engine.generate("a", free())[0].token_ids[:2] == said


def test_an_interrupt_returns_what_there_is(tiny: LanguageModel, make, calls: Calls):
    engine = make(tiny)
    expected = tokens(engine.generate(["a", "b", "c"], free()))
    calls.shapes.clear()
    calls.break_at[9] = KeyboardInterrupt()
    with pytest.warns(UserWarning, match="1 of 3 answers are complete"):
        outputs = engine.generate(["a", "b", "c"], free())
    assert tokens(outputs) == [expected[0], expected[1][:2], []]
    assert [o.finish_reason for o in outputs] == ["length", "abort", "abort"]
    assert all(o.metrics.finished is not None for o in outputs) and outputs[2].metrics.ttft_s is None
    assert outputs[1].text == tiny.decode(expected[1][:2])
    assert tokens(engine.generate(["a", "b", "c"], free())) == expected


def test_an_interrupted_stream_gives_its_memory_back(tiny: LanguageModel, calls: Calls):
    engine = CachedEngine(tiny)
    calls.break_at[2] = KeyboardInterrupt()
    stream = engine.stream("a", free())
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert len(engine._free) == len(engine._caches) == 1 and engine._free[0].get_seq_length() == 0


# -- how they look ----------------------------------------------------------------------------------------------------


def test_progress_is_shown_when_asked_for(engine: SerialEngine, capsys: pytest.CaptureFixture[str]):
    engine.generate(["a", "b"], free(max_tokens=1))
    assert capsys.readouterr() == ("", "")
    engine.generate(["a", "b"], free(max_tokens=1), progress=True)
    assert f"{engine.name}: 100%" in capsys.readouterr().err


def test_names(tiny: LanguageModel):
    names = [make_engine(tiny).name for make_engine in ENGINES.values()]
    assert names[:2] == ["naive", "cached"] and len(set(names)) == 3
    assert repr(NaiveEngine(tiny)) == "NaiveEngine(LanguageModel(tiny-random, float32 on cpu), max_model_len=2048)"
    assert NaiveEngine(tiny).lm is tiny
