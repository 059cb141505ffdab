"""Dry runs by themselves: what is left out of a long step changes nothing, and every mode of a run can be traced."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.dry_runs import balanced_run
from tests.marks import slow_except

from moefold.attention.mask_blocks import row_index
from moefold.cli.main import main
from moefold.config.loading import override
from moefold.config.moe import CapacityConfig
from moefold.config.run import RunConfig
from moefold.dryrun.dry_run import DryRun, dry_run
from moefold.dryrun.min_microbatches import enough_microbatches
from moefold.dryrun.storage_tracker import CATEGORIES
from moefold.errors import ConfigError
from moefold.recipes.catalog import recipe

STAGES = ("model.num_layers=4", "parallel.pp=2", "parallel.ep=2", "data.global_batch=24")
SCHEDULES = {
    "none": ("parallel.ep=2", "data.global_batch=24"),
    "1f1b": (*STAGES, "parallel.schedule=1f1b"),
    "gpipe": (*STAGES, "parallel.schedule=gpipe"),
    "interleaved": (*STAGES, "parallel.schedule=interleaved", "parallel.vpp=2"),
    "zb_v": (*STAGES, "parallel.schedule=zb_v", "parallel.vpp=2"),
    "dualpipe_v": (*STAGES, "parallel.schedule=dualpipe_v", "parallel.vpp=2"),
    "1f1b_overlapped": (*STAGES, "parallel.schedule=1f1b_overlapped"),
}


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, "1f1b"))
def test_a_few_microbatches_tell_of_all(schedule: str) -> None:
    run = balanced_run("debug_tiny", "data.seq_len=16", *SCHEDULES[schedule])
    short = dry_run(run, 4, 0)
    whole = dry_run(run, 4, 0, short.microbatches)
    assert whole.executed == short.microbatches
    assert (short.executed < short.microbatches) == (schedule != "gpipe")
    assert (short.peak, short.category_peaks, short.peak_total) == (whole.peak, whole.category_peaks, whole.peak_total)
    assert short.collectives == whole.collectives
    assert short.saved_per_microbatch == whole.saved_per_microbatch


def test_all_forwards_first_needs_all_microbatches() -> None:
    run = balanced_run("debug_tiny", *SCHEDULES["gpipe"])
    assert enough_microbatches(run, 0, 12) == 12


def test_categories_add_up() -> None:
    found = tiny("parallel.ep=2")
    assert tuple(found.peak) == tuple(found.category_peaks) == CATEGORIES
    assert sum(found.peak.values()) == found.peak_total
    assert all(found.peak[name] <= found.category_peaks[name] for name in CATEGORIES)


def test_states_at_rest_are_counted_in_full() -> None:
    """Of 4 ranks, 2 x 2 over experts: parameters once, optimizer states twice, gradients once."""
    found = tiny("parallel.ep=2")
    assert found.peak["gradients"] == found.peak["parameters"]
    steps = found.peak["optimizer state"] - 2 * found.peak["parameters"]
    assert 0 < steps < 200, "one counter of 4 bytes per parameter"


def test_weight_copies_are_told_apart() -> None:
    assert tiny("parallel.ep=2").category_peaks["weight copies"] == 0
    assert tiny("parallel.ep=2", "precision.compute=bfloat16").category_peaks["weight copies"] > 0


def test_recomputing_saves_what_microbatches_keep() -> None:
    plain, less = (tiny("parallel.ep=2", *more) for more in ((), ("memory.recompute=[attention, experts]",)))
    assert less.saved_per_microbatch[0] < 0.7 * plain.saved_per_microbatch[0]


def test_imbalance_is_more_rows_for_this_rank() -> None:
    even, worse = (dry_run(balanced_run("debug_tiny", "parallel.ep=2"), 4, 1, imbalance=by) for by in (1.0, 1.5))
    rows = {each.name: each for each in even.collectives}["all_to_all"]
    more = {each.name: each for each in worse.collectives}["all_to_all"]
    assert worse.saved_per_microbatch[0] > even.saved_per_microbatch[0]
    # What arrived goes home again, and its gradient arrives once more: half of the bytes are those of other ranks.
    assert rows.count == more.count and 1.2 < more.bytes / rows.bytes < 1.3


MODES = {
    "masked": ("data.packing=concat_masked", "parallel.ep=2"),
    "padded": ("data.packing=padded", "parallel.ep=2"),
    "bin-packed": ("data.packing=bin_packed", "parallel.ep=2", "parallel.dispatcher=all_gather"),
    "dynamic": ("data.packing=bin_packed", "parallel.dynamic_cp=true"),
    "sinkhorn": ("model.moe.router.kind=sinkhorn", "parallel.ep=2", "parallel.tp=2"),
    "expert choice": ("model.moe.router.kind=expert_choice", "parallel.ep=2", "parallel.cp=2"),
    "float64": ("kernels.experts=sequential", "precision.params=float64", "precision.compute=float64", "parallel.ep=4"),
}


@pytest.mark.parametrize("mode", slow_except(MODES, "padded", "sinkhorn"))
def test_every_mode_can_be_traced(mode: str) -> None:
    run = override(recipe("debug_tiny"), [f"--{change}" for change in MODES[mode]])
    assert dry_run(run, 4, 3).peak_total > 0


@pytest.mark.slow
@pytest.mark.parametrize("pad", [False, True])
def test_capacities_can_be_traced(pad: bool) -> None:
    run = balanced_run("debug_tiny", "parallel.ep=2", "kernels.experts=grouped")
    assert run.model.moe is not None
    moe = replace(run.model.moe, capacity=CapacityConfig(factor=0.5, pad=pad, drop="position"))
    half = dry_run(replace(run, model=replace(run.model, moe=moe)), 2, 0)
    assert half.saved_per_microbatch[0] < dry_run(run, 2, 0).saved_per_microbatch[0]


def test_real_tensors_after_a_dry_run_are_real() -> None:
    """Functions that keep tensors from call to call forget the fake ones."""
    tiny("parallel.cp=2")
    assert row_index((0, 4), 2).tolist() == [0, 1, 4, 5]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        ({"rank": 4}, (), "there is no rank 4 among 4; choose from 0 to 3"),
        ({"microbatches": 0}, (), "microbatches: must be positive, not 0"),
        ({"imbalance": 0.0}, (), "imbalance"),
        ({}, ("parallel.ep=3",), "experts cannot fold"),
        ({}, ("data.packing=padded", "model.moe.router.kind=sinkhorn"), "which a dry run cannot"),
    ],
)
def test_what_cannot_be_run_is_said(given: dict[str, int], changes: tuple[str, ...], says: str) -> None:
    run = override(recipe("debug_tiny"), [f"--{change}" for change in changes])
    with pytest.raises(ConfigError, match=says):
        dry_run(run, 4, **({"rank": 0} | given))  # type: ignore[arg-type]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dryrun", "debug_tiny", "--world", "8", "--rank", "5", "--parallel.pp", "2", "--parallel.ep", "4"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 5 of 8: ") and "all_to_all" in shown and "own peak" in shown
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peak_total"] == sum(data["peak"].values()) and data["rank"] == 5
    words[5] = "stages"
    assert main([*words, "--json"]) == 0
    shown, said = capsys.readouterr()
    assert [each["rank"] for each in json.loads(shown)["ranks"]] == [0, 4]
    assert said.splitlines() == [f"pipeline ranks: {done} of 2" for done in range(3)]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 64, 255])
def test_deepseek_v3_on_256_ranks(rank: int) -> None:
    """First, second and last stage: each in minutes on one core, with more memory than an H100 has."""
    layout = ("pp=4", "vpp=4", "ep=64", "schedule=interleaved")
    run = override(recipe("deepseek_v3"), [*(f"--parallel.{part}" for part in layout), "--data.global_batch=4096"])
    found = dry_run(run, 256, rank)
    assert found.microbatches == 64 and found.seconds < 120
    assert found.peak_total > 80 * 2**30
    assert found.peak["optimizer state"] == pytest.approx(2 * found.peak["parameters"], rel=1e-6)


@cache
def tiny(*changes: str) -> DryRun:
    run: RunConfig = balanced_run("debug_tiny", *changes)
    return dry_run(run, 4, 0)
