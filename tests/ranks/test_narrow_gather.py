"""Weights gathered as codes (`precision.gather: narrow`), against whole weights narrowed in one process.

The model has matrices of partial blocks, stacks of experts, and buckets whose ranges end inside of rows and of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moefold.api.runs import load_run
from moefold.blueprint.narrow_matmuls import gather_casts
from moefold.blueprint.parameters import parameters
from moefold.checkpoint.load import load_latest
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import chunks_of, run_record, tensors_elsewhere
from moefold.checks.run_all import problems
from moefold.comm.process_groups import Groups
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.data.samples import Sample
from moefold.dryrun.dry_run import FullDocuments
from moefold.dryrun.trace_step import gained
from moefold.nn.init import init_values
from moefold.parallel import flat_codes
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.plan.collective_counts import messages
from moefold.precision.quantize import Quantized, quantize
from moefold.train.batches import step_batches

CPU = torch.device("cpu")
# Of 128 x 128 blocks: 1.5 blocks of columns, 2.5 of rows; kv_down has 72 rows.
SMALL = {
    "model.dim": 192,
    "model.num_layers": 2,
    "model.attention.q_latent": 136,
    "model.attention.kv_latent": 64,
    "model.moe.num_experts": 4,
    "model.moe.expert_hidden_dim": 160,
    "model.moe.router.num_groups": 1,
    "kernels.experts": "sequential",
    "data.seq_len": 16,
    "data.global_batch": 4,
    "data.micro_batch": 1,
    "optim.lr": 3e-3,
    "optim.clip_norm": 1e9,
    "parallel.bucket_mb": 1,
}


def run_of(changes: dict[str, Any]) -> RunConfig:
    return load_run("debug_mla", SMALL | {"precision.recipe": "fp8_blockwise", "precision.gather": "narrow"} | changes)


def on_groups(work: Callable[[Groups], Any], run: RunConfig, world: int) -> list[Any]:
    assert problems(run, world) == []
    return spawn_ranks(lambda rank: work(groups_of(run, world, rank, timedelta(seconds=120))), world, seconds=300)


class RandomDocuments(FullDocuments):
    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, 200, self.seq_len + 1)
        return replace(super().sample(index), tokens=tokens)


def train(local_model: LocalModel, steps: int, first: int = 0) -> list[Tensor]:
    optimizer = make_optimizer(local_model)
    return [step(local_model, optimizer, number) for number in range(first, first + steps)]


def step(local_model: LocalModel, optimizer: Any, number: int) -> Tensor:
    run, groups = local_model.run, local_model.groups
    batches = step_batches(RandomDocuments(run), 8 * number, run, groups, CPU).batches
    return run_step(local_model, optimizer, batches).sums.loss.detach()


def uneven_init(
    kind: str, seed: int, name: str, shape: tuple[int, ...], box: tuple[slice, ...], std: float, out: Tensor
) -> None:
    """Every 8 rows and columns have another magnitude, so that blocks have different scales."""
    init_values(kind, seed, name, shape, box, std, out)
    for dim, part in enumerate(box):
        groups = torch.arange(part.start, part.stop) // 8
        sizes = [1] * len(box)
        sizes[dim] = -1
        out.mul_(torch.exp2((groups * (dim + 3) % 11 - 6).to(out.dtype)).view(sizes))


def whole_weights(local_model: LocalModel) -> dict[str, Tensor]:
    """Main weights of every parameter, whole."""
    sharding = local_model.sharding
    assert isinstance(sharding, FlatSharding)
    return {name: sharding.whole_main(name) for name in local_model.param_shards}


def codes_in_use(local_model: LocalModel) -> dict[str, Quantized]:
    """What matmuls get, after the gathers of an evaluation."""
    assert local_model.narrow_weights is not None
    local_model.sharding.start_evaluation()
    for stage in local_model.stages:
        local_model.sharding.before_forward(stage.index)
    by_id = local_model.narrow_weights._gathered
    named = local_model.model.named_parameters()
    return {name: by_id[id(parameter)][1] for name, parameter in named if id(parameter) in by_id}


def different(local_model: LocalModel) -> list[str]:
    """Names of weights whose codes or scales are not those of the whole weight, narrowed in this process."""
    whole, found, casts = whole_weights(local_model), codes_in_use(local_model), gather_casts(local_model.run)
    assert found.keys() == casts.keys() & whole.keys() and found
    wrong = []
    for name, quantized in found.items():
        wanted = quantize(whole[name], casts[name])
        codes = torch.equal(quantized.codes_MK.view(torch.uint8), wanted.codes_MK.view(torch.uint8))
        if not (codes and torch.equal(quantized.scale_rc, wanted.scale_rc)):
            wrong.append(name)
    local_model.sharding.end_evaluation()
    return wrong


FLAT = {"parallel.sharding": "flat"}
RECIPES = ("fp8_blockwise", "fp8_tensor")
LAYOUTS = [
    pytest.param(2, FLAT, id="flat"),
    pytest.param(4, FLAT, id="flat 4", marks=pytest.mark.slow),
    pytest.param(4, FLAT | {"parallel.ep": 2, "parallel.dp_replicate": 2}, id="flat ep", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_codes_are_those_of_whole_weights(world: int, layout: dict[str, Any], recipe: str) -> None:
    """At the start and after steps, in which every weight changes; in the evaluation that follows too."""
    run = run_of(layout | {"precision.recipe": recipe})

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU, uneven_init)
        assert different(local_model) == []
        before = {name: each.codes_MK.view(torch.uint8).clone() for name, each in codes_in_use(local_model).items()}
        train(local_model, 2)
        assert different(local_model) == []
        after = codes_in_use(local_model)
        assert all(not torch.equal(before[name], after[name].codes_MK.view(torch.uint8)) for name in before)

    on_groups(work, run, world)


FORMATS = {
    "float32": ({}, {"precision.gather": "float32"}),
    "bfloat16, float32 masters": ({"precision.compute": "bfloat16"}, {"precision.gather": "float32"}),
    "remainder": (
        {"precision.compute": "bfloat16", "precision.master": "remainder"},
        {"precision.gather": "bfloat16"},
    ),
    "float64": ({"precision.params": "float64", "precision.compute": "float64"}, {"precision.gather": "float64"}),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "formats", [next(iter(FORMATS)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*FORMATS][1:])]
)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS[:1])
def test_steps_are_those_of_weights_that_are_gathered_wide(
    world: int, layout: dict[str, Any], formats: str, recipe: str
) -> None:
    """Losses and main weights after three steps and an evaluation, to the bit: two ranks sum in one order."""
    common, wide = FORMATS[formats]
    runs = [run_of(layout | common | {"precision.recipe": recipe} | more) for more in ({}, wide)]

    def work(groups: Groups) -> None:
        results = []
        for run in runs:
            local_model = build_local_model(run, groups, CPU)
            losses = train(local_model, 3)
            batches = step_batches(RandomDocuments(run), 100, run, groups, CPU).batches
            losses.append(evaluate(local_model, batches).detach())
            results.append((losses, whole_weights(local_model)))
        (losses, weights), (wide_losses, wide_weights) = results
        assert all(map(torch.equal, losses, wide_losses)), (losses, wide_losses)
        assert all(torch.equal(weights[name], wide_weights[name]) for name in wide_weights)

    on_groups(work, runs[0], world)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_bytes_are_those_of_the_cast(world: int, layout: dict[str, Any]) -> None:
    """Data parallelism's messages are the planner's, byte for byte. Against float32, of a weight that is gathered
    narrow a rank sends a quarter of the bytes of its range, and 4 bytes per block of the whole weight."""
    runs = [run_of(layout | {"precision.gather": gather}) for gather in ("narrow", "float32")]

    def work(groups: Groups) -> list[int]:
        sent = []
        for run in runs:
            local_model = build_local_model(run, groups, CPU)
            optimizer, ledger = make_optimizer(local_model), groups["world"].ledger
            before = dict(ledger.traffic)
            step(local_model, optimizer, 0)
            found = {key: tuple(traffic) for key, traffic in gained(ledger.traffic, before).items() if of_data(key)}
            said = messages(run, world, groups.rank)
            assert found == {(m.name, m.group): (m.count, m.bytes) for m in said if of_data((m.name, m.group))}
            sent.append(sum(size for _, size in found.values()))
        return sent

    shapes = {spec.name: spec.shape for spec in parameters(runs[0].model)}
    casts = gather_casts(runs[0])
    values = sum(prod(shapes[name]) for name in casts)
    blocks = sum(prod(-(-size // 128) for size in shapes[name][-2:]) * prod(shapes[name][:-2]) for name in casts)
    for narrow, wide in on_groups(work, runs[0], world):
        if "parallel.ep" not in layout:
            # Ends of buckets, less than 8 values per rank, are broadcast; they lie elsewhere in other buckets.
            assert abs(wide - narrow - (3 * values / world - 4 * blocks)) < 10 * 8 * world * 4
            assert 4 * blocks < 0.002 * values


def of_data(key: tuple[str, str]) -> bool:
    return key[1].endswith(("_shard", "_replicate"))


def test_weights_that_were_loaded_have_new_codes(tmp_path: Path) -> None:
    """Saved by a run that gathers wide on three ranks, loaded by one that has gathered codes of other weights."""
    saved, run = run_of(FLAT | {"precision.gather": "float32", "seed": 3, "data.global_batch": 3}), run_of(FLAT)

    def save(groups: Groups) -> None:
        local_model = build_local_model(saved, groups, CPU)
        optimizer = make_optimizer(local_model)
        saver = Saver(tmp_path, groups["world"], 0, about=run_record(local_model))
        elsewhere = tensors_elsewhere(local_model, optimizer)
        saver.begin(5, chunks_of(local_model, optimizer), {"train": {"step": 5}}, elsewhere)
        assert saver.finish() == 5

    def load(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        before = {name: each.codes_MK.view(torch.uint8).clone() for name, each in codes_in_use(local_model).items()}
        assert load_latest(tmp_path, local_model, make_optimizer(local_model)) is not None
        assert different(local_model) == []
        after = codes_in_use(local_model)
        assert all(not torch.equal(before[name], after[name].codes_MK.view(torch.uint8)) for name in before)

    on_groups(save, saved, 3)
    on_groups(load, run, 2)


# ---- mutants ----


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _no_maximum(amax: Tensor, group: Any) -> list[Any]:
    return []


def _next_block(amax: Tensor, cast: Any) -> tuple[Tensor, Tensor]:
    return _SCALES_OF(amax.roll(1), cast)


def _stay_gathered(self: FlatSharding, trained_only: bool = False) -> None:
    """The flag of buckets that are codes is forgotten."""
    kept = [bucket for bucket in self.buckets if bucket.narrow is not None and bucket.gathered]
    _WEIGHTS_CHANGED(self, trained_only)
    for bucket in kept:
        bucket.gathered = True


_SCALES_OF, _WEIGHTS_CHANGED = flat_codes.scales_of, FlatSharding.weights_changed
MUTANTS = {
    "magnitudes are not maximised over ranks": (flat_codes, "start_all_reduce_max", _no_maximum),
    "scales of other blocks": (flat_codes, "scales_of", _next_block),
    "codes of the weights before the update, or before a load": (FlatSharding, "weights_changed", _stay_gathered),
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants_are_caught(mutant: str) -> None:
    run = run_of(FLAT)

    def work(groups: Groups) -> int:
        with replaced(*MUTANTS[mutant]):
            local_model = build_local_model(run, groups, CPU, uneven_init)
            train(local_model, 1)
            return len(different(local_model))

    assert min(on_groups(work, run, 2)) > 0
