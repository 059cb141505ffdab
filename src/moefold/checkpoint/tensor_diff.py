"""Two checkpoints, tensor by tensor: the same names, shapes and bits, or how far apart. Layouts may differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.checkpoint.tensor_spec import TensorSource


@dataclass(frozen=True)
class TensorComparison:
    """``verdict`` is "equal bits", "different", "another shape", "another dtype", "only here" or "only there"."""

    name: str
    verdict: str
    # The largest difference of two numbers; None where there is nothing to subtract, or something not finite.
    largest: float | None = None

    @property
    def same(self) -> bool:
        return self.verdict == "equal bits"


def compare(here: TensorSource, there: TensorSource) -> Iterator[TensorComparison]:
    """One tensor at a time, in the order of their names."""
    names_here, names_there = set(here.names()), set(there.names())
    for name in sorted(names_here | names_there):
        if name not in names_there:
            yield TensorComparison(name, "only here")
        elif name not in names_here:
            yield TensorComparison(name, "only there")
        elif here.shape(name) != there.shape(name):
            yield TensorComparison(name, "another shape")
        elif here.dtype(name) != there.dtype(name):
            yield TensorComparison(name, "another dtype")
        else:
            yield _compared(name, here.read(name), there.read(name))


def _compared(name: str, a: Tensor, b: Tensor) -> TensorComparison:
    # As bytes: two NaNs of equal bits are the same, zero and minus zero are not.
    if torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
        return TensorComparison(name, "equal bits", 0.0)
    largest = float((a.double() - b.double()).abs().max())
    return TensorComparison(name, "different", largest if largest == largest and largest != float("inf") else None)
