"""Small runs with every kind of layout, and the same step watched on real ranks."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
from tests.private_copies import PrivateCopies

from moefold.comm.p2p import SynchronousStream
from moefold.comm.spawn import spawn_ranks
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.dryrun.dry_run import DryRun, FullDocuments, dry_run_of, second_step
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.recipes.catalog import recipe
from moefold.train.batches import step_batches
from moefold.train.train_context import make_optimizer

CPU = torch.device("cpu")


def balanced_run(name: str, *changes: str) -> RunConfig:
    """A recipe whose experts get even loads, in float32 unless told otherwise."""
    run = override(recipe(name), [f"--{change}" for change in changes])
    if run.model.moe is None:
        return run
    even = {"kind": "balanced", "num_groups": 1, "top_groups": 1, "expert_bias": False}
    router = replace(run.model.moe.router, **even)  # type: ignore[arg-type]
    return replace(run, model=replace(run.model, moe=replace(run.model.moe, router=router)))


def on_real_ranks(run: RunConfig, world: int) -> list[dict[str, Any]]:
    """What `dry_run` reports, of a real step with real tensors over gloo, on every rank."""
    return spawn_ranks(lambda rank: comparable(_real_step(run, world, rank)), world, seconds=120)


def _real_step(run: RunConfig, world: int, rank: int) -> DryRun:
    groups = groups_of(run, world, rank, timedelta(seconds=120))
    batches = step_batches(FullDocuments(run), 0, run, groups, CPU).batches
    local_model = build_local_model(run, groups, CPU)
    if local_model.comm_stream is not None:
        # A watch sees one thread.
        local_model = replace(local_model, comm_stream=SynchronousStream())
    with PrivateCopies() as copies:
        seen = second_step(local_model, make_optimizer(local_model), batches)
        copies.finish()
    return dry_run_of(local_model, len(batches), len(batches), 1.0, seen, 0.0)


def comparable(found: DryRun) -> dict[str, Any]:
    """Everything but the time it took, as JSON has it."""
    data = asdict(found)
    del data["seconds"]
    data["saved_per_microbatch"] = [list(pair) for pair in data["saved_per_microbatch"].items()]
    data["held_at_peak"] = [[*key, size] for key, size in data["held_at_peak"].items()]
    data["collectives"] = [list(each) for each in data["collectives"]]
    return data
