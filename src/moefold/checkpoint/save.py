"""Write a checkpoint while training goes on.

1. ``begin`` copies this rank's chunks. The loop waits for nothing else.
2. In its thread (`writer_thread.py`), each rank writes its data file and its table, flushes them, and reads the data
   back from the disk.
3. ``advance``, called by every rank once per step, counts the ranks that have written. When all have, they all-gather
   sizes, hashes and tables, so no rank reads another's files.
4. In its thread, rank 0 writes the index and the manifest, gives the directory its final name, and deletes outdated
   checkpoints.
5. ``advance`` returns the committed step on every rank.

A rank that fails in 1, 2 or 4, for lack of memory or of a thread among others, fails the save on all ranks, in the
loop, at the next ``advance``. All collectives happen in the loop; none in a thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from moefold import __version__
from moefold.checkpoint import files
from moefold.checkpoint.chunk_index import received_rows, sent_rows, write_index
from moefold.checkpoint.files import fsync_directory, make_directory
from moefold.checkpoint.manifest import (
    MANIFEST,
    RankFiles,
    TensorEntry,
    as_plain,
    data_name,
    ranks_directory,
    table_name,
    write_manifest,
    write_table,
)
from moefold.checkpoint.run_lock import may_write, read_incarnation
from moefold.checkpoint.shard_file import read_back, shard_order, write_shard
from moefold.checkpoint.step_dirs import check_names, clean_up, committed_steps, final_path, quick_check, temp_path
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, Chunk, ChunkSpec, TensorSpec, is_rank_record
from moefold.checkpoint.writer_thread import Job, Result, WriterThread
from moefold.comm.collectives import all_gather_bytes, all_gather_no_grad, all_reduce_no_grad
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError


@dataclass(frozen=True)
class Written:
    """The files of one rank, and what is in them."""

    files: RankFiles
    elements: int
    # Its table, for the index.
    rows: bytes

    def as_numbers(self) -> list[int]:
        """Of fixed length, so that ranks can all_gather it."""
        return [self.elements, *self.files.as_numbers()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int], rows: bytes) -> Written:
        return cls(RankFiles.from_numbers(numbers[1:]), numbers[0], rows)


@dataclass
class _Save:
    """A save in progress: first every rank writes its shards, then rank 0 commits."""

    step: int
    specs: list[ChunkSpec]
    elsewhere: dict[str, TensorSpec]
    state: dict[str, object]
    writing: Job[Written]
    committing: Job[None] | None = None
    all_written: bool = False


class Saver:
    """Writes checkpoints of one run; every rank has one and calls the same methods at the same steps."""

    def __init__(
        self,
        root: Path,
        world: Group,
        incarnation: int,
        keep: int = 2,
        keep_every: int = 0,
        background: bool = True,
        *,
        about: Mapping[str, object] | None = None,
        run_dir: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``about`` goes into every manifest (see `state_dict.run_record`). ``run_dir`` is where the incarnation was
        taken, by default the root's parent; incarnation 0 is a single writer that needs none. ``device`` is that of
        the collectives."""
        self.root, self.world, self.incarnation = root, world, incarnation
        self.keep, self.keep_every, self.background = keep, keep_every, background
        self.about = dict(about or {})
        self.run_dir = root.parent if run_dir is None else run_dir
        self.device = device or torch.device("cpu")
        # By name and corner of the box.
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._save: _Save | None = None
        self._committed: list[int] = []
        self._thread = WriterThread() if background else None
        if self._thread is not None:
            weakref.finalize(self, self._thread.close).atexit = False
        if world.index == 0:
            make_directory(root)
            clean_up(root, incarnation, alone=world.alone)

    def path_of(self, step: int) -> Path:
        return final_path(self.root, step)

    @property
    def in_progress(self) -> int | None:
        """The step that is being saved now."""
        return self._save.step if self._save else None

    def begin(
        self,
        step: int,
        chunks: Sequence[Chunk],
        state: Mapping[str, object],
        elsewhere: Mapping[str, TensorSpec] = MappingProxyType({}),
    ) -> None:
        """Copy everything and start writing; a save in progress is finished first.

        ``elsewhere``: the tensors of which rank 0 has no part, because they belong to other pipeline stages.
        """
        plain = as_plain(state, "the trainer's state")
        self._complete()
        specs = shard_order(chunk.spec for chunk in chunks)
        temporary = temp_path(self.root, step, self.incarnation, "tmp")
        job = Job(self._writing(temporary, step, specs))
        try:
            self._copy(chunks)
        except (MemoryError, RuntimeError) as error:
            # torch raises RuntimeError for lack of memory. The peers have their copies, and are told in `advance`.
            job.fail(error)
        else:
            self._start(job)
        self._save = _Save(step, specs, dict(elsewhere), plain, job)
        if not self.background:
            self._complete()

    def advance(self) -> int | None:
        """One step of the save in progress; returns a training step when it has been committed."""
        self._poll()
        return self._committed.pop(0) if self._committed else None

    def finish(self) -> int | None:
        """Wait for the save in progress; returns the last committed step that ``advance`` has not returned yet."""
        self._complete()
        last = self._committed[-1] if self._committed else None
        self._committed.clear()
        return last

    def _complete(self) -> None:
        while self._save is not None:
            for job in (self._save.writing, self._save.committing):
                if job is not None:
                    job.wait()
            self._poll()

    def _start(self, job: Job[Result]) -> None:
        if self._thread is None:
            job.run()
        else:
            self._thread.submit(job)

    def _copy(self, chunks: Sequence[Chunk]) -> None:
        """Into buffers that are reused by all saves: page faults would cost more than the copy."""
        for chunk in chunks:
            key = (chunk.name, chunk.spec.corner)
            copy = self._copies.get(key)
            if copy is None or copy.shape != chunk.tensor.shape or copy.dtype != chunk.tensor.dtype:
                copy = self._copies[key] = torch.empty(chunk.tensor.shape, dtype=chunk.tensor.dtype)
            copy.copy_(chunk.tensor.detach())

    def _writing(self, temporary: Path, step: int, specs: list[ChunkSpec]) -> Callable[[], Written]:
        def work() -> Written:
            tensors = [self._copies[spec.name, spec.corner] for spec in specs]
            return write_rank(temporary, step, self.world.index, specs, tensors)

        return work

    def _poll(self) -> None:
        """One step of the protocol, the same on every rank."""
        save = self._save
        if save is None:
            return
        job = save.committing if save.all_written else save.writing
        failed = job is not None and job.ended and job.error is not None
        done = job is None or (job.ended and not failed)
        counts = all_reduce_no_grad(torch.tensor([int(done), int(failed)], device=self.device), self.world).tolist()
        if sum(counts) < self.world.size:
            return
        if counts[1]:
            self._fail(save, job.error if job is not None else None)
        if save.all_written:
            self._save = None
            self._committed.append(save.step)
            return
        by_rank = self._gather_written(save.writing.result)
        save.all_written = True
        if self.world.index == 0:
            save.committing = Job(lambda: self._commit(save, by_rank))
            self._start(save.committing)

    def _gather_written(self, own: Written) -> list[Written]:
        row = torch.tensor([own.as_numbers()], dtype=torch.int64, device=self.device)
        rows = all_gather_no_grad(row, (1,) * self.world.size, self.world).tolist()
        return list(map(Written.from_numbers, rows, all_gather_bytes(own.rows, self.world)))

    def _commit(self, save: _Save, by_rank: Sequence[Written]) -> None:
        """Rank 0 only, in its thread."""
        temporary = temp_path(self.root, save.step, self.incarnation, "tmp")
        incarnation = read_incarnation(self.run_dir) if self.incarnation else None
        tensors = catalogue(save.specs, save.elsewhere)
        check_complete(save.step, tensors, by_rank)
        fields: dict[str, object] = {"layout": {}, "config": "", **self.about, "code": __version__, "state": save.state}
        fields |= {"run": incarnation.run if incarnation else "", "incarnation": self.incarnation}
        fields |= {"step": save.step, "world": self.world.size}
        fields |= {"tensors": {name: asdict(entry) for name, entry in tensors.items()}}
        fields |= {"files": [asdict(written.files) for written in by_rank]}
        index = write_index(temporary, tensors, [received_rows(written.rows) for written in by_rank])
        write_manifest(temporary / MANIFEST, fields | {"index": asdict(index)})
        commit(self.root, save.step, self.run_dir, self.incarnation)
        quick_check(final_path(self.root, save.step))
        delete_outdated(self.root, self.run_dir, self.incarnation, self.keep, self.keep_every)

    def _fail(self, save: _Save, error: BaseException | None) -> None:
        """Raise on every rank; the next save is independent."""
        self._save = None
        row = torch.tensor([[int(error is not None)]], device=self.device)
        failed = all_gather_no_grad(row, (1,) * self.world.size, self.world).flatten().nonzero().flatten().tolist()
        temporary = temp_path(self.root, save.step, self.incarnation, "tmp")
        if self.world.index == 0 and temporary.exists():
            files.remove_tree(temporary)
        if error is not None:
            raise CheckpointError(f"the checkpoint of step {save.step} was not written: {error}") from error
        ranks = ", ".join(map(str, failed[:8]))
        raise CheckpointError(f"the checkpoint of step {save.step} was not written: it failed on rank {ranks}")


