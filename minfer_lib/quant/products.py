"""The ways in which a processor can multiply with int8 weights, and which of them this one is best at.

Invariant: all ways compute the same numbers from the same codes, up to the rounding of float32: a way that does not
prove that on this processor, with the worst codes there are, is not used. So the choice is one of speed alone.

The ways differ in how they want the weights: row by row as they are, which an embedding can share, or packed in an
order of their own, which then takes the place of the rows.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

from ..errors import InvalidParameter, one_of
from ..kernels import compiled
from .absmax import pair_safe_quantize

LONGEST = 65_000  # inputs of a layer whose sum of products of codes surely fits 32 bits: 255 x 127 x 65,000 < 2^31
TINY = 1.5e-36  # tokens that reach no further are all zeros: 127 / peak would overflow
BLOCK = 2**20  # weights that the portable way turns into floats at a time, so that they stay in a cache


@dataclass
class Weights:
    """What a product needs to know of a layer; kernels keep what they derive from it in `ready`.

    codes: int8 [out, in], row by row; None once a kernel holds them in its own order. scale: float32 [out].
    bias: float32 [out] or None. inverse: float32 [in], what the input is multiplied with first, or None.
    """

    codes: torch.Tensor | None
    scale: torch.Tensor
    bias: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    ready: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), where the codes are at hand."""
        assert self.codes is not None
        return self.codes.shape[0], self.codes.shape[1]


class Portable:
    """Plain torch on any device: codes become floats, a block of output channels at a time."""

    name: ClassVar[str] = "portable"
    packs: ClassVar[bool] = False
    description: ClassVar[str] = "the weights become floats again, block by block: saves memory, not time"

    def prepare(self, weights: Weights, dynamic: bool) -> None:
        """Nothing to derive."""

    def unpack(self, weights: Weights) -> torch.Tensor:
        """The codes, int8 [out, in]."""
        return weights.codes

    def product(self, x: torch.Tensor, weights: Weights, dynamic: bool) -> torch.Tensor:
        """x [m, in] to [m, out] in x's dtype."""
        codes, size = weights.codes, max(1, BLOCK // max(1, weights.codes.shape[1]))
        rows = x.float()
        scale = None
        if dynamic:
            rows, scale = token_codes(rows, weights.inverse)
        # with codes on both sides float32 sums are exact up to 2^24, and rounded as any float sum beyond
        parts = [linear(rows, block.float()) for block in codes.split(size)]
        y = (torch.cat(parts, -1) if parts else rows.new_empty(len(rows), 0)) * weights.scale
        if scale is not None:
            y = y * scale
        return (y if weights.bias is None else y + weights.bias).to(x.dtype)


class IntMM(Portable):
    """`torch._int_mm`: exact 32-bit sums of int8 codes, on processors and on NVIDIA GPUs."""

    name = "int_mm"
    description = "torch's product of integer matrices"

    def product(self, x: torch.Tensor, weights: Weights, dynamic: bool) -> torch.Tensor:
        m, (n, k) = len(x), weights.shape
        if not dynamic or m == 0:
            return super().product(x, weights, dynamic)
        rows, scale = token_codes(x.float(), weights.inverse)
        codes = rows.to(torch.int8)
        if x.is_cuda:  # wants more than 16 rows, and multiples of 8
            if n % 8 or k % 8:
                return super().product(x, weights, dynamic)
            codes = torch.nn.functional.pad(codes, (0, 0, 0, max(0, 24 - m)))
        y = torch._int_mm(codes, weights.codes.t())[:m].float() * weights.scale * scale
        return (y if weights.bias is None else y + weights.bias).to(x.dtype)


class Fbgemm(Portable):
    """torch's own quantised linear layer on x86 (fbgemm), which rounds the input inside the product.

    It knows one scale for the whole input. Tokens that were divided by their own largest value first all share the
    scale 1/127, so that each has its own again afterwards.
    """

    name = "fbgemm"
    packs = True
    description = "torch's quantised linear layer (fbgemm), one scale per token by dividing first"

    def prepare(self, weights: Weights, dynamic: bool) -> None:
        n = len(weights.scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # quantised tensors are deprecated; they only carry the codes
            carrier = torch._make_per_channel_quantized_tensor(
                weights.codes, weights.scale.double(), torch.zeros(n, dtype=torch.long), 0
            )
            weights.ready = torch.ops.quantized.linear_prepack(carrier, None)

    def unpack(self, weights: Weights) -> torch.Tensor:
        return weights.ready.unpack()[0].int_repr()

    def product(self, x: torch.Tensor, weights: Weights, dynamic: bool) -> torch.Tensor:
        rows = x.float()
        if weights.inverse is not None:
            rows = rows * weights.inverse
        peak = rows.abs().amax(-1, keepdim=True).clamp_(min=TINY)  # not finite if the token is not, and then so is y
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows / peak, 1 / 127, 128, weights.ready)
        y = y.mul_(peak)
        return (y if weights.bias is None else y + weights.bias).to(x.dtype)


class PackedBF16(Portable):
    """`torch._weight_int8pack_mm`: weight-only, for bfloat16 inputs."""

    name = "int8pack_mm"
    description = "torch's weight-only product for bfloat16"

    def prepare(self, weights: Weights, dynamic: bool) -> None:
        weights.ready = weights.scale.bfloat16()

    def product(self, x: torch.Tensor, weights: Weights, dynamic: bool) -> torch.Tensor:
        # it reads whole vectors of inputs, also beyond the end of a row that is no multiple of them
        if x.dtype != torch.bfloat16 or len(x) == 0 or x.shape[1] % 32:
            return super().product(x, weights, dynamic)
        # the scales are applied here, in float32: rounded to bfloat16 they would be off by up to 0.4 % each
        ones = torch.ones_like(weights.ready)
        y = torch._weight_int8pack_mm(x.contiguous(), weights.codes, ones).float() * weights.scale
        return (y if weights.bias is None else y + weights.bias).to(x.dtype)


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in ("w", "sums", "scale", "bias", "inverse")] + [
        (name, ctypes.c_int64) for name in ("n", "k")
    ]


