"""Layers that read one input as one product: the same numbers, the same model for everybody else, no byte twice."""

import copy
import threading
from collections.abc import Callable

import families
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from minfer_lib import LanguageModel, quantize_int8, save_int8
from minfer_lib.attention.view import view_of
from minfer_lib.models.fused_linear import FusedLinear, FusedPart, InputGroups, fuse, shared_inputs
from minfer_lib.models.memory import measured_weight_bytes
from minfer_lib.quant.files import load_int8
from minfer_lib.quant.linear import Int8Linear

IDS = torch.tensor([families.PROMPTS[0]])
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
# what reads one input in the first layer of each family, and nothing else
GROUPS = {
    "llama": [ATTENTION, MLP],
    "qwen2": [ATTENTION, MLP],
    "gemma2": [ATTENTION, MLP],
    "opt": [ATTENTION],
    "qwen3_moe": [ATTENTION],
    "qwen2_moe": [ATTENTION, ["gate_proj", "up_proj"]],  # of the expert that all tokens share
    "phi3": [],  # its matrices are merged already
    "gpt2": [],  # so are its, as Conv1D
}


def fresh(lm: LanguageModel, mode: str | None = None) -> LanguageModel:
    copied = LanguageModel.of(copy.deepcopy(lm.model), lm.tokenizer, lm.name)
    return copied if mode is None else quantize_int8(copied, activations=mode, progress=False)


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids % model.config.vocab_size, use_cache=False).logits


def fused(lm: LanguageModel) -> tuple[nn.Module, list[FusedLinear]]:
    """A view with all that can be merged merged."""
    view = view_of(lm.model)
    return view, fuse(view, shared_inputs(view, lambda: logits(view)))


