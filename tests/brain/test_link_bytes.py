"""Bytes by link against every message that the same run sends, and against groups that are counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moefold.config.loading import override
from moefold.hardware.cluster import cluster_of
from moefold.plan.collective_counts import messages
from moefold.plan.link_bytes import link_bytes
from moefold.plan.workload import Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe
from moefold.topology.folded_layout import fold

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"ep": 8},
    {"tp": 2, "ep": 4},
    {"cp": 2, "ep": 4},
    {"pp": 2, "ep": 4, "sharding": "flat"},
    {"pp": 4, "vpp": 3, "schedule": "interleaved", "tp": 2, "ep": 2, "sharding": "flat"},
    {"ep": 4, "dispatcher": "all_gather"},
)


def workload(layout: dict[str, Any], world: int = 8, **memory: Any) -> Workload:
    changes = {f"parallel.{key}": value for key, value in layout.items()}
    changes |= {f"memory.{key}": value for key, value in memory.items()}
    run = override(recipe("qwen3_30b_a3b"), changes | {"data.global_batch": 64, "data.micro_batch": 1})
    return workload_of_run(run, cluster_of("H100", world))


def received(at: Workload, rank: int) -> Counter[str]:
    """From what a rank passes to each collective: a gather brings what the others pass, a scatter this rank's part of
    it, an all-to-all all but its own part."""
    layout = fold(at.run.parallel, at.cluster.num_gpus)
    found: Counter[str] = Counter()
    for each in messages(at.run, at.cluster.num_gpus, rank):
        size = 1 if each.group.startswith("context") else layout.size(each.group)
        times = {"all_gather": size - 1, "reduce_scatter": 1 - 1 / size, "all_to_all": 1 - 1 / size, "send": 1}
        if each.name not in times:
            continue
        name = "tensor parallelism" if each.group == "tp" else "expert dispatch and combine"
        if "shard" in each.group or "replicate" in each.group:
            name = "gradients and parameters" if at.is_flat else "sharded parameters"
        if each.name == "send":
            name = "context parallelism" if each.group.startswith("context") else "messages between stages"
        found[name] += int(each.bytes * times[each.name])
    return found


def in_words(changes: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in changes.items())


@pytest.mark.parametrize(
    "model", [{}, {"num_mtp": 2, "num_layers": 6}, {"tied_embeddings": True, "num_layers": 6}], ids=in_words
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=in_words)
def test_sums_are_those_of_all_messages(layout: dict[str, Any], model: dict[str, Any]) -> None:
    at = workload(layout)
    at = replace(at, run=override(at.run, {f"model.{key}": value for key, value in model.items()}))
    by_rank = [received(at, rank) for rank in range(0, 8, 8 // at.parallel.pp)]
    most = max(by_rank, key=lambda sums: sum(sums.values()))
    predicted = {each.name: each.total for each in link_bytes(at)}
    assert set(predicted) == set(most)
    for name, total in most.items():
        # Routers and norms are in other formats; indices and probabilities of rows are not counted, nor are the loss's
        # two numbers per token.
        assert predicted[name] == pytest.approx(total, rel=0.04), name


def test_recomputed_phases_gather_again() -> None:
    at = workload({"tp": 2, "ep": 4})
    again = changed(at, memory={"recompute": ("attention",)})
    for each in (at, again):
        predicted = {found.name: found.total for found in link_bytes(each)}
        assert predicted["tensor parallelism"] == pytest.approx(received(each, 0)["tensor parallelism"], rel=0.03)


def test_what_crosses_domains_is_counted_on_the_network() -> None:
    """16 ranks of experts in two nodes: of the other 15, 7 are in the same one."""
    dispatch = next(each for each in link_bytes(workload({"ep": 16}, 16)) if each.name.startswith("expert"))
    assert dispatch.inside / dispatch.total == pytest.approx(7 / 15)
    # Sixteen whole copies of the dense parameters: a rank lacks 15 sixteenths, and brings in a sixteenth of the other
    # node's half itself.
    sharded = next(each for each in link_bytes(workload({"ep": 16}, 16)) if each.name.startswith("sharded"))
    assert sharded.outside / sharded.total == pytest.approx((1 / 2 / 8) / (15 / 16))
    alone = link_bytes(workload({"ep": 1}, 1))
    assert alone == ()


def test_a_module_that_looks_ahead_is_a_layer_and_a_matrix_that_joins() -> None:
    """Gathered twice in two bytes, summed in four: of 2 dim x dim parameters, seven eighths come from other ranks."""
    at = workload({"ep": 8})
    with_module, with_layer = (
        replace(at, run=override(at.run, {"model.num_layers": 6} | changes))
        for changes in ({"model.num_mtp": 1}, {"model.num_layers": 7})
    )
    first, second = ({each.name: each.total for each in link_bytes(one)} for one in (with_module, with_layer))
    joins = at.microbatches * (2 * 2 + 4) * 2 * at.run.model.dim**2 * 7 / 8
    assert first.pop("sharded parameters") - second.pop("sharded parameters") == pytest.approx(joins)
    assert first == second


def test_clones_of_experts_travel_too() -> None:
    """Three matrices in bfloat16, out and their gradients back, of as many clones as the plan of a layer makes."""
    at = workload({"ep": 8, "echo.slots": 2})
    busy = replace(at, imbalance=1.8)
    assert busy.clones.clones
    found = next(each for each in link_bytes(busy) if each.name == "clones of experts")
    model = at.run.model
    assert model.moe is not None
    expert = 3 * model.dim * model.moe.expert_hidden_dim * 2
    times = model.num_layers * at.microbatches * 2
    assert found.inside == pytest.approx(times * busy.clones.clones / 8 * expert) and found.outside == 0
