"""Token files say what they were made with, and a run refuses what does not belong together."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.chat_templates import CHATML, chat_folder, plain
from tests.data.token_files import documents, megatron
from tests.train.test_trainer import tiny

import moefold
from moefold.cli.main import main
from moefold.config.data import DataConfig, SourceConfig
from moefold.data.token_origin import origin_problems, read_origin
from moefold.errors import ConfigError, DataError


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """`bytes`, `first` and `second` of three tokenizers, `chat` and `pairs` of the first, `other` without an origin."""
    first = chat_folder(tmp_path / "first_model", plain(CHATML))
    second = Path(chat_folder(tmp_path / "second_model", plain(CHATML)))
    text = (second / "tokenizer.json").read_text()
    (second / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|in_start|>"))
    (tmp_path / "x.txt").write_text("some text " * 300)
    user, answer, other = ({"role": role, "content": text} for role, text in
                           (("user", "hi"), ("assistant", "hello"), ("assistant", "no")))  # fmt: skip
    (tmp_path / "x.jsonl").write_text((json.dumps({"messages": [user, answer]}) + "\n") * 20)
    (tmp_path / "y.jsonl").write_text(json.dumps({"chosen": [user, answer], "rejected": [user, other]}) + "\n")
    for words in (
        ["x.txt", "-o", "bytes"],
        ["x.txt", "-o", "first", "--tokenizer", first, "--append-eod"],
        ["x.txt", "-o", "second", "--tokenizer", str(second)],
        ["x.jsonl", "-o", "chat", "--tokenizer", first, "--chat"],
        ["y.jsonl", "-o", "pairs", "--tokenizer", first, "--preference"],
    ):
        assert main(["tokenize", str(tmp_path / words[0]), "-o", str(tmp_path / words[2]), *words[3:]]) == 0
    capsys.readouterr()
    megatron(tmp_path / "other", documents(20))
    return tmp_path


def said(data: DataConfig, vocab_size: int = 1000, tokenizer: Path | None = None) -> list[str]:
    return [str(problem) for problem in origin_problems(data, vocab_size, tokenizer)]


def mixture(made: Path, *names: str, validation: str | None = None) -> DataConfig:
    sources = tuple(SourceConfig(str(made / name)) for name in names)
    return DataConfig(mixture=sources, validation=None if validation is None else str(made / validation))


def test_what_an_origin_says(made: Path) -> None:
    text, chat, plain_bytes = (read_origin(str(made / name)) for name in ("first", "chat.bin", "bytes"))
    assert text and chat and plain_bytes and read_origin(str(made / "other")) is None
    assert (text.kind, chat.kind, plain_bytes.tokenizer_sha256) == ("text", "chat", None)
    assert text.tokenizer == chat.tokenizer == "first_model" and text.tokenizer_sha256 == chat.tokenizer_sha256
    assert text.end_token == 0 and plain_bytes.vocab_size == 256 < text.vocab_size
    assert str(made) not in (made / "first.origin.json").read_text()


def test_one_tokenizer_for_all_sources(made: Path) -> None:
    assert not said(mixture(made, "first", "chat", "other", validation="first"))
    (problem,) = said(mixture(made, "first", "second"))
    assert problem.startswith("data.mixture.1.path: ") and "second_model" in problem and "first_model" in problem
    (problem,) = said(mixture(made, "chat", validation="bytes"))
    assert problem.startswith("data.validation: ") and "tokenize both with one tokenizer" in problem


def test_the_vocabulary_must_hold_the_tokenizer_s(made: Path) -> None:
    size = read_origin(str(made / "first"))
    assert size is not None
    (problem,) = said(mixture(made, "first"), size.vocab_size - 1)
    assert f"set model.vocab_size to {size.vocab_size} or more" in problem
    assert not said(mixture(made, "first"), size.vocab_size)


def test_the_model_s_own_tokenizer(made: Path) -> None:
    assert not said(mixture(made, "first", "chat"), tokenizer=made / "first_model")
    (problem,) = said(mixture(made, "second"), tokenizer=made / "first_model")
    assert f"use --tokenizer {made / 'first_model'}" in problem
    assert not said(mixture(made, "second"), tokenizer=made / "no_model")


def test_pairs_are_not_trained_on(made: Path) -> None:
    (problem,) = said(mixture(made, "pairs"))
    assert "holds preference data, and this run reads text or chat; preference pairs are for DPO" in problem
    assert not origin_problems(mixture(made, "pairs"), 1000, kinds=("preference",))


def test_training_refuses_all_at_once(made: Path) -> None:
    run = tiny(made / "runs", 2)
    data = replace(run.data, mixture=mixture(made, "first", "bytes").mixture, seq_len=16, validation=None)
    (made / "runs" / run.name / "tokenizer").mkdir(parents=True)
    (made / "runs" / run.name / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        moefold.Trainer(replace(run, data=data)).fit()
    words = str(caught.value)
    assert "the model has" in words and "not with the model's" in words and "tokenize both" in words
    assert not (made / "runs" / run.name / "config.yaml").exists()


def test_check_says_it_before_the_run(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "debug_tiny", "--data.validation", "null", "--data.train"]
    assert main([*words, str(made / "first")]) == 1
    assert "set model.vocab_size to" in capsys.readouterr().out
    assert main([*words, str(made / "bytes")]) == 0
    # Files that are elsewhere cannot be looked at.
    assert main([*words, str(made / "elsewhere")]) == 0


def test_both_doors_say_the_same(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.validation", "null", "--train.directory", str(made / "runs"), "--data.train"]
    (made / "runs" / "debug_tiny" / "tokenizer").mkdir(parents=True)
    (made / "runs" / "debug_tiny" / "tokenizer" / "tokenizer.json").write_text("{}")
    for name, dpo in itertools.product(
        ("first", "bytes", "pairs", "other", "elsewhere"), ((), ("--train.dpo.beta", "0.1"))
    ):
        changes = [*words, str(made / name), *dpo]
        main(["check", "debug_tiny", *changes, "--json"])
        printed = json.loads(capsys.readouterr().out)["problems"]
        assert [asdict(problem) for problem in moefold.check(moefold.load_run("debug_tiny", changes))] == printed
        assert any("not with the model's" in problem["message"] for problem in printed) == (
            name not in ("other", "elsewhere")
        )
        assert any("holds preference data" in problem["message"] for problem in printed) == (
            name == "pairs" and not dpo
        )


def test_a_missing_mask_is_refused(made: Path) -> None:
    (made / "chat.loss_mask.bin").unlink()
    with pytest.raises(DataError, match=r"chat\.loss_mask\.bin: is missing; copy it"):
        read_origin(str(made / "chat"))


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": 1}', "[" * 100_000, '{"kind": "text", "tokenizer": "x"}'])
def test_damaged_origins_are_refused(made: Path, text: str) -> None:
    (made / "first.origin.json").write_text(text)
    with pytest.raises(DataError, match=r"first\.origin\.json: "):
        read_origin(str(made / "first"))


def test_overwriting_removes_the_old_origin(made: Path) -> None:
    megatron(made / "first", [np.arange(9)])
    assert read_origin(str(made / "first")) is None
