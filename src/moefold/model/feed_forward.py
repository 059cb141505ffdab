"""The dense gated feed-forward: a layer's own, or the expert that every token shares.

T tokens of a microbatch, t the tokens of this rank, D width, F this rank's part of the hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.model.batch import Batch
from moefold.model.products import Products
from moefold.model.seams import TokenSeam
from moefold.ops.backends import IN_TORCH, Kernels


class FeedForward(nn.Module):
    """Gate and up are stacked, [2, F, D], so that a cut over the hidden width leaves every rank with both of its."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        tokens: TokenSeam,
        products: Products,
        kernels: Kernels = IN_TORCH,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, hidden, width))
        self.down = nn.Parameter(torch.empty(width, hidden))
        self.activation = activation
        self.kernels = kernels
        self.tokens = tokens
        self.products = products

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        x_TD = self.tokens.gather(x_tD, batch)
        gate_up_TG = self.products.linear(x_TD, self.gate_up)
        hidden_TF = self.kernels.weighted_activation(gate_up_TG, None, self.activation)
        return self.tokens.reduce(self.products.linear(hidden_TF, self.down))
