"""Run one microbatch's forward phases interleaved with another's backward phases.

The two microbatches are independent, so each can compute while the other's all-to-all runs. Both phase sequences
advance in turn: each runs its compute phases up to its next communication phase, submits that to the comm stream, and
yields to the other; only for a phase that exchanges a few counts it waits itself. This is the order
`forward_backward` of `schedule/layer_orders.py`, made by the same function: it depends on the phases alone and never on
timing, so that all ranks issue the same collectives in the same order. While a rank has to wait, it computes deferred
weight gradients; these are taken oldest first, so that their sums do not depend on timing either. Those that a wait had
no time for are computed after it: what they need, the input and the output's gradient of each matmul, is held for the
phases between two waits and no longer. A backward without a partner, such as the last of a step, hides its exchanges
behind its own weight gradients in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.stages import StageSpec
from moefold.model.decoder import DecoderOutput, HiddenState
from moefold.nn.batch import Batch
from moefold.nn.phase import Phase, Stream
from moefold.nn.phase_autograd import Gradients, OnPart, Recorded, backward_phase, map_tensors, record
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.pipeline_state import hidden_tensors, objective_of
from moefold.schedule.layer_orders import take_turns

# Runs a piece of work in some context.
Around = Callable[[Callable[[], Any]], Any]


class ReadyPhase(NamedTuple):
    """A phase that is ready to run; ``at_once`` and ``has_weights`` as in ``Phase``."""

    stream: Stream
    work: Callable[[], Any]
    has_weights: bool
    at_once: bool = False


class RecordedForward(NamedTuple):
    """The recorded phases of one stage's forward, and the tensors of its input hidden state."""

    inputs: tuple[Tensor, ...]
    phases: tuple[Recorded, ...]
    # The stage's local loss, if it has one: the last output of its last phase.
    objective: Tensor | None


def run_recorded(
    local_model: LocalModel,
    batch: Batch,
    earlier_ME: Tensor,
    stage: StageSpec,
    hidden: HiddenState | None,
    enter: OnPart | None = None,
) -> tuple[DecoderOutput, RecordedForward]:
    """A forward by itself, recorded for a backward that may be overlapped. ``enter`` is called before each part."""
    phases = _ForwardPhases(local_model, batch, earlier_ME, stage, hidden, enter)
    for phase in phases:
        phases.set_result(phase.work())
    return phases.output()


def backward_recorded(
    local_model: LocalModel, forward: RecordedForward, gradients: tuple[Tensor, ...], defer_as: object | None
) -> None:
    """A recorded backward by itself; sets ``.grad`` of the stage's input hidden state.

    No other microbatch is there to compute beside its exchanges, but its own weight gradients are: they are deferred,
    as in a pair.
    """
    key = object() if defer_as is None else defer_as
    phases = _BackwardPhases(forward, gradients, _deferring(local_model, key))
    _run_in_turn(local_model, [_Running(phases, iter(phases))], key, defer_as)
    phases.finish()


def run_overlapped(
    local_model: LocalModel,
    batch: Batch,
    earlier_ME: Tensor,
    stage: StageSpec,
    hidden: HiddenState | None,
    forward: RecordedForward,
    gradients: tuple[Tensor, ...],
    defer_as: object | None,
    enter: OnPart | None = None,
) -> tuple[DecoderOutput, RecordedForward]:
    """The forward of one microbatch, and the backward of another's recorded ``forward`` from its output ``gradients``.

    Weight gradients are deferred and computed while both wait, at the latest after the next wait or before a second
    computation without one, unless ``defer_as`` names the action that will compute them.
    """
    key = object() if defer_as is None else defer_as
    forward_phases = _ForwardPhases(local_model, batch, earlier_ME, stage, hidden, enter)
    backward_phases = _BackwardPhases(forward, gradients, _deferring(local_model, key))
    running = [_Running(backward_phases, iter(backward_phases)), _Running(forward_phases, iter(forward_phases))]
    _run_in_turn(local_model, running, key, defer_as)
    backward_phases.finish()
    return forward_phases.output()


def _deferring(local_model: LocalModel, key: object) -> Around:
    weight_grads = local_model.weight_grads
    assert weight_grads is not None

    def deferring(work: Callable[[], Any]) -> Any:
        with weight_grads.deferring(key):
            return work()

    return deferring


