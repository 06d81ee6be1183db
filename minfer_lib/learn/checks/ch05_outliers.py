"""Exercises of chapter 5 about outliers: splitting them off (LLM.int8()), moving them into the weights (SmoothQuant).

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

Rule = Callable[[torch.Tensor, float], torch.Tensor]

# -- splitting them off -----------------------------------------------------------------------------------------------


def _int8(
    x: torch.Tensor, weight: torch.Tensor, *, token: bool = True, channel: bool = True,
    peaks: torch.Tensor | None = None, round_weight: bool = True, scaled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """The int8 product; with options with one scale for all tokens or channels, or with scales taken from `peaks`."""
    source = x if peaks is None else peaks
    x_scale = source.abs().amax(1, keepdim=True) / 127 if token else source.abs().max() / 127
    w_scale = weight.abs().amax(1) / 127 if channel else weight.abs().max() / 127
    codes = (x / x_scale).round().clamp(-127, 127)
    if not round_weight:
        return codes @ weight.T * x_scale
    sums = codes @ (weight / w_scale.reshape(-1, 1)).round().T
    return sums * x_scale * w_scale if scaled else sums


def _outliers(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return (x.abs() >= threshold).any(0)  # [in]


def _split(
    rule: Rule = _outliers, *, keep: float = 1.0, left_in: bool = False, early: bool = False, **int8: bool
) -> Function:
    """The right answer, and with options the wrong ones. Outlier features are left out of the int8 part."""

    def split_linear(x: torch.Tensor, weight: torch.Tensor, threshold: float) -> torch.Tensor:
        out = rule(x, threshold)
        exact = keep * x[:, out] @ weight[:, out].T  # [tokens, out]
        if left_in:
            return exact + _int8(x, weight, **int8)
        return exact + _int8(x[:, ~out], weight[:, ~out], peaks=x if early else None, **int8)

    return split_linear


def _element_by_element(x: torch.Tensor, weight: torch.Tensor, threshold: float) -> torch.Tensor:
    large = x.abs() >= threshold
    return (x * large) @ weight.T + _int8(x * ~large, weight)


def _token_by_token(x: torch.Tensor, weight: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.cat([_split()(row, weight, threshold) for row in x[:, None]])


def _draw_split_linear(split_linear: Function) -> Any:
    """The error of the learner's product beside those of one scale, on numbers with an outlier feature."""
    from .. import plots

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 32, generator=generator), torch.randn(16, 32, generator=generator) / 6
    x[:, 5] *= 30
    exact = x @ weight.T
    size = exact.square().mean().sqrt()
    products = {
        "int8, one scale for the tensor": _int8(x, weight, token=False),
        "int8, one scale a token": _int8(x, weight),
        "int8, split by your function": torch.as_tensor(split_linear(x.clone(), weight.clone(), 6.0)),
    }
    errors = {name: float((y - exact).square().mean().sqrt() / size * 100) for name, y in products.items()}
    return plots.bars_by_engine(errors, unit="%", title="Error of a product whose feature 5 holds outliers")


def _tensor(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows)


SPLIT_LINEAR = Exercise(
    name="split_linear",
    parameters=("x", "weight", "threshold"),
    cases=(
        # scales 0.01 and 0.02: codes 127, 30 against 127, -25; 1.27 * 2.54 - 0.3 * 0.5
        Case((_tensor((1.27, 0.304)), _tensor((2.54, -0.503)), 6.0), [[3.0758]], "no outliers"),
        # feature 0 in float: 100 * 1 and -3.7 * 100, the rest as above
        Case(
            (_tensor((100.0, 1.27, 0.304)), _tensor((1.0, 2.54, -0.503), (-3.7, 12.7, 0.08)), 6.0),
            [[103.0758, -370 + 16.129 + 0.03]],
            "one outlier",
        ),
        # 3.0758 as before, and -8 * 1.003
        Case(
            (_tensor((1.27, -8.0, 0.304)), _tensor((2.54, 1.003, -0.503)), 6.0),
            [[3.0758 - 8.024]],
            "a negative outlier",
        ),
        Case((_tensor((1.27, 6.0, 0.304)), _tensor((2.54, 1.003, -0.503)), 6.0), [[3.0758 + 6.018]], "exactly 6"),
        # feature 0 is an outlier because of token 0, so that 0.234 * 1.001 of token 1 is exact too
        Case(
            (_tensor((50.0, 1.27, 0.304), (0.234, -0.254, 0.1003)), _tensor((1.001, 2.54, -0.503)), 6.0),
            [[50.05 + 3.0758], [0.234234 - 0.254 * 2.54 - 0.1 * 0.5]],
            "two tokens",
        ),
    ),
    mistakes=(
        Mistake(
            "counted twice",
            "The outlier features are in both parts, and their share is counted twice. Take them out of x and of the "
            "weight before you quantise the rest.",
            (_split(left_in=True),),
        ),
        Mistake(
            "outliers dropped",
            "Only the int8 part is in the result. Add the product of the outlier features, computed as they are.",
            (_split(keep=0.0),),
        ),
        Mistake(
            "scale too early",
            "The scales of x still come from all features, so the outlier flattens the others although it was taken "
            "out. Split first, then take the largest magnitude of what is left.",
            (_split(early=True),),
        ),
        Mistake(
            "no split",
            "That is all in int8, outliers too. Features that reach the threshold are to be multiplied in float.",
            (lambda x, w, t: _int8(x, w),),
        ),
        Mistake(
            "no magnitude",
            "A feature of -6 is as large as one of 6: compare the magnitude with the threshold.",
            (_split(lambda x, t: (x >= t).any(0)),),
        ),
        Mistake(
            "greater than",
            "A feature that reaches the threshold exactly is an outlier too: >=, not >.",
            (_split(lambda x, t: (x.abs() > t).any(0)),),
        ),
        Mistake(
            "element by element",
            "You split single numbers. A feature is split off for all tokens as soon as one of them reaches the "
            "threshold: the parts are whole columns, so that both products stay dense.",
            (_element_by_element, _token_by_token),
        ),
        Mistake(
            "every token has to reach it",
            "One token is enough to make a feature an outlier: any, not all.",
            (_split(lambda x, t: (x.abs() >= t).all(0)),),
        ),
        Mistake(
            "one scale for x",
            "Your tokens share one scale. Each has its own: the largest magnitude of its row.",
            (_split(token=False),),
        ),
        Mistake(
            "one scale for the weight",
            "Your output channels share one scale. Each row of the weight has its own.",
            (_split(channel=False),),
        ),
        Mistake(
            "the weight in float",
            "You quantised x alone. In LLM.int8() both sides of the product are codes.",
            (_split(round_weight=False),),
        ),
        Mistake(
            "nothing was rounded",
            "That is the exact product, nothing was rounded. All but the outlier features are to go through codes.",
            (lambda x, w, t: x @ w.T,),
        ),
        Mistake(
            "sums of codes",
            "The int8 part is a sum of products of codes. Multiply it by the scales of the token and of the channel.",
            (_split(scaled=False),),
        ),
    ),
    hint="With out = (x.abs() >= threshold).any(0): x[:, out] @ weight[:, out].T, plus the int8 product of ~out.",
    solved="Few columns stay in float, and the scales of all others no longer know that outliers exist.",
    draw=_draw_split_linear,
    tolerance=1e-4,
)


