"""What is kept between forward and backward, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

RecomputedPhase = Literal["attention", "feed_forward", "experts"]


@dataclass(frozen=True)
class MemoryConfig:
    """Activations of a recomputed phase are dropped, all but its input; nothing is sent twice."""

    __pydantic_config__: ClassVar = STRICT

    recompute: tuple[RecomputedPhase, ...] = ()
