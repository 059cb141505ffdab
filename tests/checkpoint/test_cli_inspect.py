from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoint.saved_runs import save_step, trained_alone

from moefold.checkpoint.manifest import write_manifest
from moefold.cli.main import main


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    local_model, optimizer = trained_alone(seed=1)
    save_step(root / "checkpoints", local_model, optimizer, 7)
    with torch.no_grad():
        local_model.model.embedding.weight[3, 4] += 0.5
    save_step(root / "checkpoints", local_model, optimizer, 8)
    return root


def test_a_checkpoint_is_described_and_verified(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run_dir), "--verify", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "step 8" in out and "name debug_mla" in out and "exp_avg_sq" in out and "every tensor is complete" in out
    assert main(["inspect", str(run_dir / "checkpoints" / "step_00000007"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step"] == 7 and data["world"] == 1 and data["state"] == {"train": {"step": 7}}
    assert data["kinds"]["parameter"]["elements"] == data["kinds"]["exp_avg"]["elements"]


def test_two_checkpoints_are_compared(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = (str(run_dir / "checkpoints" / f"step_0000000{step}") for step in (7, 8))
    assert main(["inspect", older, "--compare", older]) == 0
    assert "are bitwise equal" in capsys.readouterr().out
    assert main(["inspect", older, "--compare", newer]) == 1
    out = capsys.readouterr().out
    assert "parameter/embedding.weight" in out and "5.000e-01" in out and "1 of " in out


def test_damage_is_shown_and_what_is_no_checkpoint_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "step_00000008"
    shutil.copytree(run_dir / "checkpoints" / "step_00000008", copy)
    path = copy / "ranks_00000/rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["inspect", str(copy), "--verify"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "neither a checkpoint" in capsys.readouterr().err


def test_a_checkpoint_with_an_old_configuration_names_the_new_keys(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors can be looked at; converting it needs the configuration and is refused without a traceback."""
    copy = tmp_path / "step_00000008"
    shutil.copytree(run_dir / "checkpoints" / "step_00000008", copy)
    data = json.loads((copy / "manifest.json").read_text())
    data["config"] = data["config"].replace("\n  lr: ", "\n  rate: ").replace("bias_update_rate:", "bias_rate:")
    fields = {name: value for name, value in data.items() if name not in ("format", "version", "sha256")}
    (copy / "manifest.json").unlink()
    write_manifest(copy / "manifest.json", fields)
    said = ("optim.rate: is called optim.lr now", "model.moe.router.bias_rate: is called")
    assert main(["inspect", str(copy), "--verify"]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in said) and "exp_avg_sq" in out
    assert main(["convert", "to-hf", str(copy), str(tmp_path / "hf")]) == 2
    err = capsys.readouterr().err
    assert all(words in err for words in (*said, str(copy))) and not (tmp_path / "hf").exists()
