"""The proof itself: it holds where it should, fails where it should, and draws what it claims to draw."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from moefold.config.parallel import ParallelConfig
from moefold.prove.cases import reduce_run
from moefold.prove.coverage import features_of
from moefold.prove.draw import draw_cases
from moefold.prove.meaning import meaning_of
from moefold.prove.mutants import CASES, MUTANTS, Mutant
from moefold.prove.report import case_report
from moefold.prove.verdict import prove
from moefold.recipes.catalog import RECIPES

CASES_IN_CI = 40
EXACT_CASES = list(draw_cases(CASES_IN_CI, 8, seed=1))
ROUNDED_CASES = list(draw_cases(CASES_IN_CI, 8, seed=1, dtype="bfloat16"))


def title(number: int) -> str:
    return f"case{number}"


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n >= 6 else ()) for n in range(CASES_IN_CI)]
)
def test_a_random_layout_computes_what_one_process_computes(number: int) -> None:
    verdict = prove(EXACT_CASES[number])
    assert verdict.holds, case_report(verdict)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n >= 2 else ()) for n in range(CASES_IN_CI)]
)
def test_a_random_layout_holds_up_to_rounding_in_bfloat16(number: int) -> None:
    verdict = prove(ROUNDED_CASES[number])
    assert verdict.holds, case_report(verdict)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_for_faults_hold_without_one(name: str) -> None:
    verdict = prove(CASES[name])
    assert verdict.holds, case_report(verdict)


# In every check the faults that have shipped in other systems; all of them in CI.
_ALWAYS = {"router not summed over tp", "local label count", "norm counts copies", "experts in the wrong order"}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=() if m.name in _ALWAYS else pytest.mark.slow) for m in MUTANTS],
)
def test_a_seeded_fault_is_caught_at_a_named_quantity(mutant: Mutant) -> None:
    verdict = prove(CASES[mutant.case], seconds=60.0, sabotage=mutant.seed)
    assert not verdict.holds
    # A fault that only makes a rank crash would be found by anyone.
    assert verdict.failure is None
    assert meaning_of(verdict.culprit)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_proxy")])
def test_every_family_is_proved_on_a_folded_layout(name: str) -> None:
    run = replace(RECIPES[name](), parallel=ParallelConfig(tp=2, ep=4))
    verdict = prove(reduce_run(run, 4))
    assert verdict.holds, case_report(verdict)


def test_two_hundred_draws_cover_what_the_proof_claims() -> None:
    seen = Counter(feature for case in draw_cases(200, 8, seed=1) for feature in set(features_of(case)))
    for axis in ("tp", "dp", "ep", "etp"):
        assert all(seen[f"{axis} =", size] for size in "1248"), axis
    wanted = {
        "dispatcher": ("local", "all_to_all", "all_gather", "all_to_all with etp", "all_gather with etp"),
        "routing": ("topk", "sinkhorn", "expert_choice", "balanced", "loss-free bias"),
        "attention": ("gqa", "mla", "sinks", "window", "yarn", "qk norm: full", "qk norm: head"),
        "experts": ("shared", "shared, gated", "latent", "biases", "weight at activation", "weight at output"),
        "folding": ("ep > dp (over tp)", "etp != tp"),
        "hybrid sharding": ("dense: copies of shards", "experts: copies of shards", "dense: copies only"),
        "capacity": ("dropless", "drop by probability", "drop by position", "full scope", "local scope", "padded"),
        "balance": ("microbatch", "sequence", "global_batch", "device", "z"),
    }
    missing = [(group, name) for group, names in wanted.items() for name in names if not seen[group, name]]
    assert not missing
