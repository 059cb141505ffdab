"""One transformer layer: attention, then a dense or a routed feed-forward, each on top of what came in.

t tokens of this rank, D width, E experts.

A block's forward is its list of phases. What a mixture of experts does between its phases travels in the carry, next to
the stream that its answer will be added to.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from moefold.attention.gqa import GroupedQueryAttention
from moefold.attention.mla import LatentAttention
from moefold.moe.layer import MoELayer
from moefold.moe.load_balancing import RoutingReport
from moefold.nn.batch import Batch
from moefold.nn.layers import FeedForward, RMSNorm
from moefold.nn.phase import Phase, Stream, nest, recomputed, run_in_order


class BlockOutput(NamedTuple):
    x_tD: Tensor
    report: RoutingReport | None


class Block(nn.Module):
    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: GroupedQueryAttention | LatentAttention,
        feed_forward_norm: RMSNorm,
        feed_forward: FeedForward | MoELayer,
        recompute: frozenset[str] = frozenset(),
    ) -> None:
        """``recompute`` names the phases that keep their input only."""
        super().__init__()
        self.recompute = recompute
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed_forward, MoELayer)

    def forward(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None = None) -> BlockOutput:
        output: BlockOutput = run_in_order(self.phases(batch, earlier_E), x_tD)
        return output

    def phases(self, batch: Batch, earlier_E: Tensor | None = None) -> tuple[Phase, ...]:
        attention = Phase("attention", Stream.COMPUTE, partial(self._attention, batch))
        if isinstance(self.feed_forward, FeedForward):
            phases: tuple[Phase, ...] = attention, Phase("feed_forward", Stream.COMPUTE, partial(self._dense, batch))
        else:
            phases = attention, *nest(self.feed_forward.phases(batch, earlier_E), self.feed_forward_norm, _add_answer)
        return tuple(recomputed(phase) if phase.name in self.recompute else phase for phase in phases)

    def _attention(self, batch: Batch, x_tD: Tensor) -> Tensor:
        return x_tD + self.attention(self.attention_norm(x_tD), batch)

    def _dense(self, batch: Batch, x_tD: Tensor) -> BlockOutput:
        return BlockOutput(x_tD + self.feed_forward(self.feed_forward_norm(x_tD), batch), None)


def _add_answer(x_tD: Tensor, answer: tuple[Tensor, RoutingReport]) -> BlockOutput:
    y_tD, report = answer
    return BlockOutput(x_tD + y_tD, report)
