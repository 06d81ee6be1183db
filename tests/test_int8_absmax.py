"""The arithmetic of eight bits: bounds that hold for every tensor, from the grids themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib.errors import InvalidParameter
from minfer_lib.quant.absmax import (
    PAIR_LIMIT,
    Quantized,
    absmax_quantize,
    is_pair_safe,
    llm_int8_linear,
    outlier_features,
    pair_safe_quantize,
    quantization_error,
    smoothing_factors,
    zero_point_quantize,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZERS = {
    "absmax": absmax_quantize,
    "rows": lambda x: absmax_quantize(x, dim=-1),
    "zero point": zero_point_quantize,
    "zero point of rows": lambda x: zero_point_quantize(x, dim=-1),
    "pair-safe": pair_safe_quantize,
}
SLACK = 1 + 1e-5  # of the float32 in which a number is divided by its scale and multiplied again


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Matrices of any small shape: scales from 1e-30 to 1e30, rows of zeros, one huge value, one sign, any dtype."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    x = x * 10.0 ** draw(st.integers(-30, 30))
    kind = draw(st.sampled_from(["plain", "zero row", "huge", "negative", "sparse", "ties"]))
    if kind == "zero row":
        x[rows // 2] = 0
    elif kind == "huge":
        x[0, columns // 2] *= 1e6
    elif kind == "negative":
        x = -x.abs()
    elif kind == "sparse":
        x = torch.where(x > 0, x, 0.0)
    elif kind == "ties":
        x = torch.round(2 * x / x.abs().max()) * x.abs().max()
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == torch.float16:  # which reaches from 6e-8 to 65504
        x = (x / x.abs().max().clamp(min=1e-30) * 10.0 ** draw(st.integers(-4, 4))).clamp(-6e4, 6e4)
    return x.to(dtype)


@settings(max_examples=150, deadline=None)
@given(tensors(), st.sampled_from(list(QUANTIZERS)))
def test_no_number_is_further_from_its_code_than_half_a_scale(x: torch.Tensor, name: str):
    quantized = QUANTIZERS[name](x)
    assert quantized.values.dtype == torch.int8 and quantized.values.shape == x.shape
    assert quantized.scale.dtype == torch.float32 and (quantized.scale > 0).all()
    error = (x.double() - quantized.dequantize().double()).abs()
    # the zero point is rounded as well, so that the two roundings can meet at the end of the grid
    limit = (0.5 if "zero point" not in name else 0.51) * SLACK * quantized.scale.double()
    assert (error <= limit.expand_as(error)).all()
    assert (quantized.dequantize()[x == 0] == 0).all()
    if "zero point" not in name:
        assert int(quantized.values.to(torch.int16).abs().max()) <= 127
        assert (quantized.values.sign() * x.float().sign() >= 0).all()
    if name == "pair-safe":
        assert is_pair_safe(quantized.values)


@settings(max_examples=100, deadline=None)
@given(tensors(), st.integers(2, 8))
def test_the_largest_magnitude_gets_the_largest_code(x: torch.Tensor, bits: int):
    quantized = absmax_quantize(x, dim=-1, bits=bits)
    largest = 2 ** (bits - 1) - 1
    top = quantized.values.to(torch.int16).abs().amax(-1)
    assert (top == torch.where((x != 0).any(-1), largest, 0)).all()
    assert torch.equal(absmax_quantize(-x, dim=-1, bits=bits).values, -quantized.values)


@settings(max_examples=100, deadline=None)
@given(tensors())
def test_pair_safe_codes_lose_at_most_half_of_the_grid(x: torch.Tensor):
    quantized, plain = pair_safe_quantize(x), absmax_quantize(x, dim=-1)
    ratio = quantized.scale / plain.scale
    assert (ratio >= 1 / SLACK).all() and (ratio <= 2 * SLACK).all()
    pairs = torch.nn.functional.pad(quantized.values.int().abs(), (0, x.shape[1] % 2)).unflatten(-1, (-1, 2)).sum(-1)
    assert int(pairs.max()) <= PAIR_LIMIT


def test_pairs_of_equal_weights_use_the_whole_of_what_fits():
    codes = pair_safe_quantize(torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, 0.0]])).values
    assert codes.abs().sum(-1).tolist() == [128, 128, 127]
    assert not is_pair_safe(torch.tensor([[65, 64]], dtype=torch.int8))
    assert not is_pair_safe(torch.tensor([[0, 0, -128, 1]], dtype=torch.int8))
    assert is_pair_safe(torch.tensor([[1, 0, 127, 127]], dtype=torch.int8)[:, :3])  # the last one has no neighbour


@pytest.mark.parametrize("name", QUANTIZERS)
def test_tiny_rows_become_zero_and_disturb_no_other(name: str):
    x = torch.stack([torch.linspace(-1, 1, 10), torch.linspace(-1e-40, 1e-40, 10), torch.zeros(10)])
    quantized = QUANTIZERS[name](x)
    restored = quantized.dequantize()
    assert (restored[1:] == 0).all() and quantized.scale.isfinite().all()
    assert (restored[0] - x[0]).abs().max() < 0.01


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("size", [1e-36, 3e38])
def test_the_ends_of_float32(name: str, size: float):
    x = torch.tensor([[size, size, -size, size / 3]]) if "zero" not in name else torch.tensor([[0, size, size / 3]])
    error = quantization_error(x, QUANTIZERS[name](x))
    assert error.relative < (1.01 if size < 1 else 0.01)  # 1: the row was so small that it became zeros


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_no_grid_reaches_are_refused(name: str, value: float):
    x = torch.ones(3, 5)
    x[1, 3] = value
    with pytest.raises(InvalidParameter, match="NaN or infinity"):
        QUANTIZERS[name](x)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_tensors_stay_empty(name: str, shape: tuple[int, int]):
    quantized = QUANTIZERS[name](torch.empty(shape))
    assert quantized.values.shape == quantized.dequantize().shape == shape
    assert quantization_error(torch.empty(shape), quantized).relative == 0


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int8)])
def test_integers_are_refused(x: torch.Tensor):
    for quantize in QUANTIZERS.values():
        with pytest.raises(InvalidParameter, match="floating-point"):
            quantize(x)


@pytest.mark.parametrize("bits", [1, 9, 0, -3, 8.0, True, "8", None])
def test_bits_that_a_byte_does_not_have(bits: object):
    with pytest.raises(InvalidParameter, match="bits"):
        absmax_quantize(torch.ones(2), bits=bits)


def test_one_sign_uses_all_codes_with_a_zero_point():
    x = torch.linspace(0.5, 3, 1000)
    quantized = zero_point_quantize(x)
    assert int(quantized.values.max()) == 127 and int(quantized.zero_point) == -128
    assert quantization_error(x, quantized).relative < 0.55 * quantization_error(x, absmax_quantize(x)).relative


def test_a_scale_a_row_is_better_where_rows_differ():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-4, 4)[:, None]
    whole, rows = absmax_quantize(x), absmax_quantize(x, dim=-1)
    assert whole.scale.shape == () and rows.scale.shape == (8, 1)
    assert (whole.values[:3] == 0).all() and (rows.values.abs().amax(-1) == 127).all()
    assert whole.nbytes == x.numel() + 4 and rows.nbytes == x.numel() + 8 * 4
    assert zero_point_quantize(x, dim=-1).nbytes == x.numel() + 8 * 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_gives_the_dtype_asked_for(dtype: torch.dtype):
    quantized = Quantized(torch.tensor([[1, -127]], dtype=torch.int8), torch.tensor([[0.5]]))
    assert torch.equal(quantized.dequantize(dtype), torch.tensor([[0.5, -63.5]], dtype=dtype))


def test_quantization_error_by_hand():
    error = quantization_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    assert (error.max_abs, error.mean_abs) == (1.0, 0.5)
    assert error.relative == pytest.approx(1 / 5)
    assert quantization_error(torch.zeros(3), torch.zeros(3)).relative == 0
    assert quantization_error(torch.zeros(3), torch.ones(3)).relative == 1
    with pytest.raises(InvalidParameter, match="Shapes"):
        quantization_error(torch.zeros(3), torch.zeros(4))


def test_outlier_features():
    x = torch.zeros(2, 3, 5)
    x[0, 1, 2], x[1, 0, 4], x[1, 2, 0] = 6.0, -7.0, 5.99
    assert outlier_features(x).tolist() == [2, 4]
    assert outlier_features(x, 5.5).tolist() == [0, 2, 4]
    assert outlier_features(x, torch.inf).tolist() == []
    assert outlier_features(torch.zeros(0, 5)).tolist() == []
    for threshold in (0, -1, torch.nan):
        with pytest.raises(InvalidParameter, match="threshold"):
            outlier_features(x, threshold)


@pytest.fixture()
def product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x, weight, bias = torch.randn(2, 5, 48, generator=g), torch.randn(20, 48, generator=g), torch.randn(20, generator=g)
    x[..., 7] *= 30  # one outlier feature
    return x, weight, bias


def test_llm_int8_without_outliers_is_plain_w8a8(product):
    x, weight, bias = product
    tokens, channels = absmax_quantize(x, dim=-1), absmax_quantize(weight, dim=-1)
    sums = tokens.values.double() @ channels.values.double().T
    wanted = (sums * tokens.scale.double() * channels.scale[:, 0].double()).float() + bias
    assert torch.equal(llm_int8_linear(x, weight, bias, threshold=torch.inf), wanted)


def test_llm_int8_with_outliers_alone_is_the_float_product(product):
    x, weight, bias = product
    wanted = torch.nn.functional.linear(x, weight, bias)
    assert (llm_int8_linear(x, weight, bias, threshold=1e-30) - wanted).abs().max() < 1e-4


def test_llm_int8_keeps_an_outlier_from_spoiling_the_others(product):
    x, weight, bias = product
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    split, plain = (llm_int8_linear(x, weight, bias, threshold=t) for t in (6.0, torch.inf))
    assert outlier_features(x).tolist() == [7]
    assert quantization_error(wanted, split).relative < 0.3 * quantization_error(wanted, plain).relative
    half = llm_int8_linear(x.bfloat16(), weight, None)
    assert half.dtype == torch.bfloat16 and half.shape == (2, 5, 20)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1), st.integers(-12, 12))
def test_smoothing_leaves_the_product_as_it_is(seed: int, alpha: float, power: int):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 24, generator=g) * 10.0 ** torch.randint(-3, 4, (24,), generator=g)
    weight = torch.randn(12, 24, generator=g) * 10.0**power
    x[:, 3], weight[:, 5] = 0, 0
    factors = smoothing_factors(x.abs().amax(0), weight, alpha)
    assert factors.dtype == torch.float32 and factors.isfinite().all() and (factors > 0).all()
    assert factors[3] == factors[5] == 1
    assert factors.double().log().mean().exp().item() == pytest.approx(1, rel=1e-3)
    wanted = x.double() @ weight.double().T
    found = (x.double() / factors.double()) @ (weight.double() * factors.double()).T
    assert (found - wanted).abs().max() <= 1e-12 * (x.double().abs() @ weight.double().abs().T).max()


def test_smoothing_by_hand():
    peak, weight = torch.tensor([16.0, 1.0]), torch.tensor([[1.0, -1.0], [0.5, 0.25]])
    assert smoothing_factors(peak, weight, 0.5).tolist() == pytest.approx([2.0, 0.5])
    assert smoothing_factors(peak, weight, 1.0).tolist() == pytest.approx([4.0, 0.25])
    assert smoothing_factors(torch.zeros(2), weight).tolist() == [1, 1]
    assert smoothing_factors(peak, torch.zeros(3, 2)).tolist() == [1, 1]
    for alpha in (-0.1, 1.1, torch.nan, "a", None):
        with pytest.raises(InvalidParameter, match="alpha"):
            smoothing_factors(peak, weight, alpha)
