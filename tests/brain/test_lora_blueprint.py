"""Adapters in the blueprint: names, shapes and cuts; frozen parameters; and what the checks refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.blueprint.lora_adapters import adapter_name, is_adapter, weight_of
from moefold.blueprint.param_groups import is_trained, update_rule
from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.blueprint.sharding import Cut, cuts, partial_axes
from moefold.checks.kernels import experts_in_use
from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.model import LoraConfig
from moefold.config.optim import OptimConfig, ParamGroupConfig
from moefold.config.run import RunConfig
from moefold.plan.stage_contents import flat_layout_of
from moefold.recipes.catalog import RECIPES
from moefold.topology.folded_layout import fold

LORA = LoraConfig(rank=3, alpha=6.0)


def specs_of(name: str, lora: LoraConfig = LORA) -> dict[str, ParameterSpec]:
    return {spec.name: spec for spec in parameters(replace(RECIPES[name]().model, lora=lora))}


def with_lora(name: str, *changes: str) -> RunConfig:
    return override(RECIPES[name](), ["model.lora.rank=8", "optim.trained=adapters", *changes])


def test_shapes_are_those_of_low_rank_factors() -> None:
    """The product of B and A has the shape of the weight, stack by stack."""
    specs = specs_of("deepseek_v3_proxy")
    adapted = [spec for spec in specs.values() if spec.name.endswith("lora_a")]
    assert len(adapted) > 20
    for a in adapted:
        weight, b = specs[weight_of(a.name)], specs[adapter_name(weight_of(a.name), "lora_b")]
        assert (a.shape[-2], b.shape[-1]) == (LORA.rank, LORA.rank)
        assert (*b.shape[:-1], a.shape[-1]) == weight.shape
        assert a.shape[:-2] == weight.shape[: len(a.shape) - 2]


def test_each_target_has_a_pair_and_nothing_else_has() -> None:
    specs = specs_of("deepseek_v3_proxy", replace(LORA, targets=("*.experts.*", "layers.0.attention.out.*")))
    weights = {weight_of(name) for name in specs if is_adapter(name)}
    moe = {name.rpartition(".experts.")[0] for name in specs if ".experts." in name}
    assert weights == {f"{block}.experts.{leaf}" for block in moe for leaf in ("gate_up", "down")} | {
        "layers.0.attention.out.weight"
    }
    assert not any(".router." in name and is_adapter(name) for name in specs_of("deepseek_v3_proxy"))


@pytest.mark.parametrize(
    ("name", "expected", "partial"),
    [
        ("layers.0.attention.q_up.lora_a", (), ("tp",)),
        ("layers.0.attention.q_up.lora_b", (Cut("tp", 0),), ()),
        ("layers.0.attention.out.lora_a", (Cut("tp", 1),), ()),
        ("layers.0.attention.out.lora_b", (), ("tp",)),
        ("layers.0.attention.kv_down.lora_a", (), ("tp",)),
        ("layers.0.feed_forward.gate_up_lora_a", (), ("tp",)),
        ("layers.0.feed_forward.gate_up_lora_b", (Cut("tp", 1),), ()),
        ("layers.0.feed_forward.down_lora_a", (Cut("tp", 1),), ()),
        ("layers.2.feed_forward.shared.down_lora_b", (), ("tp",)),
        ("layers.2.feed_forward.experts.gate_up_lora_a", (Cut("ep", 0),), ("etp",)),
        ("layers.2.feed_forward.experts.gate_up_lora_b", (Cut("ep", 0), Cut("etp", 2)), ()),
        ("layers.2.feed_forward.experts.down_lora_a", (Cut("ep", 0), Cut("etp", 2)), ()),
        ("layers.2.feed_forward.experts.down_lora_b", (Cut("ep", 0),), ("etp",)),
    ],
)
def test_a_is_cut_along_the_input_and_b_along_the_output(
    name: str, expected: tuple[Cut, ...], partial: tuple[str, ...]
) -> None:
    spec = specs_of("deepseek_v3_proxy")[name]
    assert (cuts(spec), partial_axes(spec)) == (expected, partial)


def test_what_is_trained() -> None:
    adapters = OptimConfig(trained="adapters", frozen=("*.experts.*",))
    assert is_trained("layers.0.attention.q.lora_a", adapters)
    assert not is_trained("layers.0.attention.q.weight", adapters)
    assert not is_trained("layers.0.feed_forward.experts.down_lora_b", adapters)
    routers = OptimConfig(frozen=("*.router.*",))
    assert update_rule("layers.0.feed_forward.router.weight", "router", routers).algorithm == "frozen"
    assert update_rule("layers.0.attention.q.weight", "matrix", routers).algorithm == "adamw"
    assert is_trained("layers.0.attention.q.weight", OptimConfig())


def test_flat_buckets_are_trained_or_frozen_as_a_whole() -> None:
    run = with_lora("debug_small", "parallel.sharding=flat", "parallel.ep=2")
    buckets = flat_layout_of(run, fold(run.parallel, 2), 0)
    assert {bucket.trained for bucket in buckets} == {True, False}
    assert all(is_trained(each.name, run.optim) == bucket.trained for bucket in buckets for each in bucket.parameters)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (["model.lora.targets=[layers.*.attn.*]"], "model.lora.targets.0", "matches no weight"),
        (["model.lora.targets=[]"], "model.lora.targets", "is empty"),
        (["model.lora.targets=[*.router.*]"], "model.lora.targets.0", "matches no weight"),
        (["model.lora.alpha=0"], "model.lora.alpha", ""),
        (["model.lora.rank=0"], "model.lora.rank", ""),
        (["model.lora.rank=6", "kernels.experts=grouped"], "model.lora.rank", "multiple of 16 bytes"),
        (["kernels.experts=fused"], "kernels.experts", "cannot have adapters"),
        (["optim.frozen=[*.routr.*]"], "optim.frozen.0", "matches no parameter"),
        (["optim.frozen=[*lora*]"], "optim.frozen", "no parameter is left"),
        (["optim.qk_clip=100.0", "model.attention.qk_norm=none"], "optim.qk_clip", "have adapters"),
        (["kernels.linear=transformer_engine"], "kernels.linear", "not tried with adapters"),
    ],
)
def test_what_cannot_work_is_refused(changes: list[str], path: str, words: str) -> None:
    found = problems(with_lora("debug_small", *changes))
    assert any(problem.path == path and words in problem.message for problem in found), found


def test_muon_is_not_for_adapters() -> None:
    run = with_lora("debug_small")
    data = replace(run, optim=replace(run.optim, groups=(ParamGroupConfig(match="*.experts.*", algorithm="muon"),)))
    assert any(problem.path == "optim.groups.0.algorithm" for problem in problems(data))


def test_adapters_alone_need_adapters() -> None:
    run = override(RECIPES["debug_small"](), ["optim.trained=adapters"])
    (problem,) = problems(run)
    assert problem.path == "optim.trained" and "model.lora" in problem.fix


def test_auto_takes_experts_that_can_have_adapters() -> None:
    run = override(with_lora("debug_small"), ["kernels.experts=auto"])
    plain = override(RECIPES["debug_small"](), ["kernels.experts=auto"])
    assert experts_in_use(plain, "cpu") == "fused"
    assert experts_in_use(run, "cpu") in ("grouped", "sequential")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (["data.packing=concat"], "data.packing"),
        (["data.global_batch=7", "data.micro_batch=1"], "data.global_batch"),
        (["optim.trained=all"], "train.dpo.reference"),
        (["model.num_mtp=1"], "model.num_mtp"),
        (["data.validation=builtin"], "data.validation"),
        (["train.dpo.beta=0"], "train.dpo.beta"),
    ],
)
def test_what_dpo_cannot_do_is_refused(changes: list[str], path: str) -> None:
    good = ["train.dpo.beta=0.1", "data.packing=bin_packed", "data.global_batch=8", "data.validation=null"]
    assert problems(with_lora("debug_small", *good)) == []
    assert path in [problem.path for problem in problems(with_lora("debug_small", *good, *changes))]
