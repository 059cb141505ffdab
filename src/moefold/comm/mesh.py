"""From a layout's rank lists to process groups: only those this rank is in, each distinct list once, none of size 1.

Making a group is a promise between its members, and with local synchronisation torch names it by how many groups a
member has made before. The names below are therefore walked in one fixed order on every rank. Grids are regular, so
whether a list has size 1, or repeats an earlier one, is the same question with the same answer on every rank, and the
counts stay equal.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moefold.comm.group import Group
from moefold.comm.ledger import Ledger
from moefold.topology.axes import GROUPS
from moefold.topology.layout import FoldedLayout


class Groups:
    """All groups of one rank, by name."""

    def __init__(self, layout: FoldedLayout, rank: int, ledger: Ledger, timeout: timedelta) -> None:
        self.layout, self.rank = layout, rank
        self._groups: dict[str, Group] = {}
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name in GROUPS:
            ranks = layout.ranks(name, rank)
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = _open(ranks, layout.world, timeout)
            self._groups[name] = Group(name, ranks, ranks.index(rank), made.get(ranks), ledger)

    def __getitem__(self, name: str) -> Group:
        return self._groups[name]

    def device_mesh(self, device_type: str, replicate: str, shard: str) -> DeviceMesh | None:
        """The mesh that sharded data parallelism wants; two-dimensional when copies are kept; None when alone."""
        outer, inner = self[replicate], self[shard]
        if outer.alone and inner.alone:
            return None
        if outer.alone:
            return DeviceMesh.from_group(inner.connected, device_type, mesh_dim_names=(shard,))
        if inner.alone:
            # Copies without shards: torch still wants a shard dimension, so this one gets a group of its own.
            lone = dist.new_group([self.rank], use_local_synchronization=True)
            ranks = torch.tensor(outer.ranks).unsqueeze(1)
            return DeviceMesh.from_group([outer.connected, lone], device_type, ranks, mesh_dim_names=(replicate, shard))
        ranks = torch.tensor([self.layout.ranks(shard, rank) for rank in outer.ranks])
        return DeviceMesh.from_group(
            [outer.connected, inner.connected], device_type, ranks, mesh_dim_names=(replicate, shard)
        )


def _open(ranks: tuple[int, ...], world: int, timeout: timedelta) -> dist.ProcessGroup:
    if len(ranks) == world:
        assert dist.group.WORLD is not None, "the default group is made by the launcher"
        return dist.group.WORLD
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
