"""The fast path on a CPU, where a "graph" is a call: the same tokens, whatever goes on around it.

What every engine must do, a fast one too, is in test_llm_engine.py, whose engines are of all kinds.
"""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from engines import ANSWERS, LONGEST, MIX, alone, answers, assert_idle, each, free, tokens
from families import EXACT

from minfer_lib import LanguageModel, LLMEngine, NaiveEngine, SamplingParams, load_model, quantize_int8
from minfer_lib.attention.support import packed_layers
from minfer_lib.attention.torch_backend import TorchBackend
from minfer_lib.engine.runner import ViewDecoder
from minfer_lib.engine.scheduler import Scheduler
from minfer_lib.errors import UnsupportedModel
from minfer_lib.fast import choose
from minfer_lib.fast.compiled import CompiledDecoder
from minfer_lib.fast.decode_rows import FastRunner
from minfer_lib.fast.fused import FusedDecoder
from minfer_lib.fast.graphs import PROMPTS, decode_buckets
from minfer_lib.fast.proof import prove
from minfer_lib.quant.linear import Int8Linear
from minfer_lib.quant.products import why_not

Family = Callable[[str], LanguageModel]
FUSED = ("llama", "mistral", "qwen2", "qwen3")


def engine(lm: LanguageModel, **options: object) -> LLMEngine:
    return LLMEngine(
        lm, **(dict(kv_cache="paged", block_size=4, max_model_len=LONGEST, fast=True, backend="torch") | options)
    )


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_agree_and_say_the_same(family: Family, name: str):
    lm = family(name)
    before = {key: value.clone() for key, value in lm.model.state_dict().items()}
    fast = engine(lm, fast="fused")
    assert isinstance(fast.runner.decoder, FusedDecoder)
    assert tokens(fast.generate(MIX, each())) == answers(lm)
    assert_idle(fast)
    after = lm.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items()) and set(after) == set(before)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_compiled_layers_agree_and_say_the_same(family: Family, name: str):
    lm = family(name)
    fast = engine(lm, fast="compiled", max_num_seqs=4)
    assert isinstance(fast.runner.decoder, CompiledDecoder)
    assert tokens(fast.generate(MIX, each())) == answers(lm)


def test_compiled_layers_follow_weights_that_are_replaced(family: Family):
    """Of a projection that stands alone as of those that are merged."""
    lm = LanguageModel.of(copy.deepcopy(family("llama").model), None, "llama of its own")
    fast = engine(lm, fast="compiled")
    before = tokens(fast.generate(MIX, each()))
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.flip(0).contiguous()
    after = tokens(fast.generate(MIX, each()))
    assert after != before and after == tokens(NaiveEngine(lm).generate(MIX, each()))


def test_compiled_layers_over_int8_that_rounds_activations(monkeypatch: pytest.MonkeyPatch):
    lm = quantize_int8(load_model("tiny-random", device="cpu"))
    wanted = LLMEngine(lm, max_model_len=LONGEST).generate(MIX, each())
    got = engine(lm, fast="compiled").generate(MIX, each())
    assert sum(a.token_ids == b.token_ids for a, b in zip(wanted, got, strict=True)) >= len(MIX) / 2


@pytest.mark.parametrize("name", EXACT)
def test_every_family_finds_a_way(family: Family, name: str, monkeypatch: pytest.MonkeyPatch):
    """Without the compiled layers, which take seconds to make for each."""
    monkeypatch.setattr(choose, "WAYS", ("fused", "graph"))
    lm = family(name)
    fast = engine(lm)
    assert isinstance(fast.runner, FastRunner)
    assert type(fast.runner.decoder) is (FusedDecoder if name in FUSED else ViewDecoder)
    assert tokens(fast.generate(MIX, each())) == answers(lm)


