"""Checks of chapter 5, INT8: each takes the learner's function and prints a diagnosis.

Invariant: a check returns True or False and never raises; an unsolved exercise prints the same line every time.
"""

from __future__ import annotations

from ..exercises import Function
from .ch05_bytes import BYTES_PER_STEP, TOKENS_LEFT
from .ch05_outliers import SMOOTH, SPLIT_LINEAR
from .ch05_rows import QUANTIZE_ROWS

EXERCISES = (QUANTIZE_ROWS, SPLIT_LINEAR, SMOOTH, TOKENS_LEFT, BYTES_PER_STEP)


def check_quantize_rows(quantize_rows: Function) -> bool:
    """Checks `quantize_rows(weight) -> (codes, scale)`: absmax quantisation with a scale for each output channel.

    weight: [out, in]. codes: int8 [out, in], from -127 to 127. scale: [out], such that codes * scale[:, None] is the
    weight again, up to rounding. A row of zeros gets codes of 0 and any scale above 0.
    """
    return QUANTIZE_ROWS.check(quantize_rows)


def check_split_linear(split_linear: Function) -> bool:
    """Checks `split_linear(x, weight, threshold) -> y`, LLM.int8() by hand.

    x: [tokens, in]; weight: [out, in]; y: [tokens, out]. Features of which any token reaches the threshold in magnitude
    are multiplied as they are. All others in int8: a scale per token for x, one per output channel for the weight.
    """
    return SPLIT_LINEAR.check(split_linear)


def check_smooth(smooth: Function) -> bool:
    """Checks `smooth(activation_peak, weight) -> factors` of SmoothQuant with alpha = 0.5.

    activation_peak: [in], the largest magnitude of each input feature; weight: [out, in]; factors: [in], the square
    root of each feature's activation peak over the largest magnitude of its column of the weight.
    """
    return SMOOTH.check(smooth)


def check_tokens_left(tokens_left: Function) -> bool:
    """Checks `tokens_left(budget, layers, embedding, head, kv_bytes, int8_embeddings) -> int`: how many tokens of KV
    cache fit beside the weights.

    budget: bytes. layers, embedding, head: numbers of weights. kv_bytes: bytes of cache a token, values in two bytes
    each. Weights of the layers take one byte; those of embedding and head one with int8_embeddings, else two. Scales
    and activations are left out. 0 if the weights alone do not fit.
    """
    return TOKENS_LEFT.check(tokens_left)


def check_bytes_per_step(bytes_per_step: Function) -> bool:
    """Checks `bytes_per_step(weights, way) -> bytes` that pass between memory and processor for `weights` weights.

    way: "bf16", "int8 fused" (the kernel reads codes and widens them on its way), or "int8 dequantised first" (codes
    are read, a copy of two bytes a weight is written, and the product reads that).
    """
    return BYTES_PER_STEP.check(bytes_per_step)
