"""Copies of the newest state in host memory, so that a run that lost a process or a host does not go back to the disk.

A copy is a checkpoint like any other (`save.py`): the same files, hashes, manifest and commit, in a private directory
of a file system in memory, which stays when processes end. Training waits for it, so that after a kill in step N+1 the
copy of step N is there, and that step alone is done again, by as many ranks as are left.

With several hosts, each keeps the files of its own ranks, and those of the ranks of the host before it in a ring
(`host_files.py`). At a start the ranks agree on the newest copy whose files the memories of all hosts hold together,
hashes verified; hosts get from the others what their ranks need, and the reader of checkpoints does the rest. If a file
is nowhere, or nowhere intact, an older copy or the disk is used, and told.

The disk is the truth. A copy is used only if it is newer than the newest checkpoint there, was made by this run, and by
no earlier start than that checkpoint. A start that resumes elsewhere deletes it; so does the end of a run, after its
last checkpoint, and a finding of silent corruption, since a bit may have flipped while the copy was made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from moefold.checkpoint import files
from moefold.checkpoint.chunk_index import PAGES, ROWS, read_pages
from moefold.checkpoint.commit import commit, delete_checkpoint
from moefold.checkpoint.files import make_directory, read_bounded, write_file
from moefold.checkpoint.host_files import HostRanks, Transfer, exchange_files
from moefold.checkpoint.load import Checkpoint, files_needed, load_into
from moefold.checkpoint.manifest import (
    MANIFEST,
    MAX_JSON_BYTES,
    Manifest,
    RankFiles,
    as_plain,
    data_name,
    read_manifest,
    table_name,
)
from moefold.checkpoint.run_lock import read_incarnation
from moefold.checkpoint.save import Written, catalogue, gather_written, write_head, write_rank
from moefold.checkpoint.save_failures import agreed_reason
from moefold.checkpoint.shard_file import shard_order
from moefold.checkpoint.step_dirs import check_files, check_names, clean_up, committed_steps, final_path, temp_path
from moefold.checkpoint.tensor_spec import Chunk, TensorSpec
from moefold.comm.collectives import all_gather_bytes, all_reduce_ints, broadcast_bytes
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError, FencedError, MismatchError, name_ranks
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel
from moefold.private_files import UntrustedPathError, private_directory

MEMORY = Path("/dev/shm")
# A host that ends while the newest is made has the one before it.
KEEP = 2
_HEAD = (MANIFEST, PAGES, ROWS)

Result = TypeVar("Result")


class _Copy(NamedTuple):
    """In the order in which copies are preferred, the worst first."""

    incarnation: int
    step: int
    world: int
    sha256: str


def memory_directory(run_dir: Path, node: int = 0) -> Path:
    """Of a run on this host; ``node`` keeps two hosts apart that are network namespaces of one machine."""
    real = os.path.realpath(run_dir)
    key = hashlib.sha256(real.encode()).hexdigest()[:16]
    return MEMORY / f"moefold-{os.geteuid()}" / f"{Path(real).name[:60]}-{key}-{node}"


def remove_copies(run_dir: Path, node: int = 0) -> None:
    """Whatever an earlier start has left; ranks of one host may do so at the same time."""
    shutil.rmtree(memory_directory(run_dir, node), ignore_errors=True)


class MemoryCopies:
    """The copies of one run; every rank has one and calls the same methods at the same steps."""

    def __init__(
        self,
        run_dir: Path,
        node: int,
        hosts: HostRanks,
        world: Group,
        incarnation: int,
        about: Mapping[str, object],
        device: torch.device,
    ) -> None:
        self.root, self.run_dir = memory_directory(run_dir, node), run_dir
        self.hosts, self.world, self.incarnation = hosts, world, incarnation
        self.about, self.device = dict(about), device
        started = read_incarnation(run_dir)
        self.run = started.run if started else ""
        self._leads_host = world.index == hosts.here[0]
        if self._leads_host:
            open_memory(self.root)
            clean_up(self.root, incarnation, alone=False)

    # ---- writing ----

    def save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        state: Mapping[str, object],
        elsewhere: Mapping[str, TensorSpec],
    ) -> str | None:
        """Copy this step; returns why it could not be done, the same on all ranks. Older copies are then as before."""
        temporary = temp_path(self.root, step, self.incarnation, "tmp")
        try:
            self._save(step, chunks, as_plain(state, "the trainer's state"), elsewhere, temporary)
        except FencedError:
            raise
        except CheckpointError as error:
            if self._leads_host and temporary.exists():
                with suppress(CheckpointError):
                    files.remove_tree(temporary)
            return str(error)
        return None

    def _save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        state: dict[str, object],
        elsewhere: Mapping[str, TensorSpec],
        temporary: Path,
    ) -> None:
        specs = shard_order(chunk.spec for chunk in chunks)
        live = {(chunk.name, chunk.spec.corner): chunk.tensor for chunk in chunks}
        tensors, rank = [live[spec.name, spec.corner] for spec in specs], self.world.index
        # The loop waits, so live tensors are written: a copy of them would cost as much again.
        own = self._on_all(lambda: write_rank(temporary, step, rank, specs, tensors, reads_back=False))
        by_rank = gather_written(own, self.world, self.device)
        if len(self.hosts.hosts) > 1:
            kept = [transfer for number, each in enumerate(by_rank) for transfer in self._to_keeper(number, each)]
            self._on_all(lambda: exchange_files(temporary, kept, self.world))
        about = {**self.about, "state": state, "run": self.run, "incarnation": self.incarnation, "step": step}
        tensors_of_all = catalogue(specs, elsewhere)
        self._on_all(lambda: None if rank else write_head(temporary, tensors_of_all, by_rank, about))
        if len(self.hosts.hosts) > 1:
            head = broadcast_bytes(_packed_head(temporary) if rank == 0 else b"", self.world)
            self._on_all(lambda: _unpack_head(temporary, head) if self._leads_host and rank else None)
        self._on_all(lambda: self._commit(step))

    def _to_keeper(self, rank: int, written: Written) -> list[Transfer]:
        keeper = self.hosts.keeper_of(rank)
        assert keeper is not None
        return _transfers(rank, written.files, rank, keeper)

    def _commit(self, step: int) -> None:
        if self._leads_host:
            commit(self.root, step, self.run_dir, self.incarnation)
            for old in committed_steps(self.root)[:-KEEP]:
                delete_checkpoint(self.root, old, self.run_dir, self.incarnation)

    def _on_all(self, work: Callable[[], Result]) -> Result:
        """The work's result; if it fails on one rank, for lack of memory among others, the same error on every one."""
        result: list[Result] = []
        error: BaseException | None = None
        try:
            result.append(work())
        except (CheckpointError, MemoryError, OSError) as found:
            error = found
        if any(all_reduce_ints((int(error is not None),), self.world)):
            reason, fenced = agreed_reason(error, self.world, self.device)
            raise FencedError(reason) if fenced else CheckpointError(reason)
        return result[0]

    # ---- deleting ----

    def forget_after(self, step: int) -> None:
        """Delete copies of later steps, and of none else."""
        for each in committed_steps(self.root) if self._leads_host else ():
            if each > step:
                delete_checkpoint(self.root, each, self.run_dir, self.incarnation)

    def discard(self) -> None:
        """At the end of the run, after its last checkpoint."""
        if self._leads_host:
            shutil.rmtree(self.root, ignore_errors=True)

    # ---- reading ----

    def restore(
        self, checkpoints: Path, local_model: LocalModel, optimizer: ModelOptimizer, say: Callable[[str], None]
    ) -> tuple[Path, Mapping[str, object]] | None:
        """Load the newest copy that is newer than the disk's newest checkpoint; None if there is none to be used."""
        for copy, holders in self._found(self._newest_on_disk(checkpoints), say):
            path = final_path(self.root, copy.step)
            try:
                self._collect(copy, holders, path, local_model, optimizer)
                return path, load_into(path, local_model, optimizer, complete=False)
            except MismatchError:
                raise
            except CheckpointError as error:
                if self.world.index == 0:
                    say(f"the copy of step {copy.step} in memory is not used: {error}")
        return None

    def _newest_on_disk(self, checkpoints: Path) -> tuple[int, int]:
        """Incarnation and step, as rank 0 finds them; zeros and -1 if there is none."""
        found = (0, 0)
        for step in reversed(committed_steps(checkpoints)) if self.world.index == 0 else ():
            with suppress(CheckpointError):
                found = (check_names(final_path(checkpoints, step)).incarnation, step + 1)
                break
        incarnation, after = all_reduce_ints(found, self.world)
        return incarnation, after - 1

    def _found(self, disk: tuple[int, int], say: Callable[[str], None]) -> list[tuple[_Copy, list[int]]]:
        """Copies that any host has, each with the ranks that have its manifest, the best first."""
        own: list[_Copy] = []
        for step in committed_steps(self.root):
            try:
                manifest = read_manifest(final_path(self.root, step))
            except CheckpointError as error:
                if self._leads_host:
                    say(f"the copy of step {step} in memory is not used: {error}")
                continue
            copy = _Copy(manifest.incarnation, manifest.step, manifest.world, manifest.sha256)
            newer = copy.step > disk[1] and disk[0] <= copy.incarnation < self.incarnation
            if newer and step == copy.step and manifest.run == self.run:
                own.append(copy)
        holders: dict[_Copy, list[int]] = {}
        for rank, listed in enumerate(all_gather_bytes(json.dumps(own).encode(), self.world)):
            for fields in json.loads(listed):
                holders.setdefault(_Copy(*fields), []).append(rank)
        return sorted(holders.items(), reverse=True)

    def _collect(
        self,
        copy: _Copy,
        holders: Sequence[int],
        path: Path,
        local_model: LocalModel,
        optimizer: ModelOptimizer,
    ) -> None:
        """Give every host the files that its ranks need; raises on all ranks if one of them is nowhere."""
        has_manifest, source = self.world.index in holders, holders[0]
        head = broadcast_bytes(_packed_head(path) if self.world.index == source else b"", self.world, source)
        verified = self._verified(path, read_manifest(path)) if has_manifest else []

        def prepare() -> None:
            if self._leads_host and not has_manifest:
                shutil.rmtree(path, ignore_errors=True)
                _unpack_head(path, head)

        self._on_all(prepare)
        checkpoint = self._on_all(lambda: Checkpoint(path, manifest := read_manifest(path), read_pages(path, manifest)))
        needed = self._on_all(lambda: files_needed(checkpoint, local_model, optimizer))
        holding = self._by_rank(verified)
        needing = self._by_rank(sorted(needed))
        transfers: list[Transfer] = []
        for ranks in self.hosts.hosts:
            held = {file for rank in ranks for file in holding[rank]}
            for file in sorted({file for rank in ranks for file in needing[rank]} - held):
                senders = [rank for rank, files_there in enumerate(holding) if file in files_there]
                if not senders:
                    lost = sorted(set(range(copy.world)) - {each for listed in holding for each in listed})
                    raise CheckpointError(f"no host has intact files of {name_ranks(lost)}")
                transfers += _transfers(file, checkpoint.manifest.files[file], senders[0], ranks[0])
        self._on_all(lambda: exchange_files(path, transfers, self.world))

    def _verified(self, path: Path, manifest: Manifest) -> list[int]:
        """This rank's share of the files that its host holds, if they are what the manifest says."""
        found, here = [], self.hosts.here
        for file in range(here.index(self.world.index), manifest.world, len(here)):
            with suppress(CheckpointError):
                check_files(path, manifest, [file])
                found.append(file)
        return found

    def _by_rank(self, numbers: Sequence[int]) -> list[set[int]]:
        return [set(json.loads(each)) for each in all_gather_bytes(json.dumps(numbers).encode(), self.world)]


