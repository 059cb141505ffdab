"""Faults of rows that travel once and whose answers are added up on the way home."""

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
    def make(go: Callable[..., Received]) -> Callable[..., Received]:
        def go_and_forget(self: DedupExchange, x_tD: Tensor, routing: Any) -> Received:
            landed = go(self, x_tD, routing)
            if self.name == "across":
                return landed
            weight_SK, kept_SK = landed.choices.weight_tK, landed.choices.kept_tK
            assert kept_SK is not None
            first_SK = kept_SK & (kept_SK.cumsum(1) == 1)
            return landed._replace(choices=landed.choices._replace(weight_tK=weight_SK * first_SK))

        return go_and_forget

    wrap(DedupExchange, "go", make)


def _first_pair(rows_ND: Tensor, pairs: TokenRankMap) -> Tensor:
    """Of each source row that has pairs; all have here."""
    return rows_ND.index_select(0, pairs.pair_N.index_select(0, pairs.first_t))


def gradient_of_one_copy() -> None:
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return _first_pair(grad_ND, ctx.pairs), None

    put(moefold.moe.dedup_permute._Spread, "backward", staticmethod(backward))


def weights_gradient_of_one_rank() -> None:
    put(moefold.moe.dispatch.dedup_exchange, "reduce_token_values", _first_pair)


def hosts_not_added_up() -> None:
    def make(home: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def first_home(self: DedupExchange, answers_SD: Tensor, way: Any, pairs: TokenRankMap) -> Tensor:
            if self.name != "across":
                return home(self, answers_SD, way, pairs)
            back_ND = moefold.moe.dispatch.dedup_exchange.all_to_all_rows(
                answers_SD, send=way.recv, recv=way.send, group=self.group
            )
            return _first_pair(back_ND, pairs)

        return first_home

    wrap(DedupExchange, "home", make)
