"""A KV cache in int8: the rule, pools, every backend on a CPU, and engines of every kind.

The oracle of the rule is arithmetic by hand, that of attention float64 over what the codes stand for, and that of
engines `model.generate` over a cache of transformers that rounds keys and values in the same way: engines give its
tokens, whatever shares a step. Triton's kernels are in test_paged_triton.py and test_fused_parts.py.
"""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import (
    ANSWERS,
    KINDS,
    MIX,
    NO_COMPILED,
    assert_idle,
    each,
    free,
    run,
    skip_without_backend,
    tokens,
    watched,
)
from families import hf_generate
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from minfer_lib import LanguageModel, LLMEngine, load_model
from minfer_lib import __main__ as cli
from minfer_lib.attention.backends import CompiledBackend
from minfer_lib.attention.support import batch_of, packed_layers
from minfer_lib.attention.torch_backend import TorchBackend
from minfer_lib.bench import decode_step_bytes, kv_int8_perplexity, perplexity
from minfer_lib.bench.quality_scores import CacheReader
from minfer_lib.cache.paged import PagedKVCache
from minfer_lib.cache.pool import KVPool, LayerShape
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.engine import cache_size
from minfer_lib.engine.cache_size import in_int8
from minfer_lib.errors import InvalidParameter, UnsupportedModel
from minfer_lib.fast import fused
from minfer_lib.fast.compiled import CompiledDecoder
from minfer_lib.fast.fused import FusedDecoder
from minfer_lib.kernels.compiled_attention import compiled_decode
from minfer_lib.kernels.reference_parts import quantize_rows

Family = Callable[[str], LanguageModel]
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(NO_COMPILED is not None, reason=f"no kernel here: {NO_COMPILED}")
backends = pytest.mark.parametrize(
    "backend", [TorchBackend(), pytest.param(CompiledBackend(), marks=needs_kernel)], ids=["torch", "compiled"]
)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_codes_by_hand():
    x = torch.tensor([[127.0, 63.5, 0.5, 1.5, 2.5, -0.5, -126.6], [0.0] * 7, [-1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 1.0]])
    codes, scale = quantize_rows(x)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert codes.tolist() == [[127, 64, 0, 2, 2, 0, -127], [0] * 7, [-127, 64, 32, 0, 0, 0, 127]]  # ties to even
    assert scale.tolist() == [1.0, 0.0, torch.tensor(1.0).div(127).item()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(bad: float):
    pool = KVPool.of(LayerShape(2, 4, 4, torch.int8), 3, CPU)
    keys = torch.ones(1, 2, 4)
    keys[0, 1, 2] = bad
    pool.write(torch.tensor([1]), keys, torch.ones(1, 2, 4))
    found, values = pool.read(torch.tensor([1]), torch.float32)
    assert (
        found[0, 1].isnan().all()
        and torch.equal(found[0, 0], torch.ones(4))
        and torch.equal(values, torch.ones(1, 2, 4))
    )
    assert not pool.keys[0, 1].any()  # and no code is left to chance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_number_is_further_from_its_code_than_half_a_step(dtype: torch.dtype, data: st.DataObject):
    limit = min(2.0**127, float(torch.finfo(dtype).max))
    numbers = st.one_of(st.floats(-limit, limit), st.floats(-2, 2), st.just(0.0), st.floats(0, 1e-37))
    x = torch.tensor(data.draw(st.lists(numbers, min_size=12, max_size=12))).to(dtype).view(3, 4)
    codes, scale = quantize_rows(x)
    assert codes.abs().max() <= 127
    step = scale.double()[:, None]
    assert ((codes.double() * step - x.double()).abs() <= step * (0.5 + 1e-5) + 127 * 1.2e-38).all()
    alone = [quantize_rows(row[None]) for row in x]
    assert torch.equal(codes, torch.cat([part[0] for part in alone]))
    assert torch.equal(scale, torch.cat([part[1] for part in alone]))


# -- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (24, 40)])
def test_bytes_of_a_token(key_dim: int, value_dim: int):
    half = LayerShape(3, key_dim, value_dim, torch.bfloat16)
    shapes = in_int8({0: half, 1: half, 5: replace(half, kv_heads=1)})
    assert shapes[0].bytes_per_token == 3 * (key_dim + value_dim + 2 * 4)
    if key_dim == 64:
        assert shapes[0].bytes_per_token <= 0.54 * half.bytes_per_token
    for cache in (PagedKVCache(shapes, 5, 4, CPU), SlotKVCache(shapes, 5, 4, CPU)):
        assert cache.bytes_per_token == 7 * (key_dim + value_dim + 8)
        parts = [part for pool in cache.pools.values() for part in vars(pool).values()]
        assert sum(part.nbytes for part in parts) == cache.nbytes_reserved + 2 * cache.bytes_per_token
        assert all(part.is_contiguous() and not part.any() for part in parts)
        assert {part.dtype for part in parts} == {torch.int8, torch.float32}
        for i, part in enumerate(parts):  # no two are one memory
            part.fill_(i)
        assert [part.unique().tolist() for part in parts] == [[i] for i in range(len(parts))]


def test_more_blocks_fit_in_the_same_memory(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_size, "available_bytes", lambda device: 2**20)
    monkeypatch.setattr(cache_size, "step_bytes", lambda *args: 0)
    full, small = (
        LLMEngine(tiny, "paged", kv_cache_dtype=dtype, max_model_len=1024, block_size=16).cache
        for dtype in (None, "int8")
    )
    dim = next(iter(packed_layers(tiny).values())).key_dim
    assert small.bytes_per_token / full.bytes_per_token == (dim + 4) / (4 * dim)
    for cache in (full, small):
        assert 0.8 * 2**20 < cache.nbytes_reserved <= 0.9 * 2**20
    assert small.num_blocks > 2 * full.num_blocks


# -- attention --------------------------------------------------------------------------------------------------------

REQUESTS = [(0, 1), (6, 1), (40, 1), (300, 1), (0, 5), (13, 4), (30, 21)]  # tokens in the cache, and new ones
SPECIALS = {
    "plain": {},
    "window": dict(window=9),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=torch.linspace(-2.0, 3.0, 6)),
    "all": dict(window=20, softcap=2.0, sinks=torch.linspace(-2.0, 3.0, 6)),
}


