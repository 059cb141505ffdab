"""One kernel at one size: what the compiler must be told to build it without a GPU, and what it may use.

A Triton kernel is a family. Its block sizes and the format behind each pointer are fixed when it is compiled, and
registers, shared memory and spills belong to one such choice. A kernel file lists the choices of real models as
``BUILDS``; the build compiles them all, and a test holds each to the limits written here.

What kernels take: they compute in float32, so nothing wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moefold.errors import BackendError

# Registers a thread can have on every card since Volta. More are spilled to memory.
MAX_REGISTERS = 255
# What the widest load of one thread wants its address to be a multiple of, in bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel moves per token, and the least that any kernel for this job could.

    ``minimum`` counts every input that is needed once and every output once. ``formula`` is for ``moved``, in the
    letters of the kernel's file. What a second read of the same bytes finds in a cache is not counted again.
    """

    formula: str
    moved: float
    minimum: float


@dataclass(frozen=True)
class Build:
    """``signature`` has the types of the arguments that are not compile-time constants, such as ``*bf16`` or ``i32``.

    Pointers are taken to be aligned, as torch's are. An ``i32:16`` is known to be a multiple of 16.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    traffic: Traffic | None = None
    num_warps: int = 4
    num_stages: int = 3
    # Limits. A kernel that spills says how many bytes, and why that is the better choice.
    registers: int = MAX_REGISTERS
    spill_bytes: int = 0
    spill_reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not self.spill_bytes or self.spill_reason, f"{self.name} may spill without a reason"
        named, wanted = {*self.signature, *self.constexprs}, set(self.kernel.arg_names)
        assert named == wanted, f"{self.name}: missing {sorted(wanted - named)}, unknown {sorted(named - wanted)}"

    def types(self) -> dict[str, str]:
        """Every argument's type in the kernel's own order."""
        constant = dict.fromkeys(self.constexprs, "constexpr")
        typed = {name: kind.partition(":")[0] for name, kind in self.signature.items()}
        return {name: (typed | constant)[name] for name in self.kernel.arg_names}

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Which arguments are multiples of 16: all pointers, and the numbers that say so."""
        aligned = {name for name, kind in self.signature.items() if kind.startswith("*") or kind.endswith(":16")}
        return {
            (place,): [["tt.divisibility", ALIGNMENT]]
            for place, name in enumerate(self.kernel.arg_names)
            if name in aligned
        }


def refuse_wide(job: str, *tensors: Tensor | None) -> None:
    """An error for float64, which a kernel would round without a word."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        raise BackendError(f"precision.kernels: the {job} kernel computes in float32; for float64 use torch")
