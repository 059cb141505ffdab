"""Damaged data (F14): every fault is an error that names the file, and a changed list of files is noticed."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.data.token_files import documents, megatron, raw

from moefold.config.data import DataConfig, SourceConfig
from moefold.data.samples import Samples
from moefold.errors import DataError, MoefoldError

S, VOCAB = 16, 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pairs and an array: a.bin, b.bin, c.bin with their indices, d.npy."""
    root = tmp_path / "tokens"
    for seed, name in enumerate("abc"):
        megatron(root / name, documents(40, seed))
    raw(root / "d", documents(40, 9))
    return root


def read_all(folder: Path, **fields: object) -> Samples:
    samples = Samples(DataConfig(seq_len=S, mixture=(SourceConfig(path=str(folder), **fields),)), VOCAB, 1)  # type: ignore[arg-type]
    for index in range(samples.windows[0]):
        samples.sample(index)
    return samples


def edit(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    at = at % len(data)
    data[at : at + len(new)] = new
    path.write_bytes(data)


def cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def grow(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(by))


def header(path: Path, text: bytes, tokens: int = 100) -> None:
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    path.write_bytes(head + bytes(2 * tokens))


def npy(shape: str = "(100,)", descr: str = "'<u2'", rest: str = "") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}{rest}}}\n".encode()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_folder(name: str, other: str) -> Callable[[Path], object]:
    return lambda f: shutil.copy(f / other, f / name)


