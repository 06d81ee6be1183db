"""Exercises of chapter 5, INT8: a scale for each row, two ways around outliers, bytes of a step, room for the cache.

Invariant: expected values were worked out by hand, as the comments say; none comes from the package or the solution.
"""

from __future__ import annotations

from typing import Any

import torch

from ..exercises import Case, Exercise, Function, Mistake

Tensor = torch.Tensor
Codes = tuple[Tensor, Tensor]


def _case(args: tuple, expected: Any, about: str) -> Case:
    """A case whose tensors are written as lists."""
    return Case(
        tuple(torch.tensor(a, dtype=torch.float32) if isinstance(a, list) else a for a in args), expected, about
    )


# -- a scale for each row ---------------------------------------------------------------------------------------------


def quantize_rows(weight: Tensor) -> Codes:
    """(codes, scale) of absmax quantisation with a scale for each output channel.

    weight: [out, in]. codes: int8 [out, in], from -127 to 127. scale: [out], such that codes * scale[:, None] is the
    weight again, up to rounding. A row of zeros gets codes of 0 and any scale above 0.
    """
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (weight / scale[:, None]).round().to(torch.int8)
    return codes, scale


def _run_quantize_rows(answer: Function, weight: Tensor) -> Any:
    """The codes and scales, with 1 for any scale above 0 of a row of zeros; and the dtype, as codes have to be int8."""
    result = answer(weight)
    try:
        codes, scale = result
        if scale.shape == (len(weight),):
            zeros = (weight == 0).all(1) & (scale > 0) & scale.isfinite()
            scale = torch.where(zeros, 1.0, scale)
        return codes, scale, str(codes.dtype)
    except (TypeError, ValueError, AttributeError):  # no pair of tensors: the diagnosis shows it as it is
        return result


def _one_scale(weight: Tensor) -> Codes:
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale


def _codes(weight: Tensor, scale: Tensor, largest: int = 128) -> Codes:
    return (weight / scale[:, None]).round().clamp(-largest, largest).to(torch.int8), scale


def _per_column(weight: Tensor) -> Codes:
    codes, scale = quantize_rows(weight.T)
    return codes.T, scale


def _truncated(weight: Tensor) -> Codes:
    _, scale = quantize_rows(weight)
    return (weight / scale[:, None]).to(torch.int8), scale


def _draw_quantize_rows(quantize_rows: Function) -> Any:
    from ...quant.absmax import Quantized
    from .. import plots

    weight = torch.tensor([[0.9, -0.42, 0.07, 0.31], [0.02, 0.013, -0.05, 0.031], [0.0] * 4, [-2.4, 1.1, 0.6, -0.2]])
    codes, scale = quantize_rows(weight.clone())
    quantized = Quantized(codes, scale.reshape(-1, 1))
    error = (quantized.dequantize() - weight).abs().max()
    return plots.matrix_steps(weight, quantized, title=f"Your codes and scales: largest error {error:.2g}")


