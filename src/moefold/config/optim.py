"""The optimizer's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with decoupled decay on matrices and a bound on the gradient's norm."""

    __pydantic_config__: ClassVar = STRICT

    rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
