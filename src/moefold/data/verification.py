"""Token files are compared with their hashes while a run trains, block by block, on a thread of low priority.

The order is that of use. Samples are numbered and their place is computed, so the thread walks along the samples that
the run takes, and ahead of them, and checks the blocks in which they lie; when it is far enough ahead it goes through
the rest of the files. Each block is read once per start. A run that is faster than the thread is told afterwards, and
at its end it waits until all that it has used was checked.

What a block must be comes from `PREFIX.hashes.json` beside the tokens. For files that other programs have made it comes
from the first start of the run, which hashes them and keeps the digests in `data_hashes.json` of its directory. A
resumed run compares with that file before its first step: what the hashes beside the tokens say now, and, of files
whose size or time of change is another, the bytes, for as long as `start_seconds`. The rest follows in the background.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moefold.config.data import VerificationConfig
from moefold.data.block_hashes import (
    ALGORITHM,
    BLOCK_BYTES,
    BlockHashes,
    FilePart,
    block_digest,
    first_difference,
    num_blocks,
    parse_blocks,
    read_block,
    read_hashes,
)
from moefold.data.byte_ranges import LocalFile, is_url, open_byte_file
from moefold.data.samples import AnySamples
from moefold.errors import DamagedDataError, DataError
from moefold.private_files import replace_file
from moefold.redaction import without_login

RECORD, DAMAGE = "data_hashes.json", "data_damage.jsonl"
_MOST_TOLD = 20
# Samples that are checked ahead of the run before the rest of the files.
_AHEAD = 4096
_RECORD_SECONDS, _REPORT_SECONDS, _WAIT_REPORT_SECONDS = 20.0, 60.0, 5.0
_MAX_RECORD_BYTES = 1 << 30
_LOWEST_PRIORITY = 19
_UNCHECKED, _GOOD, _DAMAGED = 0, 1, 2


class Damage(NamedTuple):
    """A block that is not what it must be; ``sample``: the first training sample that lies in it, if known."""

    file: str
    where: str
    sample: int | None

    def __str__(self) -> str:
        first = "" if self.sample is None else f", from sample {self.sample:,} of the run on"
        return (
            f"{self.file}: {self.where}{first}: is not what was written, its hash differs; copy the file again, or "
            "tokenize again"
        )


class PartState:
    """One file: what its blocks must be, and what this process has found of each."""

    def __init__(self, key: str, part: FilePart, expected: Sequence[str | None]) -> None:
        self.key, self.part, self.expected = key, part, list(expected)
        self.found = bytearray(len(self.expected))
        self.status = [] if is_url(part.name) else _status(part.name)
        self._cursor = 0

    def check(self, block: int, pause: Callable[[int], None] | None = None) -> bool:
        """Whether a block is what it must be. One whose digest is not known gets the digest of now."""
        file = open_byte_file(self.part.name)
        if file.size != self.part.size:
            raise DataError(f"{self.part.name}: has {file.size:,} bytes, and {self.part.size:,} when it was opened")
        digest = block_digest(_paced(read_block(file, block), pause))
        if self.expected[block] is None:
            self.expected[block] = digest
        self.found[block] = _GOOD if self.expected[block] == digest else _DAMAGED
        return self.found[block] == _GOOD

    def next_unchecked(self) -> int | None:
        at = self.found.find(_UNCHECKED, self._cursor)
        self._cursor = len(self.found) if at < 0 else at
        return None if at < 0 else at


def _paced(pieces: Iterator[bytes], pause: Callable[[int], None] | None) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        if pause is not None:
            pause(len(piece))


def _status(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ino]


class Verifier:
    """``advance`` and ``finish`` are called by the training loop, and raise what the thread has found.

    ``splits`` are the run's samples by the name of their split, those to train on first; none on a rank that checks
    nothing. ``keeps_record``: whether this process writes the record, which one of the run does; it is also the one
    that checks files behind URLs. ``resumed``: whether a record that is there belongs to what is trained on.
    ``background``: whether this process has the thread; without it, it checks only what it is asked for.
    """

    def __init__(
        self,
        splits: Mapping[str, AnySamples] | None = None,
        directory: Path = Path(),
        config: VerificationConfig | None = None,
        *,
        keeps_record: bool = True,
        resumed: bool = True,
        background: bool = True,
        say: Callable[[str], None] = lambda text: None,
        on_damage: Callable[[Damage], None] = lambda damage: None,
    ) -> None:
        self._splits, self._config = splits or {}, config or VerificationConfig()
        self._keeps_record, self._background = keeps_record, background
        self._path, self._say, self._on_damage = directory / RECORD, say, on_damage
        self._record = read_record(self._path) if resumed and self._splits else {}
        # By split, source and file.
        self._parts: dict[tuple[str, int, int], list[PartState]] = {
            (split, number, file): list(self._open(f"{split}:{number}", source.file_parts(file)))
            for split, samples in self._splits.items()
            for number, source in enumerate(samples.sources)
            for file in range(len(source.files))
        }
        self.parts = [each for states in self._parts.values() for each in states]
        self.total, self.verified = sum(each.part.size for each in self.parts), 0
        self.damage: list[Damage] = []
        self._walked = self._used = self._until = self._ahead = 0
        self._stop = self._hurry = False
        self._busy_until = 0.0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def _open(self, prefix: str, parts: Sequence[FilePart]) -> Iterator[PartState]:
        beside = read_hashes(parts[0].name) if parts else None
        for part in parts:
            if is_url(part.name) and not self._keeps_record:
                continue
            stated = None if beside is None else beside.get(part.ending)
            if stated is not None and stated.bytes != part.size:
                raise DamagedDataError(
                    f"{part.name}: has {part.size:,} bytes, and {stated.bytes:,} when it was written; copy it again, "
                    "or tokenize again"
                )
            blocks = (None,) * num_blocks(part.size) if stated is None else stated.blocks
            yield PartState(f"{prefix}:{os.path.basename(without_login(part.name))}", part, blocks)

    # ---- before the first step ----

    def compare_with_record(self) -> None:
        """Refuse to resume on other bytes, by file and block. Digests that only the record has are taken from it."""
        files, deadline = self._record.get("files"), time.monotonic() + self._config.start_seconds
        for each in self.parts:
            found = files.get(each.key) if isinstance(files, dict) else None
            if found is None:
                continue
            before, now = (
                parse_blocks(found, f"{self._path}: {each.key}"),
                BlockHashes(each.part.size, tuple(each.expected)),
            )
            block = 0 if before.bytes != now.bytes else first_difference(before, now)
            if block is not None:
                raise self._changed(each, block)
            each.expected = [old if new is None else new for new, old in zip(now.blocks, before.blocks)]
            # Another host's copy has another time of change; it is compared in the background.
            if self._keeps_record and found.get("status") != each.status:
                self._compare_bytes(each, deadline)

    def _compare_bytes(self, each: PartState, deadline: float) -> None:
        for block, known in enumerate(each.expected):
            if time.monotonic() > deadline:
                done = (
                    f"{block:,} of {len(each.expected):,} blocks are the same, the others are compared while training"
                )
                self._say(f"{each.part.name}: was written since the last start; {done}")
                return
            if known is not None and not each.check(block):
                raise self._changed(each, block)

    def _changed(self, each: PartState, block: int) -> DamagedDataError:
        return DamagedDataError(
            f"{each.part.name}: {each.part.describe(block)}: is not what this run was trained on; restore the file, or "
            f"start a run of another name. To go on with these tokens, remove {self._path}"
        )

    # ---- beside the training loop ----

    def start(self, first_sample: int, per_step: int) -> None:
        """Begin to compare; ``per_step`` samples are taken per step."""
        unchecked = self._record.get("unchecked_from")
        self._walked = min(unchecked, first_sample) if isinstance(unchecked, int) and unchecked >= 0 else first_sample
        self._ahead = _AHEAD + per_step
        self._used, self._until = first_sample, first_sample + self._ahead
        if self.parts and self._background:
            self.write_record()
            self._thread = threading.Thread(target=self._run, name="compare data with hashes", daemon=True)
            self._thread.start()

    def advance(self, used: int) -> None:
        """Samples before ``used`` are trained on; raises what was found."""
        self._used, self._until = used, used + self._ahead
        if self._failure is not None:
            raise self._failure
        if self.damage and self._config.on_damage == "stop":
            raise DamagedDataError(str(self.damage[0]))

    def finish(self, used: int, wait: bool = True) -> None:
        """Wait until all that was used is checked, or leave it to the next start; then end."""
        self._used, self._until, self._hurry = used, max(self._until, used), True
        began = told = time.monotonic()
        while wait and self._thread is not None and self._thread.is_alive() and self._walked < used and not self.damage:
            time.sleep(0.002)
            if time.monotonic() - told > _WAIT_REPORT_SECONDS:
                told = time.monotonic()
                self._say(
                    f"waiting {told - began:.0f} s until the tokens of the last steps are compared with their hashes"
                )
        self.close()
        self.advance(used)

    def close(self) -> None:
        self._stop = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check_now(self, split: str, source: int, start: int, length: int) -> None:
        """Raise if a block that these tokens lie in is damaged; blocks are hashed once. On any thread."""
        for each, block in self._blocks(split, source, start, length):
            if each.found[block] == _DAMAGED or (each.found[block] == _UNCHECKED and not each.check(block)):
                raise DamagedDataError(str(Damage(without_login(each.part.name), each.part.describe(block), None)))

    # ---- the thread ----

    def _run(self) -> None:
        began = recorded = told = time.monotonic()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            for each, block, sample in self._order():
                if not each.check(block, self._pause):
                    self.damage.append(Damage(without_login(each.part.name), each.part.describe(block), sample))
                    self._on_damage(self.damage[-1])
                self.verified += min(BLOCK_BYTES, each.part.size - block * BLOCK_BYTES)
                now = time.monotonic()
                if now - recorded > _RECORD_SECONDS:
                    recorded = now
                    self.write_record()
                if now - told > _REPORT_SECONDS:
                    told = now
                    self._say(f"data compared with its hashes: {self.verified / 1e9:.2f} of {self.total / 1e9:.2f} GB")
            if told != began:
                self._say(
                    f"data compared with its hashes: {self.verified / 1e9:.2f} of {self.total / 1e9:.2f} GB; ended"
                )
            self.write_record()
        except BaseException as error:
            # Raised in the training loop.
            self._failure = error

    def _pause(self, count: int) -> None:
        """Keep to the rate, unless the run waits for this."""
        now = time.monotonic()
        self._busy_until = max(self._busy_until, now) + count / (self._config.mb_per_s * 1e6)
        while not self._hurry and not self._stop and (left := self._busy_until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))

    def _order(self) -> Iterator[tuple[PartState, int, int | None]]:
        """Blocks to check: indices; those of samples, up to the limit; then one of the rest; until none is left."""
        for each in self.parts:
            if not each.part.item:
                yield from ((each, block, None) for block in range(len(each.found)))
        train = next(iter(self._splits))
        samples = self._splits[train]
        while not self._stop:
            if self._walked < self._until:
                for each, block in self._blocks(train, *samples.location(self._walked)):
                    if each.found[block] == _UNCHECKED:
                        yield each, block, self._walked
                self._walked += 1
                continue
            rest = next((each for each in self.parts if each.next_unchecked() is not None), None)
            if rest is None or (first := rest.next_unchecked()) is None:
                return
            yield rest, first, None

    def _blocks(self, split: str, source: int, start: int, length: int) -> Iterator[tuple[PartState, int]]:
        """The blocks of all files that a window of a source lies in."""
        for file, at, count in self._splits[split].sources[source].split_window(start, length):
            for each in self._parts[split, source, file]:
                yield from ((each, block) for block in each.part.blocks_of(at, count))

    def write_record(self) -> None:
        """Digests and times of change of all files, and from which sample on nothing was checked yet."""
        if not self._keeps_record:
            return
        files = {
            each.key: {"bytes": each.part.size, "blocks": each.expected, "status": each.status} for each in self.parts
        }
        about = {"algorithm": ALGORITHM, "block_bytes": BLOCK_BYTES, "verified_bytes": self.verified}
        text = {**about, "of_bytes": self.total, "unchecked_from": min(self._walked, self._used), "files": files}
        try:
            replace_file(self._path, json.dumps(text) + "\n", 0o600)
        except OSError as error:
            # A full disk stops no training; the next one is tried again.
            self._say(f"{self._path}: cannot be written: {error.strerror}")


class DamageLog:
    """`data_damage.jsonl` of a run: a line for every damaged block that was found and every sample left out."""

    def __init__(self, directory: Path, rank: int, say: Callable[[str], None]) -> None:
        self._path, self._rank, self._say, self._lock = directory / DAMAGE, rank, say, threading.Lock()
        self._told = 0

    def skipped(self, sample: str, why: str) -> None:
        self.write(f"sample {sample} counts in no loss: {why}", sample)

    def write(self, text: str, sample: str | None = None) -> None:
        line = {"time": time.time(), "rank": self._rank, "sample": sample, "damage": text}
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._lock:
            self._told += 1
            try:
                with open(os.open(self._path, flags, 0o600), "ab") as file:
                    file.write((json.dumps(line) + "\n").encode())
            except OSError as error:
                self._say(f"{self._path}: cannot be written: {error.strerror}")
            # All are in the file.
            if self._told <= _MOST_TOLD:
                self._say(text if self._told < _MOST_TOLD else f"{text}; further ones only in {self._path}")


def read_record(path: Path) -> dict[str, object]:
    """What a run has kept of its data; empty if it has kept nothing."""
    if not path.exists():
        return {}
    file = LocalFile(str(path))
    try:
        found = json.loads(file.read(0, file.size)) if file.size <= _MAX_RECORD_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("algorithm") != ALGORITHM or found.get("block_bytes") != BLOCK_BYTES:
        raise DataError(f"{path}: is not what this version writes; remove it to go on without comparing data files")
    return found
