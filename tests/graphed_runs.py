"""Runs with captured phases, several steps of them, and how many graphs they must have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.staged_runs import MODEL, Lengths, microbatches, staged_run
from torch import Tensor

from moefold.config.data import DataConfig
from moefold.config.precision import GraphScope, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.step import make_optimizer, run_step
from moefold.plan.memory.graph_buffers import stage_static_bytes
from moefold.schedule.graph_regions import (
    DENSE_PHASES,
    MOE_PHASES,
    captured_phases,
    num_graphs,
    regions,
    slots_by_stage,
)
from moefold.schedule.passes import executable

ATTENTION_ROUTER: tuple[GraphScope, ...] = ("attn", "moe_router")
LAYER: tuple[GraphScope, ...] = ("attn", "moe_router", "moe", "mlp")
SHAPES: tuple[Lengths, ...] = ((5, 5),) * 5
# Sizes in float32 that torch's grouped GEMM takes.
assert MODEL.moe is not None
ALIGNED = replace(MODEL, moe=replace(MODEL.moe, latent_dim=24))
WIDE = PrecisionConfig("float32", "float32")


def graphed_run(scope: tuple[GraphScope, ...], **parallel: Any) -> RunConfig:
    """Without a scope, the same run without graphs."""
    run = staged_run(ALIGNED, WIDE, "grouped", sharding="flat", **parallel)
    graphs: Any = "partial" if scope else "none"
    kernels = replace(run.kernels, graphs=graphs, graph_scope=scope or ("attn",))
    # Bounds of rows are those of these microbatches.
    return replace(run, kernels=kernels, data=DataConfig(seq_len=5, micro_batch=2, global_batch=20))


def without_graphs(run: RunConfig) -> RunConfig:
    return replace(run, kernels=replace(run.kernels, graphs="none"))


def steps(local: LocalModel, count: int = 3) -> list[dict[str, Tensor]]:
    """Gradients and losses of several steps on different tokens, with an update after each."""
    optimizer, found = make_optimizer(local), []
    for seed in range(count):
        seen: dict[str, Tensor] = {}

        def see(gradients: dict[str, Tensor], seen: dict[str, Tensor] = seen) -> None:
            seen.update({name: gradient.clone() for name, gradient in gradients.items()})

        result = run_step(local, optimizer, microbatches(local.run, SHAPES, seed=seed), on_gradients=see)
        sums = result.sums
        found.append(seen | {"loss": sums.loss, "counts": sums.counts_ME} | sums.balance._asdict())
    return found


def differences(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> list[tuple[int, str]]:
    """Steps and names of what is not equal to the bit."""
    assert [each.keys() for each in one] == [each.keys() for each in other]
    pairs = enumerate(zip(one, other, strict=True))
    return [(step, name) for step, (a, b) in pairs for name in a if not torch.equal(a[name], b[name])]


def expected_graphs(local: LocalModel) -> int:
    """By the formula of `schedule/graph_regions.py`."""
    run = local.run
    captured = captured_phases(run.kernels.graph_scope)
    dense, moe = (len(regions(phases, captured)) for phases in (DENSE_PHASES, MOE_PHASES))
    # The first layer is dense; an MTP module has an MoE layer.
    of_stage = {
        number: sum(moe if layer else dense for layer in stage.layers) + moe * len(stage.mtp)
        for number, stage in enumerate(local.stages)
    }
    actions = executable(run.parallel.schedule, run.parallel.pp, run.parallel.vpp, len(SHAPES)).actions
    return num_graphs(slots_by_stage(actions[local.groups["pp"].index]), of_stage)


def static_bytes_of(local: LocalModel) -> int:
    """Of inputs that are copied, of gradients of outputs, and of gradients of inputs; each memory once."""
    assert local.graphs is not None
    found: dict[int, int] = {}
    for slot in local.graphs.slots.values():
        for region in slot.regions.values():
            copied = [tensor for tensor, shared in zip(region.static_in, region.is_shared, strict=True) if not shared]
            gradients = [gradient for gradient in region.grad_in if gradient is not None]
            for tensor in (*copied, *region.static_grad, *gradients):
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def expected_bytes(local: LocalModel) -> int:
    """By the formula of `plan/memory/graph_buffers.py`."""
    run, tokens = local.run, sum(SHAPES[0])
    actions = executable(run.parallel.schedule, run.parallel.pp, run.parallel.vpp, len(SHAPES)).actions
    total = 0
    for number, slots in slots_by_stage(actions[local.groups["pp"].index]).items():
        stage = local.stages[number]
        # The first layer is dense.
        layers = [layer > 0 for layer in stage.layers]
        total += slots * stage_static_bytes(run, layers, [True] * len(stage.mtp), tokens)
    return total
