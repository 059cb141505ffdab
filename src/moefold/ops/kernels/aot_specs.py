"""Ahead-of-time specs: what the compiler needs to build a kernel without a GPU, and the resources it may use.

A Triton kernel is compiled once per set of block sizes and pointer dtypes, and registers, shared memory and spills
belong to one such specialization. A kernel file lists those of published models (``MODELS``: few large experts and many
small ones) as ``BUILDS``; ``aot_build.py`` compiles them all, and a test compares each with the limits given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.errors import BackendError
from moefold.recipes.catalog import recipe

# Registers per thread on every GPU since Volta. More are spilled to memory.
MAX_REGISTERS = 255
# Alignment of a thread's widest load, in bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel moves per token, and the minimum for its job.

    ``minimum`` counts every needed input once and every output once. ``formula`` is for ``moved``, in the letters of
    the shape legend. A second read that hits a cache is not counted.
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
    # Limits. A kernel that spills gives the bytes and the reason.
    registers: int = MAX_REGISTERS
    spill_bytes: int = 0
    spill_reason: str = ""
    # The page of docs/ that lists it.
    page: Literal["kernels", "precision"] = "kernels"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not self.spill_bytes or self.spill_reason, f"{self.name} may spill without a reason"
        named, wanted = {*self.signature, *self.constexprs}, set(self.kernel.arg_names)
        assert named == wanted, f"{self.name}: missing {sorted(wanted - named)}, unknown {sorted(named - wanted)}"

    def types(self) -> dict[str, str]:
        """Every argument's type, in the kernel's order of arguments."""
        constant = dict.fromkeys(self.constexprs, "constexpr")
        typed = {name: kind.partition(":")[0] for name, kind in self.signature.items()}
        return {name: (typed | constant)[name] for name in self.kernel.arg_names}

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Which arguments are multiples of 16: all pointers, and numbers marked ``:16``."""
        aligned = {name for name, kind in self.signature.items() if kind.startswith("*") or kind.endswith(":16")}
        return {
            (place,): [["tt.divisibility", ALIGNMENT]]
            for place, name in enumerate(self.kernel.arg_names)
            if name in aligned
        }


def refuse_wide(job: str, *tensors: Tensor | None) -> None:
    """Raise for float64, which a kernel would round silently."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        raise BackendError(f"kernels.backend: the {job} kernel computes in float32; for float64 use torch")


# By the name under which a build is listed.
_RECIPES = {"DeepSeek-V3": "deepseek_v3", "Qwen3-235B": "qwen3_235b_a22b", "Mixtral-8x7B": "mixtral_8x7b"}

MODELS: dict[str, ModelConfig] = {name: recipe(known).model for name, known in _RECIPES.items()}


def moe_of(model: ModelConfig) -> MoEConfig:
    assert model.moe is not None, "kernels are compiled for MoE models"
    return model.moe
