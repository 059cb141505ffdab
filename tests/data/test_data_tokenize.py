"""`moefold tokenize`: the same file for any number of workers, in order, and never half of one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.marks import slow_except

from moefold.cli.main import main
from moefold.data import input_rows
from moefold.data import tokenization as tokenize
from moefold.data.token_files import ArrayFile, MegatronFile
from moefold.data.token_writers import MegatronWriter
from moefold.errors import DataError

SRC = Path(__file__).parents[2] / "src"


def corpus(folder: Path, lines: int = 300) -> list[str]:
    """A JSONL file and some text files; the texts in the order of the input."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abc \näß€😀", k=rng.randrange(1, 400))) for _ in range(lines + 20)]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        for number, text in enumerate(texts[:lines]):
            file.write(json.dumps({"id": number, "text": text}, ensure_ascii=number % 2 == 0) + "\n" * (1 + number % 2))
    for number, text in enumerate(texts[lines:]):
        (folder / f"b{number:02}.txt").write_bytes(text.encode())
    (folder / "c_empty.jsonl").write_text('{"text": ""}\n')
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return texts


def outputs(prefix: Path) -> list[bytes]:
    return [prefix.with_suffix(ending).read_bytes() for ending in (".bin", ".idx")]


def test_bytes_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = corpus(tmp_path / "in")
    assert main(["tokenize", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--json", "--append-eod"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["documents"], facts["empty"], facts["others"]) == (len(texts), 1, 1)
    file = MegatronFile(str(tmp_path / "out"))
    assert [file.document(i).tobytes() for i in range(file.num_documents)] == [t.encode() + b"\0" for t in texts]


def test_the_number_of_workers_and_the_cuts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path / "in", lines=1000)
    results = []
    for number, (workers, size) in enumerate([(1, 4 << 20), (1, 1000), (1, 17), (2, 50_000), (3, 200_000)]):
        monkeypatch.setattr(input_rows, "TASK_BYTES", size)
        out = tmp_path / f"out{number}"
        assert main(["tokenize", str(tmp_path / "in"), "--out", str(out), "--workers", str(workers)]) == 0
        results.append(outputs(out))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_a_tokenizer_file(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    texts = corpus(tmp_path / "in")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    words = ["tokenize", str(tmp_path / "in"), "--tokenizer", str(tmp_path), "--append-eod", "--format", kind]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    end = model.token_to_id("<|endoftext|>")
    if kind == "bin":
        file: MegatronFile | ArrayFile = MegatronFile(str(tmp_path / "out"))
    else:
        file = ArrayFile(str(tmp_path / "out.npy"), model.get_vocab_size(), end_of_document=end)
    assert file.num_documents == len(texts)
    for number, text in enumerate(texts):
        ids = file.document(number).tolist()
        assert ids[-1] == end and model.decode(ids[:-1]) == text
    with pytest.raises(DataError, match="no token '<nothing>'"):
        tokenize.TokenizeOptions(str(tmp_path), "<nothing>").open()


BAD_LINES = {
    "not json": (b'{"text": \n', "is not JSON"),
    "no key": (b'{"id": 1}\n', "has no key 'text'"),
    "a list": (b"[1]\n", "is a list, not an object"),
    "a number": (b'{"text": 5}\n', "is a int, not text"),
    "half a character": (b'{"text": "\\ud800"}\n', "lone surrogate"),
    "deep": (b"[" * 100_000 + b"\n", "is not JSON"),
    "not utf-8": (
        b'{"text": "\xff"}\n',
        "is not UTF-8: byte 10 is 0xff; if it is Latin-1 or Windows-1252 text, convert",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, expected = BAD_LINES[name]
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    assert main(["tokenize", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert expected in said and "in.jsonl: line 2: " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_worker_s_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_rows, "TASK_BYTES", 100)
    (tmp_path / "in.jsonl").write_text('{"text": "fine"}\n' * 50 + '{"txt": 1}\n')
    tasks = list(input_rows.split_tasks([str(tmp_path / "in.jsonl")]))
    with (
        pytest.raises(DataError, match="line 51: has no key 'text'; it has 'txt'"),
        MegatronWriter(str(tmp_path / "out"), "uint8") as writer,
    ):
        list(tokenize.tokenize(tasks, tokenize.TokenizeOptions(), writer, workers=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_wrong_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "x.xz").write_bytes(b"\xfd7zXZ")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "nothing.txt").write_bytes(b"")
    out = ["--out", str(tmp_path / "out")]
    for words, expected in (
        ([str(tmp_path / "missing")], "no such file or folder"),
        ([str(tmp_path / "x.xz")], "unpack it"),
        ([str(tmp_path / "latin.txt")], "is not UTF-8: byte 3, line 1, is 0xe9"),
        ([str(tmp_path / "nothing.txt")], "no text in 1 files"),
        ([str(tmp_path / "x.txt"), "--tokenizer", str(tmp_path / "x.txt")], "is not a tokenizer"),
        ([str(tmp_path / "x.txt"), "--workers", "0"], "--workers 0"),
        ([str(tmp_path / "x.txt"), "--eod-token", "<s>"], "ends with byte 0"),
    ):
        assert main(["tokenize", *words, *out]) == 2
        assert expected in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "x.txt"), *out]) == 0
    assert main(["tokenize", str(tmp_path / "x.txt"), *out]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "x.txt"), *out, "--overwrite"]) == 0


@pytest.mark.parametrize("sent", slow_except([signal.SIGINT, signal.SIGKILL], signal.SIGINT))
def test_an_interrupted_run_leaves_nothing_that_looks_complete(tmp_path: Path, sent: signal.Signals) -> None:
    line = json.dumps({"text": "word " * 200}) + "\n"
    (tmp_path / "in.jsonl").write_text(line * 80_000)
    command = [sys.executable, "-m", "moefold.cli.main", "tokenize", "in.jsonl", "--out", "out/x", "--workers", "2"]
    env = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    # A shell that runs these tests in the background has told its children to ignore SIGINT.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL, preexec_fn=listen)
    try:
        wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "out").glob("x.bin.*.tmp")))
        running.send_signal(sent)
        assert running.wait(30) == (130 if sent == signal.SIGINT else -sent)
    finally:
        running.kill()
    # Workers go too, even if nobody told them.
    wait_until(lambda: not processes_in(tmp_path))
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    # Ctrl-C keeps what a note on disk says is complete, for the next run to go on; earlier, nothing.
    assert all(name.endswith(".tmp") for name in left), left
    assert sent == signal.SIGKILL or not left or "x.bin.mark.tmp" in left, left


def processes_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder):
                found.append(process.name)
        except OSError:
            continue
    return found


def wait_until(holds: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not fit uint8"), MegatronWriter(str(tmp_path / "x"), "uint8") as writer:
        writer.add(np.array([256]))
    with pytest.raises(DataError, match="sizes sum to 3"), MegatronWriter(str(tmp_path / "x"), "uint8") as writer:
        writer.add_many(np.array([1, 2]), [3])
    with pytest.raises(DataError, match="no code for tokens of type uint32"):
        MegatronWriter(str(tmp_path / "x"), "uint32")
    assert not list(tmp_path.iterdir())
