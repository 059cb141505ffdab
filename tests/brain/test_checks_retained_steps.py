"""Rules about what is kept of a block's steps: each has a run that it accepts and one that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moefold.checks import kernels, retained_steps
from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.recipes.catalog import recipe

Rule = Callable[[RunConfig], list[Problem] | Problem | None]
# The rule, changes of debug_mla that it accepts, changes that it refuses, and the path that it names.
CASES: list[tuple[Rule, dict[str, Any], dict[str, Any], str]] = [
    (retained_steps.named_steps_exist, {"mla_up": "discard"}, {"dense": "discard"}, "memory.retain.dense"),
    (
        retained_steps.steps_are_not_in_recomputed_phases,
        {"mla_up": "discard", "memory.recompute": ["experts"]},
        {"mla_up": "discard", "memory.recompute": ["attention"]},
        "memory.retain.mla_up",
    ),
    (
        retained_steps.collectives_run_once,
        {"rows": "offload", "parallel.ep": 2},
        {"rows": "discard", "parallel.ep": 2},
        "memory.retain.rows",
    ),
    (
        retained_steps.rows_are_permuted_by_us,
        {"rows": "discard"},
        {"rows": "discard", "kernels.permute": "transformer_engine"},
        "memory.retain.rows",
    ),
    (
        retained_steps.rows_are_what_experts_multiply,
        {"rows": "discard"},
        {"rows": "offload", "model.moe.weight_at": "input"},
        "memory.retain.rows",
    ),
    (
        retained_steps.compiled_regions_keep,
        {"kernels.compile": "regions"},
        {"feed_norm": "discard", "kernels.compile": "regions"},
        "memory.retain.feed_norm",
    ),
    (
        retained_steps.quantized_steps_enter_narrow_matmuls,
        {"rows": "quantize", "attention_norm": "quantize", "precision.recipe": "mxfp8"},
        {"rows": "quantize"},
        "memory.retain.rows",
    ),
    (
        retained_steps.quantized_steps_are_not_read_again,
        {"rows": "quantize", "activation": "discard", "precision.recipe": "mxfp8"},
        {"rows": "quantize", "gate_up": "discard", "precision.recipe": "mxfp8"},
        "memory.retain.rows",
    ),
    (
        retained_steps.paged_steps_are_rows_of_a_bound,
        {"rows": "page", "parallel.ep": 2, "parallel.dispatcher": "all_to_all_bounded"},
        {"rows": "page", "parallel.ep": 2},
        "memory.retain.rows",
    ),
    (
        retained_steps.paged_steps_are_rows_of_a_bound,
        {"activation": "page", "parallel.ep": 2, "parallel.dispatcher": "all_to_all_bounded"},
        {"core": "page", "parallel.ep": 2, "parallel.dispatcher": "all_to_all_bounded"},
        "memory.retain.core",
    ),
    (
        retained_steps.pages_hold_an_even_routing,
        {"rows": "page", "parallel.dispatcher": "all_to_all_bounded", "memory.page_bound": 1.0},
        {"rows": "page", "parallel.dispatcher": "all_to_all_bounded", "memory.page_bound": 0.9},
        "memory.page_bound",
    ),
    (
        retained_steps.pages_hold_an_even_routing,
        {"rows": "page", "parallel.dispatcher": "all_to_all_bounded", "memory.page_spill": 0.5},
        {"rows": "page", "parallel.dispatcher": "all_to_all_bounded", "memory.page_spill": 1.0},
        "memory.page_spill",
    ),
    (
        retained_steps.pages_hold_an_even_routing,
        {"rows": "page", "parallel.dispatcher": "all_to_all_bounded", "memory.page_rows": 1},
        {"memory.page_rows": 32},
        "memory.page_rows",
    ),
    (retained_steps.host_bound_is_positive, {"memory.host_gib": 1}, {"memory.host_gib": 0}, "memory.host_gib"),
    (
        kernels.fused_experts_keep_their_first_gemm,
        {"gate_up": "discard", "kernels.experts": "grouped"},
        {"gate_up": "discard", "kernels.experts": "fused"},
        "memory.retain.gate_up",
    ),
    (
        kernels.fused_experts_keep_their_first_gemm,
        {"rows": "page", "kernels.experts": "grouped"},
        {"rows": "page", "kernels.experts": "fused", "parallel.dispatcher": "all_to_all_bounded"},
        "memory.retain.rows",
    ),
]


def _run(changes: dict[str, Any]) -> RunConfig:
    whole = {key if "." in key else f"memory.retain.{key}": value for key, value in changes.items()}
    return override(recipe("debug_mla"), {"model.num_dense_layers": 0, "kernels.experts": "grouped"} | whole)


@pytest.mark.parametrize(("rule", "good", "bad", "path"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_rule(rule: Rule, good: dict[str, Any], bad: dict[str, Any], path: str) -> None:
    assert not rule(_run(good))
    found = rule(_run(bad))
    (problem,) = found if isinstance(found, list) else [found]
    assert problem is not None and problem.path == path and problem.message and problem.fix
    assert problem in problems(_run(bad))


def test_every_rule_has_a_case() -> None:
    assert set(retained_steps.RULES) <= {case[0] for case in CASES}


def test_a_preset_skips_what_a_model_does_not_have_and_names_itself() -> None:
    run = override(recipe("debug_tiny"), {"memory.preset": "fine_grained"})
    assert problems(run) == []
    problem = retained_steps.compiled_regions_keep(override(run, {"kernels.compile": "regions"}))
    assert problem is not None and problem.path == "memory.preset"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate_up": "quantize"}, "read by the activation"),
        ({"core": "quantize"}, "a narrow copy would be one more"),
        ({"mla_up": "quantize"}, "read by attention"),
        ({"activation": "quantize", "precision.recipe": "bf16"}, "bf16 has no narrow operands"),
        # The router of an MoE layer keeps it wide, and this model has no other layers.
        ({"feed_norm": "quantize"}, "no narrow matmul"),
        ({"latent_norm": "quantize", "precision.wide": ["*.q_up", "*.kv_up"]}, "no narrow matmul"),
    ],
)
def test_why_a_step_is_not_quantized(changes: dict[str, Any], words: str) -> None:
    (problem,) = retained_steps.quantized_steps_enter_narrow_matmuls(_run({"precision.recipe": "mxfp8"} | changes))
    assert words in problem.message


def test_queries_without_latents_are_recomputed_from_the_norm() -> None:
    changes = {"attention_norm": "quantize", "mla_up": "discard", "precision.recipe": "mxfp8"}
    assert not retained_steps.quantized_steps_are_not_read_again(_run(changes))
    (problem,) = retained_steps.quantized_steps_are_not_read_again(_run(changes | {"model.attention.q_latent": None}))
    assert problem.path == "memory.retain.attention_norm"
