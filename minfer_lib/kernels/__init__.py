"""What does the hardware run? Kernels in C for CPUs and in Triton for NVIDIA GPUs (chapter 7)."""
