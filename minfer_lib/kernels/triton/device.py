"""What the kernels need to know about the GPU they run on, or about the interpreter that stands in for one.

Invariant: a GPU's properties are read here, once a device, and nowhere else. With TRITON_INTERPRET=1 at the import of
triton, Python runs the kernels on the CPU: slow, but every kernel can be tested without a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class GPU:
    sms: int  # streaming multiprocessors
    shared_memory: int  # bytes of it that one program may take
    hopper: bool  # an H100 or H200: a matrix instruction and a copy engine (TMA) of its own

    def multiplies_asynchronously(self, dtype: torch.dtype, rows: int, warps: int) -> bool:
        """Whether Triton takes Hopper's matrix instruction for a `tl.dot` with so many rows on the left."""
        return self.hopper and dtype.itemsize == 2 and rows % 64 == 0 and warps % 4 == 0


@functools.lru_cache
def gpu_of(device: torch.device) -> GPU:
    if INTERPRETED:
        return GPU(sms=1, shared_memory=2**20, hopper=False)
    properties = torch.cuda.get_device_properties(device)
    hopper = torch.version.hip is None and properties.major == 9  # ROCm says 9 for AMD's gfx90a and gfx942, too
    return GPU(properties.multi_processor_count, properties.shared_memory_per_block_optin, hopper)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype to multiply numbers of `dtype` in: itself, but Triton's interpreter gets bfloat16 silently wrong."""
    return TRITON_DTYPES[torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype]


@triton.jit
def wait_for_dot(sums: tl.tensor) -> tl.tensor:
    """`sums` unchanged, once the tensor cores have finished with them, and so with the operands too.

    Hopper's matrix instruction runs on while the threads go on, and Triton lets it, into the next step along k. The
    ptxas that Triton 3.7 brings (CUDA 12.8) does not see that it still reads its left operand from registers, and puts
    the next step's weights there too early: some products come out wrong, others at the next call
    (github.com/triton-lang/triton/issues/9433). A use of the sums in each step makes Triton wait for them first; this
    one costs nothing, for the copy is made in place.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1)