def open_memory(root: Path) -> None:
    """Make the directory, which nobody else can change, in a file system that is there."""
    where = "train.saving.memory_every"
    if not MEMORY.is_dir():
        raise CheckpointError(f"{where}: {MEMORY} is not there to keep copies in; set it to 0")
    try:
        private_directory(root, "kept")
    except UntrustedPathError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _transfers(rank: int, records: RankFiles, sender: int, receiver: int) -> list[Transfer]:
    return [
        Transfer(data_name(rank), records.data, sender, receiver),
        Transfer(table_name(rank), records.table, sender, receiver),
    ]


def _packed_head(directory: Path) -> bytes:
    """The manifest and the index: what lies beside the ranks' files. Empty if it cannot be read."""
    try:
        contents = [read_bounded(directory / name, MAX_JSON_BYTES) for name in _HEAD]
    except CheckpointError:
        return b""
    return b"".join(len(content).to_bytes(8, "little") + content for content in contents)


def _unpack_head(directory: Path, packed: bytes) -> None:
    if not packed:
        raise CheckpointError(f"{directory}: its manifest or index could not be read")
    make_directory(directory)
    for name in _HEAD:
        size = int.from_bytes(packed[:8], "little")
        write_file(directory / name, [packed[8 : 8 + size]])
        packed = packed[8 + size :]
