"""Kernels of an MoE layer, in Triton, each beside its reference in torch."""
