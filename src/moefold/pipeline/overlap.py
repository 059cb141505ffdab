"""One microbatch's forward phases against another's backward phases.

Two microbatches have nothing to do with each other, so while one's tokens travel to experts the other computes. Both
are walked in turn: each runs its compute phases up to the next exchange, starts that on the communication lane, and
gives the turn to the other. The walk depends on the phases alone and never on timing, so that all ranks meet in the
same collectives in the same order. While a rank still has to wait, it computes weight gradients that were put off;
those are taken oldest first, so that their sums do not depend on timing either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.stages import StageSpec
from moefold.model.decoder import DecoderOutput, HiddenState
from moefold.nn.batch import Batch
from moefold.nn.phase import Phase, Stream
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.phase_autograd import Gradients, Recorded, map_tensors, record, step_back
from moefold.pipeline.pipeline_state import objective_of


class Tape(NamedTuple):
    """A recorded forward of one stage, and the stream it was given."""

    entry: tuple[Tensor, ...]
    phases: tuple[Recorded, ...]


def run_taped(
    local_model: LocalModel, batch: Batch, earlier_ME: Tensor, stage: StageSpec, hidden: HiddenState | None
) -> tuple[DecoderOutput, Tape]:
    """A forward by itself, recorded for a backward that may be overlapped."""
    walk = _Forward(local_model, batch, earlier_ME, stage, hidden)
    for _, work in walk:
        walk.take(work())
    return walk.result()


def tape_back(tape: Tape, gradients: tuple[Tensor, ...]) -> None:
    """A recorded backward by itself; leaves the gradients on the stream that the stage was given."""
    walk = _Backward(tape, gradients, _as_it_is)
    for _, work in walk:
        walk.take(work())
    walk.finish()


def run_overlapped(
    local_model: LocalModel,
    batch: Batch,
    earlier_ME: Tensor,
    stage: StageSpec,
    hidden: HiddenState | None,
    tape: Tape,
    gradients: tuple[Tensor, ...],
    put_off_as: object | None,
) -> tuple[DecoderOutput, Tape]:
    """The forward of one microbatch and the backward of another, whose tape and output gradients are given.

    Weight gradients are put off and computed while both wait. Those that are left at the end fill the next pair's
    waits, unless ``put_off_as`` names the action that will compute them.
    """
    weight_grads, stream = local_model.weight_grads, local_model.comm_stream
    assert weight_grads is not None and stream is not None
    key = object() if put_off_as is None else put_off_as

    def deferring(work: Callable[[], Any]) -> Any:
        with weight_grads.deferring(key):
            return work()

    ahead = _Forward(local_model, batch, earlier_ME, stage, hidden)
    back = _Backward(tape, gradients, deferring)
    sides: list[_Side] = [_Side(back, iter(back)), _Side(ahead, iter(ahead))]
    while sides:
        for side in list(sides):
            if side.pending is not None:
                side.walk.take(stream.wait(side.pending, weight_grads.run_one))
                side.pending = None
            for phase_lane, work in side.steps:
                if phase_lane is Stream.COMM:
                    side.pending = stream.submit(work)
                    break
                side.walk.take(work())
            else:
                sides.remove(side)
    if put_off_as is None:
        weight_grads.run_before(key)
    back.finish()
    return ahead.result()


class _Side:
    """One of the two walks, and the exchange it waits for."""

    def __init__(self, walk: _Forward | _Backward, steps: Iterator[tuple[Stream, Callable[[], Any]]]) -> None:
        self.walk, self.steps = walk, steps
        self.pending: Future[Any] | None = None


class _Forward:
    """The phases of a stage's forward, one at a time; each step's result must be taken before the next."""

    def __init__(
        self, local_model: LocalModel, batch: Batch, earlier_ME: Tensor, stage: StageSpec, hidden: HiddenState | None
    ) -> None:
        self.carry: Any = DecoderOutput(hidden)
        self.entry = () if hidden is None else (hidden.x_tD, *hidden.ahead_tD)
        self.recorded: list[Recorded] = []
        judge = Phase("objective", Stream.COMPUTE, partial(_with_objective, local_model, batch))
        self.phases = (*local_model.model.phases(batch, earlier_ME, stage), judge)

    def __iter__(self) -> Iterator[tuple[Stream, Callable[[], Any]]]:
        for phase in self.phases:
            yield phase.stream, partial(record, phase, self.carry)

    def take(self, result: tuple[Any, Recorded]) -> None:
        self.carry, recorded = result
        self.recorded.append(recorded)

    def result(self) -> tuple[DecoderOutput, Tape]:
        output, _ = self.carry
        return output, Tape(self.entry, tuple(self.recorded))


def _with_objective(
    local_model: LocalModel, batch: Batch, output: DecoderOutput
) -> tuple[DecoderOutput, Tensor | None]:
    """The output and what is to be made small; only the stream and the objective pass gradients on."""
    objective = objective_of(local_model, output, batch)
    plain = output._replace(
        reports=map_tensors(output.reports, Tensor.detach),
        loss_sum=map_tensors(output.loss_sum, Tensor.detach),
        ahead_loss_sums=map_tensors(output.ahead_loss_sums, Tensor.detach),
    )
    return plain, objective


class _Backward:
    """The same phases in reverse, from the gradients of the stage's output."""

    def __init__(self, tape: Tape, gradients: tuple[Tensor, ...], around: Callable[[Callable[[], Any]], Any]) -> None:
        self.tape, self.around = tape, around
        last = tape.phases[-1].outputs
        # The objective, where there is one, comes last and counts as it is.
        self.gradients: Gradients = [*gradients, *(torch.ones_like(made) for made in last[len(gradients) :])]

    def __iter__(self) -> Iterator[tuple[Stream, Callable[[], Any]]]:
        for recorded in reversed(self.tape.phases):
            work = partial(step_back, recorded, self.gradients)
            yield recorded.stream, work if recorded.stream is Stream.COMM else partial(self.around, work)

    def take(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def finish(self) -> None:
        for given, gradient in zip(self.tape.entry, self.gradients, strict=True):
            given.grad = gradient


def _as_it_is(work: Callable[[], Any]) -> Any:
    return work()
