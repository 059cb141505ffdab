"""Casts to narrow formats as GPU kernels in Triton; `precision/quantize.py` is the reference of all, bit for bit."""
