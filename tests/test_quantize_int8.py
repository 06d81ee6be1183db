"""`quantize_int8`: what of a model it puts into int8, what it leaves and refuses, and how close the result stays."""

import copy
import gc
import weakref
from collections.abc import Callable

import families
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from minfer_lib import LanguageModel, describe_int8, load_model, quantize_int8, save_int8
from minfer_lib.errors import InvalidParameter, InvalidPrompt, MinferError, UnsupportedModel
from minfer_lib.models.memory import PeakMemory, measured_weight_bytes
from minfer_lib.quant import quantize
from minfer_lib.quant.absmax import pair_safe_quantize, quantization_error
from minfer_lib.quant.linear import Int8Embedding, Int8Linear

Family = Callable[[str], LanguageModel]
IDS = torch.tensor([families.PROMPTS[0], families.PROMPTS[0][::-1]])
EVERYTHING = dict(skip=(), embedding=True)
KINDS = ("none", "dynamic")
MLP = "model.layers.0.mlp"


def fresh(lm: LanguageModel, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A copy that may be changed."""
    model = copy.deepcopy(lm.model)
    if dtype != torch.float32:
        for tensor in model.parameters():
            tensor.data = tensor.data.to(dtype)
    return LanguageModel.of(model, lm.tokenizer, lm.name)


def int8(lm: LanguageModel, **options: object) -> LanguageModel:
    return quantize_int8(fresh(lm), **(dict(progress=False) | options))


def logits(lm: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(input_ids=IDS % lm.vocab_size, use_cache=False).logits.float()


def quantized_names(lm: LanguageModel) -> set[str]:
    return {name for name, module in lm.model.named_modules() if isinstance(module, Int8Linear)}


def linear_names(lm: LanguageModel) -> set[str]:
    return {name for name, module in lm.model.named_modules() if type(module) in (nn.Linear, Conv1D)}


def snapshot(lm: LanguageModel) -> dict[str, tuple]:
    """Names, types and storages of all there is: whether anything was changed."""
    tensors = {n: (t.data_ptr(), t.dtype, t.shape) for n, t in lm.model.state_dict().items()}
    return tensors | {n: (id(m), type(m), len(m._forward_pre_hooks)) for n, m in lm.model.named_modules()}


# -- what is quantised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("name", [*families.EXACT, "bloom", "mpt", "gpt_neo", "deepseek_v3", "phimoe", "jamba"])
def test_every_family_stays_close(family: Family, name: str, mode: str):
    """Weights and activations lose about a percent each; layers multiply that, and nothing else may come on top."""
    lm = family(name)
    wanted = logits(lm)
    for options, factor in ((dict(), 1.0), (dict(skip=()), 1.2), (EVERYTHING, 1.6)):
        made = int8(lm, activations=mode, **options)
        kept = linear_names(made)
        head = {"lm_head"} if not options else set()
        assert kept - head <= {n for n in linear_names(lm) if n.endswith("dt_proj")}  # read, never called
        limit = (0.08 if mode == "none" else 0.12) * factor
        assert quantization_error(wanted, logits(made)).relative < limit
        assert measured_weight_bytes(made.model) < measured_weight_bytes(lm.model)


def test_it_is_in_place_and_says_what_it_did(tiny: LanguageModel):
    lm = fresh(tiny)
    assert quantize_int8(lm, progress=False) is lm
    assert lm.quantization["activations"] == "dynamic" and "int8 (dynamic)" in repr(lm)
    report = describe_int8(lm)
    assert report.layers == len(quantized_names(lm)) == 14
    assert report.int8_bytes + report.kept_bytes == measured_weight_bytes(lm.model)
    assert sum(report.kernels.values()) == 14 and "14 layers in int8" in str(report)
    with pytest.raises(InvalidParameter, match="not quantised"):
        describe_int8(tiny)


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("down_proj", {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
        (["layers.0.mlp"], {f"{MLP}.gate_proj", f"{MLP}.up_proj", f"{MLP}.down_proj"}),
        ((f"{MLP}.up_proj",), {f"{MLP}.up_proj"}),
        ({"layers.1", "lm_head"}, None),
        ("lm_head", {"lm_head"}),
        ((), set()),
        (("lm_head",), {"lm_head"}),
        ((name for name in ("q_proj", "k_proj")), None),
    ],
)
def test_names_and_parts_of_names_are_skipped(family: Family, skip: object, left: set[str] | None):
    lm = family("llama")
    if left is None:
        parts = ("layers.1", "lm_head") if isinstance(skip, set) else ("q_proj", "k_proj")
        left = {n for n in linear_names(lm) if any(f".{part}." in f".{n}." for part in parts)}
    made = int8(lm, skip=skip)
    assert linear_names(made) == left and quantized_names(made) == linear_names(lm) - left
    for name in left:
        assert torch.equal(made.model.get_submodule(name).weight, lm.model.get_submodule(name).weight)
    assert quantization_error(logits(lm), logits(made)).relative < 0.12


@pytest.mark.parametrize("skip", ["proj", "layers.9", "", "model.layers.0.mlp.", ["lm_head", "head"], "q_proj.weight"])
def test_names_of_no_layer_are_refused(tiny: LanguageModel, skip: object):
    lm = fresh(tiny)
    before = snapshot(lm)
    with pytest.raises(InvalidParameter, match=r"names no linear layer of tiny-random.*q_proj"):
        quantize_int8(lm, skip=skip, progress=False)
    assert snapshot(lm) == before


def test_the_output_layer_is_meant_whatever_its_name():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("gpt_neox", **families.BASE)
        lm = LanguageModel.of(AutoModelForCausalLM.from_config(config), None, "neox")
    made = int8(lm)
    assert linear_names(made) == {"embed_out"} or linear_names(made) == {"lm_head"}
    assert made.model.get_output_embeddings() is made.model.get_submodule(next(iter(linear_names(made))))
    assert linear_names(int8(lm, skip=())) == set()
    # in front of the logits nothing is rounded to int8, even where everything else is
    head = int8(lm, skip=(), activations="dynamic").model.get_output_embeddings()
    assert head.activations == "none"


def test_gpt2_keeps_its_matrices_the_other_way_round(family: Family):
    lm = family("gpt2")
    assert any(type(m) is Conv1D for m in lm.model.modules())
    made = int8(lm, activations="none", skip=())
    assert not linear_names(made)
    for name in quantized_names(made):
        old, new = lm.model.get_submodule(name), made.model.get_submodule(name)
        weight = old.weight.T if isinstance(old, Conv1D) else old.weight
        assert (new.dequantized() - weight).abs().max() <= 0.51 * new.scale.max()
        assert old.bias is None if new.bias is None else torch.equal(new.bias, old.bias)


def test_biases_stay_as_they_are(family: Family):
    lm, made = family("qwen2"), int8(family("qwen2"))
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj"
        assert torch.equal(made.model.get_submodule(name).bias, lm.model.get_submodule(name).bias)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "phimoe"])
def test_experts_that_are_no_linear_layers_stay(family: Family, name: str, mode: str):
    if name == "mixtral":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **(families.BASE | families.LOCAL_EXPERTS))
            lm = LanguageModel.of(AutoModelForCausalLM.from_config(config), None, name)
        for parameter in lm.model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.25, generator=torch.Generator().manual_seed(parameter.numel()))
    else:
        lm = family(name)
    made = int8(lm, activations=mode)
    experts = {n: t for n, t in lm.model.named_parameters() if t.ndim == 3}
    assert experts and all(torch.equal(t, dict(made.model.named_parameters())[n]) for n, t in experts.items())
    assert quantization_error(logits(lm), logits(made)).relative < 0.12


class Router(nn.Module):
    """Experts as linear layers of their own: one is used by every second token, one by none, one is only read."""

    def __init__(self, config: object) -> None:
        super().__init__()
        size = config.hidden_size
        self.first, self.empty, self.never, self.read = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        nothing = self.empty(x.reshape(-1, x.shape[-1])[:0])
        return x + x @ self.read.weight.T + nothing.sum()


def test_layers_that_are_never_called_stay_as_they_were(tiny: LanguageModel):
    lm = fresh(tiny)
    lm.model.model.layers[0].mlp = Router(lm.model.config)
    reference = logits(lm)
    made = int8(lm)
    for name in ("empty", "never", "read"):
        layer = made.model.get_submodule(f"{MLP}.{name}")
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, lm.model.get_submodule(f"{MLP}.{name}").weight)
    assert f"{MLP}.first" in quantized_names(made)
    assert quantization_error(reference, logits(made)).relative < 0.12


def test_layers_that_read_one_input_are_smoothed_alike(family: Family):
    made = int8(family("llama"), skip=())
    of = made.model.get_submodule
    q, k, v, o = (of(f"model.layers.0.self_attn.{p}_proj") for p in "qkvo")
    gate, up, down = (of(f"{MLP}.{p}_proj") for p in ("gate", "up", "down"))
    place = {layer: layer.smoothing.data_ptr() for layer in (q, k, v, o, gate, up, down)}
    assert place[q] == place[k] == place[v] and place[gate] == place[up]  # kept once
    assert len({place[layer] for layer in (q, o, gate, down)}) == 4 and of("lm_head").smoothing is None


# -- smoothing and calibration ----------------------------------------------------------------------------------------


@pytest.fixture()
def lopsided(tiny: LanguageModel) -> LanguageModel:
    """A model with a few large features in front of its layers, as real ones have them."""
    lm = fresh(tiny)
    for layer in lm.model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[::16] *= 60
    return lm


def test_smoothing_helps_where_features_differ(lopsided: LanguageModel):
    wanted = logits(lopsided)
    errors = {a: quantization_error(wanted, logits(int8(lopsided, smoothing=a))).relative for a in (0, 0.5, 1)}
    assert errors[0.5] < 0.7 * errors[0]
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("alpha", [0, 0.0, 0.5, 1, 1.0])
def test_smoothing_is_undone_in_the_product(lopsided: LanguageModel, alpha: float):
    made = int8(lopsided, smoothing=alpha)
    for name in quantized_names(made):
        layer, old = made.model.get_submodule(name), lopsided.model.get_submodule(name)
        assert (layer.smoothing is None) == (alpha == 0)
        # at 1 the weights carry all of the difference between features
        assert quantization_error(old.weight, layer.dequantized()).relative < (0.05 if alpha < 1 else 0.5)
        if alpha == 0:
            assert torch.equal(layer.weight, pair_safe_quantize(old.weight).values)


@pytest.mark.parametrize(
    "calibration",
    [
        "Some text to watch.",
        ["One text.", "Another."],
        [[1, 2, 3]],
        [[5], "both"],
        ([1, 2], [3]),
        torch.tensor([[4, 5]]),
    ],
)
def test_forms_of_calibration(tiny: LanguageModel, calibration: object):
    made = int8(tiny, calibration=calibration)
    assert quantization_error(logits(tiny), logits(made)).relative < 0.3


def test_calibration_is_what_is_watched(tiny: LanguageModel):
    one, same, other = (int8(tiny, calibration=c) for c in ([[1, 2, 3]], [[1, 2, 3]], [[7] * 9]))
    a, b, c = (lm.model.get_submodule(f"{MLP}.down_proj").smoothing for lm in (one, same, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_text_longer_than_the_model_is_cut(tiny: LanguageModel):
    lm = fresh(tiny)
    lm.max_model_len = 16
    seen = []
    lm.model.get_submodule(f"{MLP}.down_proj").register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    quantize_int8(lm, calibration="many words " * 20, progress=False)
    assert max(seen) == 16 and sum(seen) >= 200


@pytest.mark.parametrize(
    "calibration",
    ["", [], [[]], [""], [[10**6]], [[-1]], 5, [5, 6], [["a"]], [[1.5]], [None], b"bytes", {1: 2}, torch.tensor([1.0])],
)
def test_calibration_that_cannot_be_run(tiny: LanguageModel, calibration: object):
    lm = fresh(tiny)
    before = snapshot(lm)
    with pytest.raises(InvalidPrompt):
        quantize_int8(lm, calibration=calibration, progress=False)
    assert snapshot(lm) == before


def test_a_model_without_a_tokenizer(family: Family):
    lm = family("llama")
    assert lm.tokenizer is None
    assert quantization_error(logits(lm), logits(int8(lm, activations="dynamic"))).relative < 0.12
    with pytest.raises(InvalidPrompt, match="no tokenizer"):
        int8(lm, calibration="text")


# -- embeddings -------------------------------------------------------------------------------------------------------


def tied(lm: LanguageModel) -> bool:
    return lm.model.get_input_embeddings().weight is lm.model.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "opt"])
def test_the_embedding_in_int8(family: Family, name: str):
    lm = family(name)
    wanted = logits(lm)
    made = int8(lm, activations="none", **EVERYTHING)
    embedding, head = made.model.get_input_embeddings(), made.model.get_output_embeddings()
    assert isinstance(embedding, Int8Embedding) and isinstance(head, Int8Linear)
    assert (head.weight is embedding.weight) == tied(lm) == (name != "llama")
    old = lm.model.get_input_embeddings()
    with torch.no_grad():
        assert quantization_error(old(IDS), embedding(IDS)).relative < 0.02
    assert quantization_error(wanted, logits(made)).relative < 0.1
    assert made.vocab_size == lm.vocab_size


def test_an_embedding_alone_needs_an_output_layer_of_its_own(family: Family):
    made = int8(family("llama"), embedding=True)
    assert isinstance(made.model.get_input_embeddings(), Int8Embedding) and linear_names(made) == {"lm_head"}
    lm = fresh(family("gemma2"))
    before = snapshot(lm)
    for skip in (("lm_head",), "lm_head"):
        with pytest.raises(InvalidParameter, match=r"both are one matrix.*skip=\(\)"):
            quantize_int8(lm, embedding=True, skip=skip, progress=False)
    assert snapshot(lm) == before


def test_a_tied_output_layer_in_int8_leaves_the_embedding(family: Family):
    lm = family("gpt2")
    made = int8(lm, skip=())
    embedding = made.model.get_input_embeddings()
    assert type(embedding) is nn.Embedding and torch.equal(embedding.weight, lm.model.get_input_embeddings().weight)
    assert isinstance(made.model.get_output_embeddings(), Int8Linear)


def test_an_embedding_that_does_more_than_look_up_is_refused(tiny: LanguageModel):
    class Doubling(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    lm = fresh(tiny)
    old = lm.model.get_input_embeddings()
    lm.model.set_input_embeddings(Doubling(*old.weight.shape, _weight=old.weight.data))
    before = snapshot(lm)
    with pytest.raises(UnsupportedModel, match="Doubling"):
        quantize_int8(lm, progress=False, **EVERYTHING)
    assert snapshot(lm) == before


def test_smollm2_keeps_its_tied_matrix_by_default(smollm2: LanguageModel):
    lm = load_model(device="cpu")
    pointer = lm.model.get_input_embeddings().weight.data_ptr()
    quantize_int8(lm, calibration=[list(range(100, 164))], progress=False)
    embedding, head = lm.model.get_input_embeddings(), lm.model.get_output_embeddings()
    assert type(embedding) is nn.Embedding and type(head) is nn.Linear and head.weight is embedding.weight
    assert embedding.weight.data_ptr() == pointer
    assert torch.equal(embedding.weight, smollm2.model.get_input_embeddings().weight)
    ids = torch.tensor([smollm2.encode("The capital of France is")])
    a, b = (model.next_token_logits(ids, use_cache=False) for model in (smollm2, lm))
    assert quantization_error(a, b).relative < 0.2 and a.argmax() == b.argmax()
    # matrices in a byte, 4 bytes a channel and a feature; the embedding as it was
    size = measured_weight_bytes(lm.model)
    layers = sum(m.in_features * m.out_features for m in lm.model.modules() if isinstance(m, Int8Linear))
    rest = size - layers - embedding.weight.nbytes
    assert 0 < rest < 0.03 * layers


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [f"{MLP}.up_proj", "lm_head", "model.embed_tokens"])
def test_damaged_weights(family: Family, name: str, value: float):
    lm = fresh(family("llama"))
    lm.model.get_submodule(name).weight.data[3, 4] = value
    before = snapshot(lm)
    where = "the embedding" if "embed" in name else name
    with pytest.raises(UnsupportedModel, match=f"{where}.* NaN or infinity"):
        quantize_int8(lm, progress=False, **EVERYTHING)
    assert snapshot(lm) == before and lm.quantization is None


def test_activations_that_are_not_finite(family: Family):
    lm = fresh(family("llama"))
    lm.model.model.layers[1].input_layernorm.weight.data[3] = torch.inf
    before = snapshot(lm)
    with pytest.raises(UnsupportedModel, match="NaN or infinity on the calibration text"):
        quantize_int8(lm, progress=False)
    assert snapshot(lm) == before


@pytest.mark.parametrize("options", [dict(), dict(activations="none"), EVERYTHING, dict(kernel="int_mm")])
def test_a_model_is_quantised_once(tiny: LanguageModel, options: dict):
    lm = int8(tiny, **options)
    before = logits(lm)
    for again in (dict(), EVERYTHING):
        with pytest.raises(InvalidParameter, match="quantised already"):
            quantize_int8(lm, progress=False, **again)
    assert torch.equal(logits(lm), before)


def test_another_librarys_quantisation(tiny: LanguageModel):
    lm = fresh(tiny)
    lm.model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(InvalidParameter, match="quantised already"):
        quantize_int8(lm, progress=False)


def test_a_model_without_linear_layers(tiny: LanguageModel):
    class Own(nn.Linear):
        pass

    lm = fresh(tiny)
    for module in lm.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Own  # a subclass computes something of its own
    with pytest.raises(UnsupportedModel, match="no linear layer"):
        quantize_int8(lm, progress=False)
    with pytest.raises(UnsupportedModel, match="no linear layer to quantise beside"):
        int8(tiny, skip=("layers", "lm_head"))


def test_a_model_that_reads_the_dtype_of_its_weights_is_not_wrong_silently(family: Family):
    with pytest.raises(UnsupportedModel, match="dtype of its weights"):
        int8(family("mamba2"), skip=())
    assert quantization_error(logits(family("mamba2")), logits(int8(family("mamba2")))).relative < 0.12


WRONG = [
    dict(activations="static"), dict(activations=""), dict(activations=3), dict(activations=["none"]), dict(skip=None),
    dict(skip=5), dict(skip=(5,)), dict(skip=[None]), dict(embedding="yes"), dict(embedding=1), dict(smoothing=-0.1),
    dict(smoothing=1.5), dict(smoothing="a"), dict(smoothing=None), dict(smoothing=True), dict(smoothing=torch.nan),
    dict(device="nope"), dict(device=7), dict(device="meta"), dict(kernel="nope"), dict(kernel=5), dict(kernel=["x"]),
    dict(activations="none", kernel="int_mm"), dict(kernel="fbgemm"),
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_arguments_change_nothing(tiny: LanguageModel, options: dict):
    lm = fresh(tiny)
    before = snapshot(lm)
    with pytest.raises(InvalidParameter):
        quantize_int8(lm, progress=False, **options)
    assert snapshot(lm) == before and lm.quantization is None


def test_a_gpu_that_is_not_there(tiny: LanguageModel):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    lm = fresh(tiny)
    before = snapshot(lm)
    with pytest.raises(MinferError, match="cuda"):
        quantize_int8(lm, device="cuda", progress=False)
    assert snapshot(lm) == before


# -- kernels, memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kernel"), [("dynamic", k) for k in ("compiled", "int_mm", "portable")]
    + [("none", k) for k in ("compiled", "portable")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_kernels_give_the_same_model(family: Family, mode: str, kernel: str, dtype: torch.dtype):
    lm = family("qwen2")
    try:
        made = quantize_int8(fresh(lm, dtype), activations=mode, kernel=kernel, progress=False, **EVERYTHING)
    except InvalidParameter as error:
        pytest.skip(str(error))
    assert logits(made).isfinite().all()
    limit = (0.06 if mode == "none" else 0.09) if dtype == torch.float32 else 0.15
    assert quantization_error(logits(lm), logits(made)).relative < limit
    kernels = set(describe_int8(made).kernels)
    assert kernel in kernels  # the output layer, never rounded, may have another
    assert len(kernels) == 1 or mode == "dynamic"


def test_scales_do_not_depend_on_torchs_default_dtype(tiny: LanguageModel):
    wanted, before = int8(tiny, **EVERYTHING), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        made = int8(tiny, **EVERYTHING)
    finally:
        torch.set_default_dtype(before)
    for name, tensor in wanted.model.state_dict().items():
        found = made.model.state_dict()[name]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


class OutOfMemory(RuntimeError):
    pass


@pytest.mark.parametrize("at", [0, 5])
def test_a_quantisation_that_breaks_off(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, at: int):
    lm, calls, by_slices = fresh(tiny), [], quantize.by_slices
    before = snapshot(lm)

    def breaking(*args):
        calls.append(1)
        if len(calls) > at:
            raise OutOfMemory("no memory")
        return by_slices(*args)

    with monkeypatch.context() as patch, pytest.raises((OutOfMemory, UnsupportedModel)) as caught:
        patch.setattr(quantize, "by_slices", breaking)
        quantize_int8(lm, progress=False)
    assert lm.quantization is None
    if at == 0:  # nothing was changed, so nothing is said of it
        assert caught.type is OutOfMemory and snapshot(lm) == before
        assert quantize_int8(lm, progress=False).quantization
    else:
        assert "OutOfMemory: no memory. It was changed on the way: load it again." in str(caught.value)
        with pytest.raises(InvalidParameter, match=r"was changed by a quantisation that broke off\. Load it"):
            quantize_int8(lm, progress=False)
        with pytest.raises(InvalidParameter, match="is no quantised model"):
            save_int8(lm, "nowhere")


@pytest.mark.parametrize("at", [0, 5])
def test_an_exception_keeps_no_weights(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, at: int):
    lm, calls, by_slices = fresh(tiny), [], quantize.by_slices
    layers = [weakref.ref(module) for module in lm.model.modules()]

    def breaking(*args):
        calls.append(1)
        if len(calls) > at:
            raise OutOfMemory("no memory")
        return by_slices(*args)

    kept = None
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "by_slices", breaking)
        try:
            quantize_int8(lm, progress=False)
        except (OutOfMemory, UnsupportedModel) as error:
            kept = error
    del lm
    gc.collect()
    assert kept is not None and not [layer for layer in layers if layer() is not None]


@pytest.mark.parametrize("options", [dict(activations="none"), dict(activations="dynamic"), EVERYTHING])
def test_never_two_models_in_memory(options: dict):
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    lm = LanguageModel.of(AutoModelForCausalLM.from_config(config), None, "eight layers")
    whole = measured_weight_bytes(lm.model)
    largest = 3 * 512 * 256 * 4  # gate and up together are the widest group
    with PeakMemory() as peak:
        quantize_int8(lm, calibration=[[1, 2, 3]], progress=False, **options)
    after = measured_weight_bytes(lm.model)
    assert after < 0.45 * whole
    # what is new at the end is `after`; beside it no more than a few forms of one group
    assert peak.peak_bytes < after + 6 * largest
    assert peak.peak_bytes < 0.75 * whole
