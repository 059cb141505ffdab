"""Flat sharding against one process with plain AdamW, against FSDP, and against the formula of its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefold.api.runs import load_run
from moefold.checkpoint.hf.gather_weights import hf_weights
from moefold.checks.run_all import problems
from moefold.comm.process_groups import Groups
from moefold.comm.spawn import spawn_ranks
from moefold.config.moe import BalanceConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.data.samples import Sample
from moefold.dryrun.dry_run import FullDocuments
from moefold.dryrun.trace_step import gained
from moefold.nn.batch import IGNORED, Batch, whole_batch
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.parallel.param_shards import local_part
from moefold.pipeline.pipeline_state import PipelineState
from moefold.pipeline.runtime import run_schedule
from moefold.pipeline.step import evaluate, make_optimizer, move_expert_biases, run_step
from moefold.plan.collective_counts import messages
from moefold.recipes.catalog import RECIPES
from moefold.schedule.actions import Action
from moefold.schedule.names import schedule_named
from moefold.train.batches import step_batches

CPU = torch.device("cpu")
TOKENS = 16


def small_run(precision: PrecisionConfig | None = None, num_mtp: int = 0, **layout: Any) -> RunConfig:
    """Latent attention, shared experts and the loss-free bias; no balance loss, and no gradient is clipped."""
    run = RECIPES["debug_mla"]()
    assert run.model.moe is not None
    model = replace(run.model, moe=replace(run.model.moe, balance=BalanceConfig()), num_mtp=num_mtp)
    if layout.get("pp", 1) * layout.get("vpp", 1) > 3:
        model = replace(model, num_layers=5)
    data = replace(run.data, seq_len=TOKENS, global_batch=8, micro_batch=1)
    optim = replace(run.optim, clip_norm=1e9, lr=3e-3)
    precision = precision or run.precision
    return replace(run, model=model, optim=optim, data=data, parallel=ParallelConfig(**layout), precision=precision)


def batch_of(run: RunConfig, step: int, part: int, labels: int, *, counts: bool = True) -> Batch:
    """A microbatch that depends on its number in the step; without ``counts`` none of its labels does."""
    random = torch.Generator().manual_seed(1000 * step + part)
    text = torch.randint(run.model.vocab_size, (TOKENS + 1,), generator=random)
    targets = text[1:] if counts else torch.full((TOKENS,), IGNORED)
    return whole_batch(text[:-1], targets, (TOKENS,), step_labels=labels, step_tokens=4 * labels)


# ---- one process ----


def steps_of_one_process(run: RunConfig, ranks: int, waves: int, steps: int, path: Path) -> None:
    """The model with autograd's own gradients and torch's own AdamW over whole float32 parameters."""

    def work(groups: Groups) -> None:
        local_model = build_local_model(replace(run, parallel=ParallelConfig()), groups, CPU)
        named, kinds = dict(local_model.model.named_parameters()), local_model.param_shards
        decayed: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, parameter in named.items():
            decayed[kinds[name].kind not in ("norm", "bias", "sink")].append(parameter)
        optim = run.optim
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed[True], "weight_decay": optim.weight_decay},
                {"params": decayed[False], "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            sums = run_schedule(
                local_model, [b for wave in range(waves) for b in of_step(run, step, wave, ranks, waves)]
            )
            optimizer.step()
            move_expert_biases(local_model.model, sums.kept_ME)
            losses.append(sums.loss.detach())
        found = {f"parameter/{name}": p.detach() for name, p in named.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            found |= {f"{kind}/{name}": optimizer.state[p][kind] for name, p in named.items()}
        save_file(found | {"losses": torch.stack(losses)}, str(path))

    in_groups(work, replace(run, parallel=ParallelConfig()), 1)


def of_step(run: RunConfig, step: int, wave: int, ranks: int, waves: int) -> list[Batch]:
    """The microbatches of a wave, one for each data-parallel rank; in a step, labels of one of these ranks count."""
    labels = waves * TOKENS
    return [batch_of(run, step, wave * ranks + d, labels, counts=d == step % ranks) for d in range(ranks)]


@pytest.mark.parametrize(
    ("world", "layout", "steps", "compute"),
    [
        (2, {}, 4, "float32"),
        pytest.param(8, {"pp": 2, "vpp": 2, "schedule": "interleaved"}, 20, "float32", marks=pytest.mark.slow),
        pytest.param(8, {"pp": 2, "schedule": "zb_h1"}, 20, "bfloat16", marks=pytest.mark.nightly),
        pytest.param(8, {}, 20, "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_steps_are_those_of_one_process_with_plain_adamw(
    world: int, layout: dict[str, Any], steps: int, compute: Any, tmp_path: Path
) -> None:
    """To the bit: main weights, both moments and losses, after steps of real training with the same microbatches.

    Sums over ranks round in the backend's order, one process in another. So in every step the labels of one
    data-parallel rank count, another one in each step; the gradients of the other ranks are exact zeros, which one
    process adds too, and sums of one number and zeros have no rounding. There is no balance loss, which would give the
    other ranks gradients. The loss-free bias moves by the load of all ranks' tokens. No axis cuts a matmul, which would
    change the order of its sums: the pipeline and data parallelism do not. Gradients are not clipped, because the norm
    is a sum over ranks.
    """
    run = small_run(PrecisionConfig(compute=compute), **layout, sharding="flat")
    assert problems(run, world) == []
    path, waves = tmp_path / "one.safetensors", 2
    ranks = world // layout.get("pp", 1)
    steps_of_one_process(run, ranks, waves, steps, path)

    def work(groups: Groups) -> None:
        expected = load_file(str(path))
        local_model = build_local_model(run, groups, CPU)
        optimizer = make_optimizer(local_model)
        dp = groups["dp"].index
        for step in range(steps):
            mine = [of_step(run, step, wave, ranks, waves)[dp] for wave in range(waves)]
            result = run_step(local_model, optimizer, mine)
            assert torch.equal(result.sums.loss, expected["losses"][step])
        for piece in local_model.pieces():
            states = optimizer.state[piece.parameter]
            held = {"parameter": piece.parameter.detach(), **{kind: states[kind] for kind in ("exp_avg", "exp_avg_sq")}}
            for kind, values in held.items():
                for box, part in piece.by_box(values):
                    assert torch.equal(part, expected[f"{kind}/{piece.name}"][box]), f"{kind}/{piece.name}"

    in_groups(work, run, world)


# ---- FSDP ----

BF16 = PrecisionConfig(compute="bfloat16")
# Every sum over ranks has two terms, so that no order of summation can round it differently. Without a pipeline FSDP
# sums every microbatch over ranks before it adds it to the others, so there is one microbatch.
AGAINST_FSDP: dict[str, tuple[int, PrecisionConfig, dict[str, Any]]] = {
    "two ranks": (2, PrecisionConfig(), {}),
    "pipeline": (4, BF16, {"pp": 2, "ep": 2, "num_mtp": 1}),
    "tensor": (4, BF16, {"tp": 2, "ep": 2}),
    "split experts": (4, BF16, {"tp": 2, "etp": 2}),
    "context": (2, BF16, {"cp": 2, "ep": 2}),
    "replicas": (
        4,
        PrecisionConfig(compute="bfloat16", reduce="bfloat16"),
        {"pp": 2, "dp_replicate": 2, "edp_replicate": 2},
    ),
    "zero bubble": (4, BF16, {"pp": 2, "schedule": "zb_h1", "num_mtp": 1}),
    "overlapped": (4, BF16, {"pp": 2, "ep": 2, "schedule": "1f1b_overlapped"}),
    "pairs in a V": (4, BF16, {"pp": 2, "vpp": 2, "schedule": "dualpipe_v", "num_mtp": 1}),
    "everything": (8, BF16, {"pp": 2, "vpp": 2, "tp": 2, "ep": 2, "schedule": "interleaved", "num_mtp": 1}),
    "wide": (2, PrecisionConfig(params="float64", compute="float64"), {"ep": 2}),
}


MARKS = {"pipeline": (), "everything": pytest.mark.slow, "replicas": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.nightly)) for name in AGAINST_FSDP]
)
def test_steps_are_those_of_fsdp(name: str) -> None:
    """To the bit: two steps with an evaluation after each, and main weights."""
    world, precision, layout = AGAINST_FSDP[name]
    # Buckets of less than a layer, most of which are summed while earlier layers go backward.
    runs = [small_run(precision, sharding=sharding, bucket_mb=0.05, **layout) for sharding in ("fsdp", "flat")]
    if layout.get("pp", 1) == 1:
        batch = world // (layout.get("tp", 1) * layout.get("cp", 1))
        runs = [replace(run, data=replace(run.data, global_batch=batch)) for run in runs]
    assert not any(problems(run, world) for run in runs)

    def work(groups: Groups) -> None:
        models = [build_local_model(run, groups, CPU) for run in runs]
        optimizers = [make_optimizer(local_model) for local_model in models]
        for step in range(2):
            batches = real_batches(runs[0], groups, step)
            one, other = (run_step(*pair, batches) for pair in zip(models, optimizers, strict=True))
            assert torch.equal(one.sums.loss, other.sums.loss)
            # FSDP's modules cannot run by themselves after an overlapped schedule has run their phases.
            if not schedule_named(runs[0].parallel.schedule).overlaps:
                assert torch.equal(*(evaluate(local_model, batches) for local_model in models))
        differing = [name for name, (a, b) in both_weights(*models).items() if not torch.equal(a, b)]
        assert differing == []

    in_groups(work, runs[1], world)


def real_batches(run: RunConfig, groups: Groups, step: int) -> list[Batch]:
    return step_batches(RandomDocuments(run), 8 * step, run, groups, CPU).batches


class RandomDocuments(FullDocuments):
    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, 200, self.seq_len + 1)
        return replace(super().sample(index), tokens=tokens)


def both_weights(fsdp: LocalModel, flat: LocalModel) -> dict[str, tuple[Tensor, Tensor]]:
    """This rank's shards of main weights under FSDP, and the same boxes of flat's, which all ranks gather."""
    assert isinstance(flat.sharding, FlatSharding)
    found = {}
    for name, parameter in fsdp.model.named_parameters():
        shard = fsdp.param_shards[name]
        boxes = zip(shard.box, shard.unsharded_box, strict=True)
        inside = tuple(slice(part.start - whole.start, part.stop - whole.start) for part, whole in boxes)
        found[name] = (local_part(parameter).detach(), flat.sharding.whole_main(name)[inside])
    return found


def test_exported_weights_are_those_of_fsdp() -> None:
    """Main weights in their own format, also where the model computes with narrower ones."""
    layout = {"parallel.tp": 2, "parallel.ep": 2, "model.num_layers": 2, "precision.compute": "bfloat16"}
    runs = [load_run("deepseek_v3_proxy", layout | {"parallel.sharding": sharding}) for sharding in ("fsdp", "flat")]

    def work(groups: Groups) -> int:
        one, other = (dict(hf_weights(build_local_model(run, groups, CPU))) for run in runs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
        return len(one)

    assert min(in_groups(work, runs[1], 4)) > 20


# ---- messages ----


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (3, {"num_mtp": 1}),
        pytest.param(8, {"pp": 2, "vpp": 2, "ep": 2, "schedule": "interleaved", "num_mtp": 1}, marks=pytest.mark.slow),
        pytest.param(8, {"tp": 2, "ep": 2, "dp_replicate": 2, "edp_replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_rank_sends_the_bytes_of_the_formula(world: int, layout: dict[str, Any]) -> None:
    """Of data parallelism: reduce_scatter, all_gather and what is left over, whatever the number of microbatches."""
    run = small_run(BF16, sharding="flat", bucket_mb=1, **layout)
    run = replace(run, data=replace(run.data, global_batch=6 if world == 3 else 8))

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        optimizer, ledger = make_optimizer(local_model), groups["world"].ledger
        for step in range(2):
            before = dict(ledger.traffic)
            run_step(local_model, optimizer, real_batches(run, groups, step))
            found = {key: tuple(traffic) for key, traffic in gained(ledger.traffic, before).items()}
            said = {(each.name, each.group): (each.count, each.bytes) for each in messages(run, world, groups.rank)}
            assert {key: found[key] for key in found if in_data_groups(key)} == {
                key: said[key] for key in said if in_data_groups(key)
            }

    in_groups(work, run, world)


def in_data_groups(key: tuple[str, str]) -> bool:
    return key[1].endswith(("_shard", "_replicate"))


def test_collectives_run_beside_the_first_and_the_last_microbatches() -> None:
    """Sums of a stage start when its last backward has ended, and not at the end of the step; one bucket per stage."""
    run = small_run(pp=2, vpp=2, schedule="interleaved", sharding="flat")

    def work(groups: Groups) -> list[tuple[int, bool]]:
        local_model = build_local_model(run, groups, CPU)
        seen: list[int] = []

        def on_action(state: PipelineState, action: Action) -> None:
            seen.append(groups["world"].ledger.of("reduce_scatter", "dense_shard").calls)

        run_step(local_model, make_optimizer(local_model), real_batches(run, groups, 0), on_action=on_action)
        stages = {bucket.layout.stages for bucket in local_model.sharding.buckets}  # type: ignore[attr-defined]
        return [len(stages), 0 < seen[-2] < seen[-1] or seen[-2] == seen[-1] > 0, seen.count(0) < len(seen) - 2]

    for stages, before_the_end, early in in_groups(work, run, 4):
        assert stages == 2 and before_the_end and early


@pytest.mark.parametrize(
    "layout", [{}, {"param_sync": "hierarchical", "ranks_per_host": 2}, {"pp": 2, "ep": 2}], ids=str
)
def test_buckets_travel_beside_the_layers_of_one_stage(layout: dict[str, Any]) -> None:
    """A bucket is waited for by the first layer that reads it, and leaves when the last backward has left that layer.

    Only what the first part of a stage reads waits for the end of the backward, if nothing with a gradient enters it.
    """
    run = small_run(sharding="flat", bucket_mb=0.05, **layout)

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        sharding = local_model.sharding
        assert isinstance(sharding, FlatSharding)
        sent = [bucket for bucket in sharding.buckets if not bucket.shard.alone]
        (stage,) = {stage for bucket in sent for stage in bucket.layout.stages}
        entered: list[tuple[int, set[int]]] = []
        late: list[set[int]] = []
        enter, after = sharding._enter_part, sharding.after_backward

        def on_enter(stage: int, part: int) -> None:
            enter(stage, part)
            done = {b.layout.first_part(stage) for b in sent if not b.gathering and not b.gather_inside}
            entered.append((part, done))

        def on_after(stage: int) -> None:
            late.append({b.layout.first_part(stage) for b in sharding.trained if b.sent is None})
            after(stage)

        sharding._enter_part, sharding.after_backward = on_enter, on_after  # type: ignore[method-assign]
        optimizer = make_optimizer(local_model)
        run_step(local_model, optimizer, real_batches(run, groups, 0))
        parts = {bucket.layout.first_part(stage) for bucket in sent}
        assert len(parts) > 1
        assert [part for part, _ in entered] == sorted({part for part, _ in entered})
        assert all(done == {other for other in parts if other <= part} for part, done in entered)
        assert late == [{0} if groups["pp"].index == 0 else set()]

    in_groups(work, run, 4)


def in_groups(work: Callable[[Groups], Any], run: RunConfig, world: int) -> list[Any]:
    """On forked ranks, with the groups that the run's schedule needs."""
    return spawn_ranks(lambda rank: work(groups_of(run, world, rank, timedelta(seconds=120))), world, seconds=300)


