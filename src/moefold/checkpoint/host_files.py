"""Files of ranks on hosts that share no directory: which ranks share a host, and how files get from one to another.

Hosts are in a ring, in the order of their first ranks. A rank's files are kept by a rank of the next host as well, so
whatever one host loses, another one has: its processes, its memory, its power.

Files travel as plain bytes in tensors over the world's process group, in pieces, all transfers at the same time. Both
ends know the list of transfers and the sizes beforehand. A receiver that cannot write receives to the end all the same:
nobody waits for it, and its error comes afterwards, when the ranks agree.

Transfers are not in the ledger: by its numbers a launcher finds ranks that call different collectives over one group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.checkpoint.files import FILE_MODE, FileRecord, check_content, make_directory, naming, opened
from moefold.comm.collectives import all_gather_bytes, device_of
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError

# Of one transfer at a time: bounds the memory of both ends.
_PIECE = 1 << 25


@dataclass(frozen=True)
class HostRanks:
    """The ranks of every host, and which of the hosts this is."""

    hosts: tuple[tuple[int, ...], ...]
    own: int

    @classmethod
    def agreed(cls, host: str, world: Group) -> HostRanks:
        """Called by all ranks, each with the name of its host."""
        names = all_gather_bytes(host.encode(), world)
        order = list(dict.fromkeys(names))
        ranks = tuple(tuple(rank for rank, name in enumerate(names) if name == each) for each in order)
        return cls(ranks, order.index(names[world.index]))

    @property
    def here(self) -> tuple[int, ...]:
        return self.hosts[self.own]

    def host_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)

    def keeper_of(self, rank: int) -> int | None:
        """The rank of the next host that keeps this rank's files; None if there is one host only."""
        if len(self.hosts) == 1:
            return None
        host = self.host_of(rank)
        peers = self.hosts[(host + 1) % len(self.hosts)]
        return peers[self.hosts[host].index(rank) % len(peers)]


@dataclass(frozen=True)
class Transfer:
    """A file, by its name in the directory that both ends have one of."""

    name: str
    record: FileRecord
    sender: int
    receiver: int


def exchange_files(directory: Path, transfers: Sequence[Transfer], world: Group) -> None:
    """Called by all ranks with the same list. Raises, after all transfers, if a file did not arrive as it was."""
    mine = [each for each in transfers if world.index in (each.sender, each.receiver)]
    errors: list[CheckpointError] = []
    for start in range(0, max((each.record.bytes for each in transfers), default=0), _PIECE):
        ongoing = [each for each in mine if start < each.record.bytes]
        _exchange_pieces(directory, ongoing, start, world, errors)
    for each in mine:
        if each.receiver == world.index and not errors:
            try:
                check_content(directory / each.name, each.record)
            except CheckpointError as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _exchange_pieces(
    directory: Path, transfers: Sequence[Transfer], start: int, world: Group, errors: list[CheckpointError]
) -> None:
    if not transfers:
        return
    device, pieces, operations = device_of(world), [], []
    for each in transfers:
        size = min(_PIECE, each.record.bytes - start)
        sends = each.sender == world.index
        piece = _read(directory / each.name, start, size, errors) if sends else torch.empty(size, dtype=torch.uint8)
        piece = piece.to(device)
        pieces.append(piece)
        call, peer = (dist.isend, each.receiver) if sends else (dist.irecv, each.sender)
        operations.append(dist.P2POp(call, piece, world.ranks[peer], group=world.handle))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for each, piece in zip(transfers, pieces, strict=True):
        if each.receiver == world.index:
            try:
                _append(directory / each.name, piece.cpu().numpy().tobytes(), start)
            except CheckpointError as error:
                errors.append(error)


def _read(path: Path, start: int, size: int, errors: list[CheckpointError]) -> torch.Tensor:
    """Zeros if there is nothing to read; the receiver finds that they have another hash."""
    piece = bytearray(size)
    try:
        with opened(path) as descriptor, naming(path):
            os.preadv(descriptor, [piece], start)
    except CheckpointError as error:
        errors.append(error)
    return torch.frombuffer(piece, dtype=torch.uint8)


def _append(path: Path, piece: bytes, start: int) -> None:
    make_directory(path.parent)
    how = os.O_APPEND if start else os.O_TRUNC
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, FILE_MODE)
        with open(descriptor, "wb") as file:
            file.write(piece)
