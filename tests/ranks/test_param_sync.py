"""Parameter synchronisation in four steps (MegaScale-MoE, appendix A.1) against one collective over all ranks.

The same model, batches and steps under ``param_sync: direct`` and ``hierarchical``: losses, gradients as the optimizer
gets them, gathered and main weights in float64 within 1e-9; and bytes of every link against the paper's formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ranks.test_flat_sharding import BF16, CPU, in_groups, real_batches, small_run
from torch import Tensor

from moefold.blueprint.flat_layout import FlatBucket
from moefold.checks.run_all import problems
from moefold.comm.process_groups import Groups
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.dryrun.trace_step import gained
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.parallelize import LocalModel, build_local_model
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.plan.collective_counts import messages

WIDE = PrecisionConfig(params="float64", compute="float64")
FOUR_STEPS = {"param_sync": "hierarchical", "sharding": "flat", "bucket_mb": 0.05}
# World, ranks per host, the layout, and which grids have ranks both beside each other and on other hosts.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], tuple[str, ...]]] = {
    "two hosts of two": (4, 2, {}, ("dense_shard", "expert_shard")),
    "experts apart": (4, 2, {"ep": 2}, ("dense_shard",)),
    "two hosts of four": (8, 4, {"ep": 2}, ("dense_shard", "expert_shard")),
    "four hosts of two": (8, 2, {"cp": 2, "num_mtp": 1}, ("dense_shard", "expert_shard")),
    "tensor": (8, 4, {"tp": 2, "ep": 2, "etp": 2}, ("dense_shard",)),
    "replicas": (8, 2, {"dp_replicate": 2, "edp_replicate": 2}, ("dense_shard", "expert_shard")),
    "pipeline": (8, 2, {"pp": 2, "vpp": 2, "schedule": "interleaved", "num_mtp": 1}, ("dense_shard", "expert_shard")),
    "zero bubble": (8, 2, {"pp": 2, "schedule": "zb_h1", "num_mtp": 1}, ("dense_shard", "expert_shard")),
}
MARKS = {"four hosts of two": pytest.mark.slow, "tensor": pytest.mark.slow, "zero bubble": pytest.mark.nightly}


def run_of(name: str, precision: PrecisionConfig, **more: Any) -> RunConfig:
    world, per_host, layout, _ = LAYOUTS[name]
    run = small_run(precision, **FOUR_STEPS, ranks_per_host=per_host, **layout, **more)
    assert problems(run, world) == []
    return run


def directly(run: RunConfig) -> RunConfig:
    return replace(run, parallel=replace(run.parallel, param_sync="direct", ranks_per_host=1))


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in LAYOUTS])
def test_steps_are_those_of_direct_synchronisation(name: str) -> None:
    run = run_of(name, WIDE)
    runs = (directly(run), run)

    def work(groups: Groups) -> tuple[str, ...]:
        models = [build_local_model(each, groups, CPU) for each in runs]
        optimizers = [make_optimizer(each) for each in models]
        for step in range(2):
            batches = real_batches(run, groups, step)
            seen: list[dict[str, Tensor]] = [{}, {}]
            for model, optimizer, gradients in zip(models, optimizers, seen, strict=True):
                watch(model, gradients)
                gradients["loss"] = run_step(model, optimizer, batches).sums.loss.detach()
            compare(*seen)
            compare(*({"evaluated": evaluate(model, batches)} for model in models))
        compare(*(main_weights(model) for model in models))
        compare(*(whole_weights(model) for model in models))
        sharded = {bucket.shard.name: bucket.sync.levels is not None for bucket in flat(models[1]).buckets}
        return tuple(name for name, levels in sharded.items() if levels)

    # The groups of the run with four steps are a superset of those of the other.
    world, _, _, expected = LAYOUTS[name]
    for found in in_groups(work, run, world):
        assert set(found) == set(expected)


def flat(model: LocalModel) -> FlatSharding:
    assert isinstance(model.sharding, FlatSharding)
    return model.sharding


def watch(model: LocalModel, into: dict[str, Tensor]) -> None:
    """Gradients after their sum over data-parallel ranks, gathered as whole tensors: shards differ between the two."""
    sharding, plain = flat(model), FlatSharding.reduce_gradients

    def reduce_gradients() -> dict[str, Tensor]:
        found = plain(sharding)
        for bucket in sharding.trained:
            kept = bucket.main.clone()
            start = bucket.owned.start
            for where in bucket.layout.parameters:
                if where.name in found:
                    cut = slice(max(where.start - start, 0), max(where.start - start, 0) + found[where.name].numel())
                    bucket.main[cut] = found[where.name]
            into.update({f"gradient/{p.name}": sharding.whole_main(p.name).clone() for p in bucket.layout.parameters})
            bucket.main.copy_(kept)
        return found

    sharding.reduce_gradients = reduce_gradients  # type: ignore[method-assign]


def main_weights(model: LocalModel) -> dict[str, Tensor]:
    return {name: flat(model).whole_main(name) for name, _ in model.model.named_parameters()}


def whole_weights(model: LocalModel) -> dict[str, Tensor]:
    """What matmuls use: an evaluation has gathered them after the last update."""
    return {name: parameter.detach() for name, parameter in model.model.named_parameters()}


def compare(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: name + text)


def test_bfloat16_between_hosts_rounds_the_sums_of_hosts_and_nothing_else() -> None:
    """Every host's part is rounded once: gradients are within 2**-7 of those of float32 sums, and not equal to them."""
    narrow = run_of("two hosts of two", replace(PrecisionConfig(), reduce="bfloat16_all_to_all"))
    runs = (replace(narrow, precision=PrecisionConfig()), narrow)

    def work(groups: Groups) -> None:
        seen: list[dict[str, Tensor]] = [{}, {}]
        for run, gradients in zip(runs, seen, strict=True):
            model = build_local_model(run, groups, CPU)
            watch(model, gradients)
            run_step(model, make_optimizer(model), real_batches(run, groups, 0))
        exact, rounded = seen
        assert exact.keys() == rounded.keys()
        for name, value in exact.items():
            error = (rounded[name] - value).norm() / value.norm().clamp(min=1e-12)
            assert error < 2**-7, (name, error)
        assert any(not torch.equal(value, rounded[name]) for name, value in exact.items())

    in_groups(work, narrow, 4)


