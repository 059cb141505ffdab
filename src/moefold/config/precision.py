"""Number formats of a run, and which activations are kept between forward and backward.

Some values are planned only: other frameworks have them, `moefold plan` predicts them, and `checks/planned_only.py`
refuses to train them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from moefold.config.strict import STRICT

Format = Literal["float64", "float32", "bfloat16"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Planned only, for what is kept: weights, gradients, master weights and moments.
KeptFormat = Literal[Format, "float16", "float8"]
# Planned only, for matmuls. FP8 operands have a scale per tensor (of this step, or delayed: of the steps before), per
# row or per block of 128 values, mxfp8 one per 32 values; nvfp4 has four bits and a scale per 16 values.
NarrowFormat = Literal["float16", "fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
ComputeFormat = Literal[Format, NarrowFormat]
BYTES: dict[KeptFormat, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True)
class PrecisionConfig:
    """Parameters and gradients are in `params`, activations and matmuls in `compute`; messages as named below."""

    __pydantic_config__: ClassVar = STRICT

    # Planned only: float16, float8.
    params: KeptFormat = "float32"
    # Planned only: float16, fp8_*, mxfp8, nvfp4.
    compute: ComputeFormat = "float32"
    # Planned only, unless None. Gradients and Adam's moments: None is the format of `params`. Master weights: None is
    # none, because `params` are their own masters.
    gradients: KeptFormat | None = None
    master: KeptFormat | None = None
    moments: KeptFormat | None = None
    # FSDP's all-gather of parameters, except routers', which compute in float32. None: the narrower of `params` and
    # `compute`. A weight is cast to `compute` where it is used, so casting it before it is sent changes no value.
    gather: Format | None = None
    # Sums of gradients over data-parallel ranks. None: `params`, or float32 if that is narrower. bfloat16 rounds each
    # partial sum, and sends half the bytes.
    reduce: Format | None = None
    # Sums of activations and of their gradients over tensor-parallel ranks. None: `compute`, or float32 if that is
    # narrower. bfloat16 rounds each partial sum, and sends half the bytes.
    tp_reduce: Format | None = None

    @property
    def gather_format(self) -> KeptFormat:
        trained = next((name for name in FORMATS if name == self.compute), None)
        if self.gather is not None or trained is None:
            return self.gather or self.params
        return trained if BYTES[trained] < BYTES[self.params] else self.params

    @property
    def reduce_format(self) -> KeptFormat:
        return self.reduce or (self.params if BYTES[self.params] >= 4 else "float32")

    @property
    def tp_reduce_format(self) -> Format:
        return self.tp_reduce or ("float64" if self.compute == "float64" else "float32")


RecomputedPhase = Literal["attention", "feed_forward", "experts"]
# Planned only: parts of a phase, and whole layers.
RecomputedPart = Literal["full", "core_attention", "mla_up", "norms", "activation"]
Recomputed = Literal[RecomputedPhase, RecomputedPart]
# Activations that a framework can keep in the host's memory, by Megatron's names of the modules that save them.
OffloadedActivation = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"
]


@dataclass(frozen=True)
class MemoryConfig:
    """A recomputed phase keeps only its input and runs its forward again in backward; no collective runs twice."""

    __pydantic_config__: ClassVar = STRICT

    # Planned only: full, core_attention, mla_up, norms, activation.
    recompute: tuple[Recomputed, ...] = ()
    # Planned only: activations, all activations of so many layers per pipeline rank, and optimizer states that wait in
    # the host's memory.
    offload: tuple[OffloadedActivation, ...] = ()
    offload_layers: int = 0
    optimizer: Literal["device", "host"] = "device"
