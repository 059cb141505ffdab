"""Rows of zeros through the routing map, so that every expert gets an aligned number of rows from every rank.

Narrow matmuls want rows per expert in multiples of 16, 32 or 128. Padding what was received costs a copy of it; here
each rank appends tokens of zeros to its own and assigns them to the experts that lack rows, with prob 0, before they
are sent (Megatron's ``moe_router_padding_for_quantization``, which routes real tokens instead). Any dispatcher carries
them like other tokens, and what comes back for them is cut off.

How many tokens are appended does not depend on the routing, so nothing is read back from the device: enough for every
expert to lack all but one row. Those that are not needed have no kept assignment and travel nowhere. A token has an
expert once at most: the rows that an expert lacks belong to neighbouring tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import Carried, Dispatcher, ExpertInput, Routing, counts_of


class _Counts(NamedTuple):
    """``padded``: the routing with tokens of zeros; its probs have no gradient and are not those that travel."""

    padded: Routing
    inner: Carried


class _Rows(NamedTuple):
    """What the dispatcher inside sends or has received."""

    inner: Carried
    num_tokens: int


class _Ticket(NamedTuple):
    inner: object
    num_tokens: int


class PaddedRouting(Dispatcher):
    """Around another dispatcher; experts without rows stay without."""

    def __init__(self, dispatcher: Dispatcher, num_experts: int, multiple: int) -> None:
        self.dispatcher, self.num_experts, self.multiple = dispatcher, num_experts, multiple

    def dispatch_counts(self, routing: Routing) -> _Counts:
        padded = pad_routing(routing._replace(probs=routing.probs.detach()), self.num_experts, self.multiple)
        return _Counts(padded, self.dispatcher.dispatch_counts(padded))

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts) -> _Rows:
        (num_tokens, dim), num_rows = x_tL.shape, counts.padded.experts.shape[0]
        zeros = x_tL.new_zeros(num_rows - num_tokens, dim)
        prob = torch.cat([routing.probs, counts.padded.probs[num_tokens:]])
        padded = counts.padded._replace(probs=prob)
        return _Rows(self.dispatcher.dispatch_prepare(torch.cat([x_tL, zeros]), padded, counts.inner), num_tokens)

    def dispatch_exchange(self, sent: _Rows) -> _Rows:
        return sent._replace(inner=self.dispatcher.dispatch_exchange(sent.inner))

    def dispatch_finish(self, received: _Rows) -> ExpertInput:
        expert_in = self.dispatcher.dispatch_finish(received.inner)
        return expert_in._replace(ticket=_Ticket(expert_in.ticket, received.num_tokens))

    def combine_prepare(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.dispatcher.combine_prepare(expert_out_RL, ticket.inner)

    def combine_exchange(self, rows_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.dispatcher.combine_exchange(rows_RL, ticket.inner)

    def combine_finish(self, rows_NL: Tensor, ticket: _Ticket) -> Tensor:
        # Copied where it is cut: a module whose parameters are sharded must not return a view.
        return self.dispatcher.combine_finish(rows_NL, ticket.inner)[: ticket.num_tokens].clone()


def routed_multiple(run: RunConfig) -> int:
    """Of rows that a rank sends to an expert; 1 where no tokens of zeros are routed."""
    recipe = run.precision.recipe
    return PRECISION_RECIPES[recipe].align if recipe is not None and run.kernels.row_padding == "routing_map" else 1


def assignments_per_token(moe: MoEConfig) -> int:
    """Columns of a routing: a token that experts choose may be chosen by all of them."""
    return moe.num_experts if moe.router.kind == "expert_choice" else moe.top_k


def num_pad_tokens(num_experts: int, top_k: int, multiple: int) -> int:
    """Enough for every expert to lack all but one row, and for one to have as many tokens."""
    return max(-(-num_experts * (multiple - 1) // top_k), multiple - 1)


def pad_routing(routing: Routing, num_experts: int, multiple: int) -> Routing:
    """The routing of this rank's tokens and of the tokens of zeros behind them."""
    counts_E, top_k, device = counts_of(routing, num_experts), routing.experts.shape[1], routing.experts.device
    lacking_E = -counts_E % multiple
    num_pads = num_pad_tokens(num_experts, top_k, multiple)
    # Place i belongs to token i % num_pads, so that the places of one expert are those of different tokens.
    place_N = torch.arange(num_pads * top_k, device=device)
    expert_N = torch.searchsorted(lacking_E.cumsum(0), place_N, right=True)
    kept_N = expert_N < num_experts
    expert_N = expert_N.where(kept_N, 0).to(routing.experts.dtype)
    pad_experts, pad_kept = (each.view(top_k, num_pads).t() for each in (expert_N, kept_N))
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    return Routing(
        torch.cat([routing.experts, pad_experts]),
        torch.cat([routing.probs, routing.probs.new_zeros(num_pads, top_k)]),
        torch.cat([kept, pad_kept]),
        counts_E + lacking_E,
    )


def pad_routing_reference(routing: Routing, num_experts: int, multiple: int) -> list[int]:
    """Rows that each expert lacks, counted one by one."""
    counts = [0] * num_experts
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    for expert, is_kept in zip(routing.experts.flatten().tolist(), kept.flatten().tolist(), strict=True):
        counts[expert] += is_kept
    return [-count % multiple for count in counts]
