"""The proof itself: it holds where it should, fails where it should, and draws what it claims to draw."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType
from typing import Any, get_args

import pytest
from tests.commit_seed import commit_seed, seed_of

from moefold.blueprint.narrow_matmuls import INPUT_STEPS
from moefold.checks.run_all import problems
from moefold.comm.spawn import spawn_ranks
from moefold.config.memory import RetainedStep
from moefold.config.parallel import ContextMode, DispatcherName, ParallelConfig
from moefold.config.precision import Format, RowPadding
from moefold.config.precision_recipes import DispatchFormat
from moefold.errors import MoefoldError
from moefold.prove import faults
from moefold.prove.case_features import features_of
from moefold.prove.cases import Case, KeptCase, case_line, read_cases, reduce_run
from moefold.prove.faults import parallel_faults
from moefold.prove.mutant_cases import CASES
from moefold.prove.mutants import MUTANTS, Mutant, caught
from moefold.prove.narrow_cases import PROVED_RECIPES
from moefold.prove.proof_report import (
    case_report,
    coverage_report,
    drawn_case_report,
    meaning_of,
    mutants_report,
)
from moefold.prove.random_cases import draw_case, draw_cases
from moefold.prove.verdict import Verdict, prove, rounding_tolerance
from moefold.recipes.catalog import RECIPES
from moefold.schedule.names import SCHEDULES

# Every feature of two hundred cases is in 35 to 43 of them, of twelve seeds.
CASES_IN_CI = 50
# What the proof claims to draw is judged on one seed; what CI proves is drawn anew with every commit.
DRAWN_CASES = list(draw_cases(200, 8, seed=1))
CI_CASES = list(draw_cases(200, 8, commit_seed()))
KEPT_CASES = read_cases(Path(__file__).parent / "failed_cases.jsonl")


def telling_cases(cases: list[Case], count: int) -> list[Case]:
    """So many of these: always the one with the most features per rank that are new; when none is, all over again."""
    left = {number: set(features_of(case)) for number, case in enumerate(cases)}
    seen: set[tuple[str, str]] = set()
    chosen: list[Case] = []
    while len(chosen) < count:
        number = max(left, key=lambda number: (len(left[number] - seen) / cases[number].world, -number))
        if not left[number] - seen:
            seen = set()
            continue
        seen |= left.pop(number)
        chosen.append(cases[number])
    return chosen


EXACT_CASES = telling_cases(CI_CASES, CASES_IN_CI)
ROUNDED_DRAWS = list(draw_cases(200, 8, commit_seed(), dtype="bfloat16"))
ROUNDED_CASES = telling_cases(ROUNDED_DRAWS, CASES_IN_CI)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n >= 4 else ()) for n in range(CASES_IN_CI)]
)
def test_a_random_layout_computes_what_one_process_computes(number: int) -> None:
    verdict = prove(EXACT_CASES[number])
    assert verdict.holds, drawn_case_report(verdict, max_world=8)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n >= 2 else ()) for n in range(CASES_IN_CI)]
)
def test_a_random_layout_holds_up_to_rounding_in_bfloat16(number: int) -> None:
    verdict = prove(ROUNDED_CASES[number])
    assert verdict.holds, drawn_case_report(verdict, max_world=8)


def kept_params() -> Iterator[Any]:
    """In every check the first case of each finding; all of them in CI."""
    told: set[str] = set()
    for kept in KEPT_CASES:
        yield pytest.param(kept, id=kept.case.run.name, marks=pytest.mark.slow if kept.found in told else ())
        told.add(kept.found)


@pytest.mark.parametrize("kept", list(kept_params()))
def test_a_case_that_failed_once_holds(kept: KeptCase) -> None:
    verdict = prove(kept.case)
    assert verdict.holds, f"{case_report(verdict)}\n\nWhat this case once found: {kept.found}"


def test_a_fault_in_bfloat16_is_more_than_one_process_rounds() -> None:
    """This case exceeds the estimate without a fault; what one process's own rounding allows must not hide one."""
    case = next(kept.case for kept in KEPT_CASES if kept.found.startswith("in bfloat16"))
    verdict = prove(case)
    assert verdict.holds, case_report(verdict)
    assert any(row.error > rounding_tolerance(case, row.quantity) for row in verdict.rows)
    faulty = prove(case, fault=parallel_faults.head_norm_not_summed_over_tp)
    assert caught(faulty), case_report(faulty)
    assert faulty.culprit.endswith("_norm.weight") and meaning_of(faulty.culprit)