# What is done to the folder, and what the error must name.
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "bin missing": (lambda f: (f / "b.bin").unlink(), "b.bin is missing"),
    "idx missing": (lambda f: (f / "b.idx").unlink(), "b.idx is missing"),
    "bin cut by a token": (lambda f: cut(f / "b.bin", 2), "b.idx: sequence_pointers"),
    "bin cut by a byte": (lambda f: cut(f / "b.bin", 1), "b.idx: sequence_pointers"),
    "bin cut by much": (lambda f: cut(f / "b.bin", 500), "b.idx: sequence_pointers"),
    "bin empty": (lambda f: os.truncate(f / "b.bin", 0), "b.idx: sequence_pointers"),
    "bin longer": (lambda f: grow(f / "b.bin", 2), "b.idx: sequence_pointers"),
    "bin of another file": (to_folder("b.bin", "a.bin"), "b.idx: sequence_pointers"),
    "bin is a pipe": (lambda f: pipe(f / "b.bin"), "b.bin: is not a regular file"),
    "bin is a folder": (lambda f: directory(f / "b.bin"), "b.bin"),
    "bin links nowhere": (lambda f: ((f / "b.bin").unlink(), (f / "b.bin").symlink_to("nowhere")), "b.bin"),
    "idx empty": (lambda f: os.truncate(f / "b.idx", 0), "b.idx: header"),
    "idx cut in the header": (lambda f: os.truncate(f / "b.idx", 33), "b.idx: header"),
    "idx cut by a byte": (lambda f: cut(f / "b.idx", 1), "b.idx: counts"),
    "idx cut by an entry": (lambda f: cut(f / "b.idx", 8), "b.idx: counts"),
    "idx longer": (lambda f: grow(f / "b.idx", 8), "b.idx: counts"),
    "idx with modes": (lambda f: grow(f / "b.idx", 40), "multimodal"),
    "idx of another file": (to_folder("b.idx", "a.idx"), "b.idx: sequence_pointers"),
    "idx is a pipe": (lambda f: pipe(f / "b.idx"), "b.idx: is not a regular file"),
    "idx magic": (lambda f: edit(f / "b.idx", 0, b"X"), "b.idx: magic"),
    "idx version": (lambda f: edit(f / "b.idx", 9, b"\x02"), "b.idx: version"),
    "idx float tokens": (lambda f: edit(f / "b.idx", 17, b"\x07"), "b.idx: token type.*float32"),
    "idx unknown type": (lambda f: edit(f / "b.idx", 17, b"\x63"), "b.idx: token type"),
    "idx wider type": (lambda f: edit(f / "b.idx", 17, b"\x04"), "b.idx: sequence_pointers"),
    "idx huge count": (lambda f: edit(f / "b.idx", 18, b"\xff" * 8), "b.idx: counts"),
    "idx negative size": (lambda f: edit(f / "b.idx", 34 + 12, struct.pack("<i", -5)), "b.idx: sequence_lengths"),
    "idx wrong size": (lambda f: edit(f / "b.idx", 34 + 12, struct.pack("<i", 9999)), "b.idx: sequence_pointers"),
    "idx wrong offset": (
        lambda f: edit(f / "b.idx", 34 + 4 * 40 + 80, struct.pack("<q", 3)),
        "b.idx: sequence_pointers",
    ),
    "idx wrong mark": (lambda f: edit(f / "b.idx", -80, struct.pack("<q", 2**40)), "b.idx: document_indices"),
    "token too large": (lambda f: edit(f / "b.bin", 60, struct.pack("<H", 256)), r"b: document \d+, offset \d+.*256"),
    "token of a flipped bit": (lambda f: edit(f / "c.bin", -1, b"\x80"), "c: document 39, offset"),
    "npy of wide tokens": (
        lambda f: np.full(2000, 3, "<u4").tofile(f / "d.npy"),
        "d.npy: every second uint16 .* is zero.*dtype",
    ),
    "npy of an odd size": (lambda f: cut(f / "d.npy", 1), "d.npy: .* not a whole number"),
    "npy token too large": (lambda f: edit(f / "d.npy", 20, b"\xff\xff"), "d.npy: document 0, offset 10.*65,535"),
    "npy of objects": (lambda f: header(f / "d.npy", npy(descr="'|O'")), "d.npy: header: type .O"),
    "npy of floats": (lambda f: header(f / "d.npy", npy(descr="'<f2'")), "d.npy: header: type <f2"),
    "npy of two dimensions": (lambda f: header(f / "d.npy", npy(shape="(10, 10)")), "d.npy: header: shape"),
    "npy shorter than it says": (lambda f: header(f / "d.npy", npy(), tokens=99), "d.npy: header: 100 tokens"),
    "npy longer than it says": (lambda f: header(f / "d.npy", npy(), tokens=101), "d.npy: header: 100 tokens"),
    "npy of negative length": (lambda f: header(f / "d.npy", npy(shape="(-100,)")), "d.npy: header: shape"),
    "npy with code": (lambda f: header(f / "d.npy", npy(shape="__import__('os').abort()")), "d.npy: header"),
    "npy header deep": (lambda f: header(f / "d.npy", b"[" * 9000), "d.npy: header"),
    "npy header huge": (lambda f: header(f / "d.npy", b"(" + b" " * 60_000 + b")"), "d.npy: header"),
    "npy unknown version": (lambda f: edit(f / "d.npy", 0, b"\x93NUMPY\x09\x00"), "d.npy: header: version"),
    "npy is a pipe": (lambda f: pipe(f / "d.npy"), "d.npy: is not a regular file"),
    "folder empty": (lambda f: [path.unlink() for path in f.iterdir()], "a folder without"),
    "folder missing": (lambda f: f.rename(f.with_name("elsewhere")), "no folder of this name"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(folder: Path, name: str) -> None:
    fault, expected = FAULTS[name]
    read_all(folder)
    fault(folder)
    with pytest.raises(DataError, match=expected):
        read_all(folder)


def test_a_file_that_shrinks_while_in_use_is_an_error_and_not_a_signal(folder: Path) -> None:
    samples = read_all(folder)
    os.truncate(folder / "c.bin", 10)
    with pytest.raises(DataError, match=r"c.bin: ends at byte"):
        for index in range(samples.windows[0]):
            samples.sample(index)


def test_a_file_replaced_while_in_use_is_noticed_when_opened_again(folder: Path) -> None:
    from moefold.data.sources import Source

    source = Source(SourceConfig(path=str(folder)), VOCAB, "train", max_open=1)
    source.window(0, 10)
    megatron(folder / "d2", documents(40, 5))
    for ending in (".bin", ".idx"):
        os.replace(folder / f"d2{ending}", folder / f"b{ending}")
    with pytest.raises(DataError, match="changed while in use"):
        source.window(0, source.num_tokens)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda f: megatron(f / "e", documents(3)),
    "a file less": lambda f: ((f / "c.bin").unlink(), (f / "c.idx").unlink()),
    "another name": lambda f: [(f / f"a{ending}").rename(f / f"z{ending}") for ending in (".bin", ".idx")],
    "other documents": lambda f: megatron(f / "b", documents(40, 77)),
    "the same tokens cut otherwise": lambda f: megatron(f / "b", [np.concatenate(documents(40, 1))]),
    "another token": lambda f: edit(f / "b.bin", 4, struct.pack("<H", 200)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_list_has_another_fingerprint(folder: Path, name: str) -> None:
    before = read_all(folder).fingerprint
    CHANGES[name](folder)
    assert read_all(folder).fingerprint != before


@pytest.mark.parametrize("weights", [[float("nan"), 1.0], [-1.0, 1.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_weights_that_mean_nothing_are_refused(folder: Path, weights: list[float]) -> None:
    sources = tuple(SourceConfig(path=str(folder), weight=weight) for weight in weights)
    with pytest.raises(MoefoldError, match=r"weight|sources"):
        Samples(DataConfig(seq_len=S, mixture=sources), VOCAB, 1)


def test_too_few_tokens_for_one_sample(tmp_path: Path) -> None:
    path = megatron(tmp_path / "x", [np.arange(S)])
    with pytest.raises(DataError, match="16 tokens; one sample needs"):
        Samples(DataConfig(seq_len=S, train=path), VOCAB, 1)
    Samples(DataConfig(seq_len=S - 1, train=path), VOCAB, 1).sample(10)


def test_names_that_are_no_paths(tmp_path: Path) -> None:
    for name in ("", "nul\0byte", str(tmp_path / "no.npy"), "x" * 5000):
        with pytest.raises(DataError):
            Samples(DataConfig(seq_len=S, train=name), VOCAB, 1)
