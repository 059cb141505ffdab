"""The dense gated feed-forward: a layer's own, or the expert that every token shares.

T tokens of a microbatch, t the tokens of this rank, D width, F this rank's part of the hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.model.seams import TokenSeam
from moefold.ops.swiglu import ACTIVATIONS


class FeedForward(nn.Module):
    """Gate and up are stacked, [2, F, D], so that a cut over the hidden width leaves every rank with both of its."""

    def __init__(self, width: int, hidden: int, activation: str, tokens: TokenSeam) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, hidden, width))
        self.down = nn.Parameter(torch.empty(width, hidden))
        self.activation = ACTIVATIONS[activation]
        self.tokens = tokens

    def forward(self, x_tD: Tensor) -> Tensor:
        x_TD = self.tokens.gather(x_tD)
        gate_TF, up_TF = F.linear(x_TD, self.gate_up.flatten(0, 1).to(x_TD.dtype)).chunk(2, dim=-1)
        return self.tokens.reduce(F.linear(self.activation(gate_TF, up_TF), self.down.to(x_TD.dtype)))
