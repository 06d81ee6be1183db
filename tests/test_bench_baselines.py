"""The Hugging Face baselines give what `model.generate` gives, padded or not, and leave the model as they found it."""

import codecs
import itertools
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from minfer_lib.bench import HFSerial, HFStaticBatch
from minfer_lib.bench.baselines import padded_left
from minfer_lib.bench.roofline import kv_token_bytes
from minfer_lib.errors import InvalidParameter, InvalidPrompt, PromptTooLong
from minfer_lib.generation.params import SamplingParams
from minfer_lib.generation.prompts import make_requests
from minfer_lib.models.load import LanguageModel, load_model

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gemma2": dict(head_dim=8, sliding_window=7, attn_implementation="eager"),
}
PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 3, 21], [40, 41, 42, 43, 44]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are quicker without company
    yield
    torch.set_num_threads(before)


def random_lm(family: str) -> LanguageModel:
    torch.manual_seed(0)
    options = dict(FAMILIES[family])
    implementation = options.pop("attn_implementation", None)
    config = AutoConfig.for_model(family, **SIZES, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.25)  # far from uniform, so that a mistake changes tokens
    return LanguageModel.of(model, None, f"random {family}")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def lm(request):
    return random_lm(request.param)


@pytest.fixture(scope="module")
def llama():
    return random_lm("llama")


def fixed(*lengths: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]


def plain_generate(lm: LanguageModel, prompt: list[int], new: int) -> list[int]:
    """What a user of transformers would write, EOS switched off by asking for as many tokens at the least."""
    ids = torch.tensor([prompt])
    out = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def tokens(outputs):
    return [out.token_ids for out in outputs]


def test_serial_is_model_generate(lm):
    outputs = HFSerial(lm).generate(PROMPTS, fixed(6, 9, 4, 7))
    assert tokens(outputs) == [plain_generate(lm, p, n) for p, n in zip(PROMPTS, (6, 9, 4, 7), strict=True)]
    assert [out.prompt_token_ids for out in outputs] == PROMPTS
    assert all(out.finish_reason == "length" and out.text == "" for out in outputs)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_padded_batch_equals_serial_on_unequal_lengths(lm, batch_size):
    params = fixed(12, 5, 1, 9)
    wanted = tokens(HFSerial(lm).generate(PROMPTS, params))
    assert len({tuple(ids) for ids in wanted}) == 4
    assert tokens(HFStaticBatch(lm, batch_size).generate(PROMPTS, params)) == wanted


@pytest.mark.parametrize("make", [HFSerial, lambda lm, **options: HFStaticBatch(lm, 3, **options)])
def test_a_static_cache_gives_the_same_tokens(lm, make):
    params, per_token = fixed(12, 5, 1, 9), kv_token_bytes(lm)
    wanted = tokens(HFSerial(lm).generate(PROMPTS, params))
    static = make(lm, static_cache=True)
    assert static.name.endswith(", static cache")
    for _ in range(2):  # the second run has a cache as long as the longest of the first
        assert tokens(static.generate(PROMPTS, params)) == wanted
    rows = static.batch_size
    longest = 12 + 1 - 1 if rows == 1 else 12 + 9 - 1  # a batch is padded to its longest prompt
    longest = max(longest, 9 + 5 - 1)
    assert static.kv_bytes()[0] == rows * longest * per_token


def cache_kinds(engine: HFSerial, monkeypatch) -> set[str]:
    """Which kinds of cache its model was called with."""
    kinds, forward = set(), engine._model.forward

    def noting(*args, **kwargs):
        kinds.update(type(value).__name__ for value in kwargs.values() if hasattr(value, "get_seq_length"))
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._model, "forward", noting)
    engine.generate(PROMPTS, fixed(3, 3, 3, 3))
    return kinds


def test_the_cache_is_of_the_kind_asked_for(llama, monkeypatch):
    assert cache_kinds(HFStaticBatch(llama, 2), monkeypatch) == {"DynamicCache"}
    assert cache_kinds(HFStaticBatch(llama, 2, static_cache=True), monkeypatch) == {"StaticCache"}


