"""Kernels for processors (C) and CUDA devices (Triton), each imported only where a tensor on such a device needs it."""