def pointers(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("mode", [None, "dynamic", "none"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_view_with_merged_layers_computes_the_same(family: Callable[[str], LanguageModel], name: str, mode):
    lm = fresh(family(name), mode)
    wanted, size = logits(lm.model), measured_weight_bytes(lm.model)
    state = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    plain = view_of(lm.model)
    groups = shared_inputs(plain, lambda: logits(plain))
    first = [[key.rpartition(".")[2] for key in group] for group in groups if ".0." in group[0]]
    assert first == GROUPS[name]
    assert not [module for module in plain.modules() if "minfer" in type(module).__module__
                and not isinstance(module, nn.Embedding | Int8Linear)]  # the view is as it was  # fmt: skip
    view, merged = fused(lm)
    assert len(merged) == len(groups) and all(each.intact() for each in merged)
    for inference in (False, True):
        with torch.inference_mode(inference):
            torch.testing.assert_close(logits(view), wanted, rtol=1e-5, atol=1e-4)
    assert all(each.waiting is None for each in merged)  # neither inputs nor results are held
    # for whoever has the model nothing has changed
    assert torch.equal(logits(lm.model), wanted) or mode == "none" or mode is None
    torch.testing.assert_close(logits(lm.model), wanted, rtol=1e-5, atol=1e-4)
    assert measured_weight_bytes(lm.model) == size
    assert list(state) == list(lm.model.state_dict()) == list(view.state_dict())
    for key, tensor in lm.model.state_dict().items():
        assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key]), key


def test_identity_of_parameters_and_who_owns_the_memory(family: Callable[[str], LanguageModel]):
    lm = fresh(family("qwen2"))
    before = dict(lm.model.named_parameters())
    _, merged = fused(lm)
    after = dict(lm.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    for whole in merged:
        storages = {layer.weight.untyped_storage().data_ptr() for layer in whole.layers}
        assert storages == {whole.whole.weight.untyped_storage().data_ptr()}
    with torch.no_grad():  # so whoever held on to a parameter still changes the model, and the view
        before["model.layers.0.self_attn.k_proj.weight"].mul_(2)
    view, _ = fused(lm)
    torch.testing.assert_close(logits(view), logits(lm.model), rtol=1e-5, atol=1e-4)
    assert all(whole.intact() for whole in merged)


def test_parts_are_right_in_any_order_and_with_any_input(family: Callable[[str], LanguageModel]):
    for mode in (None, "dynamic", "none"):
        lm = fresh(family("qwen2"), mode)
        view, _ = fused(lm)
        names = [f"model.layers.0.self_attn.{name}" for name in ATTENTION]
        parts, layers = ([model.get_submodule(name) for name in names] for model in (view, lm.model))
        assert all(isinstance(part, FusedPart) for part in parts)
        one, two = torch.randn(2, 3, 64), torch.randn(1, 5, 64)
        calls = [(0, one), (1, one), (1, one), (2, two), (0, two), (2, one), (2, two), (1, two.clone()), (1, two)]
        for index, x in calls:
            found = parts[index](x)
            assert found.shape == (*x.shape[:2], layers[index].out_features)
            torch.testing.assert_close(found, layers[index](x), rtol=1e-5, atol=1e-4)
        assert parts[1].in_features == 64 and parts[1].weight is layers[1].weight


def test_a_bias_that_some_layers_do_not_have():
    layers = [nn.Linear(8, 4, bias=i != 1).requires_grad_(False) for i in range(3)]
    model = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
    wanted = [layer(torch.ones(2, 8)) for layer in layers]
    for _ in range(2):  # merged, and found merged
        view = nn.ModuleDict(dict(model))
        (whole,) = fuse(view, [["0", "1", "2"]])
        x = torch.ones(2, 8)
        for i in range(3):
            torch.testing.assert_close(view[str(i)](x), wanted[i])
    assert layers[1].bias is None and whole.whole.bias.shape == (12,)


def test_the_input_is_multiplied_once(family: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch):
    lm = fresh(family("llama"))
    view, merged = fused(lm)
    calls, linear = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(self.out_features) or linear(self, x))
    logits(view)
    per_layer = [64 + 2 * 32, 64, 2 * 96, 64]
    assert calls == [*per_layer, *per_layer, families.VOCAB] and len(merged) == 4


# -- what is not merged -----------------------------------------------------------------------------------------------


def pair(**changes: Callable) -> tuple[nn.ModuleDict, list[FusedLinear]]:
    model = nn.ModuleDict({name: nn.Linear(8, 6).requires_grad_(False) for name in ("a", "b", "c")})
    for change in changes.values():
        change(model)
    return model, fuse(nn.ModuleDict(dict(model)), [["a", "b", "c"]])


class Own(nn.Linear):
    pass


def tie(model: nn.ModuleDict) -> None:
    model["head"] = nn.Linear(8, 6)
    model["head"].weight = model["b"].weight


def own_slice(model: nn.ModuleDict) -> None:
    model["b"].weight = nn.Parameter(torch.randn(20, 8)[3:9], requires_grad=False)


def viewed(model: nn.ModuleDict) -> None:
    model.kept = model["b"].weight.T  # a view that somebody made


LEFT = {
    "gradient": lambda model: model["b"].requires_grad_(True),
    "one gradient": lambda model: model["b"].bias.requires_grad_(True),
    "hook": lambda model: model["b"].register_forward_hook(lambda *args: None),
    "own forward": lambda model: setattr(model["b"], "forward", model["b"].forward),
    "subclass": lambda model: model.update({"b": Own(8, 6).requires_grad_(False)}),
    "dtype": lambda model: model["b"].to(torch.bfloat16),
    "tied": tie,
    "a slice of something": own_slice,
    "other inputs": lambda model: model.update({"b": nn.Linear(4, 6).requires_grad_(False)}),
    "no memory": lambda model: model["b"].to("meta"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_layer_that_must_stay_as_it_is(kind: str):
    model, merged = pair(change=LEFT[kind])
    kept = model["b"]
    assert [whole.layers for whole in merged] == [[model["a"], model["c"]]]
    assert "meta" in str(kept.weight.device) or kept.weight.untyped_storage().data_ptr() not in {
        layer.weight.untyped_storage().data_ptr() for layer in merged[0].layers
    }


def test_memory_that_somebody_holds_on_to_is_left_alone():
    model, merged = pair(change=viewed)
    assert not merged
    sizes = {layer.weight.untyped_storage().nbytes() for layer in model.values()}
    assert sizes == {model["a"].weight.nbytes}  # none of them is a slice now
    assert model.kept.data_ptr() == model["b"].weight.data_ptr()


def test_int8_layers_of_other_kinds_are_not_merged():
    def layer(**options: object) -> Int8Linear:
        return Int8Linear(torch.ones(4, 8, dtype=torch.int8), torch.ones(4), **options)

    ones, twos = torch.ones(8), torch.full((8,), 2.0)
    for one, two, same in (
        (layer(), layer(), True),
        (layer(smoothing=ones), layer(smoothing=ones.clone()), True),
        (layer(smoothing=ones), layer(smoothing=twos), False),
        (layer(smoothing=ones), layer(), False),
        (layer(), layer(activations="none"), False),
        (layer(), layer(kernel="portable"), False),
        (layer(), nn.Linear(8, 4).requires_grad_(False), False),
    ):
        model = nn.ModuleDict({"a": one, "b": two})
        assert len(fuse(model, [["a", "b"]])) == same
        x = torch.randn(3, 8)
        for name, old in (("a", one), ("b", two)):
            assert torch.equal(model[name](x), old(x))


def test_a_model_that_requires_gradients_is_left_alone(family: Callable[[str], LanguageModel]):
    lm = fresh(family("llama"))
    lm.model.requires_grad_(True)
    before = pointers(lm.model)
    view, merged = fused(lm)
    assert not merged and pointers(lm.model) == before
    view(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert lm.model.model.layers[0].self_attn.q_proj.weight.grad is not None


# -- which layers share an input --------------------------------------------------------------------------------------


def test_groups_are_layers_that_always_read_one_tensor_together():
    inputs, x, y = InputGroups(), torch.ones(2), torch.ones(2)
    for name, tensor in (("q", x), ("k", x), ("v", x), ("o", y), ("a", x), ("b", x), ("c", y), ("d", y)):
        inputs.note(name, tensor)
    inputs.note("d2", y)
    y.add_(1)  # the same tensor, and another input
    inputs.note("e", y)
    inputs.end()
    inputs.note("e2", y)
    assert inputs.groups() == [["q", "k", "v"], ["o"], ["a", "b"], ["c", "d", "d2"], ["e"], ["e2"]]
    inputs.note("a", torch.ones(2))  # not always, so not at all
    inputs.note("q", torch.ones(2)), inputs.note("q", x), inputs.note("q", x)
    assert inputs.groups() == [["q"], ["k"], ["v"], ["o"], ["a"], ["b"], ["c", "d", "d2"], ["e"], ["e2"]]


def test_a_view_is_as_it_was_if_the_run_breaks(family: Callable[[str], LanguageModel]):
    lm = family("llama")
    view = view_of(lm.model)
    modules = [id(module) for module in view.modules()]

    def run() -> None:
        logits(view)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared_inputs(view, run)
    assert [id(module) for module in view.modules()] == modules


# -- what users do afterwards -----------------------------------------------------------------------------------------


def moved(model: nn.Module) -> None:
    model.to(torch.float64)


def replaced(model: nn.Module) -> None:
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.weight.data = layer.weight.data * 2


def given(model: nn.Module) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight * 2, requires_grad=False)
    attention.v_proj.bias = nn.Parameter(torch.ones(32), requires_grad=False)


def sliced(model: nn.Module) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data = torch.randn(50, 64)[9:41]


@pytest.mark.parametrize("change", [moved, replaced, given, sliced])
def test_weights_that_are_others_are_merged_again(family: Callable[[str], LanguageModel], change: Callable):
    lm = fresh(family("llama"))
    view, merged = fused(lm)
    change(lm.model)
    wanted = logits(lm.model)
    assert not all(whole.intact() for whole in merged)
    for whole in merged:
        if not whole.intact():
            whole.merge()
    assert all(whole.intact() for whole in merged)
    torch.testing.assert_close(logits(view), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits(lm.model), wanted, rtol=1e-5, atol=1e-4)
    assert merged[0].whole is None or change is not sliced  # whose memory is somebody else's


@pytest.mark.parametrize("mode", ["dynamic", "none"])
def test_int8_models_that_are_moved_or_loaded_into(family: Callable[[str], LanguageModel], mode: str):
    lm, other = fresh(family("qwen2"), mode), fresh(family("qwen2"))
    with torch.no_grad():
        [parameter.mul_(1.1) for name, parameter in other.model.named_parameters() if "mlp" in name]
    other = quantize_int8(other, activations=mode, progress=False)
    view, merged = fused(lm)
    logits(view)
    lm.model.load_state_dict(other.model.state_dict())  # in place: the sums that were derived are others
    assert all(whole.intact() for whole in merged)
    torch.testing.assert_close(logits(view), logits(other.model), rtol=1e-5, atol=1e-4)
    lm.model.to(torch.bfloat16)
    assert lm.model.model.layers[0].mlp.up_proj.scale.dtype == torch.float32
    torch.testing.assert_close(logits(view), logits(lm.model), rtol=0.02, atol=0.5)


def test_hooks_that_come_later_are_called(family: Callable[[str], LanguageModel]):
    lm = fresh(family("llama"))
    view, _ = fused(lm)
    wanted = logits(view)
    for name in ATTENTION[:2]:
        layer, seen = getattr(lm.model.model.layers[0].self_attn, name), []
        hook = layer.register_forward_hook(lambda module, args, output, seen=seen: seen.append(1) or output + 1)
        torch.testing.assert_close(logits(view), logits(lm.model), rtol=1e-5, atol=1e-4)
        assert len(seen) == 2 and not torch.equal(logits(view), wanted)
        hook.remove()


def test_saving_and_copying(family: Callable[[str], LanguageModel], tmp_path):
    lm = fresh(family("llama"))
    wanted = logits(lm.model)
    view, merged = fused(lm)
    lm.model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * measured_weight_bytes(lm.model) + 20_000
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), wanted, rtol=1e-5, atol=1e-4)
    other = copy.deepcopy(lm)
    assert measured_weight_bytes(other.model) == measured_weight_bytes(lm.model)
    with torch.no_grad():
        other.model.model.layers[0].self_attn.q_proj.weight.zero_()
    torch.testing.assert_close(logits(view), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits(fused(other)[0]), logits(other.model), rtol=1e-5, atol=1e-4)
    assert all(whole.intact() for whole in merged)


def test_saving_and_copying_int8(family: Callable[[str], LanguageModel], tmp_path):
    lm = fresh(family("qwen2"), "dynamic")
    view, merged = fused(lm)
    wanted = logits(view)
    for other in (copy.deepcopy(lm), load_int8(save_int8(lm, tmp_path / "int8"), torch.device("cpu"))):
        assert measured_weight_bytes(other.model) == measured_weight_bytes(lm.model)
        assert torch.equal(logits(other.model), logits(lm.model)) and torch.equal(logits(fused(other)[0]), wanted)
        other.model.model.layers[0].self_attn.q_proj.weight.zero_()
        assert torch.equal(logits(view), wanted) and all(whole.intact() for whole in merged)


def test_a_second_engine_finds_what_the_first_merged(family: Callable[[str], LanguageModel]):
    lm = fresh(family("qwen2"))
    first, merged = fused(lm)
    wanted, before = logits(first), pointers(lm.model)
    second, again = fused(lm)
    assert pointers(lm.model) == before and len(again) == len(merged) and all(each.intact() for each in merged)
    for one, two in zip(merged, again, strict=True):
        assert one.whole.weight.data_ptr() == two.whole.weight.data_ptr() and one.sizes == two.sizes
    assert torch.equal(logits(second), wanted) and torch.equal(logits(first), wanted)


def test_another_thread_runs_the_model_meanwhile(family: Callable[[str], LanguageModel]):
    lm = family("llama")
    expected = families.hf_generate(lm, families.PROMPTS[0])
    for _ in range(5):
        lm = fresh(family("llama"))
        wrong, stop = [], threading.Event()

        def work(lm: LanguageModel = lm, wrong: list = wrong, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                wrong.extend([] if families.hf_generate(lm, families.PROMPTS[0]) == expected else [1])

        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        views = [fused(lm) for _ in range(2)]
        stop.set()
        [thread.join(60) for thread in threads]
        assert not wrong
        for view, merged in views:
            assert merged and all(whole.intact() for whole in merged)
            torch.testing.assert_close(logits(view), logits(lm.model), rtol=1e-5, atol=1e-4)


def test_a_product_that_runs_keeps_its_memory():
    """Memory that was freed under a running product would give garbage, or end the process."""
    layer = nn.Linear(3000, 6000, bias=False).requires_grad_(False)
    other = nn.Linear(3000, 8, bias=False).requires_grad_(False)
    x, found = torch.randn(500, 3000), []
    wanted = layer(x)
    running = threading.Thread(target=lambda: found.append(layer(x)))
    running.start()
    view = nn.ModuleDict({"a": layer, "b": other})
    fuse(view, [["a", "b"]])
    running.join()
    assert torch.equal(found[0], wanted) and torch.allclose(view["a"](x), wanted, atol=1e-4)
