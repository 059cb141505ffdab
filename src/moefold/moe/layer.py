"""One mixture-of-experts layer: route, send, compute, bring home.

t tokens of this rank, E experts, D width, L the width in which tokens travel, R rows arriving here.

The shared expert sees every token and needs nobody's answer, so it is computed beside the routed experts, where it can
hide another microbatch's communication.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from moefold.moe.dispatch.base import Arrived, Dispatcher, Routing
from moefold.moe.experts import Experts
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.router import Router
from moefold.nn.batch import Batch
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.phase import Phase, Stream, run_in_order


class Routed(NamedTuple):
    x_tD: Tensor
    sent_tL: Tensor
    routing: Routing
    report: RoutingReport


class Dispatched(NamedTuple):
    x_tD: Tensor
    arrived: Arrived
    report: RoutingReport


class ExpertOutput(NamedTuple):
    shared_tD: Tensor | None
    rows_RL: Tensor
    ticket: Any
    report: RoutingReport


class Combined(NamedTuple):
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
        y_tD, report = run_in_order(self.phases(batch, earlier_E), x_tD)
        return y_tD, report

    def phases(self, batch: Batch, earlier_E: Tensor | None) -> tuple[Phase, ...]:
        return (
            Phase("route", Stream.COMPUTE, partial(self._route, batch, earlier_E)),
            Phase("dispatch", Stream.COMM, self._dispatch),
            Phase("experts", Stream.COMPUTE, partial(self._experts, batch)),
            Phase("combine", Stream.COMM, self._combine),
            Phase("answer", Stream.COMPUTE, self._answer),
        )

    def _route(self, batch: Batch, earlier_E: Tensor | None, x_tD: Tensor) -> Routed:
        routing, report = self.router(x_tD, batch, earlier_E)
        sent_tL = x_tD if self.latent_down is None else self.latent_down(x_tD)
        return Routed(x_tD, sent_tL, routing, report)

    def _dispatch(self, routed: Routed) -> Dispatched:
        return Dispatched(routed.x_tD, self.dispatcher.dispatch(routed.sent_tL, routed.routing), routed.report)

    def _experts(self, batch: Batch, sent: Dispatched) -> ExpertOutput:
        shared_tD = None if self.shared is None else self.shared(sent.x_tD, batch)
        if shared_tD is not None and self.shared_gate is not None:
            shared_tD = shared_tD * self.shared_gate(sent.x_tD).sigmoid()
        return ExpertOutput(shared_tD, self.experts(sent.arrived), sent.arrived.ticket, sent.report)

    def _combine(self, answered: ExpertOutput) -> Combined:
        y_tL = self.dispatcher.combine(answered.rows_RL, answered.ticket)
        return Combined(answered.shared_tD, y_tL, answered.report)

    def _answer(self, home: Combined) -> tuple[Tensor, RoutingReport]:
        """A phase of its own: what has weights belongs on the compute lane."""
        y_tD = home.y_tL if self.latent_up is None else self.latent_up(home.y_tL)
        return (y_tD if home.shared_tD is None else y_tD + home.shared_tD), home.report
