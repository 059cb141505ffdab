"""A MoE layer as a candidate: anybody's module, filled with the common weights, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.runner import Options
from moefold.bench.layer_workload import (
    DTYPES,
    LayerShape,
    Weights,
    draw_input,
    draw_output_grad,
    draw_weights,
    exact_output,
    relative_error,
)

# From [T, D] to [T, D], differentiable.
Forward = Callable[[Tensor], Tensor]
# Makes a layer with these weights: how to call it, and its parameters.
MakeLayer = Callable[[LayerShape, Weights], tuple[Forward, Sequence[Tensor]]]


class TimedLayer:
    def __init__(self, options: Options, make: MakeLayer) -> None:
        self.shape, self.dtype = LayerShape(**options["shape"]), DTYPES[options["dtype"]]
        self.weights = draw_weights(self.shape, self.dtype)
        self.forward, self.parameters = make(self.shape, self.weights)
        self.dy_TD = draw_output_grad(self.shape, self.dtype)

    def prepare(self, seed: int) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        return draw_input(self.shape, self.dtype, seed).requires_grad_()

    def run(self, prepared: Tensor) -> None:
        self.forward(prepared).backward(self.dy_TD)

    def saved_bytes(self, prepared: Tensor) -> int | None:
        return saved_for_backward(lambda: self.forward(prepared), [*self.parameters, prepared])

    @torch.no_grad()
    def relative_error(self, prepared: Tensor) -> float:
        exact_TD = exact_output(self.shape, self.weights, prepared)
        return relative_error(self.forward(prepared), exact_TD)


def saved_for_backward(forward: Callable[[], Tensor], without: Iterable[Tensor]) -> int:
    """Bytes that ``forward`` saves for backward. Each storage counts once, however many views of it are saved;
    storages of ``without`` (parameters, inputs) do not count."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in without}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        # Kept until after the count, so that no freed storage's address is used again.
        out = forward()
    total = sum(sizes.values())
    del out
    return total