class Compiled(Portable):
    """Our own kernel in C (kernels/int8_linear.c): rounding, product and scales in one call."""

    name = "compiled"
    description = "our kernel in C, compiled for this processor"
    dtypes: ClassVar = {torch.float32: 0, torch.bfloat16: 1}

    def __init__(self) -> None:
        library = compiled.library()
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._dynamic, self._weight_only = library.int8_dynamic, library.int8_weight_only
        self._dynamic.argtypes = [pointer, pointer, pointer, number, ctypes.c_int, pointer, pointer, pointer]
        self._weight_only.argtypes = [pointer, pointer, pointer, number, ctypes.c_int, pointer]
        self._dynamic.restype = self._weight_only.restype = None
        self._scratch = threading.local()

    def prepare(self, weights: Weights, dynamic: bool) -> None:
        if min(weights.shape) < 4 or weights.shape[1] > LONGEST:
            return  # left to the portable way
        n, k = weights.shape
        sums = (128 * weights.codes.sum(1, dtype=torch.int64)).to(torch.int32)
        held = (weights.codes, sums, weights.scale, weights.bias, weights.inverse)  # so that no pointer outlives them
        layer = _Layer(*(None if t is None else t.data_ptr() for t in held), n, k)
        weights.ready = (layer, ctypes.addressof(layer), held)

    def product(self, x: torch.Tensor, weights: Weights, dynamic: bool) -> torch.Tensor:
        if weights.ready is None or len(x) == 0:
            return super().product(x, weights, dynamic)
        kind = self.dtypes.get(x.dtype)
        if kind is None:
            return self.product(x.float(), weights, dynamic).to(x.dtype)
        layer, address, _ = weights.ready
        x = x.contiguous()
        m, k = len(x), layer.k
        out = torch.empty(m, layer.n, dtype=x.dtype)
        if dynamic:
            codes = (m * k + 63) & ~63
            scratch = self._room(codes + 4 * (m + k + 32))
            scales = scratch + codes
            self._dynamic(
                address, x.data_ptr(), out.data_ptr(), m, kind, scratch, scales, scales + 4 * ((m + 15) & ~15)
            )
        else:
            self._weight_only(address, x.data_ptr(), out.data_ptr(), m, kind, self._room(4 * m * k))
        return out

    def _room(self, size: int) -> int:
        """Address of at least `size` bytes that belong to this thread until its next call."""
        have = getattr(self._scratch, "room", None)
        if have is None or have.numel() < size:
            have = self._scratch.room = torch.empty(size, dtype=torch.uint8)
            self._scratch.address = have.data_ptr()
        return self._scratch.address


