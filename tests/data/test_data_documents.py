"""Samples that are documents: every prediction of every document once per epoch, found without reading the rest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data.token_files import documents, megatron, raw

from moefold.config.data import DataConfig, SourceConfig
from moefold.data import packing as pieces_module
from moefold.data.megatron_index import HEADER, MAGIC
from moefold.data.packing import Pieces
from moefold.data.samples import AnySamples, DocumentSamples, Samples, open_samples
from moefold.data.sources import Source
from moefold.errors import DataError

S = 16
END = 255


def marked(count: int, seed: int) -> list[np.ndarray]:
    """Documents that end with a token of their own, as an array file needs them."""
    return [np.append(document % END, END) for document in documents(count, seed)]


def folder(path: Path) -> tuple[str, list[np.ndarray]]:
    """Two pairs and two arrays, one of them with documents of a single token; all their documents in order."""
    path.mkdir(exist_ok=True)
    parts = [documents(300, 1), marked(200, 2), [np.array([7])] * 5 + documents(40, 3), marked(3, 4)]
    for number, docs in enumerate(parts):
        (raw if number % 2 else megatron)(path / f"{number}", docs)
    return str(path), [document for part in parts for document in part]


def open_kind(kind: str, path: str, seed: int = 1, seq_len: int = S, **fields: object) -> AnySamples:
    source = SourceConfig(path=path, end_of_document=END)
    data = DataConfig(seq_len=seq_len, mixture=(source,), packing=kind, **fields)  # type: ignore[arg-type]
    return open_samples(data, 256, seed)


def cut(docs: list[np.ndarray], seq_len: int) -> list[list[int]]:
    """The reference of `Pieces`: every piece written out."""
    return [
        document[start : start + seq_len + 1].tolist()
        for document in docs
        for start in range(0, len(document) - 1, seq_len)
    ]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("max_open", [1, 128])
def test_pieces_are_the_documents_cut(
    tmp_path: Path, seq_len: int, max_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "_RUN", 2 * pieces_module._BLOCK)
    path, docs = folder(tmp_path / "all")
    source = Source(SourceConfig(path=path, end_of_document=END), 256, "train", max_open)
    pieces, expected = Pieces(source, seq_len), cut(docs, seq_len)
    assert len(pieces) == len(expected)
    found = [source.window(start, length + 1).tolist() for start, length in (pieces[i] for i in range(len(pieces)))]
    assert found == expected
    assert sum(len(piece) - 1 for piece in found) == sum(max(0, len(document) - 1) for document in docs)
    with pytest.raises(IndexError):
        pieces[len(pieces)]


@pytest.mark.parametrize("kind", ["padded", "bin_packed"])
def test_every_piece_once_per_epoch(tmp_path: Path, kind: str) -> None:
    path, docs = folder(tmp_path / "all")
    samples = open_kind(kind, path)
    assert isinstance(samples, DocumentSamples)
    expected = cut(docs, S)
    (n,) = map(len, samples.pieces)
    for epoch in range(2):
        seen = [samples.sample(epoch * n + i) for i in range(n)]
        assert sorted(sample.tokens.tolist() for sample in seen) == sorted(expected)
        assert [sample.tokens.tolist() for sample in seen] != expected
        assert {sample.id.split(":")[1] for sample in seen} == {str(epoch)}
        assert len({sample.id for sample in seen}) == n


def test_a_length_needs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = folder(tmp_path / "all")
    samples = open_kind("bin_packed", path)
    expected = [samples.sample(i).length for i in range(300)]
    assert 1 <= min(expected) < max(expected) == S
    monkeypatch.setattr(Source, "window", None)
    assert [samples.length(i) for i in range(300)] == expected


def test_windows_have_one_length(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "all")
    for kind in ("concat", "concat_masked"):
        samples = open_kind(kind, path)
        assert isinstance(samples, Samples)
        assert samples.length(3) == samples.sample(3).length == S


def test_a_sample_depends_on_seed_and_number_alone(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "all")
    forwards, again = open_kind("bin_packed", path), open_kind("bin_packed", path, micro_batch=4, global_batch=64)
    far = [10**12 + i for i in range(20)]
    ids = [forwards.sample(i).id for i in (*range(20), *far)]
    assert [again.sample(i).id for i in (*far[::-1], *range(19, -1, -1))] == ids[::-1]
    other = open_kind("bin_packed", path, seed=2)
    assert [other.sample(i).id for i in range(20)] != ids[:20]


def test_what_a_sample_is_belongs_to_the_fingerprint(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "all")
    kinds = ("concat", "concat_masked", "padded", "bin_packed")
    prints = [open_kind(kind, path).fingerprint for kind in kinds]
    assert len(set(prints)) == 4
    assert prints == [open_kind(kind, path).fingerprint for kind in kinds]
    assert open_kind("bin_packed", path, seq_len=S + 1).fingerprint != prints[3]


def test_the_builtin_corpus_has_documents() -> None:
    samples = open_samples(DataConfig(seq_len=512, packing="bin_packed", train="builtin"), 256, 1)
    lengths = [samples.length(i) for i in range(500)]
    assert max(lengths) == 512 and min(lengths) < 512
    sample = next(samples.sample(i) for i, length in enumerate(lengths) if length < 512)
    # The last piece of a file, whose end it predicts.
    assert sample.tokens[-1] == 0 and sample.tokens[:-1].min() > 0


def test_a_source_without_predictions_is_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path / "short", [np.array([3])] * 9)
    with pytest.raises(DataError, match="no document of two or more"):
        open_kind("bin_packed", path)


def test_a_wrong_token_is_named(tmp_path: Path) -> None:
    docs = documents(30)
    docs[11][0] = 999
    samples = open_samples(DataConfig(seq_len=S, train=megatron(tmp_path / "x", docs), packing="bin_packed"), 256, 1)
    with pytest.raises(DataError, match="document 11, offset 0"):
        [samples.sample(i) for i in range(200)]


def test_an_index_out_of_order_is_refused(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "x", documents(300, longest=9))
    samples = open_kind("bin_packed", prefix)
    # Swap two documents' offsets in the file that is in use.
    at = HEADER.size + 4 * 300
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(at)
        pointers = np.frombuffer(file.read(8 * 300), "<i8").copy()
        pointers[[100, 200]] = pointers[[200, 100]]
        file.seek(at)
        file.write(pointers.tobytes())
    with pytest.raises(DataError, match=r"not in order|changed while in use"):
        [samples.length(i) for i in range(300)]
    with pytest.raises(DataError, match="sequence_pointers"):
        open_kind("bin_packed", prefix)


def test_ten_million_documents_are_numbered_in_seconds(tmp_path: Path) -> None:
    n, rng = 10_000_000, np.random.default_rng(0)
    sizes = np.minimum(rng.lognormal(6, 1.5, n), 1e6).astype("<i4")
    pointers = np.concatenate([[0], np.cumsum(2 * sizes[:-1].astype("<i8"))])
    with open(tmp_path / "x.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, n, n + 1))
        sizes.tofile(file)
        pointers.tofile(file)
        np.arange(n + 1, dtype="<i8").tofile(file)
    with open(tmp_path / "x.bin", "wb") as file:
        os.truncate(file.fileno(), 2 * int(sizes.sum(dtype=np.int64)))
    began = time.process_time()
    samples = open_kind("bin_packed", str(tmp_path / "x"), seq_len=4096)
    opened = time.process_time()
    lengths = [samples.length(10**9 + i) for i in range(1024)]
    found = time.process_time()
    assert isinstance(samples, DocumentSamples)
    print(f"{n:,} documents: opened in {opened - began:.2f} s, lengths of a step in {found - opened:.3f} s")
    assert opened - began < 10 and found - opened < 2
    # Each piece is as likely as any other.
    longest, whole = (sizes > 4096).sum(), np.maximum(sizes - 1, 0) // 4096
    assert longest and abs(np.mean([x == 4096 for x in lengths]) - whole.sum() / len(samples.pieces[0])) < 0.05
