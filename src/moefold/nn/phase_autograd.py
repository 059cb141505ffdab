"""Record a forward phase by phase, so that its backward can be run phase by phase.

The autograd graph is cut between phases: a phase's inputs enter a graph of their own, and its backward leaves the
gradients with which the backward of the previous phase starts at these entries. The phases themselves are those of the
plain forward.

A stage that runs as one graph tells where its parts end by ``boundary``: sharded data parallelism sends weights and
gradients beside the computation and has to know when a part's gradients are complete.

Neither an entry nor an output holds the tensor it stands for: a leaf of the graph would, and so would a root. What a
phase passes on is held by nothing but what its consumers save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moefold.nn.phase import Phase, Stream


class Entry:
    """Where a tensor enters a phase; ``grad`` is set by the phase's backward."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def take(self) -> Tensor | None:
        """The gradient, which is not held here any longer: recorded phases live until the last backward of them."""
        grad, self.grad = self.grad, None
        return grad


class _EnterContext(Protocol):
    entry: Entry


class _Enter(torch.autograd.Function):
    """The tensor itself in a graph that begins here; ``anchor`` makes it require a gradient."""

    @staticmethod
    def forward(ctx: _EnterContext, anchor: Tensor, tensor: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _EnterContext, grad: Tensor) -> tuple[None, None, None]:
        ctx.entry.grad = grad
        return None, None, None


class Recorded(NamedTuple):
    """One phase that has run: where its inputs entered and its outputs left, of those that require a gradient.

    ``stream`` is that of its backward.
    """

    stream: Stream
    has_weights: bool
    entries: tuple[Entry, ...]
    outputs: tuple[GradientEdge, ...]


Gradients = Sequence[Tensor | None]


def record(phase: Phase, carry: Any) -> tuple[Any, Recorded]:
    entries: list[Entry] = []

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        entries.append(Entry())
        entered: Tensor = _Enter.apply(tensor.new_empty(0).requires_grad_(), tensor.detach(), entries[-1])
        return entered

    result = phase.run(map_tensors(carry, cut))
    outputs = tuple(get_gradient_edge(tensor) for tensor in iter_tensors(result) if tensor.requires_grad)
    stream = Stream.COMPUTE if phase.at_once else phase.stream
    return result, Recorded(stream, phase.has_weights, tuple(entries), outputs)


def backward_phase(recorded: Recorded, gradients: Gradients) -> Gradients:
    """From the gradients of a phase's outputs to those of its inputs."""
    pairs = [(output, grad) for output, grad in zip(recorded.outputs, gradients, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    return [entry.take() for entry in recorded.entries]


OnPart = Callable[[int], None]


class PartHooks(NamedTuple):
    """Called with the number of a part of the stage: before a forward enters it, and when its backward has left it.

    ``left`` is not called for a part that nothing with a gradient enters: the end of the backward is its own.
    """

    enter: OnPart | None = None
    left: OnPart | None = None


NO_HOOKS = PartHooks()


class _BoundaryContext(Protocol):
    left: Callable[[], None]


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _BoundaryContext, left: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.left = left
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: _BoundaryContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.left()
        return None, *grads


def boundary(left: Callable[[], None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors themselves; ``left`` is called when the backward of all that follows in the graph is over.

    Autograd runs what is ready from the last operation of the forward to the first. Every operation of a part comes
    after its boundary, so that none is left when the gradients of all tensors that entered the part are known.
    """
    with_grad = [tensor for tensor in tensors if tensor.requires_grad]
    passed = iter(_Boundary.apply(left, *with_grad) if with_grad else ())
    return tuple(next(passed) if tensor.requires_grad else tensor for tensor in tensors)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to the tensors in nested tuples and lists; other values are kept."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [map_tensors(part, change) for part in value] if isinstance(value, list) else value


def iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from iter_tensors(part)
