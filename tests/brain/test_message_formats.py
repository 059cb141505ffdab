"""Formats of messages: their defaults, the rules about them, and the bytes that docs/training.md says they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moefold
from moefold.checks import precision
from moefold.checks.run_all import problems
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.plan import collective_counts
from moefold.plan.collective_counts import messages

BFLOAT16 = {"params": "float32", "compute": "bfloat16"}


@pytest.mark.parametrize(
    ("keys", "gather", "reduce", "tp_reduce"),
    [
        ({}, "float32", "float32", "float32"),
        (BFLOAT16, "bfloat16", "float32", "float32"),
        ({"params": "float64", "compute": "float64"}, "float64", "float64", "float64"),
        ({"params": "bfloat16", "compute": "bfloat16"}, "bfloat16", "float32", "float32"),
        ({"params": "bfloat16", "compute": "float32"}, "bfloat16", "float32", "float32"),
        (BFLOAT16 | {"gather": "float32", "reduce": "bfloat16", "tp_reduce": "bfloat16"}, "float32", *["bfloat16"] * 2),
        (BFLOAT16 | {"reduce": "bfloat16_all_to_all"}, "bfloat16", "float32", "float32"),
        (BFLOAT16 | {"tp_reduce": "fp8_all_to_all"}, "bfloat16", "float32", "float32"),
        (BFLOAT16 | {"recipe": "mxfp8"}, "bfloat16", "float32", "float32"),
        ({"params": "float32", "compute": "float16"}, "float16", "float32", "float32"),
    ],
)
def test_formats(keys: dict[str, Any], gather: str, reduce: str, tp_reduce: str) -> None:
    found = PrecisionConfig(**keys)
    assert (found.gather_format, found.reduce_format, found.tp_reduce_format) == (gather, reduce, tp_reduce)


RULES = [
    (precision.gathered_parameters_lose_no_digits, {"gather": "float32"}, {"gather": "float64"}, "precision.gather"),
    (
        precision.sums_are_no_narrower_than_what_they_add,
        {"reduce": "bfloat16"},
        {"compute": "float32", "reduce": "bfloat16", "tp_reduce": "bfloat16"},
        "precision.reduce",
    ),
]


@pytest.mark.parametrize(("rule", "good", "bad", "path"), RULES)
def test_rule(rule: Any, good: dict[str, Any], bad: dict[str, Any], path: str) -> None:
    assert not rule(RunConfig(precision=PrecisionConfig(**BFLOAT16 | good)))
    run = RunConfig(precision=PrecisionConfig(**BFLOAT16 | bad))
    found = rule(run)
    all_found = found if isinstance(found, list) else [found]
    assert all_found[0].path == path and all_found[0].fix
    assert all(problem in problems(run) for problem in all_found)


def test_every_rule_has_a_case_and_all_problems_come_at_once() -> None:
    """Those about moments and main weights are in test_checks_optimizer.py."""
    of_states = {
        precision.moments_can_follow_the_gradients,
        precision.stochastic_rounding_has_something_to_round,
        precision.moments_are_rounded_from_float32,
        precision.remainders_have_weights_beside_them,
    }
    assert {case[0] for case in RULES} == set(precision.FORMAT_RULES) - of_states
    keys = {"gather": "bfloat16", "reduce": "bfloat16", "tp_reduce": "bfloat16"}
    paths = {problem.path for problem in problems(RunConfig(precision=PrecisionConfig(**keys)))}  # type: ignore[arg-type]
    assert {f"precision.{key}" for key in keys} <= paths


def test_bytes_in_the_documentation() -> None:
    base = {"parallel.tp": 4, "parallel.ep": 8, "data.global_batch": 64, "data.micro_batch": 1}
    names = {"all_gather": ("dense_shard", "expert_shard"), "reduce_scatter": ("dense_shard", "expert_shard")}
    lines = (Path(__file__).parents[2] / "docs" / "training.md").read_text().splitlines()
    start = lines.index(
        "| `precision` | all-gather of parameters | reduce-scatter of gradients | reduce-scatter over tp |"
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : start + 5]]
    for words, *said in rows:
        changes = dict(word.strip("`").split(": ") for word in words.split(", ") if ":" in word)
        keys = base | {"precision.compute": "bfloat16"} | {f"precision.{key}": value for key, value in changes.items()}
        sent = {(each.name, each.group): each.bytes for each in messages(moefold.load_run("qwen3_30b_a3b", keys), 16)}
        found = [sum(sent[name, group] for group in groups) for name, groups in names.items()]
        assert said == [f"{size / 2**30:.1f}" for size in (*found, sent["reduce_scatter", "tp"])]


def test_collectives_of_gradients_in_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"parallel.pp": 4, "parallel.ep": 8, "parallel.dp_replicate": 2, "data.global_batch": 512}
    run = moefold.load_run("qwen3_30b_a3b", keys | {"data.micro_batch": 1, "precision.compute": "bfloat16"})

    def sums() -> int:
        found = [each for each in messages(run, 64) if each.group.endswith(("_shard", "_replicate"))]
        return sum(each.count for each in found if each.name in ("reduce_scatter", "all_reduce"))

    bucketed = sums()
    # Buckets of 128 bytes hold one gradient.
    monkeypatch.setattr(collective_counts, "MEBIBYTE", 1)
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert f"sums its gradients in {bucketed} collectives instead of {sums()}." in text


@pytest.mark.parametrize("sharding", ["flat", "fsdp"])
def test_weights_gathered_as_codes_are_a_quarter_of_float32(sharding: str) -> None:
    """Of those that a recipe narrows, with 4 bytes per block of 128 x 128; embedding, head and norms are as before."""
    base = {"parallel.ep": 8, "data.global_batch": 16, "data.micro_batch": 1, "parallel.sharding": sharding}
    base |= {"precision.compute": "float32", "precision.recipe": "fp8_blockwise"}

    def sent(gather: str) -> dict[tuple[str, str], int]:
        run = moefold.load_run("qwen3_30b_a3b", base | {"precision.gather": gather})
        return {(each.name, each.group): each.bytes for each in messages(run, 16)}

    narrow, wide = sent("narrow"), sent("float32")
    # Experts are all narrowed.
    experts = narrow["all_gather", "expert_shard"] / wide["all_gather", "expert_shard"]
    assert experts == 0.25
    magnitudes = narrow["all_reduce", "expert_shard"] - wide.get(("all_reduce", "expert_shard"), 0)
    values = 48 * 16 * 3 * 768 * 2048
    assert magnitudes == 4 * values / 128**2
    dense = narrow["all_gather", "dense_shard"] / wide["all_gather", "dense_shard"]
    assert 0.25 < dense < 0.7
