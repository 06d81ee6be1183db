"""Engines over int8 models: exact where only the weights are rounded, bounded where activations are rounded too."""

import copy
from collections.abc import Callable

import families
import pytest
import torch
from families import NEW_TOKENS, PROMPTS, hf_generate

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, NaiveEngine, SamplingParams, load_model, quantize_int8
from minfer_lib.quant.products import why_not

ENGINES: dict[str, Callable] = {
    "naive": NaiveEngine,
    "own": lambda lm: CachedEngine(lm, "own"),
    "hf": lambda lm: CachedEngine(lm, "hf"),
    "slots": LLMEngine,
    "paged, 5 tokens a step": lambda lm: LLMEngine(lm, "paged", max_num_batched_tokens=5),
    "slots, 2 at once": lambda lm: LLMEngine(lm, backend="torch", max_num_seqs=2, max_num_batched_tokens=16),
    "few pages": lambda lm: LLMEngine(lm, "paged", block_size=2, num_blocks=14),
}
KERNEL = "portable" if why_not("compiled") else "compiled"  # one and the same in every run
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
Made = Callable[..., LanguageModel]

_made: dict[tuple, LanguageModel] = {}
_oracles: dict[tuple, list[list[int]]] = {}


@pytest.fixture(scope="module")
def int8(family: Callable[[str], LanguageModel]) -> Made:
    """int8(name, mode, ...): the model of a family, quantised; made once."""

    def get(name: str, mode: str, *, kernel: str | None = KERNEL, everything: bool = False) -> LanguageModel:
        key = (name, mode, kernel, everything)
        if key not in _made:
            lm = family(name)
            made = LanguageModel.of(copy.deepcopy(lm.model), lm.tokenizer, lm.name)
            options = dict(skip=(), embedding=True) if everything else {}
            _made[key] = quantize_int8(made, activations=mode, kernel=kernel, progress=False, **options)
        return _made[key]

    yield get
    _made.clear(), _oracles.clear()


def oracle(lm: LanguageModel) -> list[list[int]]:
    """What `model.generate` gives for the very same int8 model, prompt by prompt."""
    if id(lm) not in _oracles:
        _oracles[id(lm)] = [hf_generate(lm, prompt) for prompt in PROMPTS]
    return _oracles[id(lm)]


def tokens(outputs: list) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# -- weights alone: token for token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["naive", "own", "hf", "slots", "paged, 5 tokens a step"])
@pytest.mark.parametrize("name", families.EXACT)
def test_weight_only_equals_generate(int8: Made, name: str, kind: str):
    lm = int8(name, "none")
    expected = oracle(lm)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    engine = ENGINES[kind](lm)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    if kind == "slots":
        assert tokens(engine.generate(PROMPTS[::-1], GREEDY)) == expected[::-1]  # nothing of the first call is left


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_with_embedding_and_output_layer_in_int8(int8: Made, name: str, kind: str):
    lm = int8(name, "none", everything=True)
    assert tokens(ENGINES[kind](lm).generate(PROMPTS, GREEDY)) == oracle(lm)


@pytest.mark.parametrize("kernel", ["portable", None])
def test_with_other_kernels(int8: Made, kernel: str | None):
    lm = int8("qwen2", "none", kernel=kernel)
    for kind in ("own", "slots"):
        assert tokens(ENGINES[kind](lm).generate(PROMPTS, GREEDY)) == oracle(lm)


@pytest.mark.parametrize("budget", [3, 16, 512])
def test_requests_that_join_a_running_batch(int8: Made, budget: int):
    lm = int8("mistral", "none")
    expected = oracle(lm)
    engine = LLMEngine(lm, max_num_batched_tokens=budget, max_num_seqs=3)
    ids, found, waiting = {}, {}, list(enumerate(PROMPTS))
    step = 0
    while waiting or engine.has_unfinished():
        if waiting and step % 3 == 0:
            index, prompt = waiting.pop(0)
            ids[engine.add_request(prompt, GREEDY)] = index
        for output in engine.step():
            found[ids[output.request_id]] = output.token_ids
        engine.check_invariants()
        step += 1
    assert [found[i] for i in range(len(PROMPTS))] == expected