def test_kept_cases_are_legal_and_have_what_they_are_kept_for() -> None:
    """A default that changes must not turn a kept case into one that shows nothing."""
    assert len(KEPT_CASES) == len({kept.case for kept in KEPT_CASES}) >= 11
    for kept in KEPT_CASES:
        assert not problems(kept.case.run, kept.case.world)
        if kept.found.startswith("top-1"):
            moe = kept.case.run.model.moe
            assert moe is not None and moe.top_k == 1
            assert kept.case.run.parallel.dispatcher in ("deduplicated", "two_level")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_case_is_drawn_again_by_its_number_and_read_back_from_its_line(dtype: Format, tmp_path: Path) -> None:
    cases = list(draw_cases(30, 4, 0xFFFFFF, dtype))
    assert all(draw_case(case.run.seed, 4, dtype) == case for case in cases)
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(case_line(case, "nothing") + "\n" for case in cases))
    assert [kept.case for kept in read_cases(path)] == cases


def test_a_failing_case_prints_what_repeats_and_keeps_it() -> None:
    verdict = Verdict(CI_CASES[3], failure="rank 0: on purpose")
    *_, repeat, _, line = drawn_case_report(verdict, 8).splitlines()
    assert repeat.endswith(f"moefold prove --case {CI_CASES[3].run.seed} --max-world 8")
    assert line == case_line(CI_CASES[3], "rank 0: on purpose")


def test_a_line_that_is_no_case_is_named(tmp_path: Path) -> None:
    path, good = tmp_path / "cases.jsonl", case_line(DRAWN_CASES[0], "nothing")
    for bad in (
        "{",
        "[]",
        '{"world": 1, "run": {}}',
        good[:-1] + ', "more": 1}',
        good.replace("vocab_size", "vocabulary"),
    ):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(MoefoldError, match=r"cases\.jsonl:2: "):
            read_cases(path)


def test_the_seed_of_ci_changes_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seed_of("a175d65fffff") == 0xA175D6 != seed_of("a175d7")
    assert seed_of(None) == 1
    monkeypatch.setenv("MOEFOLD_SEED", "777")
    assert commit_seed.__wrapped__() == 777


# In every check the faults that have shipped in other systems, and the cases they are tried on; all of them in CI.
_ALWAYS = {
    "router not summed over tp",
    "experts in the wrong order",
    "tied weight not summed over stages",
}
_ALWAYS_CLEAN = {mutant.case for mutant in MUTANTS if mutant.name in _ALWAYS}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in _ALWAYS_CLEAN else pytest.mark.slow) for n in CASES])
def test_the_cases_for_faults_hold_without_one(name: str) -> None:
    verdict = prove(CASES[name])
    assert verdict.holds, case_report(verdict)


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=() if m.name in _ALWAYS else pytest.mark.slow) for m in MUTANTS],
)
def test_a_seeded_fault_is_caught_at_a_named_quantity(mutant: Mutant) -> None:
    verdict = prove(CASES[mutant.case], fault=mutant.seed)
    assert caught(verdict), case_report(verdict)
    assert meaning_of(verdict.culprit)


def test_a_fault_that_stops_the_ranks_is_not_caught() -> None:
    def stop() -> None:
        raise TypeError("a replacement that does not fit")

    verdict = prove(CASES["replicated"], fault=stop)
    assert verdict.failure is not None and not verdict.holds and not caught(verdict)
    report = mutants_report([(Mutant(stop, "replicated", "someone changed a signature"), verdict)])
    assert "DOES NOT RUN" in report and "0 of 1 seeded faults caught" in report


