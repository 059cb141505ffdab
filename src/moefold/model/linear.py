"""A matrix, used in the format of what it multiplies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.model.products import Products


class Linear(nn.Module):
    """y = x W^T + b. Values are set later, as a function of the parameter's name, so none are drawn here."""

    def __init__(self, in_width: int, out_width: int, products: Products, bias: bool = False) -> None:
        super().__init__()
        self.products = products
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """Without the bias, for partial sums: a bias must join once, after the ranks' parts are added up."""
        return self.products.linear(x, self.weight)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)
