"""The planner's states under flat sharding, narrow formats and places of optimizer states, against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import predict_memory
from moefold.plan.timing.step_time import muon_flops, predict_time, step_time
from moefold.plan.workload import Workload, changed
from moefold.recipes.catalog import recipe

WORLD = 256
FSDP = changed(
    Workload(recipe("deepseek_v3"), cluster_of("H100", WORLD)),
    parallel={"pp": 4, "vpp": 4, "ep": 64, "schedule": "interleaved", "stages": None},
    data={"global_batch": 4096, "micro_batch": 1},
    precision={"params": "float32", "compute": "bfloat16"},
)
FLAT = changed(FSDP, parallel={"sharding": "flat"})


def parameters_of(workload: Workload) -> tuple[float, float]:
    """Of the fullest rank: all that it holds, and its share of them; from the gradients and moments of FLAT."""
    memory = predict_memory(workload)
    return memory.of("gradients") / 4, memory.of("optimizer") / 12


def states_of(workload: Workload) -> float:
    memory = predict_memory(workload)
    return sum(memory.of(group) for group in ("weights", "gradients", "optimizer"))


def test_flat_holds_six_bytes_per_parameter_and_twelve_per_share() -> None:
    held, share = parameters_of(FLAT)
    # 64 ranks hold one copy of the dense parameters, one rank the experts: their states are not cut at all.
    assert held / 64 < share < held
    assert states_of(FLAT) == pytest.approx(6 * held + 12 * share)
    assert not any("gathered" in line.name for line in predict_memory(FLAT).lines)


def test_weights_that_are_gathered_as_they_are_kept_have_no_second_copy() -> None:
    held, share = parameters_of(FLAT)
    wide = changed(FLAT, precision={"gather": "float32"})
    assert states_of(wide) == pytest.approx(8 * held + 8 * share)


@pytest.mark.parametrize(
    "precision, each",
    [
        ({"moments": "bfloat16"}, 8.0),
        ({"master": "remainder"}, 10.0),
        ({"master": "remainder", "moments": "bfloat16"}, 6.0),
        ({"moments": "float8"}, 4.0 + 2 * (1 + 1 / 128)),
    ],
)
def test_formats_of_states(precision: dict[str, object], each: float) -> None:
    held, share = parameters_of(FLAT)
    assert states_of(changed(FLAT, precision=precision)) == pytest.approx(6 * held + each * share)


def test_muon_has_one_moment_of_hidden_matrices() -> None:
    held, share = parameters_of(FLAT)
    run = replace(FLAT.run, optim=replace(FLAT.run.optim, algorithm="muon"))
    ends = 129280 * 7168 / 64
    assert states_of(replace(FLAT, run=run)) == pytest.approx(6 * held + 8 * share + 4 * ends, rel=1e-3)


@pytest.mark.parametrize("place", ["host", "cpu"])
def test_states_outside_of_the_device_cost_time(place: str) -> None:
    """Main weights stay; a remainder goes with the moments."""
    held, share = parameters_of(FLAT)
    away = changed(FLAT, memory={"optimizer": place})
    assert states_of(away) == pytest.approx(6 * held + 4 * share)
    assert states_of(changed(away, precision={"master": "remainder"})) == pytest.approx(6 * held)
    assert step_time(away).optimizer > 2 * step_time(FLAT).optimizer


def test_narrow_states_are_read_faster() -> None:
    narrow = changed(FLAT, precision={"moments": "bfloat16"})
    assert step_time(narrow).optimizer < step_time(FLAT).optimizer


def test_newton_schulz_of_deepseek_v3() -> None:
    """Experts alone: 58 layers of 256 times three matrices of 2048 x 7168, five iterations of 4 a^2 b + 2 a^3."""
    optim = replace(FLAT.run.optim, algorithm="muon")
    experts = 58 * 256 * 3 * 5 * (4 * 2048**2 * 7168 + 2 * 2048**3)
    assert experts < muon_flops(recipe("deepseek_v3").model, optim) < 1.1 * experts
    muon = replace(FLAT, run=replace(FLAT.run, optim=optim))
    assert step_time(muon).optimizer > step_time(FLAT).optimizer


def test_flat_sends_six_bytes_per_parameter_and_step_where_fsdp_sends_eight_per_microbatch() -> None:
    """Without a pipeline FSDP2 gathers twice and scatters once for every microbatch."""
    layout = {"pp": 1, "vpp": 1, "ep": 8, "schedule": "1f1b"}
    run = replace(recipe("qwen3_30b_a3b"), parallel=replace(recipe("qwen3_30b_a3b").parallel, **layout))
    few, many = (
        changed(Workload(run, cluster_of("H100", 64)), data={"global_batch": 64 * count, "micro_batch": 1})
        for count in (1, 16)
    )

    def sent(workload: Workload) -> float:
        names = ("sharded parameters", "gradients and parameters")
        return sum(line.seconds for line in predict_time(workload).lines if line.name in names)

    def flat(workload: Workload) -> Workload:
        return changed(workload, parallel={"sharding": "flat"})

    assert sent(many) == pytest.approx(16 * sent(few), rel=0.05)
    assert sent(flat(many)) == pytest.approx(sent(flat(few)), rel=0.05)
    assert sent(flat(few)) == pytest.approx(sent(few) * 6 / 8, rel=0.2)
