"""One loop runs the actions of any schedule, for any number and shapes of microbatches.

Each kind of action is one function. A step without a pipeline is a schedule of one rank; validation runs the forward
actions only. Microbatches may have different shapes: both sides of a stage boundary know them from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moefold.comm.spans import timed
from moefold.model.decoder import DecoderOutput
from moefold.nn.batch import Batch
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.overlap import backward_recorded, run_overlapped, run_recorded
from moefold.pipeline.pipeline_state import (
    Key,
    OnOutput,
    PipelineState,
    StepSums,
    add_sums,
    as_leaf,
    hidden_tensors,
    init_state,
    objective_of,
)
from moefold.schedule.actions import Action, Kind, Order
from moefold.schedule.graph_regions import graph_slots
from moefold.schedule.names import schedule_named
from moefold.schedule.offload_order import offload_order
from moefold.schedule.passes import executable

# Called after each action.
OnAction = Callable[[PipelineState, Action], None]


def run_schedule(
    local_model: LocalModel,
    batches: Sequence[Batch],
    on_action: OnAction | None = None,
    on_output: OnOutput | None = None,
) -> StepSums:
    """Forward and backward over all microbatches; gradients accumulate in the parameters' ``.grad``."""
    spans = local_model.spans
    with timed(spans, "host", "order of actions"):
        order = _order(local_model, len(batches))
        actions = order.actions[local_model.groups["pp"].index]
        state = init_state(local_model, order, batches, actions)
        state.on_output = on_output
        if local_model.retention is not None:
            reloads = offload_order(actions)
            local_model.retention.offload.start_step(reloads.backward, reloads.stays)
        if local_model.graphs is not None:
            local_model.graphs.start_step(graph_slots(actions))
        ends = last_backwards(actions)
        state.first_forwards, state.last_backwards = first_forwards(actions), plain_last_backwards(actions, ends)
    for number, action in enumerate(actions):
        with timed(spans, "compute" if action.kind in _COMPUTES else "host", action):
            _RUN_ACTION[action.kind](state, action)
        for stage in ends.get(number, ()):
            with timed(spans, "compute", "gradients of a stage"):
                local_model.sharding.after_backward(stage)
        if on_action is not None:
            on_action(state, action)
    if local_model.weight_grads is not None:
        with timed(spans, "compute", "weight gradients"):
            local_model.weight_grads.run_all()
    if state.channels is not None:
        state.channels.finish()
    return state.sums


@torch.no_grad()
def run_forward_only(local_model: LocalModel, batches: Sequence[Batch], on_output: OnOutput | None = None) -> StepSums:
    """The forward actions only, with exact numbers of rows: nothing is run again here."""
    with local_model.exact_rows():
        return _run_forward_only(local_model, batches, on_output)


def _run_forward_only(local_model: LocalModel, batches: Sequence[Batch], on_output: OnOutput | None) -> StepSums:
    order = _order(local_model, len(batches))
    actions = tuple(_forward_half(order.actions[local_model.groups["pp"].index]))
    state = init_state(local_model, order, batches, actions)
    state.on_output = on_output
    state.first_forwards = first_forwards(actions)
    for action in actions:
        _RUN_ACTION[action.kind](state, action)
        if action.kind is Kind.FORWARD:
            # No backward follows.
            state.forwards.clear()
            state.inputs.pop((action.stage, action.microbatch), None)
    if state.channels is not None:
        state.channels.finish()
    return state.sums


def first_forwards(actions: Sequence[Action]) -> frozenset[Key]:
    """Of every stage."""
    first: dict[int, Key] = {}
    for part in (part for action in actions for part in action.parts if part.kind is Kind.FORWARD):
        first.setdefault(part.stage, (part.stage, part.microbatch))
    return frozenset(first.values())


def last_backwards(actions: Sequence[Action]) -> dict[int, list[int]]:
    """By an action's number, the stages whose last backward it has: of inputs, of weights or of both."""
    last: dict[int, int] = {}
    for number, action in enumerate(actions):
        for part in action.parts:
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                last[part.stage] = number
    return {number: [stage for stage in last if last[stage] == number] for number in last.values()}


