"""One step of one rank's share, watched: what it held when, what every forward left behind, what it sent.

The step is the one that training runs. It is watched with real tensors and with fake ones alike, which is how the fake
ones are checked. A tensor that outlives the action that made it is kept for a later one, so it counts as an activation
of the microbatch and stage it was made for; what went through a collective and was not kept was a buffer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moefold.dryrun.collective_trace import Book, Wires, gained
from moefold.dryrun.memory_timeline import Peak, peak_of
from moefold.dryrun.storage_tracker import Watch
from moefold.nn.batch import Ahead, Batch, TokenSets
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.pipeline_state import Key, PipelineState, hidden_tensors
from moefold.pipeline.runtime import OnAction
from moefold.pipeline.step import run_step
from moefold.schedule.actions import TRANSFERS, Action, Kind

_NAMES = {
    Kind.FORWARD: "forward of microbatch {microbatch} on stage {stage}",
    Kind.BACKWARD: "backward of microbatch {microbatch} on stage {stage}",
    Kind.BACKWARD_INPUT: "input gradient of microbatch {microbatch} on stage {stage}",
    Kind.BACKWARD_WEIGHT: "weight gradients of microbatch {microbatch} on stage {stage}",
    Kind.SEND_F: "sending microbatch {microbatch} on from stage {stage}",
    Kind.SEND_B: "sending the gradient of microbatch {microbatch} back from stage {stage}",
    Kind.RECV_F: "receiving microbatch {microbatch} for stage {stage}",
    Kind.RECV_B: "receiving the gradient of microbatch {microbatch} for stage {stage}",
}


@dataclass(frozen=True)
class Seen:
    """What a watched step showed."""

    peak: Peak
    # Bytes that a forward left for its backward, and those of them that were alive at the peak, by (stage, microbatch).
    saved: dict[Key, int]
    held_at_peak: dict[Key, int]
    # Collectives of each action in turn, and of the whole step.
    of_action: list[tuple[Action, Book]]
    book: Book
    # What a microbatch's tokens and labels take, and what was worked out about them: from first to last, in "other".
    bytes_of_batch: int


def rehearse(
    local_model: LocalModel, optimizer: Optimizer, batches: Sequence[Batch], on_action: OnAction | None = None
) -> Seen:
    """Run one step and watch it. Optimizer states exist from the second step on, so let one go before."""
    # What is freed by counting references is freed at the same moment every time; what a collector finds is not.
    gc.collect()
    gc.disable()
    try:
        watcher = _Watcher(local_model, optimizer, batches, on_action)
        with watcher.watch:
            run_step(local_model, optimizer, batches, watcher.look, on_action=watcher.on_action)
            watcher.watch.mark("after the update")
        return watcher.seen()
    finally:
        gc.enable()


class _Watcher:
    def __init__(
        self, local_model: LocalModel, optimizer: Optimizer, batches: Sequence[Batch], also: OnAction | None
    ) -> None:
        self.also, self.batches = also, batches
        self.local_model, self.wires = local_model, Wires(local_model.groups)
        self.watch = Watch(self.wires.overhear)
        self.owner: dict[int, Key] = {}
        self.saved: dict[Key, list[tuple[int, int]]] = {}
        self.of_action: list[tuple[Action, Book]] = []
        self._before: Book = {}
        self._since = self._greet(optimizer, batches)
        for module in local_model.model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._gathered)
        optimizer.register_step_pre_hook(lambda *_: self.watch.mark("norm and clipping"))
        optimizer.register_step_post_hook(lambda *_: self.watch.mark("optimizer"))

    def on_action(self, flight: PipelineState, action: Action) -> None:
        """An action has ended."""
        if not self.of_action:
            self._gathered(self.local_model.model)
        if action.kind not in TRANSFERS:
            self._tag_gradients()
            for part in action.parts:
                if part.kind is Kind.FORWARD:
                    self._tag_batch(flight.batches[part.microbatch])
                    self._claim_input(flight, part)
            self._claim((action.stage, action.microbatch), action.parts[0].kind is Kind.FORWARD)
        book = self.wires.book()
        self.of_action.append((action, gained(book, self._before)))
        self._before, self._since = book, self.watch.num_seen
        self.watch.mark(" beside ".join(_said(part) for part in action.parts))
        if self.also is not None:
            self.also(flight, action)

    def look(self, gradients: dict[str, Tensor]) -> None:
        for gradient in gradients.values():
            self.watch.meet(gradient, "gradients")
        self.watch.mark("reduction of gradients")

    def seen(self) -> Seen:
        category = dict(self.watch.category)
        for number, source in self.watch.cast_of.items():
            if category.get(source) in ("parameters", "gathered parameters"):
                category[number] = "weight copies"
        for number in self.watch.travelled:
            category.setdefault(number, "communication")
        peak = peak_of(self.watch.events, category, self.watch.marks)
        saved = {
            key: sum(size for number, size in kept if category[number] == "activations")
            for key, kept in self.saved.items()
        }
        held: dict[Key, int] = {}
        for number, size in peak.alive.items():
            if category.get(number) == "activations":
                held[self.owner[number]] = held.get(self.owner[number], 0) + size
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors_of_batch(self.batches[-1])}
        size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        return Seen(peak, saved, held, self.of_action, self.wires.book(), size)

    def _greet(self, optimizer: Optimizer, batches: Sequence[Batch]) -> int:
        """What is there before the step; the gradients of the one before are not: it starts by dropping them."""
        optimizer.zero_grad()
        for parameter in self.local_model.model.parameters():
            self.watch.meet(parameter, "parameters")
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.watch.meet(value, "optimizer state")
        for buffer in self.local_model.model.buffers():
            self.watch.meet(buffer, "other")
        for batch in batches:
            self._tag_batch(batch)
        return self.watch.num_seen

    def _tag_batch(self, batch: Batch) -> None:
        for tensor in tensors_of_batch(batch):
            self.watch.meet(tensor, "other")

    def _gathered(self, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                number = self.watch.meet(parameter)
                self.watch.category.setdefault(number, "gathered parameters")

    def _tag_gradients(self) -> None:
        for parameter in self.local_model.model.parameters():
            if parameter.grad is not None:
                self.watch.meet(parameter.grad, "gradients")

    def _claim_input(self, flight: PipelineState, forward: Action) -> None:
        """What a stage was given stays until its backward."""
        key = (forward.stage, forward.microbatch)
        given = flight.inputs.get(key)
        for tensor in () if given is None else hidden_tensors(given):
            number = self.watch.meet(tensor)
            if number not in self.watch.category:
                self.watch.category[number] = "activations"
                self.owner[number] = key
                self.saved.setdefault(key, []).append((number, self.watch.size_of(tensor)))

    def _claim(self, key: Key, is_forward: bool) -> None:
        for number, size in self.watch.alive_since(self._since):
            if number not in self.watch.category:
                self.watch.category[number] = "activations"
                self.owner[number] = key
                if is_forward:
                    self.saved.setdefault(key, []).append((number, size))


def tensors_of_batch(batch: Batch) -> list[Tensor]:
    """Its own, and those that it has worked out and kept."""
    return list(_inside(vars(batch)))


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inside(part)
    elif isinstance(value, (Ahead, TokenSets)):
        yield from _inside(vars(value))


def _said(action: Action) -> str:
    return _NAMES[action.kind].format(microbatch=action.microbatch, stage=action.stage)
