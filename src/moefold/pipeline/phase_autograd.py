"""A forward recorded phase by phase, so that its backward can be run phase by phase.

Between two phases the graph is cut: what a phase is given are leaves of its own, on which its backward leaves the
gradients that the phase before it continues from. Nothing else changes; the phases are those of the plain forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.nn.phase import Phase, Stream


class Recorded(NamedTuple):
    """One phase that has run: the leaves it was given and the tensors it made, both where a gradient passes."""

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
    outputs = tuple(tensor for tensor in tensors_of(result) if tensor.requires_grad)
    return result, Recorded(phase.stream, tuple(leaves), outputs)


def step_back(recorded: Recorded, gradients: Gradients) -> Gradients:
    """From the gradients of what a phase made to those of what it was given."""
    pairs = [(made, grad) for made, grad in zip(recorded.outputs, gradients, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([made for made, _ in pairs], [grad for _, grad in pairs])
    return [leaf.grad for leaf in recorded.leaves]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of tuples and lists with other tensors in it; everything else is left as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [map_tensors(part, change) for part in value] if isinstance(value, list) else value


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