def plain_last_backwards(actions: Sequence[Action], ends: Mapping[int, Sequence[int]]) -> frozenset[Key]:
    """Of the last backwards those that compute all gradients of a part before they go on to the one before it."""
    return frozenset(
        (action.stage, action.microbatch)
        for action in (actions[number] for number in ends)
        if action.kind is Kind.BACKWARD
    )


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
    if local_model.retention is not None:
        local_model.retention.offload.start_forward(key)
    if local_model.graphs is not None:
        batch = local_model.graphs.start_forward(key, batch)
    if schedule_named(local_model.run.parallel.schedule).overlaps:
        # Without gradients too: FSDP takes the first unit that is called for the outermost one, and these phases call
        # units inside of blocks. A block called later would be refused.
        recorded = run_recorded(local_model, batch, state.sums.plain_ME, stage, hidden, state.part_hooks(key).enter)
        after_forward(state, key, *recorded)
    else:
        # Where parameters are unsharded for the whole step, FSDP's forward hooks are skipped.
        run = local_model.model.forward if local_model.reshard_per_step else local_model.model
        output: DecoderOutput = run(batch, state.sums.plain_ME, stage, hidden, state.part_hooks(key))
        after_forward(state, key, output, (output.hidden, objective_of(local_model, output, batch)))


def after_forward(state: PipelineState, key: Key, output: DecoderOutput, saved: Any) -> None:
    """Add to the sums and pass the hidden state on; ``saved`` is what the stage's backward needs."""
    stage, microbatch = key
    state.forwards[key] = saved
    state.sums = add_sums(state.sums, state.local_model, output, state.batches[microbatch])
    if state.on_output is not None:
        state.on_output(microbatch, output)
    if output.hidden is None:
        return
    if state.order.crosses(stage):
        graphs, sent = state.local_model.graphs, hidden_tensors(output.hidden)
        state.pending_sends[key] = sent if graphs is None else graphs.leaving(sent)
    else:
        state.inputs[stage + 1, microbatch] = as_leaf(hidden_tensors(output.hidden))


def backward(state: PipelineState, action: Action) -> None:
    key = (action.stage, action.microbatch)
    saved = state.forwards.pop(key)
    if schedule_named(state.local_model.run.parallel.schedule).overlaps:
        if action.kind is Kind.BACKWARD and state.local_model.weight_grads is not None:
            # Weight gradients that earlier pairs have deferred come first, so that sums have one order.
            state.local_model.weight_grads.run_all()
        defer_as = key if action.kind is Kind.BACKWARD_INPUT else None
        backward_recorded(state.local_model, saved, state.gradients.pop(key, ()), defer_as)
    else:
        hidden, objective = saved
        roots: list[Tensor] = [] if objective is None else [objective]
        grads: list[Tensor | None] = [None] * len(roots)
        if hidden is not None:
            roots += hidden_tensors(hidden)
            grads += state.gradients.pop(key)
        torch.autograd.backward(roots, grads)
    after_backward(state, key)


def after_backward(state: PipelineState, key: Key) -> None:
    stage, microbatch = key
    if state.local_model.retention is not None:
        state.local_model.retention.offload.end_backward(key)
    hidden = state.inputs.pop(key, None)
    if hidden is None:
        return
    gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in hidden_tensors(hidden))
    if state.local_model.graphs is not None:
        gradients = state.local_model.graphs.leaving(gradients)
    if state.order.crosses(stage - 1):
        state.pending_sends[key] = gradients
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
    assert state.channels is not None
    state.channels.send(state.pending_sends.pop((action.stage, action.microbatch)), state.peer(to_stage))


def receive_forward(state: PipelineState, action: Action) -> None:
    assert state.channels is not None
    state.inputs[action.stage, action.microbatch] = as_leaf(state.channels.receive())


def receive_backward(state: PipelineState, action: Action) -> None:
    assert state.channels is not None
    state.gradients[action.stage, action.microbatch] = tuple(state.channels.receive())


def overlapped(state: PipelineState, action: Action) -> None:
    """A forward and a backward of two microbatches at once; each hides the other's all-to-all."""
    assert action.pair is not None
    fwd, bwd = action.pair
    fwd_key, bwd_key = (fwd.stage, fwd.microbatch), (bwd.stage, bwd.microbatch)
    if state.local_model.retention is not None:
        state.local_model.retention.offload.start_forward(fwd_key)
    output, saved = run_overlapped(
        state.local_model,
        state.batches[fwd.microbatch],
        state.sums.plain_ME,
        state.local_model.stages[fwd.stage],
        state.inputs.get(fwd_key),
        state.forwards.pop(bwd_key),
        state.gradients.pop(bwd_key, ()),
        defer_as=bwd_key if bwd.kind is Kind.BACKWARD_INPUT else None,
        enter=state.part_hooks(fwd_key).enter,
    )
    after_forward(state, fwd_key, output, saved)
    after_backward(state, bwd_key)


_COMPUTES = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.OVERLAP))
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
