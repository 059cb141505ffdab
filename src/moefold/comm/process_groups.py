"""From a layout's rank lists to process groups: those this rank is in, each distinct list once, none of size 1.

With local synchronisation, torch names a new group by how many groups the member has made before, so all members must
have made equally many. The names are therefore walked in one fixed order on every rank. Grids are regular: whether a
list has size 1 or repeats an earlier one is the same on every rank, so the counts stay equal.

Every collective is counted in the group's ledger: calls and the bytes this rank passes in, forward and backward, by
operation and group. The planner's communication formulas are tested against these counts. With a recorder in the
ledger, every operation is also stamped (`comm/spans.py`): ``Group.timed`` is around an operation that is waited for at
once, ``Group.started`` starts one that is waited for later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from moefold.comm.shared_memory import LazySharedMemory, SharedMemory, in_order
from moefold.comm.spans import NOT_TIMED, SpanRecorder, TimedWork
from moefold.errors import ExchangeError
from moefold.topology.folded_layout import GROUPS, FoldedLayout, levels, ranks_inside

# Of a message between hosts: large enough to cost little, small enough for a socket's buffer.
_PIECE_BYTES = 1 << 18


class Traffic(NamedTuple):
    """Calls and bytes of one operation over one group so far."""

    calls: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """Sums of calls and bytes; one per run, shared by all groups of the rank."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    # Called with what is recorded, before the operation starts: see `heartbeat.py`.
    on_record: Callable[[str, str, Tensor], None] | None = None
    # Stamps operations while a step is profiled.
    spans: SpanRecorder | None = None

    def record(self, operation: str, group: str, sent: Tensor) -> None:
        """``sent`` is the tensor this rank passes in; its size is counted, independent of the backend's algorithm."""
        if self.on_record is not None:
            self.on_record(operation, group, sent)
        before = self.traffic.get((operation, group), Traffic())
        self.traffic[operation, group] = Traffic(
            before.calls + 1, before.bytes_sent + sent.numel() * sent.element_size()
        )

    def of(self, operation: str, group: str) -> Traffic:
        return self.traffic.get((operation, group), Traffic())


