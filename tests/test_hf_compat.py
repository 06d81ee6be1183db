"""Names of transformers and torch that may go away: each is named here, with what breaks, and stands in one file."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import minfer_lib
from minfer_lib import LanguageModel
from minfer_lib.models import hf_compat
from minfer_lib.models.memory import PeakMemory

PACKAGE = Path(minfer_lib.__file__).parent
HOME = PACKAGE / "models" / "hf_compat.py"

# -- each name --------------------------------------------------------------------------------------------------------


def test_supports_logits_to_keep(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """`_supports_logits_to_keep`: without it, and no other answer, a prompt's logits cost 100 MB that nobody reads."""
    assert tiny.model._supports_logits_to_keep() and hf_compat.supports_logits_to_keep(tiny.model)
    monkeypatch.setattr(type(tiny.model), "_supports_logits_to_keep", None)
    assert hf_compat.supports_logits_to_keep(tiny.model)
    assert not hf_compat.supports_logits_to_keep(tiny.model.model)


def test_tensor_places(tiny: LanguageModel):
    """`_parameters`, `_buffers`: without them every request that joins a fast engine costs milliseconds."""
    module = nn.Linear(2, 3)
    module.register_buffer("none", None)
    places = hf_compat.tensor_places(module)
    assert [name for _, name in places] == ["weight", "bias", "none"]  # where one may yet be put
    module.weight = nn.Parameter(torch.zeros(3, 2))
    assert places[0][0]["weight"] is module.weight  # one that was replaced is seen


def test_one_compilation():
    """`_dynamo.config`: without it a model's layers would be compiled one by one."""
    from torch import _dynamo

    before = _dynamo.config.allow_unspec_int_on_nn_module
    with hf_compat.one_compilation():
        assert _dynamo.config.allow_unspec_int_on_nn_module and _dynamo.config.cache_size_limit == 64
    assert _dynamo.config.allow_unspec_int_on_nn_module == before


def test_causal_class_name(tiny: LanguageModel):
    assert hf_compat.causal_class_name(tiny.model.config) == type(tiny.model).__name__ == "LlamaForCausalLM"


