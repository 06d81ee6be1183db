"""Workloads have the lengths they promise, the same on every call, and prompts that are real text where it can be."""

import random

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from minfer_lib.bench import course, english_text, fixed_lengths, mixed_lengths, nano_vllm, prompts_of
from minfer_lib.bench.settings import fast_mode, shorten
from minfer_lib.bench.workloads import BOOK, END_OF_HEADER, TEXTS, Workload
from minfer_lib.errors import InvalidParameter
from minfer_lib.generation.params import SamplingParams
from minfer_lib.models.load import LanguageModel, load_model


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


@pytest.fixture
def without_tokenizer(lm):
    return LanguageModel.of(lm.model, None, "ids only")


@pytest.fixture(autouse=True)
def full_length(monkeypatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)


def test_the_text_is_a_book_of_the_public_domain():
    header = (TEXTS / f"{BOOK}.txt").read_text(encoding="utf-8").split(END_OF_HEADER)[0]
    assert all(word in header for word in ("Title:", "Author:", "1865", "public domain"))
    text = english_text()
    assert len(text) > 60_000 and "public domain" not in text and END_OF_HEADER not in text
    assert text.startswith("ALICE'S ADVENTURES IN WONDERLAND") and "\r" not in text


def test_fixed_lengths(lm):
    work = fixed_lengths(lm, batch=3, prompt_len=17, output_len=5)
    assert work.prompt_lens == [17] * 3 and work.output_lens == [5] * 3
    assert all(p.ignore_eos and p.temperature == 0 and p.max_tokens == 5 for p in work.params)
    assert work == fixed_lengths(lm, batch=3, prompt_len=17, output_len=5) and not work.fast
    assert lm.decode([token for prompt in work.prompts for token in prompt]) == english_text()[: 3 * 17]


def test_mixed_lengths_follow_the_seed(lm):
    work = mixed_lengths(lm, 40, prompt=(3, 9), output=(2, 6), seed=1)
    assert set(work.prompt_lens) == set(range(3, 10)) and set(work.output_lens) == set(range(2, 7))
    assert work == mixed_lengths(lm, 40, prompt=(3, 9), output=(2, 6), seed=1)
    assert work.prompt_lens != mixed_lengths(lm, 40, prompt=(3, 9), output=(2, 6), seed=2).prompt_lens


def test_the_course_workload_is_the_same_everywhere_with_one_long_request(lm, without_tokenizer, monkeypatch):
    work = course(lm)
    monkeypatch.setenv("MINFER_FAST", "1")
    assert course(lm).prompts == work.prompts and course(without_tokenizer).prompt_lens == work.prompt_lens
    *others, longest = sorted(work.output_lens)
    assert len(work.prompts) == 12 and longest > 3 * max(others) and sum(work.output_lens) < 120


def test_the_workload_of_nano_vllm_is_that_of_nano_vllm():
    rng = random.Random(0)
    ids = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    work = nano_vllm(151936)
    assert work.prompts == ids and work.output_lens == lengths
    assert (sum(work.prompt_lens), sum(work.output_lens)) == (142_827, 133_966)
    assert max(p + n for p, n in zip(work.prompt_lens, work.output_lens, strict=True)) == 2011
    assert all(p.temperature == 0.6 and p.ignore_eos for p in work.params)
    assert max(max(prompt) for prompt in nano_vllm(300, n=3).prompts) < 300


def test_prompts_do_not_share_a_beginning(lm):
    prompts = prompts_of(lm, [24] * 50)
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 50


def test_prompts_go_on_when_the_book_is_used_up(lm):
    long = len(english_text()) // 2 - 10
    prompts = prompts_of(lm, [long] * 4)
    assert [len(prompt) for prompt in prompts] == [long] * 4 and len({tuple(prompt) for prompt in prompts}) == 4
    with pytest.raises(InvalidParameter, match="bundled text has"):
        prompts_of(lm, [10**6])


def test_a_tokenizer_that_adds_a_bos_has_it_in_every_prompt(lm):
    class WithBos(LanguageModel):
        def encode(self, text):
            return [self.tokenizer.bos_token_id, *super().encode(text)]

    prompts = prompts_of(WithBos.of(lm.model, lm.tokenizer, "with bos"), [5, 1, 7])
    assert [len(prompt) for prompt in prompts] == [5, 1, 7]
    assert all(
        prompt[0] == lm.tokenizer.bos_token_id and lm.tokenizer.bos_token_id not in prompt[1:] for prompt in prompts
    )


def test_ids_only_prompts_avoid_every_eos():
    config = AutoConfig.for_model(
        "llama", vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=[0, 3], bos_token_id=None,
    )  # fmt: skip
    lm = LanguageModel.of(AutoModelForCausalLM.from_config(config), None, "ids only")
    assert lm.eos_ids == {0, 3}
    prompts = prompts_of(lm, [200, 100])
    assert [len(prompt) for prompt in prompts] == [200, 100] and set(prompts[0]) == {1, 2, 4, 5}
    assert prompts == prompts_of(lm, [200, 100]) != prompts_of(lm, [200, 100], seed=1)


def test_what_cannot_be_run_is_refused(lm, without_tokenizer):
    for model in (lm, without_tokenizer):
        with pytest.raises(InvalidParameter, match="takes 2048 at most"):
            fixed_lengths(model, prompt_len=2000, output_len=100)
        with pytest.raises(InvalidParameter, match="all counts start at 1"):
            fixed_lengths(model, batch=0)
        with pytest.raises(InvalidParameter, match="all counts start at 1"):
            fixed_lengths(model, output_len=0)
    with pytest.raises(InvalidParameter, match="from low to high"):
        mixed_lengths(lm, 3, prompt=(9, 3))
    with pytest.raises(InvalidParameter, match="one SamplingParams for each"):
        Workload("odd", [[1], [2]], [SamplingParams()], "two prompts, one set of parameters")


def test_lengths_are_promised_only_where_eos_cannot_end_an_answer():
    def lengths(**params):
        return Workload("w", [[1]], [SamplingParams(max_tokens=4, **params)], "").output_lens

    assert lengths(ignore_eos=True) == [4] and lengths(min_tokens=4) == [4]
    assert lengths() is None


@pytest.mark.parametrize(("value", "fast"), [("1", True), ("yes", True), ("", False), ("0", False), ("false", False)])
def test_fast_mode_switch(monkeypatch, value, fast):
    monkeypatch.setenv("MINFER_FAST", value)
    assert fast_mode() is fast
    assert shorten(128) == (16 if fast else 128)


def test_fast_mode_shortens_and_says_so(lm, monkeypatch):
    monkeypatch.setenv("MINFER_FAST", "1")
    work = fixed_lengths(lm, batch=2, prompt_len=64, output_len=1)
    assert work.prompt_lens == [8, 8] and work.output_lens == [1, 1] and work.fast
    assert [shorten(n) for n in (1, 3, 4, 16, 100, 4096)] == [1, 3, 4, 4, 12, 64]
    mixed = mixed_lengths(lm, 30, prompt=(16, 128), output=(16, 128))
    assert set(mixed.prompt_lens) <= set(range(4, 17)) and len(set(mixed.prompt_lens)) > 5


def test_warm_up_has_the_same_prompts(lm):
    work = fixed_lengths(lm, batch=2, prompt_len=9, output_len=7)
    assert work.warm_up().prompts == work.prompts and work.warm_up().output_lens == [2, 2]
    assert fixed_lengths(lm, batch=1, prompt_len=9, output_len=1).warm_up().output_lens == [1]
