"""One MoE layer: route, dispatch, experts, combine.

    route      the router gives each token K experts and a prob for each
    dispatch   rows travel to the ranks that hold their experts
    experts    each row through its experts, times its probs; the shared expert sees every token of this rank
    combine    rows travel back and are summed per token
    output     from the latent dim back to the model dim, plus the shared expert's output

The shared expert needs no communication, so it runs in the experts step, where it can hide another microbatch's
all-to-all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from moefold.moe.dispatch.base import Dispatcher, ExpertInput, Routing
from moefold.moe.experts import Experts
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.router import Router
from moefold.nn.batch import Batch
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.phase import Phase, Stream


class Routed(NamedTuple):
    """The layer's input, the same in the dim in which it travels, and each token's experts and probs."""

    x_tD: Tensor
    x_tL: Tensor
    routing: Routing
    report: RoutingReport


class Dispatched(NamedTuple):
    """The rows that the experts of this rank received, beside the tokens of this rank for the shared expert."""

    x_tD: Tensor
    expert_in: ExpertInput
    report: RoutingReport


class ExpertOutput(NamedTuple):
    """One row per received row; ``ticket`` holds what the dispatcher needs to send them back."""

    shared_tD: Tensor | None
    expert_out_RL: Tensor
    ticket: Any
    report: RoutingReport


class Combined(NamedTuple):
    """Per token of this rank: the sum of its experts' outputs, each times its prob."""

    shared_tD: Tensor | None
    y_tL: Tensor
    report: RoutingReport


class MoELayer(nn.Module):
    def __init__(
        self,
        router: Router,
        dispatcher: Dispatcher,
        experts: Experts,
        shared: FeedForward | None = None,
        shared_gate: Linear | None = None,
        latent_down: Linear | None = None,
        latent_up: Linear | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.latent_down = latent_down
        self.latent_up = latent_up

    def forward(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None) -> tuple[Tensor, RoutingReport]:
        """``earlier_E``: how many tokens each expert got from the step's earlier microbatches, for its balance loss."""
        routed = self._route(x_tD, batch, earlier_E)
        dispatched = self._dispatch(routed)
        del routed
        expert_out = self._experts(dispatched, batch)
        # As between phases: what later steps do not need is freed before they allocate.
        del dispatched
        combined = self._combine(expert_out)
        del expert_out
        return self._output(combined)

    def phases(self, batch: Batch, earlier_E: Tensor | None) -> tuple[Phase, ...]:
        """The same steps one by one, for schedules that interleave microbatches or recompute some of them."""
        return (
            Phase("route", Stream.COMPUTE, lambda x_tD: self._route(x_tD, batch, earlier_E)),
            Phase("dispatch", Stream.COMM, self._dispatch),
            Phase("experts", Stream.COMPUTE, lambda dispatched: self._experts(dispatched, batch)),
            Phase("combine", Stream.COMM, self._combine),
            Phase("output", Stream.COMPUTE, self._output),
        )

    def _route(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None) -> Routed:
        routing, report = self.router(x_tD, batch, earlier_E)
        x_tL = x_tD if self.latent_down is None else self.latent_down(x_tD)
        return Routed(x_tD, x_tL, routing, report)

    def _dispatch(self, routed: Routed) -> Dispatched:
        expert_in = self.dispatcher.dispatch(routed.x_tL, routed.routing)
        return Dispatched(routed.x_tD, expert_in, routed.report)

    def _experts(self, dispatched: Dispatched, batch: Batch) -> ExpertOutput:
        shared_tD = None if self.shared is None else self.shared(dispatched.x_tD, batch)
        if shared_tD is not None and self.shared_gate is not None:
            shared_tD = shared_tD * self.shared_gate(dispatched.x_tD).sigmoid()
        expert_out_RL = self.experts(dispatched.expert_in)
        return ExpertOutput(shared_tD, expert_out_RL, dispatched.expert_in.ticket, dispatched.report)

    def _combine(self, expert_out: ExpertOutput) -> Combined:
        y_tL = self.dispatcher.combine(expert_out.expert_out_RL, expert_out.ticket)
        return Combined(expert_out.shared_tD, y_tL, expert_out.report)

    def _output(self, combined: Combined) -> tuple[Tensor, RoutingReport]:
        """Apart from ``_combine``: a matmul belongs on the compute stream."""
        y_tD = combined.y_tL if self.latent_up is None else self.latent_up(combined.y_tL)
        return (y_tD if combined.shared_tD is None else y_tD + combined.shared_tD), combined.report
