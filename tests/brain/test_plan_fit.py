"""The fit finds constants that made the data; scores are what they say; the page of errors is made whole."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.blueprint.model_shape import MoE
from moefold.cli.main import main
from moefold.plan.published.assess import assess, calibrated, prediction_lines, rank_score, set_score, spearman
from moefold.plan.published.error_page import REASONS, classes, error_page, reason_for, source_of
from moefold.plan.published.fit import constants_of, fit, fitted_source, inside, left_out
from moefold.plan.published.points import Point, points_of, published_workload
from moefold.plan.timing.constants import CURRENT, MEANINGS
from moefold.plan.timing.fitted import ANCHORS, INTERVALS
from moefold.plan.timing.step_time import interval_of, step_time
from moefold.plan.timing.throughput import rates_of

MIXTRAL = {
    "key": "mixtral_8x7b", "family": "mixtral", "moe": True, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "attn": "gqa", "ffn": 14336, "moe_ffn": 14336, "experts": 8, "topk": 2, "shared_ffn": 0,
    "vocab": 32000, "mtp": 0, "act": "swiglu", "tied": False,
}  # fmt: skip
DENSE = {**MIXTRAL, "key": "dense_8b", "family": "dense", "moe": False}


def _record(number: int, gpu: str, tp: int, ep: int, mbs: int, model: dict) -> dict:
    world = 64
    return {
        "id": f"run-{number}",
        "model": model,
        "hardware": {"gpu": gpu, "num_gpus": world, "nvlink_domain": 72 if gpu.startswith("GB") else 8},
        "precision": "bf16",
        "seq_len": 4096,
        "gbs": 512,
        "mbs": mbs,
        "parallel": {"tp": tp, "pp": 1, "cp": 1, "ep": ep, "etp": 1, "vpp": 1, "fsdp": None},
        "flags": {"routing": "force_balanced_dropless"},
        "date": "2026-01",
        "leak_group": f"group-{number // 2}",
        "use": {"time": True, "memory": False},
        "canonical": True,
    }


def _records() -> list[dict]:
    sizes = [(gpu, tp, ep, mbs) for gpu in ("H100", "GB200") for tp in (1, 2) for ep in (2, 4, 8) for mbs in (1, 2)]
    made = [_record(i, *size, MIXTRAL if i % 3 else DENSE) for i, size in enumerate(sizes)]
    slower = constants_of(np.log(CURRENT.values) - 0.2 * np.array([m.name == "gemm_bf16" for m in MEANINGS]))
    for record in made:
        seconds = step_time(published_workload(record), slower).total
        tokens = record["gbs"] * record["seq_len"] / seconds / record["hardware"]["num_gpus"]
        record["target"] = {"step_time_s": seconds, "tokens_per_s_per_gpu": tokens}
    return made


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return points_of(_records())


def _silent(what: str, done: int, total: int) -> None:
    pass


def test_a_constant_that_made_the_data_is_found(points: list[Point]) -> None:
    """The springs hold it back a little; the others move less than the one that was moved."""
    found = fit(points, _silent, start=np.log(CURRENT.values)).constants
    assert found.gemm_bf16 < CURRENT.gemm_bf16 * 0.92


def test_left_out_groups_are_predicted_by_the_rest(points: list[Point]) -> None:
    fitted = fit(points, _silent, start=np.log(CURRENT.values))
    predicted = left_out(points, fitted, lambda point: point.leak_group, _silent)
    errors = [abs(math.exp(value) / point.seconds - 1) for value, point in zip(predicted, points)]
    assert max(errors) < 0.1
    # Without a group its prediction is another, or it was not left out.
    assert not np.allclose(predicted, fitted.predicted, rtol=0, atol=1e-9)


def test_scores_by_hand() -> None:
    errors = {"a": 0.1, "b": -0.3, "c": 0.2}
    score = set_score("all", errors, {"a": "x", "b": "x", "c": "y"}, ["a", "b", "c", "unknown"])
    assert score is not None
    assert (score.points, score.macro, score.median) == (3, pytest.approx(0.2), 0.2)
    assert score.bias == pytest.approx(0.0)
    assert set_score("none", errors, {}, ["unknown"]) is None
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    ranked = rank_score("r", [100.0, 80.0, 50.0], [1.0, 2.0, 0.5])
    assert ranked.regret == pytest.approx(0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = _records()
    ids = [record["id"] for record in records]
    (tmp_path / "published.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "score_sets.json").write_text(json.dumps({"everything": {"ids": ids}}))
    (tmp_path / "rank_sets.json").write_text(json.dumps([{"series": "some", "ids": ids[:6]}]))
    fact = {**records[0], "id": "too-much", "fits": False, "gpu": "H100", "num_gpus": 64, "mbs": 512}
    (tmp_path / "feasibility.jsonl").write_text(json.dumps(fact) + "\n")
    return tmp_path


def test_an_assessment_becomes_predictions_and_a_page(folder: Path) -> None:
    result = assess(folder, _silent)
    assert {score.name for score in result.sets} == {"everything"}
    assert result.sets[0].macro < 0.1
    assert result.false_fits == ()
    lines = {line["id"]: line for line in prediction_lines(result)}
    low, high = lines["run-3"]["interval"]
    assert 0.8 < low / lines["run-3"]["step_time_s"] < high / lines["run-3"]["step_time_s"] < 1.25
    assert lines["too-much"] == {"id": "too-much", "fits": False}
    page = error_page(result)
    for part in (
        "everything",
        "Ranking layouts",
        "One measured run as an anchor",
        "The worst ten",
        "gemm_bf16",
        "only GB200",
    ):
        assert part in page


def test_classes_of_runs_have_their_own_errors_and_the_page_begins_with_the_worst(folder: Path) -> None:
    result = assess(folder, _silent)
    found = {each.kind: each for each in classes(result)}
    assert {"source", "year", "framework", "format"} <= set(found)
    whole = found["framework"]
    assert whole.score.points == len(result.points) == 24
    by_group: dict[str, list[float]] = {}
    for point in result.points:
        by_group.setdefault(point.leak_group, []).append(abs(result.errors[point.id]))
    means = [sum(group) / len(group) for group in by_group.values()]
    assert whole.score.macro == pytest.approx(sum(means) / len(means))
    assert whole.held == pytest.approx(sum(result.inside.values()) / 24)
    assert set(result.intervals) == {"dense", "moe"}, "too few runs of the framework for an interval of its own"
    page = error_page(result)
    assert page.index("The worst of what follows") < page.index("| set |") < page.index("By source, year")
    worst = max(result.errors, key=lambda id: abs(result.errors[id]))
    assert worst in page[: page.index("| set |")]


def test_an_interval_holds_four_fifths_of_groups_that_it_has_not_seen() -> None:
    """The tenth and ninetieth percentile of all runs hold 80 % of those, and fewer of a group that was left out."""
    draw = np.random.default_rng(3)
    ratios = [
        (str(group), float(1 + 0.1 * shift)) for group in range(12) for shift in draw.normal(draw.normal(), 0.05, 5)
    ]
    (low, high), held = calibrated(ratios)
    tenth, ninetieth = np.percentile([ratio for _, ratio in ratios], (10, 90))
    assert sum(held) >= 0.8 * len(held) and low < tenth and ninetieth < high

    def inside(group: str, ratio: float) -> bool:
        bounds = np.percentile([other for name, other in ratios if name != group], (10, 90))
        return bool(bounds[0] <= ratio <= bounds[1])

    assert sum(inside(*each) for each in ratios) < 0.8 * len(held), "else nothing had to be moved"
    alone = [(str(number), ratio) for number, (_, ratio) in enumerate(ratios)]
    assert calibrated(alone)[0][0] > low, "runs of groups of their own need less"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Megatron-Bridge docs/performance-summary.md", "Megatron-Bridge"),
        ("MoE Parallel Folding (arXiv:2504.14960)", "MoE Parallel Folding"),
        ("NVIDIA dgxc-benchmarking llama3.1", "NVIDIA dgxc-benchmarking llama3.1"),
        ("", "not stated"),
    ],
)
def test_sources_are_named_without_the_file(name: str, expected: str) -> None:
    assert source_of({"source": {"name": name}}) == expected


def test_the_command_writes_what_it_was_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, constants, predictions = folder / "page.md", folder / "fitted.py", folder / "out.jsonl"
    words = ["plan", "--score", str(folder), "--page", str(page), "--constants", str(constants)]
    assert main([*words, "--predictions", str(predictions), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sets"][0]["name"] == "everything"
    assert page.read_text().startswith("# The planner's error")
    assert "FITTED: dict[str, float] = {" in constants.read_text()
    assert "ANCHORS: dict[str, tuple[float, float]] = {" in constants.read_text()
    assert len(predictions.read_text().splitlines()) == 25


def test_fitted_values_are_the_ones_in_use() -> None:
    source = fitted_source(CURRENT, {"dense": (0.8, 1.2)}, ANCHORS)
    written: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            written[node.target.id] = ast.literal_eval(node.value)
    assert written["ANCHORS"] == ANCHORS
    for meaning, value in zip(MEANINGS, CURRENT.values):
        assert f'"{meaning.name}": {value:.4g}' in source


def test_every_constant_is_described_and_near_what_is_possible() -> None:
    shares = ("exposed", "hidden", "traffic", "attention_forward", "attention_backward", "scan")
    for meaning, value in zip(MEANINGS, CURRENT.values):
        assert len(meaning.text) > 10 and meaning.spread > 0
        assert value > 0
        if any(word in meaning.name for word in shares):
            assert value < 1, meaning.name


def test_a_constant_at_the_end_of_its_range_leaves_the_best_to_the_others() -> None:
    """Against trying every point of a grid."""
    left, right = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 1.0])
    low, high = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
    step = inside(left, right, low, high)
    grid = [np.array([x, y]) for x in np.linspace(-1, 1, 201) for y in np.linspace(-1, 1, 201)]
    best = min(grid, key=lambda point: point @ left @ point / 2 - right @ point)
    assert step == pytest.approx(best, abs=0.006) and step[0] == 1.0
    assert inside(left, right, low * 9, high * 9) == pytest.approx(np.linalg.solve(left, right))


def test_what_a_record_says_of_biases_and_its_framework_of_attention_is_read() -> None:
    plain = _record(0, "H100", 1, 8, 1, MIXTRAL)
    biased = published_workload({**plain, "model": {**MIXTRAL, "bias": True}})
    assert all(isinstance(layer.feed, MoE) and layer.feed.biased for layer in biased.model.layers)
    assert published_workload(plain).framework.attention == "cudnn"
    for system, gpu, expected in (
        ("Megatron-DeepSpeed", "A100", "unfused"),
        ("torchtitan FSDP2", "H100", "flash2"),
        ("torchtitan FSDP2", "B200", "cudnn"),
    ):
        record = _record(0, gpu, 1, 8, 1, MIXTRAL)
        assert published_workload({**record, "flags": {"system": system}}).framework.attention == expected


def test_watts_to_spare_make_no_gpu_faster_than_its_units() -> None:
    """Half the arithmetic per watt of H100, and a quarter: neither is limited by its watts."""
    at = published_workload(_record(0, "A100", 1, 8, 1, MIXTRAL))
    gpu = at.cluster.gpu
    cooler = replace(at, cluster=replace(at.cluster, gpu=replace(gpu, watts=2 * gpu.watts)))
    assert rates_of(cooler, CURRENT, 4096.0).gemm == rates_of(at, CURRENT, 4096.0).gemm


def test_the_longest_reason_wins() -> None:
    assert reason_for("titan-t2-8b-cp8") == REASONS["titan-t2"]
    assert reason_for("somewhere-else") == "not understood"


def test_an_interval_is_of_the_nearest_runs_that_there_are() -> None:
    """Of this framework on such GPUs, of this framework, of this kind of model: the first that was published."""
    for gpu, framework, expected in (
        ("H100", "megatron", INTERVALS["megatron moe sm90"]),
        ("GB200", "megatron", INTERVALS["megatron moe sm100"]),
        ("A100", "megatron", INTERVALS["megatron moe"]),
        ("H100", "moefold", INTERVALS["moe"]),
    ):
        at = published_workload(_record(0, gpu, 1, 8, 1, MIXTRAL))
        assert interval_of(replace(at, framework=replace(at.framework, name=framework))) == expected
