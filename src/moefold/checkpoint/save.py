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
loop; `save_failures.py` says what follows. All collectives happen in the loop; none in a thread.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from moefold import __version__
from moefold.checkpoint import files
from moefold.checkpoint.chunk_index import received_rows, sent_rows, write_index
from moefold.checkpoint.commit import commit, delete_outdated
from moefold.checkpoint.files import make_directory
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
from moefold.checkpoint.run_lock import read_incarnation
from moefold.checkpoint.save_failures import FailedSave, FailureCount, FailurePolicy, agreed_reason, agreed_room
from moefold.checkpoint.shard_file import read_back, shard_order, write_shard
from moefold.checkpoint.step_dirs import clean_up, final_path, quick_check, temp_path
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, Chunk, ChunkSpec, TensorSpec, is_rank_record
from moefold.checkpoint.writer_thread import Job, Result, WriterThread
from moefold.comm.collectives import all_gather_bytes, all_gather_no_grad, all_reduce_no_grad
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError, FencedError

# Before the first retry where the loop waits for the save; each further one waits twice as long.
_RETRY_SECONDS = 0.5


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
    writing: Job[Written] | None = None
    committing: Job[str] | None = None
    all_written: bool = False
    attempts: int = 1
    # After a failed attempt: calls of `advance` until the next one, and why it failed.
    waits: int = 0
    reason: str = ""
    # The loop waits for it, so it needs no thread.
    in_loop: bool = False


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
        policy: FailurePolicy | None = None,
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
        self.policy = policy or FailurePolicy()
        self._count = FailureCount(self.policy)
        self._failed: list[FailedSave] = []
        self._warnings: list[str] = []
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
        """Copy everything and start writing; a save in progress is finished first, or given up if it waits for another
        attempt.

        ``elsewhere``: the tensors of which rank 0 has no part, because they belong to other pipeline stages.
        """
        plain = as_plain(state, "the trainer's state")
        self._complete(retry=False)
        specs = shard_order(chunk.spec for chunk in chunks)
        self._save = _Save(step, specs, dict(elsewhere), plain, in_loop=not self.background)
        error: BaseException | None = None
        try:
            self._copy(chunks)
        except (MemoryError, RuntimeError) as without_memory:
            # torch raises RuntimeError for lack of memory. The peers have their copies, and are told.
            error = without_memory
        self._attempt(self._save, error)
        if not self.background:
            self._run_attempt()

    def advance(self) -> int | None:
        """One step of the save in progress; returns a training step when it has been committed."""
        self._poll()
        if not self.background:
            self._run_attempt()
        return self._committed.pop(0) if self._committed else None

    def finish(self, *, retry: bool = True) -> int | None:
        """Wait for the save in progress; returns the last committed step that ``advance`` has not returned yet.

        A save that fails is tried again here, as often as the policy says, or else given up.
        """
        self._complete(retry)
        last = self._committed[-1] if self._committed else None
        self._committed.clear()
        return last

    def take_failures(self) -> tuple[list[FailedSave], list[str]]:
        """Attempts that have failed since the last call, on all ranks; and other warnings, on rank 0."""
        taken = self._failed, self._warnings
        self._failed, self._warnings = [], []
        return taken

    def _complete(self, retry: bool) -> None:
        """Until no save is in progress."""
        self._run_attempt()
        while (save := self._save) is not None:
            if not retry:
                self._give_up(save)
                return
            time.sleep(_RETRY_SECONDS * 2 ** (save.attempts - 2))
            save.waits, save.in_loop = 1, True
            self._poll()
            self._run_attempt()

    def _run_attempt(self) -> None:
        """Until the save in progress is committed, given up, or waits for another attempt."""
        while self._save is not None and not self._save.waits:
            for job in (self._save.writing, self._save.committing):
                if job is not None:
                    job.wait()
            self._poll()

    def _attempt(self, save: _Save, error: BaseException | None = None) -> None:
        """Start writing on all ranks, or on none: if one has no copy (``error``), or the disk no room."""
        needed = sum(spec.num_bytes for spec in save.specs)
        room = agreed_room(self.root, needed, error is None, self.world, self.device)
        if room.without_copy:
            self._fail(save, *agreed_reason(error, self.world, self.device), has_copies=False)
        elif (lack := room.lack(self.root, self.policy.free_space)) is not None:
            self._fail(save, lack)
        else:
            temporary = temp_path(self.root, save.step, self.incarnation, "tmp")
            save.writing, save.committing, save.all_written = Job(self._writing(temporary, save)), None, False
            self._start(save, save.writing)

    def _start(self, save: _Save, job: Job[Result]) -> None:
        if self._thread is None or save.in_loop:
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

    def _writing(self, temporary: Path, save: _Save) -> Callable[[], Written]:
        def work() -> Written:
            tensors = [self._copies[spec.name, spec.corner] for spec in save.specs]
            return write_rank(temporary, save.step, self.world.index, save.specs, tensors)

        return work

    def _poll(self) -> None:
        """One step of the protocol, the same on every rank."""
        save = self._save
        if save is None:
            return
        if save.waits:
            save.waits -= 1
            if not save.waits:
                self._attempt(save)
            return
        job: Job[str] | Job[Written] | None = save.committing if save.all_written else save.writing
        # Read once: a job that ends, and fails, between two reads would count as done.
        ended = job is None or job.ended
        failed = ended and job is not None and job.error is not None
        done = ended and not failed
        counts = all_reduce_no_grad(torch.tensor([int(done), int(failed)], device=self.device), self.world).tolist()
        if sum(counts) < self.world.size:
            return
        if counts[1]:
            self._fail(save, *agreed_reason(job.error if job is not None else None, self.world, self.device))
        elif save.all_written:
            self._save = None
            self._count.committed()
            self._committed.append(save.step)
            if save.committing is not None and save.committing.result:
                self._warnings.append(save.committing.result)
        else:
            assert save.writing is not None
            by_rank = gather_written(save.writing.result, self.world, self.device)
            save.all_written = True
            if self.world.index == 0:
                save.committing = Job(lambda: self._commit(save, by_rank))
                self._start(save, save.committing)

    def _commit(self, save: _Save, by_rank: Sequence[Written]) -> str:
        """Rank 0 only, in its thread. Returns what went wrong after the commit: an old checkpoint that stays is no
        failed save."""
        temporary = temp_path(self.root, save.step, self.incarnation, "tmp")
        incarnation = read_incarnation(self.run_dir) if self.incarnation else None
        about = {**self.about, "state": save.state, "run": incarnation.run if incarnation else ""}
        about |= {"incarnation": self.incarnation, "step": save.step}
        write_head(temporary, catalogue(save.specs, save.elsewhere), by_rank, about)
        commit(self.root, save.step, self.run_dir, self.incarnation)
        quick_check(final_path(self.root, save.step))
        try:
            delete_outdated(self.root, self.run_dir, self.incarnation, self.keep, self.keep_every)
        except FencedError:
            raise
        except CheckpointError as error:
            return f"an old checkpoint was not deleted: {error}"
        return ""

    def _fail(self, save: _Save, reason: str, fatal: bool = False, has_copies: bool = True) -> None:
        """On every rank: wait for the next attempt, or give up."""
        temporary = temp_path(self.root, save.step, self.incarnation, "tmp")
        if self.world.index == 0 and temporary.exists():
            # What cannot be removed is overwritten by the next attempt, or removed at the next start.
            with suppress(CheckpointError):
                files.remove_tree(temporary)
        save.writing = save.committing = None
        save.reason = reason
        if fatal:
            self._save = None
            raise FencedError(f"the checkpoint of step {save.step} was not written: {reason}")
        left = self.policy.retries + 1 - save.attempts if has_copies else 0
        if not left:
            self._give_up(save)
            return
        save.waits = self.policy.wait_before(save.attempts)
        self._failed.append(FailedSave(save.step, reason, left, save.waits))
        save.attempts += 1

    def _give_up(self, save: _Save) -> None:
        """Raises if the policy says so; the next save is independent."""
        self._save = None
        self._failed.append(FailedSave(save.step, save.reason, 0, None))
        self._count.given_up(save.step, save.reason, save.attempts - (save.waits > 0))


