"""Inputs in every format give the same tokens; a killed run goes on; names of the Hub come through its own cache."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from tests.data.chat_templates import CHATML, chat_folder, plain

from moefold.cli.main import main
from moefold.data import input_rows
from moefold.data.token_files import MegatronFile
from moefold.data.token_writers import MegatronWriter
from moefold.errors import DataError

SRC = Path(__file__).parents[2] / "src"
TEXTS = [f"text {number} äß€😀\nline" + "x" * (number * 7 % 50) for number in range(300)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def write_parquet(path: Path, name: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({name: TEXTS, "id": range(len(TEXTS))})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=70)


def write_dataset(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(path))


def write_zst(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    # Two frames, as parallel compressors write them.
    half = len(LINES) // 2
    path.write_bytes(zstandard.compress(LINES[:half]) + zstandard.compress(LINES[half:]))


FORMATS = {
    "x.jsonl": lambda path: path.write_bytes(LINES),
    "marked.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "x.ndjson.zst": write_zst,
    "x.parquet": write_parquet,
    "dataset": write_dataset,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_documents_from_every_format(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FORMATS[name](tmp_path / name)
    monkeypatch.setattr(input_rows, "TASK_BYTES", 3000)
    assert main(["tokenize", str(tmp_path / name), "-o", str(tmp_path / "out"), "--workers", "1"]) == 0
    file = MegatronFile(str(tmp_path / "out"))
    assert [file.document(i).tobytes().decode() for i in range(file.num_documents)] == TEXTS


def test_a_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train.parquet")
    assert main(["tokenize", str(tmp_path / "data"), "--stream", "-o", str(tmp_path / "out")]) == 0
    assert MegatronFile(str(tmp_path / "out")).num_documents == len(TEXTS)


def test_packed_texts_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"packed text"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "line"}\n'))
    (folder / "c.txt").write_bytes(b"\xef\xbb\xbftext")
    assert main(["tokenize", str(folder), "-o", str(tmp_path / "out")]) == 0
    file = MegatronFile(str(tmp_path / "out"))
    assert [file.document(i).tobytes() for i in range(3)] == [b"packed text", b"line", b"text"]


def bad_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES)[:-200])


def bad_line(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES + b'{"text": \n'))


BAD = {
    "cut.jsonl.gz": (bad_gz, "cannot be unpacked after line"),
    "no.jsonl.gz": (lambda path: path.write_bytes(b"text"), "cannot be unpacked after line 0"),
    "no.jsonl.zst": (lambda path: path.write_bytes(b"text"), "cannot be unpacked after line 0"),
    "line.jsonl.gz": (bad_line, "line.jsonl.gz: line 301: is not JSON"),
    "no.parquet": (lambda path: path.write_bytes(b"text"), "is not a parquet file"),
    "other.parquet": (lambda path: write_parquet(path, "content"), "has no column 'text'; it has content, id"),
    "x.json": (lambda path: path.write_bytes(b"[]"), "one object per line"),
    "utf16.jsonl": (lambda path: path.write_bytes(LINES.decode().encode("utf-16")), "line 1: is not UTF-8"),
    "utf16.txt": (lambda path: path.write_bytes("text".encode("utf-16")), "iconv -f UTF-16"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_inputs_are_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write, expected = BAD[name]
    write(tmp_path / name)
    assert main(["tokenize", str(tmp_path / name), "-o", str(tmp_path / "out" / "x")]) == 2
    said = capsys.readouterr().err
    assert name in said and expected in said
    assert not list((tmp_path / "out").glob("*"))


def test_a_killed_run_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Killed after a note on disk: the next run writes the rest, and the files are those of an undisturbed run."""
    line = json.dumps({"text": "word " * 200}) + "\n"
    with gzip.open(tmp_path / "in.jsonl.gz", "wt", compresslevel=1) as file:
        file.writelines(line.replace("word", f"w{number % 97}") for number in range(60_000))
    words = ["tokenize", "in.jsonl.gz", "--workers", "1", "--json", "-o"]
    command = [sys.executable, "-m", "moefold.cli.main", *words]
    env = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    # A note after every task, and a pause, so that the kill comes in the middle.
    slow = "import time, moefold.cli.tokenize as t, moefold.cli.main as m, sys; t._MARK_SECONDS = 0\n"
    slow += (
        "mark = t._marked\nt._marked = lambda r, w: (time.sleep(0.2) or x for x in mark(r, w))\nm.main(sys.argv[1:])"
    )
    running = subprocess.Popen([sys.executable, "-c", slow, *words, "out"], cwd=tmp_path, env=env)
    try:
        mark = tmp_path / "out.bin.mark.tmp"
        end = time.monotonic() + 60
        while not mark.exists() or json.loads(mark.read_text())[1] < 2:
            assert time.monotonic() < end and running.poll() is None
            time.sleep(0.01)
        with pytest.raises(DataError, match="another process is writing it"):
            MegatronWriter(str(tmp_path / "out"), "uint8", resume_key="other")
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert not (tmp_path / "out.idx").exists()
    capfd.readouterr()
    for name in ("out", "undisturbed"):
        subprocess.run([*command, name], cwd=tmp_path, env=env, check=True)
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    assert first["resumed"] >= 2 and second["resumed"] == 0 and first["documents"] == second["documents"] == 60_000
    for ending in (".bin", ".idx", ".origin.json"):
        assert (tmp_path / f"out{ending}").read_bytes() == (tmp_path / f"undisturbed{ending}").read_bytes()
    assert not list(tmp_path.glob("*.tmp"))


