"""How large the cache of an engine becomes: what was asked for, what fits beside a step, and what is refused."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from families import hf_generate
from transformers import AutoConfig, AutoModelForCausalLM

from minfer_lib import LanguageModel, LLMEngine, SamplingParams
from minfer_lib.attention.support import packed_layers
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine import cache_size
from minfer_lib.errors import InvalidParameter, UnsupportedModel
from minfer_lib.generation.sampling import Sampler
from minfer_lib.models import host
from minfer_lib.models.memory import PeakMemory

CPU = torch.device("cpu")
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers x keys and values x heads x head size x bytes: tiny-random
STEP = 10**6


def with_memory(monkeypatch: pytest.MonkeyPatch, tokens: int, step: int = STEP) -> None:
    """So much memory that so many tokens fit beside a step."""
    total = math.ceil(tokens * PER_TOKEN / cache_size.SHARE) + 8 + step
    monkeypatch.setattr(cache_size, "available_bytes", lambda device: total)
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: step)


def make(lm: LanguageModel, kv_cache: Any = "slots", **options: Any) -> tuple[Any, int]:
    defaults = dict(
        max_num_seqs=64, num_blocks=None, block_size=16, max_model_len=None, step_tokens=512, enable_prefix_caching=True
    )
    return cache_size.make_cache(lm, kv_cache, **(defaults | options))


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


# -- what was asked for -----------------------------------------------------------------------------------------------


def test_what_fits_with_room_to_spare_is_made_without_a_step_to_find_out(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    with_memory(monkeypatch, 2 * 64 * 2048)
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: 1 / 0)
    slots, length = make(tiny)
    assert isinstance(slots, SlotKVCache) and (length, slots.num_blocks, slots.block_size) == (2048, 64, 2048)
    pages, length = make(tiny, "paged", max_num_seqs=3, max_model_len=50)
    assert type(pages) is PagedKVCache and (length, pages.num_blocks, pages.block_size) == (50, 3 * 4, 16)
    for cache in (slots, pages):
        assert cache.nbytes_reserved == cache.num_blocks * cache.block_size * PER_TOKEN
        assert cache.nbytes_reserved + 2 * PER_TOKEN == sum(
            t.nbytes for p in cache.pools.values() for t in (p.keys, p.values)
        )  # fmt: skip
    assert make(tiny, "paged", num_blocks=7)[0].num_blocks == 7
    slots, length = make(tiny, num_blocks=5, max_num_seqs=9, max_model_len=33)
    assert (length, slots.num_blocks) == (33, 5) and not recwarn.list


def test_an_engine_says_how_much_it_has_reserved(tiny: LanguageModel):
    for options in (dict(max_model_len=40), dict(kv_cache="paged", num_blocks=9)):
        engine = LLMEngine(tiny, max_num_seqs=3, **options)
        assert engine.kv_bytes() == engine.cache.nbytes_reserved == engine.stats()["kv_bytes_reserved"]


def test_numbers_of_numpy_will_do(tiny: LanguageModel):
    cache, length = make(tiny, "paged", num_blocks=np.int64(9), block_size=np.int32(4))
    assert (cache.num_blocks, cache.block_size, length) == (9, 4, 2048)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[(dict(num_blocks=bad), "num_blocks") for bad in (0, -1, 4.0, True, False, "8")],
        *[(dict(block_size=bad), "block_size") for bad in (0, -16, 16.0, True, None, "16")],
        *[(dict(kv_cache=bad), "kv_cache must be \"slots\"") for bad in ("pages", "", None, 3, int, SlotKVCache)],
        *[(dict(max_model_len=bad), "max_model_len") for bad in (0, -1, 2.5, True, 10**9)],
    ],
)  # fmt: skip
def test_options_that_are_not_possible(tiny: LanguageModel, options: dict[str, object], words: str):
    with pytest.raises(InvalidParameter, match=words):
        make(tiny, **({"kv_cache": "paged"} | options))


def test_a_class_and_an_object_are_taken(tiny: LanguageModel):
    class Mine(PagedKVCache):
        pass

    cache, length = make(tiny, Mine, num_blocks=9, enable_prefix_caching=False)
    assert type(cache) is Mine and (cache.num_blocks, length) == (9, 2048) and not cache.enable_prefix_caching
    assert make(tiny, cache) == (cache, 9 * 16)
    assert make(tiny, cache, max_model_len=10) == (cache, 10)


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_an_object_bounds_what_a_request_may_become(tiny: LanguageModel, kind: str):
    """A slot has 16 tokens, however many there are; a block table has 2 entries, however many blocks there are."""
    layers = packed_layers(tiny)
    cache = (
        SlotKVCache(layers, 3, 16, CPU) if kind == "slots" else PagedKVCache(layers, 9, 8, CPU, max_model_len=16)
    )  # fmt: skip
    engine = LLMEngine(tiny, kv_cache=cache)
    assert engine.max_model_len == 16
    outputs = engine.generate([[97] * 10, [98] * 3], greedy(20))
    assert [(len(out.token_ids), out.finish_reason) for out in outputs] == [(6, "length"), (13, "length")]


# -- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fits", "options", "length", "slots"),
    [
        (64 * 1000, {}, 1000, 64),  # shorter slots, as many
        (64 * 256, {}, 256, 64),
        (20 * 256 + 9, {}, 256, 20),  # not shorter than that: fewer slots
        (300, {}, 256, 1),
        (64 * 2048 - 1, {}, 2047, 64),
        (20 * 500, dict(max_model_len=500), 500, 20),  # a length that was asked for stays
        (4 * 700, dict(max_num_seqs=4), 700, 4),
        (4 * 700, dict(num_blocks=4), 700, 4),
    ],
)
def test_slots_that_do_not_fit_are_cut_with_a_warning(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, fits: int, options: dict[str, int], length: int, slots: int
):
    with_memory(monkeypatch, fits)
    with pytest.warns(UserWarning, match=rf"does not fit.*{slots} slots of {length:,} tokens") as caught:
        engine = LLMEngine(tiny, **options)
    assert caught[0].filename == __file__
    assert (engine.max_model_len, engine.cache.num_blocks) == (length, slots)
    assert slots * length <= fits
    outputs = engine.generate(["ab"] * 3, greedy(6))
    assert [out.token_ids for out in outputs] == [hf_generate(tiny, [97, 98], 6)] * 3


@pytest.mark.parametrize(
    ("fits", "options"),
    [
        (255, {}),
        (0, {}),
        (999, dict(max_model_len=1000)),
        (4 * 256 - 1, dict(num_blocks=4)),
        (4 * 500 - 1, dict(num_blocks=4, max_model_len=500)),
    ],
)
def test_slots_that_cannot_be_are_refused(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, fits: int, options: dict[str, int]
):
    with_memory(monkeypatch, fits)
    with pytest.raises(InvalidParameter, match=rf"{PER_TOKEN:,} bytes a token, {fits:,} tokens fit.*smaller"):
        make(tiny, **options)


def test_pages_are_cut_to_what_fits_beside_a_step(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, recwarn):
    with_memory(monkeypatch, 200 * 16)
    engine = LLMEngine(tiny, kv_cache="paged")
    assert (engine.cache.num_blocks, engine.max_model_len) == (200, 2048) and not recwarn.list
    assert make(tiny, "paged", num_blocks=200)[0].num_blocks == 200
    outputs = engine.generate(["ab"] * 3, greedy(6))
    assert [out.token_ids for out in outputs] == [hf_generate(tiny, [97, 98], 6)] * 3


def test_pages_too_few_for_the_longest_request_say_so(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    with_memory(monkeypatch, 100 * 16)
    with pytest.warns(UserWarning, match=r"100 blocks of 16 tokens.*max_model_len=2,048.*kv_cache_full") as caught:
        engine = LLMEngine(tiny, kv_cache="paged")
    assert caught[0].filename == __file__ and engine.cache.num_blocks == 100
    with pytest.warns(UserWarning, match="kv_cache_full"):
        make(tiny, "paged", max_model_len=1601)


@pytest.mark.parametrize(
    ("fits", "options", "advice"),
    [
        (0, {}, "smaller block_size"),
        (0, dict(num_blocks=60), "smaller block_size"),
        (200, dict(num_blocks=201), "smaller num_blocks"),
        (200, dict(num_blocks=10**9), "smaller num_blocks"),
    ],
)
def test_pages_that_cannot_be_are_refused(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, fits: int, options: dict[str, int], advice: str
):
    with_memory(monkeypatch, fits * 16, step=10**5)
    with pytest.raises(InvalidParameter, match=rf"{fits} such blocks fit.*{advice}"):
        make(tiny, "paged", **options)


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_what_a_step_takes_is_left_to_it(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Slots too: it is asked about the rows and samples of the largest step there can be."""
    with_memory(monkeypatch, 4 * 512)
    asked = []
    monkeypatch.setattr(cache_size, "step_bytes", lambda lm, layers, *sizes: asked.append(sizes) or STEP)
    options = dict(max_num_seqs=4, max_model_len=512, block_size=32, step_tokens=100)
    cache, _ = make(tiny, kind, **options)
    assert cache.nbytes_reserved == 4 * 512 * PER_TOKEN and asked == [(512, 100, 4)]
    make(tiny, kind, **(options | dict(max_num_seqs=4, step_tokens=3)))
    assert asked[1] == (512, 3, 3)  # no more samples than tokens
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: STEP + 512 * PER_TOKEN)
    if kind == "slots":
        with pytest.warns(UserWarning, match="3 slots of 512 tokens"):
            cache, _ = make(tiny, kind, **options)
    else:
        cache, _ = make(tiny, kind, **options)
    assert 2 * 512 * PER_TOKEN < cache.nbytes_reserved < 4 * 512 * PER_TOKEN


