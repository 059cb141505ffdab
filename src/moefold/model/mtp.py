"""Multi-token prediction: a module that looks one token further ahead than the one before it.

The model's last layer leaves at place i a stream that predicts token i+1. Module k = 0, 1, ... joins the stream it is
handed with the embedding of token i+k+1, which by then is known, and one more block makes of both a stream that
predicts token i+k+2. The embedding and the head are the model's own. Predictions stay honest: at place i nothing later
than token i+k+1 has been looked at.

    token i+k+1 -- token_norm --+
                                +-- [token; stream] -- join -- block --> the next module; and a norm and the head
    stream     -- hidden_norm --+

The stream enters as the head reads it, after its norm: engines that draft with these modules feed them so. The token
comes first in the joined row, as in the published weights of DeepSeek-V3.

With D modules, the loss of all of them is DeepSeek-V3's eq. 24 and 25,

    L = weight / D * sum over k of (1/T) * sum of the cross entropies of module k

where T is the length of the sequence, not the number of labels k places further on. Over a step, T counts the tokens
of all its sequences (`model.mtp_divisor: tokens`). Megatron divides by the labels that count at that depth (`labels`):
a little more for a later depth, much more where few tokens have a label.

Everything before the block acts on each token by itself. So under tensor parallelism a rank joins the tokens it holds,
and the gradients of `join` and the norms are summed over the ranks like those of any norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from moefold.config.model import ModelConfig
from moefold.model.block import Block, BlockOutput
from moefold.nn.batch import Batch
from moefold.nn.layers import Linear, RMSNorm
from moefold.nn.phase import Phase, Stream, run_in_order


class MTPModule(nn.Module):
    def __init__(self, token_norm: RMSNorm, hidden_norm: RMSNorm, join: Linear, block: Block) -> None:
        super().__init__()
        self.token_norm = token_norm
        self.hidden_norm = hidden_norm
        self.join = join
        self.block = block

    @property
    def is_moe(self) -> bool:
        return self.block.is_moe

    def forward(self, x_tD: Tensor, token_tD: Tensor, batch: Batch, earlier_E: Tensor | None = None) -> BlockOutput:
        """``x_tD``: the stream before it, normed as for the head. ``token_tD``: embeddings of the tokens ahead."""
        output: BlockOutput = run_in_order(self.phases(lambda: token_tD, batch, earlier_E), x_tD)
        return output

    def phases(
        self, token_tD: Callable[[], Tensor], batch: Batch, earlier_E: Tensor | None = None
    ) -> tuple[Phase, ...]:
        """Tokens are looked up when the first phase runs, not before."""
        return Phase("join", Stream.COMPUTE, partial(self._join, token_tD)), *self.block.phases(batch, earlier_E)

    def _join(self, token_tD: Callable[[], Tensor], x_tD: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat((self.token_norm(token_tD()), self.hidden_norm(x_tD)), dim=-1))
        return joined


def loss_scales(model: ModelConfig, batch: Batch) -> tuple[float, ...]:
    """What each module's summed loss counts for in the loss of the whole step."""
    labels = batch.step_labels_ahead if model.mtp_divisor == "labels" else (batch.step_tokens,) * model.num_mtp
    # A depth without a label anywhere in the step sums to zero.
    return tuple(model.mtp_weight / model.num_mtp / max(count, 1) for count in labels)