@pytest.mark.parametrize(
    ("options", "name", "sizes", "steps", "computed"),
    [
        # prompts of 1, 9, 3, 5, 2 tokens, answers of 12, 5, 1, 9, 2; a batch computes rows * (prompt + answer - 1)
        ({}, "HF padded batch", [4, 1], 12 + 2, 4 * 20 + 3),
        ({"order": "prompt"}, "HF padded batch, sorted by prompt", [4, 1], 12 + 5, 4 * 16 + 13),
        ({"order": "answer"}, "HF padded batch, sorted by answer", [4, 1], 9 + 12, 4 * 17 + 12),
        ({"even": True}, "HF padded batch, even", [2, 3], 12 + 9, 2 * 20 + 3 * 13),
        ({"order": "answer", "even": True}, "HF padded batch, sorted by answer, even", [2, 3], 2 + 12, 2 * 4 + 3 * 20),
    ],
)
def test_the_order_and_the_split_of_batches_are_counted_and_named(llama, options, name, sizes, steps, computed):
    prompts, params = [*PROMPTS, [50, 51]], fixed(12, 5, 1, 9, 2)
    batch = HFStaticBatch(llama, 4, **options)
    assert batch.name == name and batch.num_steps == batch.computed_tokens == 0
    assert tokens(batch.generate(prompts, params)) == tokens(HFSerial(llama).generate(prompts, params))
    assert (batch.num_steps, batch.computed_tokens) == (steps, computed)
    assert [len(b) for b in batch._batches([*make_requests_of(llama, prompts, params)])] == sizes
    thirteen = make_requests_of(llama, [[3]] * 13, fixed(*[1] * 13))
    assert [len(b) for b in batch._batches(thirteen)] == ([3, 3, 3, 4] if batch.even else [4, 4, 4, 1])


def make_requests_of(lm, prompts, params):
    return make_requests(lm, prompts, params, max_model_len=128, now=0.0, ids=map(str, itertools.count()))


