"""An engine's view of a model: nothing is copied, nothing is changed, and what others do to the model counts."""

import gc
import types
import weakref
from collections.abc import Callable, Iterator

import families
import pytest
import torch
from engines import KINDS, MIX, alone, assert_idle, break_forward, free, run, tokens, watched
from families import hf_generate
from torch import nn

from minfer_lib import CachedEngine, LanguageModel, LLMEngine, load_model
from minfer_lib.attention.view import view_of
from minfer_lib.errors import GenerationFailed
from minfer_lib.models import hf_compat

Family = Callable[[str], LanguageModel]

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]])


def is_container(module: nn.Module) -> bool:
    return bool(list(module.children())) or "config" in vars(module)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


# -- what is shared, and what is its own ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", families.EXACT)
def test_weights_and_leaves_are_shared_and_containers_and_configs_are_not(family: Family, name: str):
    model = family(name).model
    view = view_of(model)
    theirs, own = dict(model.named_modules(remove_duplicate=False)), dict(view.named_modules(remove_duplicate=False))
    assert theirs.keys() == own.keys()
    for key, module in theirs.items():
        assert type(own[key]) is type(module) and (own[key] is module) == (not is_container(module))
        if "config" in vars(module):
            assert own[key].config is not module.config and own[key].config.to_dict() == module.config.to_dict()
    for tensors in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(m, tensors)(remove_duplicate=False)) for m in (model, view))
        assert one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    assert model.state_dict().keys() == view.state_dict().keys()
    assert torch.equal(logits(model), logits(view))


def test_configs_that_are_one_stay_one(tiny: LanguageModel):
    """Layers read the attention function of the config that they share with the model."""
    view = view_of(tiny.model, "eager")
    configs = {id(module.config) for module in view.modules() if "config" in vars(module)}
    assert len(configs) == len({id(module.config) for module in tiny.model.modules() if "config" in vars(module)})
    assert hf_compat.attention_of(view.config) == hf_compat.attention_of(view.model.layers[1].self_attn.config)
    assert hf_compat.attention_of(view.config) == "eager"
    assert hf_compat.attention_of(tiny.model.config) == "sdpa"


def test_a_forward_that_an_instance_was_given_runs_the_views_own_children(tiny: LanguageModel):
    model = load_model("tiny-random", device="cpu").model
    layer = model.model.layers[0]
    layer.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), layer)
    view = view_of(model, "eager")
    assert view.model.layers[0].forward.__self__ is view.model.layers[0]
    assert torch.allclose(logits(view), logits(tiny.model), atol=1e-5)


