"""Faults of what travels: routing rules and dispatchers that send a row once per rank, and messages between stages.

In pipelines gradients are lost, doubled or mixed up between stages and microbatches. As in `parallel_faults.py`, a
fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import moefold.moe.dedup_permute
import moefold.moe.dispatch.deduplicated
import moefold.parallel.param_shards
import moefold.pipeline.overlap
import moefold.pipeline.pipeline_state
import moefold.pipeline.runtime
import moefold.pipeline.step
from moefold.config.moe import RouterConfig
from moefold.model.decoder import Decoder, DecoderOutput, HiddenState
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.deduplicated import DedupExchange, Received, Rows
from moefold.moe.router import Router
from moefold.moe.routing_policies import CapacityDrop
from moefold.moe.topk import score
from moefold.nn.batch import Batch
from moefold.nn.matmul_policy import Gradient, WeightGradQueue
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import ParamShard
from moefold.pipeline.pipeline_state import PipelineState, StepSums
from moefold.prove.faults.parallel_faults import put, wrap
from moefold.schedule.actions import Action, Kind

# ---- rows sent once per rank ----


def one_assignment_per_row() -> None:
    def make(finish: Callable[..., Received]) -> Callable[..., Received]:
        def first_assignment_only(self: DedupExchange, rows: Rows) -> Received:
            received = finish(self, rows)
            if self.name == "across":
                return received
            prob_RK, kept_RK = received.assignments.probs, received.assignments.kept
            assert kept_RK is not None
            first_RK = kept_RK & (kept_RK.cumsum(1) == 1)
            return received._replace(assignments=received.assignments._replace(probs=prob_RK * first_RK))

        return first_assignment_only

    wrap(DedupExchange, "finish", make)


def _first_pair(rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
    """The first (token, rank) pair of each token; every token has one here."""
    return rows_NL.index_select(0, sent.order_N.index_select(0, sent.first_t))


def gradient_of_one_copy() -> None:
    def backward(ctx: Any, grad_NL: Tensor) -> tuple[Tensor, None]:
        return _first_pair(grad_NL, ctx.sent), None

    put(moefold.moe.dedup_permute._GatherTokens, "backward", staticmethod(backward))


def probs_gradient_of_one_rank() -> None:
    put(moefold.moe.dispatch.deduplicated, "reduce_token_values", _first_pair)


def hosts_not_summed() -> None:
    def make(finish: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def first_host(self: DedupExchange, rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
            return _first_pair(rows_NL, sent) if self.name == "across" else finish(self, rows_NL, sent)

        return first_host

    wrap(DedupExchange, "finish_back", make)


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


Gradients = tuple[Tensor, ...]


def tied_weight_not_summed_over_stages() -> None:
    put(moefold.parallel.param_shards, "all_reduce_p2p", lambda x, members, group: x.clone())


def tied_weight_twice_in_the_norm() -> None:
    def primary_shards(gradients: dict[str, Tensor], param_shards: dict[str, ParamShard]) -> list[Tensor]:
        return [
            g for name, g in gradients.items() if all(group.index == 0 for group in param_shards[name].replica_groups)
        ]

    put(moefold.pipeline.step, "primary_shards", primary_shards)


def _defer(times: int, which: Callable[[object], bool]) -> None:
    """Weight gradients of these are deferred so many times, instead of once."""

    def make(put_one: Callable[..., None]) -> Callable[..., None]:
        def deferred(self: WeightGradQueue, weight: nn.Parameter, gradient: Gradient) -> None:
            for _ in range(times if which(self._key) else 1):
                put_one(self, weight, gradient)

        return deferred

    wrap(WeightGradQueue, "put", make)


def _is_microbatch_1(key: object) -> bool:
    return isinstance(key, tuple) and key[1] == 1


def weight_gradients_of_a_microbatch_lost() -> None:
    _defer(0, _is_microbatch_1)


def weight_gradients_of_a_microbatch_added_twice() -> None:
    _defer(2, _is_microbatch_1)


def weight_gradients_of_overlapped_pairs_lost() -> None:
    """Weight gradients of overlapped backwards are queued under keys of their own, not under a microbatch's. Those of
    the first are there: a parameter without any gradient ends the step."""
    first: list[object] = []

    def is_later(key: object) -> bool:
        if isinstance(key, tuple):
            return False
        first.append(key)
        return key is not first[0]

    _defer(0, is_later)


def _received_gradients(change: Callable[[Action, Gradients], Gradients]) -> None:
    receive = moefold.pipeline.runtime.receive_backward

    def receive_and_change(state: PipelineState, action: Action) -> None:
        receive(state, action)
        key = (action.stage, action.microbatch)
        state.gradients[key] = change(action, state.gradients[key])

    moefold.pipeline.runtime._RUN_ACTION[Kind.RECV_B] = receive_and_change


def gradient_of_the_microbatch_before() -> None:
    before: dict[int, Gradients] = {}

    def stale(action: Action, arrived: Gradients) -> Gradients:
        used = before.get(action.stage, arrived)
        before[action.stage] = arrived
        return used

    _received_gradients(stale)


def gradient_of_the_second_hidden_state_lost() -> None:
    _received_gradients(lambda _, arrived: (arrived[0], *(torch.zeros_like(x) for x in arrived[1:])))


def hidden_states_of_two_microbatches_swapped() -> None:
    """A rank that received two microbatches of one stage uses the first one twice."""
    receive = moefold.pipeline.runtime.receive_forward
    first: dict[int, HiddenState] = {}

    def receive_first(state: PipelineState, action: Action) -> None:
        receive(state, action)
        arrived = state.inputs[action.stage, action.microbatch]
        kept = first.setdefault(action.stage, arrived)
        if action.microbatch == 1:
            for now, earlier in zip((arrived.x_tD, *arrived.ahead_tD), (kept.x_tD, *kept.ahead_tD), strict=True):
                now.data.copy_(earlier.data)

    moefold.pipeline.runtime._RUN_ACTION[Kind.RECV_F] = receive_first


def balance_of_middle_stages_forgotten() -> None:
    """Balance losses of a stage without the cross entropy are left out of its objective."""

    def make(objective_of: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def of_last_stage(local_model: LocalModel, output: DecoderOutput, batch: Batch) -> Tensor | None:
            return objective_of(local_model, output if output.hidden is None else output._replace(reports=()), batch)

        return of_last_stage

    for owner in (moefold.pipeline.runtime, moefold.pipeline.overlap):
        wrap(owner, "objective_of", make)


def balance_of_another_layer() -> None:
    """Rows of balance losses are numbered from 0 in every stage."""

    def make(add_sums: Callable[..., StepSums]) -> Callable[..., StepSums]:
        def from_zero(sums: StepSums, local_model: LocalModel, output: DecoderOutput, batch: Batch) -> StepSums:
            renumbered = tuple((row, report) for row, (_, report) in enumerate(output.reports))
            wrong = add_sums(sums, local_model, output._replace(reports=renumbered), batch)
            return add_sums(sums, local_model, output, batch)._replace(balance_M5=wrong.balance_M5)

        return from_zero

    wrap(moefold.pipeline.runtime, "add_sums", make)


def balance_of_the_last_microbatch() -> None:
    def make(add_sums: Callable[..., StepSums]) -> Callable[..., StepSums]:
        def not_added(sums: StepSums, *rest: Any) -> StepSums:
            alone = sums._replace(balance_M5=torch.zeros_like(sums.balance_M5))
            return add_sums(sums, *rest)._replace(balance_M5=add_sums(alone, *rest).balance_M5)

        return not_added

    wrap(moefold.pipeline.runtime, "add_sums", make)


def balance_of_this_rank_only() -> None:
    def make(over_ranks: Callable[..., StepSums]) -> Callable[..., StepSums]:
        return lambda sums, groups: over_ranks(sums, groups)._replace(balance_M5=sums.balance_M5)

    wrap(moefold.pipeline.step, "over_ranks", make)


def earlier_counts_of_another_layer() -> None:
    def make(row: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, name, earlier_ME: row(self, name, None if earlier_ME is None else earlier_ME.roll(1, 0))

    wrap(Decoder, "_row", make)


def mtp_losses_summed_not_averaged() -> None:
    def make(losses_of: Callable[..., Any]) -> Callable[..., Any]:
        def added(local_model: LocalModel, output: DecoderOutput, batch: Batch) -> Any:
            loss, ahead = losses_of(local_model, output, batch)
            return loss, None if ahead is None else ahead * local_model.run.model.num_mtp

        return added

    wrap(moefold.pipeline.pipeline_state, "label_losses_of", make)
