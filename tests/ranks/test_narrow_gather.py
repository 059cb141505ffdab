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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moefold.api.runs import load_run
from moefold.blueprint.narrow_matmuls import gather_casts
from moefold.blueprint.parameters import parameters
from moefold.blueprint.stage_modules import part_names
from moefold.checkpoint.load import load_latest
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import chunks_of, run_record, tensors_elsewhere
from moefold.checks.run_all import problems
from moefold.comm.process_groups import Groups
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.data.samples import Sample
from moefold.dryrun.dry_run import FullDocuments, dry_run
from moefold.dryrun.trace_step import gained
from moefold.nn.init import init_values
from moefold.parallel import flat_codes, fsdp_codes
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.fsdp import FsdpSharding, unshard_for_step
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.parallel.param_shards import local_part
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.plan.collective_counts import messages
from moefold.precision.quantize import quantize
from moefold.topology.folded_layout import GROUPS
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
    if isinstance(sharding, FlatSharding):
        return {name: sharding.whole_main(name) for name in local_model.param_shards}
    groups = local_model.groups
    return {name: _whole(parameter, groups) for name, parameter in local_model.model.named_parameters()}


def _whole(parameter: Tensor, groups: Groups) -> Tensor:
    """Summed over the run's own groups: torch finds those of `full_tensor` by name, and had lost these in a process
    that was forked from one with another world."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().clone()
    mine, mesh = local_part(parameter.detach()), parameter.device_mesh
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    place = tuple(slice(first, first + size) for first, size in zip(offset, mine.shape, strict=True))
    here = mesh.get_coordinate()
    assert here is not None
    if all(here[dim] == 0 for dim, kind in enumerate(parameter.placements) if kind.is_replicate()):
        whole[place] = mine
    for dim in range(mesh.ndim):
        ranks = tuple(mesh.mesh[(*here[:dim], slice(None), *here[dim + 1 :])].tolist())
        if len(ranks) > 1:
            group = next(groups[name] for name in GROUPS if groups[name].ranks == ranks)
            dist.all_reduce(whole, group=group.connected)
    return whole


def codes_in_use(local_model: LocalModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales that matmuls get, after the gathers of an evaluation."""
    assert local_model.narrow_weights is not None
    sharding = local_model.sharding
    sharding.start_evaluation()
    for stage in local_model.stages:
        if (enter := sharding.part_hooks(stage.index).enter) is not None:
            enter(len(part_names(stage)) - 1)
    if isinstance(sharding, FsdpSharding):
        assert sharding.coded is not None
        unshard_for_step(local_model.model, sharding.dtypes)
        sharding.coded.offer(sharding.coded.inside(local_model.model))
    by_id = local_model.narrow_weights._gathered
    found = {}
    for name, parameter in local_model.model.named_parameters():
        if id(parameter) in by_id:
            quantized = by_id[id(parameter)][1]
            found[name] = quantized.codes_MK.view(torch.uint8).clone(), quantized.scale_rc.clone()
    sharding.end_evaluation()
    return found


def different(local_model: LocalModel) -> list[str]:
    """Names of weights whose codes or scales are not those of the whole weight, narrowed in this process."""
    whole, found, casts = whole_weights(local_model), codes_in_use(local_model), gather_casts(local_model.run)
    assert found.keys() == casts.keys() & whole.keys() and found
    wanted = {name: quantize(whole[name], casts[name]) for name in found}
    return [
        name
        for name, (codes, scale) in found.items()
        if not torch.equal(codes, wanted[name].codes_MK.view(torch.uint8))
        or not torch.equal(scale, wanted[name].scale_rc)
    ]


@pytest.mark.slow
def test_a_dry_run_before_leaves_no_mesh_to_ranks() -> None:
    """Ranks are forked, and torch remembers meshes that are equal to theirs, with the place of the dry run's rank."""
    run = run_of({})
    dry_run(replace(run, precision=replace(run.precision, gather=None)), 4, 0)

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU, uneven_init)
        for name, parameter in local_model.model.named_parameters():
            mesh = parameter.device_mesh
            assert mesh.mesh.flatten()[mesh.get_local_rank()] == groups.rank, name
        assert different(local_model) == []

    on_groups(work, run, 4)


