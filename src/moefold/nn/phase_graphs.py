"""Phases of a block as graphs: inputs copied in, a replay, outputs where they always are; backward likewise.

A **region** is a run of captured phases of one block (`schedule/graph_regions.py`). In each slot of its stage it has
memory of its own for what enters (``static_in``), for the gradients of what leaves (``static_grad``), and in the pool
of the slot for everything that it computes, saves and returns:

    forward    inputs -> static_in, replay, outputs: views of the graph's memory
    backward   gradients -> static_grad, replay, input gradients: views of the graph's memory

An input that lies in a graph of the same slot is read where it is. Gradients of weights are added to ``.grad`` inside
of the backward's graph: flat buffers have one address for the whole run, and so have weights (`parallel/flat_sharding
.py`); gathers and sums over ranks stay outside. The tensors of a microbatch are copied to those of its slot before its
forward, so that phases read them there; lengths and divisors are numbers of the host and part of the graph.

Whatever leaves a stage is copied (``leaving``): its message is on a stream of its own, and may still be on its way when
the slot is used again.

Without gradients, in validation, and where a step is run again with exact counts, phases run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moefold.errors import MoefoldError
from moefold.nn.batch import Batch, move_batch
from moefold.nn.cuda_graphs import CapturedGraph, GraphEngine
from moefold.nn.phase import Phase, run_in_order
from moefold.nn.phase_autograd import iter_tensors, map_tensors

# (stage, microbatch)
Key = tuple[int, int]


class Place(NamedTuple):
    """Where a tensor lies: two that are equal are the same memory."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def place_of(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage()._cdata
    return Place(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass
class Slot:
    """What one microbatch of a stage uses from its forward to its backward."""

    engine: GraphEngine
    pool: object
    # Whether regions are captured; before that they run as they are.
    is_warm: bool
    batch: Batch | None = None
    regions: dict[tuple[int, str], Region] = field(default_factory=dict)
    # Outputs of the slot's graphs.
    outputs: set[Place] = field(default_factory=set)

    def enter(self, batch: Batch) -> Batch:
        """The same batch in the slot's own tensors."""
        if self.batch is None:
            self.batch = move_batch(batch, Tensor.clone)
            return self.batch
        before, now = _host_numbers(self.batch), _host_numbers(batch)
        for name, value in now.items():
            if before[name] != value:
                raise MoefoldError(
                    f"kernels.graphs: this microbatch has {name} {value}, and graphs were captured with "
                    f"{before[name]}; use kernels.graphs none where microbatches differ"
                )
        held = iter(_tensors_of(self.batch))

        def copied(tensor: Tensor) -> Tensor:
            return next(held).copy_(tensor)

        return move_batch(batch, copied)


def _tensors_of(batch: Batch) -> list[Tensor]:
    """In the order of ``move_batch``."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    move_batch(batch, add)
    return found


def _host_numbers(batch: Batch) -> dict[str, object]:
    """What captured phases may have computed with on the host. Labels count in the loss alone, which is no graph."""
    names = ("lengths", "documents_per_microbatch", "context_size", "tensor_size", "step_tokens", "step_sequences")
    numbers: dict[str, object] = {name: getattr(batch, name) for name in names}
    numbers["tensors of shapes"] = [tuple(tensor.shape) for tensor in _tensors_of(batch)]
    return numbers


@contextmanager
def aliased(block: nn.Module) -> Iterator[tuple[nn.Parameter, ...]]:
    """Inside, the block's trained parameters are others with the same memory, of weights and of gradients.

    Autograd has one node per leaf that accumulates its gradient, on the stream that made it. A microbatch that runs as
    it is would share it with a capture, and a capture must not wait for another stream.
    """
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    held = [(module._parameters, name) for module in block.modules() for name in module._parameters]
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for parameters, name in held:
        parameter = parameters[name]
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter not in aliases:
            alias = aliases[parameter] = nn.Parameter(parameter.detach())
            alias.grad_dtype = parameter.grad_dtype
            alias.grad = parameter.grad
        replaced.append((parameters, name, parameter))
        parameters[name] = aliases[parameter]
    try:
        yield tuple(aliases.values())
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


class Region:
    """A run of phases of one block, in one slot."""

    def __init__(self, run: Callable[[object], object], block: nn.Module, slot: Slot) -> None:
        self.run, self.block, self.slot = run, block, slot
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.forward: CapturedGraph | None = None
        self.backward: CapturedGraph | None = None
        self.static_in: list[Tensor] = []
        # Whether an input lies in another graph of the slot.
        self.is_shared: list[bool] = []
        # What the phases returned, with tensors of the graph's memory.
        self.result: object = None
        self.static_out: list[Tensor] = []
        self.is_differentiable: list[bool] = []
        self.static_grad: list[Tensor] = []
        self.grad_in: list[Tensor | None] = []

    def __call__(self, carry: object) -> object:
        if not self.slot.is_warm:
            return self.run(carry)
        given = list(iter_tensors(carry))
        if self.forward is None:
            self._capture_forward(carry, given)
        else:
            self._copy_in(given)
            self.forward.replay()
        outputs = iter(_Replay.apply(self, *given))
        return map_tensors(self.result, lambda _: next(outputs))

    def _capture_forward(self, carry: object, given: list[Tensor]) -> None:
        self.is_shared = [place_of(tensor) in self.slot.outputs for tensor in given]
        for tensor, shared in zip(given, self.is_shared):
            held = tensor.detach() if shared else torch.empty_like(tensor).copy_(tensor.detach())
            self.static_in.append(held.requires_grad_(tensor.requires_grad))
        entering = iter(self.static_in)
        static = map_tensors(carry, lambda _: next(entering))
        with torch.enable_grad(), aliased(self.block) as self.parameters:
            self.result, self.forward = self.slot.engine.capture(lambda: self.run(static), self.slot.pool)
        self.static_out = list(iter_tensors(self.result))
        self.is_differentiable = [out.requires_grad for out in self.static_out]
        self.static_grad = [torch.empty_like(out) for out in self.static_out if out.requires_grad]
        self.slot.outputs.update(map(place_of, self.static_out))

    @torch.no_grad()
    def _copy_in(self, given: list[Tensor]) -> None:
        if len(given) != len(self.static_in):
            raise MoefoldError(f"kernels.graphs: {len(given)} tensors, captured with {len(self.static_in)}")
        for tensor, held, shared in zip(given, self.static_in, self.is_shared):
            if place_of(tensor) == place_of(held):
                continue
            if shared or tensor.shape != held.shape or tensor.dtype != held.dtype:
                raise MoefoldError(
                    f"kernels.graphs: an input of shape {tuple(tensor.shape)} in {tensor.dtype}, captured with "
                    f"{tuple(held.shape)} in {held.dtype}" + (" as the output of another graph" if shared else "")
                )
            held.copy_(tensor)

    @torch.no_grad()
    def go_back(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """From the gradients of outputs to those of inputs."""
        for held, grad in zip(self.static_grad, grads, strict=True):
            held.copy_(grad)
        if self.backward is None:
            self.grad_in, self.backward = self.slot.engine.capture(self._gradients, self.slot.pool)
            # The graph of autograd is not needed any longer.
            self.result = map_tensors(self.result, Tensor.detach)
            self.static_out = list(iter_tensors(self.result))
        else:
            self.backward.replay()
        return self.grad_in

    def _gradients(self) -> list[Tensor | None]:
        inputs = [tensor for tensor in self.static_in if tensor.requires_grad]
        roots = [out for out in self.static_out if out.requires_grad]
        found = torch.autograd.grad(roots, (*inputs, *self.parameters), self.static_grad, allow_unused=True)
        for parameter, grad in zip(self.parameters, found[len(inputs) :]):
            if grad is not None:
                assert parameter.grad is not None
                parameter.grad.add_(grad)
        of_inputs = iter(found[: len(inputs)])
        return [next(of_inputs) if tensor.requires_grad else None for tensor in self.static_in]


class _ReplayContext(Protocol):
    region: Region

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...


class _Replay(torch.autograd.Function):
    """Joins a region to autograd's graph of its microbatch; the work is done by the region's own graphs."""

    @staticmethod
    def forward(ctx: _ReplayContext, region: Region, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        outputs = tuple(out.detach() for out in region.static_out)
        ctx.mark_non_differentiable(*(out for out, yes in zip(outputs, region.is_differentiable) if not yes))
        return outputs

    @staticmethod
    def backward(ctx: _ReplayContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        is_differentiable = ctx.region.is_differentiable
        found = ctx.region.go_back([grad for grad, yes in zip(grads, is_differentiable) if yes])
        return None, *(None if grad is None else grad.detach() for grad in found)


class PhaseGraphs:
    """Of one rank: the slots of its stages. ``captured`` names the phases."""

    def __init__(self, captured: frozenset[str], engine: GraphEngine) -> None:
        self.captured, self.engine = captured, engine
        self.slots: dict[tuple[int, int], Slot] = {}
        self._slot_of: Mapping[Key, int] = {}
        self._current: Slot | None = None
        self._paused = False

    def start_step(self, slot_of: Mapping[Key, int]) -> None:
        """Which slot each microbatch of a stage takes in this step. Slots of earlier steps are warm.

        A slot is not captured in the step that it was first used in: weights would have nodes of autograd on two
        streams at once, those of microbatches that run as they are and those of the capture.
        """
        self._slot_of = slot_of
        for slot in self.slots.values():
            slot.is_warm = True

    def start_forward(self, key: Key, batch: Batch) -> Batch:
        """The batch that this stage's forward of this microbatch shall read."""
        if self._paused or not torch.is_grad_enabled():
            self._current = None
            return batch
        number = self._slot_of[key]
        if (key[0], number) not in self.slots:
            self.slots[key[0], number] = Slot(self.engine, self.engine.new_pool(), not self.engine.needs_warmup)
        self._current = self.slots[key[0], number]
        return self._current.enter(batch)

    def leaving(self, sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hidden states or gradients in memory of their own."""
        return tuple(tensor.detach().clone() for tensor in sent)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, phases run as they are."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def in_regions(self, block: nn.Module, phases: Sequence[Phase]) -> tuple[Phase, ...]:
        """The same phases, each run of captured ones joined to one that is a region."""
        found: list[Phase] = []
        run: list[Phase] = []
        for phase in (*phases, None):
            if phase is not None and phase.name in self.captured:
                run.append(phase)
                continue
            if run:
                found.append(self._region(block, tuple(run)))
                run = []
            if phase is not None:
                found.append(phase)
        return tuple(found)

    def _region(self, block: nn.Module, phases: tuple[Phase, ...]) -> Phase:
        def run(carry: object) -> object:
            slot = self._current
            if slot is None or not torch.is_grad_enabled():
                return run_in_order(phases, carry)
            key = id(block), phases[0].name
            if key not in slot.regions:
                slot.regions[key] = Region(lambda carry: run_in_order(phases, carry), block, slot)
            return slot.regions[key](carry)

        return replace(phases[0], run=run)

    @property
    def num_graphs(self) -> int:
        """Captured so far."""
        regions = [region for slot in self.slots.values() for region in slot.regions.values()]
        return sum(graph is not None for region in regions for graph in (region.forward, region.backward))
