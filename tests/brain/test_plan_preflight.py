"""The check of memory before a run is built: what fits is never refused, what does not is told what would."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import predict_memory
from moefold.plan.preflight import Device, MemoryPreflightError, refuse_if_too_large
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import RECIPES, recipe

GIB = 2**30


def qwen(**changes: object) -> RunConfig:
    return override(recipe("qwen3_30b_a3b"), {"data.global_batch": 64, "precision.compute": "bfloat16", **changes})


def peak(run: RunConfig, world: int) -> float:
    return predict_memory(workload_of_run(run, cluster_of("H100", world))).total


def test_what_fits_is_not_refused() -> None:
    run = qwen()
    size = peak(run, 64)
    refuse_if_too_large(run, 64, Device(size))
    with pytest.raises(MemoryPreflightError, match=r"fullest rank .* the device has .*--force"):
        refuse_if_too_large(run, 64, Device(0.99 * size))


def test_the_named_setting_fits_and_can_start() -> None:
    run = qwen(**{"data.micro_batch": 1})
    available = 0.8 * peak(run, 64)
    with pytest.raises(MemoryPreflightError) as caught:
        refuse_if_too_large(run, 64, Device(available))
    words = str(caught.value).partition("it fits with ")[2].partition(" (")[0]
    changes = dict(word.split(" = ") for word in words.replace(",f", "+f").replace(",e", "+e").split(", "))
    fitting = override(run, {path: value.replace("+", ",") for path, value in changes.items()})
    assert problems(fitting, 64) == [] and peak(fitting, 64) <= available


def test_nothing_that_helps_is_said_too() -> None:
    with pytest.raises(MemoryPreflightError, match="use more ranks, or a smaller model"):
        refuse_if_too_large(qwen(), 64, Device(GIB))


def test_ranks_of_a_host_share_its_memory() -> None:
    run = recipe("debug_small")
    alone = predict_memory(workload_of_run(run, cluster_of("H100", 1)))
    needed = alone.total - alone.of("overhead")
    refuse_if_too_large(run, 1, Device(needed, host_ranks=1))
    with pytest.raises(MemoryPreflightError, match="1 ranks would need"):
        refuse_if_too_large(run, 1, Device(0.5 * needed, host_ranks=1))


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("debug") or name.endswith("_proxy")])
def test_small_runs_fit_everywhere(name: str) -> None:
    """Refusing what fits would be worse than not looking: half a GiB suffices for the smallest, four for all."""
    run = recipe(name)
    if not problems(run, 1):
        refuse_if_too_large(run, 1, Device(4 * GIB, host_ranks=1))


def test_cpu_ranks_are_not_told_to_use_their_own_host() -> None:
    """Offloading and states on the host free nothing there."""
    run = qwen(**{"memory.optimizer": "host", "parallel.sharding": "flat"})
    plain = predict_memory(workload_of_run(qwen(**{"parallel.sharding": "flat"}), cluster_of("H100", 64)))
    needed = 64 * (sum(plain.by_rank) / len(plain.by_rank) - plain.of("overhead"))
    refuse_if_too_large(run, 64, Device(needed, host_ranks=64))
    with pytest.raises(MemoryPreflightError) as caught:
        refuse_if_too_large(run, 64, Device(0.9 * needed, host_ranks=64))
    assert "offload" not in str(caught.value) and "optimizer = host" not in str(caught.value)


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    from moefold.ops.host_probe import available_host_bytes

    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 2000000\nfile 1000000\n")
    (tmp_path / "memory.max").write_text("5000000\n")
    assert available_host_bytes(tmp_path) == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(tmp_path) != 3_000_000


def test_available_memory_of_this_host_is_read() -> None:
    from moefold.ops.host_probe import available_host_bytes

    found = available_host_bytes()
    assert found is None or 2**20 < found < 2**50
    assert (found is None) == (not Path("/proc/meminfo").exists())