def write_rank(temporary: Path, step: int, rank: int, specs: Sequence[ChunkSpec], tensors: Sequence[Tensor]) -> Written:
    """A rank's data and table; the data is read back from the disk."""
    make_directory(temporary)
    make_directory(temporary / ranks_directory(rank))
    data = write_shard(temporary / data_name(rank), specs, tensors)
    table = write_table(temporary / table_name(rank), step, rank, specs)
    read_back(temporary / data_name(rank), specs, tensors)
    elements = sum(spec.num_elements for spec in specs if not is_rank_record(spec.name))
    return Written(RankFiles(data, table), elements, sent_rows(specs))


def catalogue(specs: Sequence[ChunkSpec], elsewhere: Mapping[str, TensorSpec]) -> dict[str, TensorEntry]:
    """Every global tensor, as in the manifest. Rank 0 has a box of each tensor of its own stages."""
    known = {spec.name: TensorSpec(spec.dtype, spec.shape) for spec in specs if not is_rank_record(spec.name)}
    return {name: TensorEntry(DTYPE_NAMES[spec.dtype], spec.shape) for name, spec in (known | dict(elsewhere)).items()}


def check_complete(step: int, tensors: Mapping[str, TensorEntry], by_rank: Sequence[Written]) -> None:
    """All ranks together must have written every element once."""
    expected = sum(prod(entry.shape) for entry in tensors.values())
    written = sum(written.elements for written in by_rank)
    if written != expected:
        raise CheckpointError(f"step {step}: the ranks wrote {written:,} elements of {expected:,}")


