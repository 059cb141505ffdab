"""What the checkpoint tests share: a small run on one process, without process groups, with busy numbers everywhere."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import chunks_of, run_record
from moefold.comm.process_groups import Groups, Ledger
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, build_local_model, local_buffers
from moefold.parallel.param_shards import local_part
from moefold.pipeline.step import make_optimizer
from moefold.prove.proof_inputs import proof_init
from moefold.recipes.catalog import RECIPES
from moefold.topology.folded_layout import fold


def small_run(**layout: Any) -> RunConfig:
    """Latent attention, shared and routed experts, expert bias: every kind of tensor there is."""
    return replace(RECIPES["debug_mla"](), parallel=ParallelConfig(**layout))


def share_alone(run: RunConfig | None = None) -> LocalModel:
    run = run or small_run()
    groups = Groups(fold(run.parallel, 1), 0, Ledger(), timedelta(seconds=120))
    return build_local_model(run, groups, torch.device("cpu"), proof_init)


def fill_moments(local_model: LocalModel, optimizer: ModelOptimizer, seed: int, steps: float = 3.0) -> None:
    """Moments that depend on the global place only, so that every layout has the same ones."""
    for piece in local_model.pieces():
        state: dict[str, Tensor] = {"step": torch.tensor(steps)}
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind] = torch.zeros_like(piece.parameter.detach())
            for box, part in piece.by_box(state[kind]):
                into = torch.empty_like(part)
                proof_init("matrix", seed, f"{kind}/{piece.name}", piece.shard.shape, box, 1.0, into)
                part.copy_(into)
        optimizer.state[piece.parameter] = state


def trained_alone(seed: int = 0, run: RunConfig | None = None) -> tuple[LocalModel, ModelOptimizer]:
    local_model = share_alone(replace(run or small_run(), seed=seed))
    optimizer = make_optimizer(local_model)
    fill_moments(local_model, optimizer, seed)
    return local_model, optimizer


def everything(local_model: LocalModel, optimizer: ModelOptimizer) -> dict[str, Tensor]:
    """Copies of every local tensor that a checkpoint restores."""
    state = dict(local_model.model.named_buffers())
    found = {f"buffer/{spec.name}": state[spec.name] for spec in local_buffers(local_model.run, local_model.model)}
    for piece in local_model.pieces():
        states = optimizer.state.get(piece.parameter, {})
        found[f"parameter/{piece.name}"] = local_part(piece.parameter.detach())
        found |= {f"{kind}/{piece.name}": local_part(value) for kind, value in states.items()}
    return {name: value.clone() for name, value in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def save_step(root: Path, local_model: LocalModel, optimizer: ModelOptimizer | None, step: int, **options: int) -> Path:
    """A committed checkpoint by a lone writer."""
    saver = Saver(root, local_model.groups["world"], 0, background=False, about=run_record(local_model), **options)
    saver.begin(step, chunks_of(local_model, optimizer), {"train": {"step": step}})
    assert saver.finish() == step
    return saver.path_of(step)