def test_a_model_that_no_packed_row_can_serve_is_refused_by_either(family: Any):
    for kind in ("slots", "paged"):
        with pytest.raises(UnsupportedModel, match="mamba"):
            make(family("mamba"), kind, max_model_len=64)


# -- what a step takes ------------------------------------------------------------------------------------------------


def test_a_step_takes_memory_and_a_longer_one_more(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sampler, "peak_bytes", staticmethod(lambda rows, vocab: 0))
    layers = packed_layers(tiny)
    one, short, long, longer = (cache_size.step_bytes(tiny, layers, 2048, tokens, 1) for tokens in (1, 16, 256, 1024))
    assert 0 < one < short < long < longer
    many = cache_size.step_bytes(tiny, layers, 16, 250, 1)  # of 16 short prompts, the last cut
    assert many > 8 * short


def test_the_cache_that_a_step_needs_is_not_counted(tiny: LanguageModel):
    layers = packed_layers(tiny)
    short, long = (cache_size.step_bytes(tiny, layers, length, 8, 1) for length in (16, 2048))
    assert long < short + 8 * PER_TOKEN


@pytest.fixture(scope="module")
def wordy() -> LanguageModel:
    """Of next to no layers, and a vocabulary of 64,000."""
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64_000, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return LanguageModel.of(AutoModelForCausalLM.from_config(config), None, "wordy")


