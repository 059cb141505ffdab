"""The names: the axes of the two grids, and the groups of ranks that code asks for by name.

Every rank stands in two grids at once. The attention grid places tokens and dense weights, the expert grid places
experts. Axes are listed from the outermost to the innermost; the innermost has neighbouring ranks. Both grids have `pp`
outermost and of the same size, so a pipeline stage is the same set of ranks in both: that is what makes folding legal.

The data-parallel axes come in two parts. Over `*_shard` a parameter is cut, over `*_replicate` the cut is repeated
(hybrid sharding); with one replica the second part is the whole axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

GridName = Literal["attention", "expert"]

ATTENTION_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")


@dataclass(frozen=True)
class GroupSpec:
    """The ranks that differ only along these axes of this grid."""

    grid: GridName
    axes: tuple[str, ...]
    purpose: str


GROUPS = MappingProxyType(
    {
        # One axis of the attention grid.
        "tp": GroupSpec("attention", ("tp",), "share one token set's heads, widths and vocabulary"),
        "cp": GroupSpec("attention", ("cp",), "share one sequence"),
        "dp": GroupSpec("attention", ("dp_replicate", "dp_shard"), "see different sequences"),
        "pp": GroupSpec("attention", ("pp",), "hold different layers"),
        # One axis of the expert grid.
        "etp": GroupSpec("expert", ("etp",), "share one expert's width"),
        "ep": GroupSpec("expert", ("ep",), "hold different experts"),
        "edp": GroupSpec("expert", ("edp_replicate", "edp_shard"), "hold the same experts"),
        # Where parameters are cut and repeated.
        "dense_shard": GroupSpec("attention", ("dp_shard", "cp"), "cut dense parameters and their optimizer states"),
        "dense_replicate": GroupSpec("attention", ("dp_replicate",), "repeat that cut"),
        "expert_shard": GroupSpec("expert", ("edp_shard",), "cut expert parameters and their optimizer states"),
        "expert_replicate": GroupSpec("expert", ("edp_replicate",), "repeat that cut"),
        # Where tokens meet.
        "expert_block": GroupSpec("expert", ("ep", "etp"), "hold one full set of experts"),
        "stage": GroupSpec("attention", ("dp_replicate", "dp_shard", "cp", "tp"), "hold the same layers"),
        "world": GroupSpec("attention", ATTENTION_AXES, "everyone"),
    }
)
