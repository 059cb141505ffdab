"""Uploaded checkpoints: whatever happens to a writer, the second place has the old one or the new one, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.saved_runs import small_run
from tests.marks import slow_except

from moefold.checkpoint import files
from moefold.checkpoint.files import FileRecord
from moefold.checkpoint.manifest import MANIFEST
from moefold.checkpoint.object_store import DirectoryStore, ObjectStore, open_store, require_store
from moefold.checkpoint.run_lock import Incarnation, read_incarnation, take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.step_dirs import committed_steps, final_path, verify
from moefold.checkpoint.tensor_spec import Chunk, whole
from moefold.checkpoint.upload import STAGING, Uploader, fetch_newer, take_uploading_incarnation
from moefold.checkpoint.upload_log import Folder, ReplacedError, UploadLog
from moefold.comm.process_groups import Groups, Ledger
from moefold.errors import CheckpointError, MissingPackageError
from moefold.topology.folded_layout import fold

WORLD = Groups(fold(small_run().parallel, 1), 0, Ledger(), timedelta(seconds=120))["world"]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are killed here, not machines."""
    monkeypatch.setattr(files, "fsync", lambda descriptor: None)


class Machine:
    """A machine with a run directory of its own, and one start of the run on it."""

    def __init__(self, directory: Path, store: ObjectStore, **options: Any) -> None:
        self.directory, self.root, self.said = directory, directory / "checkpoints", list[str]()
        self.log = UploadLog(store)
        self.incarnation = take_uploading_incarnation(self.log, directory, self.said.append)
        self.saver = Saver(self.root, WORLD, self.incarnation, background=False)
        self.uploads = Uploader(
            self.log, directory, WORLD, self.incarnation, say=self.said.append, delays=(0.0, 0.01), **options
        )

    def save(self, step: int) -> Path:
        values = torch.full((50, 20), float(step))
        self.saver.begin(step, [Chunk("parameter/weight", (50, 20), whole((50, 20)), values)], {"step": step})
        assert self.saver.finish() == step
        return self.saver.path_of(step)

    def upload(self, *steps: int) -> None:
        for step in steps:
            self.uploads.begin(self.save(step))
            self.uploads.finish()

    def fetch(self) -> list[int]:
        fetch_newer(self.log, self.root, WORLD, self.incarnation, self.said.append)
        return committed_steps(self.root)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def fetched(store: ObjectStore, directory: Path) -> list[int]:
    """What a new machine gets; all of it verifies to the last bit."""
    machine = Machine(directory, store)
    for step in machine.fetch():
        verify(final_path(machine.root, step))
    return committed_steps(machine.root)


def test_a_new_machine_gets_the_same_bytes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "far")
    first = Machine(tmp_path / "a", store)
    first.upload(10, 20)
    assert first.said == [] and not (tmp_path / "a" / STAGING / "step").exists()
    second = Machine(tmp_path / "b", store)
    assert second.fetch() == [20]
    assert contents(final_path(first.root, 20)) == contents(final_path(second.root, 20))
    assert second.said == ["fetched the checkpoint of step 20 from train.saving.upload"]
    # It is the same run, and later than the first one's start.
    one, two = read_incarnation(tmp_path / "a"), read_incarnation(tmp_path / "b")
    assert one is not None and two is not None and (one.run, one.number + 1) == (two.run, two.number)
    # What is here already is not fetched, and uploaded only if it is missing there.
    assert second.fetch() == [20]
    second.uploads.begin_if_missing(final_path(second.root, 20))
    assert second.uploads.missing is None
    second.uploads.begin_if_missing(second.save(25))
    second.uploads.finish()
    assert second.uploads.newest == 25 and fetched(store, tmp_path / "c") == [25]


def test_retention(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "far")
    machine = Machine(tmp_path / "a", store, keep=2, keep_every=20)
    store.put("checkpoints/step_00000007.1.9/rank_00000.json", Path(__file__))
    machine.upload(10, 20, 30, 40, 50, 60)
    found = [Folder.named(name) for name in store.names("checkpoints")]
    assert [each.step for each in found if each is not None] == [20, 40, 50, 60]


