"""Steps of a small model with every format and place of optimizer states: values, bytes of states, checkpoints."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.checkpoint.saved_runs import save_step
from torch import Tensor

from moefold.blueprint.param_counts import count_parameters
from moefold.checkpoint.load import load_into
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.data.samples import open_samples
from moefold.dryrun.dry_run import dry_run
from moefold.errors import MismatchError
from moefold.optim import chunked_adamw
from moefold.optim.optimizer import ModelOptimizer
from moefold.optim.remainder import rounded_weight
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, init_main_weights
from moefold.pipeline.step import make_optimizer, run_step
from moefold.recipes.catalog import recipe
from moefold.train.batches import step_batches

CPU = torch.device("cpu")
FLAT = {"parallel.sharding": "flat", "precision.compute": "bfloat16"}
BF16 = {"precision.moments": "bfloat16"}
STOCHASTIC = BF16 | {"precision.moments_rounding": "stochastic"}
FLOAT8 = {"precision.moments": "float8", "precision.moments_rounding": "stochastic"}
HOST, ON_CPU = {"memory.optimizer": "host"}, {"memory.optimizer": "cpu"}
REMAINDER = FLAT | {"precision.master": "remainder"}
BASE = {"data.global_batch": 2, "data.micro_batch": 1, "data.seq_len": 16, "kernels.experts": "sequential"}


def run_with(**changes: object) -> RunConfig:
    return override(recipe("debug_tiny"), BASE | {key.replace("__", "."): value for key, value in changes.items()})


def fresh(changes: dict[str, str]) -> tuple[LocalModel, ModelOptimizer]:
    run = run_with(**changes)
    local_model = build_local_model(run, groups_of(run, 1, 0, timedelta(seconds=120)), CPU)
    optimizer = make_optimizer(local_model)
    init_main_weights(local_model, optimizer)
    return local_model, optimizer


def step(local_model: LocalModel, optimizer: ModelOptimizer, numbers: range) -> None:
    run = local_model.run
    samples = open_samples(run.data, run.model.vocab_size, run.seed)
    for number in numbers:
        run_step(local_model, optimizer, step_batches(samples, 2 * number, run, local_model.groups, CPU).batches)


def weights(local_model: LocalModel, optimizer: ModelOptimizer) -> dict[str, Tensor]:
    return {piece.name: optimizer.main_weight(piece.parameter).flatten().clone() for piece in local_model.pieces()}


def trained(changes: dict[str, str], steps: int = 4) -> dict[str, Tensor]:
    local_model, optimizer = fresh(changes)
    step(local_model, optimizer, range(steps))
    return weights(local_model, optimizer)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "format", [{}, STOCHASTIC, FLOAT8, REMAINDER], ids=["float32", "bfloat16", "float8", "remainder"]
)
def test_where_states_are_changes_no_bit(format: dict[str, str]) -> None:
    on_device = trained(format)
    assert same(trained(format | HOST), on_device) and same(trained(format | ON_CPU), on_device)


def test_main_weights_in_two_halves_are_those_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, to the bit, where float32 main weights are rounded to weights by the same rule at exact ties."""
    halves = trained(REMAINDER)

    def rounded(sharding: FlatSharding, trained_only: bool = False) -> None:
        for bucket in sharding.buckets:
            bucket.gathered = False
            if bucket.main.dtype != bucket.weights.dtype:
                bucket.mine(bucket.weights).copy_(rounded_weight(bucket.main.detach()))

    monkeypatch.setattr(FlatSharding, "weights_changed", rounded)
    assert same(trained(FLAT), halves)


@pytest.mark.parametrize(
    "format",
    [{}, BF16, STOCHASTIC, FLOAT8, STOCHASTIC | HOST, REMAINDER | STOCHASTIC],
    ids=["float32", "nearest", "stochastic", "float8", "host", "remainder"],
)
def test_a_run_resumes_to_the_bit(format: dict[str, str], tmp_path: Path) -> None:
    local_model, optimizer = fresh(format)
    step(local_model, optimizer, range(2))
    path = save_step(tmp_path, local_model, optimizer, 2)
    again, its_optimizer = fresh(format)
    load_into(path, again, its_optimizer)
    step(again, its_optimizer, range(2, 4))
    assert same(weights(again, its_optimizer), trained(format))


@pytest.mark.parametrize(
    ("written", "read", "key"),
    [
        ({}, STOCHASTIC, "precision.moments: float32"),
        (STOCHASTIC, {}, "precision.moments: bfloat16"),
        (FLOAT8, STOCHASTIC, "precision.moments: float8"),
        (STOCHASTIC, FLOAT8, "precision.moments: bfloat16"),
    ],
)
def test_moments_of_another_format_are_refused(
    written: dict[str, str], read: dict[str, str], key: str, tmp_path: Path
) -> None:
    local_model, optimizer = fresh(written)
    step(local_model, optimizer, range(1))
    path = save_step(tmp_path, local_model, optimizer, 1)
    other, its_optimizer = fresh(read)
    before = weights(other, its_optimizer)
    with pytest.raises(MismatchError, match=key):
        load_into(path, other, its_optimizer)
    assert same(weights(other, its_optimizer), before)


def test_main_weights_are_read_by_either_format(tmp_path: Path) -> None:
    """Checkpoints hold the joined float32 value: nothing is cast on the way from one to the other."""
    for written, read in ((REMAINDER, FLAT), (FLAT, REMAINDER), (REMAINDER, {"precision.compute": "bfloat16"})):
        local_model, optimizer = fresh(written)
        step(local_model, optimizer, range(2))
        path = save_step(tmp_path / str(len(list(tmp_path.iterdir()))), local_model, optimizer, 2)
        other, its_optimizer = fresh(read)
        load_into(path, other, its_optimizer)
        assert same(weights(other, its_optimizer), weights(local_model, optimizer))


def states(changes: dict[str, str]) -> tuple[int, int, int]:
    """Bytes of states on the device and on the host, and of the step's peak, from the dry run of a larger model."""
    found = dry_run(run_with(model__dim=128, model__moe__expert_hidden_dim=256, **changes), 1, 0)
    return found.category_peaks["optimizer state"], found.host_states, found.peak_total


@pytest.mark.slow
def test_the_dry_run_has_the_planned_bytes_of_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is small beside a model; here both are, so that the update is not the peak."""
    monkeypatch.setattr(chunked_adamw, "CHUNK", 1 << 15)
    run = run_with(model__dim=128, model__moe__expert_hidden_dim=256)
    count = count_parameters(run.model).total
    wide, _, peak = states({})
    assert wide == pytest.approx(8 * count, rel=0.01)
    for changes, each in ((STOCHASTIC, 4), (FLOAT8, 2 + 2 / 128), (HOST, 0), (ON_CPU, 0)):
        narrow, host, its_peak = states(changes)
        assert host == pytest.approx(0 if each else 8 * count)
        assert wide - narrow == pytest.approx((8 - each) * count, rel=0.01), changes
        assert peak - its_peak == pytest.approx((8 - each) * count, rel=0.01), changes
