"""One loop carries out an order: whatever the schedule, whatever the number and shapes of microbatches.

Every kind of action is one function. A step without a pipeline is the order of one rank; validation is an order without
its backward half. Microbatches may have different shapes: both sides of a boundary know them from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefold.model.decoder import DecoderOutput
from moefold.nn.batch import Batch
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.overlap import run_overlapped, run_taped, tape_back
from moefold.pipeline.pipeline_state import (
    Key,
    PipelineState,
    StepSums,
    add_sums,
    as_leaf,
    flat,
    init_state,
    objective_of,
)
from moefold.schedule.actions import Action, Kind, Order
from moefold.schedule.names import schedule_named
from moefold.schedule.passes import executable

# Told after each action.
OnAction = Callable[[PipelineState, Action], None]


def no_action_callback(state: PipelineState, action: Action) -> None:
    """Does not want to know."""


def run_schedule(
    local_model: LocalModel, batches: Sequence[Batch], on_action: OnAction = no_action_callback
) -> StepSums:
    """Forward and backward over all microbatches; gradients add up in the parameters."""
    order = _order(local_model, len(batches))
    actions = order.actions[local_model.groups["pp"].index]
    state = init_state(local_model, order, batches, actions)
    for action in actions:
        _RUN_ACTION[action.kind](state, action)
        on_action(state, action)
    if local_model.weight_grads is not None:
        local_model.weight_grads.run_all()
    if state.pipes is not None:
        state.pipes.finish()
    return state.sums


@torch.no_grad()
def run_forward_only(local_model: LocalModel, batches: Sequence[Batch]) -> StepSums:
    """The forward half alone."""
    order = _order(local_model, len(batches))
    actions = tuple(_forward_half(order.actions[local_model.groups["pp"].index]))
    state = init_state(local_model, order, batches, actions)
    for action in actions:
        _RUN_ACTION[action.kind](state, action)
        if action.kind is Kind.FORWARD:
            # No backward will come for them.
            state.forwards.clear()
            state.inputs.pop((action.stage, action.microbatch), None)
    if state.pipes is not None:
        state.pipes.finish()
    return state.sums


def _order(local_model: LocalModel, num_microbatches: int) -> Order:
    parallel = local_model.run.parallel
    return executable(parallel.schedule, parallel.pp, parallel.vpp, num_microbatches)


def _forward_half(actions: Sequence[Action]) -> list[Action]:
    forward = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
    return [part for action in actions for part in action.parts if part.kind in forward]


def forward(state: PipelineState, action: Action) -> None:
    key = (action.stage, action.microbatch)
    local_model, batch, stage = (
        state.local_model,
        state.batches[action.microbatch],
        state.local_model.stages[action.stage],
    )
    hidden = state.inputs.get(key)
    if schedule_named(local_model.run.parallel.schedule).overlaps and torch.is_grad_enabled():
        after_forward(state, key, *run_taped(local_model, batch, state.sums.plain_ME, stage, hidden))
    else:
        # Where everything is gathered already, what surrounds the module's call has nothing to do.
        run = local_model.model.forward if local_model.reshard_per_step else local_model.model
        output: DecoderOutput = run(batch, state.sums.plain_ME, stage, hidden)
        after_forward(state, key, output, (output.hidden, objective_of(local_model, output, batch)))


def after_forward(state: PipelineState, key: Key, output: DecoderOutput, kept: Any) -> None:
    """Count what the stage did, and hand its stream on; ``kept`` is what its backward will need."""
    stage, microbatch = key
    state.forwards[key] = kept
    state.sums = add_sums(state.sums, state.local_model, output, state.batches[microbatch])
    if output.hidden is None:
        return
    if state.order.crosses(stage):
        state.leaving[key] = flat(output.hidden)
    else:
        state.inputs[stage + 1, microbatch] = as_leaf(flat(output.hidden))


def backward(state: PipelineState, action: Action) -> None:
    key = (action.stage, action.microbatch)
    kept = state.forwards.pop(key)
    if schedule_named(state.local_model.run.parallel.schedule).overlaps:
        if action.kind is Kind.BACKWARD and state.local_model.weight_grads is not None:
            # What pairs have left comes first, so that sums have one order.
            state.local_model.weight_grads.run_all()
        tape_back(kept, state.gradients.pop(key, ()))
    else:
        hidden, objective = kept
        roots: list[Tensor] = [] if objective is None else [objective]
        grads: list[Tensor | None] = [None] * len(roots)
        if hidden is not None:
            roots += flat(hidden)
            grads += state.gradients.pop(key)
        torch.autograd.backward(roots, grads)
    after_backward(state, key)


def after_backward(state: PipelineState, key: Key) -> None:
    stage, microbatch = key
    given = state.inputs.pop(key, None)
    if given is None:
        return
    gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in flat(given))
    if state.order.crosses(stage - 1):
        state.leaving[key] = gradients
    else:
        state.gradients[stage - 1, microbatch] = gradients


def backward_input(state: PipelineState, action: Action) -> None:
    weight_grads = state.local_model.weight_grads
    assert weight_grads is not None
    with weight_grads.deferring((action.stage, action.microbatch)):
        backward(state, action)


def backward_weight(state: PipelineState, action: Action) -> None:
    assert state.local_model.weight_grads is not None
    state.local_model.weight_grads.run_until((action.stage, action.microbatch))


def send_forward(state: PipelineState, action: Action) -> None:
    _send(state, action, action.stage + 1)


def send_backward(state: PipelineState, action: Action) -> None:
    _send(state, action, action.stage - 1)


def _send(state: PipelineState, action: Action, to_stage: int) -> None:
    assert state.pipes is not None
    state.pipes.send(state.leaving.pop((action.stage, action.microbatch)), state.peer(to_stage))


def receive_forward(state: PipelineState, action: Action) -> None:
    assert state.pipes is not None
    state.inputs[action.stage, action.microbatch] = as_leaf(state.pipes.receive())


def receive_backward(state: PipelineState, action: Action) -> None:
    assert state.pipes is not None
    state.gradients[action.stage, action.microbatch] = tuple(state.pipes.receive())


def overlapped(state: PipelineState, action: Action) -> None:
    """A forward and a backward at once, each the other's pastime while its tokens travel."""
    assert action.pair is not None
    ahead, back = action.pair
    key, back_key = (ahead.stage, ahead.microbatch), (back.stage, back.microbatch)
    put_off = back.kind is Kind.BACKWARD_INPUT
    output, kept = run_overlapped(
        state.local_model,
        state.batches[ahead.microbatch],
        state.sums.plain_ME,
        state.local_model.stages[ahead.stage],
        state.inputs.get(key),
        state.forwards.pop(back_key),
        state.gradients.pop(back_key, ()),
        put_off_as=back_key if put_off else None,
    )
    after_forward(state, key, output, kept)
    after_backward(state, back_key)


_RUN_ACTION: dict[Kind, Callable[[PipelineState, Action], None]] = {
    Kind.FORWARD: forward,
    Kind.BACKWARD: backward,
    Kind.BACKWARD_INPUT: backward_input,
    Kind.BACKWARD_WEIGHT: backward_weight,
    Kind.SEND_F: send_forward,
    Kind.SEND_B: send_backward,
    Kind.RECV_F: receive_forward,
    Kind.RECV_B: receive_backward,
    Kind.OVERLAP: overlapped,
}
