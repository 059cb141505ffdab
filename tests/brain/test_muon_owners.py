"""Which matrices Muon sees, and who orthogonalises them: every element once, work shared out, without torch."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from moefold.blueprint.muon_matrices import (
    MuonParameter,
    deal,
    intersection,
    matrices_of,
    muon_algorithm,
    newton_schulz_flops,
)
from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.plan.stage_contents import muon_parameters
from moefold.recipes.catalog import RECIPES, recipe
from moefold.topology.folded_layout import fold


def shapes(name: str, parameter: str) -> list[tuple[int, int]]:
    model = recipe(name).model
    spec = next(spec for spec in parameters(model) if spec.name == parameter)
    matrices = matrices_of(spec, model)
    return [matrices.shape(number) for number in range(len(matrices))]


def test_matrices_by_hand() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 for queries, 128 + 128 for keys and values; 256 experts of 2048."""
    attention, experts = "layers.5.attention.", "layers.5.feed_forward.experts."
    assert shapes("deepseek_v3", attention + "q_up.weight") == [(192, 1536)] * 128
    assert shapes("deepseek_v3", attention + "kv_up.weight") == [(128, 512)] * 256
    assert shapes("deepseek_v3", attention + "kv_down.weight") == [(512, 7168), (64, 7168)]
    assert shapes("deepseek_v3", attention + "q_down.weight") == [(1536, 7168)]
    assert shapes("deepseek_v3", attention + "out.weight") == [(7168, 16384)]
    assert shapes("deepseek_v3", experts + "gate_up") == [(2048, 7168)] * 512
    assert shapes("deepseek_v3", experts + "down") == [(7168, 2048)] * 256
    assert shapes("mixtral_8x7b", attention + "q.weight") == [(128, 4096)] * 32
    assert shapes("mixtral_8x7b", attention + "k.weight") == [(128, 4096)] * 8


@pytest.mark.parametrize("name", ["deepseek_v3_proxy", "qwen3_30b_a3b_proxy", "gpt_oss_20b_proxy", "kimi_k2_proxy"])
def test_hidden_matrices_alone_are_muons(name: str) -> None:
    by_adamw = {spec.name for spec in parameters(recipe(name).model) if muon_algorithm(spec.name, spec.kind) == "adamw"}
    ends = ("norm.weight", "bias", "sinks", "embedding.weight", "head.weight", "router.weight", "shared_gate.weight")
    assert all(name.endswith((*ends, "_bias")) or "norms." in name for name in by_adamw)
    assert all(len(spec.shape) >= 2 for spec in by_muon(recipe(name)))


def by_muon(run: RunConfig) -> list[ParameterSpec]:
    return [spec for spec in parameters(run.model) if muon_algorithm(spec.name, spec.kind) == "muon"]


@pytest.mark.parametrize("sharding", ["fsdp", "flat"])
@pytest.mark.parametrize(
    "degrees", [{}, {"tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "ep": 4}, {"dp_replicate": 2, "ep": 8}]
)
def test_parts_tile_every_matrix_and_owners_hold_them(degrees: dict[str, int], sharding: str) -> None:
    run = override(recipe("debug_mla"), {"optim.algorithm": "muon", "parallel.sharding": sharding})
    run = replace(run, parallel=replace(run.parallel, **degrees))
    found = muon_parameters(run, fold(run.parallel, 8), 0)
    assert [parameter.name for parameter in found] == [spec.name for spec in by_muon(run)]
    dealing = deal(found, 5, limit=1 << 12)
    assert len(dealing.names) > 1 and sum(map(len, dealing.names)) == len(found)
    matrices = [matrix for bucket in dealing.matrices for matrix in bucket]
    assert len(matrices) == sum(len(parameter.matrices) for parameter in found)
    for matrix in matrices:
        parts = [part for part, _ in matrix.parts]
        assert sum(prod(b - a for a, b in part) for part in parts) == prod(matrix.shape)
        for number, part in enumerate(parts):
            assert intersection(part, matrix.spans) == part
            assert not any(_overlap(part, other) for other in parts[:number])
        assert any(matrix.owner in holders for _, holders in matrix.parts)
        assert all(matrix.source(holders) in holders for _, holders in matrix.parts)
    assert dealing == deal(found, 5, limit=1 << 12)


def _overlap(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(a < b for a, b in intersection(one, other))


def test_longest_first_is_within_a_third_of_the_best() -> None:
    """Graham's bound: at most 4/3 of the mean or of the costliest job, whichever is more."""
    run = override(recipe("debug_small"), {"model.num_layers": 3})
    whole = [
        MuonParameter(matrices_of(spec, run.model), ((tuple((0, size) for size in spec.shape),),) * 5)
        for spec in by_muon(run)
    ]
    flops = deal(whole, 5).flops
    costs = [newton_schulz_flops(*each.matrices.shape(i), 5) for each in whole for i in range(len(each.matrices))]
    assert sum(flops) == sum(costs) and max(flops) <= 4 / 3 * max(sum(costs) / 5, max(costs))


def test_deepseek_v3_costs_an_eighth_of_a_petaflop_per_rank() -> None:
    """256 ranks, pp4 vpp4 ep64: about 58 layers' experts and attention over 256 ranks."""
    run = override(
        RECIPES["deepseek_v3"](),
        {
            "optim.algorithm": "muon",
            "parallel.pp": 4,
            "parallel.vpp": 4,
            "parallel.ep": 64,
            "parallel.schedule": "interleaved",
        },
    )
    flops = deal(muon_parameters(run, fold(run.parallel, 256), 0), 5).flops
    assert len(flops) == 64 and 0.115e15 < sum(flops) / 64 < 0.12e15 and max(flops) < 0.14e15


def test_momentum_of_one_is_refused() -> None:
    run = override(recipe("debug_tiny"), {"optim.algorithm": "muon"})
    assert problems(run) == []
    (problem,) = problems(override(run, {"optim.muon.momentum": 1.0}))
    assert problem.path == "optim.muon.momentum" and "fade" in problem.message


@pytest.mark.parametrize(
    ("path", "value"),
    [("precision.moments", "bfloat16"), ("precision.master", "remainder"), ("memory.optimizer", "cpu")],
)
def test_formats_that_adamw_alone_has_are_refused(path: str, value: str) -> None:
    run = override(recipe("debug_tiny"), {"optim.algorithm": "muon", path: value})
    assert any(problem.path == path and "Muon" in problem.message for problem in problems(run))
