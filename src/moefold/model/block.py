"""One transformer layer: attention, softmax or linear, then a dense or an MoE feed-forward, each added to the residual
stream.

``phases`` gives the same forward in pieces: the pipeline interleaves those of two microbatches, and recomputation
works phase by phase. While the MoE layer's phases run, the residual waits beside their carry (``nn/phase.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from moefold.attention.gated_delta_net import GatedDeltaNet
from moefold.attention.gqa import GroupedQueryAttention
from moefold.attention.mla import LatentAttention
from moefold.moe.layer import MoELayer
from moefold.moe.load_balancing import RoutingReport
from moefold.nn.batch import Batch
from moefold.nn.layers import FeedForward, RMSNorm
from moefold.nn.phase import Phase, Stream, inside, nest, recomputed, run_in_order
from moefold.nn.phase_graphs import PhaseGraphs
from moefold.nn.step_retention import KEEP_ALL, Retention


class BlockOutput(NamedTuple):
    x_tD: Tensor
    report: RoutingReport | None


class Block(nn.Module):
    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: GroupedQueryAttention | LatentAttention | GatedDeltaNet,
        feed_forward_norm: RMSNorm,
        feed_forward: FeedForward | MoELayer,
        recompute: frozenset[str] = frozenset(),
        retain: Retention = KEEP_ALL,
        graphs: PhaseGraphs | None = None,
    ) -> None:
        """``recompute`` names the phases that keep their input only; ``retain``: what others keep of their steps;
        ``graphs`` captures phases."""
        super().__init__()
        self.graphs = graphs
        self.retain = retain
        self.recompute = recompute
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed_forward, MoELayer)

    def forward(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None = None) -> BlockOutput:
        if self.recompute or self.graphs is not None:
            output: BlockOutput = run_in_order(self.phases(batch, earlier_E), x_tD)
            return output
        with self.retain.scope():
            x_tD = self._attention(x_tD, batch)
            if isinstance(self.feed_forward, FeedForward):
                return self._dense(x_tD, batch)
            y_tD, report = self.feed_forward(self._feed_norm(x_tD), batch, earlier_E)
            return BlockOutput(x_tD + y_tD, report)

    def phases(self, batch: Batch, earlier_E: Tensor | None = None) -> tuple[Phase, ...]:
        """The same forward step by step; phases in ``recompute`` save their input only."""
        attention = Phase("attention", Stream.COMPUTE, lambda x_tD: self._attention(x_tD, batch))
        if isinstance(self.feed_forward, FeedForward):
            dense = Phase("feed_forward", Stream.COMPUTE, lambda x_tD: self._dense(x_tD, batch))
            phases: tuple[Phase, ...] = attention, dense
        else:
            phases = attention, *nest(self.feed_forward.phases(batch, earlier_E), self._feed_norm, _add_residual)
        phases = tuple(
            recomputed(phase) if phase.name in self.recompute else inside(phase, self.retain.scope) for phase in phases
        )
        return phases if self.graphs is None else self.graphs.in_regions(self, phases)

    def _attention(self, x_tD: Tensor, batch: Batch) -> Tensor:
        return x_tD + self.attention(self.retain.step("attention_norm", self.attention_norm, x_tD), batch)

    def _feed_norm(self, x_tD: Tensor) -> Tensor:
        return self.retain.step("feed_norm", self.feed_forward_norm, x_tD)

    def _dense(self, x_tD: Tensor, batch: Batch) -> BlockOutput:
        return BlockOutput(x_tD + self.feed_forward(self._feed_norm(x_tD), batch), None)


def _add_residual(x_tD: Tensor, output: tuple[Tensor, RoutingReport]) -> BlockOutput:
    y_tD, report = output
    return BlockOutput(x_tD + y_tD, report)