@pytest.mark.parametrize("name", ["two hosts of two", pytest.param("pipeline", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", [BF16, replace(BF16, reduce="bfloat16_all_to_all")], ids=["plain", "narrow"])
def test_links_carry_the_bytes_of_the_formula(name: str, precision: PrecisionConfig) -> None:
    """Of P bytes, n ranks of a host and d hosts: P inside of the host, P / n between hosts, both ways; and all of it as
    the planner counts it. Between hosts gradients may be bfloat16, inside they are float32."""
    run = run_of(name, precision)
    world, per_host, _, levels = LAYOUTS[name]

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        optimizer, ledger = make_optimizer(local_model), groups["world"].ledger
        buckets = [bucket.layout for bucket in flat(local_model).buckets]
        for step in range(2):
            before = dict(ledger.traffic)
            run_step(local_model, optimizer, real_batches(run, groups, step))
            found = {key: tuple(traffic) for key, traffic in gained(ledger.traffic, before).items()}
            said = {(each.name, each.group): (each.count, each.bytes) for each in messages(run, world, groups.rank)}
            of_data = {key for key in found.keys() | said.keys() if "_shard" in key[1] or "_replicate" in key[1]}
            assert {key: found.get(key) for key in of_data} == {key: said.get(key) for key in of_data}
            for group in levels:
                grid = "expert" if group == "expert_shard" else "attention"
                here = [bucket for bucket in buckets if bucket.grid == grid]
                expected = paper(here, world // run.parallel.pp, per_host, narrow=precision.reduce is not None)
                assert {key: found[key][1] for key in expected_keys(group, precision)} == dict(
                    zip(expected_keys(group, precision), expected, strict=True)
                )

    in_groups(work, run, world)


def expected_keys(group: str, precision: PrecisionConfig) -> tuple[tuple[str, str], ...]:
    between = "reduce_scatter" if precision.reduce is None else "all_to_all"
    inside, across = f"{group}_inside", f"{group}_across"
    return ("reduce_scatter", inside), (between, across), ("all_gather", across), ("all_gather", inside)


def paper(buckets: list[FlatBucket], ranks: int, inside: int, narrow: bool) -> tuple[int, int, int, int]:
    """What a rank passes to each step; an all-gather is passed one part of what it returns."""
    hosts = ranks // inside
    even = [(bucket.size // (ranks * 8) * 8 * ranks, bucket.element_bytes) for bucket in buckets]
    gradients = sum(size for size, _ in even)
    weights = sum(size * kept for size, kept in even)
    return 4 * gradients, (2 if narrow else 4) * gradients // inside, weights // inside // hosts, weights // inside


def test_sums_between_hosts_start_before_the_end_of_the_step() -> None:
    """The slow step of a stage runs beside the backwards of others."""
    run = run_of("pipeline", BF16)

    def work(groups: Groups) -> list[int]:
        seen: list[int] = []
        ledger = groups["world"].ledger
        run_step(
            local_model := build_local_model(run, groups, CPU),
            make_optimizer(local_model),
            real_batches(run, groups, 0),
            on_action=lambda *_: seen.append(ledger.of("reduce_scatter", "dense_shard_across").calls),
        )
        return seen

    for calls in in_groups(work, run, 8):
        assert 0 < calls[-2] < calls[-1] or calls[-2] == calls[-1] > 0