def test_can_set_attention(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """`_can_set_attn_implementation`: without it a model with attention of its own is only refused by the probe."""
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", n_layer=1, n_head=2, hidden_size=8))
    assert hf_compat.can_set_attention(tiny.model) and not hf_compat.can_set_attention(bloom)
    monkeypatch.setattr(type(bloom), "_can_set_attn_implementation", None)
    assert hf_compat.can_set_attention(bloom)


def test_attention_of_a_config_and_of_those_inside_it():
    """`config._attn_implementation`: without it no layer calls our attention, and no model can be packed."""
    config = AutoConfig.for_model("llama")
    hf_compat.set_attention(config, "eager")
    assert hf_compat.attention_of(config) == config._attn_implementation == "eager"
    outer = AutoConfig.for_model("gemma3")
    hf_compat.set_attention(outer, "eager")
    assert hf_compat.attention_of(outer.get_text_config()) == "eager"


def test_is_stateful(tiny: LanguageModel):
    """`_is_stateful`: without it a model that keeps a state beside keys and values is known by its layer types only."""
    mamba = AutoConfig.for_model("mamba", vocab_size=9, hidden_size=8, num_hidden_layers=1)
    assert hf_compat.is_stateful(AutoModelForCausalLM.from_config(mamba)) and not hf_compat.is_stateful(tiny.model)


def test_the_name_of_the_cache_argument(tiny: LanguageModel):
    """`cache` or `past_key_values`: the wrong one is swallowed by 5.17, which then answers without a past."""

    class Old:
        def forward(self, input_ids, past_key_values=None): ...

    class New:
        def forward(self, input_ids, cache=None): ...

    assert [hf_compat.cache_argument(m()) for m in (Old, New)] == ["past_key_values", "cache"]
    from transformers import DynamicCache

    cache, ids = DynamicCache(config=tiny.model.config), torch.tensor([[3, 4, 5]])
    tiny.next_token_logits(ids, use_cache=True, **{hf_compat.cache_argument(tiny.model): cache})
    assert cache.get_seq_length() == 3


def test_can_dequantize(monkeypatch: pytest.MonkeyPatch):
    """`AUTO_QUANTIZATION_CONFIG_MAPPING`: without it codes of an unknown method could be loaded as weights."""
    config = AutoConfig.for_model("llama")
    assert not hf_compat.can_dequantize(config)
    for told, known in (
        ({"quant_method": "gptq"}, True),
        ({"load_in_8bit": True}, True),
        (BitsAndBytesConfig(load_in_8bit=True), True),
        ({"quant_method": "from-the-future"}, False),
        ({}, False),
    ):
        config.quantization_config = told
        assert hf_compat.can_dequantize(config) == known
    monkeypatch.setitem(sys.modules, "transformers.quantizers.auto", None)
    assert hf_compat.can_dequantize(config)


def reload_without(monkeypatch: pytest.MonkeyPatch, module: str) -> object:
    """hf_compat as it is where transformers lacks a module, beside the one that everybody uses."""
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    spec = importlib.util.spec_from_file_location("minfer_lib.models.another_hf_compat", HOME)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    return other


def test_cache_layer_mixin(monkeypatch: pytest.MonkeyPatch):
    """`CacheLayerMixin`: without it our contiguous cache needs a base of its own, as transformers asks no class."""
    from transformers.cache_utils import CacheLayerMixin

    assert hf_compat.CacheLayerMixin is CacheLayerMixin
    layer = reload_without(monkeypatch, "transformers.cache_utils").CacheLayerMixin()
    assert (layer.keys, layer.values, layer.is_initialized) == (None, None, False)


def test_conv1d(monkeypatch: pytest.MonkeyPatch):
    """`pytorch_utils.Conv1D`: without it GPT-2's layers are not quantised, and everything else still works."""
    from transformers.pytorch_utils import Conv1D

    assert hf_compat.Conv1D is Conv1D
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    layer = AutoModelForCausalLM.from_config(config).transformer.h[0].attn.c_attn
    assert type(layer) is Conv1D and layer.weight.shape == (8, 24)  # [in, out], which is why it has to be known
    other = reload_without(monkeypatch, "transformers.pytorch_utils").Conv1D
    assert not isinstance(layer, other) and issubclass(other, nn.Module)


def test_children_and_twins():
    """`nn.Module._modules` and `__dict__`: without them an engine has no view, and would have to switch the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_module("none", None)
    model.again = model[0]
    children = hf_compat.children_of(model)
    assert list(children) == ["0", "1", "none", "again"] and children["none"] is None
    twin = hf_compat.with_children(model, children | {"1": nn.Identity()})
    assert type(twin) is nn.Sequential and twin[0] is model[0] and type(twin[1]) is nn.Identity
    assert type(model[1]) is nn.ReLU and twin.training == model.training
    x = torch.tensor([[-1.0, 2.0]])
    assert torch.equal(nn.Sequential(model[0])(x), nn.Sequential(twin[0])(x))


def test_other_tensors_under_the_same_names():
    """`nn.Module._parameters`, `_buffers`: without them no merged layer can be made of layers as they are."""
    layer = nn.BatchNorm1d(2)
    weight, mean = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])
    twin = hf_compat.with_tensors(layer, {"weight": weight, "running_mean": mean}, num_features=7)
    assert torch.equal(twin.weight, weight) and torch.equal(twin.running_mean, mean) and twin.num_features == 7
    assert twin.bias is layer.bias and layer.num_features == 2 and torch.equal(layer.weight, torch.ones(2))


def test_hooks():
    """`_forward_hooks`, `_forward_pre_hooks`: without them a layer that a hook watches would be quietly replaced."""
    layer = nn.Linear(2, 2)
    assert not hf_compat.has_hooks(layer)
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        hook = register(lambda *args: None)
        assert hf_compat.has_hooks(layer) and len(hf_compat.hooks_of(layer)) == 1
        hook.remove()
        assert not hf_compat.has_hooks(layer) and hf_compat.hooks_of(layer) == []


def test_forget_manager(tiny: LanguageModel):
    """`_cached_continuous_batching_manager`: without it a baseline would run a user's manager, and end it."""
    view = hf_compat.with_children(tiny.model, hf_compat.children_of(tiny.model))
    hf_compat.forget_manager(view)  # none there
    view._cached_continuous_batching_manager = object()
    hf_compat.forget_manager(view)
    assert "_cached_continuous_batching_manager" not in vars(view)
    from transformers.generation import continuous_batching

    source = Path(continuous_batching.__file__).parent
    assert any("_cached_continuous_batching_manager" in path.read_text() for path in source.glob("*.py"))


@pytest.mark.parametrize("name", ["TorchDispatchMode", "tree_leaves"])
def test_peak_memory_sees_operations(name: str):
    """`TorchDispatchMode`, `tree_leaves`: without them nothing measures what a step allocates."""
    assert hasattr(hf_compat, name)
    with PeakMemory() as peak:
        torch.ones(1000)
    assert peak.peak_bytes == 4000


def test_storage_key():
    """`storage._cdata`: without it views are told from new memory by address, which empty tensors share."""
    x = torch.ones(6)
    assert hf_compat.storage_key(x) == hf_compat.storage_key(x[3:]) == x.untyped_storage()._cdata
    assert hf_compat.storage_key(x) != hf_compat.storage_key(x.clone())
    empty = [torch.empty(0), torch.empty(0)]
    assert hf_compat.storage_key(empty[0]) != hf_compat.storage_key(empty[1])


def test_version_of():
    """`tensor._version`: without it a change of weights in place is not noticed."""
    x = torch.ones(3)
    before = hf_compat.version_of(x)
    x.add_(1)
    assert hf_compat.version_of(x) > before
    with torch.inference_mode():
        assert hf_compat.version_of(torch.ones(1)) == 0


def test_int_mm():
    """`torch._int_mm`: without it int8 layers on a GPU multiply in floats."""
    a, b = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((32, 64), (64, 16)))
    assert torch.equal(hf_compat.int_mm(a, b).long(), a.long() @ b.long())


