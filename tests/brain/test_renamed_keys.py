"""Old keys, values and options are refused with today's name, in files, overrides and command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moefold.checks.sizes import leaves
from moefold.cli.main import main
from moefold.config.loading import load_run_file, override, run_from_mapping
from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.config.renamed_keys import RENAMED_KEYS, RENAMED_OPTIONS, RENAMED_VALUES
from moefold.config.run import RunConfig
from moefold.errors import ConfigError

KNOWN = {path for path, _ in leaves(RunConfig(model=ModelConfig(moe=MoEConfig(capacity=CapacityConfig()))))}
SECTIONS = {path.rpartition(".")[0] for path in KNOWN}
VALUES = [(path, old, new) for path, values in RENAMED_VALUES.items() for old, new in values.items()]
OPTIONS = [(verb, old, new) for verb, options in RENAMED_OPTIONS.items() for old, new in options.items()]


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def refused(read: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read()
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_an_old_key_names_the_new_one(old: str, new: str, tmp_path: Path) -> None:
    assert old not in KNOWN | SECTIONS and new in KNOWN | SECTIONS
    said = f"{old}: is called {new} now"
    path = tmp_path / "run.yaml"
    path.write_text(str(nested(old, 1)), "utf-8")
    assert refused(lambda: load_run_file(path)) == [said]
    assert refused(lambda: run_from_mapping(nested(old, 1))) == [said]
    for changes in ([f"--{old}", "1"], [f"--{old}=1"], {old: 1}):
        assert refused(lambda changes=changes: override(RunConfig(), changes)) == [said]


def test_a_key_inside_a_renamed_section_names_the_section() -> None:
    said = ["optim.rates: is called optim.lr_schedule now"]
    assert refused(lambda: override(RunConfig(), ["--optim.rates.kind", "cosine"])) == said
    assert refused(lambda: run_from_mapping(nested("optim.rates", {"kind": "cosine", "warmup": 3}))) == said


@pytest.mark.parametrize(("path", "old", "new"), VALUES)
def test_an_old_value_names_the_new_one(path: str, old: str, new: str) -> None:
    (said,) = refused(lambda: override(RunConfig(), {path: old}))
    assert said.startswith(f"{path}: cannot be '{old}'; it is called {new}; choose ")
    override(RunConfig(), {path: new.partition(",")[0]})


def test_an_old_key_with_an_old_value_names_both() -> None:
    (said,) = refused(lambda: override(RunConfig(), ["--data.documents", "joined"]))
    assert said == "data.documents: is called data.packing now, and its value joined is concat"


@pytest.mark.parametrize(("verb", "old", "new"), OPTIONS)
def test_an_old_option_names_the_new_one(verb: str, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([verb, "x", old, "1"], [verb, "x", f"{old}=1"]):
        assert main(words) == 2
        assert capsys.readouterr().err == f"moefold: {old} is called {new} now\n"


def test_the_command_line_answers_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "debug_tiny", "--gpus", "1", "--optim.rate", "1e-3"]) == 2
    assert capsys.readouterr().err == "moefold: optim.rate: is called optim.lr now\n"
    path = tmp_path / "old.yaml"
    path.write_text("model: {width: 64, moe: {expert_bias: true}}\nprecision: {experts: fused, kernels: native}\n")
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    for old in ("model.width", "model.moe.expert_bias", "precision.experts", "precision.kernels"):
        assert f"{old}: is called {RENAMED_KEYS[old]} now" in out
