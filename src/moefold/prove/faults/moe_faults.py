"""Faults of routing rules and of dispatchers that send a row once per rank.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

import moefold.moe.dedup_permute
import moefold.moe.dispatch.dedup_exchange
import moefold.pipeline.step
from moefold.config.moe import RouterConfig
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.dedup_exchange import DedupExchange, Received, Splits
from moefold.moe.router import Router
from moefold.moe.routing_policies import CapacityDrop
from moefold.moe.topk import score
from moefold.prove.faults.parallel_faults import put, wrap

# ---- rows sent once per rank ----


def one_assignment_per_row() -> None:
    def make(dispatch: Callable[..., Received]) -> Callable[..., Received]:
        def first_assignment_only(self: DedupExchange, *given: Any) -> Received:
            received = dispatch(self, *given)
            if self.name == "across":
                return received
            prob_RK, kept_RK = received.assignments.probs, received.assignments.kept
            assert kept_RK is not None
            first_RK = kept_RK & (kept_RK.cumsum(1) == 1)
            return received._replace(assignments=received.assignments._replace(probs=prob_RK * first_RK))

        return first_assignment_only

    wrap(DedupExchange, "dispatch", make)


def _first_pair(rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
    """The first (token, rank) pair of each token; every token has one here."""
    return rows_NL.index_select(0, sent.order_N.index_select(0, sent.first_t))


def gradient_of_one_copy() -> None:
    def backward(ctx: Any, grad_NL: Tensor) -> tuple[Tensor, None]:
        return _first_pair(grad_NL, ctx.sent), None

    put(moefold.moe.dedup_permute._GatherTokens, "backward", staticmethod(backward))


def probs_gradient_of_one_rank() -> None:
    put(moefold.moe.dispatch.dedup_exchange, "reduce_token_values", _first_pair)


def hosts_not_summed() -> None:
    def make(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def first_host(self: DedupExchange, expert_out_RL: Tensor, splits: Splits, sent: TokenRankMap) -> Tensor:
            if self.name != "across":
                return combine(self, expert_out_RL, splits, sent)
            back_NL = moefold.moe.dispatch.dedup_exchange.all_to_all_rows(
                expert_out_RL, send=splits.recv, recv=splits.send, group=self.group
            )
            return _first_pair(back_NL, sent)

        return first_host

    wrap(DedupExchange, "combine", make)


# ---- routing rules ----


def balance_counts_the_biased_topk() -> None:
    """The top-k with bias and groups, instead of the plain top-k of the scores."""
    put(Router, "plain_topk", lambda self, logits_tE, assignment: assignment.experts)


def drops_by_the_raw_score() -> None:
    """Differs from dropping by prob where all scores of a token are low."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def with_scores(self: Router, x_tD: Tensor, *rest: Any) -> Any:
            drop = self.drop
            assert isinstance(drop, CapacityDrop)
            scores_tE = score(self._logits(x_tD).detach(), self.config.router.score)
            drop.kept = lambda expert_tK, prob_tK, *others: CapacityDrop.kept(  # type: ignore[method-assign]
                drop, expert_tK, scores_tE.gather(1, expert_tK), *others
            )
            return forward(self, x_tD, *rest)

        return with_scores

    wrap(Router, "forward", make)


def bias_counts_what_was_dropped() -> None:
    def make(over_ranks: Callable[..., Any]) -> Callable[..., Any]:
        return lambda sums, groups: (summed := over_ranks(sums, groups))._replace(kept_ME=summed.counts_ME)

    wrap(moefold.pipeline.step, "over_ranks", make)


def capacity_of_a_device_for_each_expert() -> None:
    def make(init: Callable[..., None]) -> Callable[..., None]:
        return lambda self, config, capacity: init(self, config, replace(capacity, per="expert", device_groups=1))

    wrap(CapacityDrop, "__init__", make)


def a_group_scored_by_its_best_expert() -> None:
    put(RouterConfig, "group_terms", lambda self, top_k: 1)
