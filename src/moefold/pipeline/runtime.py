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
from moefold.parallel.parallelize import Share
from moefold.pipeline.overlap import run_overlapped, run_taped, tape_back
from moefold.pipeline.pipeline_state import Flight, Key, StepSums, add_sums, flat, landed, objective_of, take_off
from moefold.schedule.actions import Action, Kind, Order
from moefold.schedule.names import schedule_named
from moefold.schedule.passes import executable

# Told after each action.
Told = Callable[[Flight, Action], None]


def untold(flight: Flight, action: Action) -> None:
    """Does not want to know."""


def carry_out(share: Share, batches: Sequence[Batch], told: Told = untold) -> StepSums:
    """Forward and backward over all microbatches; gradients add up in the parameters."""
    order = _order(share, len(batches))
    actions = order.actions[share.groups["pp"].index]
    flight = take_off(share, order, batches, actions)
    for action in actions:
        _CARRY_OUT[action.kind](flight, action)
        told(flight, action)
    if share.deferral is not None:
        share.deferral.run_all()
    if flight.pipes is not None:
        flight.pipes.finish()
    return flight.sums


@torch.no_grad()
def carry_forward(share: Share, batches: Sequence[Batch]) -> StepSums:
    """The forward half alone."""
    order = _order(share, len(batches))
    actions = tuple(_forward_half(order.actions[share.groups["pp"].index]))
    flight = take_off(share, order, batches, actions)
    for action in actions:
        _CARRY_OUT[action.kind](flight, action)
        if action.kind is Kind.FORWARD:
            # No backward will come for them.
            flight.forwards.clear()
            flight.inputs.pop((action.stage, action.microbatch), None)
    if flight.pipes is not None:
        flight.pipes.finish()
    return flight.sums


def _order(share: Share, num_microbatches: int) -> Order:
    parallel = share.run.parallel
    return executable(parallel.schedule, parallel.pp, parallel.vpp, num_microbatches)


def _forward_half(actions: Sequence[Action]) -> list[Action]:
    forward = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
    return [part for action in actions for part in action.parts if part.kind in forward]


def forward(flight: Flight, action: Action) -> None:
    key = (action.stage, action.microbatch)
    share, batch, stage = flight.share, flight.batches[action.microbatch], flight.share.stages[action.stage]
    stream = flight.inputs.get(key)
    if schedule_named(share.run.parallel.schedule).overlaps and torch.is_grad_enabled():
        after_forward(flight, key, *run_taped(share, batch, flight.sums.plain_ME, stage, stream))
    else:
        # Where everything is gathered already, what surrounds the module's call has nothing to do.
        run = share.model.forward if share.gathers_once else share.model
        output: DecoderOutput = run(batch, flight.sums.plain_ME, stage, stream)
        after_forward(flight, key, output, (output.stream, objective_of(share, output, batch)))


def after_forward(flight: Flight, key: Key, output: DecoderOutput, kept: Any) -> None:
    """Count what the stage did, and hand its stream on; ``kept`` is what its backward will need."""
    stage, microbatch = key
    flight.forwards[key] = kept
    flight.sums = add_sums(flight.sums, flight.share, output, flight.batches[microbatch])
    if output.stream is None:
        return
    if flight.order.crosses(stage):
        flight.leaving[key] = flat(output.stream)
    else:
        flight.inputs[stage + 1, microbatch] = landed(flat(output.stream))


def backward(flight: Flight, action: Action) -> None:
    key = (action.stage, action.microbatch)
    kept = flight.forwards.pop(key)
    if schedule_named(flight.share.run.parallel.schedule).overlaps:
        if action.kind is Kind.BACKWARD and flight.share.deferral is not None:
            # What pairs have left comes first, so that sums have one order.
            flight.share.deferral.run_all()
        tape_back(kept, flight.gradients.pop(key, ()))
    else:
        stream, objective = kept
        roots: list[Tensor] = [] if objective is None else [objective]
        grads: list[Tensor | None] = [None] * len(roots)
        if stream is not None:
            roots += flat(stream)
            grads += flight.gradients.pop(key)
        torch.autograd.backward(roots, grads)
    after_backward(flight, key)


def after_backward(flight: Flight, key: Key) -> None:
    stage, microbatch = key
    given = flight.inputs.pop(key, None)
    if given is None:
        return
    gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in flat(given))
    if flight.order.crosses(stage - 1):
        flight.leaving[key] = gradients
    else:
        flight.gradients[stage - 1, microbatch] = gradients


def backward_input(flight: Flight, action: Action) -> None:
    deferral = flight.share.deferral
    assert deferral is not None
    with deferral.putting_off((action.stage, action.microbatch)):
        backward(flight, action)


def backward_weight(flight: Flight, action: Action) -> None:
    assert flight.share.deferral is not None
    flight.share.deferral.run_until((action.stage, action.microbatch))


def send_forward(flight: Flight, action: Action) -> None:
    _send(flight, action, action.stage + 1)


def send_backward(flight: Flight, action: Action) -> None:
    _send(flight, action, action.stage - 1)


def _send(flight: Flight, action: Action, to_stage: int) -> None:
    assert flight.pipes is not None
    flight.pipes.send(flight.leaving.pop((action.stage, action.microbatch)), flight.peer(to_stage))


def receive_forward(flight: Flight, action: Action) -> None:
    assert flight.pipes is not None
    flight.inputs[action.stage, action.microbatch] = landed(flight.pipes.receive())


def receive_backward(flight: Flight, action: Action) -> None:
    assert flight.pipes is not None
    flight.gradients[action.stage, action.microbatch] = tuple(flight.pipes.receive())


def overlapped(flight: Flight, action: Action) -> None:
    """A forward and a backward at once, each the other's pastime while its tokens travel."""
    assert action.pair is not None
    ahead, back = action.pair
    key, back_key = (ahead.stage, ahead.microbatch), (back.stage, back.microbatch)
    put_off = back.kind is Kind.BACKWARD_INPUT
    output, kept = run_overlapped(
        flight.share,
        flight.batches[ahead.microbatch],
        flight.sums.plain_ME,
        flight.share.stages[ahead.stage],
        flight.inputs.get(key),
        flight.forwards.pop(back_key),
        flight.gradients.pop(back_key, ()),
        put_off_as=back_key if put_off else None,
    )
    after_forward(flight, key, output, kept)
    after_backward(flight, back_key)


_CARRY_OUT: dict[Kind, Callable[[Flight, Action], None]] = {
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