FLAT = {"parallel.sharding": "flat"}
RECIPES = ("fp8_blockwise", "fp8_tensor")
FLAT_LAYOUTS = [
    pytest.param(2, FLAT, id="flat"),
    pytest.param(4, FLAT, id="flat 4", marks=pytest.mark.slow),
    pytest.param(4, FLAT | {"parallel.ep": 2, "parallel.dp_replicate": 2}, id="flat ep", marks=pytest.mark.slow),
]
FSDP_LAYOUTS = [
    pytest.param(2, {}, id="fsdp"),
    # The last rank has less of what does not divide by 3: shards are padded.
    pytest.param(3, {"data.global_batch": 3}, id="fsdp 3", marks=pytest.mark.slow),
    pytest.param(4, {}, id="fsdp 4", marks=pytest.mark.slow),
    pytest.param(4, {"parallel.ep": 2, "parallel.dp_replicate": 2}, id="fsdp ep", marks=pytest.mark.slow),
    pytest.param(2, {"parallel.schedule": "1f1b_overlapped"}, id="fsdp per step", marks=pytest.mark.slow),
]
FOUR_STEPS = FLAT | {"parallel.param_sync": "hierarchical", "parallel.ranks_per_host": 2}
LAYOUTS = [*FLAT_LAYOUTS, pytest.param(4, FOUR_STEPS, id="four steps", marks=pytest.mark.slow), *FSDP_LAYOUTS]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_codes_are_those_of_whole_weights(world: int, layout: dict[str, Any], recipe: str) -> None:
    """At the start and after steps, in which every weight changes; in the evaluation that follows too."""
    run = run_of(layout | {"precision.recipe": recipe})

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU, uneven_init)
        assert different(local_model) == []
        before = codes_in_use(local_model)
        train(local_model, 2)
        assert different(local_model) == []
        after = codes_in_use(local_model)
        assert all(not torch.equal(before[name][0], after[name][0]) for name in before)

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
@pytest.mark.parametrize(("world", "layout"), [FLAT_LAYOUTS[0], FSDP_LAYOUTS[0], FSDP_LAYOUTS[-1]])
def test_steps_are_those_of_weights_that_are_gathered_wide(
    world: int, layout: dict[str, Any], formats: str, recipe: str
) -> None:
    """Losses and main weights after three steps and an evaluation, to the bit: two ranks sum in one order."""
    common, wide = FORMATS[formats]
    if formats == "remainder" and layout != FLAT:
        pytest.skip("FSDP has no remainders")
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


@pytest.mark.parametrize(("world", "layout"), FLAT_LAYOUTS)
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


@contextmanager
def gathers_of_fsdp() -> Iterator[list[int]]:
    """Bytes that this rank passes to FSDP's all-gathers, which are not in the ledger."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original, sizes = getattr(dist, name), list[int]()

    def counted(output_tensor: Tensor, input_tensor: Tensor, *more: Any, **settings: Any) -> Any:
        sizes.append(input_tensor.nbytes)
        return original(output_tensor, input_tensor, *more, **settings)

    with replaced(dist, name, counted):
        yield sizes


@pytest.mark.parametrize(("world", "layout"), FSDP_LAYOUTS)
def test_fsdp_sends_the_bytes_of_the_cast(world: int, layout: dict[str, Any]) -> None:
    """Its gathers are the planner's, byte for byte, and so is the maximum of magnitudes, once per step."""
    runs = [run_of(layout | {"precision.gather": gather}) for gather in ("narrow", "float32")]

    def work(groups: Groups) -> list[int]:
        sent = []
        for run in runs:
            local_model = build_local_model(run, groups, CPU)
            optimizer, ledger = make_optimizer(local_model), groups["world"].ledger
            before = dict(ledger.traffic)
            with gathers_of_fsdp() as sizes:
                step(local_model, optimizer, 0)
            said = [each for each in messages(run, world, groups.rank) if of_data((each.name, each.group))]
            # FSDP knows groups of the same ranks by one name, which may be that of replicas.
            gathers = [each for each in said if each.name == "all_gather"]
            assert (len(sizes), sum(sizes)) == (sum(m.count for m in gathers), sum(m.bytes for m in gathers))
            magnitudes = {
                key[1]: tuple(each)
                for key, each in gained(ledger.traffic, before).items()
                if key[0] == "all_reduce" and key[1].endswith("_shard")
            }
            assert magnitudes == {
                m.group: (m.count, m.bytes) for m in said if m.name == "all_reduce" and m.group.endswith("_shard")
            }
            sent.append(sum(sizes))
        return sent

    wide_ones = sum(prod(spec.shape) for spec in parameters(runs[0].model) if spec.name not in gather_casts(runs[0]))
    for narrow, wide in on_groups(work, runs[0], world):
        assert narrow < 0.25 * wide + 2 * 4 * 2 * wide_ones


