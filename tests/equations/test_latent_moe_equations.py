"""LatentMoE's presets keep what section 7.3 of the Megatron Core MoE report claims of them, for every MoE recipe.

With a = d / l: dispatch sends 1/a of the bytes per row and an expert has 1/a of the weights. l-MoE_eff has a E experts
and the same top-k; l-MoE_acc has a E and a K, costs as much as the plain layer and has at least C(E, K)^a choices.
Sizes are written out here from d, l, m, E and K; nothing of `recipes/latent_moe.py` is used but its result.
"""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest

from moefold import check, load_run
from moefold.blueprint.flops import forward_flops_per_token
from moefold.blueprint.model_shape import MoE
from moefold.blueprint.param_counts import count_parameters
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, UnknownNameError
from moefold.hardware.cluster import cluster_of
from moefold.plan.traffic import dispatch_bytes
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import RECIPES, recipe
from moefold.recipes.latent_moe import with_latent_experts

A = 4
NAMES = [name for name in RECIPES if not name.endswith("_proxy") and RECIPES[name]().model.dim % A == 0]


def sent(run: RunConfig) -> float:
    """Bytes that a rank sends in one dispatch, a row per assignment, over eight ranks."""
    parallel = replace(run.parallel, dispatcher="all_to_all", ep=8, tp=1, pp=1, vpp=1, cp=1, stages=None)
    data = replace(run.data, global_batch=8, micro_batch=1)
    workload = workload_of_run(replace(run, parallel=parallel, data=data), cluster_of("H100", 8))
    moe = next(layer.feed for layer in workload.model.layers if isinstance(layer.feed, MoE))
    found = dispatch_bytes(workload, moe)
    return found.inside + found.outside


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_as_the_report_defines_them(name: str) -> None:
    plain, efficiency, accuracy = recipe(name), recipe(f"{name}+latent_efficiency"), recipe(f"{name}+latent_accuracy")
    d, moe = plain.model.dim, plain.model.moe
    assert moe is not None
    m, experts, top_k, layers = moe.expert_hidden_dim, moe.num_experts, moe.top_k, plain.model.num_layers
    layers -= plain.model.num_dense_layers
    biased = moe.expert_mlp_bias
    for run, times in ((efficiency, 1), (accuracy, A)):
        latent = run.model.moe
        assert latent is not None
        assert (latent.latent_dim, latent.num_experts, latent.top_k) == (d // A, A * experts, times * top_k)
        assert replace(run.model, moe=None) == replace(plain.model, moe=None)
        # E matrices of 3 m d, and a E of 3 m l, are equally many weights; biases are of the experts.
        bias = A * experts * (2 * m + d // A) * biased
        assert count_parameters(run.model).experts == layers * (3 * m * (d // A) * A * experts + bias)
        if not biased:
            assert count_parameters(run.model).experts == count_parameters(plain.model).experts
            router = (A - 1) * experts * (d + moe.router.logit_bias)
            assert count_parameters(run.model).total - count_parameters(plain.model).total == layers * (
                router + 2 * d * (d // A)
            )
        # Rows of l: a fraction of the bytes, unless there are as many more of them.
        assert sent(run) == pytest.approx(sent(plain) * times / A)
        assert comb(A * experts, times * top_k) >= comb(experts, top_k) ** times


@pytest.mark.parametrize("name", NAMES)
def test_work_of_a_token(name: str) -> None:
    """The experts' FLOPs are a quarter in l-MoE_eff and the same in l-MoE_acc, beside the two projections."""
    plain = recipe(name)
    assert plain.model.moe is not None
    d, layers = plain.model.dim, plain.model.num_layers - plain.model.num_dense_layers
    routed = 2 * layers * 3 * d * plain.model.moe.expert_hidden_dim * plain.model.moe.top_k
    assert forward_flops_per_token(plain.model, 4096).routed == routed
    for preset, share in (("latent_efficiency", 1 / A), ("latent_accuracy", 1.0)):
        run = recipe(f"{name}+{preset}")
        projections = 2 * layers * 2 * d * (d // A)
        assert forward_flops_per_token(run.model, 4096).routed == pytest.approx(routed * share + projections)


@pytest.mark.parametrize("preset", ["latent_efficiency", "latent_accuracy"])
def test_latent_forms_of_recipes_pass_the_checks(preset: str) -> None:
    for name in RECIPES:
        if RECIPES[name]().model.dim % A == 0:
            assert check(load_run(f"{name}+{preset}"), training=False) == []


def test_what_has_no_latent_form_is_said() -> None:
    with pytest.raises(ConfigError, match="a latent dim already"):
        with_latent_experts(recipe("debug_tiny+latent_accuracy"), "latent_accuracy")
    with pytest.raises(ConfigError, match="does not divide"):
        with_latent_experts(recipe("debug_tiny"), "latent_accuracy", ratio=7)
    with pytest.raises(UnknownNameError, match="latent_accuracy"):
        recipe("debug_tiny+latent_acc")
