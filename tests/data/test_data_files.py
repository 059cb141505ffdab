"""Readers other than Megatron's: arrays, folders, URLs, the builtin corpus; and windows cut into documents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.data.token_files import documents, megatron, raw

from moefold.config.data import SourceConfig
from moefold.data import packing
from moefold.data.sources import Source, builtin_corpus
from moefold.data.token_files import ArrayFile
from moefold.errors import DataError


def open_source(path: str, vocab: int = 256, **fields: object) -> Source:
    return Source(SourceConfig(path=path, **fields), vocab, "train")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "<i8", ">u2", "uint8"])
def test_arrays_with_a_header(tmp_path: Path, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 250, 1000).astype(dtype)
    np.save(tmp_path / "x.npy", tokens)
    file = ArrayFile(str(tmp_path / "x.npy"), 256)
    assert (file.num_tokens, file.num_documents) == (1000, 1)
    assert np.array_equal(file.window(100, 50), tokens[100:150]) and np.array_equal(file.document(0), tokens)
    assert file.document_starts_in(0, 10).tolist() == [0] and not len(file.document_starts_in(1, 999))


@pytest.mark.parametrize(("dtype", "vocab"), [("uint16", 256), ("uint16", 65_536), ("uint32", 65_537)])
def test_raw_arrays_have_the_type_that_holds_the_vocabulary(tmp_path: Path, dtype: str, vocab: int) -> None:
    docs = documents(50, vocab=vocab)
    file = ArrayFile(raw(tmp_path / "x", docs, dtype), vocab)
    assert np.array_equal(file.window(0, file.num_tokens), np.concatenate(docs))


def test_documents_of_an_array_end_with_their_token(tmp_path: Path) -> None:
    docs = [np.append(document, 0) for document in documents(60)]
    path = raw(tmp_path / "x", docs)
    file = ArrayFile(path, 256, end_of_document=0)
    starts = np.cumsum([0, *map(len, docs)])[:-1]
    assert file.num_documents == 60
    for number, document in enumerate(docs):
        assert np.array_equal(file.document(number), document)
    for start in range(0, file.num_tokens - 40, 7):
        inside = starts[(starts >= start) & (starts < start + 40)]
        assert np.array_equal(file.document_starts_in(start, 40), inside)
        assert file.document_at(start) == np.searchsorted(starts, start, side="right") - 1


def test_a_folder_is_one_stream_with_few_files_open(tmp_path: Path) -> None:
    docs = [documents(5, seed) for seed in range(12)]
    for number, some in enumerate(docs):
        megatron(tmp_path / f"{number % 3}" / f"{number:02}", some)
    order = sorted(range(12), key=lambda n: (n % 3, n))
    stream = np.concatenate([document for n in order for document in docs[n]])
    starts = np.cumsum([0, *(len(document) for n in order for document in docs[n])])[:-1]
    source = Source(SourceConfig(path=str(tmp_path)), 256, "train", max_open=2)
    before = len(os.listdir("/proc/self/fd"))
    assert source.num_tokens == len(stream) and len(source.files) == 12
    for start in range(0, len(stream) - 100, 11):
        assert np.array_equal(source.window(start, 100), stream[start : start + 100])
        inside = starts[(starts >= start) & (starts < start + 100)]
        assert np.array_equal(source.document_starts_in(start, 100), inside)
    assert np.array_equal(source.window(0, len(stream)), stream)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_urls_are_read_by_ranges(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    docs = documents(30)
    megatron(tmp_path / "a", docs)
    raw(tmp_path / "b", docs)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        memory.pipe_file(f"/tokens/{path.name}", path.read_bytes())
    local, remote = open_source(str(tmp_path)), open_source("memory://tokens")
    assert np.array_equal(remote.window(0, remote.num_tokens), local.window(0, local.num_tokens))
    assert np.array_equal(open_source("memory://tokens/a").window(3, 99), local.window(3, 99))
    assert open_source(f"file://{tmp_path}/b.npy").num_tokens == local.num_tokens // 2
    for wrong in ("memory://nothing", "memory://tokens/c.npy", "no-such-protocol://x", "memory://tokens/d.bin"):
        with pytest.raises(DataError, match=wrong.split("/")[-1].removesuffix(".bin")):
            open_source(wrong)


def test_the_builtin_corpus_is_python_text_and_always_the_same() -> None:
    train, validation = builtin_corpus(False), builtin_corpus(True)
    assert train.num_tokens > 3_000_000 and 0.02 < validation.num_tokens / train.num_tokens < 0.15
    for file in (train, validation):
        compile(file.document(3).tobytes()[:-1], "document", "exec")
        assert file.document(3)[-1] == 0 and (file.window(0, file.num_tokens) == 0).sum() == file.num_documents
    names = "from moefold.data.sources import builtin_corpus as b; print(b(False).digest, b(True).digest)"
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", names], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [train.digest, validation.digest]


def test_a_python_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no source of its standard library"):
        builtin_corpus(False, tmp_path)


def test_windows_are_cut_into_pieces() -> None:
    assert packing.starts_in_window(np.array([10, 14, 18]), 10) == (0, 4, 8)
    starts = packing.starts_in_window(np.array([14, 18]), 10)
    assert starts == (0, 4, 8) and packing.starts_in_window(np.array([], np.int64), 10) == (0,)
    # Eight tokens go in; the ninth, which begins a document, is only predicted.
    assert packing.document_lengths(starts, 8) == [4, 4]
    assert packing.crosses_document(starts, 8).tolist() == [False, False, False, True, False, False, False, True]


def test_data_needs_no_torch() -> None:
    words = "import sys, moefold.data.samples, moefold.data.tokenization; print('torch' in sys.modules)"
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", words], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