def test_every_fault_replaces_a_name_that_exists() -> None:
    """Names are strings, which no rename and no type checker sees; nor do they see what a replaced function is given.
    Seeded in a fork, which ends with the test."""

    def seed_all(rank: int) -> list[str]:
        broken = []
        for mutant in MUTANTS:
            try:
                mutant.seed()
            except (AttributeError, TypeError) as error:
                broken.append(f"{mutant.name}: {error}")
        return broken

    assert spawn_ranks(seed_all, 1, seconds=300) == [[]]


def test_the_page_of_the_proof_counts_the_faults() -> None:
    """docs/proof.md: how many there are, and how many of each file of `prove/faults`."""
    page = (Path(__file__).parents[2] / "docs/proof.md").read_text("utf-8")
    assert f"seeds {len(MUTANTS)} faults" in page
    rows = re.findall(r"^\| (\d+) \| [^|]*`prove/faults/(\w+)\.py`", page, re.MULTILINE)
    stated: Counter[str] = Counter()
    for number, file in rows:
        stated[file] += int(number)
    assert stated == Counter(mutant.seed.__module__.rpartition(".")[2] for mutant in MUTANTS)


def test_every_fault_is_seeded() -> None:
    """A fault that is written down and never tried shows nothing."""
    modules = [import_module(f"{faults.__name__}.{each.name}") for each in iter_modules(faults.__path__)]
    written = {
        fault.__name__
        for module in modules
        for fault in vars(module).values()
        if isinstance(fault, FunctionType)
        and fault.__module__ == module.__name__
        and not fault.__name__.startswith("_")
        and fault not in (parallel_faults.wrap, parallel_faults.put)
    }
    assert written == {mutant.seed.__name__ for mutant in MUTANTS}
    assert len(MUTANTS) == len(written)
    assert {mutant.case for mutant in MUTANTS} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_proxy")])
def test_every_family_is_proved_on_a_folded_layout(name: str) -> None:
    run = replace(RECIPES[name](), parallel=ParallelConfig(tp=2, ep=4))
    verdict = prove(reduce_run(run, 4))
    assert verdict.holds, case_report(verdict)


# Every claim of the proof's page about what is drawn.
CLAIMED = {
    "dispatcher": (
        "local",
        *get_args(DispatcherName),
        *(f"{name} with etp" for name in get_args(DispatcherName)),
        "two_level over hosts",
        *("clones, fsdp", "clones, flat", "clones, fsdp, deferred weight gradients"),
    ),
    "routing": ("topk", "sinkhorn", "expert_choice", "balanced", "loss-free bias"),
    "attention": (
        *("gqa", "mla", "sinks", "window", "yarn", "qk norm: full", "qk norm: head", "output_gate"),
        *("norms centred at zero", "linear: gated delta net", "linear: gated delta net over tp"),
    ),
    "experts": ("shared", "shared, gated", "latent", "biases", "prob applied at activation", "prob applied at output"),
    "folding": (
        "etp != tp",
        *(f"experts over {axes}" for axes in ("dp", "cp", "tp", "dp x cp", "dp x tp", "cp x tp", "dp x cp x tp")),
        *(f"experts over {axes} inside a stage" for axes in ("dp", "cp", "tp", "dp x cp", "dp x tp", "cp x tp")),
    ),
    "hybrid sharding": ("dense: replicated shards", "experts: replicated shards", "dense: replicated"),
    "capacity": ("dropless", "drop by probability", "drop by position", "full scope", "local scope", "padded"),
    "balance": (
        *("microbatch", "sequence, mean over sequences", "sequence, mean over tokens"),
        *("global_batch", "device", "z"),
    ),
    "schedule": (*SCHEDULES, "zb_v on one rank", "interleaved on one rank"),
    "vpp =": ("1", "2", "3", "4"),
    "stages": (
        "balanced",
        "by string",
        "an empty one",
        "the loss alone",
        "of unequal numbers of layers",
        "an MTP module before the loss",
    ),
    "context": (
        *(f"{mode} in {layers} layers" for mode in get_args(ContextMode) for layers in ("full", "windowed")),
        "hierarchical in sets of 2",
        "dynamic",
    ),
    "documents": ("concat", "concat_masked", "padded", "bin_packed"),
    "MTP modules": ("0", "1", "2"),
    "recompute": ("attention", "feed_forward", "experts", "nothing"),
    "sharding": ("fsdp", "flat", "flat, in four steps"),
    "precision recipe": (
        *("none", *PROVED_RECIPES, "casts by torch", "casts by native"),
        *("matrices cut over tp or etp", "modules that stay wide", "deferred weight gradients"),
        *(f"rows sent as {name}" for name in get_args(DispatchFormat)),
        *("weights gathered as codes, fsdp", "weights gathered as codes, flat"),
        *(f"rows padded by {name}" for name in get_args(RowPadding)),
        "down projections' inputs: per_token",
    ),
    "optimizer states": ("on the device", "on the host", "on the cpu"),
    "optimizer": ("adamw", "muon, fsdp", "muon, flat", "QK-clip"),
    "retained steps": (
        *(f"{step}: {how}" for step in get_args(RetainedStep) for how in ("discard", "offload")),
        *(f"{step}: quantize" for step in sorted(set(INPUT_STEPS.values()))),
    ),
    "model": ("tied embeddings", "tied embeddings over stages", "dense layers first"),
}