def test_newest_is_copied_next_and_survives_local_retention(tmp_path: Path) -> None:
    """Three checkpoints while the first one is copied: the second is left out. The saver keeps two, the links all."""
    store = _Stalling(tmp_path / "far")
    machine = Machine(tmp_path / "a", store)
    for step in (1, 2, 3):
        machine.uploads.begin(machine.save(step))
    store.stalled = False
    shutil.rmtree(final_path(machine.root, 3))
    machine.uploads.finish()
    assert [folder.step for folder, _ in machine.log.commits()] == [3, 1] and machine.uploads.newest == 3
    assert not list((tmp_path / "a" / STAGING).iterdir()) and machine.said == []


class _Stalling(DirectoryStore):
    stalled = True

    def put(self, name: str, source: Path) -> None:
        while self.stalled:
            os.sched_yield()
        super().put(name, source)


class _Failing(DirectoryStore):
    """Fails ``times`` times at ``what``."""

    def __init__(self, root: Path, what: str, times: int) -> None:
        super().__init__(root)
        self.what, self.times = what, times

    def _maybe(self, what: str) -> None:
        if what == self.what and self.times:
            self.times -= 1
            raise OSError(5, f"no {what} today, AWS_SECRET_ACCESS_KEY=hunter2")

    def put(self, name: str, source: Path) -> None:
        self._maybe("put")
        super().put(name, source)

    def create(self, name: str, content: bytes) -> bool:
        self._maybe("create")
        return super().create(name, content)

    def pieces(self, name: str) -> Iterator[bytes]:
        self._maybe("pieces")
        yield from super().pieces(name)

    def names(self, folder: str) -> list[str]:
        self._maybe("names")
        return super().names(folder)


@pytest.mark.parametrize("what", ["put", "pieces", "create"])
def test_failures_are_tried_again_and_told_once(what: str, tmp_path: Path) -> None:
    store = _Failing(tmp_path / "far", what, 0)
    machine = Machine(tmp_path / "a", store)
    store.times = 2
    machine.upload(10)
    assert machine.uploads.newest == 10 and len(machine.said) == 1 and "tried again" in machine.said[0]
    store.times = 10**6
    machine.upload(20, 30)
    assert machine.uploads.newest == 10 and machine.uploads.missing == 30
    assert sum("step 20 was not uploaded" in line for line in machine.said) == 1
    assert not any("step 30 was not uploaded" in line for line in machine.said)
    assert machine.said[-1] == (
        "2 of 3 uploads failed; the newest uploaded is step 10; step 30 is missing, the same command uploads it"
    )
    store.times = 0
    machine.upload(40)
    assert machine.uploads.missing is None and fetched(DirectoryStore(tmp_path / "far"), tmp_path / "b") == [40]


def test_an_unreachable_place_stops_only_a_run_without_checkpoints(tmp_path: Path) -> None:
    store = _Failing(tmp_path / "far", "names", 10**6)
    with pytest.raises(CheckpointError, match="nothing says whether this run has checkpoints"):
        Machine(tmp_path / "a", store)
    store.times = 0
    first = Machine(tmp_path / "a", store)
    first.upload(10)
    store.times = 2
    again = Machine(tmp_path / "a", store)
    assert "cannot be read now" in again.said[0]
    # The start is written down with the first upload.
    again.upload(20)
    assert [folder for folder, _ in again.log.commits()] == [Folder(20, 2, 1), Folder(10, 1, 1)]


# ---- two writers ----


def test_a_replaced_writer_never_commits_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "far")
    old = Machine(tmp_path / "a", store)
    old.upload(10)
    new = Machine(tmp_path / "b", store)
    assert new.fetch() == [10]
    old.upload(20, 30)
    assert "started elsewhere as incarnation 2; nothing more is uploaded by this start" in old.said[0]
    new.upload(15)
    assert [folder.step for folder, _ in new.log.commits()] == [15, 10]
    assert fetched(store, tmp_path / "c") == [15]