# -- moving them into the weights -------------------------------------------------------------------------------------


def _smooth(peak: torch.Tensor, weight: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    return peak**alpha / weight.abs().amax(0) ** (1 - alpha)


def _draw_smooth(smooth: Function) -> Any:
    from .. import plots

    generator = torch.Generator().manual_seed(1)
    peak = 0.5 + torch.rand(24, generator=generator)
    peak[7], peak[16] = 40.0, 9.0
    weight = torch.randn(24, 24, generator=generator)
    factors = torch.as_tensor(smooth(peak.clone(), weight.clone())).flatten()
    return plots.smoothing_effect(peak, weight.abs().amax(0), factors)


SMOOTH = Exercise(
    name="smooth",
    parameters=("activation_peak", "weight"),
    cases=(
        # sqrt(16 / 1), sqrt(1 / 4)
        Case((torch.tensor([16.0, 1.0]), _tensor((1.0, 4.0), (0.5, 2.0))), [4.0, 0.5], "two features"),
        # sqrt(9 / 1), sqrt(4 / 0.25), sqrt(1 / 1): the largest magnitudes are negative numbers
        Case((torch.tensor([9.0, 4.0, 1.0]), _tensor((-1.0, 0.2, 0.5), (0.3, -0.25, -1.0))), [3.0, 4.0, 1.0], "2 x 3"),
        # sqrt(100 / 4)
        Case((torch.tensor([100.0]), _tensor((1.0,), (-4.0,), (2.0,))), [5.0], "one feature"),
    ),
    mistakes=(
        Mistake(
            "upside down",
            "Yours is the inverse: activations are divided by the factors, so a feature with large activations needs a "
            "large one.",
            (lambda p, w: 1 / _smooth(p, w),),
        ),
        Mistake(
            "rows for columns",
            "You took the largest weight of each output channel (a row). Factors belong to input features: the largest "
            "magnitude of each column, amax over dimension 0.",
            (lambda p, w: (p / w.abs().amax(1)).sqrt(),),
        ),
        Mistake(
            "no square root",
            "Without the square root all of the difficulty goes over to the weights. With alpha = 0.5 both sides get "
            "the same share.",
            (lambda p, w: p / w.abs().amax(0),),
        ),
        Mistake(
            "no magnitude",
            "The largest magnitude of a column may be a negative number: abs() before amax.",
            (lambda p, w: (p / w.amax(0)).sqrt(),),
        ),
        Mistake(
            "activations alone",
            "The weights are missing: a feature whose weights are large already can take less. Divide by the largest "
            "magnitude of its column.",
            (lambda p, w: p.sqrt(), lambda p, w: p),
        ),
        Mistake(
            "multiplied",
            "You multiplied the two peaks. What the factor balances is their ratio.",
            (lambda p, w: (p * w.abs().amax(0)).sqrt(),),
        ),
        Mistake(
            "one for the tensor",
            "You took the largest weight of the whole matrix. Each input feature has its own column.",
            (lambda p, w: (p / w.abs().max()).sqrt(),),
        ),
    ),
    hint="The square root of activation_peak / weight.abs().amax(0).",
    solved="Divide activations by the factors and multiply the columns: both peaks become the root of their product.",
    draw=_draw_smooth,
)