def of_data(key: tuple[str, str]) -> bool:
    return key[1].endswith(("_shard", "_replicate"))


def test_weights_that_were_loaded_have_new_codes(tmp_path: Path) -> None:
    """Saved by a run that gathers wide on three ranks, loaded by one that has gathered codes of other weights."""
    saved = run_of(FLAT | {"precision.gather": "float32", "seed": 3, "data.global_batch": 3})

    def save(groups: Groups) -> None:
        local_model = build_local_model(saved, groups, CPU)
        optimizer = make_optimizer(local_model)
        saver = Saver(tmp_path, groups["world"], 0, about=run_record(local_model))
        elsewhere = tensors_elsewhere(local_model, optimizer)
        saver.begin(5, chunks_of(local_model, optimizer), {"train": {"step": 5}}, elsewhere)
        assert saver.finish() == 5

    def load(groups: Groups) -> None:
        for layout in (FLAT, {}):
            load_under(run_of(layout), groups)

    def load_under(run: RunConfig, groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        before = codes_in_use(local_model)
        assert load_latest(tmp_path, local_model, make_optimizer(local_model)) is not None
        assert different(local_model) == []
        after = codes_in_use(local_model)
        assert all(not torch.equal(before[name][0], after[name][0]) for name in before)

    on_groups(save, saved, 3)
    on_groups(load, run_of(FLAT), 2)


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
    return _SCALES_OF(amax.flatten().roll(1).view(amax.shape), cast)


def _stay_gathered(self: FlatSharding, trained_only: bool = False) -> None:
    """The flag of buckets that are codes is forgotten."""
    kept = [bucket for bucket in self.buckets if bucket.narrow is not None and bucket.gathered]
    _WEIGHTS_CHANGED(self, trained_only)
    for bucket in kept:
        bucket.gathered = True


def _no_maximum_now(amax: Tensor, group: Any) -> Tensor:
    return amax


def _stay_narrowed(self: fsdp_codes.CodedShards) -> None:
    """Only the first weights are narrowed."""
    if not self.parameters or any(each.codes is None for _, shards in self.by_group.values() for each in shards):
        _CODES_CHANGED(self)


_SCALES_OF, _WEIGHTS_CHANGED = flat_codes.scales_of, FlatSharding.weights_changed
_CODES_CHANGED = fsdp_codes.CodedShards.weights_changed
MUTANTS = {
    "flat: magnitudes are not maximised over ranks": (flat_codes, "start_all_reduce_max", _no_maximum),
    "flat: scales of other blocks": (flat_codes, "scales_of", _next_block),
    "flat: codes of the weights before the update, or before a load": (FlatSharding, "weights_changed", _stay_gathered),
    "fsdp: magnitudes are not maximised over ranks": (fsdp_codes, "all_reduce_max", _no_maximum_now),
    "fsdp: scales of other blocks": (fsdp_codes, "scales_of", _next_block),
    "fsdp: codes of the weights before the update": (fsdp_codes.CodedShards, "weights_changed", _stay_narrowed),
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants_are_caught(mutant: str) -> None:
    run = run_of(FLAT if mutant.startswith("flat") else {})

    def work(groups: Groups) -> int:
        with replaced(*MUTANTS[mutant]):
            local_model = build_local_model(run, groups, CPU, uneven_init)
            train(local_model, 1)
            return len(different(local_model))

    assert min(on_groups(work, run, 2)) > 0
