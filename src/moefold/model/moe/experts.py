"""The experts of this rank, run on rows sorted by expert.

R rows here, e experts of this rank, L width of a row (the model's, or the latent one), F hidden width of an expert.

The output of an expert is linear in its hidden activation, so a token's weight for the expert may as well multiply
there. That is half of what is known as memory-efficient permutation: multiplying the output would need the R x L
output again in the backward pass, while the activation is kept for the second product anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.config.moe import MoEConfig
from moefold.dispatch.contract import Arrived
from moefold.model.products import Products
from moefold.ops.swiglu import ACTIVATIONS


class Experts(nn.Module):
    """Built for all experts; how many are here, and how wide their share is, is read off the weights when it runs.

    ``bias_share`` is this rank's part of the output bias. Ranks that split an expert add their outputs up, so the bias
    must be whole on one of them and 0 on the others.
    """

    def __init__(self, config: MoEConfig, width: int, products: Products, bias_share: float = 1.0) -> None:
        super().__init__()
        num_experts, hidden, row_width = config.num_experts, config.expert_width, config.latent_width or width
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, hidden, row_width))
        self.down = nn.Parameter(torch.empty(num_experts, row_width, hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2, hidden)) if config.expert_bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, row_width)) if config.expert_bias else None
        self.activation = ACTIVATIONS[config.activation]
        self.weigh_activation = config.weight_at == "activation"
        self.products = products
        self.bias_share = bias_share

    def forward(self, arrived: Arrived) -> Tensor:
        hidden_RF = self._hidden(arrived)
        if self.weigh_activation:
            out_RL = self._times(weigh(hidden_RF, arrived.weight_R), self.down, arrived)
            return out_RL if self.down_bias is None else out_RL + weigh(self._bias_down(arrived), arrived.weight_R)
        out_RL = self._times(hidden_RF, self.down, arrived)
        if self.down_bias is not None:
            out_RL = out_RL + self._bias_down(arrived)
        return weigh(out_RL, arrived.weight_R)

    def _hidden(self, arrived: Arrived) -> Tensor:
        gate_up_RG = self._times(arrived.rows_RD, self.gate_up, arrived)
        if self.gate_up_bias is not None:
            gate_up_RG = gate_up_RG + per_row(self.gate_up_bias.flatten(1), arrived)
        return self.activation(*gate_up_RG.chunk(2, dim=-1))

    def _bias_down(self, arrived: Arrived) -> Tensor:
        assert self.down_bias is not None
        # Times 0 and not left out: every rank's bias takes part in the backward pass.
        return per_row(self.down_bias, arrived) * self.bias_share

    def _times(self, rows: Tensor, weight: Tensor, arrived: Arrived) -> Tensor:
        return self.products.grouped(rows, weight, arrived.rows_per_expert_e, arrived.rows_per_expert)


def weigh(rows: Tensor, weight_R: Tensor) -> Tensor:
    """Multiply in the wider of the two formats, then return to the rows' own.

    The weight's gradient is a sum over a row's whole width and feeds the router, which works in float32 for a reason.
    """
    return (rows * weight_R[:, None]).to(rows.dtype)


def per_row(bias_e: Tensor, arrived: Arrived) -> Tensor:
    """Each row's own expert's bias; the total is known from the rows, so it need not be read back."""
    bias_R = bias_e.repeat_interleave(arrived.rows_per_expert_e, dim=0, output_size=arrived.rows_RD.shape[0])
    return bias_R.to(arrived.rows_RD.dtype)
