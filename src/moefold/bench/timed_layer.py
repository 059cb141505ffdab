"""What all contestants of `bench layer` but the bare engines have in common: a module from x to y, and its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moefold.bench.layer_inputs import (
    DTYPES,
    Weights,
    draw_gradient,
    draw_input,
    draw_weights,
    exact_answer,
    relative_error,
)
from moefold.bench.layer_shapes import LayerShape
from moefold.bench.runner import Options
from moefold.bench.saved_bytes import saved_for_backward

# From [T, D] to [T, D], differentiable.
Forward = Callable[[Tensor], Tensor]
# Makes a layer with these weights: how to call it, and its parameters.
MakeLayer = Callable[[LayerShape, Weights], tuple[Forward, Sequence[Tensor]]]


class Layer:
    """Forward and backward of somebody's layer, which was given the weights of all."""

    def __init__(self, options: Options, make: MakeLayer) -> None:
        self.shape, self.dtype = LayerShape(**options["shape"]), DTYPES[options["dtype"]]
        self.weights = draw_weights(self.shape, self.dtype)
        self.forward, self.parameters = make(self.shape, self.weights)
        self.dy_TD = draw_gradient(self.shape, self.dtype)

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
        exact_TD = exact_answer(self.shape, self.weights, prepared)
        return relative_error(self.forward(prepared), exact_TD)


@torch.no_grad()
def give(parameter: Tensor, value: Tensor) -> None:
    """Fill somebody's parameter; a wrong shape is a wrong adapter."""
    assert parameter.shape == value.shape, f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
    parameter.copy_(value)
