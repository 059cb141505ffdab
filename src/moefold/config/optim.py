"""The optimizer's numbers, and how the rate moves over a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class LRScheduleConfig:
    """A linear rise over `warmup` steps, then one of several ways down to `floor` times the peak."""

    __pydantic_config__: ClassVar = STRICT

    # wsd: warm up, stay, and fall linearly over the last `decay` steps.
    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with decoupled decay on matrices and a bound on the gradient's norm."""

    __pydantic_config__: ClassVar = STRICT

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