def test_two_hundred_draws_cover_what_the_proof_claims() -> None:
    seen = Counter(feature for case in DRAWN_CASES for feature in set(features_of(case)))
    for axis, sizes in {"tp": "1248", "dp": "1248", "ep": "1248", "etp": "1248", "cp": "124", "pp": "1248"}.items():
        assert all(seen[f"{axis} =", size] for size in sizes), axis
    assert not [(group, name) for group, names in CLAIMED.items() for name in names if not seen[group, name]]


def test_the_cases_in_ci_have_every_feature_of_two_hundred() -> None:
    def features(cases: list[Case]) -> set[tuple[str, str]]:
        return {feature for case in cases for feature in features_of(case)}

    assert features(EXACT_CASES) == features(CI_CASES)
    assert features(ROUNDED_CASES) == features(ROUNDED_DRAWS)
    states = {name for group, name in features(ROUNDED_CASES) if group == "optimizer states"}
    assert states == {
        *("on the device", "on the host", "on the cpu", "main weights by remainder"),
        *("moments in bfloat16, rounded nearest", "moments in bfloat16, rounded stochastic"),
    }


def test_every_compared_quantity_has_a_meaning() -> None:
    """The last patterns fit anything of their kind; quantities with a text of their own must not fall through."""
    assert "shared" in meaning_of("gradient/layers.3.feed_forward.shared.gate_up")
    assert "MTP" in meaning_of("mtp_loss")
    for name in ("mtp.0.join.weight", "mtp.1.token_norm.weight", "mtp.0.hidden_norm.weight", "mtp_norms.1.weight"):
        assert "MTP" in meaning_of(f"gradient/{name}")
    assert meaning_of("gradient/mtp.0.block.feed_forward.router.weight").startswith("router")
    for name in (
        "counts",
        "dropped",
        "loss",
        "grad_norm",
        "balance/z",
        "expert_bias/x",
        "exp_avg/x",
        "exp_avg_sq/x",
        "codes/x",
        "scales/x",
        "unchanged/x",
    ):
        assert meaning_of(name)


def test_the_coverage_table_prints_every_group_once() -> None:
    verdicts = [Verdict(case, observations=frozenset({"tokens dropped"})) for case in DRAWN_CASES[:20]]
    lines = coverage_report(verdicts).splitlines()
    starts = [line for line in lines[2:] if line[0] != " "]
    assert max(map(len, lines)) <= 125
    assert len(starts) == len({group for case in DRAWN_CASES[:20] for group, _ in features_of(case)} | {"occurred"})
