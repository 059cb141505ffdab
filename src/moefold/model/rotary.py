"""Rotary positions of a layer: tables on demand, so there is no buffer to place, move or save."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.config.attention import RopeConfig
from moefold.ops.rope import rotary_tables, rotate


class Rotary(nn.Module):
    """Turns ``dim`` entries of every head by its token's position."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        super().__init__()
        self.rope = rope
        self.dim = dim

    def forward(self, positions_T: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions: float32, or float64 where the activations are."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return rotary_tables(self.rope, self.dim, positions_T, wide)

    def turn(self, x_THd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(x_THd, *tables, interleaved=self.rope.interleaved)
