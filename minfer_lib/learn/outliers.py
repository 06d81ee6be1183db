"""Outlier features of a real layer under a slider: which features a threshold splits off, and what that does to the
error of the product.

Invariant: the products are those of `absmax`, on the activations and the weight that were given; the slider changes
nothing but the threshold.
"""

from __future__ import annotations

import math

import torch

from ..errors import InvalidParameter
from ..quant.absmax import absmax_quantize, llm_int8_linear, outlier_features, quantization_error
from .plots.channels import draw_peaks
from .plots.parts import finished, plain, told_bars
from .sliders import Gallery, Slider, explore
from .style import DATA, UNUSED, Picture, canvas, colour_of, drawing

PAPER = 6.0  # the threshold of Dettmers et al. 2022


def product_errors(activations: torch.Tensor, weight: torch.Tensor, threshold: float) -> dict[str, float]:
    """Error of activations @ weight.T in int8, root mean square relative to that of the exact product, in three ways.

    activations: [tokens, features]; weight: [out, features]. The weight has a scale per output channel in all three:
    one scale for all activations, one per token, one per token for the features that stay below the threshold.
    """
    x, weight = activations.detach().float(), weight.detach().float()
    exact = x @ weight.T  # [tokens, out]
    products = {
        "one scale for the tensor": absmax_quantize(x).dequantize() @ absmax_quantize(weight, dim=-1).dequantize().T,
        "one scale a token": llm_int8_linear(x, weight, threshold=math.inf),
        "one a token, outliers split": llm_int8_linear(x, weight, threshold=threshold),
    }
    return {name: quantization_error(exact, product).relative for name, product in products.items()}


@drawing
def draw_outliers(activations: torch.Tensor, weight: torch.Tensor, threshold: float) -> Picture:
    """The peaks of all features with the threshold across, and below them the error of the product in three ways."""
    features, count = activations.shape[-1], len(outlier_features(activations, threshold))
    errors = product_errors(activations, weight, threshold)
    figure, (above, below) = canvas(7.0, 3.9, rows=2, height_ratios=[2.3, 1])
    draw_peaks(above, abs(plain(activations)).max(0), threshold, label_top=3)
    colours = (UNUSED, DATA, colour_of("int8"))
    bars = {name: (error, colour) for (name, error), colour in zip(errors.items(), colours, strict=True)}
    told_bars(below, bars, lambda error: f"{error:.2%}", room=0.15)
    below.set_xlabel("error of the product, relative")
    _, unsplit, split = errors.values()
    stay = f"{count} of {features} features ({count / features:.1%}) {'stays' if count == 1 else 'stay'} in float"
    caption = f"{stay}: error {split:.2%}, without a split {unsplit:.2%}"
    told = ", ".join(f"{error:.2%} ({name})" for name, error in errors.items())
    return finished(figure, caption, alt=f"threshold {threshold:g}: {stay}; error {told}")


def outlier_explorer(activations: torch.Tensor, weight: torch.Tensor) -> Gallery | None:
    """Chapter 5: the threshold of LLM.int8() on a real layer, with the features that it splits off and the error left.

    activations: [tokens, features], the input of a layer; weight: [out, features], that of the layer. The static
    picture shows the threshold of the paper (or what one feature in 200 reaches, where that is nothing to see) and one
    that a tenth of the features reach. Raises `InvalidParameter` for shapes that do not belong together.
    """
    if activations.dim() != 2 or weight.dim() != 2 or activations.shape[1] != weight.shape[1]:
        raise InvalidParameter(
            f"activations {list(activations.shape)} and weight {list(weight.shape)} do not belong together: they are "
            "to be [tokens, features] and [out, features], the input and the weight of the same layer."
        )
    x, matrix = activations.detach().float().cpu(), weight.detach().float().cpu()
    peaks = x.abs().amax(0).sort(descending=True).values
    largest = float(peaks[0])
    if not 0 < largest < math.inf:
        raise InvalidParameter("These activations are all zero, or hold NaN or infinity: there are no outliers to see.")
    step = 10.0 ** math.floor(math.log10(largest / 20))  # 20 to 200 steps

    def reached_by(share: float) -> float:
        return round(step * max(1, math.floor(float(peaks[round(share * len(peaks))]) / step)), 10)

    paper_is_seen = 0 < float((peaks >= PAPER).float().mean()) <= 0.05 and step <= 1
    few = PAPER if paper_is_seen else reached_by(0.005)
    return explore(
        lambda threshold: draw_outliers(x, matrix, threshold),
        threshold=Slider(step, step * math.ceil(1.05 * largest / step), step, few),
        positions=[{"threshold": threshold} for threshold in dict.fromkeys((few, reached_by(0.1)))],
    )
