"""Faults of pipelines: gradients lost, doubled or mixed up between stages and microbatches.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import moefold.parallel.param_shards
import moefold.pipeline.overlap
import moefold.pipeline.pipeline_state
import moefold.pipeline.runtime
import moefold.pipeline.step
from moefold.model.decoder import Decoder, DecoderOutput, HiddenState
from moefold.nn.batch import Batch
from moefold.nn.matmul_policy import Gradient, WeightGradQueue
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import ParamShard
from moefold.pipeline.pipeline_state import PipelineState
from moefold.prove.faults.parallel_faults import put, wrap
from moefold.schedule.actions import Action, Kind

Received = tuple[Tensor, ...]


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
    """Weight gradients of an overlapped pair are queued under a key of their own, not under a microbatch's."""
    _defer(0, lambda key: not isinstance(key, tuple))


def _received_gradients(change: Callable[[Action, Received], Received]) -> None:
    receive = moefold.pipeline.runtime.receive_backward

    def receive_and_change(state: PipelineState, action: Action) -> None:
        receive(state, action)
        key = (action.stage, action.microbatch)
        state.gradients[key] = change(action, state.gradients[key])

    moefold.pipeline.runtime._RUN_ACTION[Kind.RECV_B] = receive_and_change


def gradient_of_the_microbatch_before() -> None:
    before: dict[int, Received] = {}

    def stale(action: Action, arrived: Received) -> Received:
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


def earlier_counts_of_another_layer() -> None:
    def make(row: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, name, earlier_ME: row(self, name, None if earlier_ME is None else earlier_ME.roll(1, 0))

    wrap(Decoder, "_row", make)


def mtp_losses_summed_not_averaged() -> None:
    def make(losses_of: Callable[..., Any]) -> Callable[..., Any]:
        def added(local_model: LocalModel, output: DecoderOutput, batch: Batch) -> Any:
            loss, ahead, balance = losses_of(local_model, output, batch)
            return loss, None if ahead is None else ahead * local_model.run.model.num_mtp, balance

        return added

    wrap(moefold.pipeline.pipeline_state, "losses_of", make)