INT8 = str(torch.int8)
check_quantize_rows = Exercise(
    quantize_rows,
    cases=(
        # 1.27 / 127 = 0.01
        _case(([[1.27, -0.5, 0.038]],), ([[127, -50, 4]], [0.01], INT8), "one row"),
        # scales 0.01 and 0.002, where the largest magnitude is a negative number
        _case(([[0.3, 1.27], [-0.254, 0.1]],), ([[30, 127], [-127, 50]], [0.01, 0.002], INT8), "two rows"),
        # scales 0.02 and 1: the row of 127 must not flatten the other; 63.7 rounds to 64, -2.8 to -3
        _case(
            ([[2.54, -0.056, 1.274], [127, -63.7, 2.2]],),
            ([[127, -3, 64], [127, -64, 2]], [0.02, 1.0], INT8),
            "one row 50 times the other",
        ),
        _case(([[0, 0], [0.254, -0.1]],), ([[0, 0], [127, -50]], [1.0, 0.002], INT8), "a row of zeros"),
    ),
    mistakes=(
        Mistake(
            "All rows share one scale in yours, and the largest of them decides for all. Take the largest magnitude of "
            "each row: amax over dimension 1.",
            _one_scale,
            lambda weight: (_one_scale(weight)[0], _one_scale(weight)[1].expand(len(weight))),
        ),
        Mistake(
            "Your scales belong to columns, which are input features. An output channel is a row of the weight: amax "
            "over dimension 1, the inputs.",
            _per_column,
        ),
        Mistake(
            "You cut off what stands behind the point: `.to(torch.int8)` does that by itself. Round first, and the "
            "error is at most half a step.",
            _truncated,
        ),
        Mistake(
            "A byte with a sign ends at 127. With 128 as the largest code, the largest weight becomes 128, which wraps "
            "around to -128 (or is clamped, and then every scale is too small).",
            lambda weight: _codes(weight, quantize_rows(weight)[1] * 127 / 128),
            lambda weight: _codes(weight, quantize_rows(weight)[1] * 127 / 128, largest=127),
        ),
        Mistake(
            "A row of zeros has the scale 0, and 0 / 0 is NaN; what a NaN becomes as an integer is left to the "
            "processor. Give such a row any scale above 0: its codes are 0 then.",
            lambda weight: _codes(weight, weight.abs().amax(1) / 127),
        ),
    ),
    hints=(
        "Over which dimension do you take the largest magnitude if each output channel is to have its own? And what "
        "if that is 0?",
        "The scale is the largest magnitude of the row over 127. Divide each row by its scale, round, then convert.",
    ),
    solved="No weight is further from its code than half of its own row's step, however large other rows are.",
    draw=_draw_quantize_rows,
    run=_run_quantize_rows,
)


# -- splitting outliers off -------------------------------------------------------------------------------------------