def test_what_does_not_agree_is_not_used(family: Family, monkeypatch: pytest.MonkeyPatch):
    lm = family("llama")
    hidden = FusedDecoder.hidden
    monkeypatch.setattr(FusedDecoder, "hidden", lambda *args: hidden(*args) + 1.0)
    with pytest.raises(UnsupportedModel, match=r"llama cannot be fused: logits would differ by .*e-0"):
        engine(lm, fast="fused")
    monkeypatch.setattr(choose, "WAYS", ("fused", "graph"))
    assert type(engine(lm).runner.decoder) is ViewDecoder


def test_each_layer_is_compared_by_itself(family: Family):
    """One layer's error may drown in what comes behind it: the sum of the residual stream."""
    lm = family("qwen3")
    decoder = FusedDecoder(lm)
    prove(lm, decoder, ViewDecoder(lm), TorchBackend(), packed_layers(lm))
    decoder.layers[1].scale *= 1.001
    with pytest.raises(UnsupportedModel, match="layer 1 would differ"):
        prove(lm, decoder, ViewDecoder(lm), TorchBackend(), packed_layers(lm))


def test_no_way_is_said_and_the_engine_runs_as_ever(family: Family, monkeypatch: pytest.MonkeyPatch):
    lm = family("gemma2")
    monkeypatch.setattr(choose, "WAYS", ("fused",))
    with pytest.warns(
        UserWarning, match=r"no fast path for gemma2: fused: gemma2 cannot be fused: its layers are Gemma2"
    ):
        slow = engine(lm)
    assert not isinstance(slow.runner, FastRunner) and slow.ahead is None
    with pytest.raises(UnsupportedModel, match="gemma2 cannot be fused"):
        engine(lm, fast="fused")


@pytest.mark.parametrize("broken", [CompiledDecoder, FastRunner])
def test_a_way_that_breaks_is_left_with_its_reason(family: Family, broken: type, monkeypatch: pytest.MonkeyPatch):
    """A compiler that is missing, or a model that cannot be captured."""

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no compiler\nand a long story")

    lm = family("gemma2")
    monkeypatch.setattr(broken, "__init__", fail)
    if broken is CompiledDecoder:
        told = engine(lm).fast_path
        assert (
            told.startswith("graph; ") and "not compiled: gemma2 cannot go this way (RuntimeError: no compiler)" in told
        )
    else:
        monkeypatch.setattr(choose, "WAYS", ("graph",))
        with pytest.warns(UserWarning, match=r"no fast path for gemma2: graph: gemma2 cannot go .*no compiler\)$"):
            assert engine(lm).fast_path.startswith("none: graph: ")
    with pytest.raises(UnsupportedModel, match="no compiler"):
        engine(lm, fast="compiled" if broken is CompiledDecoder else "graph")


def test_auto_is_off_on_a_cpu(tiny: LanguageModel):
    plain = LLMEngine(tiny)
    assert not isinstance(plain.runner, FastRunner) and plain.fast_path == "none: the model's own modules run"


def test_a_fast_engine_says_which_way_it_went_and_why_no_other(family: Family, monkeypatch: pytest.MonkeyPatch):
    assert engine(family("llama"), max_num_seqs=3).fast_path.startswith("fused, kernels in ")
    monkeypatch.setattr(choose, "WAYS", ("fused", "graph"))
    told = engine(family("gemma2")).fast_path
    assert told.startswith("graph; ") and "not fused: gemma2 cannot be fused: its layers are Gemma2DecoderLayer" in told


def test_more_rows_than_there_are_graphs_for(family: Family, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose, "MOST_ROWS", 3)
    lm = family("llama")
    fast = engine(lm)
    assert fast.runner.graphs.sizes == [1, 2, 3] and fast.max_num_seqs == 64
    assert tokens(fast.generate(MIX, each())) == answers(lm)


def test_a_scheduler_of_ones_own_decides_about_every_step(family: Family):
    lm, planned = family("llama"), []

    class Own(Scheduler):
        def schedule(self) -> dict:
            plan = super().schedule()
            planned.append(len(plan))
            return plan

    fast = engine(lm, scheduler=Own)
    assert fast.ahead is None and isinstance(fast.runner, FastRunner)
    assert tokens(fast.generate(MIX, each())) == answers(lm)
    assert len(planned) >= max(ANSWERS)


