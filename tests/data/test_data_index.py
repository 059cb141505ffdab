"""Megatron indices: round trips, what opening checks, and fifty thousand damaged ones (B3)."""

from __future__ import annotations

import io
import random
import struct
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.data.token_files import documents, megatron

from moefold.data.byte_ranges import LocalFile
from moefold.data.megatron_index import HEADER, MAGIC, MegatronIndex, open_index, parse_index
from moefold.data.token_files import MegatronFile
from moefold.data.token_writers import index_pieces
from moefold.errors import DataError

FIELDS = (
    "header",
    "magic",
    "version",
    "token type",
    "counts",
    "sequence_lengths",
    "sequence_pointers",
    "document_indices",
)
INTERESTING = (0, 1, 2, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def index_bytes(sizes: list[int], code: int = 8, item: int = 2) -> tuple[bytes, int]:
    out, held = io.BytesIO(), io.BytesIO(np.array(sizes, "<i4").tobytes())
    out.write(b"".join(index_pieces(held, len(sizes), code, item)))
    return out.getvalue(), sum(sizes) * item


def parse(data: bytes, bin_bytes: int) -> MegatronIndex:
    return parse_index(np.frombuffer(data, np.uint8), "some/file.idx", bin_bytes)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    docs = documents(100, vocab=120)
    file = MegatronFile(megatron(tmp_path / "x", docs, dtype))
    assert file.num_documents == 100 and file.num_tokens == sum(map(len, docs))
    for number, document in enumerate(docs):
        assert np.array_equal(file.document(number), document)
    stream, starts = np.concatenate(docs), np.cumsum([0, *map(len, docs)])[:-1]
    for start, length in [(0, 0), (0, 1), (5, 300), (len(stream) - 7, 7), (0, len(stream))]:
        assert np.array_equal(file.window(start, length), stream[start : start + length])
        inside = starts[(starts >= start) & (starts < start + length)]
        assert np.array_equal(file.document_starts_in(start, length), inside)
    for token in range(0, len(stream), 13):
        assert file.document_at(token) == np.searchsorted(starts, token, side="right") - 1
    file.index.check_all_entries()
    assert not list(tmp_path.glob("*.tmp"))


def test_the_layout_is_megatrons(tmp_path: Path) -> None:
    """Byte by byte, from the format's description and not from our writer."""
    megatron(tmp_path / "x", [np.array([7, 8, 9]), np.array([1])], "int32")
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 12) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<4i", 7, 8, 9, 1)


def test_documents_of_several_sequences_and_empty_ones() -> None:
    sizes, marks = [3, 0, 2, 0, 4], [0, 2, 2, 3, 5, 5]
    data = HEADER.pack(MAGIC, 1, 1, 5, 6) + struct.pack("<5i", *sizes) + struct.pack("<5q", 0, 3, 3, 5, 5)
    index = parse(data + struct.pack("<6q", *marks), 9)
    assert [index.document_span(k) for k in range(5)] == [(0, 3), (3, 3), (3, 5), (5, 9), (9, 9)]
    assert index.document_starts_in(0, 9).tolist() == [0, 3, 5]
    assert [index.document_at(token) for token in range(9)] == [0, 0, 0, 2, 2, 3, 3, 3, 3]


def test_an_empty_set_is_valid() -> None:
    data, size = index_bytes([])
    assert (parse(data, size).num_documents, parse(data, size).num_tokens) == (0, 0)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to three edits: bits, bytes, numbers at the places where numbers are, cuts, insertions, copies."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 4:
            del out[at : at + rng.randrange(1, 20)]
        elif kind == 5:
            offset = rng.choice((9, 17, 18, 26, 34, 38, max(0, len(out) - 8), max(0, len(out) - 16)))
            out[offset : offset + 8] = struct.pack("<Q", rng.choice(INTERESTING))
        elif kind == 6:
            offset = rng.choice((18, 26))
            out[offset : offset + 8] = struct.pack("<Q", rng.randrange(200))
        else:
            other = rng.randrange(len(out) + 1)
            out[at : at + 8] = out[other : other + 8]
    return bytes(out)


def use(index: MegatronIndex) -> None:
    """What a run asks of an index."""
    for number in range(min(index.num_documents, 3)):
        index.document_span(number)
    index.document_starts_in(0, index.num_tokens)
    if index.num_tokens:
        index.document_at(index.num_tokens - 1)


def test_fifty_thousand_damaged_indices_are_named_or_valid() -> None:
    rng = random.Random(3)
    refused, valid = Counter[str](), 0
    began = time.monotonic()
    originals = [index_bytes([rng.randrange(50) for _ in range(count)]) for count in (0, 1, 2, 7, 40)]
    for _ in range(50_000):
        data, size = rng.choice(originals)
        size = size if rng.random() < 0.9 else rng.choice((0, size + 1, size - 2, size * 2))
        try:
            use(parse(mutated(rng, data), size))
            valid += 1
        except DataError as error:
            name, field, _ = str(error).split(": ", 2)
            assert name == "some/file.idx" and field in FIELDS, error
            refused[field] += 1
    print(f"{dict(refused)} refused, {valid:,} valid, {time.monotonic() - began:.1f} s")
    assert refused.total() + valid == 50_000 and valid > 100
    assert set(refused) == set(FIELDS) and min(refused.values()) > 200


def test_damage_on_disk_is_named_too(tmp_path: Path) -> None:
    rng, docs = random.Random(4), documents(20)
    prefix = megatron(tmp_path / "x", docs)
    good, tokens = (tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").read_bytes()
    for _ in range(500):
        data = mutated(rng, good)
        (tmp_path / "x.idx").write_bytes(data)
        (tmp_path / "x.bin").write_bytes(tokens if rng.random() < 0.8 else tokens[: rng.randrange(len(tokens))])
        try:
            use(MegatronFile(prefix).index)
        except DataError as error:
            assert "x.idx" in str(error)


def test_what_opening_did_not_look_at_is_caught_when_used() -> None:
    """More entries than are checked at once: a wrong one between the samples."""
    count = (1 << 20) + 50_000
    data, size = index_bytes([2] * count)
    damaged = bytearray(data)
    at = 25_001
    for table, value in ((HEADER.size + 12 * count + 8 * at, 2**40), (HEADER.size + 4 * count + 8 * at, 2**50)):
        broken = bytearray(damaged)
        broken[table : table + 8] = struct.pack("<q", value)
        index = parse(bytes(broken), size)
        with pytest.raises(DataError, match=r"sequence_pointers|document_indices"):
            index.document_span(at)
        with pytest.raises(DataError, match=r"sequence_pointers|document_indices"):
            index.check_all_entries()
    parse(data, size).check_all_entries()


def test_ten_million_documents_open_at_once(tmp_path: Path) -> None:
    count = 10_000_000
    path = tmp_path / "large.idx"
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        np.full(count, 1000, "<i4").tofile(file)
        np.arange(0, 2000 * count, 2000, dtype="<i8").tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)
    began = time.process_time()
    index = open_index(LocalFile(str(path)), 2000 * count)
    assert index.document_span(9_999_999) == (9_999_999_000, 10_000_000_000)
    assert index.document_at(5_000_000_500) == 5_000_000
    assert time.process_time() - began < 1
