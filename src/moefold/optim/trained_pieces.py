"""What an optimizer updates and what checkpoints read of it: the contract between optimizers and the rest.

A piece is what one rank updates of one parameter: under FSDP the model's own parameter, under flat sharding a range of
the flat main weights. Its gradient is in ``parameter.grad`` when `step` is called. An optimizer is a
`torch.optim.Optimizer` that also says what it keeps, kind by kind, so that a checkpoint can store every kind under the
boxes of the global tensor: any layout reads what any layout wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Box = tuple[slice, ...]


class Shard(Protocol):
    """Of which global tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Piece(Protocol):
    """What this rank updates of the parameter ``name`` of ``kind``, both from the blueprint."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def parameter(self) -> nn.Parameter: ...
    @property
    def shard(self) -> Shard: ...
    @property
    def boxes(self) -> tuple[Box, ...]:
        """Of the global tensor, in the order of the piece's elements."""
        ...


class SavedKind(NamedTuple):
    """A kind of state as checkpoints hold it: one number per parameter, or a tensor of the parameter's shape."""

    dtype: torch.dtype
    single: bool


class SavingOptimizer(Optimizer):
    """An optimizer that checkpoints can ask what it keeps for one of its parameters."""

    def saved_kinds(self, parameter: nn.Parameter) -> dict[str, SavedKind]:
        """The kinds, whether or not there was an update yet."""
        raise NotImplementedError

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """By kind: a scalar, or a tensor with the shape of the rank's part; zeros before the first update."""
        raise NotImplementedError

    def load_saved(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """The inverse of `saved_state`; ``saved`` has all kinds, and is copied."""
        raise NotImplementedError

    def stored_state(self, parameter: nn.Parameter) -> dict[str, Tensor | int]:
        """By kind, what is in memory, bit for bit; nothing before the first update."""
        return dict(self.state.get(parameter, {}))

    def on_host(self, parameter: Tensor) -> bool:
        """Whether its states are in the host's memory."""
        return False

    def main_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Of the weight as checkpoints hold it."""
        return parameter.dtype

    def main_weight(self, parameter: nn.Parameter) -> Tensor:
        """The rank's part of the weight as checkpoints hold it: the parameter itself, unless states complete it."""
        return local_of(parameter.detach())

    @torch.no_grad()
    def set_main_weight(self, parameter: nn.Parameter, values: Tensor) -> None:
        local_of(parameter).copy_(values)

    def forget(self, parameter: nn.Parameter) -> None:
        """Moments, as if there had been no update; not what completes the weight."""
        self.state.pop(parameter, None)


def local_of(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
