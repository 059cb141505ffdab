"""`moefold data inspect`: what it counts is in the files, and masks are seen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.chat_templates import TEMPLATES, chat_folder, conversation, plain
from tests.data.test_chat import PAIRS, write
from tests.data.token_files import documents, megatron

from moefold.cli.main import main
from moefold.data.token_files import MegatronFile
from moefold.data.token_report import histogram


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["data", "inspect", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    return chat_folder(tmp_path / "model", plain(TEMPLATES["llama"]))


def test_what_is_counted(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    rows = write(tmp_path / "chat.jsonl", [conversation(rng, tools=False) for _ in range(40)])
    prefix = str(tmp_path / "chat")
    assert main(["tokenize", rows, "--chat", "--tokenizer", model, "-o", prefix]) == 0
    found = inspected(capsys, prefix, "--tokenizer", model, "--samples", "2", "--most", "100000")
    file, mask = MegatronFile(prefix), np.fromfile(f"{prefix}.loss_mask.bin", np.uint8)
    assert (found["documents"], found["tokens"], found["counted"]) == (40, file.num_tokens, int(mask.sum()))
    assert found["kind"] == "chat" and found["origin"]["tokenizer"] == "model" and found["unlabelled"] == 0
    assert sum(bar["documents"] for bar in found["histogram"]) == 40
    assert sum(bar["tokens"] for bar in found["histogram"]) == file.num_tokens
    answers = [m["content"].strip() for m in json.loads(Path(rows).read_text().split("\n")[0])["messages"]]
    roles = [m["role"] for m in json.loads(Path(rows).read_text().split("\n")[0])["messages"]]
    green = [part["text"] for part in found["samples"][0]["parts"] if part["counts"]]
    assert green == [f"{text}<|eot_id|>" for text, role in zip(answers, roles) if role == "assistant"]
    # Rows give the same before anything is written.
    before = inspected(capsys, rows, "--tokenizer", model, "--samples", "2", "--most", "100000")
    for key in ("kind", "documents", "tokens", "counted", "histogram", "samples"):
        assert before[key] == found[key], key


def test_it_is_printed(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "pairs.jsonl", PAIRS)
    prefix = str(tmp_path / "pairs")
    assert main(["tokenize", rows, "--preference", "--tokenizer", model, "-o", prefix]) == 0
    assert main(["data", "inspect", prefix, "--tokenizer", model, "--document", "3", "--samples", "1"]) == 0
    said = capsys.readouterr().out
    assert "6 documents of preference" in said and "pair 1" in said and "chosen" in said and "rejected" in said
    (both,) = [line for line in said.splitlines() if "yes" in line]
    assert "no" in both.partition("yes")[2]


def test_masks_have_colours(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = write(
        tmp_path / "c.jsonl",
        [{"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]}],
    )
    assert main(["data", "inspect", rows, "--tokenizer", model]) == 0
    said = capsys.readouterr().out
    assert "\x1b[32msay<|eot_id|>" in said and "\x1b[32mask" not in said


def test_files_of_others(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    docs = documents(50)
    prefix = megatron(tmp_path / "x", docs)
    found = inspected(capsys, prefix, "--samples", "1")
    assert found["kind"] == "unknown" and found["origin"] is None and found["counted"] == found["tokens"]
    assert found["samples"][0]["parts"] == [{"text": " ".join(map(str, docs[0])) + " ", "counts": True}]
    (tmp_path / "t.txt").write_text("text " * 50)
    assert main(["tokenize", str(tmp_path / "t.txt"), "-o", str(tmp_path / "t")]) == 0
    assert inspected(capsys, str(tmp_path / "t"))["samples"][0]["parts"][0]["text"] == "text " * 50
    for words, expected in (
        ([str(tmp_path / "t"), "--tokenizer", model], "was made with the tokenizer bytes"),
        ([str(tmp_path / "t"), "--document", "9"], "no document 9; there are 1"),
        ([str(tmp_path / "missing")], "missing.idx: cannot be opened"),
        ([write(tmp_path / "c.jsonl", [{"messages": []}])], "needs --tokenizer FOLDER"),
    ):
        assert main(["data", "inspect", *words]) == 2
        assert expected in capsys.readouterr().err


def test_a_histogram_has_every_document_once() -> None:
    lengths = np.asarray([1, 2, 3, 4, 7, 8, 1000])
    bars = histogram(lengths)
    assert [(bar.first, bar.last) for bar in bars[:4]] == [(1, 1), (2, 3), (4, 7), (8, 15)]
    assert sum(bar.documents for bar in bars) == 7 and sum(bar.tokens for bar in bars) == lengths.sum()
    assert histogram(np.zeros(0, np.int64)) == [] and histogram(np.asarray([5]))[0].first == 4
