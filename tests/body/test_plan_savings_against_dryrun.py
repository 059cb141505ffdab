"""The planner against the dry run under savings: sharding x retained steps x recomputed phases x formats x layouts.

Peaks agree within 2 %, and each single saving makes the peak fall by the planned bytes within 1 % of these. Some are
looked at in CI, all of them at night.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import get_args

import pytest
from tests.body.test_plan_against_dryrun import Case, case, rehearsed

from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.memory import RetainedStep
from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import memory_at
from moefold.plan.published.predict_records import allocated
from moefold.plan.workload import workload_of_run

LAYOUTS = {
    "latent, pipeline": case("deepseek_v2_lite", 16, 0, layers=5, batch=32, pp=2, ep=8),
    "latent, last stage": case("deepseek_v2_lite", 16, 1, layers=5, batch=32, pp=2, ep=8),
    "no pipeline": case("qwen3_30b_a3b", 16, layers=3, batch=32, ep=8),
    "pairs": case("deepseek_v2_lite", 16, 0, layers=9, batch=32, pp=2, ep=8, schedule="1f1b_overlapped"),
    "tensor parallel": case("mixtral_8x7b", 16, layers=3, batch=32, tp=2, ep=4, etp=2),
}
CHOICES: dict[str, dict[str, object]] = {
    "all kept": {},
    "experts again": {"memory.recompute": "[experts]"},
    "latents up": {"memory.retain.mla_up": "discard"},
    "first GEMM": {"memory.retain.gate_up": "discard", "memory.retain.activation": "discard"},
    "norms": {"memory.retain.attention_norm": "discard", "memory.retain.feed_norm": "discard"},
    "attention away": {"memory.retain.core": "offload"},
    "narrow moments": {"precision.moments": "bfloat16", "precision.moments_rounding": "stochastic"},
    "states on the host": {"memory.optimizer": "host"},
}
SHARDINGS = ("fsdp", "flat")

# A dense and an MoE layer on the first stage, with four microbatches in flight.
TWO_LAYERS = case("deepseek_v2_lite", 16, layers=8, batch=64, pp=4, ep=4, stages="Et*2|t*2|t*2|t*2L")
SINGLE: dict[str, dict[str, object]] = {
    f"{step}: {choice}": {f"memory.retain.{step}": choice}
    for step, choice in product(get_args(RetainedStep), ("discard", "offload"))
} | {
    "bfloat16 moments": {"precision.moments": "bfloat16", "precision.moments_rounding": "stochastic"},
    "float8 moments": {"precision.moments": "float8", "precision.moments_rounding": "stochastic"},
    "remainder": {"precision.master": "remainder"},
    "states on the host": {"memory.optimizer": "host"},
    "update on the CPU": {"memory.optimizer": "cpu"},
}
# Of a layer whose norm comes back late, of the next group on its way, and of a layer that is not the last of its stage.
IN_CI = ("shared: discard; flat", "rows: offload; flat", "dense: offload; flat", "gate_up: offload; flat")
# A forward beside a backward, that is ahead of it by a dense layer and half an MoE layer.
PAIRS_IN_CI = ("pairs; flat; all kept",)


def combinations() -> list[str]:
    found = []
    for layout, sharding, choice in product(LAYOUTS, SHARDINGS, CHOICES):
        if not problems(combined(f"{layout}; {sharding}; {choice}").run, LAYOUTS[layout].world):
            found.append(f"{layout}; {sharding}; {choice}")
    return found


def combined(name: str) -> Case:
    layout, sharding, choice = name.split("; ")
    start = LAYOUTS[layout]
    return Case(override(start.run, {"parallel.sharding": sharding, **CHOICES[choice]}), start.world, start.stage)


def off_by(name: str) -> float:
    """Predicted over rehearsed, less one."""
    chosen = combined(name)
    workload = workload_of_run(chosen.run, cluster_of("H100", chosen.world))
    return allocated(memory_at(workload, chosen.stage)) / rehearsed(chosen).peak_total - 1


def single_savings() -> list[str]:
    """Each choice under each sharding that may have it; a remainder needs weights that are kept."""
    named = [f"{choice}; {sharding}" for choice, sharding in product(SINGLE, SHARDINGS)]
    return [name for name in named if not problems(saving(name)[1].run, 16)]


def saving(name: str) -> tuple[Case, Case]:
    """Without and with it. Rows can only be made again where none were received."""
    choice, sharding = name.split("; ")
    changes = {"parallel.sharding": sharding, "parallel.ep": 1 if choice == "rows: discard" else 4}
    run = override(TWO_LAYERS.run, changes)
    return Case(run, 16), Case(override(run, SINGLE[choice]), 16)


@cache
def peaks(chosen: Case) -> tuple[float, float]:
    """Predicted and rehearsed."""
    workload = workload_of_run(chosen.run, cluster_of("H100", chosen.world))
    return allocated(memory_at(workload, chosen.stage)), rehearsed(chosen).peak_total


def test_every_choice_of_retention_is_among_the_single_savings() -> None:
    assert {name.split("; ")[0] for name in single_savings()} == set(SINGLE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name in IN_CI else "nightly"))
        for name in single_savings()
    ],
)
def test_the_peak_falls_by_the_planned_bytes(name: str) -> None:
    before, after = map(peaks, saving(name))
    planned, seen = (old - new for old, new in zip(before, after, strict=True))
    assert planned == pytest.approx(seen, rel=0.01) and seen > 0


def test_there_are_many_combinations() -> None:
    assert len(combinations()) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["all kept", "norms"])
def test_peaks_of_the_last_stage(choice: str) -> None:
    assert abs(off_by(f"latent, last stage; flat; {choice}")) < 0.02


@pytest.mark.slow
def test_deferred_weight_gradients_hold_what_was_discarded_or_away() -> None:
    """Retained steps save nothing of a microbatch whose weight gradients wait: both operands are there."""
    start = case(
        "deepseek_v2_lite",
        16,
        3,
        layers=12,
        batch=64,
        pp=4,
        ep=4,
        schedule="zb_h1",
        stages=("Et*3|" + "t*3|" * 2 + "t*3L"),
    )
    retained = {
        "mla_up": "discard",
        "activation": "discard",
        "rows": "offload",
        "gate_up": "offload",
        "core": "offload",
    }
    run = override(start.run, {f"memory.retain.{step}": choice for step, choice in retained.items()})
    memory = memory_at(workload_of_run(run, cluster_of("H100", 16)), 3)
    (deferred,) = (line.bytes for line in memory.lines if line.name == "deferred weight gradients")
    seen = rehearsed(Case(run, 16, 3))
    assert deferred == pytest.approx(seen.peak["activations"], rel=0.02)
    assert allocated(memory) == pytest.approx(seen.peak_total, rel=0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name in PAIRS_IN_CI else "nightly"))
        for name in combinations()
    ],
)
def test_peaks_agree(name: str) -> None:
    assert abs(off_by(name)) < 0.02


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["microbatches in flight", "no pipeline"])
@pytest.mark.parametrize("steps", [("rows", "gate_up", "activation"), ("gate_up",)])
def test_pages_are_planned_as_they_are_held(layout: str, steps: tuple[str, ...]) -> None:
    """Buffers are for half as many rows again as an even routing has. The backward of a layer reads its pages back into
    such buffers, so that pages help where several layers or microbatches are in flight."""
    start = {"microbatches in flight": TWO_LAYERS, "no pipeline": LAYOUTS["no pipeline"]}[layout]
    changes = {"parallel.dispatcher": "all_to_all_bounded", "parallel.row_bound": 1.5, "parallel.pair_bound": 1.6}
    kept = override(start.run, {"parallel.sharding": "flat", **changes})
    paged = override(kept, {f"memory.retain.{step}": "page" for step in steps})
    assert problems(paged, 16) == []
    before, after = peaks(Case(kept, 16)), peaks(Case(paged, 16))
    assert before[0] == pytest.approx(before[1], rel=0.02) and after[0] == pytest.approx(after[1], rel=0.02)
    assert after[0] < before[0] and after[1] < before[1]
