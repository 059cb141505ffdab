"""The loss scale of float16: a number that the loss is multiplied by, and gradients are divided by again.

float16 has no numbers between 0 and 6e-8, where many gradients of activations lie. The backward pass is linear in the
loss, so a scaled loss moves all of them up, and 65,504, the largest float16, bounds the scale from above. A dynamic
scale is searched for while training, by Megatron's rule (`precision/loss_scaling.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class LossScaleConfig:
    """Names and defaults are Megatron's; its factors, 2 and 1/2, are not options there either."""

    __pydantic_config__: ClassVar = STRICT

    # dynamic; or one number for all steps, such as 4096 (Megatron's loss-scale). Powers of two are exact; 1: none.
    scale: Literal["dynamic"] | float = "dynamic"
    # The first value of a dynamic scale (initial-loss-scale).
    initial: float = 2.0**32
    # Its smallest value (min-loss-scale).
    min: float = 1.0
    # After this many finite steps without an overflow between them, the scale doubles (loss-scale-window).
    window: int = 1000
    # The scale is halved at an overflow from this many on since it last doubled. 1, as torch.amp.GradScaler: at every
    # one.
    hysteresis: int = 2
