"""Hashes of whole token files, a block at a time: `PREFIX.hashes.json`, which every writer of token files leaves.

A file is hashed in blocks of four megabytes while it is written. A block can be checked without the rest of the file,
so a run checks the blocks that it is about to read first (`verification.py`), and damage has a place: a range of bytes
and of tokens. The hash is BLAKE2b with 128 bits, the fastest that Python has on a CPU without instructions for SHA.

This finds damage and exchanged files. It is no signature: who can write the tokens can write their hashes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from moefold.data.byte_ranges import ByteFile, open_byte_file, read_json
from moefold.errors import DataError

HASHES = ".hashes.json"
BLOCK_BYTES = 4 << 20
ALGORITHM = "blake2b-128"
_DIGEST_BYTES = 16
_DIGEST = re.compile(r"[0-9a-f]{32}")
# About 40 bytes for each block: enough for files of 8 TB.
_MAX_BYTES = 80 << 20


@dataclass(frozen=True)
class BlockHashes:
    """Of one file: its size, and a digest per block; None for a block that was not hashed yet."""

    bytes: int
    blocks: tuple[str | None, ...]

    @property
    def complete(self) -> bool:
        return None not in self.blocks

    def as_json(self) -> dict[str, object]:
        return {"bytes": self.bytes, "blocks": list(self.blocks)}


class FilePart(NamedTuple):
    """One of the files that a reader of tokens reads: its ending, and how its bytes are tokens.

    ``first_byte`` is that of the first token, after a header; ``item`` is the bytes per token, 0 for an index.
    """

    ending: str
    name: str
    size: int
    first_byte: int
    item: int

    def blocks_of(self, first_token: int, count: int) -> range:
        """The blocks that these tokens lie in."""
        if not self.item or not count:
            return range(0)
        first = self.first_byte + first_token * self.item
        return range(first // BLOCK_BYTES, (first + count * self.item - 1) // BLOCK_BYTES + 1)

    def describe(self, block: int) -> str:
        """'block 3 of 12 (bytes 8,388,608 to 12,582,911, tokens 4,194,304 to 6,291,455)', counted from 1."""
        first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size) - 1
        tokens = ""
        if self.item:
            begin = max(first - self.first_byte, 0) // self.item
            tokens = f", tokens {begin:,} to {max(last - self.first_byte, 0) // self.item:,}"
        return f"block {block + 1:,} of {num_blocks(self.size):,} (bytes {first:,} to {last:,}{tokens})"


class BlockHasher:
    """Hashes what is written, in order. ``done`` are the blocks of an interrupted writer."""

    def __init__(self, done: Sequence[str] = ()) -> None:
        self.done = list(done)
        self.bytes = len(self.done) * BLOCK_BYTES
        self._block = blake2b(digest_size=_DIGEST_BYTES)

    def update(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            part = rest[: BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._block.update(part)
            self.bytes += len(part)
            rest = rest[len(part) :]
            if self.bytes % BLOCK_BYTES == 0:
                self.done.append(self._block.hexdigest())
                self._block = blake2b(digest_size=_DIGEST_BYTES)

    def hashes(self) -> BlockHashes:
        """Of everything so far, an unfinished last block included."""
        rest = [self._block.hexdigest()] if self.bytes % BLOCK_BYTES else []
        return BlockHashes(self.bytes, (*self.done, *rest))


def num_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def block_digest(pieces: Iterable[bytes]) -> str:
    """Of one block, given in pieces."""
    found = blake2b(digest_size=_DIGEST_BYTES)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def read_block(file: ByteFile, block: int, piece: int = 1 << 20) -> Iterator[bytes]:
    """The bytes of a block, a megabyte at a time."""
    end = min((block + 1) * BLOCK_BYTES, file.size)
    for at in range(block * BLOCK_BYTES, end, piece):
        yield file.read(at, min(piece, end - at))


def hashes_path(path: str) -> str:
    """Beside a pair or an array, whichever of its files is given."""
    for ending in (".bin", ".idx", ".npy"):
        path = path.removesuffix(ending)
    return path + HASHES


def hashes_text(files: Mapping[str, BlockHashes]) -> str:
    """The text of PREFIX.hashes.json; ``files`` are keyed by their endings."""
    found = {ending: hashes.as_json() for ending, hashes in files.items()}
    return json.dumps({"algorithm": ALGORITHM, "block_bytes": BLOCK_BYTES, "files": found}) + "\n"


def read_hashes(path: str) -> dict[str, BlockHashes] | None:
    """By ending, of one token file or pair; None if it has no hashes."""
    name = hashes_path(path)
    found = read_json(name, _MAX_BYTES, "the hashes", "write it again with `moefold data verify --write`")
    return None if found is None else parse_hashes(found, name)


def parse_hashes(found: object, name: str) -> dict[str, BlockHashes]:
    """What `hashes_text` has written; anything else is an error that names the file."""
    known = isinstance(found, dict) and found.get("algorithm") == ALGORITHM and found.get("block_bytes") == BLOCK_BYTES
    files = found.get("files") if isinstance(found, dict) and known else None
    if not isinstance(files, dict):
        raise DataError(f"{name}: does not hold {ALGORITHM} of blocks of {BLOCK_BYTES:,} bytes; write it again")
    return {str(ending): parse_blocks(each, f"{name}: {ending}") for ending, each in files.items()}


def parse_blocks(found: object, name: str) -> BlockHashes:
    size, blocks = (found.get("bytes"), found.get("blocks")) if isinstance(found, dict) else (None, None)
    if not isinstance(size, int) or isinstance(size, bool) or not isinstance(blocks, list):
        raise DataError(f"{name}: does not say bytes and blocks; write it again with `moefold data verify --write`")
    valid = all(each is None or (isinstance(each, str) and _DIGEST.fullmatch(each)) for each in blocks)
    if size < 0 or len(blocks) != num_blocks(size) or not valid:
        raise DataError(f"{name}: {len(blocks):,} blocks do not belong to a file of {size:,} bytes; write it again")
    return BlockHashes(size, tuple(blocks))


def first_difference(before: BlockHashes, now: BlockHashes) -> int | None:
    """The first block whose digest both know and that differs; sizes are compared before."""
    for number, (old, new) in enumerate(zip(before.blocks, now.blocks)):
        if old is not None and new is not None and old != new:
            return number
    return None


def compare_part(
    part: FilePart, expected: BlockHashes | None, in_order: Callable[[Iterable[int], int], Iterable[int]]
) -> tuple[BlockHashes, list[int]]:
    """The hashes of a file as it is now, and the blocks that are not as expected; ``in_order`` shows progress."""
    file, digests = open_byte_file(part.name), []
    blocks = range(num_blocks(file.size))
    for block in in_order(blocks, len(blocks)):
        digests.append(block_digest(read_block(file, block)))
    now = BlockHashes(file.size, tuple(digests))
    before = now.blocks if expected is None else expected.blocks
    longer = range(min(len(before), len(digests)), max(len(before), len(digests)))
    return now, [*(at for at, (old, new) in enumerate(zip(before, digests)) if old != new), *longer]
