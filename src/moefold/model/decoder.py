"""The whole model: tokens in, the summed loss and what the routers did out.

t tokens of this rank, T of the microbatch, D width, V vocabulary, E experts, M layers that are mixtures.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from moefold.model.batch import Batch
from moefold.model.block import Block
from moefold.model.embedding import Embedding
from moefold.model.linear import Linear
from moefold.model.loss import LanguageLoss
from moefold.model.moe.balance import RoutingReport
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import Router
from moefold.model.norm import RMSNorm


class DecoderOutput(NamedTuple):
    """The loss summed over this microbatch's labels, and one report per mixture, in layer order."""

    loss_sum: Tensor
    reports: tuple[RoutingReport, ...]


class Decoder(nn.Module):
    """The loss is part of the forward: logits are never whole, and parameters are needed only inside this call."""

    def __init__(
        self, embedding: Embedding, layers: list[Block], final_norm: RMSNorm, head: Linear | None, loss: LanguageLoss
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.head = head
        self.loss = loss

    def forward(self, batch: Batch, earlier_ME: Tensor | None = None) -> DecoderOutput:
        """``earlier_ME``: tokens per expert in the step's earlier microbatches, one row per mixture."""
        x_tD, reports = self._body(batch, earlier_ME)
        return DecoderOutput(self.loss(x_tD, self.head_weight, batch), reports)

    def logits(self, batch: Batch) -> Tensor:
        """[T, V], written out in full: for comparisons on one process, not for training."""
        x_TD, _ = self._body(batch, None)
        return x_TD @ self.head_weight.to(x_TD.dtype).T

    def routers(self) -> list[Router]:
        """Of every mixture, in layer order."""
        mixtures = (layer.feed_forward for layer in self.layers)
        return [mixture.router for mixture in mixtures if isinstance(mixture, MoELayer)]

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _body(self, batch: Batch, earlier_ME: Tensor | None) -> tuple[Tensor, tuple[RoutingReport, ...]]:
        x_tD = self.embedding(batch.tokens_T)
        reports: list[RoutingReport] = []
        for layer in self.layers:
            x_tD, report = layer(x_tD, batch, None if earlier_ME is None else _row_for(layer, earlier_ME, len(reports)))
            if report is not None:
                reports.append(report)
        return self.final_norm(x_tD), tuple(reports)


def _row_for(layer: nn.Module, earlier_ME: Tensor, mixtures_before: int) -> Tensor | None:
    return earlier_ME[mixtures_before] if isinstance(layer, Block) and layer.is_moe else None
