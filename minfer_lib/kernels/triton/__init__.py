"""Kernels for NVIDIA GPUs, in Triton (chapter 7)."""
