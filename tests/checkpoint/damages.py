"""Ways to damage a checkpoint: at random bytes, and in its structure, with and without repaired hashes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moefold.checkpoint.chunk_index import PAGES, ROWS
from moefold.checkpoint.manifest import MANIFEST, canonical

Damage = Callable[[Path], None]
RANKS = "ranks_00000"
FILES = (
    MANIFEST,
    *(f"{RANKS}/rank_0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")),
    ROWS,
    PAGES,
)


def random_damage(dice: random.Random) -> tuple[str, Damage]:
    """One file, torn, flipped, cut, lengthened, or with a stretch of it overwritten."""
    name = dice.choice(FILES)
    kind = dice.choice(("flip", "flip", "flip", "cut", "append", "zero", "double"))
    where, bit, length = dice.random(), dice.randrange(8), dice.randint(1, 4096)

    def damage(directory: Path) -> None:
        path = directory / name
        content = bytearray(path.read_bytes())
        at = int(where * len(content))
        if kind == "flip":
            content[at] ^= 1 << bit
        elif kind == "cut":
            del content[at:]
        elif kind == "append":
            content += bytes(length)
        elif kind == "zero":
            stretch = content[at : at + length]
            content[at : at + length] = bytes(len(stretch)) if any(stretch) else b"\1" * len(stretch)
        else:
            content[at:at] = content[at : at + length]
        path.write_bytes(content)

    return f"{kind} in {name} at {where:.4f}", damage


def file_damages(older: Path, stranger: Path) -> Iterator[tuple[str, Damage]]:
    """Each file missing, empty, not a file, a link, or taken from another step or another run."""
    for name in FILES:
        yield f"{name} missing", lambda at, name=name: (at / name).unlink()
        yield f"{name} empty", lambda at, name=name: (at / name).write_bytes(b"")
        yield f"{name} a directory", lambda at, name=name: _replace(at / name, lambda path: path.mkdir())
        yield f"{name} a pipe", lambda at, name=name: _replace(at / name, os.mkfifo)
        yield f"{name} a link", lambda at, name=name: _link(at / name)
        # Tables of two runs of the same model and layout are equal, and may be; so are indexes of any steps.
        if name not in (ROWS, PAGES):
            yield f"{name} of an older step", lambda at, name=name: _copy(older / name, at / name)
        if name == MANIFEST or name.endswith("safetensors"):
            yield f"{name} of another run", lambda at, name=name: _copy(stranger / name, at / name)


def directory_damages(older: Path) -> Iterator[tuple[str, Damage]]:
    yield "nothing in it", _empty
    yield "a rank too many", lambda at: _copy(at / FILES[1], at / RANKS / "rank_00002.json")
    yield "data of two ranks exchanged", lambda at: _exchange(at / FILES[2], at / FILES[4])
    yield "tables of two ranks exchanged", lambda at: _exchange(at / FILES[1], at / FILES[3])
    yield "another step under this name", lambda at: _become(at, older)
    yield "the directory is a link", _link_directory
    yield "the ranks' directory is a link", lambda at: _link(at / RANKS)
    yield "a directory too many", lambda at: (at / "ranks_00512").mkdir()


def forged_manifests() -> Iterator[tuple[str, Damage]]:
    """Wrong contents under a right hash, and text that no JSON reader should be trusted with."""
    edits: dict[str, Callable[[dict[str, Any]], Any]] = {
        "version 3": lambda m: m.update(version=3),
        "version 1": lambda m: m.update(version=1),
        "no index": lambda m: m.pop("index"),
        "a huge index": lambda m: m["index"]["pages"].update(bytes=1 << 60),
        "another format": lambda m: m.update(format="else"),
        "another step": lambda m: m.update(step=m["step"] + 1),
        "a negative step": lambda m: m.update(step=-1),
        "a step in words": lambda m: m.update(step=str(m["step"])),
        "a larger world": lambda m: m.update(world=3),
        "no world": lambda m: m.update(world=0, files=[]),
        "files of one rank": lambda m: m["files"].pop(),
        "an unknown key": lambda m: m.update(hooks=["run"]),
        "a missing key": lambda m: m.pop("config"),
        "a list for a state": lambda m: m.update(state=[]),
        "a negative size": lambda m: m["files"][0]["data"].update(bytes=-1),
        "a huge table": lambda m: m["files"][0]["table"].update(bytes=1 << 60),
        "a path for a hash": lambda m: m["files"][1]["data"].update(sha256="../../etc/passwd"),
        "an unknown dtype": lambda m: _first(m).update(dtype="OBJECT"),
        "a negative dim": lambda m: _first(m).update(shape=[-1, 4]),
        "a huge dim": lambda m: _first(m).update(shape=[1 << 60]),
        "a hundred dims": lambda m: _first(m).update(shape=[1] * 100),
        "a tensor that is nowhere": lambda m: m["tensors"].update(ghost={"dtype": "F32", "shape": [4]}),
        "a tensor less": lambda m: m["tensors"].pop("parameter/embedding.weight"),
        "another dtype": lambda m: m["tensors"]["parameter/embedding.weight"].update(dtype="BF16"),
        "a name of a page": lambda m: m["tensors"].update({"x" * 10_000: _first(m)}),
        "a name with a newline": lambda m: m["tensors"].update({"a\nb": _first(m)}),
    }
    for name, edit in edits.items():
        yield f"manifest: {name}", lambda at, edit=edit: sign(at, edit)
    texts = {
        "a list": b"[]",
        "nothing": b"null",
        "a deep nest": b"[" * 200_000,
        "a long number": b'{"step":' + b"9" * 10_000 + b"}",
        "not a number": b'{"step":NaN}',
        "other characters": '{"step":1}'.encode("utf-16"),
    }
    for name, text in texts.items():
        yield f"manifest: {name}", lambda at, text=text: (at / MANIFEST).write_bytes(text) and None
    yield "manifest: a key twice", lambda at: _edit_text(at, b"{", b'{"step":1,')
    yield "manifest: blanks", lambda at: _edit_text(at, b":", b": ")
    yield "manifest: too large", lambda at: os.truncate(at / MANIFEST, 1 << 30)


def forged_tables() -> Iterator[tuple[str, Damage]]:
    """Wrong tables under right hashes."""
    edits: dict[str, Callable[[dict[str, Any]], Any]] = {
        "another rank": lambda t: t.update(rank=1),
        "another step": lambda t: t.update(step=0),
        "a chunk less": lambda t: t["chunks"].pop(0),
        "a chunk twice": lambda t: t["chunks"].append(t["chunks"][0]),
        "a box outside": lambda t: _widest(t).update(box=[[0, size + 1] for size in _widest(t)["shape"]]),
        "a box turned around": lambda t: _widest(t).update(box=[[size, 0] for size in _widest(t)["shape"]]),
        "a box of fewer dims": lambda t: _widest(t).update(box=_widest(t)["box"][:1]),
        "a larger box": lambda t: _widest(t).update(box=[[0, size] for size in _widest(t)["shape"]]),
        "another shape": lambda t: _widest(t).update(shape=[1, 1, 1]),
        "a stranger": lambda t: _widest(t).update(name="parameter/ghost"),
    }
    for name, edit in edits.items():
        yield f"table: {name}", lambda at, edit=edit: sign_table(at, edit)


def forged_indexes() -> Iterator[tuple[str, Damage]]:
    """Wrong rows under right hashes. The rows of a page: rank, offset, first indices, last plus one."""
    edits: dict[str, Callable[[Any], Any]] = {
        "another rank": lambda rows: rows[0].__setitem__(0, 1 - rows[0, 0]),
        "an unknown rank": lambda rows: rows[0].__setitem__(0, 2),
        "a negative rank": lambda rows: rows[0].__setitem__(0, -1),
        "a negative offset": lambda rows: rows[0].__setitem__(1, -8),
        "an offset off by a number": lambda rows: rows[0].__setitem__(1, rows[0, 1] + 4),
        "an odd offset": lambda rows: rows[0].__setitem__(1, rows[0, 1] + 1),
        "an offset beyond the end": lambda rows: rows[0].__setitem__(1, 1 << 40),
        "a box outside": lambda rows: rows[0].__setitem__(-1, rows[0, -1] + 1),
        "a box turned around": lambda rows: rows[0].__setitem__(2, rows[0, 4] + 1),
        "a smaller box": lambda rows: rows[0].__setitem__(-1, rows[0, -1] - 1),
        "ranks exchanged": lambda rows: rows[:, :2].__setitem__(slice(None), rows[::-1, :2].copy()),
    }
    for name, edit in edits.items():
        yield f"index: {name}", lambda at, edit=edit: sign_index(at, edit)
    yield "index: pages of no tensor", lambda at: sign_pages(at, lambda pages: pages[0].__setitem__(0, 1 << 40))
    yield (
        "index: pages out of order",
        lambda at: sign_pages(at, lambda pages: pages.__setitem__(slice(None), pages[::-1].copy())),
    )
    yield "index: a page less", lambda at: sign_pages(at, lambda pages: pages[1:])
    yield "index: half a page", lambda at: sign_pages(at, lambda pages: pages.reshape(-1)[:-1])
    yield "index: pages without end", lambda at: sign_pages(at, lambda pages: pages[0].__setitem__(2, 1 << 40))


def sign_index(directory: Path, edit: Callable[[Any], Any]) -> None:
    """Change the rows of the first tensor that has two chunks, and repair every hash above them."""
    names = sorted(json.loads((directory / MANIFEST).read_bytes())["tensors"])
    tensors = json.loads((directory / MANIFEST).read_bytes())["tensors"]
    content = bytearray((directory / ROWS).read_bytes())

    def repair(pages: Any) -> None:
        page = next(page for page in pages if page[2] == 2 and len(tensors[names[page[0]]]["shape"]) == 2)
        at, size = int(page[1]), int(page[2]) * 6 * 8
        rows = np.frombuffer(bytes(content[at : at + size]), "<i8").reshape(-1, 6).copy()
        edit(rows)
        content[at : at + size] = rows.tobytes()
        page[5:] = np.frombuffer(hashlib.sha256(rows.tobytes()).digest(), "<i8")

    sign_pages(directory, repair)
    (directory / ROWS).write_bytes(content)
    sign(directory, lambda manifest: manifest["index"].update(rows=_record(directory / ROWS)))


def sign_pages(directory: Path, edit: Callable[[Any], Any]) -> None:
    path = directory / PAGES
    pages = np.frombuffer(path.read_bytes(), "<i8").reshape(-1, 9).copy()
    edited = edit(pages)
    path.write_bytes((pages if edited is None else edited).tobytes())
    sign(directory, lambda manifest: manifest["index"].update(pages=_record(path)))


def version_1(directory: Path) -> None:
    """What moefold 0.1 would have written: flat, and without an index. Not a damage."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    for name in (ROWS, PAGES):
        (directory / name).unlink()
    for path in sorted((directory / RANKS).iterdir()):
        path.rename(directory / path.name)
    (directory / RANKS).rmdir()
    for rank, files in enumerate(manifest["files"]):
        path = directory / f"rank_{rank:05d}.json"
        path.write_bytes(canonical(json.loads(path.read_bytes()) | {"version": 1}))
        files["table"] = _record(path)
    del manifest["index"]
    (directory / MANIFEST).write_bytes(canonical(manifest))
    sign(directory, lambda content: content.update(version=1))


