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
