"""Normalisation layers: one over whole rows, one over rows whose entries are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefold.model.seams import TokenSeam
from moefold.ops.rmsnorm import rms_norm, rms_norm_spread


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class SpreadRMSNorm(nn.Module):
    """Over all heads at once: this rank holds some of them, and the mean is over the full width."""

    def __init__(self, width: int, eps: float, tokens: TokenSeam) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.full_width = width
        self.tokens = tokens

    def forward(self, x_TF: Tensor) -> Tensor:
        return rms_norm_spread(x_TF, self.weight, self.eps, self.full_width, self.tokens.sum_heads)