def _run_in_turn(local_model: LocalModel, running: list[_Running], key: object, defer_as: object | None) -> None:
    """Sequences of phases in turn, their communication on the comm stream. Weight gradients wait under ``key``."""
    weight_grads, stream = local_model.weight_grads, local_model.comm_stream
    assert weight_grads is not None and stream is not None
    for number in take_turns([each.phases.gives_way for each in running]):
        each = running[number]
        if each.pending is not None:
            each.phases.set_result(stream.wait(each.pending, weight_grads.run_one))
            each.pending, each.has_computed = None, False
            if defer_as is None:
                weight_grads.run_until(key)
        phase = next(each.ready)
        if phase.stream is Stream.COMM:
            each.pending = stream.submit(phase.work)
            if phase.at_once:
                each.phases.set_result(stream.wait(each.pending, weight_grads.run_one))
                each.pending = None
            continue
        if each.has_computed and phase.has_weights and defer_as is None:
            # The other's communication is under way: it overlaps with them now as well as in its wait, and what they
            # hold is not there while a dense layer or the embedding goes backward.
            weight_grads.run_until(key)
        each.phases.set_result(phase.work())
        each.has_computed |= phase.has_weights
    if defer_as is None:
        weight_grads.run_until(key)


class _Running:
    """One of the two interleaved sequences, and the communication phase it waits for."""

    def __init__(self, phases: _ForwardPhases | _BackwardPhases, ready: Iterator[ReadyPhase]) -> None:
        self.phases, self.ready = phases, ready
        # The handle of the communication stream.
        self.pending: Any = None
        # Since it last waited: something that has weights.
        self.has_computed = False


class _ForwardPhases:
    """Iterates over the phases of a stage's forward; each result must be set before the next phase is taken."""

    def __init__(
        self,
        local_model: LocalModel,
        batch: Batch,
        earlier_ME: Tensor,
        stage: StageSpec,
        hidden: HiddenState | None,
        enter: OnPart | None,
    ) -> None:
        self.enter = enter
        self.carry: Any = DecoderOutput(hidden)
        self.inputs = () if hidden is None else hidden_tensors(hidden)
        self.recorded: list[Recorded] = []
        objective = Phase("objective", Stream.COMPUTE, partial(_with_objective, local_model, batch))
        self.phases = (*local_model.model.phases(batch, earlier_ME, stage), objective)

    @property
    def gives_way(self) -> list[bool]:
        """After which of its phases the other microbatch goes on."""
        return [phase.stream is Stream.COMM and not phase.at_once for phase in self.phases]

    def __iter__(self) -> Iterator[ReadyPhase]:
        for phase in self.phases:
            if self.enter is not None and phase.part is not None:
                self.enter(phase.part)
            yield ReadyPhase(phase.stream, partial(record, phase, self.carry), phase.has_weights, phase.at_once)

    def set_result(self, result: tuple[Any, Recorded]) -> None:
        self.carry, recorded = result
        self.recorded.append(recorded)

    def output(self) -> tuple[DecoderOutput, RecordedForward]:
        output, objective = self.carry
        objective = None if objective is None else objective.detach()
        return output, RecordedForward(self.inputs, tuple(self.recorded), objective)


def _with_objective(
    local_model: LocalModel, batch: Batch, output: DecoderOutput
) -> tuple[DecoderOutput, Tensor | None]:
    """The output and this stage's local loss; gradients flow only through the hidden state and the loss."""
    objective = objective_of(local_model, output, batch)
    detached = output._replace(
        reports=map_tensors(output.reports, Tensor.detach),
        loss_sum=map_tensors(output.loss_sum, Tensor.detach),
        ahead_loss_sums=map_tensors(output.ahead_loss_sums, Tensor.detach),
    )
    return detached, objective


class _BackwardPhases:
    """Iterates over the recorded phases in reverse, from the gradients of the stage's output.

    ``around`` wraps the backward of compute phases, to defer their weight gradients.
    """

    def __init__(
        self,
        forward: RecordedForward,
        gradients: tuple[Tensor, ...],
        around: Around,
    ) -> None:
        self.forward, self.around = forward, around
        # The gradient of the local loss is 1.
        losses = () if forward.objective is None else (forward.objective,)
        self.gradients: Gradients = [*gradients, *map(torch.ones_like, losses)]

    @property
    def gives_way(self) -> list[bool]:
        return [recorded.stream is Stream.COMM for recorded in reversed(self.forward.phases)]

    def __iter__(self) -> Iterator[ReadyPhase]:
        for recorded in reversed(self.forward.phases):
            work = partial(backward_phase, recorded, self.gradients)
            if recorded.stream is not Stream.COMM:
                work = partial(self.around, work)
            yield ReadyPhase(recorded.stream, work, recorded.has_weights)

    def set_result(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def finish(self) -> None:
        for tensor, gradient in zip(self.forward.inputs, self.gradients, strict=True):
            tensor.grad = gradient
