"""Predictions rescaled by a measured run: what is read as an anchor, what it changes, and what it is worth."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moefold
from moefold.cli.main import main
from moefold.config.loading import override, plain_data
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of
from moefold.plan.published.anchor_error import anchor_score, anchor_scores, anchor_shares, pairs_of
from moefold.plan.published.anchor_file import read_anchor
from moefold.plan.published.points import Point
from moefold.plan.timing.anchoring import Anchor, Shares, anchored, nearness, shares_of
from moefold.plan.timing.fitted import ANCHORS, INTERVALS
from moefold.plan.timing.step_time import predict_time, step_time
from moefold.plan.workload import Framework, Rescaling, Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe

ROOT = Path(__file__).parents[2]
H100 = cluster_of("H100", 64)
STATED = """
run: qwen3_30b_a3b
changes: {parallel.ep: 16, data.global_batch: 512}
gpu: H100
gpus: 32
seconds_per_step: 9.5
"""


def workload(name: str = "qwen3_30b_a3b", gpu: str = "H100", **parallel: int) -> Workload:
    return changed(workload_of_run(recipe(name), cluster_of(gpu, 64)), parallel=parallel)


def written(path: Path, text: str, name: str = "anchor.yaml") -> Path:
    (path / name).write_text(text)
    return path / name


# ---- what an anchor changes ----


def test_every_part_of_the_step_is_rescaled_and_the_interval_is_the_anchors() -> None:
    plain = workload()
    usual, found = predict_time(plain), predict_time(replace(plain, rescaling=Rescaling(1.25, 0.9, 1.1)))
    assert found.step_seconds == pytest.approx(1.25 * usual.step_seconds)
    assert (found.low, found.high) == pytest.approx((0.9 * found.step_seconds, 1.1 * found.step_seconds))
    for before, after in zip(usual.lines, found.lines, strict=True):
        assert (after.seconds, after.hidden) == pytest.approx((1.25 * before.seconds, 1.25 * before.hidden))
    assert sum(line.seconds - line.hidden for line in found.lines) == pytest.approx(found.step_seconds)


def test_the_factor_is_the_anchors_error_to_the_power_of_what_is_common() -> None:
    near, planned = workload(ep=16), workload(ep=8)
    measured = 1.3 * step_time(near).total
    found = anchored(Anchor("mine", near, measured), planned)
    common, own = ANCHORS["moe own model"]
    assert found.weight == pytest.approx(common / (common + own)) and 0.3 < found.weight < 0.8
    assert found.rescaling.factor == pytest.approx(1.3**found.weight)
    low, high = INTERVALS["moe"]
    assert low < found.rescaling.low < found.rescaling.high < high
    assert math.log(found.rescaling.high) / math.log(high) == pytest.approx(math.sqrt(1 - found.weight**2))
    assert f"{low:.2f} to {high:.2f}" in found.words and "the same model, GPU and framework" in found.words
    assert "check that the anchor" not in found.words
    assert "check that the anchor" in anchored(Anchor("mine", near, 3 * measured), planned).words


def test_the_nearer_an_anchor_the_more_it_says() -> None:
    planned = workload()
    megatron = replace(planned, framework=Framework("megatron"))
    assert nearness(workload(ep=16), planned) == "model"
    assert nearness(workload("olmoe_1b_7b"), planned) == "framework"
    assert nearness(megatron, planned) == "gpu"
    assert nearness(workload(gpu="GB200"), planned) == "none"
    own = [shares_of("moe", "own", near).weight for near in ("model", "framework", "gpu")]
    assert own[0] > own[1] > own[2]
    assert shares_of("moe", "own", "model").weight > shares_of("moe", "published", "model").weight
    far = anchored(Anchor("far", megatron, 2 * step_time(megatron).total), planned)
    assert far.rescaling.factor == 1.0 and far.before == (far.rescaling.low, far.rescaling.high)
    assert "another framework" in far.words and "nothing is rescaled" in far.words


def test_an_anchor_that_shares_nothing_changes_nothing() -> None:
    assert Shares(0.0, 0.02).weight == 0.0 and Shares(0.0, 0.02).shrink == 1.0
    assert Shares(0.02, 0.0).weight == 1.0 and Shares(0.02, 0.0).shrink == 0.0


def test_layouts_keep_their_order(tmp_path: Path) -> None:
    run = moefold.load_run("olmoe_1b_7b", {"data.global_batch": 256})
    asked = {"gpu": "H100", "gpus": 16, "fix": "tp=1,cp=1,pp=1,2,vpp=1,ep=4,8,etp=1,sequences=1,replicate=1"}
    text = "run: olmoe_1b_7b\ngpu: H100\ngpus: 64\nseconds_per_step: 60\n"
    plain, found = moefold.plan(run, **asked), moefold.plan(run, **asked, anchor=written(tmp_path, text))
    assert found.proposal.anchored is not None and plain.proposal.anchored is None
    factor = found.proposal.anchored.rescaling.factor
    assert factor > 1.05
    assert [each.choice for each in plain.proposal.result.ranked] == [
        each.choice for each in found.proposal.result.ranked
    ]
    for before, after in zip(plain.proposal.result.ranked, found.proposal.result.ranked, strict=True):
        assert after.seconds == pytest.approx(factor * before.seconds)
    assert found.days == pytest.approx(factor * plain.days)
    assert "Anchored by anchor.yaml" in found.html()


# ---- what can be an anchor ----


def test_a_file_states_a_run(tmp_path: Path) -> None:
    anchor = read_anchor(written(tmp_path, STATED), replace(H100, nic_gb_s=25.0))
    made = anchor.workload
    assert (anchor.seconds, anchor.owner, made.parallel.ep, made.cluster.num_gpus) == (9.5, "own", 16, 32)
    # The same GPU: the links are those of the plan.
    assert made.cluster.nic_gb_s == 25.0
    assert read_anchor(written(tmp_path, STATED), cluster_of("GB200", 64)).workload.cluster.nic_gb_s == 50
    rate = STATED.replace("seconds_per_step: 9.5", "tokens_per_second_per_gpu: 1000") + "framework: megatron\n"
    anchor = read_anchor(written(tmp_path, rate), H100)
    assert anchor.seconds == pytest.approx(512 * made.run.data.seq_len / 32 / 1000)
    assert anchor.workload.framework.name == "megatron" and anchor.workload.parallel.sharding == "zero1"
    as_json = {"run": "run.yaml", "cluster": "cluster.yaml", "seconds_per_step": 3}
    written(tmp_path, "recipe: olmoe_1b_7b\n", "run.yaml")
    written(tmp_path, "gpu: H100\ngpus: 16\nnic_gb_s: 40\n", "cluster.yaml")
    anchor = read_anchor(written(tmp_path, json.dumps(as_json), "anchor.json"), H100)
    assert (anchor.workload.cluster.num_gpus, anchor.workload.cluster.nic_gb_s) == (16, 40)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus: 0\nfoo: 1\n", ["run: is missing", "gpus: is 0", "gpu: is missing", "seconds_per_step", "foo: unknown"]),
        (STATED + "tokens_per_second_per_gpu: 5\n", ["said twice"]),
        (STATED.replace("9.5", "-1"), ["seconds_per_step: is -1"]),
        (STATED.replace("parallel.ep: 16", "parallel.epp: 3"), ["parallel.epp", "unknown key"]),
        (STATED.replace("parallel.ep: 16", "parallel.tp: 64"), ["does not divide the world of 32"]),
        (STATED.replace("H100", "H10") + "framework: jax\n", ["no gpu named 'H10'", "no framework named 'jax'"]),
        ("[1]", ["states no run"]),
    ],
)
def test_a_file_that_states_none_is_refused_with_all_that_is_missing(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_anchor(written(tmp_path, text), H100)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def metrics(path: Path, *, device: str = "NVIDIA H100 80GB HBM3", steps: int = 20) -> Path:
    run = override(recipe("qwen3_30b_a3b"), {"parallel.ep": 16})
    start = {"kind": "start", "step": 0, "world": 64, "device": device, "config": plain_data(run)}
    lines = [start, {"kind": "step", "step": 1, "seconds": {"step": 99.0}}, {**start, "step": 1}]
    # Slow first steps, one that was skipped, one that a save delayed.
    seconds = [50.0] * 5 + [9.0, 10.0, 11.0] * steps
    lines += [
        {"kind": "step", "step": n, "skipped": None, "seconds": {"step": s}} for n, s in enumerate(seconds[:steps])
    ]
    lines.append({"kind": "step", "step": 99, "skipped": "grad_norm", "seconds": {"step": 0.1}})
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "st')
    return path


def test_a_runs_directory_is_an_anchor(tmp_path: Path) -> None:
    anchor = read_anchor(metrics(tmp_path / "measured"), H100)
    assert (anchor.name, anchor.seconds, anchor.workload.parallel.ep) == ("measured", 10.0, 16)
    assert anchor.workload.cluster == H100 and anchor.workload.is_own
    with pytest.raises(ConfigError) as caught:
        read_anchor(metrics(tmp_path / "short", device="CPU", steps=7), H100)
    assert "has 7 steps" in str(caught.value) and "ran on CPU" in str(caught.value)
    with pytest.raises(ConfigError, match="ran on NVIDIA H100 PCIe"):
        read_anchor(metrics(tmp_path / "other", device="NVIDIA H100 PCIe"), H100)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_anchor(tmp_path, H100)


def test_a_published_record_is_an_anchor(tmp_path: Path) -> None:
    from tests.brain.test_cli_plan_records import RECORD

    records = [RECORD, RECORD | {"id": "b", "target": {"step_time_s": 2.5}}]
    path = written(tmp_path, "\n".join(map(json.dumps, records)), "published.jsonl")
    anchor = read_anchor(f"{path}:b", H100)
    assert (anchor.name, anchor.seconds, anchor.owner) == ("b", 2.5, "published")
    assert anchor.workload.framework.name == "megatron"
    for given, words in (("a", "target.step_time_s: is missing"), ("c", "none of its 2 records")):
        with pytest.raises(ConfigError, match=re.escape(words)):
            read_anchor(f"{path}:{given}", H100)
    with pytest.raises(ConfigError, match="which of its records"):
        read_anchor(path, H100)


def test_the_command_line_says_the_anchor_the_factor_and_both_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "qwen3_30b_a3b", "--gpus", "64", "--no-search"]
    anchor = ["--anchor", str(written(tmp_path, STATED))]
    main([*asked, *anchor])
    told = " ".join(capsys.readouterr().out.split())
    assert "Anchored by anchor.yaml: a step took 9.5 s" in told
    main([*asked, *anchor, "--json"])
    found = json.loads(capsys.readouterr().out)
    main([*asked, "--json"])
    usual = json.loads(capsys.readouterr().out)
    assert usual["anchor"] is None
    factor = found["anchor"]["factor"]
    assert f"multiplied by {factor:.3f}" in told
    assert found["chosen"]["step_seconds"] == pytest.approx(factor * usual["chosen"]["step_seconds"])
    assert found["anchor"]["interval_before"] == list(INTERVALS["moe"])
    assert found["chosen"]["interval"][1] == pytest.approx(
        found["anchor"]["interval"][1] * found["chosen"]["step_seconds"]
    )
    assert main([*asked, "--anchor", str(tmp_path / "none.txt")]) == 2


# ---- what it is worth ----


def made_up(common: float, own: float, cells: int, layouts: int, seed: int) -> tuple[list[Point], dict, dict]:
    """Runs of ``cells`` sources with errors whose common and own standard deviations are these."""
    draw = np.random.default_rng(seed)
    points, records, errors = [], {}, {}
    base = workload()
    for cell in range(cells):
        shift = draw.normal(0, common)
        # A GPU of its own for each, so that nothing else is near.
        gpu = replace(base.cluster.gpu, name=f"gpu-{cell}")
        for layout in range(layouts):
            id = f"{cell}-{layout}"
            made = changed(replace(base, cluster=replace(base.cluster, gpu=gpu)), data={"micro_batch": 1 + layout})
            points.append(Point(id, made, 1.0, f"group-{cell}", gpu.name, "family"))
            records[id] = {"source": {"name": f"source-{cell}", "version": "1"}, "date": "2026-01"}
            # predicted / measured - 1
            errors[id] = math.expm1(-(shift + draw.normal(0, own)))
    return points, records, errors


def test_variances_that_made_the_errors_are_found_and_an_anchor_is_worth_what_they_say() -> None:
    points, records, errors = made_up(0.2, 0.1, 150, 3, 1)
    pairs = pairs_of(points, records, errors)
    found = anchor_shares(pairs)["moe own model"]
    assert found.common == pytest.approx(0.2**2, rel=0.35)
    assert found.own == pytest.approx(0.1**2, rel=0.35)
    assert anchor_shares(pairs)["moe published none"].weight < 0.05
    usual = (math.exp(-1.2816 * math.hypot(0.2, 0.1)), math.exp(1.2816 * math.hypot(0.2, 0.1)))
    score = next(each for each in anchor_scores(pairs, {"moe": usual, "dense": usual}) if each.name == "moe own model")
    assert score.anchored_error < 0.75 * score.error
    assert score.held == pytest.approx(0.8, abs=0.1) and score.anchored_held == pytest.approx(0.8, abs=0.07)


def test_without_anything_in_common_an_anchor_is_worth_nothing() -> None:
    points, records, errors = made_up(0.0, 0.2, 150, 3, 2)
    pairs = pairs_of(points, records, errors)
    assert anchor_shares(pairs)["moe own model"].weight < 0.1


def test_few_groups_say_nothing_and_repeated_layouts_are_no_pair() -> None:
    pairs = pairs_of(*made_up(0.2, 0.1, 5, 6, 3))
    assert anchor_shares(pairs).get("moe own model") is None
    points, records, errors = made_up(0.2, 0.1, 60, 1, 4)
    twice = [replace(each, id=f"{each.id} again") for each in points]
    records |= {f"{id} again": each for id, each in records.items()}
    errors |= {f"{id} again": each for id, each in errors.items()}
    pairs = pairs_of([*points, *twice], records, errors)
    near = pairs.mask("moe", "own", "model")
    assert not near.any() and anchor_score("none", pairs, near, (0.8, 1.2)) is None


def test_the_page_of_errors_has_the_weights_in_use() -> None:
    """Each was left out of its own figure there, so the mean over what is left out is near the one in use."""
    page = (ROOT / "docs" / "planner-error.md").read_text()
    rows = re.findall(
        r"^\| (MoE|dense); (own|of others), the same model, GPU and framework \| \d+ \| ([\d.]+) ", page, re.M
    )
    assert len(rows) == 4
    for kind, whose, weight in rows:
        owner = "own" if whose == "own" else "published"
        shares = shares_of(kind.lower(), owner, "model")
        assert shares.weight == pytest.approx(float(weight), abs=0.05)