def test_another_key_starts_anew(tmp_path: Path) -> None:
    def interrupted(key: str) -> int:
        with pytest.raises(KeyboardInterrupt), MegatronWriter(str(tmp_path / "x"), "uint8", resume_key=key) as writer:
            first = writer.num_marked
            writer.add(np.arange(3))
            writer.mark(first + 1)
            writer.add(np.arange(5))
            raise KeyboardInterrupt
        return first

    assert [interrupted("a"), interrupted("a"), interrupted("b"), interrupted("b")] == [0, 1, 0, 1]
    with MegatronWriter(str(tmp_path / "x"), "uint8", resume_key="b") as writer:
        assert (writer.num_marked, writer.num_documents, writer.num_tokens) == (2, 2, 6)
    file = MegatronFile(str(tmp_path / "x"))
    assert [file.document(i).tolist() for i in range(2)] == [[0, 1, 2]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.hashes.json", "x.idx"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A stand-in of the Hub: one revision of every repository, which is a folder."""
    root = tmp_path / "hub"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[0] == "api":
                kind, name = parts[1], "/".join(parts[2:4])
                folder = root / kind / name
                files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
                if "tree" in parts:
                    rows = [
                        {"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": "0" * 40} for f in files
                    ]
                    return self.answer(200 if files else 404, json.dumps(rows).encode())
                info = {"id": name, "sha": "a" * 40, "siblings": [{"rfilename": f} for f in files], "private": False}
                return self.answer(200 if files else 404, json.dumps(info).encode())
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[1:] if kind == "datasets" else parts
            path = root / kind / "/".join(parts[:2]) / "/".join(parts[4:])
            return self.answer(200 if path.is_file() else 404, path.read_bytes() if path.is_file() else b"")

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hash(body):x}"')
            self.send_header("X-Repo-Commit", "a" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    chat_folder(root / "models" / "org" / "model", plain(CHATML))
    (root / "models" / "org" / "model" / "config.json").write_text('{"model_type": "toy_of_the_hub"}')
    (root / "datasets" / "org" / "data").mkdir(parents=True)
    (root / "datasets" / "org" / "data" / "train.jsonl").write_bytes(LINES)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_names_of_the_hub(tmp_path: Path, hub: str) -> None:
    """Its environment is read when huggingface_hub is imported, so each run is a process."""
    env = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub}
    words = [sys.executable, "-m", "moefold.cli.main", "tokenize", "hf://org/data", "--tokenizer", "org/model", "-o"]

    def run(name: str, *more: str, **settings: str) -> subprocess.CompletedProcess[str]:
        given = [*words, name, *more]
        return subprocess.run(given, cwd=tmp_path, env=env | settings, capture_output=True, text=True, timeout=120)

    found = run("first")
    assert found.returncode == 0, found.stderr
    assert MegatronFile(str(tmp_path / "first")).num_documents == len(TEXTS)
    assert json.loads((tmp_path / "first.origin.json").read_text())["tokenizer"] == "org/model"
    # A model's folder comes from the same place; this one is of a family that nobody knows.
    convert = [sys.executable, "-m", "moefold.cli.main", "convert", "from-hf", "hf://org/model", "runs", "--name", "x"]
    model = subprocess.run(convert, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert model.returncode == 2 and "toy_of_the_hub" in model.stderr, model.stderr
    shutil.rmtree(tmp_path / "hub")
    # Without a network the cache answers.
    assert run("second", HF_HUB_OFFLINE="1").returncode == 0
    assert (tmp_path / "first.bin").read_bytes() == (tmp_path / "second.bin").read_bytes()
    missing = run("third", "--tokenizer", "org/other")
    assert missing.returncode == 2 and "org/other: there is no such path here, and the Hub" in missing.stderr
