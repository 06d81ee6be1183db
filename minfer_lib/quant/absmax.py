"""Quantisation to eight bits as arithmetic: a scale, a rounding, and what both cost.

Invariant: a code is an integer of one byte, and `scale * (code - zero_point)` is the number that it stands for; no
number is further from its code than half a scale, except one that lies outside of the grid on purpose.

Everything here is plain torch and says what happens rather than being fast; `Int8Linear` computes with the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from ..errors import InvalidParameter

CODES = 127  # the largest code of a symmetric grid; -128 is left out, so that both sides reach equally far
# Below the normal range of float32 a scale would lose its digits, or be 0; such rows are smaller than 1e-35 throughout.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Two neighbours in a channel whose codes add up to no more than this cannot overflow 16 bits: 255 x 128 < 2^15
PAIR_LIMIT = 128


@dataclass(frozen=True)
class Quantized:
    """A tensor in eight bits.

    values: int8. scale: float32, one number or one for each row, broadcastable to `values`. zero_point: int32 of the
    shape of `scale`, the code that stands for 0; None for a symmetric grid, where that is code 0.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers that the codes stand for, in the shape of `values`."""
        codes = self.values.float() if self.zero_point is None else (self.values.int() - self.zero_point).float()
        return (codes * self.scale).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        parts = [self.values, self.scale] + ([] if self.zero_point is None else [self.zero_point])
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True)
class QuantizationError:
    """How far a tensor and its quantised twin are apart.

    max_abs, mean_abs: of the differences. relative: root mean square of the differences over that of the tensor.
    """

    max_abs: float
    mean_abs: float
    relative: float


def absmax_quantize(x: torch.Tensor, dim: int | None = None, bits: int = 8) -> Quantized:
    """Symmetric quantisation: the largest magnitude becomes the largest code, 127 with eight bits.

    x: any shape, any floating dtype. dim: None gives one scale for the tensor; -1 gives one for each row, which is one
    per output channel for a weight [out, in] and one per token for activations [tokens, features]. bits: 2 to 8.

    Raises `InvalidParameter` for values that are not finite, and for what is not possible.
    """
    x = _floats(x)
    if not isinstance(bits, int) or isinstance(bits, bool) or not 2 <= bits <= 8:
        raise InvalidParameter(f"bits={bits!r} is not possible: a code of one byte has 2 to 8 of them.")
    largest = 2 ** (bits - 1) - 1
    scale = _usable(_peak(x, dim) / largest)
    return Quantized((x / scale).round().clamp(-largest, largest).to(torch.int8), scale)


def zero_point_quantize(x: torch.Tensor, dim: int | None = None) -> Quantized:
    """Asymmetric quantisation: the smallest value becomes code -128 and the largest 127, wherever 0 then falls.

    All 256 codes are used for values of one sign too, at the price of an offset in every product. The range always
    takes 0 in, so that 0 stays exactly 0. Arguments and errors are those of `absmax_quantize`.
    """
    x = _floats(x)
    low, high = -_peak((-x).clamp(min=0.0), dim), _peak(x.clamp(min=0.0), dim)  # 0 is always within
    scale = _usable((high / 255) - (low / 255))
    zero_point = (-128 - low / scale).round().clamp(-128, 127)
    values = ((x / scale).round() + zero_point).clamp(-128, 127)
    return Quantized(values.to(torch.int8), scale, zero_point.to(torch.int32))


def pair_safe_quantize(weight: torch.Tensor) -> Quantized:
    """Absmax per output channel, with scales just large enough for the integer units of any CPU.

    x86 CPUs without VNNI multiply bytes and add two neighbouring products in 16 bits, cutting off what does not
    fit. So the scale of a channel is also as large as the largest sum of two neighbours asks for, and the sum of
    their codes never passes 128. Most channels lose less than half a bit to it.

    weight: [out, in], floating. Raises `InvalidParameter` for values that are not finite.
    """
    weight = _floats(weight)
    # divided first, so that the sum of two large numbers stays one; the 1 is for the two roundings
    sizes = pad(weight.abs() / (PAIR_LIMIT - 1), (0, weight.shape[-1] % 2))
    pairs = sizes.unflatten(-1, (-1, 2)).sum(-1)
    largest = torch.maximum(_peak(weight, -1) / CODES, _peak(pairs, -1))
    scale = _usable(largest)
    return Quantized((weight / scale).round().clamp(-CODES, CODES).to(torch.int8), scale)


def is_pair_safe(values: torch.Tensor) -> bool:
    """Whether codes [out, in] can be multiplied in 16 bits without being cut off."""
    sizes = pad(values.to(torch.int16).abs(), (0, values.shape[-1] % 2))
    return values.numel() == 0 or int(sizes.unflatten(-1, (-1, 2)).sum(-1).max()) <= PAIR_LIMIT


def quantization_error(x: torch.Tensor, quantized: Quantized | torch.Tensor) -> QuantizationError:
    """Compares a tensor with its quantised twin, or with any other tensor of its shape."""
    other = quantized.dequantize() if isinstance(quantized, Quantized) else quantized
    if x.shape != other.shape:
        raise InvalidParameter(f"Shapes {list(x.shape)} and {list(other.shape)} were given: they must be the same.")
    if x.numel() == 0:
        return QuantizationError(0.0, 0.0, 0.0)
    x = x.detach().double()
    error = (x - other.detach().double()).abs()
    size = x.square().mean().sqrt().item()
    rms = error.square().mean().sqrt().item()
    return QuantizationError(error.max().item(), error.mean().item(), rms / size if size else float(rms > 0))


def outlier_features(x: torch.Tensor, threshold: float = 6.0) -> torch.Tensor:
    """Indices of the features (last dimension of x) in which any token reaches the threshold in magnitude."""
    if not threshold > 0:
        raise InvalidParameter(f"threshold={threshold!r} is not possible: it must be above 0 (infinity: no outliers).")
    return (x.abs().reshape(-1, x.shape[-1]) >= threshold).any(0).nonzero()[:, 0]


def llm_int8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, threshold: float = 6.0
) -> torch.Tensor:
    """LLM.int8() by hand: the features that hold outliers in full precision, all others in int8.

    x: [..., in]; weight: [out, in]; bias: [out] or None; returns [..., out] in x's dtype. The int8 part has a scale per
    token and one per output channel. Source: Dettmers et al. 2022 (arXiv 2208.07339), figure 2.
    """
    outliers = outlier_features(x, threshold)
    regular = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
    regular[outliers] = False
    tokens = absmax_quantize(x[..., regular], dim=-1) if regular.any() else None
    result = linear(x[..., outliers], weight[:, outliers].to(x.dtype)).float()
    if tokens is not None:
        channels = absmax_quantize(weight[:, regular], dim=-1)
        # float64 holds every sum of products of codes exactly, on any device
        sums = tokens.values.double() @ channels.values.double().T
        result = result + (sums * tokens.scale.double() * channels.scale[:, 0].double()).float()
    return (result if bias is None else result + bias.float()).to(x.dtype)


def smoothing_factors(activation_peak: torch.Tensor, weight: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """SmoothQuant's factors: dividing activations and multiplying weights by them leaves the product as it is.

    activation_peak: [in], largest magnitude of each input feature over some text. weight: [out, in] (all matrices that
    read this input, one below the other). alpha: how much of the difficulty goes over to the weights; 0 none of what
    the activations bring, 1 all. Returns float32 [in], geometric mean 1. Source: Xiao et al. 2023 (arXiv 2211.10438),
    equation 4.
    """
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise InvalidParameter(f"alpha={alpha!r} is not possible: it must be from 0 to 1.")
    activation, channel = activation_peak.float(), weight.float().abs().amax(0)
    # a feature that is never used, on either side, has nothing to balance
    used = (activation > 0) & (channel > 0)
    ratio = alpha * activation.clamp(min=1e-30).log() - (1 - alpha) * channel.clamp(min=1e-30).log()
    if not used.any():
        return torch.ones_like(activation)
    return torch.where(used, (ratio - ratio[used].mean()).exp(), 1.0).clamp(1e-6, 1e6)


def _floats(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise InvalidParameter(f"A tensor of {x.dtype} was given: quantisation begins with floating-point numbers.")
    return x.detach().float()


def _peak(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Largest magnitude, along a dimension that is kept, or of all."""
    if x.numel() == 0:
        shape = [] if dim is None else [1 if i == dim % x.dim() else size for i, size in enumerate(x.shape)]
        return x.new_zeros(shape)
    peak = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return peak


def _usable(scale: torch.Tensor) -> torch.Tensor:
    """1 in place of a scale too small to divide by. Raises `InvalidParameter` for one that is not finite."""
    if not scale.isfinite().all():
        raise InvalidParameter(
            "The tensor holds NaN or infinity, which no grid of codes can reach. Find out where they come from "
            "(torch.isfinite shows them) before you quantise it."
        )
    return torch.where(scale < SMALLEST_SCALE, 1.0, scale)