def _record(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def sign(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and give it the hash that it then needs."""
    path = directory / MANIFEST
    manifest = json.loads(path.read_bytes())
    del manifest["sha256"]
    edit(manifest)
    manifest["sha256"] = hashlib.sha256(canonical(manifest)).hexdigest()
    path.write_bytes(canonical(manifest))


def sign_table(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / RANKS / "rank_00000.json"
    table = json.loads(path.read_bytes())
    edit(table)
    path.write_bytes(canonical(table))
    sign(directory, lambda manifest: manifest["files"][0].update(table=_record(path)))


def _first(manifest: dict[str, Any]) -> Any:
    return next(iter(manifest["tensors"].values()))


def _widest(table: dict[str, Any]) -> Any:
    """A chunk that is a part of its tensor."""
    return next(c for c in table["chunks"] if c["box"] != [[0, size] for size in c["shape"]] and len(c["shape"]) > 1)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _link(path: Path) -> None:
    aside = path.with_name(f"aside_{path.name}")
    path.rename(aside)
    path.symlink_to(aside)


def _link_directory(directory: Path) -> None:
    aside = directory.parent / "aside"
    directory.rename(aside)
    directory.symlink_to(aside)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _exchange(a: Path, b: Path) -> None:
    middle = a.with_name("middle")
    a.rename(middle)
    b.rename(a)
    middle.rename(b)


def _become(directory: Path, other: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(other, directory)


def _edit_text(directory: Path, old: bytes, new: bytes) -> None:
    path = directory / MANIFEST
    path.write_bytes(path.read_bytes().replace(old, new, 1))