DEAREST = {
    "greedy": {},
    "top_k, top_p, repetition penalty": dict(temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.2, seed=1),
    "all there is": dict(temperature=0.9, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.5,
                         frequency_penalty=0.5, logit_bias={5: 1.0}, min_tokens=2, logprobs=20, seed=1),
}  # fmt: skip


@pytest.mark.parametrize("params", DEAREST)
def test_what_a_step_takes_covers_sampling(wordy: LanguageModel, params: str):
    rows, tokens = 16, 64
    foreseen = cache_size.step_bytes(wordy, packed_layers(wordy), 256, tokens, rows)
    engine = LLMEngine(wordy, kv_cache="paged", max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=256)
    settings = dict(temperature=0.0, max_tokens=3, ignore_eos=True) | DEAREST[params]
    with PeakMemory() as peak:
        engine.generate([[5, 6, 7 + row] for row in range(rows)], SamplingParams(**settings))
    assert peak.peak_bytes <= foreseen


# -- what is free -----------------------------------------------------------------------------------------------------


def test_free_memory_is_that_of_the_machine():
    assert 0 < cache_size.available_bytes(CPU) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("machine", "container", "free"), [(10**9, None, 10**9), (10**9, 10**8, 10**8), (10**8, 10**9, 10**8), (9, 0, 0)]
)
def test_a_container_may_leave_less_than_the_machine(
    monkeypatch: pytest.MonkeyPatch, machine: int, container: int | None, free: int
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=machine))
    monkeypatch.setattr(host, "memory_left", lambda: container)
    assert cache_size.available_bytes(CPU) == free


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_a_cache_is_sized_for_the_container(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: STEP)
    monkeypatch.setattr(host, "memory_left", lambda: STEP + 4096 * PER_TOKEN)
    with pytest.warns(UserWarning, match="slots of") if kind == "slots" else nullcontext():
        cache, _ = make(tiny, kind, max_model_len=512)
    assert 3000 * PER_TOKEN < cache.nbytes_reserved <= cache_size.SHARE * 4096 * PER_TOKEN


def test_what_a_container_has_left_is_read_from_its_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 150\nfile 3"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "_control_groups", lambda controller: [tmp_path])
    assert cache_size.available_bytes(CPU) == 1000 - 700 + 150
    (tmp_path / "memory.max").write_text("max")
    assert cache_size.available_bytes(CPU) > 10**6
