"""Which number format a delicate step is computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """At least float32: the format of sums, exponentials and square roots. float64 runs stay in float64."""
    return x if x.dtype == torch.float64 else x.float()
