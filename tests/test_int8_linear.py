"""`Int8Linear` and `Int8Embedding`, as modules of PyTorch."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from minfer_lib import load_model, quantize_int8
from minfer_lib.errors import InvalidParameter, UnsupportedModel
from minfer_lib.models.memory import measured_weight_bytes
from minfer_lib.quant.absmax import absmax_quantize, pair_safe_quantize, quantization_error
from minfer_lib.quant.linear import Int8Embedding, Int8Linear
from minfer_lib.quant.products import DYNAMIC, why_not

KERNELS = [name for name in DYNAMIC if why_not(name) is None]
FEATURES = 64
MODES = ["dynamic", "none"]


def make(out: int = 48, seed: int = 0, *, bias: bool = True, mode: str = "dynamic", smooth: bool = False, **options):
    """An Int8Linear, and the weights and bias that it stands for."""
    g = torch.Generator().manual_seed(seed)
    weight, offset = torch.randn(out, FEATURES, generator=g), torch.randn(out, generator=g) if bias else None
    factors = torch.linspace(0.5, 2, FEATURES) if smooth else None
    quantize = pair_safe_quantize if mode == "dynamic" else lambda w: absmax_quantize(w, dim=-1)
    quantized = quantize(weight if factors is None else weight * factors)
    layer = Int8Linear(quantized.values, quantized.scale, offset, activations=mode, smoothing=factors, **options)
    return layer, weight, offset


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, FEATURES, generator=torch.Generator().manual_seed(100 + seed))


@pytest.fixture(params=[(m, k) for m in MODES for k in KERNELS if m == "dynamic" or k in ("compiled", "portable")])
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3), (1, 1), (2, 0), (2, 1, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_shapes(setting: tuple[str, str], shape: tuple[int, ...], bias: bool):
    mode, kernel = setting
    layer, weight, offset = make(bias=bias, mode=mode, smooth=mode == "dynamic", kernel=kernel)
    assert layer.kernel == kernel
    given = x(*shape)
    found, wanted = layer(given), nn.functional.linear(given, weight, offset)
    assert found.shape == wanted.shape and found.dtype == torch.float32
    if found.numel():
        assert quantization_error(wanted, found).relative < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_output_has_the_dtype_of_the_input(setting: tuple[str, str], dtype: torch.dtype):
    layer, weight, offset = make(mode=setting[0], kernel=setting[1])
    given = x(3, 4).to(dtype)
    found = layer(given)
    assert found.dtype == dtype
    assert quantization_error(nn.functional.linear(given.float(), weight, offset), found).relative < 0.02


def test_dequantized_is_what_the_layer_computes_with(setting: tuple[str, str]):
    layer, weight, _ = make(mode=setting[0], smooth=setting[0] == "dynamic", kernel=setting[1])
    before = layer.dequantized()
    layer(x(1))
    assert torch.equal(layer.dequantized(), before)
    assert layer.weight.dtype == torch.int8 and layer.weight.shape == (48, FEATURES)
    assert quantization_error(weight, before).relative < 0.02


@pytest.mark.parametrize("size", [3, 17])
def test_weights_that_are_not_pair_safe_are_right_too(size: int):
    codes = torch.full((size, FEATURES), 127, dtype=torch.int8)
    codes[1] = -127
    for kernel in (None, *KERNELS):
        layer = Int8Linear(codes, torch.ones(size), kernel=kernel)
        assert layer(torch.ones(2, FEATURES))[1, :2].tolist() == pytest.approx([127 * FEATURES, -127 * FEATURES])
        assert layer.kernel == "portable"


@pytest.mark.parametrize(
    "arguments",
    [
        dict(weight=torch.ones(2, 3)),
        dict(weight=torch.ones(3, dtype=torch.int8)),
        dict(activations="static"),
        dict(activations=None),
        dict(scale=torch.ones(3)),
        dict(bias=torch.ones(3)),
        dict(smoothing=torch.ones(2)),
    ],
)
def test_what_cannot_be_a_layer(arguments: dict):
    with pytest.raises(InvalidParameter):
        Int8Linear(**(dict(weight=torch.ones(2, 3, dtype=torch.int8), scale=torch.ones(2)) | arguments))


def test_integers_as_input_are_refused():
    """Mamba brings the input of its output layer to the dtype of the weights, which are integers now."""
    layer, _, _ = make()
    with pytest.raises(UnsupportedModel, match="int8"):
        layer(x(2).to(layer.weight.dtype))


# -- moving, copying, storing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_is_for_activations_alone(setting: tuple[str, str], dtype: torch.dtype):
    layer, given = make(mode=setting[0], kernel=setting[1], smooth=setting[0] == "dynamic")[0], x(2)
    wanted = layer(given)
    before = {name: tensor.clone() for name, tensor in layer.named_buffers()}
    layer.to(dtype)
    after = dict(layer.named_buffers())
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    narrow = layer(given.to(dtype))
    assert narrow.dtype == dtype and quantization_error(wanted, narrow).relative < 0.02
    layer.to(torch.float32)
    assert torch.equal(layer(given), wanted)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(setting: tuple[str, str], how: str, used: bool):
    layer, given = make(out=480, mode=setting[0], kernel=setting[1])[0], x(2)
    if used:
        layer(given)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    elif how == "pickle":
        data = pickle.dumps(layer)
        assert len(data) < 1.5 * layer.weight.numel()  # each code once
        other = pickle.loads(data)
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert measured_weight_bytes(other) == measured_weight_bytes(layer)
    wanted = layer(given)
    assert other.kernel == layer.kernel and torch.equal(other(given), wanted)
    other.weight.zero_()  # a copy of its own
    assert torch.equal(layer(given), wanted)
    assert torch.equal(other(given), other.bias.expand(2, -1))


def test_state_dict_there_and_back(setting: tuple[str, str]):
    source, target = (make(seed=seed, mode=setting[0], kernel=setting[1])[0] for seed in (0, 50))
    given = x(2)
    wanted = source(given)
    assert not torch.equal(target(given), wanted)
    state = source.state_dict()
    assert list(state) == ["weight", "scale", "bias"] and state["weight"].dtype == torch.int8
    target.load_state_dict(state)  # in place
    assert torch.equal(target(given), wanted) and torch.equal(source(given), wanted)


def exchanged(layer: Int8Linear, codes: torch.Tensor) -> None:
    layer.weight = codes


def copied_into(layer: Int8Linear, codes: torch.Tensor) -> None:
    layer.weight.copy_(codes)


def other_data(layer: Int8Linear, codes: torch.Tensor) -> None:
    layer.weight.data = codes


@pytest.mark.parametrize("change", [exchanged, copied_into, other_data])
def test_codes_that_change_are_computed_with(setting: tuple[str, str], change):
    layer, other = (make(seed=seed, mode=setting[0], kernel=setting[1])[0] for seed in (0, 50))
    given = x(2)
    layer(given)
    change(layer, other.weight.clone())
    layer.scale, layer.bias = other.scale, other.bias
    assert torch.equal(layer(given), other(given))


def test_each_weight_is_counted_once(setting: tuple[str, str]):
    layer = make(mode=setting[0], kernel=setting[1], smooth=setting[0] == "dynamic")[0]
    expected = 48 * FEATURES + 4 * 48 + 4 * 48 + (4 * FEATURES if setting[0] == "dynamic" else 0)
    for _ in range(2):
        assert measured_weight_bytes(layer) == expected
        layer(x(2))
    layer.to(torch.bfloat16)
    layer(x(2).bfloat16())
    assert measured_weight_bytes(layer) == expected


def test_a_layer_that_is_sent_to_where_it_is_stays_as_it_is():
    layer = make()[0]
    before = dict(layer.named_buffers())
    layer.to("cpu").to(torch.float32).float()
    assert all(layer.get_buffer(name) is tensor for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_no_tensor_takes_its_dtype_from_the_default(setting: tuple[str, str], dtype: torch.dtype):
    layer, given = make(mode=setting[0], kernel=setting[1])[0], x(3)
    wanted, before = layer(given), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        layer = Int8Linear(layer.weight, layer.scale, layer.bias, activations=setting[0], kernel=setting[1])
        found = layer(given)
        assert why_not.__wrapped__(setting[1]) is None
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == layer.scale.dtype == torch.float32 and torch.equal(wanted, found)


# -- the embedding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype: torch.dtype):
    table = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    quantized = absmax_quantize(table, dim=-1)
    embedding = Int8Embedding(quantized.values, quantized.scale, dtype)
    ids = torch.tensor([[3, 0, 29], [3, 3, 1]])
    assert torch.equal(embedding(ids), quantized.dequantize()[ids].to(dtype))
    assert embedding(torch.tensor([], dtype=torch.long)).shape == (0, 8)
    scaled = Int8Embedding(quantized.values, quantized.scale, dtype, factor=8.1)
    wanted = quantized.dequantize()[ids].to(dtype) * torch.tensor(8.1, dtype=dtype)  # as Gemma rounds it
    assert torch.equal(scaled(ids), wanted)
    scaled.to(torch.float16)
    assert scaled(ids).dtype == torch.float16 and scaled.scale.dtype == torch.float32
    with pytest.raises(IndexError):
        embedding(torch.tensor([30]))


def test_an_output_layer_over_the_embedding_keeps_its_rows():
    codes, scale = pair_safe_quantize(torch.randn(30, FEATURES)).values, torch.ones(30)
    embedding = Int8Embedding(codes, scale, torch.float32)
    for mode in MODES:
        for kernel in (None, *(KERNELS if mode == "dynamic" else ("compiled", "portable"))):
            head = Int8Linear(embedding.weight, embedding.scale, activations=mode, kernel=kernel)
            head(x(2))
            assert head.weight is embedding.weight and torch.equal(embedding.weight, codes)
            both = nn.ModuleList([embedding, head])
            assert measured_weight_bytes(both) == codes.numel() + 4 * 30
            for other in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
                assert measured_weight_bytes(other) <= codes.numel() + 2 * 4 * 30


def test_what_would_be_wrong_silently_is_refused():
    weight, scale = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    layer = Int8Linear(weight, scale, activations="none")
    with pytest.raises(UnsupportedModel, match="no gradient"):
        layer(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(InvalidParameter, match="the last dimension and the device"):
        layer(torch.randn(2, 4))
    with pytest.raises(InvalidParameter, match="the last dimension and the device"):
        layer(torch.randn(2, 8, device="meta"))
    with pytest.raises(InvalidParameter, match="omit it"):
        Int8Linear(weight, scale, activations="none", smoothing=torch.ones(8))
    with pytest.raises(InvalidParameter, match="weight must be codes in int8"):
        Int8Embedding(torch.ones(4, 8), scale, torch.float32)


def test_a_layer_with_a_forward_or_a_hook_of_its_own_stays_as_it_is():
    lm = load_model("tiny-random", device="cpu")
    attention = lm.model.model.layers[0].self_attn
    attention.q_proj.forward = attention.q_proj.forward
    attention.k_proj.register_forward_hook(lambda module, args, output: output + 1)
    quantize_int8(lm, progress=False)
    kept = [type(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert kept == [torch.nn.Linear, torch.nn.Linear, Int8Linear]
