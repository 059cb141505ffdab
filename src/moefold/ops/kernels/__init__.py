"""Kernels for GPUs, written in Triton. Each has a twin in plain torch, and is imported only by who asks for it."""
