"""Kernels for NVIDIA GPUs: CUDA source, its compilation at run time, and the calls."""