def split_linear(x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    """x times weight, transposed, as LLM.int8() does it.

    x: [tokens, in]; weight: [out, in]; result: [tokens, out]. Features of which any token reaches the threshold in
    magnitude are multiplied as they are. All others in int8: a scale per token for x, one per output channel for the
    weight.
    """
    outlier = (x.abs() >= threshold).any(0)  # [in]
    exact = x[:, outlier] @ weight[:, outlier].T
    x_codes, x_scale = quantize_rows(x[:, ~outlier])
    w_codes, w_scale = quantize_rows(weight[:, ~outlier])
    return exact + (x_codes.float() @ w_codes.float().T) * x_scale[:, None] * w_scale


def _rounded(matrix: Tensor) -> Tensor:
    """What int8 makes of a matrix, with a scale for each row."""
    codes, scale = quantize_rows(matrix)
    return codes * scale[:, None]


def _scales_first(x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    outlier = (x.abs() >= threshold).any(0)
    return x[:, outlier] @ weight[:, outlier].T + _rounded(x)[:, ~outlier] @ _rounded(weight)[:, ~outlier].T


def _counted_twice(x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    outlier = (x.abs() >= threshold).any(0)
    return x[:, outlier] @ weight[:, outlier].T + _rounded(x) @ _rounded(weight).T


def _no_magnitude(x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    outlier = (x >= threshold).any(0)
    return x[:, outlier] @ weight[:, outlier].T + _rounded(x[:, ~outlier]) @ _rounded(weight[:, ~outlier]).T


def _element_by_element(x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    large = x.abs() >= threshold
    return (x * large) @ weight.T + _rounded(x * ~large) @ _rounded(weight).T


def _draw_split_linear(split_linear: Function) -> Any:
    """The error of the reader's product beside those of one scale, on numbers with an outlier feature."""
    from .. import plots

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 32, generator=generator), torch.randn(16, 32, generator=generator) / 6
    x[:, 5] *= 30
    exact = x @ weight.T
    products = {
        "int8, one scale for the tensor": _rounded(x.reshape(1, -1)).reshape(x.shape) @ _rounded(weight).T,
        "int8, one scale per token": _rounded(x) @ _rounded(weight).T,
        "int8, split by your function": split_linear(x.clone(), weight.clone(), 6.0),
    }
    errors = {name: float((y - exact).norm() / exact.norm() * 100) for name, y in products.items()}
    return plots.bars_by_engine(errors, unit="%", title="Error of a product whose feature 5 holds outliers")


check_split_linear = Exercise(
    split_linear,
    cases=(
        # scales 0.01 and 0.02: codes 127, 30 against 127, -25; 1.27 * 2.54 - 0.3 * 0.5
        _case(([[1.27, 0.304]], [[2.54, -0.503]], 6.0), [[3.0758]], "no outliers"),
        # feature 0 in float: 100 * 1 and -3.7 * 100; the rest as above, and 1.27 * 12.7 + 0.3 * 0.1
        _case(
            ([[100, 1.27, 0.304]], [[1, 2.54, -0.503], [-3.7, 12.7, 0.08]], 6.0),
            [[100 + 3.0758, -370 + 16.159]],
            "one outlier",
        ),
        # 3.0758 as before, and -8 * 1.003
        _case(([[1.27, -8, 0.304]], [[2.54, 1.003, -0.503]], 6.0), [[3.0758 - 8.024]], "a negative outlier"),
        _case(([[1.27, 6, 0.304]], [[2.54, 1.003, -0.503]], 6.0), [[3.0758 + 6.018]], "exactly 6"),
        # feature 0 is an outlier because of token 0, so that 0.234 * 1.001 of token 1 is exact too
        _case(
            ([[50, 1.27, 0.304], [0.234, -0.254, 0.1003]], [[1.001, 2.54, -0.503]], 6.0),
            [[50.05 + 3.0758], [0.234234 - 0.254 * 2.54 - 0.1 * 0.5]],
            "two tokens",
        ),
    ),
    mistakes=(
        Mistake(
            "The scales of x still come from all features, so the outlier flattens the others although you took it "
            "out. Split first, then take the largest magnitude of what is left.",
            _scales_first,
        ),
        Mistake(
            "The outlier features are in both parts, and count twice. Take them out of x and of the weight before you "
            "quantise the rest.",
            _counted_twice,
        ),
        Mistake(
            "A feature of -6 is as large as one of 6: compare the magnitude with the threshold.",
            _no_magnitude,
        ),
        Mistake(
            "You split single numbers. A feature is split off for all tokens as soon as one of them reaches the "
            "threshold: the parts are whole columns, so that both products stay dense.",
            _element_by_element,
            lambda x, weight, threshold: torch.cat([split_linear(row, weight, threshold) for row in x[:, None]]),
        ),
    ),
    hints=(
        "Which columns of x hold an outlier? A product over features is a sum, so it may be taken in two parts.",
        "With out = (x.abs() >= threshold).any(0), multiply x[:, out] as it is. Quantise x[:, ~out] and "
        "weight[:, ~out] by rows, and multiply the product of their codes by both scales.",
    ),
    solved="Few columns stay in float, and the scales of all others no longer know that outliers exist.",
    draw=_draw_split_linear,
    tolerance=1e-4,
)


# -- moving outliers into the weights ---------------------------------------------------------------------------------


def smooth(activation_peak: Tensor, weight: Tensor) -> Tensor:
    """Factors [in] of SmoothQuant with alpha = 0.5.

    activation_peak: [in], the largest magnitude of each input feature; weight: [out, in]. The factor is the square
    root of the activation peak over the largest magnitude of the feature's column of the weight.
    """
    return (activation_peak / weight.abs().amax(0)).sqrt()


def _draw_smooth(smooth: Function) -> Any:
    from .. import plots

    generator = torch.Generator().manual_seed(1)
    peak = 0.5 + torch.rand(24, generator=generator)
    peak[7], peak[16] = 40.0, 9.0
    weight = torch.randn(24, 24, generator=generator)
    return plots.smoothing_effect(peak, weight.abs().amax(0), smooth(peak.clone(), weight.clone()))


check_smooth = Exercise(
    smooth,
    cases=(
        # sqrt(16 / 1), sqrt(1 / 4)
        _case(([16, 1], [[1, 4], [0.5, 2]]), [4.0, 0.5], "two features"),
        # sqrt(9 / 1), sqrt(4 / 0.25), sqrt(1 / 1): the largest magnitudes are negative numbers
        _case(([9, 4, 1], [[-1, 0.2, 0.5], [0.3, -0.25, -1]]), [3.0, 4.0, 1.0], "2 x 3"),
        # sqrt(100 / 4)
        _case(([100], [[1], [-4], [2]]), [5.0], "one feature"),
        # sqrt(0.25 / 4)
        _case(([0.25], [[4]]), [0.25], "weights larger than activations"),
    ),
    mistakes=(
        Mistake(
            "Yours is the inverse. Activations are divided by the factors, so a feature with large activations needs a "
            "large one.",
            lambda peak, weight: 1 / smooth(peak, weight),
        ),
        Mistake(
            "You took the largest weight of each output channel (a row). Factors belong to input features: the largest "
            "magnitude of each column, amax over dimension 0.",
            lambda peak, weight: (peak / weight.abs().amax(1)).sqrt(),
        ),
        Mistake(
            "Without the square root all of the difficulty goes over to the weights. With alpha = 0.5 both sides get "
            "the same share.",
            lambda peak, weight: peak / weight.abs().amax(0),
        ),
        Mistake(
            "The largest magnitude of a column may be a negative number: abs() before amax.",
            lambda peak, weight: (peak / weight.amax(0)).sqrt(),
        ),
        Mistake(
            "The weights are missing: a feature whose weights are large already can take less. Divide by the largest "
            "magnitude of its column.",
            lambda peak, weight: peak.sqrt(),
        ),
    ),
    hints=(
        "The weights that meet feature k: are they a row or a column of the weight?",
        "Take the largest magnitude over dimension 0 of the weight, divide the peaks by it, take the square root.",
    ),
    solved="Divide activations by the factors and multiply the columns: both peaks become the root of their product.",
    draw=_draw_smooth,
)


# -- what is left -----------------------------------------------------------------------------------------------------

# Qwen2.5-7B: 28 layers of 233,046,016 weights in their matrices, an embedding and a head of 152,064 x 3,584
LAYERS_7B, EMBEDDING_7B, KV_7B = 28 * 233_046_016, 152_064 * 3_584, 28 * 2 * 4 * 128 * 2


def tokens_left(budget: float, layers: int, embedding: int, head: int, kv_bytes: int, int8_embeddings: bool) -> int:
    """How many tokens of KV cache fit beside the weights; 0 if the weights alone do not.

    budget: bytes. layers, embedding, head: numbers of weights. kv_bytes: bytes of cache per token, values in two bytes
    each. Weights of the layers take one byte; those of embedding and head one with int8_embeddings, else two. Scales
    and activations are left out.
    """
    each = 1 if int8_embeddings else 2
    left = budget - layers - each * (embedding + head)
    return max(0, int(left // kv_bytes))


def _draw_tokens_left(tokens_left: Function) -> Any:
    from .. import plots

    rows, tokens = {}, []
    for name, each in (("embedding, head in bf16", 2), ("all in int8", 1)):
        tokens.append(tokens_left(8e9, LAYERS_7B, EMBEDDING_7B, EMBEDDING_7B, KV_7B, each == 1))
        rows[name] = {
            "int8 layers": LAYERS_7B, "embedding": each * EMBEDDING_7B, "head": each * EMBEDDING_7B,
            "KV cache": max(0, tokens[-1]) * KV_7B,
        }  # fmt: skip
    said = " and ".join(f"{number:,.0f}" for number in tokens)
    return plots.memory_budget(rows, title=f"A 7B in 8 GB, by your function: {said} tokens of cache")


check_tokens_left = Exercise(
    tokens_left,
    cases=(
        # 1000 - 500 - 100 - 100 = 300
        Case((1000, 500, 100, 100, 10, True), 30, "all in int8"),
        # 1000 - 500 - 200 - 200 = 100
        Case((1000, 500, 100, 100, 10, False), 10, "embedding and head in bf16"),
        # 999 - 500 - 120 - 60 = 319, and 31 whole tokens of 10 bytes in it
        Case((999, 500, 120, 60, 10, True), 31, "a part of a token"),
        # 1000 - 800 - 300 - 300 is less than nothing
        Case((1000, 800, 150, 150, 10, False), 0, "nothing fits"),
        # 8e9 - 6,525,288,448 - 2 * 544,997,376 = 384,716,800; / 57,344 = 6,708.9
        Case((8_000_000_000, LAYERS_7B, EMBEDDING_7B, EMBEDDING_7B, KV_7B, True), 6708, "a 7B in 8 GB"),
    ),
    mistakes=(
        Mistake(
            "The head is missing. It is a matrix of its own, as large as the embedding (where the two are tied it is "
            "stored once, and `head` is 0).",
            lambda budget, layers, embedding, head, *rest: tokens_left(budget, layers, embedding, 0, *rest),
        ),
        Mistake(
            "Your layers take two bytes per weight. They are in int8: one byte.",
            lambda budget, layers, *rest: tokens_left(budget, 2 * layers, *rest),
        ),
        Mistake(
            "Embedding and head take the same in yours, whatever int8_embeddings says. With it a weight takes one "
            "byte, without it two.",
            lambda *numbers: tokens_left(*numbers[:-1], True),
            lambda *numbers: tokens_left(*numbers[:-1], False),
        ),
        Mistake(
            "A negative number of tokens: if the weights alone do not fit, the answer is 0.",
            lambda budget, layers, embedding, head, kv, int8: (
                (budget - layers - (1 if int8 else 2) * (embedding + head)) // kv
            ),
        ),
    ),
    hints=(
        "How many bytes do all the weights take? Which of them change with int8_embeddings?",
        "Take layers + 1 or 2 times (embedding + head) from the budget, and divide the rest by kv_bytes, rounded down. "
        "It may be less than nothing.",
    ),
    solved="Both have to go to int8 for a 7B to leave room in 8 GB: in bf16 they would take a gigabyte more.",
    draw=_draw_tokens_left,
)


# -- what a step moves ------------------------------------------------------------------------------------------------


def bytes_per_step(weights: int, way: str) -> int:
    """Bytes that pass between memory and processor for `weights` weights.

    way: "bf16", "int8 fused" (the kernel reads codes and widens them on its way), or "int8 dequantised first" (codes
    are read, a copy of two bytes per weight is written, and the product reads that).
    """
    if way == "bf16":
        return 2 * weights
    if way == "int8 fused":
        return weights
    return weights + 2 * weights + 2 * weights  # codes read, copy written, copy read


def _moves(fused: int = 1, first: int = 5) -> Function:
    """bytes_per_step from the bytes that a weight costs, fused or dequantised first."""
    return lambda weights, way: {"bf16": 2, "int8 fused": fused, "int8 dequantised first": first}[way] * weights


def _draw_bytes_per_step(bytes_per_step: Function) -> Any:
    from .. import plots

    ways = ("bf16", "int8 dequantised first", "int8 fused")
    return plots.bytes_moved({way: {"by your function": bytes_per_step(LAYERS_7B, way)} for way in ways})


check_bytes_per_step = Exercise(
    bytes_per_step,
    cases=(
        Case((1000, "bf16"), 2000, "two bytes per weight"),
        Case((1000, "int8 fused"), 1000, "one byte per weight"),
        # codes 1, copy written 2, copy read 2
        Case((1000, "int8 dequantised first"), 5000, "codes and a copy"),
        Case((12_345_678, "int8 dequantised first"), 61_728_390, "a real layer"),
    ),
    mistakes=(
        Mistake(
            "A copy in bf16 passes twice: it is written to memory, two bytes per weight, and the product reads it, two "
            "bytes more. One of the two is missing.",
            _moves(first=3),
        ),
        Mistake(
            "The copy is there, written and read. To make it, the codes have to be read as well, one byte per weight.",
            _moves(first=4),
        ),
        Mistake(
            "You counted the codes alone. Dequantised first, a copy of two bytes per weight is written and read too.",
            _moves(first=1),
        ),
        Mistake(
            "A fused kernel widens codes in its registers: nothing of two bytes per weight touches the memory.",
            _moves(fused=3),
            _moves(fused=2),
            _moves(fused=5),
        ),
    ),
    hints=(
        "Follow one weight. How often does it pass between memory and processor, and as how many bytes each time?",
        "bf16: two bytes, read once. Fused: one byte, read once. Dequantised first: the code is read, the copy is "
        "written, and the copy is read again.",
    ),
    solved="Dequantised first, int8 moves two and a half times the bytes of bf16. Fused it moves half of them.",
    draw=_draw_bytes_per_step,
)


EXERCISES = (check_quantize_rows, check_split_linear, check_smooth, check_tokens_left, check_bytes_per_step)
