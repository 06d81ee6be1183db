"""Exercise of chapter 5 about absmax quantisation with a scale for each output channel.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake, Outcome

Codes = tuple[torch.Tensor, torch.Tensor]


def _wrapped(codes: torch.Tensor) -> torch.Tensor:
    """What becomes of integers that one byte cannot hold: 128 turns into -128."""
    return ((codes + 128) % 256 - 128).to(torch.int8)


def _rows(
    weight: torch.Tensor, *, largest: float = 127, peak: Callable[[torch.Tensor], torch.Tensor] | None = None,
    round_: Callable[[torch.Tensor], torch.Tensor] = torch.round, clamp: bool = True,
) -> Codes:  # fmt: skip
    """The right answer, and with other options the wrong ones. `peak` gives the largest magnitude [out] of each row."""
    top = weight.abs().amax(1) if peak is None else peak(weight)
    scale = torch.where(top == 0, 1.0, top / largest)
    codes = round_(weight / scale[:, None])
    return (codes.clamp(-127, 127).to(torch.int8) if clamp else _wrapped(codes)), scale


def _one_scale(weight: torch.Tensor) -> Codes:
    codes, scale = _rows(weight, peak=lambda w: w.abs().max().expand(len(w)))
    return codes, scale[0]


def _per_column(weight: torch.Tensor) -> Codes:
    codes, scale = _rows(weight.T)
    return codes.T, scale


def _scale_upside_down(weight: torch.Tensor) -> Codes:
    codes, scale = _rows(weight)
    return codes, 1 / scale


def _no_zero_rows(weight: torch.Tensor, still_nan: bool) -> Codes:
    """Dividing by a scale of 0; as an integer a NaN may be anything, often 0."""
    scale = weight.abs().amax(1) / 127
    codes = torch.round(weight / scale[:, None])
    return (codes if still_nan else codes.nan_to_num(0.0).to(torch.int8)), scale


def _still_floats(weight: torch.Tensor) -> Codes:
    codes, scale = _rows(weight)
    return codes.float(), scale


def _swapped(weight: torch.Tensor) -> Codes:
    return _rows(weight)[::-1]


def _kept_dimension(weight: torch.Tensor) -> Codes:
    codes, scale = _rows(weight)
    return codes, scale[:, None]


def _draw_quantize_rows(quantize_rows: Function) -> Any:
    from ...quant.absmax import Quantized
    from .. import plots

    weight = torch.tensor([[0.9, -0.42, 0.07, 0.31], [0.02, 0.013, -0.05, 0.031], [0.0] * 4, [-2.4, 1.1, 0.6, -0.2]])
    codes, scale = (torch.as_tensor(part) for part in quantize_rows(weight.clone()))
    quantized = Quantized(codes, scale.float().reshape(-1, 1) if scale.numel() > 1 else scale.float())
    error = (quantized.dequantize() - weight).abs().max()
    return plots.matrix_steps(weight, quantized, title=f"Your codes and scales: largest error {error:.2g}")


@dataclass(frozen=True)
class _AnyScaleForZeros(Exercise):
    """The scale of a row of zeros may be any number above 0, and codes have to be bytes."""

    def _right(self, outcome: Outcome, case: Case) -> bool:
        value = outcome.value
        if outcome.error is not None or not isinstance(value, tuple | list) or len(value) != 2:
            return False
        codes, scale = value
        if getattr(codes, "dtype", torch.int8) != torch.int8:
            return False
        (weight,), (expected, scales) = case.args, case.expected
        try:
            given = torch.as_tensor(scale, dtype=torch.float64)
            if given.shape != (len(weight),) or not bool((given > 0).all() and given.isfinite().all()):
                return False
            zero = ~weight.any(1)
            scales = torch.where(zero, given, torch.tensor(scales, dtype=torch.float64))
        except (TypeError, ValueError, RuntimeError):
            return False
        return Outcome((codes, given)).same_as(Outcome((expected, scales.tolist())), self.tolerance)


QUANTIZE_ROWS = _AnyScaleForZeros(
    name="quantize_rows",
    parameters=("weight",),
    cases=(
        # 1.27 / 127 = 0.01
        Case((torch.tensor([[1.27, -0.5, 0.038]]),), ([[127, -50, 4]], [0.01]), "one row"),
        # scales 0.01 and 0.002, where the largest magnitude is a negative number
        Case((torch.tensor([[0.3, 1.27], [-0.254, 0.1]]),), ([[30, 127], [-127, 50]], [0.01, 0.002]), "two rows"),
        # scales 0.02 and 1: the row of 127 must not flatten the other; 63.7 rounds to 64, -2.8 to -3
        Case(
            (torch.tensor([[2.54, -0.056, 1.274], [127.0, -63.7, 2.2]]),),
            ([[127, -3, 64], [127, -64, 2]], [0.02, 1.0]),
            "one row 50 times the other",
        ),
        Case((torch.tensor([[0.0, 0.0], [0.254, -0.1]]),), ([[0, 0], [127, -50]], [1.0, 0.002]), "a row of zeros"),
    ),
    mistakes=(
        Mistake(
            "one scale for the tensor",
            "All rows share one scale in yours, and the largest of them decides for all. Take the largest magnitude of "
            "each row: amax over dimension 1.",
            (_one_scale, lambda w: _rows(w, peak=lambda w: w.abs().max().expand(len(w)))),
        ),
        Mistake(
            "per column",
            "Your scales belong to columns, which are input features. An output channel is a row of the weight: amax "
            "over dimension 1, the inputs.",
            (_per_column,),
        ),
        Mistake(
            "truncated",
            "You cut off what stands behind the point. `.to(torch.int8)` does that by itself: round first, and the "
            "error is at most half a step.",
            (lambda w: _rows(w, round_=torch.trunc), lambda w: _rows(w, round_=torch.floor)),
        ),
        Mistake(
            "128",
            "A byte with a sign ends at 127. With 128 as the largest code, the largest weight becomes 128, which wraps "
            "around to -128 (or is clamped, and then every scale is too small).",
            (lambda w: _rows(w, largest=128, clamp=False), lambda w: _rows(w, largest=128)),
        ),
        Mistake(
            "255 steps",
            "You divided by 255, as for bytes without a sign. The grid has 127 steps on each side of zero.",
            (lambda w: _rows(w, largest=255, clamp=False), lambda w: _rows(w, largest=255)),
        ),
        Mistake(
            "no magnitude",
            "You took the largest value of a row, and its largest magnitude may be a negative number: abs() first.",
            (
                lambda w: _rows(w, peak=lambda w: w.amax(1)),
                lambda w: _rows(w, peak=lambda w: w.amax(1), clamp=False),
            ),
        ),
        Mistake(
            "a row of zeros",
            "A row of zeros has the scale 0, and 0 / 0 is NaN; what a NaN becomes as an integer is left to the "
            "processor. Give such a row any scale above 0: its codes are 0 then.",
            (lambda w: _no_zero_rows(w, False), lambda w: _no_zero_rows(w, True)),
        ),
        Mistake(
            "scale upside down",
            "Your codes are right, and your scale is what you multiplied by. Asked for is what brings codes back: "
            "codes * scale is the weight.",
            (_scale_upside_down,),
        ),
        Mistake(
            "another shape",
            "The numbers are right. Asked for is one scale for each row in a flat tensor, [out]: squeeze the dimension "
            "that keepdim has kept.",
            (_kept_dimension,),
        ),
        Mistake(
            "still floats",
            "The codes are right, but each of them still takes four bytes: end with .to(torch.int8).",
            (_still_floats,),
        ),
        Mistake("swapped", "The other way round: first the codes, then the scales.", (_swapped,)),
    ),
    hint="scale = largest magnitude of each row / 127; codes = (weight / scale[:, None]).round().to(torch.int8).",
    solved="No weight is further from its code than half of its own row's step, however large other rows are.",
    draw=_draw_quantize_rows,
)
