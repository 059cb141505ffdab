"""A matrix, used in the format of what it multiplies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b. Values are set later, as a function of the parameter's name, so none are drawn here."""

    def __init__(self, in_width: int, out_width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def partial(self, x: Tensor) -> Tensor:
        """Without the bias, for partial sums: a bias must join once, after the ranks' parts are added up."""
        return F.linear(x, self.weight.to(x.dtype))

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)
