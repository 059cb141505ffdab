"""Silent corruption on real ranks: a flipped bit is found and named, the run goes back, and replays are exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

from benchmarks.bit_flips import LAYOUTS, clean_steps, coverable, flip, flips_of
from moefold.cli.main import main
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import CorruptionConfig, SavingConfig
from moefold.errors import RankError
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.fault_tolerance.corruption import contradicted, read_findings
from moefold.train.fault_tolerance.replay import read_recorded
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

REPLICATED = ParallelConfig(dp_replicate=2, edp_replicate=2)


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "dp2 replicated"))
def test_every_flip_that_a_replica_or_an_own_hash_can_show_is_found_and_named(layout: str) -> None:
    outcomes = flips_of(layout, 12, seed=11)
    must = [each for each in outcomes if coverable(each)]
    # A wrong gradient may change the grad norm, and so the clipped update of all ranks: then all of them are wrong.
    assert must and [each for each in must if not (each.found and (each.named or each.draw.kind == "gradient"))] == []
    assert [each for each in outcomes if each.found and not each.changed] == []
    assert [each for each in outcomes if each.skipped and not each.named] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 dp2", "flat dp2", "hsdp 2 x 2"])
def test_a_clean_run_raises_no_alarm(layout: str) -> None:
    assert clean_steps(layout, 40) == 40


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_ten_thousand_clean_steps_raise_no_alarm() -> None:
    assert clean_steps("dp2 replicated", 10_000) == 10_000


def test_a_majority_contradicts_the_others_and_two_ranks_have_none() -> None:
    assert contradicted({0: 7, 3: 7, 5: 8}) == (5,)
    assert contradicted({0: 7, 1: 8}) == () == contradicted({0: 1, 1: 1, 2: 2, 3: 2})
    assert contradicted({0: 7, 1: 7}) == ()


class FlipOnce(Callback):
    """One bit of a weight, a moment or a gradient of one rank, after the backward pass of a step, the first time."""

    def __init__(self, rank: int, step: int, kind: str, often: int = 1) -> None:
        self.rank, self.when, self.kind, self.left = rank, step, kind, often
        self.step = 0

    def before_step(self, step: int, control: Control) -> None:
        self.step = step

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        if self.step != self.when or not self.left:
            return
        self.left -= 1
        if control.rank == self.rank:
            name = "final_norm.weight"
            weight = dict(control.model.named_parameters())[name]
            of_kind = {"weight": weight, "gradient": gradients[name]}
            flip(control.optimizer.state[weight]["exp_avg"] if self.kind == "moment" else of_kind[self.kind], 0, 20)


def trained(directory: Path, flipped: Callback | None, world: int = 2, **changes: Any) -> RunConfig:
    base = RECIPES["debug_tiny"]()
    corruption = CorruptionConfig(**({"every": 3} | changes))
    settings = replace(base.train, steps=8, directory=str(directory), saving=SavingConfig(every=4))
    data = replace(base.data, seq_len=16, global_batch=4, micro_batch=1, validation=None)
    parallel = REPLICATED if world == 2 else ParallelConfig()
    run = replace(base, data=data, parallel=parallel, train=replace(settings, corruption=corruption))

    def work(rank: int) -> int:
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 60.0)
        return int(train(context, state, [*([] if flipped is None else [flipped]), JsonLines()]))

    assert spawn_ranks(work, world, seconds=300) == [0] * world
    return run


def lines_of(run: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_directory(run) / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: RunConfig) -> list[tuple[Any, ...]]:
    lines = [line for line in lines_of(run) if line["kind"] == "step"]
    return [(line["step"], line["loss"], line["grad_norm"], line.get("state_hash")) for line in lines]


# Step 5 follows a comparison: the rank's own hash shows it. Step 6 is compared between two replicas after it.
FOUND_BY = [(5, "weight", "its own hash"), (6, "moment", ",training the step again")]


@pytest.mark.parametrize(("step", "kind", "by"), slow_except(FOUND_BY, FOUND_BY[1]))
def test_the_run_goes_back_names_the_rank_and_ends_as_if_nothing_had_been(
    step: int, kind: str, by: str, tmp_path: Path
) -> None:
    clean = trained(tmp_path / "clean", None)
    assert [number for number, *_, state_hash in steps_of(clean) if state_hash] == [3, 4, 6, 8]
    run = trained(tmp_path / kind, FlipOnce(1, step, kind))
    assert steps_of(run) == steps_of(clean)
    (back,) = [line for line in lines_of(run) if line["kind"] == "roll_back"]
    assert back["step"] == 4 and "final_norm.weight" in back["reason"]
    findings = read_findings(run_directory(run))
    assert ",".join(dict.fromkeys(each.decided_by for each in findings)) == by
    assert findings[-1].culprits == (1,) and findings[-1].step == step


@pytest.mark.slow
def test_stop_ends_the_run_and_a_replay_says_which_replica_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match=r"final_norm.weight differs between replicas \(ranks 0, 1\): no majority"):
        trained(tmp_path, FlipOnce(0, 6, "gradient"), on_mismatch="stop")
    directory = tmp_path / "debug_tiny"
    # Step 6 was not recorded; the next start takes it, from the checkpoint of step 4.
    trained(tmp_path, None, on_mismatch="stop")
    assert main(["replay", str(directory), "--step", "6"]) == 0
    said = capsys.readouterr().out
    assert "the same to the last bit" in said and "parameter/final_norm.weight differed" in said
    assert "wrong on rank 0" in said


def test_the_first_step_is_framed_and_without_a_checkpoint_the_run_starts_again(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"(?s)step 1.*final_norm.weight changed.*no checkpoint from before it"
    ) as found:
        trained(tmp_path, FlipOnce(1, 1, "weight"))
    # A launcher starts the ranks again.
    assert not found.value.mendable


@pytest.mark.slow
def test_a_fault_that_comes_back_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="gone back to step 4 3 times already"):
        trained(tmp_path, FlipOnce(1, 5, "weight", often=9))


def test_a_replay_finds_a_step_that_was_recorded_differently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, None, world=1)
    directory = run_directory(run)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in directory.rglob("*"))
    assert main(["replay", str(directory), "--step", "6", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["start"] == 4 and facts["same"] and [each["step"] for each in facts["steps"]] == [5, 6]
    assert sorted((path.name, path.stat().st_mtime_ns) for path in directory.rglob("*")) == before
    metrics = directory / "metrics.jsonl"
    loss = read_recorded(directory, 6).steps[6]["loss"]
    metrics.write_text(metrics.read_text().replace(f'"loss":{loss}', f'"loss":{loss + 2e-16 * loss * 2}'))
    assert main(["replay", str(directory), "--step", "6"]) == 1
    assert f"step 6: loss was {loss + 2e-16 * loss * 2}, now {loss}" in capsys.readouterr().out
    assert main(["replay", str(directory), "--step", "9"]) == 2
    assert "step 9 is not recorded; the file has steps 1 to 8" in capsys.readouterr().err
