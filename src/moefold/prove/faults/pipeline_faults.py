"""Faults of pipelines: gradients lost, doubled or mixed up between stages and microbatches.

As in ``sabotage.py``, a fault replaces a name where it is used, on the ranks only, and the ranks get to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moefold.parallel.param_shards
import moefold.pipeline.overlap
import moefold.pipeline.pipeline_state
import moefold.pipeline.runtime
import moefold.pipeline.step
from moefold.model.decoder import Decoder
from moefold.nn.matmul_policy import WeightGradQueue
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


def _put_off(times: int, which: Callable[[object], bool]) -> None:
    """Weight gradients of these are put off so many times, instead of once."""

    def make(put_one: Callable[..., None]) -> Callable[..., None]:
        def put_off(self: WeightGradQueue, weight: Any, gradient: Any) -> None:
            for _ in range(times if which(self._key) else 1):
                put_one(self, weight, gradient)

        return put_off

    wrap(WeightGradQueue, "put", make)


def _is_microbatch_1(key: object) -> bool:
    return isinstance(key, tuple) and key[1] == 1


def weight_gradients_of_a_microbatch_lost() -> None:
    _put_off(0, _is_microbatch_1)


def weight_gradients_of_a_microbatch_added_twice() -> None:
    _put_off(2, _is_microbatch_1)


def weight_gradients_of_overlapped_pairs_lost() -> None:
    """Those of a pair wait under a name of their own, and not under that of a microbatch."""
    _put_off(0, lambda key: not isinstance(key, tuple))


def _received_gradients(change: Callable[[Action, Received], Received]) -> None:
    receive = moefold.pipeline.runtime.receive_backward

    def receive_and_change(flight: PipelineState, action: Action) -> None:
        receive(flight, action)
        key = (action.stage, action.microbatch)
        flight.gradients[key] = change(action, flight.gradients[key])

    moefold.pipeline.runtime._RUN_ACTION[Kind.RECV_B] = receive_and_change


def gradient_of_the_microbatch_before() -> None:
    before: dict[int, Received] = {}

    def stale(action: Action, arrived: Received) -> Received:
        used = before.get(action.stage, arrived)
        before[action.stage] = arrived
        return used

    _received_gradients(stale)


def gradient_of_the_second_stream_forgotten() -> None:
    _received_gradients(lambda _, arrived: (arrived[0], *(torch.zeros_like(x) for x in arrived[1:])))


def streams_of_two_microbatches_swapped() -> None:
    """A rank that was given two microbatches of one stage takes the first for the second."""
    receive = moefold.pipeline.runtime.receive_forward
    first: dict[int, Any] = {}

    def receive_first(flight: PipelineState, action: Action) -> None:
        receive(flight, action)
        arrived = flight.inputs[action.stage, action.microbatch]
        kept = first.setdefault(action.stage, arrived)
        if action.microbatch == 1:
            for now, earlier in zip((arrived.x_tD, *arrived.ahead_tD), (kept.x_tD, *kept.ahead_tD), strict=True):
                now.data.copy_(earlier.data)

    moefold.pipeline.runtime._RUN_ACTION[Kind.RECV_F] = receive_first


def balance_of_middle_stages_forgotten() -> None:
    """Only the stage that has the language loss has an objective; the others follow their output's gradient alone."""

    def make(objective_of: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def of_last_stage(local_model: Any, output: Any, batch: Any) -> Tensor | None:
            return objective_of(local_model, output if output.hidden is None else output._replace(reports=()), batch)

        return of_last_stage

    for owner in (moefold.pipeline.runtime, moefold.pipeline.overlap):
        wrap(owner, "objective_of", make)


def earlier_counts_of_another_layer() -> None:
    def make(row: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, name, earlier_ME: row(self, name, None if earlier_ME is None else earlier_ME.roll(1, 0))

    wrap(Decoder, "_row", make)


def losses_ahead_added_not_averaged() -> None:
    def make(losses_of: Callable[..., Any]) -> Callable[..., Any]:
        def added(local_model: Any, output: Any, batch: Any) -> Any:
            loss, ahead, balance = losses_of(local_model, output, batch)
            return loss, None if ahead is None else ahead * local_model.run.model.num_mtp, balance

        return added

    wrap(moefold.pipeline.pipeline_state, "losses_of", make)