def test_weight_int8pack_mm():
    """`torch._weight_int8pack_mm`: without it chapter 5 lacks one row of its comparison."""
    codes, x = torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.randn(3, 64).bfloat16()
    y = hf_compat.weight_int8pack_mm(x, codes, torch.ones(32, dtype=torch.bfloat16))
    assert torch.allclose(y.float(), x.float() @ codes.float().T, rtol=0.02, atol=4.0)


@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="this torch has no quantised linear layer")
def test_fbgemm():
    """`_make_per_channel_quantized_tensor`, `quantized.linear_prepack`: without them chapter 5 lacks fbgemm's row."""
    codes, scale = torch.randint(-127, 128, (8, 16), dtype=torch.int8), torch.rand(8) / 100
    x = torch.rand(3, 16) * 2 - 1
    y = hf_compat.fbgemm_linear(x, 1 / 127, 128, hf_compat.fbgemm_pack(codes, scale))
    assert torch.allclose(y, x @ (codes.float() * scale[:, None]).T, atol=0.1)


def test_each_is_named_here():
    tree = ast.parse(HOME.read_text(encoding="utf-8"))
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name != "__init__"}
    names |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(names) > 15 and [name for name in names if f"hf_compat.{name}" not in text] == []


# -- and nowhere else -------------------------------------------------------------------------------------------------

# Public by their names, but of modules that transformers and torch change as they like.
UNSTABLE = {
    "CacheLayerMixin",
    "Conv1D",
    "AUTO_QUANTIZATION_CONFIG_MAPPING",
    "TorchDispatchMode",
    "tree_leaves",
    "linear_prepack",
    "past_key_values",
}
# Calls of a method of the base class from the method that extends it: a subclass of torch's has no other way.
EXTENDED = {"_apply", "_load_from_state_dict", "_save_to_state_dict"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private methods and attributes that the package's own classes define."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            names |= {t.id for part in node.body if isinstance(part, ast.Assign) for t in part.targets
                      if isinstance(t, ast.Name)}  # fmt: skip
            names |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id == "self" else set()
    return names


def foreign_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Names in one file that belong to transformers or torch and are not theirs to rely on."""
    imported = [alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                and node.level and (node.module or "").endswith("hf_compat") for alias in node.names]  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if is_private(part) or part in UNSTABLE)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute):
            by_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "super"
            by_us = isinstance(node.value, ast.Name) and (node.value.id in ("self", "cls", "hf_compat"))
            known = node.attr in own or (by_super and node.attr in EXTENDED)
            if (is_private(node.attr) and not known) or (node.attr in UNSTABLE and not by_us):
                yield node.attr
        elif isinstance(node, ast.Name) and node.id in UNSTABLE and node.id not in imported:
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg in UNSTABLE:
            yield node.arg
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own:
                yield name


def test_they_stand_in_one_file():
    files = sorted(PACKAGE.rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    own = own_names([tree for path, tree in zip(files, trees, strict=True) if path != HOME])
    for path, tree in zip(files, trees, strict=True):
        names = set(foreign_names(tree, own))
        if path == HOME:
            assert {"CacheLayerMixin", "Conv1D", "_cdata", "_modules", "_version", "linear_prepack"} <= names
            continue
        assert not names, f"{path}: put {sorted(names)} into models/hf_compat.py"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("model._supports_logits_to_keep()", ["_supports_logits_to_keep"]),
        ("getattr(model, '_is_stateful', False)", ["_is_stateful"]),
        ("from transformers.pytorch_utils import Conv1D", ["Conv1D"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("import torch._inductor", ["_inductor"]),
        ("model(ids, past_key_values=c)", ["past_key_values"]),
        ("torch.ops.quantized.linear_prepack(w, None)", ["linear_prepack"]),
        ("super()._forward_unimplemented(x)", ["_forward_unimplemented"]),
        ("from ..models.hf_compat import Conv1D\nisinstance(x, Conv1D)", []),
        ("hf_compat.Conv1D; self._mine; other._mine; table._repr_html_(); super()._apply(f); x.__dict__", []),
    ],
)
def test_planted_names(source: str, names: list[str]):
    assert list(foreign_names(ast.parse(source), {"_mine"})) == names
