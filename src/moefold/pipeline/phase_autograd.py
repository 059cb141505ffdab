"""Record a forward phase by phase, so that its backward can be run phase by phase.

The autograd graph is cut between phases: a phase's inputs are detached leaves, and its backward leaves on them the
gradients with which the backward of the previous phase starts. The phases themselves are those of the plain forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.nn.phase import Phase, Stream


class Recorded(NamedTuple):
    """One phase that has run: its input leaves and its output tensors, those that require a gradient."""

    stream: Stream
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


Gradients = Sequence[Tensor | None]


def record(phase: Phase, carry: Any) -> tuple[Any, Recorded]:
    leaves: list[Tensor] = []

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    result = phase.run(map_tensors(carry, cut))
    outputs = tuple(tensor for tensor in iter_tensors(result) if tensor.requires_grad)
    return result, Recorded(phase.stream, tuple(leaves), outputs)


def backward_phase(recorded: Recorded, gradients: Gradients) -> Gradients:
    """From the gradients of a phase's outputs to those of its inputs."""
    pairs = [(output, grad) for output, grad in zip(recorded.outputs, gradients, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    return [leaf.grad for leaf in recorded.leaves]


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
