"""`Int8Linear`, layers that share an input, and `Int8Embedding`, as modules of PyTorch."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from minfer_lib import load_model, quantize_int8
from minfer_lib.errors import InvalidParameter, UnsupportedModel
from minfer_lib.models.memory import measured_weight_bytes
from minfer_lib.quant.absmax import absmax_quantize, pair_safe_quantize, quantization_error
from minfer_lib.quant.linear import Int8Embedding, Int8Linear, SharedInput
from minfer_lib.quant.products import usable

KERNELS = [name for name in ("compiled", "fbgemm", "int_mm", "portable") if not isinstance(usable(name), str)]
FEATURES = 64
SIZES = (48, 16, 20)
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


def group(mode: str = "dynamic", **options) -> list[Int8Linear]:
    """q, k, v that read one input: of unequal sizes, one without a bias."""
    smooth = mode == "dynamic"
    layers = [make(n, i, bias=i != 1, mode=mode, smooth=smooth, **options)[0] for i, n in enumerate(SIZES)]
    SharedInput(layers)
    return layers


def alone(layers: list[Int8Linear]) -> list[Int8Linear]:
    """The same layers, each for itself."""
    return [
        Int8Linear(
            layer.codes().clone(), layer.scale.clone(), layer.bias, activations=layer.activations,
            smoothing=layer.smoothing, kernel=layer.kernel_name,
        )
        for layer in layers
    ]  # fmt: skip


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
    layer, weight, offset = make(mode=setting[0], kernel=setting[1], dtype=dtype)
    given = x(3, 4).to(dtype)
    found = layer(given)
    assert found.dtype == dtype
    assert quantization_error(nn.functional.linear(given.float(), weight, offset), found).relative < 0.02


def test_dequantized_is_what_the_layer_computes_with(setting: tuple[str, str]):
    layer, weight, _ = make(mode=setting[0], smooth=setting[0] == "dynamic", kernel=setting[1])
    before = layer.dequantized()
    layer(x(1))  # packs the weights, if the kernel does
    assert torch.equal(layer.dequantized(), before)
    assert layer.codes().dtype == torch.int8 and layer.codes().shape == (48, FEATURES)
    assert quantization_error(weight, before).relative < 0.02
    for out, part in zip(SIZES, group(setting[0], kernel=setting[1]), strict=True):
        assert part.codes().shape == (out, FEATURES)


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


# -- layers that read one input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,), (0, 0, 2, 1), (0, 1, 0, 1, 2, 2)])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (1, 7)])
def test_sharing_changes_no_bit(setting: tuple[str, str], order: tuple[int, ...], shape: tuple[int, ...]):
    layers = group(setting[0], kernel=setting[1])
    apart = alone(layers)
    for seed in range(2):
        given = x(*shape, seed=seed)
        for i in order:
            found, wanted = layers[i](given), apart[i](given)
            assert found.shape == (*shape, SIZES[i])
            if setting[1] == "portable":  # floating-point products, whose order of sums is the library's own
                assert (found - wanted).abs().max() < 1e-4
            else:
                assert torch.equal(found, wanted)


def test_another_input_is_computed_afresh(setting: tuple[str, str]):
    layers = group(setting[0], kernel=setting[1])
    apart = alone(layers)
    one, two = x(3), x(3, seed=1)
    for i, given in ((0, one), (1, two), (2, one), (0, two), (1, one.clone()), (2, two), (1, one), (2, one)):
        torch.testing.assert_close(layers[i](given), apart[i](given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_is_seen(setting: tuple[str, str], inference: bool):
    layers = group(setting[0], kernel=setting[1])
    apart = alone(layers)
    with torch.inference_mode(inference):
        given = x(3).clone()
        assert given.is_inference() == inference
        layers[0](given)
        given[1, 5] += 3
        torch.testing.assert_close(layers[1](given), apart[1](given), rtol=1e-5, atol=1e-5)
        given.zero_()
        torch.testing.assert_close(layers[2](given), apart[2](given), rtol=1e-5, atol=1e-5)
        same = x(3)
        first = [layer(same) for layer in layers]
    for found, layer in zip(first, apart, strict=True):
        torch.testing.assert_close(found, layer(same), rtol=1e-5, atol=1e-5)


def test_the_input_is_multiplied_once(monkeypatch: pytest.MonkeyPatch):
    for inference in (False, True):
        layers, calls = group(), []
        product = layers[0].shared.whole.product

        def counted(rows: torch.Tensor, product=product, calls=calls) -> torch.Tensor:
            calls.append(len(rows))
            return product(rows)

        monkeypatch.setattr(layers[0].shared.whole, "product", counted)
        with torch.inference_mode(inference):
            given = x(2)
            for layer in layers:
                layer(given)
        assert len(calls) == 1
        assert layers[0].shared._waiting is None  # neither input nor results are held any longer


def test_an_exception_in_between_leaves_nothing_wrong():
    layers = group()
    apart = alone(layers)
    given = x(2)
    layers[0](given)
    with pytest.raises((RuntimeError, ValueError)):
        layers[1](torch.randn(2, FEATURES + 1))
    for i in (1, 2, 0):
        assert torch.equal(layers[i](given), apart[i](given))


def test_changing_a_result_changes_no_other():
    layers = group()
    wanted = [layer(x(3)) for layer in alone(layers)]
    given = x(3)
    for layer, result in zip(layers, wanted, strict=True):
        found = layer(given)
        assert torch.equal(found, result)
        found.fill_(7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads(kernel: str):
    """Two threads over the same layers, made ready by neither: with one input, and with inputs of their own."""
    layers = copy.deepcopy(group(kernel=kernel))
    apart = alone(layers)
    common, inputs = x(2), [x(2, seed=s) for s in (5, 6)]
    wanted = {id(given): [layer(given) for layer in apart] for given in (common, *inputs)}
    begin, wrong = threading.Barrier(2), []

    def work(own: torch.Tensor) -> None:
        try:
            begin.wait(10)
            for turn in range(200):
                given = (common, own)[turn % 2]
                for layer, result in zip(layers, wanted[id(given)], strict=True):
                    if not torch.allclose(layer(given), result, rtol=1e-5, atol=1e-5):
                        wrong.append((turn, layer.out_features))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(given,)) for given in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


# -- moving, copying, storing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_is_for_activations_alone(setting: tuple[str, str], dtype: torch.dtype):
    model = nn.ModuleList([*group(setting[0], kernel=setting[1]), make(mode=setting[0], kernel=setting[1])[0]])
    given = x(2)
    wanted = [layer(given) for layer in model]
    before = [(layer.codes().clone(), layer.scale.clone(), layer.bias) for layer in model]
    model.to(dtype)
    for layer, (codes, scale, bias) in zip(model, before, strict=True):
        assert layer.dtype == dtype and layer.scale.dtype == torch.float32
        assert torch.equal(layer.codes(), codes) and torch.equal(layer.scale, scale)
        assert bias is None or torch.equal(layer.bias, bias)
    narrow = given.to(dtype)
    for layer, result in zip(model, wanted, strict=True):
        assert layer(narrow).dtype == dtype
        assert quantization_error(result, layer(narrow)).relative < 0.02
    model.to(torch.float32)
    for layer, result in zip(model, wanted, strict=True):
        assert torch.equal(layer(given), result)
    assert all(layer.shared is not None for layer in model[:3])  # together again


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(setting: tuple[str, str], how: str, used: bool):
    model = nn.ModuleList([*group(setting[0], kernel=setting[1]), make(mode=setting[0], kernel=setting[1])[0]])
    given = x(2)
    if used:
        [layer(given) for layer in model]
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        data = pickle.dumps(model)
        assert len(data) < 1.5 * sum(layer.codes().numel() for layer in model) + 20000  # each code once
        other = pickle.loads(data)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    size = measured_weight_bytes(model)
    assert measured_weight_bytes(other) == size
    wanted = [layer(given) for layer in model]
    assert [layer.kernel for layer in other] == [layer.kernel for layer in model]
    assert all(torch.equal(layer(given), result) for layer, result in zip(other, wanted, strict=True))
    assert measured_weight_bytes(other) == size
    other[0].unprepare()
    other[0].weight.zero_()  # a copy of its own
    assert all(torch.equal(layer(given), result) for layer, result in zip(model, wanted, strict=True))


def test_state_dict_there_and_back(setting: tuple[str, str]):
    def build(seed: int) -> nn.ModuleList:
        layers = [make(n, seed + i, mode=setting[0], kernel=setting[1])[0] for i, n in enumerate(SIZES)]
        SharedInput(layers)
        return nn.ModuleList([*layers, make(30, seed + 9, mode=setting[0], kernel=setting[1])[0]])

    given, source, target = x(2), build(0), build(50)
    wanted = [layer(given) for layer in source]
    assert not torch.equal(target[0](given), wanted[0])
    [layer(given) for layer in target]
    state = source.state_dict()
    assert {name for name in state if name.endswith("weight")} == {f"{i}.weight" for i in range(4)}
    assert all(tensor.dtype == torch.int8 and tensor.numel() for name, tensor in state.items() if "weight" in name)
    target.load_state_dict(state)
    assert all(torch.equal(layer(given), result) for layer, result in zip(target, wanted, strict=True))
    assert all(torch.equal(layer(given), result) for layer, result in zip(source, wanted, strict=True))


def test_each_weight_is_counted_once(setting: tuple[str, str]):
    model = nn.ModuleList([*group(setting[0], kernel=setting[1]), make(mode=setting[0], kernel=setting[1])[0]])
    out, biases = sum(SIZES) + 48, SIZES[0] + SIZES[2] + 48
    smoothing = 4 * FEATURES if setting[0] == "dynamic" else 0
    expected = out * FEATURES + 4 * out + 4 * biases + smoothing
    assert measured_weight_bytes(model) == expected
    [layer(x(2)) for layer in model]
    assert measured_weight_bytes(model) == expected
    model.to(torch.bfloat16)
    assert measured_weight_bytes(model) == expected
    [layer(x(2).bfloat16()) for layer in model]
    assert measured_weight_bytes(model) == expected


def test_a_model_that_is_sent_to_where_it_is_stays_as_it_is():
    layers = group()
    shared, pointer = layers[0].shared, layers[0].weight.data_ptr()
    nn.ModuleList(layers).to("cpu").to(torch.float32).float()
    assert layers[0].shared is shared and layers[0].weight.data_ptr() == pointer


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
            head = Int8Linear(embedding.weight, embedding.scale, activations=mode, kernel=kernel, keep_rows=True)
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
    with pytest.raises(InvalidParameter, match="leave it out"):
        Int8Linear(weight, scale, activations="none", smoothing=torch.ones(8))
    with pytest.raises(InvalidParameter, match="cut to int8"):
        layer.load_state_dict({"weight": torch.randn(4, 8)}, strict=False)
    with pytest.raises(InvalidParameter, match="same smoothing"):
        SharedInput([Int8Linear(weight, scale, smoothing=torch.full((8,), float(i))) for i in (1, 2)])


def test_a_layer_with_a_forward_or_a_hook_of_its_own_stays_as_it_is():
    lm = load_model("tiny-random", device="cpu")
    attention = lm.model.model.layers[0].self_attn
    attention.q_proj.forward = attention.q_proj.forward
    attention.k_proj.register_forward_hook(lambda module, args, output: output + 1)
    quantize_int8(lm, progress=False)
    kept = [type(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert kept == [torch.nn.Linear, torch.nn.Linear, Int8Linear]
