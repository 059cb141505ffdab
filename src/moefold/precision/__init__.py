"""Dtypes of parameters, buffers and computation."""
