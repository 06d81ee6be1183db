"""The ways to multiply with int8 weights: three on a CPU, and Triton's on a GPU.

Invariant: all ways compute the same numbers from the same codes, up to the rounding of float32. A way of a CPU that
does not prove that here, with exact integers, is not used: so which of them a machine has changes its speed alone.

A way is a function (x [m, in] in any floating dtype, layer) -> [m, out] in x's dtype, for an `Int8Linear`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, pad

from ..errors import must_be, one_of
from ..kernels import compiled as compiler
from ..kernels.compiled_products import KINDS, compiled_product
from ..models import hf_compat

if TYPE_CHECKING:
    from .linear import Int8Linear

LONGEST = 65_000  # inputs of a layer whose sum of products of codes surely fits 32 bits: 255 x 127 x 65,000 < 2^31
TINY = 1.5e-36  # tokens that reach no further are all zeros: 127 / peak would overflow
BLOCK = 2**20  # weights that the portable way turns into floats at a time, so that they stay in a cache


def portable(x: torch.Tensor, layer: Int8Linear) -> torch.Tensor:
    """Plain torch on any device: codes become floats, a block of output channels at a time."""
    codes, rows, scale = layer.weight, x.float(), None
    if layer.activations == "dynamic":
        rows, scale = token_codes(rows, layer.smoothing)
    # with codes on both sides float32 sums are exact up to 2^24, and rounded as any float sum beyond
    parts = [linear(rows, block.float()) for block in codes.split(max(1, BLOCK // max(1, codes.shape[1])))]
    return _finished(torch.cat(parts, -1), scale, layer, x.dtype)


def int_mm(x: torch.Tensor, layer: Int8Linear) -> torch.Tensor:
    """`torch._int_mm`: exact 32-bit sums of int8 codes, on CPUs and on NVIDIA GPUs."""
    m, (n, k) = len(x), layer.weight.shape
    # with one input its output is left unwritten on CPUs with VNNI; a GPU wants multiples of 8 and more than 16 rows
    if min(m, n) == 0 or k < 2 or (x.is_cuda and (n % 8 or k % 8)):
        return portable(x, layer)
    rows, scale = token_codes(x.float(), layer.smoothing)
    codes = rows.to(torch.int8)
    if x.is_cuda:
        codes = pad(codes, (0, 0, 0, max(0, 24 - m)))
    return _finished(hf_compat.int_mm(codes, layer.weight.t())[:m].float(), scale, layer, x.dtype)


def compiled(x: torch.Tensor, layer: Int8Linear) -> torch.Tensor:
    """Our own kernel in C (kernels/c/products.c): rounding, product and scales in one call."""
    sums = layer.sums()
    if sums is None and layer.activations == "dynamic":
        return portable(x, layer)
    if x.dtype not in KINDS:
        return compiled(x.float(), layer).to(x.dtype)
    return compiled_product(x, layer.weight, layer.scale, layer.bias, sums=sums, smoothing=layer.smoothing)


def triton(x: torch.Tensor, layer: Int8Linear) -> torch.Tensor:
    """Our own kernel for GPUs (kernels/triton/int8_linear.py), weight-only."""
    return triton_function()(x, layer.weight, layer.scale, layer.bias)


DYNAMIC = {"compiled": compiled, "int_mm": int_mm, "portable": portable}  # on a CPU, the one to take first
WEIGHT_ONLY = {"compiled": compiled, "portable": portable}
PRODUCTS = DYNAMIC | {"triton": triton}


def token_codes(rows: torch.Tensor, smoothing: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes -127..127 (as floats) and scales [m, 1] of tokens [m, in]; the scale of one that is not finite is NaN."""
    if smoothing is not None:
        rows = rows * (1.0 / smoothing)
    peak = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros(len(rows), 1)
    tiny = peak < TINY
    codes = torch.where(tiny, 0.0, rows * (127.0 / peak.where(~tiny, 1.0))).round()
    return codes.nan_to_num(0.0, 0.0, 0.0), torch.where(peak.isfinite(), torch.where(tiny, 0.0, peak / 127), torch.nan)


