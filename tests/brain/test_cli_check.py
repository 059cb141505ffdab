"""`moefold check` as a user meets it: text, JSON, exit codes, and an answer within a second."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tuned_layouts import row_of
from moefold.api.runs import check, load_run
from moefold.blueprint.parameters import parameters
from moefold.blueprint.stage_modules import largest_rank_params
from moefold.cli.main import main
from moefold.cli.run_argument import split_changes
from moefold.config.loading import dump_run, override
from moefold.config.parallel import ParallelConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.predict import predict
from moefold.plan.stage_contents import parts_by_rank
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import RECIPES, recipe, tuned_layouts
from moefold.topology.folded_layout import fold

Output = pytest.CaptureFixture[str]


def test_sizes_are_exact(capsys: Output) -> None:
    assert main(["check", "deepseek_v3", "--data.train", "tokens"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("deepseek_v3: no problems\n")
    for number in ("671,026,404,352", "37,552,282,624", "671,025,397,760", "37,551,276,032", "671.0B", "14,848"):
        assert number in printed


def test_modules_that_look_ahead_have_rows_of_their_own(capsys: Output) -> None:
    main(["check", "deepseek_v3", "--model.num_mtp=1"])
    printed = capsys.readouterr().out
    assert "682,636,472,320" in printed and "11,610,067,968" in printed and "688,100,352" in printed


def test_json_with_a_world(capsys: Output) -> None:
    assert main(["check", "deepseek_v3", "--world", "1024", "--json", "--data.train=tokens"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == [] and told["parameters"]["total"] == 671_026_404_352
    assert 0 < told["largest_rank"]["at_rest"] < told["largest_rank"]["computed"] < 2e9


@pytest.mark.parametrize("name", RECIPES)
def test_only_debug_recipes_have_data(name: str, capsys: Output) -> None:
    """Nobody trains a published model on a toy corpus without having said so."""
    assert main(["check", name]) == (0 if name.startswith("debug_") else 1)
    printed = capsys.readouterr().out
    assert ("data.train: names no tokens to train on" in printed) != name.startswith("debug_")
    assert RECIPES[name]().data.validation == ("builtin" if name.startswith("debug_") else None)
    told = ["--data.train", "builtin", "--train.steps", "5000", "--optim.lr", "1e-4"]
    assert main(["check", name, *told]) == 0
    published = name in ("deepseek_v2_lite", "deepseek_v3", "kimi_k2", "olmoe_1b_7b")
    assert (main(["check", name, *told[:2]]) == 0) == (published or name.startswith("debug_"))


def test_missing_data_is_named_beside_the_sizes(capsys: Output) -> None:
    words = ["check", "deepseek_v3", "--world", "2048", "--parallel.ep", "64"]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "671,026,404,352" in printed and "largest of 2,048 ranks" in printed and "no problems" not in printed
    assert "    fix: use --data.train FOLDER, made by `moefold tokenize FILES --out FOLDER`" in printed
    assert printed.endswith("deepseek_v3: 1 problem\n")
    assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [problem["path"] for problem in told["problems"]] == ["data.train"]
    assert told["parameters"]["total"] == 671_026_404_352


def test_missing_data_is_listed_with_the_other_problems(capsys: Output) -> None:
    assert main(["check", "deepseek_v3", "--parallel.ep", "3"]) == 1
    printed = capsys.readouterr().out
    assert "parallel.ep: " in printed and "data.train: " in printed and "671,026,404,352" not in printed


def test_problems_come_with_paths_and_fixes(capsys: Output) -> None:
    assert main(["check", "--parallel.ep", "3", "debug_tiny", "--model.moe.top_k=9"]) == 1
    printed = capsys.readouterr().out
    assert "parallel.ep: 8 experts do not divide over ep=3\n    fix: use 1, 2, 4 or 8" in printed
    assert "model.moe.top_k" in printed and "2 problems" in printed


def test_problems_as_json(capsys: Output) -> None:
    assert main(["check", "debug_tiny", "--json", "--parallel.epp", "2"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["path"] == "parallel.epp" and "'ep'" in problem["fix"]


def test_a_yaml_file(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_run(recipe("kimi_k2_proxy")))
    assert main(["check", str(path)]) == 1
    path.write_text(dump_run(override(recipe("kimi_k2_proxy"), ["data.train=builtin", "train.steps=1"])))
    assert main(["check", str(path)]) == 0
    path.write_text("data: {mixture: [{weight: 1.0}]}")
    assert main(["check", str(path)]) == 1
    assert "data.mixture.0.path: " in capsys.readouterr().out
    path.write_text("model: {dmi: 3}")
    assert main(["check", str(path)]) == 1
    assert "did you mean 'dim'?" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["deepsek_v3"], ["--world", "8"]])
def test_wrong_usage(words: list[str], capsys: Output) -> None:
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err


def test_unknown_recipes_are_guessed(capsys: Output) -> None:
    main(["check", "deepsek_v3"])
    assert "did you mean 'deepseek_v3'?" in capsys.readouterr().err


def test_names_as_written_elsewhere() -> None:
    assert recipe("DeepSeek-V3") == recipe("deepseek_v3")


def test_the_list_has_every_recipe(capsys: Output) -> None:
    assert main(["check", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in RECIPES)


TUNED = [f"{name}@{where}" for name, rows in tuned_layouts().items() for where in rows]


@pytest.mark.parametrize("name", TUNED)
def test_tuned_layouts_pass_the_checks_and_fit(name: str) -> None:
    """Whatever else changes in the planner or the checks; that the planner still chooses them is for the night."""
    gpu, _, number = name.partition("@")[2].rpartition("x")
    run = load_run(name)
    assert check(run, int(number), training=False) == []
    found = predict(workload_of_run(run, cluster_of(gpu.upper(), int(number))))
    assert found.memory.total < 0.95 * found.memory.capacity
    tuned = tuned_layouts()[name.partition("@")[0]][name.partition("@")[2]]
    assert found.memory.total / 2**30 == pytest.approx(tuned.gib, abs=0.06)
    assert found.time.step_seconds == pytest.approx(tuned.step_seconds, rel=1e-3)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in TUNED])
@pytest.mark.timeout(900)
def test_the_planner_still_chooses_the_tuned_layouts(name: str) -> None:
    base, _, where = name.partition("@")
    assert row_of(base, where) == {k: v for k, v in tuned_layouts()[base][where]._asdict().items() if k != "nearest"}


def test_a_tuned_layout_is_named_with_its_recipe(capsys: Output) -> None:
    assert load_run("DeepSeek-V3@H100x1024") == load_run("deepseek_v3@h100x1024") != load_run("deepseek_v3")
    assert main(["check", "deepseek_v3@h100x7"]) == 2
    assert "h100x1024" in capsys.readouterr().err
    assert main(["check", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["deepseek_v3"]["layouts"]["h100x1024"]["nearest"]["what"].startswith(
        "DeepSeek-V3 671B (671.0B parameters) on 1024 H100"
    )
    assert "h100x64" in listed["qwen3_30b_a3b"]["presets"]["latent_accuracy"]["layouts"]


def test_every_tuned_layout_has_a_published_run_beside_it(capsys: Output) -> None:
    assert main(["check", "--list"]) == 0
    printed = capsys.readouterr().out
    for rows in tuned_layouts().values():
        for tuned in rows.values():
            assert tuned.nearest is not None and tuned.nearest.what in printed


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_named_as_listed(name: str) -> None:
    assert RECIPES[name]().name == name and RECIPES[name].__doc__


@pytest.mark.timing
def test_cold_start_is_quick_and_without_torch() -> None:
    code = "import sys; from moefold.cli.main import main; code = main(['check', 'deepseek_v3', '--world', '2048']);"
    code += "assert 'torch' not in sys.modules; sys.exit(code - 1)"
    took = []
    for _ in range(3):
        # Of its own work: tests share the cores.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 1.0


def test_changes_are_taken_out_wherever_they_stand() -> None:
    words, changes = split_changes(["--a.b", "1", "RUN", "--c.d=2", "--world", "8", "--e.f"])
    assert words == ["RUN", "--world", "8"]
    assert changes == ["--a.b", "1", "--c.d=2", "--e.f"]


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp"), [("1f1b", 1, 1), ("1f1b", 3, 1), ("interleaved", 2, 2), ("zb_v", 2, 2)]
)
@pytest.mark.parametrize("name", ["deepseek_v3_proxy", "gpt_oss_20b_proxy"])
def test_pipeline_ranks_hold_every_parameter_once(name: str, schedule: str, pp: int, vpp: int) -> None:
    run = replace(recipe(name), parallel=ParallelConfig(pp=pp, vpp=vpp, schedule=schedule))
    held = [spec.name for parts in parts_by_rank(run) for spec in parameters(run.model) if parts.holds(spec.name)]
    assert sorted(held) == sorted(spec.name for spec in parameters(run.model))


def test_what_several_stages_use_is_held_by_each() -> None:
    run = recipe("deepseek_v3_proxy")
    model = replace(run.model, tied_embeddings=True, num_mtp=1)
    first, middle, last = parts_by_rank(
        replace(run, model=model, parallel=ParallelConfig(pp=3, stages="E" + "t" * model.num_layers + "|m|L"))
    )
    assert [parts.holds("embedding.weight") for parts in (first, middle, last)] == [True, True, True]
    assert [parts.holds("final_norm.weight") for parts in (first, middle, last)] == [False, True, True]


def test_the_largest_share_of_one_rank_is_everything() -> None:
    run = recipe("mixtral_8x7b_proxy")
    model, whole = run.model, parts_by_rank(run)
    share = largest_rank_params(model, fold(ParallelConfig(), 1), whole)
    assert share.computed == share.at_rest == sum(spec.size for spec in parameters(model))
    halves = largest_rank_params(model, fold(ParallelConfig(ep=2), 2), whole)
    assert halves.computed < share.computed and halves.at_rest * 2 == share.at_rest


def test_what_auto_stands_for_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "debug_50m"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("experts in bfloat16") :].splitlines()
    assert [line.split() for line in table[2:4]] == [["cpu", "fused"], ["cuda", "grouped"]]
    assert main(["check", "debug_small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == {"cpu": "fused", "cuda": "sequential"}


def test_dense_and_moe_layers_in_turn_are_counted_apart(capsys: Output) -> None:
    main(["check", "debug_tiny", "--model.num_layers", "6", "--model.moe_every", "2"])
    out = capsys.readouterr().out
    assert "0, 2, ... 4" in out and "1, 3, ... 5" in out


def test_every_matmul_is_listed_with_its_casts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "check",
        "debug_tiny",
        "--casts",
        "--precision.recipe",
        "fp8_blockwise",
        "--precision.wide",
        "[layers.0.*]",
    ]
    assert main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("layers.")]
    assert len(lines) == 12 and {"router", "head"}.isdisjoint(" ".join(map(" ".join, lines)).split("."))
    rows = {line[0]: line[1:] for line in lines}
    assert rows["layers.0.attention.q.weight"] == ["64x64", *["float32"] * 6]
    weight, row = ["e4m3", "128x128", "power_of_two"], ["e4m3", "1x128", "power_of_two"]
    assert rows["layers.1.feed_forward.experts.down"] == ["8x64x32", *row, *weight, *row, *weight, *row, *row]
    assert main([*words, "--json"]) == 0
    casts = json.loads(capsys.readouterr().out)["casts"]
    assert casts["layers.0.attention.q.weight"] == {}
    assert casts["layers.1.attention.q.weight"]["dy_dgrad"] == "e4m3 1x128 power_of_two"
