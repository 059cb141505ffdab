"""Over how many ranks each dimension of the work is cut. `dp` and `edp` follow from the world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class ParallelConfig:
    """The sizes of the two grids, and how tokens travel between them."""

    __pydantic_config__: ClassVar = STRICT

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    # Hybrid sharding: keep this many full copies of the (sharded) dense / expert parameters.
    dp_replicate: int = 1
    edp_replicate: int = 1
    # How tokens travel to experts on other ranks.
    dispatcher: Literal["all_to_all", "all_gather"] = "all_to_all"