def _finished(sums: torch.Tensor, scale: torch.Tensor | None, layer: Int8Linear, dtype: torch.dtype) -> torch.Tensor:
    # the scale of the weights first: that of a huge token could lead beyond float32
    y = sums * layer.scale
    if scale is not None:
        y = y * scale
    return (y if layer.bias is None else y + layer.bias).to(dtype)


@cache
def triton_function() -> Any | None:
    """The Triton kernel's function; None where Triton is not installed (Windows, builds without it)."""
    try:
        from ..kernels.triton.int8_linear import int8_linear
    except ImportError:
        return None
    return int8_linear


# -- which one is used ------------------------------------------------------------------------------------------------


@cache
def choose(dynamic: bool, device: str, asked: str | None = None) -> str:
    """The name of the way to use on a kind of device: one asked for if it computes this kind of product here.

    What was asked for may not be here: a folder comes from another machine, and an output layer is always weight-only.
    """
    if device == "cuda":
        return (
            "int_mm" if dynamic and hf_compat.int_mm else "triton" if not dynamic and triton_function() else "portable"
        )
    if device != "cpu":
        return "portable"
    ways = DYNAMIC if dynamic else WEIGHT_ONLY
    return next(name for name in (asked, *ways) if name in ways and why_not(name) is None)


def check_kernel(name: Any, dynamic: bool) -> None:
    """Raises `InvalidParameter` for a name that this kind of product does not have, or this machine cannot use."""
    ways = DYNAMIC if dynamic else WEIGHT_ONLY
    if not isinstance(name, str) or name not in ways:
        kind = "dynamic" if dynamic else "none"
        raise must_be("kernel", f"{one_of(list(ways))} with activations={kind!r}, or None for the first of them", name)
    if reason := why_not(name):
        raise must_be("kernel", f"one that this machine can use ({reason}), or None", name)


def describe_products(device: str) -> str:
    """One line for `info`: what runs int8 layers on a kind of device."""
    dynamic, weight_only = choose(True, device), choose(False, device)
    one_thread = dynamic == "compiled" and not compiler.library("products").has_threads
    note = "; in one thread, since the compiler's OpenMP is not the one that torch has loaded" if one_thread else ""
    return f"{dynamic}, weight-only {weight_only}{note}"


@cache
def why_not(name: str) -> str | None:
    """Why a CPU product is not used here; None if it is. Found out once a process."""
    try:
        return _problem(name)
    except compiler.CannotCompile as error:
        return str(error)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:  # not in this build of torch
        return str(error).splitlines()[0]


def _problem(name: str) -> str | None:
    """What a product gets wrong where every right result is an integer, at the limits of its arithmetic and shapes."""
    from .linear import Int8Linear

    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 4, 5, 37):
        for k in (1, 2, 3, 31, 32, 64, 129, 577):
            codes = torch.randint(-64, 65, (n, k), generator=generator, dtype=torch.int8)
            codes[0] = 64 if k % 2 else -64  # with the largest inputs: the largest sums that pairs may reach
            x = torch.randint(-127, 128, (5, k), generator=generator).float()
            x[:, 0] = 127  # the scale of each token is 1
            x[0], x[1] = 127, -127
            for mode, ways in (("dynamic", DYNAMIC), ("none", WEIGHT_ONLY)):
                layer = Int8Linear(codes, torch.ones(n, dtype=torch.float32), activations=mode)
                wanted = (x.double() @ codes.double().T).float()
                for given in (x, -x, x.bfloat16()) if name in ways else ():
                    # -x too: what is left unwritten may hold the result of the call before
                    sign = -1 if given[0, 0] < 0 else 1
                    if not torch.equal(ways[name](given, layer), (sign * wanted).to(given.dtype)):
                        return "its sums are wrong on this CPU"
    return None
