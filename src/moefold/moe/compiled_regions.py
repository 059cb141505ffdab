"""Regions of an MoE layer between its exchanges, compiled by torch (``kernels.compile: regions``).

A region is a function of tensors without communication and without a read on the host: scores to experts and probs, the
term of a balance loss, the order in which rows are sent, the activation between two grouped GEMMs. ``fullgraph`` makes
a graph break an error, so a region is one graph, forward and backward. A size that changes is dynamic from its first
change on, so that the number of rows, which is another at every step, does not compile anything again.

The functions are the references of the hand-written kernels; where the run names Triton kernels, those stay. Matmuls,
collectives and the deterministic sum over a token's rows are one launch each already and stay outside.

Fake tensors (the dry run) take the plain function: they have no values, and the shapes are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Generic, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moefold.errors import BackendError
from moefold.ops.host_probe import HostInfo

# A function is compiled for each dtype, with and without gradients, for no row, one row and more: more than torch's
# eight, and with ``fullgraph`` one too many is an error. Older versions have only a global limit.
_LIMIT = {"recompile_limit": 64} if "recompile_limit" in signature(torch.compile).parameters else {}
P = ParamSpec("P")
R = TypeVar("R")


class Region(Generic[P, R]):
    """``backend``: of torch.compile."""

    def __init__(self, plain: Callable[P, R], backend: str | Callable[..., object] = "inductor") -> None:
        self.plain = plain
        self.compiled: Callable[P, R] = torch.compile(plain, fullgraph=True, backend=backend, **_LIMIT)  # type: ignore[call-overload]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self.plain if isinstance(args[0], FakeTensor) else self.compiled
        return chosen(*args, **kwargs)


@cache
def region(plain: Callable[P, R]) -> Region[P, R]:
    """One for all layers."""
    return Region(plain)


def require_compiler(device: str, host: HostInfo) -> None:
    """torch compiles with Triton for GPUs and with a C++ compiler for CPUs."""
    if device == "cuda" and "triton" not in host.packages:
        raise BackendError("kernels.compile: regions needs triton, which is not installed; use none")
    if device == "cpu" and host.compiler is None:
        raise BackendError("kernels.compile: regions needs a C++ compiler (no cc, no $CC); use none")
