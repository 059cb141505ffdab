"""Copy committed checkpoints to a second place while training goes on, and fetch them back on a new machine.

Every rank copies the files that it wrote, in its thread, and reads them back; when all have, rank 0 copies the manifest
and commits (`upload_log.py`). As in `save.py`, all collectives happen in the loop, in ``advance``, and none in a
thread.

Nothing here stops training. A file that cannot be copied is tried again after 1, 2, 4, ... seconds; then this
checkpoint is given up, and the next one is tried. The first failure is told at once, and ``finish`` tells what is
missing. If checkpoints are committed faster than they are copied, the newest one is copied next.

A checkpoint may be deleted in the run's directory while it is copied: its files are linked into ``uploading`` first.

A start whose directory has no checkpoint as new as the uploaded one fetches that first (``fetch_newer``), each rank a
share of the files; they are hashed on the way, and the checkpoint is then loaded like any other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moefold.checkpoint import files
from moefold.checkpoint.files import FileRecord
from moefold.checkpoint.manifest import MANIFEST, Manifest, data_name, read_manifest, table_name
from moefold.checkpoint.object_store import check_object
from moefold.checkpoint.run_lock import read_incarnation, take_incarnation
from moefold.checkpoint.save import commit
from moefold.checkpoint.step_dirs import committed_steps, temp_path
from moefold.checkpoint.upload_log import Folder, ReplacedError, UploadLog
from moefold.checkpoint.writer_thread import Job, WriterThread
from moefold.comm.collectives import all_reduce_ints
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError

Say = Callable[[str], None]
STAGING = "uploading"
DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_SAID_EVERY_SECONDS = 5.0
_POLL_SECONDS = 0.1
_MAX_STARTS_AT_ONCE = 8


@dataclass
class _Upload:
    """First every rank copies its files from ``source``, then rank 0 the others, and commits."""

    folder: Folder
    source: Path
    copying: Job[None] | None = None
    committing: Job[None] | None = None
    all_copied: bool = False
    # Bytes of this rank's files: copied and read back, and all of them.
    progress: list[int] = field(default_factory=lambda: [0, 0])


class Uploader:
    """Every rank has one, and calls the same methods at the same steps."""

    def __init__(
        self,
        log: UploadLog,
        run_dir: Path,
        world: Group,
        incarnation: int,
        keep: int = 2,
        keep_every: int = 0,
        *,
        say: Say,
        delays: Sequence[float] = DELAYS,
    ) -> None:
        self.log, self.run_dir, self.world, self.incarnation = log, run_dir, world, incarnation
        self.keep, self.keep_every, self.delays = keep, keep_every, delays
        self._say, self._said = say, set[str]()
        # Steps: the newest that was uploaded, and a newer one that should be.
        self.newest: int | None = None
        self.missing: int | None = None
        self._begun = self._failed = 0
        self._replaced = False
        self._upload: _Upload | None = None
        self._next: _Upload | None = None
        self._thread = WriterThread()
        if world.index == 0:
            shutil.rmtree(run_dir / STAGING, ignore_errors=True)

    def begin(self, checkpoint: Path, ranks: int | None = None) -> None:
        """Copy this one next; one that still waits is left out. ``ranks`` have written it, by default this world's."""
        if self._replaced:
            return
        if self._next is not None:
            self._unstage(self._next)
        self._begun += 1
        self.missing = int(checkpoint.name.removeprefix("step_"))
        folder = Folder(self.missing, self.incarnation, self._begun)
        self._next = _Upload(folder, self._stage(checkpoint, folder, ranks or self.world.size))
        self._start_next()

    def begin_if_missing(self, checkpoint: Path) -> None:
        """After a start: the run may have ended before its newest checkpoint was uploaded."""
        missing = False
        if self.world.index == 0:
            try:
                newest = next((record for _, record in self.log.commits()), None)
                missing = newest != record_of_file(checkpoint / MANIFEST)
            except OSError:
                missing = True
        if all_reduce_ints((int(missing),), self.world) != [0]:
            self.begin(checkpoint, read_manifest(checkpoint).world)

    def advance(self) -> None:
        """One step of the upload in progress."""
        if self._upload is not None:
            self._poll(self._upload)

    def finish(self) -> None:
        """Wait for what is under way, and tell what failed and what is missing."""
        said = time.monotonic()
        while (upload := self._upload) is not None:
            done, total = self._poll(upload)
            if time.monotonic() - said > _SAID_EVERY_SECONDS and self.world.index == 0:
                said = time.monotonic()
                self._say(f"uploading step {upload.folder.step}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
            if self._upload is upload:
                time.sleep(_POLL_SECONDS)
        if self.world.index == 0 and self._failed:
            newest = "nothing was uploaded" if self.newest is None else f"the newest uploaded is step {self.newest}"
            lacking = "" if self.missing is None else f"; step {self.missing} is missing, the same command uploads it"
            self._say(f"{self._failed} of {self._begun} uploads failed; {newest}{lacking}")

    # ---- what every rank does at the same step ----

    def _start_next(self) -> None:
        if self._upload is None and self._next is not None:
            upload, self._next = self._next, None
            upload.copying = Job(lambda: self._copy_own(upload))
            self._thread.submit(upload.copying)
            self._upload = upload

    def _poll(self, upload: _Upload) -> list[int]:
        """Returns how many bytes of all ranks have been copied, and of how many."""
        job = upload.committing if upload.all_copied else upload.copying
        ended = job is None or job.ended
        error = job.error if job is not None and ended else None
        own = (int(ended), int(error is not None), int(isinstance(error, ReplacedError)), *upload.progress)
        ended_on, failed_on, replaced_on, *bytes_of_all = all_reduce_ints(own, self.world)
        if ended_on == self.world.size:
            if failed_on:
                self._give_up(upload, error, replaced=bool(replaced_on))
            elif upload.all_copied:
                self.newest = upload.folder.step
                self.missing = None if self._next is None else self.missing
                self._end(upload)
            else:
                upload.all_copied = True
                if self.world.index == 0:
                    upload.committing = Job(lambda: self._commit(upload))
                    self._thread.submit(upload.committing)
        return bytes_of_all

    def _give_up(self, upload: _Upload, error: BaseException | None, *, replaced: bool) -> None:
        self._failed += 1
        self._replaced = replaced
        if error is not None:
            after = "nothing more is uploaded by this start" if replaced else "the next checkpoint is tried"
            sentence = f"step {upload.folder.step} was not uploaded: {error}; {after}, and training goes on"
            self._say_once("replaced" if replaced else "given up", sentence)
        if replaced and self._next is not None:
            self._unstage(self._next)
            self._next = None
        self._end(upload)

    def _end(self, upload: _Upload) -> None:
        self._unstage(upload)
        self._upload = None
        self._start_next()

    def _say_once(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(sentence)

    # ---- in the thread ----

    def _copy_own(self, upload: _Upload) -> None:
        mine = own_files(read_manifest(upload.source), self.world)
        upload.progress[1] = sum(record.bytes for _, record in mine)
        for name, record in mine:
            self._copy(upload, name, record)
            upload.progress[0] += record.bytes

    def _commit(self, upload: _Upload) -> None:
        """Rank 0 only."""
        manifest = record_of_file(upload.source / MANIFEST)
        for name in shared_files(upload.source):
            self._copy(upload, name, manifest if name == MANIFEST else record_of_file(upload.source / name))
        own = read_incarnation(self.run_dir)
        if own is None or own.number != self.incarnation:
            raise ReplacedError("the run has been started again in its directory")
        if not self.log.started:
            # The second place could not be reached when the run began.
            self._patiently(lambda: start_log(self.log, self.run_dir, self._say))
        self._patiently(lambda: self.log.commit(own.run, upload.folder, manifest))
        try:
            self.log.delete_outdated(self.incarnation, self.keep, self.keep_every)
        except OSError as error:
            # The next commit tries again.
            self._say_once("deleting", f"outdated uploads were not deleted: {error}")

    def _copy(self, upload: _Upload, name: str, record: FileRecord) -> None:
        target = f"{upload.folder.path}/{name}"

        def work() -> None:
            self.log.store.put(target, upload.source / name)
            check_object(self.log.store, target, record)

        self._patiently(work)

    def _patiently(self, work: Callable[[], None]) -> None:
        for delay in self.delays:
            try:
                return work()
            except OSError as error:
                self._say_once("again", f"an upload is tried again: {error}")
                time.sleep(delay)
        work()

    # ---- links, so that a checkpoint can be deleted while it is copied ----

    def _stage(self, checkpoint: Path, folder: Folder, ranks: int) -> Path:
        """Where this rank reads from: links to its files, or the checkpoint itself if there can be none."""
        staged = self.run_dir / STAGING / folder.path.rpartition("/")[2]
        mine = range(self.world.index, ranks, self.world.size)
        try:
            for name in [*(name(rank) for rank in mine for name in (table_name, data_name)), *shared_files(checkpoint)]:
                files.make_directory((staged / name).parent)
                with suppress(FileExistsError):
                    os.link(checkpoint / name, staged / name, follow_symlinks=False)
        except (OSError, CheckpointError):
            # The file system has no links, or the checkpoint is gone: the upload then says so.
            return checkpoint
        return staged

    def _unstage(self, upload: _Upload) -> None:
        if upload.source.parent.name == STAGING and self.world.index == 0:
            shutil.rmtree(upload.source, ignore_errors=True)


def own_files(manifest: Manifest, world: Group) -> list[tuple[str, FileRecord]]:
    """This rank's share of the ranks' files: names, relative to the checkpoint, and what they must contain."""
    found: list[tuple[str, FileRecord]] = []
    for rank in range(world.index, manifest.world, world.size):
        entry, version = manifest.files[rank], manifest.version
        found += [(table_name(rank, version), entry.table), (data_name(rank, version), entry.data)]
    return found


def record_of_file(path: Path) -> FileRecord:
    with files.opened(path) as descriptor, files.naming(path), open(descriptor, "rb", closefd=False) as file:
        return FileRecord(os.fstat(descriptor).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def shared_files(checkpoint: Path) -> list[str]:
    """Files of the whole checkpoint, such as its index, and the manifest last."""
    with files.naming(checkpoint):
        names = [each.name for each in os.scandir(checkpoint) if each.is_file(follow_symlinks=False)]
    return [*sorted(name for name in names if name != MANIFEST and not name.startswith("rank_")), MANIFEST]


# ---- starting ----


def take_uploading_incarnation(log: UploadLog, run_dir: Path, say: Say) -> int:
    """As `take_incarnation`, for a run that other machines may have continued; rank 0 only.

    A second place that cannot be reached stops a run only if nothing else says where it stands.
    """
    try:
        known = log.newest_start()
    except OSError as error:
        if not committed_steps(run_dir / "checkpoints"):
            raise CheckpointError(
                f"train.saving.upload cannot be read, so nothing says whether this run has checkpoints: {error}; "
                "make it reachable, or use train.saving.upload null to start over"
            ) from error
        say(f"train.saving.upload cannot be read now: {error}; training goes on from the run's own directory")
        return take_incarnation(run_dir)
    for _ in range(_MAX_STARTS_AT_ONCE):
        number = take_incarnation(run_dir, known)
        try:
            start_log(log, run_dir, say)
        except ReplacedError:
            known = log.newest_start()
        except OSError as error:
            say(f"train.saving.upload cannot be written now: {error}; it is tried again with the first checkpoint")
            return number
        else:
            return number
    raise CheckpointError("train.saving.upload: other starts of this run keep taking over; stop them first")


def start_log(log: UploadLog, run_dir: Path, say: Say) -> None:
    own = read_incarnation(run_dir)
    assert own is not None
    if not log.start(own):
        say(
            "train.saving.upload: this storage ignores `If-None-Match`, so two machines that train this run at the "
            "same time are not kept apart there"
        )


# ---- fetching ----


def fetch_newer(log: UploadLog, root: Path, world: Group, incarnation: int, say: Say) -> None:
    """Bring the newest uploaded checkpoint here if it is newer than all that are here; called on all ranks."""
    candidates = _candidates(log, root, incarnation, say) if world.index == 0 else iter(())
    thread = WriterThread()
    while True:
        found = next(candidates, None)
        numbers = (0, 0, 0) if found is None else (found.step + 1, found.incarnation, found.upload)
        step, writer, upload = all_reduce_ints(numbers, world)
        if not step:
            return
        folder, temporary = Folder(step - 1, writer, upload), temp_path(root, step - 1, incarnation, "tmp")
        job = Job(partial(_fetch_own, log, folder, temporary, world))
        thread.submit(job)
        ended = failed = 0
        while ended < world.size:
            time.sleep(_POLL_SECONDS)
            own = job.ended
            ended, failed = all_reduce_ints((int(own), int(own and job.error is not None)), world)
        if job.error is not None:
            say(f"the uploaded checkpoint of step {folder.step} is passed over: {job.error}")
        if not failed:
            if world.index == 0:
                commit(root, folder.step, root.parent, incarnation)
                say(f"fetched the checkpoint of step {folder.step} from train.saving.upload")
            return


def _candidates(log: UploadLog, root: Path, incarnation: int, say: Say) -> Iterator[Folder]:
    """Commits that are newer than what is here, newest first, each with its shared files in a temporary directory."""
    here, passed = max(committed_steps(root), default=-1), 0
    try:
        for folder, record in log.commits():
            if folder.step <= here:
                return
            passed += 1
            names = [name for name in log.store.names(folder.path) if not name.startswith("rank")]
            # A folder without one was deleted since.
            if MANIFEST in names and _fetch_shared(
                log, folder, names, record, temp_path(root, folder.step, incarnation, "tmp"), say
            ):
                yield folder
    except OSError as error:
        if here < 0:
            raise CheckpointError(f"train.saving.upload cannot be read: {error}") from error
        say(f"train.saving.upload cannot be read: {error}; training goes on from the run's own directory")
    else:
        if passed and here < 0:
            raise CheckpointError(
                "train.saving.upload holds checkpoints of this run, but none that verifies; choose another place, or "
                "train.saving.upload null, to start over"
            )


def _fetch_shared(
    log: UploadLog, folder: Folder, names: Iterable[str], manifest: FileRecord, temporary: Path, say: Say
) -> bool:
    shutil.rmtree(temporary, ignore_errors=True)
    files.make_directory(temporary)
    for name in names:
        # The hashes of the others are in the manifest, and are compared when the checkpoint is loaded.
        found = files.write_file(temporary / Path(name).name, log.store.pieces(f"{folder.path}/{name}"))
        if name == MANIFEST and found != manifest:
            say(f"the uploaded checkpoint of step {folder.step} is passed over: its manifest is damaged")
            return False
    return True


def _fetch_own(log: UploadLog, folder: Folder, temporary: Path, world: Group) -> None:
    for name, record in own_files(read_manifest(temporary), world):
        files.make_directory((temporary / name).parent)
        found = files.write_file(temporary / name, log.store.pieces(f"{folder.path}/{name}"))
        if found != record:
            raise CheckpointError(f"{name}: damaged in the storage, its hash is not the one that the manifest says")
