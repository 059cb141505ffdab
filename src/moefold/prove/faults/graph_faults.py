"""Faults of captured phases: memory used again too early, inputs and gradients that are not the microbatch's own.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moefold.nn.batch import Batch
from moefold.nn.phase_graphs import Key, PhaseGraphs, Region, Slot
from moefold.prove.faults.parallel_faults import wrap

GoBack = Callable[[Region, list[Tensor]], list[Tensor | None]]
StartStep = Callable[[PhaseGraphs, dict[Key, int]], None]
CopyIn = Callable[[Region, list[Tensor]], None]


def slot_of_the_microbatch_before() -> None:
    """The last microbatch of a stage takes the slot of the one before, which is in flight."""

    def make(start_step: StartStep) -> StartStep:
        def taken(graphs: PhaseGraphs, slot_of: dict[Key, int]) -> None:
            last = {stage: max(number for of, number in slot_of if of == stage) for stage, _ in slot_of}
            wrong = {(stage, number): slot_of[stage, number - 1] for stage, number in last.items() if number}
            start_step(graphs, slot_of | wrong)

        return taken

    wrap(PhaseGraphs, "start_step", make)


def inputs_of_the_capture() -> None:
    def make(_: CopyIn) -> CopyIn:
        return lambda region, given: None

    wrap(Region, "_copy_in", make)


def gradients_of_the_capture() -> None:
    """Gradients of outputs are read where they were at the capture."""

    def make(go_back: GoBack) -> GoBack:
        def stale(region: Region, grads: list[Tensor]) -> list[Tensor | None]:
            return go_back(region, grads if region.backward is None else region.static_grad)

        return stale

    wrap(Region, "go_back", make)


def weight_gradients_overwritten() -> None:
    """A replay writes the gradient of its own microbatch instead of adding it."""

    def make(go_back: GoBack) -> GoBack:
        def overwritten(region: Region, grads: list[Tensor]) -> list[Tensor | None]:
            if region.backward is not None:
                for parameter in region.parameters:
                    assert parameter.grad is not None
                    parameter.grad.zero_()
            return go_back(region, grads)

        return overwritten

    wrap(Region, "go_back", make)


def batch_of_the_capture() -> None:
    """Tokens of a microbatch are not copied to its slot."""

    def make(enter: Callable[[Slot, Batch], Batch]) -> Callable[[Slot, Batch], Batch]:
        def first(slot: Slot, batch: Batch) -> Batch:
            return enter(slot, batch) if slot.batch is None else slot.batch

        return first

    wrap(Slot, "enter", make)


def backward_is_not_replayed() -> None:
    """Gradients of inputs are those of the microbatch before."""

    def make(go_back: GoBack) -> GoBack:
        def kept(region: Region, grads: list[Tensor]) -> list[Tensor | None]:
            return go_back(region, grads) if region.backward is None else region.grad_in

        return kept

    wrap(Region, "go_back", make)


def gradient_of_the_first_output_alone() -> None:
    """Gradients of the other outputs are read where they were at the capture."""

    def make(go_back: GoBack) -> GoBack:
        def stale(region: Region, grads: list[Tensor]) -> list[Tensor | None]:
            return go_back(region, grads if region.backward is None else [*grads[:1], *region.static_grad[1:]])

        return stale

    wrap(Region, "go_back", make)


def work_of_the_capture_done_twice() -> None:
    """A capture that has computed is replayed: what it adds to gradients is added twice."""

    def make(go_back: GoBack) -> GoBack:
        def twice(region: Region, grads: list[Tensor]) -> list[Tensor | None]:
            is_new = region.backward is None
            found = go_back(region, grads)
            if is_new:
                assert region.backward is not None
                region.backward.replay()
            return found

        return twice

    wrap(Region, "go_back", make)


# The function, the case it is tried on, and how it happens in real code.
FAULTS = (
    (
        slot_of_the_microbatch_before,
        "graphs in a pipeline",
        "a graph's memory is used by the next microbatch before the backward of the last",
    ),
    (inputs_of_the_capture, "graphs", "a graph is replayed without copying inputs to where it reads them"),
    (gradients_of_the_capture, "graphs", "a backward's graph is replayed with the gradients of its capture"),
    (gradient_of_the_first_output_alone, "graphs", "gradients of some outputs are not copied"),
    (
        weight_gradients_overwritten,
        "graphs",
        "the captured backward writes gradients into static buffers, which `.grad` has become",
    ),
    (batch_of_the_capture, "graphs", "positions and masks of a microbatch are those of the captured one"),
    (backward_is_not_replayed, "graphs", "gradients of inputs are returned before the replay has written them"),
    (work_of_the_capture_done_twice, "graphs", "what was computed while it was captured is replayed at once"),
)