@pytest.mark.parametrize("kind", ["slots", "pages"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_an_engine_leaves_the_model_as_it_was(family: Family, name: str, kind: str):
    lm = family(name)
    before = {
        "config": lm.model.config.to_dict(), "attention": hf_compat.attention_of(lm.model.config),
        "modules": {key: id(module) for key, module in lm.model.named_modules()},
        "parameters": {key: id(parameter) for key, parameter in lm.model.named_parameters()},
        "attributes": {key: sorted(vars(module)) for key, module in lm.model.named_modules()},
    }  # fmt: skip
    weights = {key: value.clone() for key, value in lm.model.state_dict().items()}
    engine = watched(lm, **KINDS[kind])
    assert tokens(engine.generate(MIX[:3], free(6))) == [alone(lm, prompt, 6) for prompt in MIX[:3]]
    next(engine.stream(MIX[0], free(3)))
    assert before == {
        "config": lm.model.config.to_dict(), "attention": hf_compat.attention_of(lm.model.config),
        "modules": {key: id(module) for key, module in lm.model.named_modules()},
        "parameters": {key: id(parameter) for key, parameter in lm.model.named_parameters()},
        "attributes": {key: sorted(vars(module)) for key, module in lm.model.named_modules()},
    }  # fmt: skip
    after = lm.model.state_dict()
    assert list(after) == list(weights) and all(torch.equal(after[key], value) for key, value in weights.items())


def test_a_second_engine_on_a_model_runs_it_not_once(folder):
    lm, calls = load_model(folder, device="cpu"), []
    lm.model.model.norm.register_forward_hook(lambda *_: calls.append(1))
    LLMEngine(lm, "paged", num_blocks=8)
    first = len(calls)
    LLMEngine(lm, "slots", num_blocks=2, max_model_len=64), LLMEngine(lm, "paged", num_blocks=8)
    assert first > 0 and len(calls) == first


# -- what others do to the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model.layers.1", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "lm_head", "model.norm"]
)
def test_hooks_that_come_later_are_seen(name: str):
    """On layers, on projections that are merged with others, and on the output layer."""
    lm = load_model("tiny-random", device="cpu")
    engine = watched(lm, kv_cache="paged", block_size=2)
    prompt = list(range(3, 23))
    plain = engine.generate([prompt], free(6))[0].token_ids
    assert plain == hf_generate(lm, prompt, 6)

    def change(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if isinstance(output, tuple):
            return (output[0].flip(-1) * 1.5, *output[1:])
        return output.flip(-1) * 1.5

    hook = lm.model.get_submodule(name).register_forward_hook(change)
    hooked = hf_generate(lm, prompt, 6)
    assert hooked != plain
    assert engine.generate([prompt], free(6))[0].token_ids == hooked  # and cached prefixes are given up
    hook.remove()
    assert engine.generate([prompt], free(6))[0].token_ids == plain
    assert_idle(engine)


def scaled(lm: LanguageModel, how: str) -> None:
    """Changes every matrix as optimisers, averages and scripts that merge adapters do."""
    for parameter in lm.model.parameters():
        if parameter.dim() > 1:
            if how == "data":
                parameter.data.mul_(1.3)
            elif how == "new data":
                parameter.data = parameter.data * 1.3
            else:
                with torch.no_grad():
                    parameter.mul_(1.3)


@pytest.mark.parametrize("how", ["data", "new data", "no_grad"])
@pytest.mark.parametrize("company", [False, True])
def test_weights_that_change_in_place(how: str, company: bool):
    """A cached prefix is not continued with other weights than it came from, also while another request runs."""
    lm = load_model("tiny-random", device="cpu")
    engine, prompt = watched(lm, kv_cache="paged", block_size=4), list(range(3, 43))
    before = engine.generate([prompt], free(6))[0].token_ids
    assert engine.generate([prompt], free(6))[0].token_ids == before and engine.stats()["hit_tokens"] > 0
    if company:
        engine.add_request([7, 8, 9], free(40))
        engine.step()
    scaled(lm, how)
    expected = hf_generate(lm, prompt, 6)
    assert expected != before
    assert engine.generate([prompt], free(6))[0].token_ids == expected
    assert engine.generate([prompt], free(6))[0].token_ids == expected
    assert LLMEngine(lm, "paged").generate([prompt], free(6))[0].token_ids == expected
    run(engine)


@pytest.mark.parametrize("make", [LLMEngine, CachedEngine])
def test_a_forward_that_the_model_is_given_later_fails_as_the_models_own_would(make: Callable):
    lm = load_model("tiny-random", device="cpu")
    engine, expected = make(lm), hf_generate(lm, [3, 4, 5], 6)

    def raising_forward(*args: object, **kwargs: object) -> None:
        raise RuntimeError("replaced")

    lm.model.forward = raising_forward
    with pytest.raises(GenerationFailed, match="replaced"):
        engine.generate([[3, 4, 5]], free(6))
    del lm.model.forward
    assert engine.generate([[3, 4, 5]], free(6))[0].token_ids == expected


def test_a_layer_whose_forward_is_replaced_before_the_engine_is_made():
    lm = load_model("tiny-random", device="cpu")
    layer = lm.model.model.layers[0].mlp.down_proj
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2
    assert watched(lm).generate([[3, 4, 5]], free(6))[0].token_ids == hf_generate(lm, [3, 4, 5], 6)


# -- an exception keeps no engine alive -------------------------------------------------------------------------------


@pytest.fixture(params=["forward", "hook", "hook, out of memory"])
def breaks(request: pytest.FixtureRequest) -> Iterator[Callable[[LLMEngine], None]]:
    hooks = []

    def fail(*_: object) -> None:
        raise RuntimeError("a shape is wrong") if "memory" not in request.param else torch.OutOfMemoryError("none left")

    def break_it(engine: LLMEngine) -> None:
        if request.param == "forward":
            break_forward(engine, 1, RuntimeError("a shape is wrong"))
        else:
            hooks.append(engine.lm.model.model.layers[0].mlp.down_proj.register_forward_hook(fail))

    yield break_it
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("how", ["generate", "step", "stream"])
def test_an_exception_that_is_kept_does_not_keep_the_engine(tiny: LanguageModel, breaks: Callable, how: str):
    engine = LLMEngine(tiny, "paged", num_blocks=20, max_model_len=64)
    engine.generate([[3, 4, 5]], free(2))
    dead, cache = weakref.ref(engine), weakref.ref(engine.cache)
    breaks(engine)
    kept = []
    try:
        if how == "generate":  # here, since the exception keeps this frame, and would keep another one's names
            engine.generate([[3, 4, 5], [6]], free(8))
        if how == "step":
            engine.add_request([3, 4, 5], free(8))
            engine.step()
        if how == "stream":
            list(engine.stream([3, 4, 5], free(8)))
    except GenerationFailed as error:
        kept.append(error)
    del engine
    gc.collect()
    assert dead() is None and cache() is None
    assert not kept or isinstance(kept[0].__cause__, RuntimeError)
