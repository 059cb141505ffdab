"""Faults of rows that travel once and whose answers are added up on the splits home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import moefold.moe.dedup_permute
import moefold.moe.dispatch.dedup_exchange
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.dedup_exchange import DedupExchange, Received
from moefold.prove.faults.parallel_faults import put, wrap


def one_choice_per_row() -> None:
    def make(dispatch: Callable[..., Received]) -> Callable[..., Received]:
        def keep_first(self: DedupExchange, x_tL: Tensor, routing: Any) -> Received:
            received = dispatch(self, x_tL, routing)
            if self.name == "across":
                return received
            prob_RK, kept_RK = received.assignments.probs, received.assignments.kept
            assert kept_RK is not None
            first_RK = kept_RK & (kept_RK.cumsum(1) == 1)
            return received._replace(assignments=received.assignments._replace(probs=prob_RK * first_RK))

        return keep_first

    wrap(DedupExchange, "dispatch", make)


def _first_pair(rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
    """Of each source row that has any; all have here."""
    return rows_NL.index_select(0, sent.order_N.index_select(0, sent.first_t))


def gradient_of_one_copy() -> None:
    def backward(ctx: Any, grad_NL: Tensor) -> tuple[Tensor, None]:
        return _first_pair(grad_NL, ctx.sent), None

    put(moefold.moe.dedup_permute._GatherTokens, "backward", staticmethod(backward))


def weights_gradient_of_one_rank() -> None:
    put(moefold.moe.dispatch.dedup_exchange, "reduce_token_values", _first_pair)


def hosts_not_added_up() -> None:
    def make(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep_one_host(self: DedupExchange, expert_out_RL: Tensor, splits: Any, sent: TokenRankMap) -> Tensor:
            if self.name != "across":
                return combine(self, expert_out_RL, splits, sent)
            back_NL = moefold.moe.dispatch.dedup_exchange.all_to_all_rows(
                expert_out_RL, send=splits.recv, recv=splits.send, group=self.group
            )
            return _first_pair(back_NL, sent)

        return keep_one_host

    wrap(DedupExchange, "combine", make)