def test_steps_go_ahead_and_stop_for_what_needs_the_tokens(family: Family, monkeypatch: pytest.MonkeyPatch):
    """Of a batch that only decodes all steps but the first go ahead; with logprobs, or a queue that may join, none."""
    lm = family("llama")

    def ahead(params: list[SamplingParams], **options: object) -> int:
        fast = engine(lm, **options)
        count, launch = [0], fast.runner.launch_decode

        def counting(plan: dict, before: object = None) -> object:
            count[0] += before is not None
            return launch(plan, before)

        fast.runner.launch_decode = counting
        expected = [alone(lm, prompt, p.max_tokens) for prompt, p in zip(MIX, params, strict=False)]
        assert tokens(fast.generate(MIX[: len(params)], params)) == expected
        return count[0]

    assert ahead([free(10), free(10)]) == 8  # one token by the prompts, one by the step that begins
    assert ahead([free(10), free(10, logprobs=2)]) == 0
    assert ahead([free(10), free(10), free(10)], max_num_seqs=2) == 2 * 8  # the third begins anew


def test_eos_is_seen_a_step_late_and_nothing_of_it_is_left(family: Family):
    lm = family("llama")
    told = [alone(lm, prompt, 12) for prompt in MIX]
    stops = [answer[5] for answer in told]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[stop]) for stop in stops]
    fast = engine(lm)
    for output, answer, stop in zip(fast.generate(MIX, params), told, stops, strict=True):
        assert output.token_ids == answer[: answer.index(stop) + 1] and output.finish_reason == "stop"
    assert_idle(fast)


@pytest.mark.parametrize("params", [
    dict(temperature=0.9, seed=3), dict(temperature=0.7, top_k=5, seed=4), dict(temperature=1.3, top_p=0.6, seed=5),
    dict(temperature=1.0, min_p=0.1, seed=6), dict(temperature=0.8, top_k=9, top_p=0.8, min_p=0.05, seed=7, n=3),
    dict(temperature=0.8, seed=8, repetition_penalty=1.3, logprobs=1),
], ids=str)  # fmt: skip
def test_seeded_draws_are_those_of_every_other_engine(family: Family, params: dict[str, object]):
    lm = family("llama")
    wanted = NaiveEngine(lm).generate(MIX[:3], SamplingParams(max_tokens=9, ignore_eos=True, **params))
    company = [free(7) for _ in MIX[3:]]
    n = params.get("n", 1)
    outputs = engine(lm).generate(MIX, [SamplingParams(max_tokens=9, ignore_eos=True, **params)] * 3 + company)
    assert tokens(outputs[: 3 * n]) == tokens(wanted)


def test_weights_that_move_or_change_are_followed(family: Family):
    lm = copy.copy(family("llama"))
    lm = LanguageModel.of(copy.deepcopy(lm.model), None, "llama, a copy")
    fast = engine(lm)
    assert tokens(fast.generate(MIX, each())) == [alone(lm, p, n) for p, n in zip(MIX, ANSWERS, strict=True)]
    layer = lm.model.model.layers[0]
    layer.self_attn.k_proj.weight.data = layer.self_attn.k_proj.weight.data * 1.5  # elsewhere now
    layer.mlp.down_proj.weight.data.mul_(0.5)  # where it was
    lm.name = "llama, changed"
    assert tokens(fast.generate(MIX, each())) == [alone(lm, p, n) for p, n in zip(MIX, ANSWERS, strict=True)]


def test_hooks_are_run_as_long_as_they_are_there(family: Family):
    lm = family("llama")
    fast, seen = engine(lm, enable_prefix_caching=False), []
    handle = lm.model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    try:
        assert tokens(fast.generate(MIX[:2], free(6))) == [alone(lm, p, 6) for p in MIX[:2]]
        assert len(seen) == 6  # a step each
    finally:
        handle.remove()
    assert tokens(fast.generate(MIX, each())) == answers(lm) and len(seen) == 6
    lm.model.model.layers[0].mlp.register_forward_hook(lambda *_: None).remove()
    assert fast.runner.decoder is fast.runner.fast_decoder


