"""The twin of the activation kernel, in plain torch.

R rows, F hidden width, G = 2F: the gate's half, then the other.
"""

from __future__ import annotations

from torch import Tensor

from moefold.ops.swiglu import ACTIVATIONS


def weighted_activation(gate_up_RG: Tensor, weight_R: Tensor | None, activation: str = "swiglu") -> Tensor:
    """act(gate, up) of every row, times the row's weight if there is one, in the wider of the two formats."""
    out_RF = ACTIVATIONS[activation](*gate_up_RG.chunk(2, dim=-1))
    return out_RF if weight_R is None else (out_RF * weight_R[:, None]).to(gate_up_RG.dtype)
