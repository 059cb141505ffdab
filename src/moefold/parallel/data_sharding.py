"""What a step asks of sharded data parallelism, whichever of its forms the run has (``parallel.sharding``).

``fsdp`` (`parallel/fsdp.py`) shards parameters, gradients and optimizer states. The step calls the methods below in
this order:

    start_step            once per step
    before_forward        of each stage, before its first forward of the step
    after_backward        of each stage, after its last backward of the step
    reduce_gradients      after the last action
    weights_changed       after the update, and after weights were initialised or loaded

An evaluation calls ``start_evaluation``, ``before_forward`` and ``end_evaluation``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from moefold.parallel.param_shards import TrainedPiece

# Gives memory to a module on the meta device.
Materialize = Callable[[nn.Module, torch.device], object]


class DataSharding(Protocol):
    @property
    def main_dtype(self) -> torch.dtype:
        """Of the pieces: of the weights that are updated and saved."""
        ...

    def allocate(self, device: torch.device, materialize: Materialize) -> None:
        """Memory for everything that this rank holds, without values; the model was built on the meta device."""
        ...

    def pieces(self) -> tuple[TrainedPiece, ...]:
        """What this rank updates and saves, in the order of the model's parameters."""
        ...

    def start_step(self) -> None: ...

    def before_forward(self, stage: int) -> None: ...

    def after_backward(self, stage: int) -> None: ...

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Sets the ``.grad`` of every piece, summed over data-parallel ranks; returns it by the parameter's name."""
        ...

    def weights_changed(self, trained_only: bool = False) -> None:
        """``trained_only``: by an update, which leaves frozen weights as they were."""
        ...

    def start_evaluation(self) -> None: ...

    def end_evaluation(self) -> None: ...


def to_empty(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)