def test_steps_are_calls_of_the_model(llama, monkeypatch):
    serial, calls = HFSerial(llama), []
    forward = serial._model.forward
    monkeypatch.setattr(serial._model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    serial.generate(PROMPTS, fixed(3, 6, 1, 4))
    assert serial.num_steps == len(calls) == 3 + 6 + 1 + 4


def test_early_eos_ends_a_row_and_not_its_neighbours(llama):
    free = tokens(HFSerial(llama).generate(PROMPTS, fixed(*[12] * 4)))
    end = next(t for t in free[1][2:8] if t not in free[0])
    lm = LanguageModel(**{**vars(llama), "eos_ids": frozenset({end})})
    params = SamplingParams(max_tokens=12)
    serial, batch = HFSerial(lm).generate(PROMPTS, params), HFStaticBatch(lm, 4).generate(PROMPTS, params)
    assert tokens(serial) == tokens(batch)
    for out, ids in zip(batch, free, strict=True):
        cut = ids.index(end) + 1 if end in ids else 12
        assert out.token_ids == ids[:cut] and out.finish_reason == ("stop" if end in ids else "length")
    assert len(batch[1].token_ids) < 12 == len(batch[0].token_ids)
    ignoring = [SamplingParams(max_tokens=12, ignore_eos=i == 1) for i in range(4)]  # mixed in one batch
    mixed = HFStaticBatch(lm, 4).generate(PROMPTS, ignoring)
    assert mixed[1].token_ids == free[1] and tokens(mixed)[0::2] == tokens(batch)[0::2]


def test_min_tokens_holds_eos_back(llama):
    free = tokens(HFSerial(llama).generate(PROMPTS[1], fixed(6)))[0]
    lm = LanguageModel(**{**vars(llama), "eos_ids": frozenset({free[0]})})
    assert tokens(HFSerial(lm).generate(PROMPTS[1], SamplingParams(max_tokens=6))) == [free[:1]]
    held = HFSerial(lm).generate(PROMPTS[1], SamplingParams(max_tokens=6, min_tokens=3))[0].token_ids
    assert len(held) >= 3 and free[0] not in held[:3]


def test_the_models_own_generation_config_has_no_say_and_is_restored(llama):
    own = GenerationConfig(repetition_penalty=50.0, do_sample=True, temperature=9.0, eos_token_id=[2, 3], max_length=20)
    wanted = tokens(HFSerial(llama).generate(PROMPTS, fixed(*[10] * 4)))
    before, llama.model.generation_config = llama.model.generation_config, own
    try:
        for baseline in (HFSerial(llama), HFStaticBatch(llama, 4)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert tokens(baseline.generate(PROMPTS, fixed(*[10] * 4))) == wanted
            assert llama.model.generation_config is own
    finally:
        llama.model.generation_config = before


def test_times_are_in_order_and_a_batch_ends_together(llama):
    params = fixed(3, 6, 1, 4)
    for out in HFSerial(llama).generate(PROMPTS, params):
        times = out.metrics
        assert times.arrival <= times.first_scheduled < times.first_token <= times.last_token <= times.finished
        assert times.num_tokens == len(out.token_ids) and (times.tpot_s is None) == (len(out.token_ids) == 1)
    serial = [out.metrics for out in HFSerial(llama).generate(PROMPTS, params)]
    assert all(a.finished <= b.first_scheduled for a, b in itertools.pairwise(serial))
    assert len({times.arrival for times in serial}) == 1
    batch = [out.metrics for out in HFStaticBatch(llama, 4).generate(PROMPTS, params)]
    assert len({times.finished for times in batch}) == len({times.first_token for times in batch}) == 1
    assert batch[2].last_token < batch[3].last_token < batch[1].last_token  # as many tokens, as late


def test_kv_bytes_show_the_padding(llama):
    batch, serial, per_token = HFStaticBatch(llama, 4), HFSerial(llama), kv_token_bytes(llama)
    batch.generate(PROMPTS, fixed(3, 3, 3, 3))
    assert batch.kv_bytes() == (4 * (9 + 2) * per_token, (1 + 9 + 3 + 5 + 4 * 2) * per_token)
    serial.generate(PROMPTS, fixed(3, 3, 3, 3))
    assert serial.kv_bytes() == (11 * per_token, 11 * per_token)


def test_padding_is_on_the_left():
    ids, mask = padded_left([[7, 8, 9], [5]], torch.device("cpu"))
    assert ids.tolist() == [[7, 8, 9], [0, 0, 5]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_text_prompts_and_texts_of_answers():
    lm = load_model("tiny-random", device="cpu")
    padding_side = lm.tokenizer.padding_side
    out = HFStaticBatch(lm, 2).generate(["Hello", "A longer prompt"], fixed(8, 8))
    # its tokens are bytes; those of a character that was not finished have no text
    assert [o.text for o in out] == [codecs.utf_8_decode(bytes(o.token_ids), "replace", False)[0] for o in out]
    assert lm.tokenizer.padding_side == padding_side
    assert len(HFSerial(lm).generate("Hello", SamplingParams(max_tokens=2, n=3))) == 3


@pytest.mark.parametrize(
    "params",
    [dict(temperature=1.0), dict(repetition_penalty=2.0), dict(logit_bias={1: 2.0}), dict(logprobs=1),
     dict(min_tokens=2, stop_token_ids=[3])],
)  # fmt: skip
def test_what_a_baseline_cannot_do_is_refused(llama, params):
    with pytest.raises(InvalidParameter, match="Hugging Face baselines"):
        HFSerial(llama).generate(PROMPTS, SamplingParams(max_tokens=4, **params))


def test_other_refusals(llama):
    for size in (0, -1, True, 2.0, "2", None):
        with pytest.raises(InvalidParameter, match="batch_size must be an integer of 1 or more"):
            HFStaticBatch(llama, size)
    with pytest.raises(InvalidParameter, match="order='length' was asked for; there are `arrival`, `prompt` or `ans"):
        HFStaticBatch(llama, order="length")
    with pytest.raises(PromptTooLong):
        HFSerial(llama).generate([[1] * 128], fixed(1))
    with pytest.raises(InvalidPrompt):
        HFStaticBatch(llama, 2).generate([[1], []], fixed(1, 1))
    with pytest.raises(InvalidParameter, match="one min_tokens"):
        HFStaticBatch(llama, 2).generate(PROMPTS[:2], [SamplingParams(min_tokens=n) for n in (0, 1)])


def test_a_padded_batch_that_passes_the_models_limit_is_refused():
    lm = random_lm("llama")  # 128 positions
    long, short, params = [5] * 125, [5, 6], SamplingParams(max_tokens=10, ignore_eos=True)
    with pytest.raises(InvalidParameter, match="135 positions"):
        HFStaticBatch(lm, 2).generate([long, short], params)  # the answer to `short` needs 10, behind 123 of padding
    assert [len(out.token_ids) for out in HFStaticBatch(lm, 1).generate([long, short], params)] == [3, 10]
