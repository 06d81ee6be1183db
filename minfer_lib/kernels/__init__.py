"""Kernels for CUDA devices, written in Triton; a module here is imported only where a tensor on such a device asks for it."""
