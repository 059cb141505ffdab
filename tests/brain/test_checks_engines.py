"""What other libraries' dispatchers and grouped GEMMs cannot do is refused before anything is installed."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

import moefold
from moefold.checks.engine_limits import RULES
from moefold.checks.kernels import kernels_in_use
from moefold.checks.run_all import _flat, problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.plan.collective_counts import messages
from moefold.plan.dispatch_choice import dispatcher_in_use, planned_as
from moefold.plan.report.proposal_report import terminal_report
from moefold.recipes.catalog import recipe


def run_of(*words: str) -> RunConfig:
    return override(recipe("qwen3_30b_a3b"), [f"--{word}" for word in words])


CASES: list[tuple[tuple[str, ...], str, str, str]] = [
    (("parallel.dispatcher=deepep", "parallel.etp=2"), "parallel.etp", "one rank per expert, but etp=2", "use 1"),
    (
        ("parallel.dispatcher=symmetric_memory", "parallel.dispatch_sms=20"),
        "parallel.dispatch_sms",
        "no kernel of the symmetric_memory dispatcher takes a number of SMs",
        "use null, or parallel.dispatcher deepep, deepep_elastic, hybridep",
    ),
    (("parallel.dispatch_sms=20",), "parallel.dispatch_sms", "no kernel of the all_to_all dispatcher", "use null"),
    (
        ("parallel.dispatcher=deepep", "parallel.dispatch_sms=7"),
        "parallel.dispatch_sms",
        "is 7, but the kernels of DeepEP's Buffer use SMs in pairs",
        "use 6 or 8",
    ),
    (
        ("parallel.dispatcher=deepep_elastic", "precision.compute=float32"),
        "precision.compute",
        "sends rows in bfloat16, not in float32",
        "use bfloat16, or use parallel.dispatcher all_to_all",
    ),
    (
        ("parallel.dispatcher=deepep", "model.moe.latent_dim=1028"),
        "model.moe.latent_dim",
        "rows of 1028 bfloat16 numbers are not a multiple of 16 bytes",
        "a multiple of 8",
    ),
    (
        ("parallel.dispatcher=deepep", "model.moe.num_experts=120", "parallel.ep=12"),
        "parallel.ep",
        "no configuration for 12 ranks",
        "deepep_elastic",
    ),
    (("parallel.dispatcher=symmetric_memory", "parallel.pp=2", "parallel.ep=16"), "parallel.pp", "pp=2", "use 1"),
    (("parallel.dispatcher=symmetric_memory", "parallel.ep=32"), "parallel.ep", "at most 16 ranks", "at most 16"),
    (("parallel.dispatcher=symmetric_memory", "parallel.ep=4"), "parallel.ep", "leaves 32", "a larger ep"),
    (
        ("kernels.experts=deepgemm", "precision.compute=float32"),
        "kernels.experts",
        "computes from bfloat16, not from float32",
        "use grouped",
    ),
    (
        ("kernels.experts=transformer_engine", "precision.compute=float32"),
        "kernels.experts",
        "transformer_engine computes from bfloat16, not from float32",
        "use grouped",
    ),
    (
        ("kernels.linear=transformer_engine", "precision.compute=float32"),
        "kernels.linear",
        "multiplies bfloat16, not float32",
        "use torch",
    ),
    (
        ("kernels.experts=mxfp8", "model.moe.expert_hidden_dim=776"),
        "model.moe.expert_hidden_dim",
        "776 values (experts, etp=1) do not divide into blocks of 32",
        "a multiple of 32",
    ),
    (
        ("kernels.permute=transformer_engine", "kernels.experts=fused"),
        "kernels.permute",
        "fused permutes its rows itself",
        "use backend",
    ),
]


@pytest.mark.parametrize(("words", "path", "message", "fix"), CASES)
def test_a_limit_of_a_library_is_a_problem_with_what_works(
    words: tuple[str, ...], path: str, message: str, fix: str
) -> None:
    found = _flat(rule(run_of("precision.compute=bfloat16", *words)) for rule in RULES)
    (problem,) = found
    assert problem.path == path and message in problem.message and fix in problem.fix
    assert problem in problems(run_of("precision.compute=bfloat16", *words))


def test_every_rule_has_a_case() -> None:
    runs = [run_of("precision.compute=bfloat16", *words) for words, *_ in CASES]
    assert all(any(_flat([rule(run)]) for run in runs) for rule in RULES)


def test_rows_of_deepgemm_are_aligned() -> None:
    run = run_of("precision.compute=bfloat16", "kernels.experts=deepgemm", "model.moe.expert_hidden_dim=772")
    assert "model.moe.expert_hidden_dim" in [problem.path for problem in problems(run)]


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.dispatcher=deepep", "parallel.ep=8"),
        ("parallel.dispatcher=deepep", "parallel.ep=8", "parallel.dispatch_sms=24"),
        ("parallel.dispatcher=deepep_elastic", "parallel.ep=8", "parallel.dispatch_sms=7"),
        ("parallel.dispatcher=deepep_elastic", "parallel.ep=8", "kernels.experts=deepgemm"),
        ("parallel.dispatcher=symmetric_memory", "parallel.ep=16", "kernels.experts=mxfp8"),
        ("kernels.experts=transformer_engine", "kernels.linear=transformer_engine"),
    ],
)
def test_what_fits_is_not_refused(words: tuple[str, ...]) -> None:
    run = run_of("precision.compute=bfloat16", *words)
    assert not _flat(rule(run) for rule in RULES)
    assert not [problem for problem in problems(run) if problem.path.startswith(("parallel", "kernels"))]


def test_padded_capacities_are_refused_where_rows_are_counted() -> None:
    words = ("model.moe.capacity.factor=2", "model.moe.capacity.pad=true")
    for name in ("deepep", "deepep_elastic"):
        found = problems(run_of("precision.compute=bfloat16", f"parallel.dispatcher={name}", "parallel.ep=16", *words))
        assert any(each.path == "parallel.dispatcher" and "counts the rows" in each.message for each in found)


def test_the_planner_knows_which_one_is_chosen() -> None:
    planned = {}
    for name in ("deepep", "deepep_elastic", "symmetric_memory"):
        run = run_of(f"parallel.dispatcher={name}", "parallel.ep=16")
        assert dispatcher_in_use(run) == name
        planned[name] = planned_as(run)
        # They do not use our process groups.
        assert not [message for message in messages(run, 16) if message.group in ("ep", "etp")]
    assert planned == {"deepep": "deepep", "deepep_elastic": "deepep", "symmetric_memory": "all_to_all"}


def test_a_plan_says_which_kernels_are_chosen() -> None:
    words = ["kernels.linear=transformer_engine", "kernels.experts=deepgemm", "kernels.backend=triton"]
    run = run_of("precision.compute=bfloat16", *words)
    assert kernels_in_use(run, "cuda") == {
        "experts": "deepgemm",
        "permute": "backend",
        "linear": "transformer_engine",
        "attention": "triton",
        "backend": "triton",
    }
    found = moefold.plan(run, gpu="H100", gpus=8, search=False)
    assert found.layout["kernels"] == kernels_in_use(run, "cuda")
    console = Console(record=True, width=160, file=StringIO())
    console.print(terminal_report(found.proposal))
    assert "kernels: experts deepgemm, permute backend, linear transformer_engine, " in console.export_text()
