"""Does this GPU compute what it should? `python -m minfer_lib.bench.gpu_selftest`, one line a check, no download.

Kernels are checked against float64 by torch, engines on small random models against `model.generate` on the same
device. On a computer without a GPU, `TRITON_INTERPRET=1 python -m minfer_lib.bench.gpu_selftest --device cpu` lets
Python run the same kernels, slowly; what only a GPU can show is skipped then, and the line says so.

Invariant: a check that could not be made is never counted as one that passed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from ..attention.backends import AttentionBackend, TorchBackend, TritonBackend
from ..engine.llm_engine import LLMEngine
from ..generation.params import SamplingParams
from ..kernels.reference_parts import quantize_rows
from ..models.checks import has_softcap
from ..models.load import LanguageModel
from ..models.memory import measured_weight_bytes
from .machine import machine_name, provenance
from .results import Cells, Result

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPECIAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "int8": {"int8": True},
    "window, softcap and sinks": {"window": 20, "softcap": 2.0, "sinks": True},
}
VOCAB, NEW_TOKENS = 199, 10
# Unequal lengths, one longer than the window and one of a single token.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [100, 3, 50], [9] * 9 + [4, 77], [42]]
SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": dict(head_dim=16),  # queries and keys are normed
    "mistral": dict(sliding_window=7),
    "gemma2": dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
    "gpt_oss": dict(head_dim=16, sliding_window=7, layer_types=LAYERS, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=256),
}
FAST = {"fused": ("llama", "qwen2", "qwen3", "mistral"), "compiled": ("llama", "gemma2"), "graph": ("llama", "gpt2")}
BUCKETS = (1, 2, 3, 8, 13)  # requests at once: with a graph of their size, or rows that do nothing


class Skipped(Exception):
    """A check that cannot be made here; the message says why."""


@dataclass(frozen=True)
class Check:
    """One line of the self-test. state: "ok", "FAILED" or "skipped"."""

    name: str
    state: str
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.state:8} {self.name}: {self.detail}" + (f" ({self.seconds:.1f} s)" if self.seconds else "")


# -- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paged:
    """Requests in a pool of keys and values whose other rows are NaN. new: tokens of each that ask, its last ones."""

    query: torch.Tensor  # [sum(new), heads, dim]
    keys: torch.Tensor  # [rows, kv_heads, dim]
    values: torch.Tensor
    tables: torch.Tensor  # [R, W] int32
    lens: list[int]
    new: list[int]
    block_size: int
    codes: tuple[torch.Tensor, ...] = ()  # that the kernels get in place of keys and values kept in int8
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def make(
        cls, lens: list[int], new: list[int], device: torch.device, dtype: torch.dtype, *,
        heads: int = 6, kv_heads: int = 2, dim: int = 64, block_size: int = 16,
    ) -> Paged:  # fmt: skip
        """Random contents; blocks are given out in random order."""
        g = torch.Generator().manual_seed(0)
        widths = [-(-n // block_size) for n in lens]
        blocks = torch.randperm(sum(widths) + 5, generator=g).tolist()
        tables = torch.zeros(len(lens), max(widths), dtype=torch.int32)
        keys = torch.full((len(blocks) * block_size, kv_heads, dim), torch.nan)
        values = keys.clone()
        for row, (n, width) in enumerate(zip(lens, widths, strict=True)):
            tables[row, :width] = torch.tensor([blocks.pop() for _ in range(width)])
            rows = rows_of(tables[row], n, block_size)
            keys[rows] = torch.randn(n, kv_heads, dim, generator=g)
            values[rows] = torch.randn(n, kv_heads, dim, generator=g)
        query = torch.randn(sum(new), heads, dim, generator=g)
        parts = (part.to(dtype).to(device) for part in (query, keys, values))
        return cls(*parts, tables.to(device), lens, new, block_size)

    def in_int8(self) -> Paged:
        """The same kept in int8; keys and values become what the codes stand for, in float64."""
        (keys, key_scales), (values, value_scales) = quantize_rows(self.keys), quantize_rows(self.values)
        numbers = (codes.double() * scale[..., None] for codes, scale in ((keys, key_scales), (values, value_scales)))
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        return Paged(self.query, *numbers, self.tables, self.lens, self.new, self.block_size, (keys, values), scales)

    def right(self, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """The formula of attention in float64, request by request."""
        outs = []
        for table, n, query in zip(self.tables, self.lens, self.query.double().split(self.new), strict=True):
            rows = rows_of(table, n, self.block_size)
            keys, values = (pool[rows].double().transpose(0, 1) for pool in (self.keys, self.values))
            group = query.shape[1] // len(keys)
            keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))  # [heads, n, dim]
            scores = query.transpose(0, 1) @ keys.transpose(1, 2) * query.shape[2] ** -0.5  # [heads, new, n]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(n, device=query.device)
            behind = at[n - len(query) :, None] - at  # how far each key lies behind each query
            scores = scores.masked_fill((behind < 0) | (behind >= (window or n)), -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], 2)
            outs.append((scores.softmax(2)[:, :, :n] @ values).transpose(0, 1))
        return torch.cat(outs)

    def computed(self, scale: float, **special: Any) -> torch.Tensor:
        """The same by the kernel for one new token a request, or by that for several."""
        from ..kernels.triton.paged_attention import paged_decode, paged_prefill

        kv_lens = torch.tensor(self.lens, dtype=torch.int32, device=self.query.device)
        pools = (self.query, *(self.codes or (self.keys, self.values)), self.tables, kv_lens)
        options = {"block_size": self.block_size, "scale": scale, **special, **self.scales}
        if max(self.new) == 1:
            return paged_decode(*pools, longest=max(self.lens), **options)
        starts = torch.tensor([0, *self.new], device=self.query.device).cumsum(0).int()
        return paged_prefill(*pools, starts, most_new=max(self.new), **options)


def rows_of(table: torch.Tensor, n: int, block_size: int) -> torch.Tensor:
    """Rows of the pool in which the first n tokens lie of the request that has this block table."""
    positions = torch.arange(n, device=table.device)
    return table[positions // block_size].long() * block_size + positions % block_size


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """What rounding to a dtype may change, relatively; Triton's interpreter cuts float32 off to bfloat16 instead."""
    cut_off = device.type == "cpu" and dtype == torch.bfloat16
    return torch.finfo(dtype).eps * (1 if cut_off else 0.5)