def token_codes(rows: torch.Tensor, inverse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes -127..127 (as floats) and scales [m, 1] of tokens [m, in]; the scale of one that is not finite is NaN."""
    if inverse is not None:
        rows = rows * inverse
    peak = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros(len(rows), 1)
    tiny = peak < TINY
    codes = torch.where(tiny, 0.0, rows * (127.0 / peak.where(~tiny, 1.0))).round()
    return codes.nan_to_num(0.0, 0.0, 0.0), torch.where(peak.isfinite(), torch.where(tiny, 0.0, peak / 127), torch.nan)


DYNAMIC = (Compiled, Fbgemm, IntMM, Portable)
WEIGHT_ONLY = (Compiled, PackedBF16, Portable)


@cache
def usable(name: str) -> Portable | str:
    """The kernel of that name, or the reason why this machine cannot use it."""
    classes = {kernel.name: kernel for kernel in (*DYNAMIC, *WEIGHT_ONLY)}
    if name not in classes:
        raise InvalidParameter(f"kernel={name!r} is not possible: there are {one_of(list(classes))}.")
    try:
        kernel = classes[name]()
        if problem := _problem(kernel):
            return problem
    except compiled.CannotCompile as error:
        return str(error)
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # an operator that this build does not have
        return str(error).splitlines()[0]
    return kernel


def _problem(kernel: Portable) -> str | None:
    """What a kernel gets wrong on inputs that go to the limits of its arithmetic; None if nothing."""
    generator = torch.Generator().manual_seed(0)
    for n, k in ((37, 64), (16, 577), (5, 96)):
        codes = pair_safe_quantize(torch.randn(n, k, generator=generator)).values
        codes[0], codes[1] = 64, -64  # with the largest inputs: the largest sums that pairs may reach
        x = torch.randn(5, k, generator=generator)
        x[0], x[1], x[2] = 1.0, -1.0, 0.0
        half = kernel.name == PackedBF16.name
        if half:  # with other inputs it is the portable one
            x = x.bfloat16()
        for dynamic in (True, False):
            if type(kernel) not in (DYNAMIC if dynamic else WEIGHT_ONLY):
                continue
            weights = Weights(codes, torch.ones(n), torch.randn(n, generator=generator), None)
            kernel.prepare(weights, dynamic)
            rows, scale = token_codes(x, None) if dynamic else (x, torch.ones(5, 1))
            wanted = (rows.double() @ codes.double().T) * scale + weights.bias
            bound = (1e-2 if half else 1e-5) * (
                rows.double().abs() @ codes.double().abs().T * scale
            ).amax().item() + 1e-6
            if not ((kernel.product(x, weights, dynamic).double() - wanted).abs() <= bound).all():
                return "its sums are wrong on this processor"
    return None


@cache
def timings(dynamic: bool, dtype: torch.dtype, threads: int) -> dict[str, float]:
    """Microseconds of each usable kernel for a layer of 1,024 x 1,024: geometric mean over 1, 8 and 32 tokens."""
    codes = pair_safe_quantize(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))).values
    found = {}
    for name in [kernel.name for kernel in (DYNAMIC if dynamic else WEIGHT_ONLY)]:
        kernel = usable(name)
        if isinstance(kernel, str) or (name == PackedBF16.name and dtype != torch.bfloat16):
            continue
        weights = Weights(codes, torch.ones(1024))
        kernel.prepare(weights, dynamic)
        times = []
        for rows in (1, 8, 32):
            x = torch.randn(rows, 1024, dtype=dtype)
            runs = []
            for _ in range(6):
                begin = time.perf_counter()
                kernel.product(x, weights, dynamic)
                runs.append(time.perf_counter() - begin)
            times.append(1e6 * min(runs[1:]))
        found[name] = statistics.geometric_mean(times)
    return found


def check_kernel(name: str, dynamic: bool | None = None) -> Portable:
    """The kernel of that name. dynamic: which of the two products it has to compute, None for either.

    Raises `InvalidParameter` for one that is unknown, that this machine cannot use, or that computes the other product.
    """
    kernel = usable(name) if isinstance(name, str) else None
    if kernel is None:
        raise InvalidParameter(f"kernel={name!r} is not possible: it must be a name, or None for the fastest.")
    if isinstance(kernel, str):
        raise InvalidParameter(f"kernel={name!r} is not possible here: {kernel}.")
    if dynamic is not None and type(kernel) not in (fitting := DYNAMIC if dynamic else WEIGHT_ONLY):
        raise InvalidParameter(
            f"kernel={name!r} is not possible with activations={'dynamic' if dynamic else 'none'!r}: "
            f"there are {one_of([each.name for each in fitting])}."
        )
    return kernel


def choose(
    dynamic: bool, dtype: torch.dtype, device: torch.device, name: str | None = None, packing: bool = True
) -> Portable:
    """The kernel to use: the one asked for by name where it computes this kind of product, else the fastest here.

    packing: whether the kernel may keep the weights in an order of its own. Speed is measured once a process.
    Raises `InvalidParameter` for a name that is unknown or cannot be used on this machine.
    """
    if name is not None:
        kernel = check_kernel(name)
        if kernel.packs and not packing:
            return usable(Portable.name)
        if type(kernel) in (DYNAMIC if dynamic else WEIGHT_ONLY):
            return kernel
        # else a layer of the other kind, as the output layer is: the named kernel would compute something else
    if device.type != "cpu":
        return usable(IntMM.name if dynamic and device.type == "cuda" else Portable.name)
    times = timings(dynamic, dtype, torch.get_num_threads())
    fitting = [name for name in times if packing or not usable(name).packs]
    return usable(min(fitting, key=times.get))