def write_rank(
    temporary: Path,
    step: int,
    rank: int,
    specs: Sequence[ChunkSpec],
    tensors: Sequence[Tensor],
    reads_back: bool = True,
) -> Written:
    """A rank's data and table; the data is read back from the disk."""
    make_directory(temporary)
    make_directory(temporary / ranks_directory(rank))
    data = write_shard(temporary / data_name(rank), specs, tensors)
    table = write_table(temporary / table_name(rank), step, rank, specs)
    if reads_back:
        read_back(temporary / data_name(rank), specs, tensors)
    elements = sum(spec.num_elements for spec in specs if not is_rank_record(spec.name))
    return Written(RankFiles(data, table), elements, sent_rows(specs))


def gather_written(own: Written, world: Group, device: torch.device) -> list[Written]:
    """Those of all ranks."""
    row = torch.tensor([own.as_numbers()], dtype=torch.int64, device=device)
    rows = all_gather_no_grad(row, (1,) * world.size, world).tolist()
    return list(map(Written.from_numbers, rows, all_gather_bytes(own.rows, world)))


def write_head(
    directory: Path, tensors: Mapping[str, TensorEntry], by_rank: Sequence[Written], about: Mapping[str, object]
) -> None:
    """The index, and last the manifest; ``about`` has its fields step, run, incarnation, state, layout and config."""
    check_complete(about["step"], tensors, by_rank)
    fields: dict[str, object] = {"layout": {}, "config": "", **about, "code": __version__, "world": len(by_rank)}
    fields |= {"tensors": {name: asdict(entry) for name, entry in tensors.items()}}
    fields |= {"files": [asdict(written.files) for written in by_rank]}
    index = write_index(directory, tensors, [received_rows(written.rows) for written in by_rank])
    write_manifest(directory / MANIFEST, fields | {"index": asdict(index)})


def catalogue(specs: Sequence[ChunkSpec], elsewhere: Mapping[str, TensorSpec]) -> dict[str, TensorEntry]:
    """Every global tensor, as in the manifest. Rank 0 has a box of each tensor of its own stages."""
    known = {spec.name: TensorSpec(spec.dtype, spec.shape) for spec in specs if not is_rank_record(spec.name)}
    return {name: TensorEntry(DTYPE_NAMES[spec.dtype], spec.shape) for name, spec in (known | dict(elsewhere)).items()}


def check_complete(step: object, tensors: Mapping[str, TensorEntry], by_rank: Sequence[Written]) -> None:
    """All ranks together must have written every element once."""
    expected = sum(prod(entry.shape) for entry in tensors.values())
    written = sum(written.elements for written in by_rank)
    if written != expected:
        raise CheckpointError(f"step {step}: the ranks wrote {written:,} elements of {expected:,}")
