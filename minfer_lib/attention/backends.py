"""Which code attends over block tables: a kernel that follows them, or torch after the blocks have been gathered.

Gathering (`attention.attend_decodes`) runs anywhere and is easy to read, but copies every key and value of a batch
before it looks at them. A kernel reads them where they lie: ours are written in Triton for CUDA devices, and in C for
decoding on a CPU.

Invariant: all of them compute the same attention; what a device or a dtype has no kernel for is gathered.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..errors import InvalidParameter, UnsupportedModel, one_of
from .batch import GATHER, AttentionKernels

AttentionBackend = Literal["auto", "gather", "compiled", "triton"]
BACKENDS = ("auto", "gather", "compiled", "triton")


def choose_kernels(device: torch.device, dtype: torch.dtype, backend: AttentionBackend = "auto") -> AttentionKernels:
    """The kernels for keys and values of a dtype on a device.

    backend: "auto" takes a kernel where there is one; "gather" never does; "compiled" is the C kernel for CPUs, which
    leaves prompts to torch, "triton" that for CUDA. Raises `InvalidParameter` for a name that is none of these,
    `UnsupportedModel` if the one that was asked for cannot run here.
    """
    check_backend(backend)
    if backend == "gather":
        return GATHER
    reasons = []
    for name, find in (("triton", _triton), ("compiled", _compiled)):
        if backend in ("auto", name):
            found = find(device, dtype)
            if isinstance(found, AttentionKernels):
                return found
            reasons.append(found)
    if backend == "auto":
        return GATHER
    raise UnsupportedModel(
        f"attention_backend={backend!r} was asked for, for {str(dtype).removeprefix('torch.')} on {device.type}: "
        f"{reasons[0]}. attention_backend='auto' takes what there is."
    )


def check_backend(backend: str, kv_cache: str = "paged") -> None:
    """Raises `InvalidParameter` for a name that is none of `BACKENDS`, and for a kernel that is to read slots."""
    if backend not in BACKENDS:
        raise InvalidParameter(f"attention_backend={backend!r} is not possible: it must be {one_of(BACKENDS)}.")
    if kv_cache == "slots" and backend not in ("auto", "gather"):
        raise InvalidParameter(
            f"attention_backend={backend!r} is not possible with kv_cache='slots': slots lie in one piece, and torch "
            "attends to them. Leave it out, or take kv_cache='paged'."
        )


def describe_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" takes on a device, and why nothing else, for `python -m minfer_lib info`."""
    found = choose_kernels(device, dtype)
    if found.prefill is not None:
        return f"{found.name}: a kernel follows the block tables"
    if found.decode is not None:
        return f"{found.name}: a kernel follows the block tables of decoding requests, prompts are gathered"
    reason = _triton(device, dtype) if device.type == "cuda" else _compiled(device, dtype)
    return f"{found.name}: blocks are copied together, then torch attends ({reason})"


def _triton(device: torch.device, dtype: torch.dtype) -> AttentionKernels | str:
    """The kernels, or why there are none."""
    if device.type != "cuda":
        return "Triton's kernels run on CUDA devices"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "Triton's kernels take float32, float16 and bfloat16"
    try:
        from ..kernels.triton.paged_attention import paged_decode, paged_prefill
    except ImportError as error:
        return str(error).rstrip(".")
    return AttentionKernels("triton", paged_decode, paged_prefill)


def _compiled(device: torch.device, dtype: torch.dtype) -> AttentionKernels | str:
    if device.type != "cpu":
        return "the C kernel runs on CPUs"
    from ..kernels.compiled_attention import compiled_decode, why_not

    def decode(*args: torch.Tensor, longest: int, **options: Any) -> torch.Tensor:
        return compiled_decode(*args, **options)  # it looks at each length itself

    reason = why_not(dtype)
    return AttentionKernels("compiled", decode) if reason is None else reason
