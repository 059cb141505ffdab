"""Runs become jobs and jobs become the command that starts them, without loss in either direction."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from moefold.cli.run_argument import split_changes
from moefold.config.loading import override
from moefold.config.memory import MemoryConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import LayoutError
from moefold.hardware.cluster import cluster_of
from moefold.plan.launch_command import beyond_moefold, changes_to_run, folded, launch_words, order_of
from moefold.plan.workload import changed, workload_of_run
from moefold.recipes.catalog import RECIPES, recipe

LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tp=2, ep=8),
    ParallelConfig(pp=4, vpp=2, ep=8, schedule="interleaved_overlapped"),
    ParallelConfig(pp=2, vpp=2, cp=2, ep=4, schedule="dualpipe_v", dispatcher="all_gather"),
    ParallelConfig(pp=4, ep=2, schedule="zb_h1", dp_replicate=2, edp_replicate=2),
    ParallelConfig(ep=8, dispatcher="deduplicated"),
    ParallelConfig(ep=8, dispatcher="two_level", ep_inner=8),
    ParallelConfig(pp=2, schedule="1f1b_overlapped", stages="Et|tL"),
)


def of(parallel: ParallelConfig, **memory: object) -> RunConfig:
    run = recipe("debug_small")
    data = replace(run.data, global_batch=512)
    return replace(run, parallel=parallel, data=data, memory=MemoryConfig(**memory))  # type: ignore[arg-type]


def test_a_run_is_the_job_it_describes() -> None:
    workload = workload_of_run(recipe("deepseek_v3"), cluster_of("H100", 2048))
    assert (workload.dp, workload.edp, workload.microbatches) == (128, 2, 120)
    assert workload.global_tokens == 15_360 * 4096
    assert (workload.framework.name, workload.dispatcher, workload.format) == ("moefold", "all_to_all", "bfloat16")
    # Sharded float32 parameters are their own masters.
    assert (workload.weight_bytes, workload.master_bytes, workload.moments_bytes) == (4, 0, 8)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_the_command_line_starts_the_same_job(parallel: ParallelConfig) -> None:
    """From any run to this one and back: what `train` would read is the workload that was planned."""
    asked, cluster = of(parallel, recompute=("experts",)), cluster_of("H100", 64)
    workload = workload_of_run(asked, cluster)
    assert beyond_moefold(workload) == [] and order_of(workload) == parallel.schedule
    changes = changes_to_run(workload, recipe("debug_small"))
    words = shlex.split(folded(launch_words(workload, "debug_small", changes), 80).replace("\\\n", ""))
    assert words[:3] == ["torchrun", "--nnodes", "8"]
    _, dotted = split_changes(words[words.index("train") + 2 :])
    again = override(recipe("debug_small"), dotted)
    assert workload_of_run(again, cluster) == workload and again == asked


def test_every_recipe_is_a_job_of_its_own_layout() -> None:
    for name in RECIPES:
        run = recipe(name)
        world = run.parallel.pp * run.parallel.tp * run.parallel.cp * run.parallel.ep * run.parallel.etp
        if run.data.global_batch % (world // run.parallel.pp) == 0:
            assert changes_to_run(workload_of_run(run, cluster_of("H100", world)), run) == {}, name


def test_what_moefold_cannot_do_is_said() -> None:
    workload = workload_of_run(recipe("deepseek_v3"), cluster_of("GB200", 2048))
    beyond = beyond_moefold(
        changed(
            workload,
            parallel={"dispatcher": "hybridep", "sharding": "zero1", "overlap": ("ep", "wgrad")},
            kernels={"graphs": "full"},
            memory={"recompute": ("mla_up", "experts")},
            precision={"recipe": "fp8_rowwise"},
        )
    )
    text = "; ".join(beyond)
    for word in ("hybridep", "fp8_rowwise", "mla_up", "full graphs", "zero1", "deferred weight gradients"):
        assert word in text


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="multiple of 2048"):
        workload_of_run(recipe("deepseek_v3"), cluster_of("H100", 2048 * 16))
