"""Number formats of a run, and which activations are kept between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

Format = Literal["float64", "float32", "bfloat16"]
BYTES: dict[Format, int] = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class PrecisionConfig:
    """Parameters, gradients and their reduction are in `params`; activations and matmuls in `compute`."""

    __pydantic_config__: ClassVar = STRICT

    params: Format = "float32"
    compute: Format = "float32"


RecomputedPhase = Literal["attention", "feed_forward", "experts"]


@dataclass(frozen=True)
class MemoryConfig:
    """A recomputed phase keeps only its input and runs its forward again in backward; no collective runs twice."""

    __pydantic_config__: ClassVar = STRICT

    recompute: tuple[RecomputedPhase, ...] = ()
