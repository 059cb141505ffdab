"""Over how many ranks each dimension of the work is cut. `dp` and `edp` follow from the world size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

ContextMode = Literal["ring", "all_to_all", "hierarchical"]
DispatcherName = Literal["all_to_all", "all_gather", "deduplicated", "two_level"]


@dataclass(frozen=True)
class ContextConfig:
    """How ranks that share a sequence attend to each other's tokens, by type of layer."""

    __pydantic_config__: ClassVar = STRICT

    # Layers that see the whole document, and layers that see a window of it.
    full: ContextMode = "ring"
    windowed: ContextMode = "ring"
    # Hierarchical: so many neighbours exchange heads, and the ring runs between such sets.
    inner: int = 1


@dataclass(frozen=True)
class ParallelConfig:
    """The sizes of the two grids, and how tokens travel between them."""

    __pydantic_config__: ClassVar = STRICT

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    # Pipeline: virtual stages per rank, the order of microbatches, and which layers each stage holds, as in
    # `Et*3|(tt|)*29m|L`; None balances the layers' costs.
    vpp: int = 1
    schedule: str = "1f1b"
    stages: str | None = None
    context: ContextConfig = field(default_factory=ContextConfig)
    # Each microbatch is cut over as many ranks as its longest document needs, at most dp * cp.
    dynamic_cp: bool = False
    # Hybrid sharding: keep this many full copies of the (sharded) dense / expert parameters.
    dp_replicate: int = 1
    edp_replicate: int = 1
    # How tokens travel to experts on other ranks.
    dispatcher: DispatcherName = "all_to_all"
    # Two levels: so many neighbours of an ep group share a host.
    ep_inner: int = 1