# ---- memory ----


def test_parameters_and_gradients_are_views_of_the_buffers() -> None:
    """Nothing is copied: a step leaves every parameter and every gradient where it was, in two buffers per bucket."""
    run = small_run(BF16, sharding="flat", bucket_mb=1)

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        assert isinstance(local_model.sharding, FlatSharding)
        buckets = local_model.sharding.buckets

        def places() -> list[int]:
            found = [p.data_ptr() for p in local_model.model.parameters()]
            return found + [p.grad.data_ptr() for p in local_model.model.parameters() if p.grad is not None]

        before = places()
        run_step(local_model, make_optimizer(local_model), real_batches(run, groups, 0))
        assert places() == before and len(before) == 2 * len(list(local_model.model.parameters()))
        storages = {p.untyped_storage().data_ptr() for p in local_model.model.parameters()}
        assert storages == {bucket.weights.untyped_storage().data_ptr() for bucket in buckets}
        for bucket in buckets:
            routers = "router" in bucket.layout.parameters[0].name
            assert bucket.weights.dtype == (torch.float32 if routers else torch.bfloat16)
            assert bucket.gradients.dtype == bucket.main.dtype == torch.float32
            aliased = bucket.main.untyped_storage().data_ptr() == bucket.weights.untyped_storage().data_ptr()
            assert aliased == routers

    in_groups(work, run, 2)


def test_a_skipped_update_leaves_the_weights() -> None:
    run = small_run(BF16, sharding="flat")

    def work(groups: Groups) -> None:
        local_model = build_local_model(run, groups, CPU)
        optimizer, batches = make_optimizer(local_model), real_batches(run, groups, 0)
        run_step(local_model, optimizer, batches)
        loss = evaluate(local_model, batches)
        result = run_step(local_model, optimizer, batches, skip_reason=lambda *_: "a test")
        assert result.skipped == "a test" and torch.equal(result.sums.loss, loss)
        assert torch.equal(evaluate(local_model, batches), loss)

    in_groups(work, run, 2)
