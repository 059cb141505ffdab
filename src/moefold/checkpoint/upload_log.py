"""What lies in the second place of a run's checkpoints, and which of it counts.

    log/0000000001.json                 incarnation 1 has started
    log/0000000002.json                 ... and has committed the checkpoint of the next line
    checkpoints/step_00000100.1.1/      a checkpoint's files: of step 100, by incarnation 1, its first upload

Files are copied and read back first, the manifest last; then an entry is added to the log, and only what has an entry
is ever read. The log is a sequence of objects that are created once and never changed. A writer adds the entry after
the last one it knows, if that name is free. So whoever adds an entry knows all entries before it: a writer that was
suspended, replaced by a start on another machine and resumed finds its next name taken by that start, and never
commits again (`run_lock.py` does the same for starts in one directory).

A folder's name has the incarnation and the number of the upload, so no two uploads share an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from moefold.checkpoint.files import FileRecord
from moefold.checkpoint.manifest import MANIFEST, canonical
from moefold.checkpoint.object_store import ObjectStore, read_object
from moefold.checkpoint.run_lock import Incarnation
from moefold.config.strict import STRICT
from moefold.errors import CheckpointError

CHECKPOINTS = "checkpoints"
_LOG = "log"
_MAX_ENTRY = 1 << 16
_ENTRY = re.compile(r"([0-9]{10})\.json")
_FOLDER = re.compile(r"step_([0-9]{8,15})\.([0-9]{1,15})\.([0-9]{1,15})")


class ReplacedError(CheckpointError):
    """The run has been started again elsewhere: this start must not write to the second place any more."""


@dataclass(frozen=True)
class Folder:
    """Of one upload."""

    __pydantic_config__: ClassVar = STRICT

    step: int
    incarnation: int
    upload: int

    @property
    def path(self) -> str:
        return f"{CHECKPOINTS}/step_{self.step:08d}.{self.incarnation}.{self.upload}"

    @classmethod
    def named(cls, name: str) -> Folder | None:
        found = _FOLDER.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))


@dataclass(frozen=True)
class LogEntry:
    """A start; or, with a folder, a committed checkpoint and the file that holds the hashes of all its others."""

    __pydantic_config__: ClassVar = STRICT

    run: str
    incarnation: int
    folder: Folder | None = None
    manifest: FileRecord | None = None


class UploadLog:
    """As one writer or reader knows it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        # The last entry that this writer knows, once it has started.
        self._known: int | None = None

    @property
    def started(self) -> bool:
        return self._known is not None

    def newest_start(self) -> Incarnation | None:
        """The run whose place this is, and the last of its starts that was written down."""
        for _, entry in self.entries():
            if entry is not None:
                return Incarnation(entry.run, entry.incarnation)
        return None

    def commits(self) -> Iterator[tuple[Folder, FileRecord]]:
        """Newest first. Folders of old ones may have been deleted."""
        for _, entry in self.entries():
            if entry is not None and entry.folder is not None and entry.manifest is not None:
                yield entry.folder, entry.manifest

    def entries(self) -> Iterator[tuple[int, LogEntry | None]]:
        """Newest first, by number; None for one that cannot be read."""
        for number in sorted(self._numbers(), reverse=True):
            yield number, self._entry(number)

    def start(self, own: Incarnation) -> bool:
        """Write this start down; False if the storage does not keep two writers apart.

        Raises ReplacedError if another start has this number or a later one.
        """
        while True:
            last = max(self._numbers(), default=0)
            entry = self._entry(last) if last else None
            if entry is not None and entry.run != own.run:
                raise CheckpointError(
                    f"train.saving.upload: holds the checkpoints of another run ({entry.run}, this one is {own.run}); "
                    "choose another place, or another name for this run"
                )
            if entry is not None and entry.incarnation >= own.number:
                raise ReplacedError(f"the run has been started elsewhere as incarnation {entry.incarnation}")
            content = canonical(asdict(LogEntry(own.run, own.number)))
            if self.store.create(_name(last + 1), content):
                self._known = last + 1
                # The same bytes again: harmless where the condition is ignored.
                return not self.store.create(_name(last + 1), content)

    def commit(self, run: str, folder: Folder, manifest: FileRecord) -> None:
        """The one step that makes an uploaded checkpoint count."""
        assert self._known is not None
        entry = LogEntry(run, folder.incarnation, folder, manifest)
        content = canonical(asdict(entry))
        # Names are looked at first, for storage that ignores the condition.
        while self._known + 1 in self._numbers() or not self.store.create(_name(self._known + 1), content):
            found = self._entry(self._known + 1)
            if found is None or found.incarnation != folder.incarnation:
                by = "by another start" if found is None else f"elsewhere as incarnation {found.incarnation}"
                raise ReplacedError(f"the run has been started {by}")
            self._known += 1
            if found == entry:
                # Created by an attempt whose answer was lost.
                return
        self._known += 1

    def delete_outdated(self, incarnation: int, keep: int, keep_every: int) -> list[str]:
        """Delete folders but those of the newest ``keep`` commits and, for good, of multiples of ``keep_every``; of
        uploads that were given up, all. Returns their paths. Of later incarnations nothing is touched."""
        kept: list[Folder] = []
        for folder, _ in self.commits():
            if folder.step not in {other.step for other in kept}:
                kept.append(folder)
            if len(kept) >= max(keep, 1):
                break
        deleted = []
        for name in self.store.names(CHECKPOINTS):
            found = Folder.named(name)
            if found is None or found in kept or found.incarnation > incarnation:
                continue
            if keep_every and found.step % keep_every == 0 and MANIFEST in self.store.names(found.path):
                continue
            # The manifest first: a folder without one is nobody's checkpoint.
            self.store.remove(f"{found.path}/{MANIFEST}")
            self.store.remove(found.path)
            deleted.append(found.path)
        return deleted

    def _numbers(self) -> list[int]:
        found = (_ENTRY.fullmatch(name) for name in self.store.names(_LOG))
        return [int(match[1]) for match in found if match is not None]

    def _entry(self, number: int) -> LogEntry | None:
        try:
            return _adapter().validate_json(read_object(self.store, _name(number), _MAX_ENTRY), strict=True)
        except (ValidationError, FileNotFoundError):
            return None


def _name(number: int) -> str:
    return f"{_LOG}/{number:010d}.json"


@cache
def _adapter() -> TypeAdapter[LogEntry]:
    return TypeAdapter(LogEntry)