def check_attention(lens: list[int], new: list[int], device: torch.device, asked: dict[str, Any]) -> str:
    """One kernel of paged attention, in three dtypes: the largest error as a share of what rounding allows."""
    worst = 0.0
    for dtype in DTYPES:
        case = Paged.make(lens, new, device, dtype)
        case = case.in_int8() if asked.get("int8") else case
        sinks = torch.linspace(-2, 3, case.query.shape[1], device=device) if asked.get("sinks") else None
        special = {"window": asked.get("window"), "softcap": asked.get("softcap"), "sinks": sinks}
        out = case.computed(case.query.shape[2] ** -0.5, **special)
        # of the weights, the result and values that are made of codes, and the float32 sums of scores
        allowed = (3 if case.codes else 2) * rounding(dtype, device) + 2.0**-18
        error = (out.double() - case.right(**special)).abs().max()
        worst = max(worst, float(error) / (float(case.values.nan_to_num(0).abs().max()) * allowed))
    return judged(worst)


def check_int8(m: int, path: str | None, device: torch.device) -> str:
    """One path of the product with int8 weights, in three dtypes; a path of None is what the shape makes it take."""
    from ..kernels.triton.int8_linear import ProductPlan, int8_linear

    plans = {
        "matvec": ProductPlan("matvec", block_n=16, block_k=128),
        "dot": ProductPlan("dot", block_k=64, stages=2),
        "split dot": ProductPlan("dot", block_k=64, splits=3, stages=2),
        "dequantize": ProductPlan("dequantize"),
    }
    worst, n, k = 0.0, 192, 256
    for dtype in DTYPES:
        g = torch.Generator().manual_seed(m)
        x, bias = torch.randn(m, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
        weight = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
        scale = 10 ** (torch.rand(n, generator=g) * 4 - 5)
        x, weight, scale, bias = (part.to(device) for part in (x, weight, scale, bias))
        plan = plans.get(path)
        out = int8_linear(x, weight, scale, bias, plan=plan)
        eps = rounding(dtype, device)
        w = weight.double() * scale.double()[:, None]
        right, size = x.double() @ w.T + bias.double(), x.double().abs() @ w.abs().T + bias.double().abs()
        allowed = size * 2.0**-24 * 8 * k**0.5 + right.abs() * eps * 1.01 + 2.0**-24
        allowed += 16 * eps * (x.double() ** 2 @ (w**2).T).sqrt() * (path == "dequantize")  # weights are rounded there
        worst = max(worst, float(((out.double() - right).abs() / allowed).max()))
    return judged(worst)


def judged(worst: float) -> str:
    """The sentence about the largest error; raises `AssertionError` if it is more than rounding explains, or NaN."""
    assert worst <= 1, f"the largest error is {worst:.3g} times what rounding explains"
    return f"the largest error is {worst:.2f} of what rounding explains, in float32, float16 and bfloat16"


# -- engines ---------------------------------------------------------------------------------------------------------


def random_model(family: str, device: torch.device) -> LanguageModel:
    """A small random model in float32 whose weights are large enough that a mistake changes tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
        attention = "eager" if has_softcap(config) else None  # as `load_model` does: fused attention has no softcap
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=2.0 if name.endswith("sinks") else 0.25)
    model.generation_config = GenerationConfig()
    return LanguageModel.of(model.to(device), None, f"random {family}")


def backend_on(device: torch.device) -> AttentionBackend:
    """Triton's kernels wherever they run; torch on a CPU without Triton's interpreter."""
    return TritonBackend() if no_triton(device) is None else TorchBackend()


def hf_tokens(lm: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """What `model.generate` says to a prompt alone, greedily."""
    ids = torch.tensor([prompt], device=lm.device)
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        row = lm.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0]
    return row[len(prompt) :].tolist()


def check_fast(family: str, way: str, device: torch.device) -> str:
    """The fast path is token-equal to `model.generate` in float32, whatever joins, leaves, is shared or preempted, with
    NaN in every row of the cache that nobody has written; and its seeded draws are those of the plain engine."""
    if device.type == "cpu" and way == "compiled":
        raise Skipped("it is compiled for a GPU")
    if device.type == "cpu" and no_triton(device) is None:
        raise Skipped("Triton's interpreter would take minutes")
    lm, backend = random_model(family, device), backend_on(device)
    prompts = [PROMPTS[i % len(PROMPTS)] + list(range(3, 3 + 5 * i)) for i in range(max(BUCKETS))]
    lengths = [5 + 9 * i % 23 for i in range(len(prompts))]  # so that they leave at different steps
    wanted = [hf_tokens(lm, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    preempted, options = 0, {"kv_cache": "paged", "block_size": 4, "max_model_len": 128, "backend": backend}
    for limits in ({}, {"max_num_seqs": 5, "max_num_batched_tokens": 30}, {"num_blocks": 27}):
        engine = LLMEngine(lm, fast=way, **({"max_num_seqs": max(BUCKETS)} | options | limits))
        engine.scheduler.watermark = 0
        for pool in engine.cache.pools.values():
            pool.keys[: engine.cache.trash_row] = pool.values[: engine.cache.trash_row] = torch.nan
        for count in BUCKETS:  # the later ones find the prompts of the first in the prefix cache
            outputs = engine.generate(prompts[:count], params[:count])
            found = [out.token_ids for out in outputs]
            assert found == wanted[:count], f"{count} at once, {limits}: {found}, model.generate {wanted[:count]}"
            preempted += sum(out.metrics.preemptions for out in outputs)
    assert preempted, "27 blocks were enough for all, so preemption was not checked"
    drawn = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=i, **filters)
        for i, filters in enumerate([{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.05}, {"logprobs": 1}])
    ]
    plain = LLMEngine(lm, fast=False, **options)
    one, other = ([out.token_ids for out in e.generate(prompts[:5], drawn)] for e in (engine, plain))
    assert one == other, f"seeded draws {one}, of the plain engine {other}"
    return f"{', '.join(map(str, BUCKETS))} at once, chunks, prefix hits, preemption, NaN in free rows, seeded draws"


def check_family(family: str, device: torch.device) -> str:
    """Token-equal to `model.generate` in float32: over slots, and over blocks so few that requests are preempted."""
    lm = random_model(family, device)
    wanted = [hf_tokens(lm, prompt, NEW_TOKENS) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    few = {"block_size": 4, "num_blocks": 7, "max_num_batched_tokens": 7}
    backend = backend_on(device)
    preempted = 0
    for options in ({"kv_cache": "slots"}, {"kv_cache": "paged"}, {"kv_cache": "paged", **few}):
        engine = LLMEngine(lm, max_model_len=40, backend=backend, fast=False, **options)
        outputs = engine.generate(PROMPTS, params)
        found = [out.token_ids for out in outputs]
        assert found == wanted, f"{options} gave {found}, model.generate {wanted}"
        preempted = sum(out.metrics.preemptions for out in outputs)
    assert preempted, "7 blocks were enough for all, so preemption was not checked"
    return f"slots, blocks and preemption give the tokens of model.generate; attention by {backend.name}"


def check_int8_cache(device: torch.device) -> str:
    """Engines that keep keys and values in int8 say the same in float32: with attention by torch or by kernels, over
    slots, blocks and blocks so few that requests are preempted, plain and fast."""
    lm, params = random_model("llama", device), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    few = {"block_size": 4, "num_blocks": 7, "max_num_batched_tokens": 7}
    options: list[dict[str, Any]] = [
        {"backend": TorchBackend()},
        {},
        {"kv_cache": "paged"},
        {"kv_cache": "paged", **few},
    ]
    if device.type == "cuda":
        options += [{"kv_cache": "paged", "fast": way} for way in ("fused", "compiled", "graph")]
    plain = {"max_model_len": 40, "kv_cache_dtype": "int8", "backend": backend_on(device), "fast": False}
    found = [[o.token_ids for o in LLMEngine(lm, **(plain | asked)).generate(PROMPTS, params)] for asked in options]
    for asked, said in zip(options, found, strict=True):
        assert said == found[0], f"{asked} gave {said}, with attention by torch it is {found[0]}"
    return f"{len(options)} engines say the same; attention by {plain['backend'].name}"


def check_steps_do_not_wait(device: torch.device) -> str:
    """A greedy decode step asks the GPU for nothing but the tokens it chose, through pinned memory and an event."""
    if device.type != "cuda":
        raise Skipped("only a GPU runs ahead of Python")
    for kv_cache in ("slots", "paged"):
        engine = LLMEngine(random_model("llama", device), kv_cache=kv_cache, max_model_len=64, max_num_seqs=4)
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(4):  # prompts, and what is made once
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "8 steps over slots and 8 over blocks with torch.cuda.set_sync_debug_mode('error')"


def check_memory(device: torch.device) -> str:
    """What the package says a model and a cache take is what the GPU's allocator handed out for them."""
    if device.type != "cuda":
        raise Skipped("the allocator of a GPU counts, that of a CPU does not")
    gc.collect()  # engines of earlier checks
    before = torch.cuda.memory_allocated(device)
    lm = random_model("llama", device)
    weights, counted = torch.cuda.memory_allocated(device) - before, measured_weight_bytes(lm.model)
    engine = LLMEngine(lm, kv_cache="paged", max_model_len=256, max_num_seqs=32)
    cache = torch.cuda.memory_allocated(device) - before - weights
    told = engine.kv_bytes()
    # the allocator rounds each tensor up to 512 bytes; a cache has block tables and a trash row besides
    assert 0 <= weights - counted <= 512 * 64, f"weights of {counted} bytes took {weights}"
    assert 0 <= cache - told <= 0.05 * told + 2**20, f"a cache of {told} bytes took {cache}"
    return f"weights {counted:,} bytes, {weights:,} allocated; cache {told:,} bytes, {cache:,} allocated"


# -- all of them -----------------------------------------------------------------------------------------------------


def no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on this device; None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU; with TRITON_INTERPRET=1 Python would run the kernels"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return None


def all_checks(device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    """The checks by name, each a function that returns what it found, or raises."""

    def kernel(check: Callable[..., str], *arguments: Any) -> Callable[[], str]:
        def run() -> str:
            if why := no_triton(device):
                raise Skipped(why)
            return check(*arguments)

        return run

    long = 3000 if device.type == "cuda" else 90
    for name, asked in SPECIAL.items():
        yield f"decode attention, {name}", kernel(check_attention, [long, 1, 70, 33], [1] * 4, device, asked)
    for name, asked in SPECIAL.items():
        yield f"prefill attention, {name}", kernel(check_attention, [long, 40, 3], [40, 17, 3], device, asked)
    for m, path in (
        (1, "matvec"),
        (19, "dot"),
        (19, "split dot"),
        (19, "dequantize"),
        (1, None),
        (40, None),
        (200, None),
    ):
        rows = f"{m} row{'s' * (m > 1)}"
        yield f"int8 product, {rows}, {path or 'as planned'}", kernel(check_int8, m, path, device)
    for family in FAMILIES:
        yield f"{family}", lambda family=family: check_family(family, device)
    for way, families in FAST.items():
        for family in families:
            yield f"{family}, {way}", lambda way=way, family=family: check_fast(family, way, device)
    yield "llama, int8 cache", lambda: check_int8_cache(device)
    yield "greedy steps without a wait", lambda: check_steps_do_not_wait(device)
    yield "memory", lambda: check_memory(device)


def run_checks(device: torch.device, only: str = "", say: Callable[[Check], object] = print) -> list[Check]:
    """Makes every check whose name has `only` in it, also after one that failed, and says each as it is done."""
    done = []
    for name, check in all_checks(device):
        if only not in name:
            continue
        began = time.perf_counter()
        try:
            state, detail = "ok", check()
        except Skipped as reason:
            state, detail = "skipped", str(reason)
        except Exception as error:  # whatever a broken kernel or driver raises is this check's result
            state, detail = "FAILED", f"{type(error).__name__}: {str(error)[:400]}"
        done.append(Check(name, state, detail, time.perf_counter() - began))
        say(done[-1])
    return done


def as_result(checks: Sequence[Check], device: torch.device) -> Result:
    """The self-test as a table: 1 for a check that passed, 0 for one that failed, empty for one that was not made."""
    passed = {"ok": 1, "FAILED": 0}
    rows = [Cells("self-test", c.name, {"passed": passed.get(c.state), "seconds": round(c.seconds, 2)}) for c in checks]
    facts = {**provenance(device, torch.float32), "model": "Small random models and kernels"}
    return Result("table", rows, {"description": "GPU self-test"}, facts, tuple(map(str, checks)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minfer_lib.bench.gpu_selftest", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu (default: cuda)")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks that have this in their names")
    parser.add_argument("--json", metavar="FILE", help="keep the results")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU. Use --device cpu with TRITON_INTERPRET=1 to check the kernels without one.")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 is to be float32
    facts = provenance(device)
    print(f"{machine_name(facts)}, torch {facts['torch']}, transformers {facts['transformers']}")
    logging.set_verbosity_error()  # what it says of small random models is about no mistake
    checks = run_checks(device, args.only)
    counts = {state: sum(check.state == state for check in checks) for state in ("ok", "FAILED", "skipped")}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if args.json:
        as_result(checks, device).save(args.json)
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
