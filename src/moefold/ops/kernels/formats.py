"""What kernels take: they compute in float32, so nothing wider."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.errors import BackendError


def refuse_wide(job: str, *tensors: Tensor | None) -> None:
    """An error for float64, which a kernel would round without a word."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        raise BackendError(f"precision.kernels: the {job} kernel computes in float32; for float64 use torch")
