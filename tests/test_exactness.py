"""In fp32 with greedy sampling every engine gives, token for token, what `model.generate` gives for a prompt alone."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from engines import alone
from families import NEW_TOKENS, PROMPTS, WINDOW, hf_generate

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, NaiveEngine, SamplingParams, load_model
from minfer_lib.engine.serial import Engine
from minfer_lib.errors import UnsupportedModel


def llm_engine(**kind: object) -> Callable[..., LLMEngine]:
    return lambda lm, **options: LLMEngine(lm, **(kind | options))


SERIAL: dict[str, Callable[..., Engine]] = {
    "naive": NaiveEngine,
    "own": lambda lm, **options: CachedEngine(lm, "own", **options),
    "hf": lambda lm, **options: CachedEngine(lm, "hf", **options),
}
# "auto" takes our kernel in C where there is one
PACKED: dict[str, Callable[..., Engine]] = {
    "slots": llm_engine(kv_cache="slots"),
    "paged": llm_engine(kv_cache="paged"),
}
OTHERS: dict[str, Callable[..., Engine]] = {
    "slots, torch, 5 tokens a step": llm_engine(kv_cache="slots", backend="torch", max_num_batched_tokens=5),
    "paged, torch": llm_engine(kv_cache="paged", backend="torch", block_size=7),
    "blocks of 1, 5 tokens a step": llm_engine(kv_cache="paged", block_size=1, max_num_batched_tokens=5),
    "few pages": llm_engine(kv_cache="paged", block_size=2, num_blocks=14),
    "few pages, torch, 6 tokens a step": llm_engine(
        kv_cache="paged", block_size=2, num_blocks=14, backend="torch", max_num_batched_tokens=6
    ),
}
ENGINES = SERIAL | PACKED
Family = Callable[[str], LanguageModel]


def oracle(lm: LanguageModel, eos_ids: frozenset[int] = frozenset()) -> list[list[int]]:
    return [alone(lm, prompt, NEW_TOKENS, eos_ids) for prompt in PROMPTS]


def greedy(**others: object) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=NEW_TOKENS, ignore_eos=True) | others))


def tokens(outputs: list) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_the_prompts_are_worth_testing():
    lengths = [len(prompt) for prompt in PROMPTS]
    assert len(set(lengths)) == len(lengths) and min(lengths) == 1 and max(lengths) > WINDOW
    assert NEW_TOKENS > 5 and max(lengths) < WINDOW + NEW_TOKENS  # short ones grow beyond the window while they decode


@pytest.mark.parametrize("kind", ENGINES | OTHERS)
@pytest.mark.parametrize("name", families.EXACT)
def test_equals_generate_twice_in_a_row(family: Family, name: str, kind: str):
    lm = family(name)
    expected = oracle(lm)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)  # else a mix-up could hide
    engine = (ENGINES | OTHERS)[kind](lm)
    if kind.startswith("few"):
        engine.scheduler.watermark = 0
    assert tokens(engine.generate(PROMPTS, greedy())) == expected
    assert not kind.startswith("few") or engine.stats()["preemptions"] > 0
    assert tokens(engine.generate(PROMPTS[::-1], greedy())) == expected[::-1]  # nothing of the first call is left


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_early_eos(family: Family, name: str, kind: str):
    lm = family(name)
    free = oracle(lm)
    eos_ids = frozenset({free[0][3], free[2][6]})  # taken from the answers themselves, so that they end at once
    expected = oracle(lm, eos_ids)
    assert sum(len(answer) < NEW_TOKENS for answer in expected) >= 2
    outputs = ENGINES[kind](dataclasses.replace(lm, eos_ids=eos_ids)).generate(PROMPTS, greedy(ignore_eos=False))
    assert tokens(outputs) == expected
    for output in outputs:
        ended = output.token_ids[-1] in eos_ids
        assert output.finish_reason == ("stop" if ended else "length") and output.stop_reason is None


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_interleaved_and_abandoned_streams(family: Family, name: str, kind: str):
    lm = family(name)
    expected = oracle(lm)
    engine = ENGINES[kind](lm)
    abandoned = engine.stream(PROMPTS[0], greedy())
    next(abandoned), next(abandoned)
    streams = [engine.stream(prompt, greedy()) for prompt in PROMPTS]
    said: list[list[int]] = [[] for _ in PROMPTS]
    for step in range(NEW_TOKENS):
        for stream, ids in zip(streams, said, strict=True):
            piece = next(stream, None)  # where streams share their steps, a piece may be what several of them added
            ids += piece.token_ids if piece else []
        if step == 4:
            abandoned.close()  # gives its cache back while the others run
            assert tokens(engine.generate(PROMPTS[2], greedy())) == [expected[2]]
    assert said == expected
    assert [next(stream, None) for stream in streams] == [None] * len(PROMPTS)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", families.RIGHT_OR_REFUSED)
def test_other_families_are_right_or_refused(family: Family, name: str, kind: str):
    lm = family(name)
    # recurrent_gemma keeps its state in its layers, and `generate` reads the last prompt's with a prompt of one token
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1 or name != "recurrent_gemma"]
    try:
        outputs = ENGINES[kind](lm).generate(prompts, greedy())
    except UnsupportedModel as error:
        assert kind != "naive" and name in str(error) and "NaiveEngine" in str(error)
        assert kind in SERIAL or "CachedEngine" in str(error)
    else:
        assert tokens(outputs) == [hf_generate(lm, prompt) for prompt in prompts]


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3", "gemma4_text"])
def test_a_cache_does_not_refuse_more_than_it_must(family: Family, name: str):
    assert CachedEngine(family(name)).generate(PROMPTS[1], greedy(max_tokens=2))[0].finish_reason == "length"


@pytest.mark.parametrize("name", [*families.EXACT, "deepseek_v3"])
def test_a_packed_row_does_not_refuse_more_than_it_must(family: Family, name: str):
    lm = family(name)
    assert LLMEngine(lm).max_model_len == min(lm.max_model_len, 2048)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("openai-gpt", "its attention is code of its own"),
        ("bloom", "cannot be told the positions"),
        ("falcon_h1", "layers of another kind"),
        ("lfm2", "layers of another kind"),
        ("phimoe", "window of 7 tokens stands in its masks alone"),
        ("qwen2_moe", "window of 7 tokens stands in its masks alone"),
    ],
)
def test_a_packed_row_refuses_by_name_and_reason(family: Family, name: str, reason: str):
    lm = family(name)
    before = lm.model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=rf"{name} \({name}\).*{reason}.*CachedEngine or NaiveEngine"):
        LLMEngine(lm)
    assert lm.model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["phimoe", "qwen2_moe"])
def test_a_window_that_no_prompt_outgrows_is_no_reason(family: Family, name: str):
    model = copy.deepcopy(family(name).model)
    model.config.sliding_window = model.config.max_position_embeddings
    lm = dataclasses.replace(family(name), model=model)
    prompts = [PROMPTS[0], PROMPTS[2]]
    outputs = LLMEngine(lm, max_model_len=64).generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [hf_generate(lm, prompt, 8) for prompt in prompts]


def test_a_vocabulary_may_be_smaller_than_the_ids_of_the_self_test(tiny: LanguageModel):
    config = copy.deepcopy(tiny.model.config)
    config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id = 3, None, None, 0
    lm = LanguageModel.of(type(tiny.model)(config), None, "three letters")
    prompts = [[0, 1, 2, 1, 2, 2, 0], [2], [1, 1, 0]]
    assert tokens(LLMEngine(lm).generate(prompts, greedy())) == [hf_generate(lm, prompt) for prompt in prompts]


def test_a_packed_row_refuses_positions_that_depend_on_the_longest_request(tiny: LanguageModel):
    model = copy.deepcopy(tiny.model)
    model.config.rope_parameters = dict(model.config.rope_parameters, rope_type="dynamic", factor=2.0)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        LLMEngine(LanguageModel.of(model, None, "dynamic"))


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "falcon_h1", "lfm2", "rwkv"])
@pytest.mark.parametrize("cache", ["own", "hf"])
def test_a_state_beside_the_cache_is_refused_at_once(family: Family, name: str, cache: str):
    with pytest.raises(UnsupportedModel, match=name):
        CachedEngine(family(name), cache)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_models_own_generation_config_has_no_say(family: Family, folder: Path, kind: str):
    """Qwen2.5 ships a repetition penalty, sampling and two EOS ids; only the ids are facts about the model."""
    ids = [ord("a"), ord("b"), ord("a")]
    expected = hf_generate(load_model(folder), ids, 12)
    eos = sorted({expected[5], expected[8]})
    settings = dict(eos_token_id=eos, repetition_penalty=5.0, do_sample=True, temperature=2.0, top_k=3)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    lm = load_model(folder)
    assert lm.eos_ids == frozenset(eos)
    expected = hf_generate(lm, ids, 12, eos)
    assert len(expected) <= 6
    output = ENGINES[kind](lm).generate(ids, SamplingParams(max_tokens=12))[0]
    assert (output.token_ids, output.finish_reason) == (expected, "stop")


def test_projections_are_merged_in_these_engines(family: Family):
    """So that what is equal here is so with one product for q, k and v, and one for gate and up."""
    merged = {name: len(LLMEngine(family(name)).runner.decoder.view.fused) for name in families.EXACT}
    assert {name for name, count in merged.items() if count == 0} <= {"gpt2", "phi3"}  # which come that way
    assert merged["llama"] == merged["gemma2"] == 2 * 2 and merged["qwen3_moe"] >= 2


@pytest.mark.parametrize("kind", ENGINES)
def test_smollm2(smollm2: LanguageModel, kind: str):
    short = 6 if kind == "naive" else 16
    prompts = [smollm2.chat_ids("What is the capital of France?"), smollm2.encode("The three primary colours are")]
    outputs = ENGINES[kind](smollm2).generate(prompts, SamplingParams(max_tokens=short))
    assert tokens(outputs) == [alone(smollm2, prompt, 16, smollm2.eos_ids)[:short] for prompt in prompts]
    assert "Paris" in outputs[0].text or kind == "naive"
    if kind != "naive":
        assert outputs[0].finish_reason == "stop" and outputs[0].token_ids[-1] in smollm2.eos_ids
        assert "<|im_end|>" not in outputs[0].text


@pytest.mark.parametrize("kind", ["own", "hf"])
def test_bfloat16_stays_close_to_generate(kind: str):
    """In bf16 tokens may differ; logits of the same tokens, fed step by step, must not differ by more than rounding."""
    lm = load_model("tiny-random", dtype="bfloat16")
    ids = list(range(40, 60))
    with torch.no_grad():
        exact = copy.deepcopy(lm.model).float()(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        engine = ENGINES[kind](lm)
        request = engine._requests([ids[:10]], greedy(max_tokens=10))[0]
        with engine._memory() as memory:
            for position in range(9, 19):
                logits = engine._logits(request, memory)[0].float()
                assert (logits - exact[position]).abs().max() < 0.15 * exact.abs().max()
                request.append(ids[position + 1], None, 0.0)
