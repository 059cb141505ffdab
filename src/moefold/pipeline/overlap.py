"""Run one microbatch's forward phases interleaved with another's backward phases.

The two microbatches are independent, so each can compute while the other's all-to-all runs. Both phase sequences
advance in turn: each runs its compute phases up to its next communication phase, submits that to the comm stream, and
yields to the other. The interleaving depends on the phases alone and never on timing, so that all ranks issue the same
collectives in the same order. While a rank has to wait, it computes deferred weight gradients; these are taken oldest
first, so that their sums do not depend on timing either. Those that a wait had no time for are computed after it: what
they need, the input and the output's gradient of each matmul, is held for the phases between two waits and no longer.
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
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.phase_autograd import Gradients, Recorded, backward_phase, map_tensors, record
from moefold.pipeline.pipeline_state import hidden_tensors, objective_of

# A phase that is ready to run, and the stream it runs on.
ReadyPhase = tuple[Stream, Callable[[], Any]]


class RecordedForward(NamedTuple):
    """The recorded phases of one stage's forward, and the tensors of its input hidden state."""

    inputs: tuple[Tensor, ...]
    phases: tuple[Recorded, ...]
    # The stage's local loss, if it has one: the last output of its last phase.
    objective: Tensor | None


def run_recorded(
    local_model: LocalModel, batch: Batch, earlier_ME: Tensor, stage: StageSpec, hidden: HiddenState | None
) -> tuple[DecoderOutput, RecordedForward]:
    """A forward by itself, recorded for a backward that may be overlapped."""
    phases = _ForwardPhases(local_model, batch, earlier_ME, stage, hidden)
    for _, work in phases:
        phases.set_result(work())
    return phases.output()


def backward_recorded(forward: RecordedForward, gradients: tuple[Tensor, ...]) -> None:
    """A recorded backward by itself; sets ``.grad`` of the stage's input hidden state."""
    phases = _BackwardPhases(forward, gradients, None)
    for _, work in phases:
        phases.set_result(work())
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
) -> tuple[DecoderOutput, RecordedForward]:
    """The forward of one microbatch, and the backward of another's recorded ``forward`` from its output ``gradients``.

    Weight gradients are deferred and computed while both wait, at the latest after the next wait or before a second
    computation without one, unless ``defer_as`` names the action that will compute them.
    """
    weight_grads, stream = local_model.weight_grads, local_model.comm_stream
    assert weight_grads is not None and stream is not None
    key = object() if defer_as is None else defer_as

    def deferring(work: Callable[[], Any]) -> Any:
        with weight_grads.deferring(key):
            return work()

    forward_phases = _ForwardPhases(local_model, batch, earlier_ME, stage, hidden)
    backward_phases = _BackwardPhases(forward, gradients, deferring)
    running = [_Running(backward_phases, iter(backward_phases)), _Running(forward_phases, iter(forward_phases))]
    while running:
        for each in list(running):
            if each.pending is not None:
                each.phases.set_result(stream.wait(each.pending, weight_grads.run_one))
                each.pending = None
                if defer_as is None:
                    weight_grads.run_until(key)
            has_computed = False
            for phase_stream, work in each.ready:
                if phase_stream is Stream.COMM:
                    each.pending = stream.submit(work)
                    break
                if has_computed and defer_as is None:
                    # The other's communication is under way: it overlaps with them now as well as in its wait, and
                    # what they hold is not there while a dense layer or the embedding goes backward.
                    weight_grads.run_until(key)
                each.phases.set_result(work())
                has_computed = True
            else:
                running.remove(each)
    if defer_as is None:
        weight_grads.run_until(key)
    backward_phases.finish()
    return forward_phases.output()


class _Running:
    """One of the two interleaved sequences, and the communication phase it waits for."""

    def __init__(self, phases: _ForwardPhases | _BackwardPhases, ready: Iterator[ReadyPhase]) -> None:
        self.phases, self.ready = phases, ready
        # The handle of the communication stream.
        self.pending: Any = None


class _ForwardPhases:
    """Iterates over the phases of a stage's forward; each result must be set before the next phase is taken."""

    def __init__(
        self, local_model: LocalModel, batch: Batch, earlier_ME: Tensor, stage: StageSpec, hidden: HiddenState | None
    ) -> None:
        self.carry: Any = DecoderOutput(hidden)
        self.inputs = () if hidden is None else hidden_tensors(hidden)
        self.recorded: list[Recorded] = []
        objective = Phase("objective", Stream.COMPUTE, partial(_with_objective, local_model, batch))
        self.phases = (*local_model.model.phases(batch, earlier_ME, stage), objective)

    def __iter__(self) -> Iterator[ReadyPhase]:
        for phase in self.phases:
            yield phase.stream, partial(record, phase, self.carry)

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
        around: Callable[[Callable[[], Any]], Any] | None,
    ) -> None:
        self.forward, self.around = forward, around
        # The gradient of the local loss is 1.
        losses = () if forward.objective is None else (forward.objective,)
        self.gradients: Gradients = [*gradients, *map(torch.ones_like, losses)]

    def __iter__(self) -> Iterator[ReadyPhase]:
        for recorded in reversed(self.forward.phases):
            work = partial(backward_phase, recorded, self.gradients)
            around = None if recorded.stream is Stream.COMM else self.around
            yield recorded.stream, work if around is None else partial(around, work)

    def set_result(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def finish(self) -> None:
        for tensor, gradient in zip(self.forward.inputs, self.gradients, strict=True):
            tensor.grad = gradient
