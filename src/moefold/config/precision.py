"""Number formats of a run.

What is kept between forward and backward, and what is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

Format = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Parameters, gradients and their reduction live in `params`; activations and matmuls in `compute`."""

    __pydantic_config__: ClassVar = STRICT

    params: Format = "float32"
    compute: Format = "float32"
    # sequential: one matmul per expert, the reference. grouped: one call for all experts of the rank, for GPUs.
    # fused: everything about experts in one operation, for CPUs.
    experts: Literal["sequential", "grouped", "fused"] = "grouped"
    # The steps between products. torch: torch's operations, anywhere. triton: one kernel per step, on GPUs.
    # native: for CPUs; torch's, but for the activation, which is C, compiled on first use.
    kernels: Literal["torch", "triton", "native"] = "torch"


RecomputedPhase = Literal["attention", "feed_forward", "experts"]


@dataclass(frozen=True)
class MemoryConfig:
    """Activations of a recomputed phase are dropped, all but its input; nothing is sent twice."""

    __pydantic_config__: ClassVar = STRICT

    recompute: tuple[RecomputedPhase, ...] = ()
