"""Faults of routing rules: what balance losses count, who is dropped, what the loss-free bias follows.

As in ``sabotage.py``, a fault replaces a name where it is used, on the ranks only, and the ranks get to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

import moefold.pipeline.step
from moefold.config.moe import RouterConfig
from moefold.moe.router import Router
from moefold.moe.routing_policies import CapacityDrop
from moefold.moe.topk import score
from moefold.prove.faults.parallel_faults import put, wrap


def balance_counts_where_tokens_went() -> None:
    """With bias and groups, instead of the plain top-k of the scores."""
    put(Router, "plain_topk", lambda self, logits_tE, choice: choice.experts)


def drops_by_the_raw_score() -> None:
    """A token's best experts have a high probability where all its scores are low."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(self: Router, x_tD: Tensor, *rest: Any) -> Any:
            drop = self.drop
            assert isinstance(drop, CapacityDrop)
            scores_tE = score(self._logits(x_tD).detach(), self.config.router.score)
            drop.kept = lambda expert_tK, prob_tK, *others: CapacityDrop.kept(  # type: ignore[method-assign]
                drop, expert_tK, scores_tE.gather(1, expert_tK), *others
            )
            return forward(self, x_tD, *rest)

        return remembered

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
