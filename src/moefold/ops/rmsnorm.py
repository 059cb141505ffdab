"""Root-mean-square normalisation, of a whole vector and of one that is spread over ranks.

T tokens, D width, d this rank's part of the width.

The division happens in float32 (float64 stays float64), the weight multiplies after the cast back: the order in which
the published models were trained.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefold.ops.cast import widened


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, then weigh its entries."""
    wide_TD = widened(x_TD)
    mean_T1 = wide_TD.square().mean(-1, keepdim=True)
    return _scaled(x_TD, wide_TD, mean_T1, weight_D, eps)


def rms_norm_spread(
    x_Td: Tensor, weight_d: Tensor, eps: float, full_width: int, sum_heads: Callable[[Tensor], Tensor]
) -> Tensor:
    """The same when this rank holds only a part of each row; ``sum_heads`` adds the squares of the other parts."""
    wide_Td = widened(x_Td)
    mean_T1 = sum_heads(wide_Td.square().sum(-1, keepdim=True)) / full_width
    return _scaled(x_Td, wide_Td, mean_T1, weight_d, eps)


def _scaled(x: Tensor, wide: Tensor, mean: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.to(x.dtype) * (wide * torch.rsqrt(mean + eps)).to(x.dtype)