def test_int8_is_fused_where_activations_stay_as_they_are(family: Family):
    lm = LanguageModel.of(copy.deepcopy(family("qwen2").model), None, "qwen2 int8")
    quantize_int8(lm, activations="none")
    wanted = LLMEngine(lm, max_model_len=LONGEST, fast=False).generate(MIX, each())
    fast = engine(lm, fast="fused")
    same = [a.token_ids == b.token_ids for a, b in zip(wanted, fast.generate(MIX, each()), strict=True)]
    assert sum(same) >= len(same) - 1  # a near tie may fall the other way: sums run in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_that_rounds_activations_too_is_fused_where_there_is_a_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    lm = load_model("tiny-random", device="cpu", dtype=dtype)
    quantize_int8(lm, skip=())
    if why_not("compiled") is None:
        fast, plain = engine(lm, fast="fused"), LLMEngine(lm, max_model_len=LONGEST)
        wanted, got = (each_engine.generate(MIX, each()) for each_engine in (plain, fast))
        same = [a.token_ids == b.token_ids for a, b in zip(wanted, got, strict=True)]
        assert sum(same) >= len(same) / 2  # of random weights, where ties are near
        with torch.no_grad():
            lm.model.model.layers[0].mlp.down_proj.weight.zero_()  # in place: what is derived from codes follows
        assert tokens(fast.generate(MIX[:3], free())) == tokens(engine(lm, fast="fused").generate(MIX[:3], free()))
    monkeypatch.setattr(Int8Linear, "kernel", "int_mm")
    with pytest.raises(UnsupportedModel, match=r"round activations too, .* 'int_mm' here.*activations='none'\)"):
        engine(lm, fast="fused")


def test_buckets():
    assert decode_buckets(1) == [1] and decode_buckets(5) == [1, 2, 4, 5]
    assert decode_buckets(64) == [1, 2, 4, 8, 16, 32, 48, 64] and decode_buckets(20) == [1, 2, 4, 8, 16, 20]


def test_static_tensors_have_a_row_for_each_that_a_graph_samples(family: Family):
    """Prompt graphs sample 8 rows, however small the batches: their kernels would read past the end."""
    graphs = engine(family("llama"), max_num_seqs=3).runner.graphs
    assert {len(part) for part in vars(graphs.numbers).values()} == {len(graphs.tokens)} == {PROMPTS}
    assert all(len(part) == PROMPTS for host in graphs.host for part in vars(host).values())


def test_rows_that_do_nothing_reach_nobody(family: Family):
    """Weights that make a padded row's numbers NaN: nobody reads them, and the zeros of the trash row stay."""
    lm = LanguageModel.of(copy.deepcopy(family("llama").model), None, "llama, NaN at id 0")
    wanted = [alone(lm, prompt, 8) for prompt in MIX[:3]]
    fast = engine(lm, fast="graph", max_num_seqs=8)
    lm.model.get_input_embeddings().weight.data[0] = torch.nan  # the id of padded rows
    assert not any(0 in prompt for prompt in MIX[:3]) and not any(0 in answer for answer in wanted)
    assert tokens(fast.generate(MIX[:3], free(8))) == wanted
    assert_idle(fast)


def test_two_fast_engines_and_a_plain_one_take_turns(family: Family):
    lm = family("qwen3")
    one, two, plain = engine(lm, fast="fused"), engine(lm, fast="graph", kv_cache="slots"), engine(lm, fast=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streams = [e.stream(MIX[i], free(9)) for i, e in enumerate((one, two, plain))]
        said: list[list[int]] = [[], [], []]
        while any(streams):
            for i, stream in enumerate(streams):
                if stream is not None and (piece := next(stream, None)) is not None:
                    said[i] += piece.token_ids
                elif stream is not None:
                    streams[i] = None
    assert said == [alone(lm, MIX[i], 9) for i in range(3)]