def test_starts_at_the_same_time_get_different_numbers(tmp_path: Path) -> None:
    """Another start comes between reading the log and adding to it, at every operation in turn."""
    for at in range(8):
        far = tmp_path / f"far{at}"
        Machine(tmp_path / f"a{at}", DirectoryStore(far)).upload(10)

        def meanwhile(far: Path = far, at: int = at) -> None:
            Machine(tmp_path / f"b{at}", DirectoryStore(far)).upload(20)

        store = _Interrupted(far, at, meanwhile)
        machine = Machine(tmp_path / f"c{at}", store)
        machine.upload(30)
        starts = [entry.incarnation for _, entry in machine.log.entries() if entry is not None and entry.folder is None]
        assert len(starts) == len(set(starts)) == (3 if store.happened else 2)
        commits = [folder for folder, _ in machine.log.commits()]
        # Whoever started last is the only one that commits after that.
        assert commits[0].incarnation == max(starts)
        fetched(DirectoryStore(far), tmp_path / f"d{at}")


class _Interrupted(DirectoryStore):
    """Does something else before its n-th operation."""

    def __init__(self, root: Path, at: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(root)
        self.left, self.meanwhile, self.happened = at, meanwhile, False

    def _count(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.happened = True
            self.meanwhile()

    def create(self, name: str, content: bytes) -> bool:
        self._count()
        return super().create(name, content)

    def pieces(self, name: str) -> Iterator[bytes]:
        self._count()
        return super().pieces(name)

    def names(self, folder: str) -> list[str]:
        self._count()
        return super().names(folder)


def test_a_lost_answer_is_not_another_writer(tmp_path: Path) -> None:
    """The entry was created, but the writer was told of an error."""

    class Lost(DirectoryStore):
        def create(self, name: str, content: bytes) -> bool:
            made = super().create(name, content)
            if made and b'"folder":{' in content:
                raise OSError(5, "connection reset")
            return made

    machine = Machine(tmp_path / "a", Lost(tmp_path / "far"))
    machine.upload(10, 20)
    assert machine.uploads.newest == 20 and [folder.step for folder, _ in machine.log.commits()] == [20, 10]


def test_another_run_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "far")
    Machine(tmp_path / "a", store)
    take_incarnation(tmp_path / "b")
    with pytest.raises(CheckpointError, match="of another run"):
        Machine(tmp_path / "b", store)


def test_storage_without_conditions_is_told(tmp_path: Path) -> None:
    class Careless(DirectoryStore):
        def create(self, name: str, content: bytes) -> bool:
            self.remove(name)
            return super().create(name, content)

    assert "ignores `If-None-Match`" in Machine(tmp_path / "a", Careless(tmp_path / "far")).said[0]
    log = UploadLog(DirectoryStore(tmp_path / "far"))
    with pytest.raises(ReplacedError):
        log.start(Incarnation(log.newest_start().run, 1))  # type: ignore[union-attr]


# ---- damage ----


@pytest.mark.parametrize("damage", ["flip data", "flip manifest", "cut", "lose", "flip entry"])
def test_damaged_uploads_are_passed_over(damage: str, tmp_path: Path) -> None:
    far = tmp_path / "far"
    Machine(tmp_path / "a", DirectoryStore(far)).upload(10, 20)
    folder = far / Folder(20, 1, 2).path
    path = {"flip manifest": folder / MANIFEST, "flip entry": far / "log/0000000003.json"}.get(
        damage, next(folder.rglob("*.safetensors"))
    )
    content = bytearray(path.read_bytes())
    if damage == "lose":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-1] if damage == "cut" else content)
    assert fetched(DirectoryStore(far), tmp_path / "b") == [10]
    # Without one that verifies, a new machine does not start over.
    shutil.rmtree(far / Folder(10, 1, 1).path)
    machine = Machine(tmp_path / "c", DirectoryStore(far))
    with pytest.raises(CheckpointError, match="none that verifies"):
        machine.fetch()


