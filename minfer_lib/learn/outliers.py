"""Outlier features of a real layer under a slider: which features a threshold splits off, and what that does to the
error of the product.

Invariant: the products are those of `absmax`, on the activations and the weight that were given; the slider changes
nothing but the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..errors import InvalidParameter
from ..quant.absmax import absmax_quantize, llm_int8_linear, outlier_features, quantization_error
from .plots.channels import draw_peaks
from .plots.numbers import plain
from .sliders import Gallery, Slider, explore
from .style import DATA, UNUSED, Picture, canvas, colour_of, drawing, headline, quiet

PAPER = 6.0  # the threshold of Dettmers et al. 2022


def product_errors(activations: torch.Tensor, weight: torch.Tensor, threshold: float) -> dict[str, float]:
    """Error of activations @ weight.T in int8, root mean square relative to that of the exact product, in three ways.

    activations: [tokens, features]; weight: [out, features]. The weight has a scale per output channel in all three:
    one scale for all activations, one per token, one per token for the features that stay below the threshold.
    """
    x, weight = activations.detach().float(), weight.detach().float()
    exact = x @ weight.T  # [tokens, out]
    tensor = absmax_quantize(x).dequantize() @ absmax_quantize(weight, dim=-1).dequantize().T
    products = {
        "one scale for the tensor": tensor,
        "one scale a token": llm_int8_linear(x, weight, threshold=math.inf),
        "one a token, outliers split": llm_int8_linear(x, weight, threshold=threshold),
    }
    return {name: quantization_error(exact, product).relative for name, product in products.items()}


@drawing
def draw_outliers(activations: torch.Tensor, weight: torch.Tensor, threshold: float) -> Picture:
    """The peaks of all features with the threshold across, and below them the error of the product in three ways."""
    features = activations.shape[-1]
    count = len(outlier_features(activations, threshold))
    errors = product_errors(activations, weight, threshold)
    figure, (above, below) = canvas(7.0, 3.9, rows=2, height_ratios=[2.3, 1])
    draw_peaks(above, abs(plain(activations)).max(0), threshold, label_top=3)
    colours = (UNUSED, DATA, colour_of("int8"))
    longest = max(errors.values()) or 1.0
    for row, ((_, error), colour) in enumerate(zip(errors.items(), colours, strict=True)):
        below.barh(row, error, height=0.66, color=colour)
        below.text(error + 0.012 * longest, row, f"{error:.2%}", va="center", size=9)
    below.set_yticks(range(len(errors)), list(errors))
    below.set_ylim(len(errors) - 0.5, -0.5)
    below.set_xlim(0, longest * 1.15)
    below.set_xticks([])
    below.set_xlabel("error of the product, relative")
    below.tick_params(axis="y", length=0)
    quiet(below, spines=("left",))
    _, unsplit, split = errors.values()
    stay = f"{count} of {features} features ({count / features:.1%}) {'stays' if count == 1 else 'stay'} in float"
    headline(figure, f"{stay}: error {split:.2%}, without a split {unsplit:.2%}")
    figure.alt = f"threshold {threshold:g}: {stay}; error " + ", ".join(
        f"{error:.2%} ({name})" for name, error in errors.items()
    )
    return figure


def outlier_explorer(activations: torch.Tensor, weight: torch.Tensor) -> Gallery | None:
    """Chapter 5: the threshold of LLM.int8() on a real layer, with the features that it splits off and the error left.

    activations: [tokens, features], the input of a layer; weight: [out, features], that of the layer. The static
    picture shows the threshold at which few features stay in float, and one at which a tenth of them do. Raises
    `InvalidParameter` for shapes that do not belong together.
    """
    if activations.dim() != 2 or weight.dim() != 2 or activations.shape[1] != weight.shape[1]:
        raise InvalidParameter(
            f"activations {list(activations.shape)} and weight {list(weight.shape)} do not belong together: they are "
            "to be [tokens, features] and [out, features], the input and the weight of the same layer."
        )
    x, matrix = activations.detach().float().cpu(), weight.detach().float().cpu()
    step, few, tenth = telling_thresholds(x)
    most = step * math.ceil(1.1 * float(x.abs().max()) / step)

    def draw(threshold: float) -> Picture:
        return draw_outliers(x, matrix, threshold)

    return explore(
        draw,
        threshold=Slider(step, most, step, few),
        positions=[{"threshold": few}, {"threshold": tenth}] if few > tenth else [{"threshold": few}],
    )


def telling_thresholds(activations: torch.Tensor) -> tuple[float, float, float]:
    """(step of the slider, threshold that few features reach, threshold that about a tenth of them reach).

    Few: the paper's 6 if between one feature and a twentieth of them reach it, else what one in 200 reaches.
    """
    peaks = activations.abs().amax(0)
    largest = float(peaks.max())
    if not 0 < largest < math.inf:
        raise InvalidParameter("These activations are all zero, or hold NaN or infinity: there are no outliers to see.")
    power = 10.0 ** math.floor(math.log10(largest / 80))
    step = next(s for s in (1, 2, 2.5, 5, 10) if s * power >= largest / 80) * power

    def reached_by(share: float, rounded: Callable[[float], int]) -> float:
        rank = max(1, round(share * len(peaks)))
        return round(step * max(1, rounded(float(peaks.sort(descending=True).values[rank - 1]) / step)), 10)

    reach = float((peaks >= PAPER).float().mean())
    on_grid = math.isclose(PAPER / step, round(PAPER / step))
    few = PAPER if 0 < reach <= 0.05 and on_grid else reached_by(0.005, math.floor)
    return step, few, reached_by(0.1, math.ceil)