class Case:
    """Requests in a pool whose rows that belong to nobody have scales of NaN; the last block is the trash block."""

    def __init__(
        self, requests: list[tuple[int, int]], *, kv_heads: int = 2, heads: int = 6, dims: tuple[int, int] = (24, 40),
        size: int = 7, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.requests, self.size, self.heads, self.dims, self.dtype = requests, size, heads, dims, dtype
        totals = [sum(request) for request in requests]
        blocks = torch.randperm(sum(-(-n // size) for n in totals), generator=generator).tolist()
        self.tables = [[blocks.pop() for _ in range(-(-n // size))] for n in totals]
        count = 1 + sum(map(len, self.tables))
        self.pool = KVPool.of(LayerShape(kv_heads, *dims, torch.int8), count * size, CPU)
        self.pool.key_scales[:-size] = self.pool.value_scales[:-size] = torch.nan
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        self.queries = [draw(new, heads, dims[0]) for _, new in requests]
        for i, n in enumerate(totals):
            self.pool.write(self.rows(i), draw(n, kv_heads, dims[0]), draw(n, kv_heads, dims[1]))

    def rows(self, i: int) -> torch.Tensor:
        position = torch.arange(sum(self.requests[i]))
        return torch.tensor(self.tables[i])[position // self.size] * self.size + position % self.size

    def attend(self, backend: Any, some: list[int] | None = None, **special: Any) -> torch.Tensor:
        """[T, heads, value_dim] of some of the requests, those with one new token first."""
        some = list(range(len(self.requests))) if some is None else some
        lens, totals = [self.requests[i][1] for i in some], [sum(self.requests[i]) for i in some]
        batch = batch_of({0: self.pool}, self.size, [self.tables[i] for i in some], lens, totals, [0] * sum(lens), CPU)
        return backend.attend(torch.cat([self.queries[i] for i in some]), self.pool, batch, scale=0.3, **special)

    def expected(
        self, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        outs = []
        for i, (old, new) in enumerate(self.requests):
            group = self.heads // self.pool.keys.shape[1]
            keys, values = (part.repeat_interleave(group, 1) for part in self.pool.read(self.rows(i), torch.float64))
            for t in range(new):
                first = 0 if window is None else max(0, old + t + 1 - window)
                seen = slice(first, old + t + 1)
                scores = torch.einsum("hd,nhd->hn", self.queries[i][t].double(), keys[seen]) * 0.3
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], 1)
                weights = scores.softmax(1)[:, : old + t + 1 - first]
                outs.append(torch.einsum("hn,nhd->hd", weights, values[seen]))
        return torch.stack(outs)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("special", SPECIALS)
def test_attention_over_codes(special: str, dtype: torch.dtype, backend: Any):
    case = Case(REQUESTS, dtype=dtype)
    found, wanted = case.attend(backend, **SPECIALS[special]), case.expected(**SPECIALS[special])
    assert found.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 0.03
    assert (found.double() - wanted).abs().max() <= limit * wanted.abs().max()


@backends
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (8, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (33, 8), (3, 130)])
def test_head_counts_and_sizes(heads: int, kv_heads: int, dims: tuple[int, int], backend: Any):
    case = Case(REQUESTS, heads=heads, kv_heads=kv_heads, dims=dims, size=16)
    wanted = case.expected()
    assert (case.attend(backend).double() - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@needs_kernel
@pytest.mark.parametrize("special", SPECIALS)
def test_a_request_in_int8_has_the_same_bits_in_any_company(special: str):
    decodes, options = REQUESTS[:4], SPECIALS[special]
    case = Case(decodes)
    together = case.attend(CompiledBackend(), **options)
    for some in ([3], [2, 0], [1, 3, 2]):
        assert torch.equal(case.attend(CompiledBackend(), some, **options), together[some])
    other = Case(decodes, size=64)  # other blocks, the same keys
    other.queries = case.queries
    for i in range(len(decodes)):
        for part, its in zip(vars(case.pool).values(), vars(other.pool).values(), strict=True):
            its[other.rows(i)] = part[case.rows(i)]
    assert torch.equal(other.attend(CompiledBackend(), **options), together)


@needs_kernel
def test_codes_without_scales_and_scales_without_codes_are_refused():
    case = Case(REQUESTS[:2])
    kept = vars(case.pool)
    tables = torch.tensor([case.tables[0], case.tables[1][:1]], dtype=torch.int32)
    given = dict(query=torch.randn(2, 6, 24), block_tables=tables, kv_lens=torch.tensor([1, 7], dtype=torch.int32))
    given |= dict(block_size=7, scale=1.0)
    compiled_decode(**given, **kept)
    for wrong in (
        dict(key_scales=None), dict(key_scales=None, value_scales=None), dict(key_scales=kept["key_scales"][1:]),
        dict(value_scales=kept["value_scales"].double()), dict(key_scales=kept["key_scales"].T.contiguous().T),
        dict(keys=kept["keys"].float(), values=kept["values"].float()),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter, match="for int8 float32 scales"):
            compiled_decode(**given, **(kept | wrong))


# -- engines ----------------------------------------------------------------------------------------------------------


class RoundingCache(DynamicCache):
    """Transformers' own cache, which keeps of keys and values what int8 leaves of them."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        kept = []
        for new in (key_states, value_states):
            codes, scale = quantize_rows(new)
            kept.append((codes * scale[..., None]).to(new.dtype))
        return super().update(*kept, *args, **options)


_oracles: dict[tuple, list[int]] = {}


def rounded(lm: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """What `model.generate` says over such a cache."""
    key = (lm.name, tuple(prompt), count)
    if key not in _oracles:
        _oracles[key] = hf_generate(lm, prompt, count, cache=RoundingCache())
    return _oracles[key]


def rounded_answers(lm: LanguageModel) -> list[list[int]]:
    return [rounded(lm, prompt, count) for prompt, count in zip(MIX, ANSWERS, strict=True)]


def int8_engine(lm: LanguageModel, **options: Any) -> LLMEngine:
    return watched(lm, **(dict(kv_cache="paged", kv_cache_dtype="int8", block_size=4) | options))


ENGINES = [
    (name, kind)
    for name in ("llama", "mistral", "gemma2", "gpt_oss")
    for kind, options in KINDS.items()
    if name in ("llama", "mistral") or options.get("fast") is not True  # which would compile: the test after the next
]


@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize(("name", "kind"), ENGINES)
def test_engines_of_all_kinds_say_what_generate_says_over_rounded_keys(
    family: Family, name: str, kind: str, budget: int
):
    skip_without_backend(KINDS[kind])
    lm = family(name)
    engine = watched(lm, kv_cache_dtype="int8", max_num_batched_tokens=budget, **KINDS[kind])
    assert all(pool.keys.dtype == torch.int8 for pool in engine.cache.pools.values())
    assert tokens(engine.generate(MIX, each())) == rounded_answers(lm)
    if kind.startswith("few pages"):
        assert engine.stats()["preemptions"] > 0
    assert_idle(engine)


def test_rounding_changes_some_answers(family: Family):
    """Or the test before this one would pass over a cache that rounds nothing."""
    lm = family("mistral")
    assert rounded_answers(lm) != [hf_generate(lm, p, n) for p, n in zip(MIX, ANSWERS, strict=True)]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_compiled_layers_over_int8(family: Family, name: str):
    lm = family(name)
    engine = int8_engine(lm, fast="compiled", max_num_seqs=4)
    assert isinstance(engine.runner.decoder, CompiledDecoder)
    assert tokens(engine.generate(MIX, each())) == rounded_answers(lm)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_layers_over_int8_are_compared_over_int8(family: Family, name: str, monkeypatch: pytest.MonkeyPatch):
    lm = family(name)
    engine = int8_engine(lm, fast="fused", backend="torch")
    assert isinstance(engine.runner.decoder, FusedDecoder)
    assert tokens(engine.generate(MIX, each())) == rounded_answers(lm)
    parts = fused.kernels_for(lm.device)[0]
    right = parts.rope_cache

    def wrong(*args: Any) -> torch.Tensor:
        query = right(*args)
        if args[-1] is not None:
            args[-1].mul_(1.1)  # the scales of values, which only a cache in int8 has
        return query

    monkeypatch.setattr(parts, "rope_cache", wrong)
    int8_engine(lm, fast="fused", kv_cache_dtype=None)
    with pytest.raises(UnsupportedModel, match="values of layer 0 would differ"):
        int8_engine(lm, fast="fused")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_near_those_of_the_model(family: Family, name: str, dtype: torch.dtype):
    lm, ids = LanguageModel.of(copy.deepcopy(family(name).model).to(dtype), None, name), list(range(20, 60))
    with torch.no_grad():
        wanted = lm.model(torch.tensor([ids])).logits[0].double()
        for piece in (1, 7, 40):
            logits = CacheReader(lm, int8=True).read(ids)
            found = torch.cat([logits(slice(i, min(40, i + piece))) for i in range(0, 40, piece)]).double()
            change = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
            assert 1e-4 < change < 0.05, change


@pytest.mark.parametrize("fast", [False, "fused"])
def test_prefixes_are_found_as_codes(family: Family, fast: Any):
    lm = family("llama")
    system = list(range(60, 93))
    prompts = [[*system, *prompt] for prompt in MIX[:4]]
    engine = int8_engine(lm, max_model_len=128, fast=fast, max_num_batched_tokens=24)
    for turn in range(2):
        assert tokens(engine.generate(prompts, free(6))) == [rounded(lm, prompt, 6) for prompt in prompts]
        assert turn == 0 or engine.stats()["hit_tokens"] >= 4 * 32
    assert_idle(engine)


@pytest.mark.parametrize("fast", [False, "fused"])
def test_answers_that_share_a_block_copy_its_scales_too(family: Family, fast: Any):
    """The first of four is the one that computed the prompt; greedy, all four are the same."""
    lm, prompt = family("llama"), list(range(40, 62))
    engine = int8_engine(lm, block_size=8, fast=fast)
    assert tokens(engine.generate(prompt, free(12, n=4))) == [rounded(lm, prompt, 12)] * 4
    assert engine.stats()["kv_bytes_copied"] == 3 * 5 * engine.cache.bytes_per_token
    params = free(12, n=4, temperature=1.5, seed=11)
    one, other = (tokens(e.generate(prompt, params)) for e in (engine, int8_engine(lm, kv_cache="slots")))
    assert one == other and len({tuple(answer) for answer in one}) == 4
    assert_idle(engine)


def test_what_was_not_a_number_ends_its_request_alone():
    lm, prompt, steps = load_model("tiny-random", device="cpu"), list(range(3, 43)), itertools.count(1)
    expected = rounded(lm, prompt, 8)

    def poison(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * math.nan if next(steps) == 2 else output

    engine = int8_engine(lm, max_num_batched_tokens=16)
    lm.model.model.layers[0].mlp.down_proj.register_forward_hook(poison)
    assert engine.generate(prompt, free(8))[0].finish_reason == "error"
    assert tokens(engine.generate(prompt, free(8))) == [expected]
    assert_idle(engine)


def test_requests_that_join_and_leave_between_steps(family: Family):
    lm = family("mistral")
    engine = int8_engine(lm, block_size=2, num_blocks=26, max_num_seqs=3, max_num_batched_tokens=9)
    outputs = []
    for prompt, params in zip(MIX, each(), strict=True):
        engine.add_request(prompt, params)
        outputs += engine.step()
    outputs += run(engine)
    assert {tuple(o.prompt_token_ids): o.token_ids for o in outputs} == {
        tuple(prompt): said for prompt, said in zip(MIX, rounded_answers(lm), strict=True)
    }


# -- at the door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["fp8", "INT8", "", torch.int8, 8, True, ["int8"]])
def test_other_dtypes_are_refused(tiny: LanguageModel, value: object):
    with pytest.raises(InvalidParameter, match=r'^kv_cache_dtype must be None or "int8"; it is '):
        LLMEngine(tiny, kv_cache_dtype=value)


def test_caches_of_ones_own(family: Family):
    class Mine(PagedKVCache):
        pass

    lm = family("llama")
    engine = watched(lm, kv_cache=Mine, kv_cache_dtype="int8")
    assert type(engine.cache) is Mine and tokens(engine.generate(MIX, each())) == rounded_answers(lm)
    cache = PagedKVCache(in_int8(packed_layers(lm)), 60, 4, CPU)
    with pytest.raises(InvalidParameter, match="kv_cache_dtype='int8' was given with a cache that exists already"):
        LLMEngine(lm, kv_cache=cache, kv_cache_dtype="int8")
    engine = watched(lm, kv_cache=cache, fast=True)
    assert tokens(engine.generate(MIX, each())) == rounded_answers(lm)


def test_a_backend_has_to_say_that_it_reads_codes(family: Family):
    class Old:
        name, graph_safe, attend = "old", False, TorchBackend().attend

    class New(Old):
        reads_int8 = True

    lm = family("llama")
    with pytest.raises(InvalidParameter, match="'old' does not say so"):
        LLMEngine(lm, kv_cache_dtype="int8", backend=Old())
    assert tokens(int8_engine(lm, backend=New()).generate(MIX, each())) == rounded_answers(lm)


TINY = ("--model", "tiny-random", "--device", "cpu", "--max-tokens", "9", "--raw")


@pytest.mark.parametrize("engine", ["slots", "paged"])
def test_from_a_shell(tiny: LanguageModel, engine: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["generate", "Hello", *TINY, "--engine", engine, "--kv-cache-dtype", "int8"]) == 0
    expected = LLMEngine(tiny, kv_cache_dtype="int8").generate("Hello", free(9, ignore_eos=False))[0].text
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("engine", ["naive", "cached", "cached-int8"])
def test_engines_without_such_a_cache_say_so(engine: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["generate", "Hello", *TINY, "--engine", engine, "--kv-cache-dtype", "int8"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        f"minfer: --kv-cache-dtype=int8 was given for --engine {engine}, which has no such cache."
    )


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_a_step_reads_fewer_bytes(tiny: LanguageModel):
    engine = LLMEngine(tiny, kv_cache_dtype="int8", max_model_len=64)
    codes = decode_step_bytes(tiny, 3, 40, engine.cache.bytes_per_token) - decode_step_bytes(tiny, 3, 0)
    assert codes == 3 * 40 * engine.cache.bytes_per_token < decode_step_bytes(tiny, 3, 40) - decode_step_bytes(tiny, 3)


def test_perplexity_over_both_caches(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)
    asked = dict(tokens=200, window=64, progress=False)
    full, small = kv_int8_perplexity(tiny, **asked)
    assert full == pytest.approx(perplexity(tiny, **asked), rel=1e-5)
    assert small != full and small == pytest.approx(full, rel=0.01)
    training = LanguageModel.of(copy.deepcopy(tiny.model), tiny.tokenizer, "tiny")
    training.model.train()
    with pytest.raises(InvalidParameter, match="training mode"):
        kv_int8_perplexity(training, **asked)


def test_smollm2_reads_a_text_nearly_as_well(smollm2: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)
    full, small = kv_int8_perplexity(smollm2, tokens=4096, progress=False)
    assert abs(small / full - 1) < 1e-3, (full, small)