def commit(root: Path, step: int, run_dir: Path, incarnation: int) -> None:
    """Give the finished directory its final name, unless a later start has taken over."""
    final = final_path(root, step)
    temporary = temp_path(root, step, incarnation, "tmp")
    replaced = temp_path(root, step, incarnation, "replaced")
    for folder in sorted(temporary.glob("ranks_*")):
        fsync_directory(folder)
    fsync_directory(temporary)
    with may_write(run_dir, incarnation):
        again = final.exists()
        if again:
            # The run resumed from an older step and reached this one again. Until the new one has its name, `clean_up`
            # would restore this one.
            files.rename(final, replaced)
        files.rename(temporary, final)
    fsync_directory(root)
    if again:
        files.remove_tree(replaced)


# ---- which are kept ----
#
# An old one is deleted only after a newer one was committed, and that only after every rank read back what it wrote.
# The newest `keep` valid ones are kept, and those at multiples of `keep_every` for good. Invalid ones are not counted,
# so that a damaged checkpoint never displaces a valid one.


def delete_outdated(root: Path, run_dir: Path, incarnation: int, keep: int, keep_every: int) -> list[int]:
    """Returns the steps that were deleted."""
    deleted = [step for step in outdated(root, keep) if not (keep_every and step % keep_every == 0)]
    for step in deleted:
        delete_checkpoint(root, step, run_dir, incarnation)
    return deleted


def outdated(root: Path, keep: int) -> list[int]:
    """Steps that are older than the newest ``keep`` that verify, oldest first."""
    kept, steps = 0, committed_steps(root)
    for index in range(len(steps) - 1, -1, -1):
        if kept >= max(keep, 1):
            return steps[: index + 1]
        kept += _is_valid(final_path(root, steps[index]))
    return []


def delete_checkpoint(root: Path, step: int, run_dir: Path, incarnation: int) -> None:
    """Renames first, so that a crash leaves nothing that looks like a checkpoint."""
    temporary = temp_path(root, step, incarnation, "deleting")
    with may_write(run_dir, incarnation):
        files.rename(final_path(root, step), temporary)
    fsync_directory(root)
    files.remove_tree(temporary)


def _is_valid(directory: Path) -> bool:
    try:
        # The sizes were checked when it was committed; thousands of files are not looked at again at every save.
        check_names(directory)
    except CheckpointError:
        return False
    return True
