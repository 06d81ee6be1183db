"""Which code attends over block tables: a kernel that follows them, or torch after the rows were copied together.

Copying (`torch_backend`) runs anywhere and is easy to read, but moves every key and value of a batch before it looks at
them. A kernel reads them where they lie: ours are written in Triton for CUDA devices, and in C for decoding on a CPU.

Invariant: all of them compute the same attention; what a device or a dtype has no kernel for is left to torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..cache.pool import KVPool
from ..errors import InvalidParameter, UnsupportedModel, one_of, shown
from .batch import PackedBatch
from .torch_backend import TorchBackend

BACKENDS = ("auto", "torch", "compiled", "triton")


class AttentionBackend(Protocol):
    """What attends. Another one is an object with these three, `LLMEngine(lm, backend=MyBackend())`; if it has a method
    `write` too, that is called in place of `KVPool.write`.

    graph_safe: whether it does the same work whatever the lengths of a step, so that a CUDA graph may hold it.
    reads_int8: True if it can attend over pools of int8 (`KVPool`), which others would take for numbers; may be absent.
    attend: query [T, heads, key_dim] of all new tokens -> [T, heads, value_dim]; keys and values of the new tokens are
    in the pool already. window: so many tokens are seen, the token itself included; None for all.
    """

    name: str
    graph_safe: bool

    def attend(
        self, query: torch.Tensor, pool: KVPool, batch: PackedBatch, *, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


class CompiledBackend(TorchBackend):
    """Our kernel in C for decoding requests on a CPU; prompts are left to torch."""

    name = "compiled"

    def attend(self, query: torch.Tensor, pool: KVPool, batch: PackedBatch, **options: Any) -> torch.Tensor:
        from ..kernels.compiled_attention import compiled_decode

        decodes = batch.num_decodes
        if not decodes:
            return super().attend(query, pool, batch, **options)
        out = compiled_decode(
            query[:decodes], pool.keys, pool.values, batch.block_tables[:decodes], batch.lengths[:decodes],
            block_size=batch.block_size, key_scales=pool.key_scales, value_scales=pool.value_scales, **options,
        )  # fmt: skip
        if decodes == len(batch.q_lens):
            return out
        return torch.cat([out, self.attend_chunks(query[decodes:], pool, batch, **options)])


class TritonBackend:
    """Our kernels in Triton for CUDA devices: a launch for all decoding requests, one for all prompts, one to write."""

    name = "triton"
    graph_safe = True  # given a bound for the longest, it splits all contexts alike
    reads_int8 = True

    @staticmethod
    def write(pool: KVPool, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As `KVPool.write`."""
        from ..kernels.triton.fused_parts import write_cache

        write_cache(keys, values, rows, pool.keys, pool.values, pool.key_scales, pool.value_scales)

    def attend(self, query: torch.Tensor, pool: KVPool, batch: PackedBatch, **options: Any) -> torch.Tensor:
        from ..kernels.triton.paged_attention import paged_decode, paged_prefill

        decodes, parts = batch.num_decodes, []
        pools = pool.keys, pool.values
        options |= dict(block_size=batch.block_size, key_scales=pool.key_scales, value_scales=pool.value_scales)
        tables, lengths = batch.block_tables, batch.lengths
        if decodes:
            longest = max(batch.kv_lens[:decodes])
            out = paged_decode(query[:decodes], *pools, tables[:decodes], lengths[:decodes], longest=longest, **options)
            parts.append(out)
        if decodes < len(batch.q_lens):
            most = max(batch.q_lens)
            out = paged_prefill(
                query[decodes:], *pools, tables[decodes:], lengths[decodes:], batch.starts, most_new=most, **options
            )
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose_backend(device: torch.device, dtype: torch.dtype, backend: str | AttentionBackend) -> AttentionBackend:
    """The backend for keys and values that a model makes in a dtype on a device; kept so, or as int8.

    backend: "auto" takes a kernel where there is one; "torch" runs anywhere; "compiled" is the C kernel for CPUs,
    "triton" those for CUDA; an object with the three names of `AttentionBackend` is taken as it is. Raises
    `InvalidParameter` for anything else, `UnsupportedModel` if the one that was asked for cannot run here.
    """
    if not isinstance(backend, str | type) and hasattr(backend, "attend"):
        return backend
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InvalidParameter(
            f"backend must be {one_of(BACKENDS)}, or an object with an attend method; it is {shown(backend)}."
        )
    if backend in ("auto", "triton") and (why_not := _no_triton(device, dtype)) is None:
        return TritonBackend()
    if backend == "triton":
        raise _cannot(backend, device, dtype, why_not)
    if backend in ("auto", "compiled") and (why_not := _no_compiled(device, dtype)) is None:
        return CompiledBackend()
    if backend == "compiled":
        raise _cannot(backend, device, dtype, why_not)
    return TorchBackend()


def describe_backends(device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" takes on a device, and why no kernel where there is none, for `minfer info`."""
    name = choose_backend(device, dtype, "auto").name
    if name == "triton":
        return "triton: kernels follow the block tables"
    if name == "compiled":
        return "compiled: a kernel in C follows the block tables of decoding requests, torch attends to prompts"
    reason = _no_triton(device, dtype) if device.type == "cuda" else _no_compiled(device, dtype)
    return f"torch: rows are copied together, then torch attends ({reason})"


def _cannot(backend: str, device: torch.device, dtype: torch.dtype, why_not: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"backend={backend!r} cannot attend in {str(dtype).removeprefix('torch.')} on {device.type}: {why_not}. "
        "backend='auto' takes what there is."
    )


def _no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot be used; None if they can."""
    if device.type != "cuda":
        return "Triton's kernels run on CUDA devices"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "Triton's kernels take float32, float16 and bfloat16"
    try:
        from ..kernels.triton import paged_attention  # noqa: F401
    except ImportError as error:
        return str(error).rstrip(".")
    return None


def _no_compiled(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return "the C kernel runs on CPUs"
    from ..kernels.compiled_attention import why_not

    return why_not(dtype)