@dataclass(frozen=True)
class Group:
    """The ranks, this rank's index among them, and torch's process group; None for a group of one rank."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: ProcessGroup | None
    ledger: Ledger
    # Of a pipeline's group: a process group for each pair of neighbours and direction, by (sender, receiver).
    channels: Mapping[tuple[int, int], ProcessGroup] = field(default_factory=dict)
    # Of a dispatcher's group on CPUs; None where messages go by the process group.
    shared_memory: LazySharedMemory | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def connected(self) -> ProcessGroup:
        """The handle, where the caller knows that the group has more than one rank."""
        assert self.handle is not None, f"group {self.name} has one rank and no handle"
        return self.handle

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    def timed(self, operation: str, sent: Tensor) -> AbstractContextManager[None]:
        """Count an operation, and time what is inside if there is a recorder: all of that waits for the operation."""
        self.ledger.record(operation, self.name, sent)
        return NOT_TIMED if self.ledger.spans is None else self.stamped(operation, sent)

    def stamped(self, operation: str, sent: Tensor) -> AbstractContextManager[None]:
        """The same for an operation that is not counted, where there is a recorder."""
        spans = self.ledger.spans
        assert spans is not None
        return spans.span("comm", f"{operation} {self.name}", (self.stamp(spans, operation, sent),))

    def started(self, operation: str, sent: Tensor, start: Callable[[], Work | None]) -> list[Work]:
        """Count an operation, start it, and return its handle."""
        self.ledger.record(operation, self.name, sent)
        spans = self.ledger.spans
        stamp = None if spans is None else self.stamp(spans, operation, sent)
        work = start()
        if work is None:
            return []
        return [work] if spans is None or stamp is None else [TimedWork(work, spans, f"{operation} {self.name}", stamp)]

    def stamp(self, spans: SpanRecorder, operation: str, sent: Tensor) -> int:
        size = sent.numel() * sent.element_size()
        return spans.start_operation(operation, self.name, str(self.connected.group_name), self.ranks, size)

    def all_to_all(self, received: Tensor, sent: Tensor, recv: list[int], send: list[int]) -> None:
        """``send[i]`` rows to peer i and ``recv[i]`` from it: through shared memory where all ranks have it."""
        if self.shared_memory is None:
            dist.all_to_all_single(received, sent, recv, send, group=self.handle)
        elif (memory := self.memory()) is not None:
            memory.all_to_all(received, sent, in_order(recv), in_order(send))
        else:
            all_to_all_in_pieces(received, sent, recv, send, self)

    def memory(self) -> SharedMemory | None:
        """The memory that all ranks of the group share; the first call is a collective."""
        return None if self.shared_memory is None else self.shared_memory.get()

    def channel(self, sender: int, receiver: int) -> ProcessGroup:
        """The process group for messages from one member (by index) to its neighbour in the ring of stages.

        NCCL runs the transfers of a communicator in the order of their launches. The two ends of a pipeline's boundary
        launch sends and receives in different orders, so each direction has a communicator of its own.
        """
        return self.channels[self.ranks[sender], self.ranks[receiver]]


# The groups of dispatchers. ep_across: one rank of each host of an ep group; ep_inside: its ranks on one host.
TOKEN_GROUPS = ("ep", "etp", "expert_block", "ep_across", "ep_inside")


class Groups:
    """All groups of one rank, by name."""

    def __init__(
        self,
        layout: FoldedLayout,
        rank: int,
        ledger: Ledger,
        timeout: timedelta,
        *,
        dynamic_cp: bool = False,
        inner: int = 1,
        ep_inner: int = 1,
        ranks_per_host: int = 1,
        own_stream: bool = False,
        beside_tp: bool = False,
        beside_contexts: bool = False,
        share_memory: bool = False,
    ) -> None:
        """``inner``: consecutive ranks of a context group that all-to-all heads in hierarchical context parallelism.
        ``ep_inner``: consecutive ranks of an ep group on one host, for two-level dispatch. ``ranks_per_host``: for sums
        and gathers of flat buffers in four steps.

        ``own_stream`` makes separate process groups for dispatchers: their collectives run on another thread, and two
        threads must not share a process group. ``beside_tp`` makes another one of the tp group, and
        ``beside_contexts`` of every context group, for the same reason. ``share_memory``: dispatchers' exchanges go
        through shared memory where the ranks of a group are on one host, and on CPUs.
        """
        self._memories: dict[int, LazySharedMemory] | None = {} if share_memory else None
        self.layout, self.rank, self._ledger, self._timeout = layout, rank, ledger, timeout
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        on_stream: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._groups: dict[str, Group] = {}
        for name in GROUPS:
            stream = on_stream if own_stream and name in TOKEN_GROUPS else made
            self._groups[name] = self._group(name, layout.ranks(name, rank), stream, shared=stream is made)
        tp = self["tp"]
        # Where tensor parallelism runs beside computation: the tp group for that other thread.
        own = _new_group(tp.ranks, None, timeout) if beside_tp and not tp.alone else tp.handle
        self.beside_tp = replace(tp, handle=own)
        self._groups["pp"] = replace(self["pp"], channels=self._channels(self["pp"]))
        across, inside = levels(layout.ranks("ep", rank), rank, ep_inner)
        for name, ranks in (("ep_across", across), ("ep_inside", inside)):
            stream = on_stream if own_stream else made
            self._groups[name] = self._group(name, ranks, stream, shared=stream is made)
        for name in ("dense_shard", "expert_shard"):
            set_size = ranks_inside(layout, name, ranks_per_host) or 1
            if 1 < set_size < layout.size(name):
                across, inside = levels(layout.ranks(name, rank), rank, set_size)
                self._groups[f"{name}_across"] = self._group(f"{name}_across", across, made)
                self._groups[f"{name}_inside"] = self._group(f"{name}_inside", inside, made)
        # This rank's context group of every size that a microbatch may be sharded over, flat and in two levels.
        self.contexts: dict[int, Group] = {}
        self.nested_contexts: dict[int, tuple[Group, Group]] = {}
        # Where all-to-alls of heads run beside computation: the same groups for that other thread.
        self.beside_contexts: dict[int, Group] = {}
        on_context_stream: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for size in layout.context_sizes(dynamic_cp):
            ranks, set_size = layout.context_ranks(rank, size), min(inner, size)
            self.contexts[size] = self._group(f"context_{size}", ranks, made)
            if beside_contexts:
                self.beside_contexts[size] = self._group(f"context_{size}", ranks, on_context_stream, shared=False)
            across, neighbours = levels(ranks, rank, set_size)
            self.nested_contexts[size] = (
                self._group(f"context_{size}_inner", neighbours, made),
                self._group(f"context_{size}_outer", across, made),
            )

    def _group(
        self,
        name: str,
        ranks: tuple[int, ...],
        made: dict[tuple[int, ...], dist.ProcessGroup],
        shared: bool = True,
    ) -> Group:
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = _new_group(ranks, self.layout.world if shared else None, self._timeout)
        index, handle = ranks.index(self.rank), made.get(ranks)
        memory = self._memory(handle, index, ranks, name) if name in TOKEN_GROUPS else None
        return Group(name, ranks, index, handle, self._ledger, shared_memory=memory)

    def _memory(
        self, handle: ProcessGroup | None, index: int, ranks: tuple[int, ...], name: str
    ) -> LazySharedMemory | None:
        """One per process group, as names of the same ranks have one."""
        if self._memories is None or handle is None or dist.get_backend(handle) != dist.Backend.GLOO:
            return None
        seconds = self._timeout.total_seconds()
        made = self._memories.setdefault(id(handle), LazySharedMemory(handle, index, len(ranks), name, seconds))
        return made

    def _channels(self, pp: Group) -> dict[tuple[int, int], ProcessGroup]:
        """Both directions of both boundaries of this rank.

        All ranks of the world make the same number of groups, in the same order: NCCL splits them from the world's
        communicator, in which every rank takes part. A rank without a boundary in a round makes a group of its own.
        """
        found: dict[tuple[int, int], ProcessGroup] = {}
        if pp.alone:
            return found
        for pairs in boundary_rounds(pp.size):
            mine = next((pair for pair in pairs if pp.index in pair), None)
            ranks = (self.rank,) if mine is None else tuple(pp.ranks[index] for index in mine)
            for ends in (ranks, ranks[::-1]):
                made = _new_group(tuple(sorted(ranks)), None, self._timeout)
                if mine is not None:
                    found[ends[0], ends[1]] = made
        return found

    def __getitem__(self, name: str) -> Group:
        return self._groups[name]

    def host_levels(self, name: str) -> tuple[Group, Group] | None:
        """Inside of hosts and across them, of a group that is summed and gathered in two levels."""
        inside, across = self._groups.get(f"{name}_inside"), self._groups.get(f"{name}_across")
        return None if inside is None or across is None else (inside, across)

    def communicators(self) -> dict[str, str]:
        """From the name of each group of more than one rank to torch's name of its process group.

        Names that share a process group have the same one, and so have all of its members.
        """
        nested = (group for pair in self.nested_contexts.values() for group in pair)
        every = (*self._groups.values(), *self.contexts.values(), *nested)
        return {group.name: str(group.handle.group_name) for group in every if group.handle is not None}

    def refuse_shared_threads(self) -> None:
        """Where dispatchers exchange on a thread of their own: two threads start what they send over one process group
        in another order on every rank, and all wait for each other."""
        others = [group for name, group in self._groups.items() if name not in TOKEN_GROUPS]
        names = {id(group.handle): group.name for group in (*others, *self.contexts.values()) if group.handle}
        for name in TOKEN_GROUPS:
            if (shared := names.get(id(self[name].handle))) is not None:
                raise ExchangeError(
                    f"exchanges of {name} run beside computation, and share a process group with {shared}: make groups "
                    "with own_stream=True, as `groups_of` does"
                )

    def device_mesh(self, device_type: str, replicate: str, shard: str) -> DeviceMesh | None:
        """The mesh for FSDP, two-dimensional (HSDP) if there are replicas; None if this rank is alone."""
        outer, inner = self[replicate], self[shard]
        if outer.alone and inner.alone:
            return None
        forget_shardings()
        if outer.alone:
            return DeviceMesh.from_group(inner.connected, device_type, mesh_dim_names=(shard,))
        if inner.alone:
            # Replicas without shards: torch still needs a shard dimension, so this rank gets a group of size 1.
            lone = dist.new_group([self.rank], use_local_synchronization=True)
            ranks = torch.tensor(outer.ranks).unsqueeze(1)
            return DeviceMesh.from_group([outer.connected, lone], device_type, ranks, mesh_dim_names=(replicate, shard))
        ranks = torch.tensor([self.layout.ranks(shard, rank) for rank in outer.ranks])
        return DeviceMesh.from_group(
            [outer.connected, inner.connected], device_type, ranks, mesh_dim_names=(replicate, shard)
        )


def boundary_rounds(size: int) -> list[list[tuple[int, int]]]:
    """The neighbours in a ring of ``size`` members, in rounds such that a member is in one pair per round at most."""
    pairs = [(index, (index + 1) % size) for index in range(size if size > 2 else 1)]
    last = [pairs.pop()] if size > 2 and size % 2 else []
    return [each for each in (pairs[::2], pairs[1::2], last) if each]


def _new_group(ranks: tuple[int, ...], world: int | None, timeout: timedelta) -> dist.ProcessGroup:
    if len(ranks) == world:
        assert dist.group.WORLD is not None, "the launcher must have made the default process group"
        return dist.group.WORLD
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def forget_shardings() -> None:
    """Empty both of DTensor's caches of results of operations.

    Their keys are meshes that are equal although their ranks are not: after a dry run, or the fork of a process that
    did one, parameters would have the mesh and the place of another rank.
    """
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()


def all_to_all_in_pieces(received: Tensor, sent: Tensor, recv: list[int], send: list[int], group: Group) -> None:
    """`dist.all_to_all_single` of gloo with both directions of a connection at once.

    Gloo writes a message of a megabyte in one go and reads nothing from that peer meanwhile, so a slow link carries one
    direction after the other. Pieces that fit into a socket's buffer, all receives posted first, take half the time.
    """
    works = []
    for step in range(1, group.size):
        peer = (group.index - step) % group.size
        for number, piece in enumerate(_pieces(received, recv, peer)):
            works.append(dist.irecv(piece, group=group.handle, group_src=peer, tag=number))
    for step in range(1, group.size):
        peer = (group.index + step) % group.size
        for number, piece in enumerate(_pieces(sent, send, peer)):
            works.append(dist.isend(piece, group=group.handle, group_dst=peer, tag=number))
    received.split(recv)[group.index].copy_(sent.split(send)[group.index])
    for work in works:
        assert work is not None
        work.wait()


def _pieces(rows: Tensor, sizes: list[int], peer: int) -> Sequence[Tensor]:
    """Bytes of the rows of one peer; none of no rows."""
    of_peer = rows.split(sizes)[peer].reshape(-1).view(torch.uint8)
    return of_peer.split(_PIECE_BYTES) if of_peer.numel() else ()
