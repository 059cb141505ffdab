"""One MoE layer: route, dispatch, experts, combine.

    route      the router gives each token K experts and a prob for each
    dispatch   rows travel to the ranks that hold their experts
    experts    each row through its experts, times its probs; the shared expert sees every token of this rank
    combine    rows travel back and are summed per token
    output     from the latent dim back to the model dim, plus the shared expert's output

Dispatch and combine have parts of their own (``moe/dispatch/base.py``): what sorts and sums rows computes, and only
collectives communicate. The shared expert needs no communication. It runs in the experts step, where it can hide
another microbatch's all-to-all. Given an ``overlap`` (``parallel.overlap: [shared_experts]``,
``parallel.exchange_chunks``), exchanges run beside computation of this microbatch itself: `moe/overlapped_layer.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from moefold.moe.dispatch.base import Carried, Dispatcher, ExpertInput, Routing
from moefold.moe.experts import Experts
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.overlapped_layer import LayerOverlap, Overlapped, OverlappedSteps, SharedExpert
from moefold.moe.router import Router
from moefold.nn.batch import Batch
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.phase import Phase, Stream, run_in_order


class Routed(NamedTuple):
    """The layer's input, the same in the dim in which it travels, and each token's experts and probs."""

    x_tD: Tensor
    x_tL: Tensor
    routing: Routing
    report: RoutingReport


class Counted(NamedTuple):
    """``counts``: what the dispatcher must know of the other ranks before it sorts."""

    routed: Routed
    counts: Carried


class InFlight(NamedTuple):
    """Rows on their way, as the dispatcher sends or has received them, beside the tokens of this rank."""

    x_tD: Tensor
    rows: Carried
    report: RoutingReport


class Dispatched(NamedTuple):
    """The rows that the experts of this rank received, beside the tokens of this rank for the shared expert."""

    x_tD: Tensor
    expert_in: ExpertInput
    report: RoutingReport


class ExpertOutput(NamedTuple):
    """One row per received row, before or after they travelled back; ``ticket`` is what the way back needs."""

    shared_tD: Tensor | None
    expert_out_RL: Tensor
    ticket: Carried
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
        overlap: LayerOverlap | None = None,
    ) -> None:
        """``overlap``: exchanges beside computation of the same microbatch; None: one after the other."""
        super().__init__()
        self.overlap = overlap
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.latent_down = latent_down
        self.latent_up = latent_up

    def forward(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None) -> tuple[Tensor, RoutingReport]:
        """``earlier_E``: how many tokens each expert got from the step's earlier microbatches, for its balance loss."""
        if self.overlap is not None:
            output: tuple[Tensor, RoutingReport] = run_in_order(self.phases(batch, earlier_E), x_tD)
            return output
        routed = self._route(x_tD, batch, earlier_E)
        dispatched = self._dispatch(routed)
        # As between phases: what later steps do not need is freed before they allocate.
        del routed
        expert_out = self._experts(dispatched, batch)
        del dispatched
        combined = self._combine(expert_out)
        del expert_out
        return self._output(combined)

    def phases(self, batch: Batch, earlier_E: Tensor | None) -> tuple[Phase, ...]:
        """The same steps one by one, for schedules that interleave microbatches or recompute some of them."""
        if self.overlap is not None:
            return self._overlapped_phases(batch, earlier_E, self.overlap)
        return (
            Phase("route", Stream.COMPUTE, lambda x_tD: self._route(x_tD, batch, earlier_E)),
            Phase("dispatch_counts", Stream.COMM, self._dispatch_counts, at_once=True),
            Phase("dispatch_prepare", Stream.COMPUTE, self._dispatch_prepare, has_weights=False),
            Phase("dispatch_exchange", Stream.COMM, self._dispatch_exchange),
            Phase("dispatch_finish", Stream.COMPUTE, self._dispatch_finish, has_weights=False),
            Phase("experts", Stream.COMPUTE, lambda dispatched: self._experts(dispatched, batch)),
            Phase("combine_prepare", Stream.COMPUTE, self._combine_prepare, has_weights=False),
            Phase("combine_exchange", Stream.COMM, self._combine_exchange),
            Phase("combine_finish", Stream.COMPUTE, self._combine_finish, has_weights=False),
            Phase("output", Stream.COMPUTE, self._output),
        )

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """Those that its forward uses."""
        return (self.dispatcher,) if self.overlap is None else self.overlap.dispatchers

    def _overlapped_phases(self, batch: Batch, earlier_E: Tensor | None, overlap: LayerOverlap) -> tuple[Phase, ...]:
        shared = None
        if (feed := self.shared) is not None:
            shared = SharedExpert(
                lambda x_tD: feed.to_hidden(x_tD, batch),
                lambda hidden, x_tD: self._gated(feed.from_hidden(hidden, batch), x_tD),
            )
        steps = OverlappedSteps(overlap, self.experts, shared)

        def output(returned: Overlapped) -> tuple[Tensor, RoutingReport]:
            return self._output(Combined(returned.shared, steps.outputs(returned), returned.report))

        return (
            Phase("route", Stream.COMPUTE, lambda x_tD: self._route(x_tD, batch, earlier_E)),
            Phase("dispatch_counts", Stream.COMM, lambda routed: steps.start(*routed), at_once=True),
            *steps.phases(),
            Phase("output", Stream.COMPUTE, output),
        )

    def _route(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None) -> Routed:
        routing, report = self.router(x_tD, batch, earlier_E)
        x_tL = x_tD if self.latent_down is None else self.latent_down(x_tD)
        return Routed(x_tD, x_tL, routing, report)

    def _dispatch(self, routed: Routed) -> Dispatched:
        return _dispatched(routed.x_tD, self.dispatcher.dispatch(routed.x_tL, routed.routing), routed.report)

    def _dispatch_counts(self, routed: Routed) -> Counted:
        return Counted(routed, self.dispatcher.dispatch_counts(routed.routing))

    def _dispatch_prepare(self, counted: Counted) -> InFlight:
        x_tD, x_tL, routing, report = counted.routed
        return InFlight(x_tD, self.dispatcher.dispatch_prepare(x_tL, routing, counted.counts), report)

    def _dispatch_exchange(self, sent: InFlight) -> InFlight:
        return sent._replace(rows=self.dispatcher.dispatch_exchange(sent.rows))

    def _dispatch_finish(self, received: InFlight) -> Dispatched:
        return _dispatched(received.x_tD, self.dispatcher.dispatch_finish(received.rows), received.report)

    def _experts(self, dispatched: Dispatched, batch: Batch) -> ExpertOutput:
        shared_tD = None
        if self.shared is not None:
            shared_tD = self._gated(self.shared(dispatched.x_tD, batch), dispatched.x_tD)
        expert_out_RL = self.experts(dispatched.expert_in)
        return ExpertOutput(shared_tD, expert_out_RL, dispatched.expert_in.ticket, dispatched.report)

    def _gated(self, shared_tD: Tensor, x_tD: Tensor) -> Tensor:
        return shared_tD if self.shared_gate is None else shared_tD * self.shared_gate(x_tD).sigmoid()

    def _combine(self, expert_out: ExpertOutput) -> Combined:
        y_tL = self.dispatcher.combine(expert_out.expert_out_RL, expert_out.ticket)
        return Combined(expert_out.shared_tD, y_tL, expert_out.report)

    def _combine_prepare(self, expert_out: ExpertOutput) -> ExpertOutput:
        rows_RL = self.dispatcher.combine_prepare(expert_out.expert_out_RL, expert_out.ticket)
        return expert_out._replace(expert_out_RL=rows_RL)

    def _combine_exchange(self, sent: ExpertOutput) -> ExpertOutput:
        return sent._replace(expert_out_RL=self.dispatcher.combine_exchange(sent.expert_out_RL, sent.ticket))

    def _combine_finish(self, received: ExpertOutput) -> Combined:
        y_tL = self.dispatcher.combine_finish(received.expert_out_RL, received.ticket)
        return Combined(received.shared_tD, y_tL, received.report)

    def _output(self, combined: Combined) -> tuple[Tensor, RoutingReport]:
        """Apart from ``_combine``: a matmul belongs on the compute stream."""
        y_tD = combined.y_tL if self.latent_up is None else self.latent_up(combined.y_tL)
        return (y_tD if combined.shared_tD is None else y_tD + combined.shared_tD), combined.report


def _dispatched(x_tD: Tensor, expert_in: ExpertInput, report: RoutingReport) -> Dispatched:
    return Dispatched(x_tD, expert_in, report._replace(overflow=expert_in.overflow))
