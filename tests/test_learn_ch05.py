"""The exercises of chapter 5: stubs fail, solutions pass, every typical mistake is told apart from the others."""

import math
from typing import ClassVar

import pytest
import torch
from exercise_checks import ExerciseChecks

from minfer_lib.learn.checks import ch05
from minfer_lib.models import memory
from minfer_lib.models.shapes import shape_config
from minfer_lib.quant import absmax

# -- how a learner might solve them ---------------------------------------------------------------------------------


def quantize_rows(weight):
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (weight / scale[:, None]).round().to(torch.int8)
    return codes, scale


def split_linear(x, weight, threshold):
    out = (x.abs() >= threshold).any(0)
    exact = x[:, out] @ weight[:, out].T
    x_codes, x_scale = quantize_rows(x[:, ~out])
    w_codes, w_scale = quantize_rows(weight[:, ~out])
    return exact + (x_codes.float() @ w_codes.float().T) * x_scale[:, None] * w_scale


def smooth(activation_peak, weight):
    return (activation_peak / weight.abs().amax(0)).sqrt()


def tokens_left(budget, layers, embedding, head, kv_bytes, int8_embeddings):
    each = 1 if int8_embeddings else 2
    left = budget - layers - each * (embedding + head)
    return max(0, int(left // kv_bytes))


def bytes_per_step(weights, way):
    if way == "bf16":
        return 2 * weights
    return weights if way == "int8 fused" else weights + 2 * weights + 2 * weights


class TestExercises(ExerciseChecks):
    chapter = ch05
    solutions: ClassVar = {f.__name__: f for f in (quantize_rows, split_linear, smooth, tokens_left, bytes_per_step)}


# -- the solutions against the package --------------------------------------------------------------------------------


@pytest.fixture
def layer():
    """(x [tokens, in], weight [out, in]) with two outlier features, and a row of zeros in the weight."""
    torch.manual_seed(0)
    x, weight = torch.randn(9, 40), torch.randn(12, 40)
    x[:, 3] *= 20
    x[2, 17] = -11.0
    weight[5] = 0.0
    return x, weight


def test_codes_and_scales_are_those_of_the_package(layer):
    codes, scale = quantize_rows(layer[1])
    quantized = absmax.absmax_quantize(layer[1], dim=-1)
    assert torch.equal(codes, quantized.values) and torch.equal(scale, quantized.scale[:, 0])


@pytest.mark.parametrize("threshold", [2.0, 6.0, 30.0, math.inf])
def test_the_split_product_is_that_of_the_package(layer, threshold):
    x, weight = layer
    expected = absmax.llm_int8_linear(x, weight, threshold=threshold)
    assert torch.allclose(split_linear(x, weight, threshold), expected, rtol=1e-4, atol=1e-4)


def test_factors_are_those_of_the_package_up_to_one_number(layer):
    x, weight = layer
    peak = x.abs().amax(0)
    ratio = smooth(peak, weight) / absmax.smoothing_factors(peak, weight)
    assert torch.allclose(ratio, ratio[0].expand(len(ratio)), rtol=1e-4)


def test_the_7b_of_the_exercise_is_the_shape_of_that_name():
    shape = memory.ModelShape.from_config(shape_config("qwen2.5-7b"), "qwen2.5-7b")
    case = next(case for case in ch05.check_tokens_left.cases if "7B" in case.about)
    _, layers, embedding, head, kv, _ = case.args
    assert kv == memory.kv_bytes_per_token(shape, 2)
    small = shape.parameters - layers - embedding - head  # norms and biases, which stay as they are
    assert 0 < small < 0.0001 * shape.parameters


def test_answers_may_be_written_in_other_ways(capsys):
    def with_a_floor(weight):
        scale = weight.abs().amax(-1).clamp(min=1e-8) / 127
        return torch.clamp(torch.round(weight / scale.unsqueeze(-1)), -127, 127).char(), scale

    def masked(x, weight, threshold):
        out = (x.abs() >= threshold).any(0)
        rest, kept = x.masked_fill(out, 0.0), weight.masked_fill(out, 0.0)
        (x_codes, x_scale), (w_codes, w_scale) = quantize_rows(rest), quantize_rows(kept)
        return (x_codes * x_scale[:, None]) @ (w_codes * w_scale[:, None]).T + (x * out) @ weight.T

    def whole_rows(x, weight, threshold):
        """Scales of the weight from whole rows, outlier columns included, as libraries that quantise once have them."""
        out = (x.abs() >= threshold).any(0)
        codes, scale = quantize_rows(weight)
        x_codes, x_scale = quantize_rows(x[:, ~out])
        return (
            x[:, out] @ weight[:, out].T
            + (x_codes.float() * x_scale[:, None]) @ (codes[:, ~out].float() * scale[:, None]).T
        )

    assert ch05.check_quantize_rows.check(with_a_floor)
    assert ch05.check_split_linear.check(masked) and ch05.check_split_linear.check(whole_rows)
    assert ch05.check_smooth.check(lambda peak, weight: peak**0.5 * weight.abs().max(dim=0).values ** -0.5)
    assert ch05.check_bytes_per_step.check(lambda w, way: w * {"bf16": 2, "int8 fused": 1}.get(way, 5))


@pytest.mark.parametrize(
    "answer",
    [
        lambda weight: 3,
        lambda weight: (weight, "scale"),
        lambda weight: (weight.to(torch.int8), torch.zeros(len(weight))),
        lambda weight: (weight.to(torch.int8), torch.full((len(weight),), torch.nan)),
        lambda weight: [],
    ],
)
def test_answers_of_any_kind_get_a_diagnosis(answer, capsys):
    assert ch05.check_quantize_rows.check(answer) is False
    assert capsys.readouterr().out.startswith("quantize_rows: not right yet, 4 of 4 cases differ.")
