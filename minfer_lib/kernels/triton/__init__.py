"""Kernels for NVIDIA GPUs, in Triton (chapter 7)."""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "Triton is not installed, and the kernels for GPUs are written in it. torch for CUDA brings it on Linux; "
        "elsewhere `pip install triton`, or run the model on the CPU."
    ) from error
