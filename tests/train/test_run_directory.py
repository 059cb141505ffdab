"""What a run leaves in its directory: for its owner alone, and no setting changed without a word."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoint.hf_sources import Imagined
from tests.train.test_trainer import tiny

import moefold
from moefold.checkpoint.hf.hf_conversion import Export, export
from moefold.config.loading import load_run_file
from moefold.recipes.catalog import RECIPES
from moefold.train.train_context import changed_settings, record_settings


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.lstat().st_mode & 0o777 for path in (root, *root.rglob("*"))}


def test_a_run_is_for_its_owner_alone(umask: int, tmp_path: Path) -> None:
    run = tiny(tmp_path / "runs", 2)
    assert moefold.Trainer(run).fit() == "finished"
    assert moefold.Trainer(replace(run, train=replace(run.train, steps=3))).fit() == "finished"
    root = tmp_path / "runs" / run.name
    found = modes(root)
    assert {"config.yaml", "config_history.jsonl", "metrics.jsonl", "checkpoints"} <= found.keys()
    assert found == {name: 0o700 if (root / name).is_dir() else 0o600 for name in found}


def test_an_export_follows_the_umask(umask: int, tmp_path: Path) -> None:
    model = RECIPES["mixtral_8x7b_proxy"]().model
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    plan = Export(model, 64, torch.float32, max_shard=200_000, tokenizer=tmp_path / "tokenizer")
    export(Imagined(model), plan, tmp_path / "out")
    found = modes(tmp_path / "out")
    assert len(found) > 4
    assert found == {name: (0o777 if name == "." else 0o666) & ~umask for name in found}


def test_changed_settings_are_said_and_kept(tmp_path: Path) -> None:
    run = tiny(tmp_path, 4)
    shorter = moefold.load_run(run, {"train.steps": 2})
    path, history = tmp_path / "config.yaml", tmp_path / "config_history.jsonl"
    assert list(record_settings(run, tmp_path)) == []
    assert list(record_settings(run, tmp_path)) == [] and not history.exists()

    (said,) = record_settings(shorter, tmp_path)
    assert "since the last start" in said and said.endswith("train.steps 4 -> 2")
    assert load_run_file(path) == shorter
    # The next start from config.yaml is short too, and says so.
    (said,) = record_settings(load_run_file(path), tmp_path)
    assert "this run began with" in said and said.endswith("train.steps 4 -> 2")
    (said,) = record_settings(run, tmp_path)
    assert said.endswith("train.steps 2 -> 4")
    assert list(record_settings(run, tmp_path)) == []
    lines = [json.loads(line)["changed"] for line in history.read_text().splitlines()]
    assert lines == [{"train.steps": ["4", "2"]}, {"train.steps": ["2", "4"]}]


def test_a_section_that_comes_and_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    run = tiny(tmp_path, 4)
    changed = changed_settings(run, moefold.load_run(run, {"model.lora.rank": 4}))
    assert changed["model.lora.rank"] == ["null", "4"]
    (tmp_path / "config.yaml").write_text("no: such\n")
    (said,) = record_settings(run, tmp_path)
    assert "cannot be compared" in said and "unknown key" in said
    assert "no: such" in json.loads((tmp_path / "config_history.jsonl").read_text())["changed"]["config.yaml"][0]
    assert list(record_settings(run, tmp_path)) == []
