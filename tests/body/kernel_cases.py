"""For tests of kernels: random tensors, how far a result may lie from its reference, and the bytes a launch touches.

References run in float32 on the same numbers. A kernel computes in float32 and rounds where it stores, so in a 16-bit
dtype its result is within one rounding per store: half a unit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from moefold.ops.kernels.interpret import interpreting

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Half of float16's smallest number: below 2**-14 it keeps fewer digits.
TINY = 2.0**-25
# Of sums in another order, against the largest of their terms.
FLOAT32 = 3e-6


class Case:
    """Random sizes and tensors of one seed; formats take turns."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = FORMATS[seed % len(FORMATS)]

    def among(self, *choices: Any) -> Any:
        return self.dice.choice(choices)

    def randn(self, *shape: int, spread: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (spread * torch.randn(*shape, generator=self.generator)).to(dtype or self.dtype)


def run(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of the inputs that are there."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None]
    return outputs + list(torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], list(grads)))


def run_kernel(function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    with interpreting(), poisoned_memory():
        return run(function, inputs, grads)


def run_reference(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Tensor]:
    return run(function, [None if x is None else x.float() for x in inputs], [grad.float() for grad in grads])


def assert_near(found: Tensor, reference: Tensor, name: str, roundings: int = 1, terms: float | None = None) -> None:
    """Rounding to the result's own format, ``roundings`` times, and float32's own noise.

    ``terms`` is the size of what was added up, where that is larger than the sums.
    """
    assert found.shape == reference.shape, name
    if terms is None:
        terms = reference.abs().max().item() if reference.numel() else 0.0
    allowed = roundings * (ROUNDING[found.dtype] * reference.abs() + TINY) + FLOAT32 * terms
    excess = (found.float() - reference).abs() - allowed
    assert (excess <= 0).all(), f"{name} in {found.dtype}: {excess.max().item():.2e} beyond what rounding explains"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory holds NaN, which shows where a kernel left it as it was."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """The bytes read and written inside, each place once per direction: what a cache holds is not fetched again.

    Meant for one launch, or for launches that share no memory.
    """
    places: tuple[set[int], set[int]] = (set(), set())
    moved = [0]

    def note(seen: set[int], pointers: Any, mask: Any) -> None:
        new = set(pointers.data[mask.data].tolist()) - seen
        seen |= new
        moved[0] += len(new) * pointers.get_element_ty().primitive_bitwidth // 8

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noted_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note(places[0], pointers, mask)
        return load(builder, pointers, mask, *rest)

    def noted_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(places[1], pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    with (
        interpreting(),
        patch.object(InterpreterBuilder, "create_masked_load", noted_load),
        patch.object(InterpreterBuilder, "create_masked_store", noted_store),
    ):
        yield moved