# ---- kills ----


def in_child(work: Callable[[], None]) -> int:
    """Its exit code; negative if a signal ended it. Locks of the run are the child's."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Dying(DirectoryStore):
    """Kills the process at the n-th write: before it, in the middle of it, or after it."""

    def __init__(self, root: Path, at: int, when: str) -> None:
        super().__init__(root)
        self.left, self.when = at, when

    def _dies(self, when: str) -> None:
        if self.left == 0 and when == self.when:
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, name: str, source: Path) -> None:
        self._around(lambda: super(_Dying, self).put(name, source))
        self.left -= 1

    def create(self, name: str, content: bytes) -> bool:
        made = self._around(lambda: super(_Dying, self).create(name, content))
        self.left -= 1
        return made

    def remove(self, name: str) -> None:
        self._around(lambda: super(_Dying, self).remove(name))
        self.left -= 1

    def _around(self, work: Callable[[], Any]) -> Any:
        self._dies("before")
        result = work()
        self._dies("after")
        return result

    def _write(self, name: str, pieces: Iterator[bytes]) -> Path:
        if self.left == 0 and self.when == "inside":
            super()._write(name, (piece[: len(piece) // 2] for piece in pieces))
            self._dies("inside")
        return super()._write(name, pieces)


@pytest.mark.parametrize("when", slow_except(("before", "inside", "after"), "inside"))
def test_a_kill_at_any_write_leaves_the_old_or_the_new_one(when: str, tmp_path: Path) -> None:
    """Then the next start on the same machine uploads what is missing."""
    ended, at, seen = False, 0, set()
    while not ended:
        code, found = killed_upload(tmp_path / str(at), at, when)
        ended, at = code == 0, at + 1
        seen.add(found)
    assert 7 <= at <= 20 and seen == {10, 20}


def killed_upload(place: Path, at: int, when: str) -> tuple[int, int]:
    """Returns how the writer ended, and which step a new machine then got."""
    store = DirectoryStore(place / "far")
    assert in_child(lambda: Machine(place / "a", store, keep=1).upload(10)) == 0
    code = in_child(lambda: Machine(place / "a", _Dying(place / "far", at, when), keep=1).upload(20))
    assert code in (0, -signal.SIGKILL)
    found = fetched(store, place / "b")
    assert found in ([10], [20])
    again = Machine(place / "a", store, keep=1)
    again.uploads.begin_if_missing(final_path(again.root, max(committed_steps(again.root))))
    again.uploads.finish()
    assert fetched(store, place / "c") == committed_steps(again.root)[-1:]
    # What the killed one left is deleted after the next commit.
    Machine(place / "a", store, keep=1).upload(30)
    assert len(store.names("checkpoints")) == 1
    shutil.rmtree(place)
    return code, found[0]


# ---- settings ----


def test_a_missing_package_is_named() -> None:
    with pytest.raises(MissingPackageError, match=r"train\.saving\.upload: nowhere:// needs a package"):
        require_store("nowhere://bucket/prefix")


def test_fsspec_storage(tmp_path: Path) -> None:
    """The same over a file system of fsspec, one in memory; random sizes of files."""
    pytest.importorskip("fsspec")
    store = open_store(f"memory://bucket{random.randrange(10**9)}/prefix", "run")
    assert not isinstance(store, DirectoryStore)
    Machine(tmp_path / "a", store).upload(10, 20, 30)
    assert fetched(store, tmp_path / "b") == [30] and len(store.names("checkpoints")) == 2
    with pytest.raises(FileNotFoundError):
        next(store.pieces("checkpoints/nothing"))
    assert FileRecord(0, "") != FileRecord(1, "")