def test_smollm2_weight_only():
    lm = quantize_int8(load_model(device="cpu"), activations="none", kernel=KERNEL, progress=False)
    prompts = [lm.encode("The capital of France is"), lm.encode("One, two, three, four,")]
    expected = [hf_generate(lm, prompt, 4) for prompt in prompts]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for kind in ("own", "slots", "paged, 5 tokens a step"):
        outputs = ENGINES[kind](lm).generate(prompts, params)
        assert tokens(outputs) == expected
        assert "Paris" in outputs[0].text and "five" in outputs[1].text
    assert tokens(NaiveEngine(lm).generate(prompts[0], SamplingParams(max_tokens=2))) == [expected[0][:2]]


# -- activations too: bounded -----------------------------------------------------------------------------------------


def recorded(script: list[int]) -> tuple[SamplingParams, list[torch.Tensor]]:
    """Parameters that make a model say the script, and where its own logits are noted on the way."""
    seen: list[torch.Tensor] = []
    say = families.scripted(script)

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.float().clone())
        return say(token_ids, logits)

    return SamplingParams(max_tokens=len(script), ignore_eos=True, logits_processors=[processor]), seen


@torch.no_grad()
def forced(lm: LanguageModel, prompt: list[int], script: list[int]) -> torch.Tensor:
    """Logits before each token of the script, of one forward pass over prompt and script alone."""
    ids = torch.tensor([[*prompt, *script]])
    return lm.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("kind", ["own", "slots", "paged, 5 tokens a step"])
@pytest.mark.parametrize("name", families.EXACT)
def test_dynamic_logits_are_bounded_in_company(
    int8: Made, family: Callable[[str], LanguageModel], name: str, kind: str
):
    """In company only floating-point rounding differs, by some 1e-6. Where a number lies that close to the border
    between two codes it becomes the other one, and moves by one step of the grid. Quantisation itself moved every
    number by up to half a step; so what few flips do to the logits stays below what quantisation did to them."""
    full, lm = family(name), int8(name, "dynamic")
    scripts = [[(7 * i + 31 * t + 3) % families.VOCAB for t in range(NEW_TOKENS)] for i in range(len(PROMPTS))]
    pairs = [recorded(script) for script in scripts]
    outputs = ENGINES[kind](lm).generate(PROMPTS, [params for params, _ in pairs])
    assert tokens(outputs) == scripts
    alike = 0
    for prompt, script, (_, seen) in zip(PROMPTS, scripts, pairs, strict=True):
        packed, alone, exact = torch.stack(seen), forced(lm, prompt, script), forced(full, prompt, script)
        cost = rms(alone - exact)
        assert 0.001 * rms(exact) < cost < 0.25 * rms(exact)  # it is quantised, and not broken
        assert rms(packed - alone) < cost
        alike += int((packed - alone).abs().max() < 0.01 * cost)
        top = alone.topk(2).values
        far = top[:, 0] - top[:, 1] > 4 * cost
        assert torch.equal(packed.argmax(-1)[far], alone.argmax(-1)[far])
    assert alike >= len(PROMPTS) // 2  # flips are few: most rows have none at all


@pytest.mark.parametrize("name", families.EXACT)
def test_dynamic_alone_engines_agree(int8: Made, name: str):
    lm = int8(name, "dynamic")
    # other kernels of attention round otherwise, which may move an activation to the next code
    cached, slots = CachedEngine(lm), LLMEngine(lm, backend="torch")
    for prompt in PROMPTS:
        assert tokens(slots.generate(prompt, GREEDY)) == tokens(cached.generate(prompt, GREEDY))


def test_smollm2_dynamic():
    lm = quantize_int8(load_model(device="cpu"), kernel=KERNEL, calibration=[list(range(300, 400))], progress=False)
    prompts = [lm.encode("The capital of France is"), lm.encode("One, two, three, four,")]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    alone = [CachedEngine(lm).generate(prompt, params)[0] for prompt in prompts]
    assert tokens(alone) == [LLMEngine(lm).generate(prompt, params)[0].token_ids for prompt in prompts]
    for outputs in (alone, LLMEngine(lm).generate(prompts, params)):
        assert "Paris" in outputs[0].text and "five" in outputs[1].text
