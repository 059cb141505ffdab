"""Adapters and frozen parameters under layouts: a step equals that of one process, and checkpoints keep both kinds."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.marks import slow_except

from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.param_groups import is_trained
from moefold.checkpoint.load import Checkpoint, load_latest
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import chunks_of, run_record, tensors_elsewhere
from moefold.checks.run_all import problems
from moefold.comm.spawn import spawn_ranks
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.pipeline.step import make_optimizer, run_step
from moefold.prove.cases import Case, reduce_run
from moefold.prove.proof_inputs import labels_of_batch, proof_init, rank_batch
from moefold.prove.verdict import prove
from moefold.recipes.catalog import RECIPES

ADAPTERS = ("model.lora.rank=4", "optim.trained=adapters")
METHODS = {
    "adapters": ADAPTERS,
    "adapters of experts": (*ADAPTERS, "model.lora.targets=[*.experts.*]"),
    "adapters beside trained weights": ("model.lora.rank=4",),
    "frozen router and embedding": ("optim.frozen=[*.router.*,embedding.*]",),
    "frozen first layers": ("optim.frozen=[embedding.*,layers.0.*,layers.1.*]",),
}
LAYOUTS = {
    "ep4 tp2": ("parallel.ep=4", "parallel.tp=2"),
    "pp2 ep2": ("parallel.pp=2", "parallel.ep=2"),
    "etp2 ep2 flat": ("parallel.ep=2", "parallel.etp=2", "parallel.sharding=flat"),
    "pp2 tp2 flat, deferred": ("parallel.pp=2", "parallel.tp=2", "parallel.sharding=flat", "parallel.schedule=zb_h1"),
    "cp2 ep4, recomputed": ("parallel.cp=2", "parallel.ep=4", "memory.recompute=[attention,experts]"),
}
CASES = [(method, layout) for method in METHODS for layout in LAYOUTS]
FAST = (("adapters", "ep4 tp2"), ("adapters", "pp2 tp2 flat, deferred"), ("frozen first layers", "pp2 ep2"))


@pytest.mark.parametrize(("method", "layout"), slow_except(CASES, *FAST))
def test_a_step_equals_that_of_one_process(method: str, layout: str) -> None:
    run = override(RECIPES["deepseek_v3_proxy"](), [*METHODS[method], *LAYOUTS[layout]])
    case = reduce_run(run, 4)
    assert not problems(case.run, 4), problems(case.run, 4)
    verdict = prove(case)
    assert verdict.holds, (verdict.culprit, verdict.failure)
    compared = {row.quantity for row in verdict.rows}
    adapted = any(name.startswith("gradient/") and is_adapter(name) for name in compared)
    assert adapted == method.startswith("adapters")
    assert not any(
        name.startswith(("gradient/", "exp_avg")) and not is_trained(name.partition("/")[2], case.run.optim)
        for name in compared
    )


def small(*changes: str) -> RunConfig:
    narrow = ("precision.compute=bfloat16", "kernels.experts=sequential")
    return override(RECIPES["debug_mla"](), [*ADAPTERS, *narrow, *changes])


def one_step(run: RunConfig, world: int, rank: int) -> tuple[LocalModel, Any]:
    local_model = build_local_model(
        run, groups_of(run, world, rank, timedelta(seconds=120)), torch.device("cpu"), proof_init
    )
    optimizer = make_optimizer(local_model)
    case = Case(run, world)
    labels = labels_of_batch(case)
    batches = [rank_batch(case, wave, rank, labels) for wave in range(case.num_waves)]
    run_step(local_model, optimizer, batches)
    return local_model, optimizer


def held(local_model: LocalModel, optimizer: Any) -> list[str]:
    """What is wrong with how frozen and trained parameters are held."""
    wrong = []
    for piece in local_model.pieces():
        state, trained = optimizer.state.get(piece.parameter, {}), is_adapter(piece.name)
        if piece.parameter.dtype != (torch.float32 if trained or ".router." in piece.name else torch.bfloat16):
            wrong.append(f"{piece.name} is {piece.parameter.dtype}")
        if bool(state) != trained or (piece.parameter.grad is not None) != trained:
            wrong.append(f"{piece.name} has states {list(state)} or a gradient")
    for name, parameter in local_model.model.named_parameters():
        if not is_adapter(name) and (parameter.grad is not None or parameter.requires_grad):
            wrong.append(f"{name} has a gradient")
    return wrong


@pytest.mark.parametrize("sharding", ["fsdp", "flat"])
def test_frozen_weights_are_narrow_and_have_neither_gradient_nor_state(sharding: str) -> None:
    run = small("parallel.ep=2", f"parallel.sharding={sharding}")
    for wrong in spawn_ranks(lambda rank: held(*one_step(run, 2, rank)), 2, seconds=200):
        assert wrong == []


@pytest.mark.parametrize("stages", ["Ett|tL", "E|tttL"])
def test_checkpoints_of_adapters_go_from_one_layout_to_another(stages: str, tmp_path: Path) -> None:
    """Saved by a pipeline, whose first stage may train nothing, loaded by flat buffers and by one process: weights and
    states to the bit."""
    root = tmp_path / "checkpoints"

    def save(rank: int) -> None:
        local_model, optimizer = one_step(small("parallel.pp=2", f"parallel.stages={stages}"), 2, rank)
        saver = Saver(root, local_model.groups["world"], 0, background=False, about=run_record(local_model))
        elsewhere = tensors_elsewhere(local_model, optimizer)
        saver.begin(1, chunks_of(local_model, optimizer), {"train": {}}, elsewhere)
        saver.finish()

    def load(*changes: str) -> Any:
        def work(rank: int) -> list[str]:
            run = small(*changes)
            groups = groups_of(run, 1 + len(changes), rank, timedelta(seconds=120))
            local_model = build_local_model(run, groups, torch.device("cpu"))
            optimizer = make_optimizer(local_model)
            found = load_latest(root, local_model, optimizer)
            assert found is not None
            stored, wrong = Checkpoint(found[0]), []
            for piece in local_model.pieces():
                kinds = {"parameter": optimizer.main_weight(piece.parameter)} | optimizer.saved_state(piece.parameter)
                for kind, values in kinds.items():
                    whole = stored.read(f"{kind}/{piece.name}")
                    parts = piece.by_box(values) if values.dim() else [((), values)]
                    wrong += [f"{kind}/{piece.name}" for box, part in parts if not torch.equal(part, whole[box])]
            return wrong + [name for name in stored.names() if name.startswith("exp_avg") and not is_adapter(name)]

        return work

    spawn_ranks(save, 2, seconds=200)
    assert spawn_ranks(load(), 1, seconds=200) == [[]]
    assert spawn_ranks(load("parallel.sharding=flat"), 2, seconds=200) == [[], []]
