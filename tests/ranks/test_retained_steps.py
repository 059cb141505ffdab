"""Steps that are discarded or offloaded, under every schedule and layout: the bits of a run that keeps everything, each
discarded step recomputed once, and reloads that come in the schedule's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from tests.staged_runs import MODEL, Lengths, microbatches, staged_run
from torch import Tensor

from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import MLAConfig
from moefold.config.memory import MemoryConfig, RetainConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch
from moefold.nn.step_retention import StepRetention
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.pipeline.runtime import run_schedule
from moefold.pipeline.step import evaluate
from moefold.prove.proof_inputs import proof_init

LATENT = MLAConfig(num_heads=2, q_latent=12, kv_latent=8, nope_dim=8, rope_dim=4, value_dim=6)
AHEAD = replace(MODEL, num_layers=3, attention=LATENT)
SHAPES: tuple[Lengths, ...] = ((5,), (3, 4, 1), (1, 1), (9,))
# (virtual stages, stages)
ORDERS: dict[str, tuple[int, str]] = {
    "gpipe": (1, "Ett|tmL"),
    "1f1b": (1, "Ettt|mL"),
    "1f1b_overlapped": (1, "Ett|tmL"),
    "interleaved": (2, "Et|t|tm|L"),
    "interleaved_overlapped": (2, "Et|t|tm|L"),
    "zb_h1": (1, "Ett|tmL"),
    "zb_v": (2, "Et|t|tm|L"),
    "dualpipe_v": (2, "Et|t|tm|L"),
}
NORMS = {"attention_norm": "discard", "latent_norm": "discard", "feed_norm": "discard"}
DISCARDED = NORMS | {"mla_up": "discard", "gate_up": "discard", "activation": "discard"}
LOCAL = DISCARDED | {"core": "discard", "rows": "discard", "shared": "discard", "dense": "discard"}
OFFLOADED = dict.fromkeys(LOCAL, "offload")
# Recomputed from what has to be reloaded, and reloads of what was recomputed from.
MIXED = LOCAL | {"mla_up": "offload", "gate_up": "offload", "rows": "offload", "feed_norm": "offload"}


def gradients(local_model: LocalModel, batches: Sequence[Batch]) -> dict[str, Tensor]:
    local_model.sharding.start_step()
    run_schedule(local_model, batches)
    found = local_model.sharding.reduce_gradients()
    return {name: gradient.clone() for name, gradient in found.items()}


def compare(run: RunConfig, world: int, rank: int, choices: Sequence[dict[str, Any]]) -> list[dict[str, int]]:
    """Two steps of each choice against two steps that keep everything."""
    groups = groups_of(run, world, rank, timedelta(seconds=120))
    said = []
    wanted: list[dict[str, Tensor]] = []
    for choice in ({}, *choices):
        memory = MemoryConfig(retain=RetainConfig(**choice), host_gib=1.0)
        local_model = build_local_model(replace(run, memory=memory), groups, torch.device("cpu"), proof_init)
        if local_model.retention is not None:
            local_model.retention.offload.least = 1
        dp = groups["dp"]
        found = []
        for step in range(2):
            batches = microbatches(run, SHAPES, seed=step)[dp.index :: dp.size]
            found.append(gradients(local_model, batches))
            for parameter in local_model.model.parameters():
                parameter.grad = None
        if not choice:
            wanted = found
            continue
        for got, want in zip(found, wanted, strict=True):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want), choice
        assert local_model.retention is not None
        said.append(told(local_model.retention, local_model, len(batches)))
        evaluate(local_model, batches)
    return said


def told(retention: StepRetention, local_model: LocalModel, num_microbatches: int) -> dict[str, int]:
    offload = retention.offload
    free = sum(len(buffers) for buffers in offload.pool._free.values())
    assert free == len(offload.pool.buffers()), "every host buffer has come back"
    assert not retention._known, "no storage is known after it was freed"
    blocks = len(local_model.model.layers) + len(local_model.model.mtp)
    times = set(retention.recomputed.values())
    for step in ("attention_norm", "core", "feed_norm"):
        if retention.choices.get(step) == "discard" and blocks:  # type: ignore[call-overload]
            assert retention.recomputed[step] == 2 * num_microbatches * blocks, times  # type: ignore[index]
    return {"stalls": offload.stalls, "out": offload.bytes_out, "not taken": offload.not_taken}


@pytest.mark.parametrize("schedule", slow_except(ORDERS, "1f1b", "interleaved", "zb_h1", "dualpipe_v"))
def test_every_schedule(schedule: str) -> None:
    vpp, stages = ORDERS[schedule]
    run = staged_run(AHEAD, pp=2, vpp=vpp, stages=stages, schedule=schedule)
    chunks = 2 * vpp * len(SHAPES)
    for said in spawn_ranks(lambda rank: compare(run, 2, rank, (LOCAL, OFFLOADED, MIXED)), 2, seconds=240):
        discarded, offloaded, mixed = said
        assert discarded["out"] == 0
        for each in (offloaded, mixed):
            assert each["stalls"] <= chunks and each["not taken"] == 0


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "ep": 2},
    "fsdp": {"ep": 1},
    "flat": {"ep": 1, "sharding": "flat"},
    "all_to_all, overlapped": {"ep": 2, "schedule": "1f1b_overlapped"},
}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "tp", "all_to_all, overlapped"))
def test_every_layout(layout: str) -> None:
    keys = LAYOUTS[layout]
    run = staged_run(AHEAD, **keys)
    choices = [DISCARDED | {"shared": "discard", "dense": "discard", "rows": "offload"}, OFFLOADED]
    for discarded, offloaded in spawn_ranks(lambda rank: compare(run, 2, rank, choices), 2, seconds=240):
        assert discarded["out"] < offloaded["out"]
