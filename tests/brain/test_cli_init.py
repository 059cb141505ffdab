"""A run file that inherits from a recipe: what it means, what `moefold init` writes, and what it says of mistakes."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from moefold.api.runs import load_run
from moefold.cli.init import SECTIONS, key_comments, run_file, section_comment
from moefold.cli.main import main
from moefold.config.data import DataConfig
from moefold.config.loading import parse_run
from moefold.config.run import RunConfig
from moefold.errors import ConfigError
from moefold.recipes.catalog import RECIPES, recipe

Output = pytest.CaptureFixture[str]


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_run(text, recipe)
    return [str(problem) for problem in error.value.problems]


def test_a_file_has_the_recipes_values_where_it_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: DeepSeek-V3\nname: mine\nparallel: {ep: 32}\nmemory:\n  retain: {core: offload}\n")
    run, base = load_run(path, {"optim.lr": "1e-4"}), recipe("deepseek_v3")
    assert run.model == base.model and (run.name, run.parallel.ep, run.optim.lr) == ("mine", 32, 1e-4)
    assert run.memory == replace(base.memory, retain=replace(base.memory.retain, core="offload"))
    assert run.parallel == replace(base.parallel, ep=32)


def test_quoted_text_stays_text_and_lists_are_replaced() -> None:
    run = parse_run('recipe: debug_tiny\nname: "8"\ndata: {mixture: [{path: a}, {path: b, weight: 2}]}', recipe)
    assert run.name == "8" and [(each.path, each.weight) for each in run.data.mixture] == [("a", 1.0), ("b", 2.0)]


def test_another_kind_of_section_has_its_own_defaults() -> None:
    run = parse_run("recipe: debug_mla\nmodel: {attention: {num_heads: 2, kind: gqa, num_kv_heads: 2}}", recipe)
    assert (run.model.attention.kind, run.model.attention.num_heads) == ("gqa", 2)


def test_mistakes_are_named() -> None:
    (problem,) = problems("recipe: deepsek_v3\nparallel: {ep: 8}\n")
    assert problem.startswith("recipe: ") and "deepseek_v3" in problem
    (problem,) = problems("recipe: [debug_tiny]\n")
    assert problem.startswith("recipe: ")
    found = problems("recipe: debug_tiny\nparallel: {eb: 8}\ndata: {seq_len: '8'}\nname: {first: x}\n")
    assert [problem.split(":")[0] for problem in sorted(found)] == ["data.seq_len", "name.first", "parallel.eb"]
    # Checkpoints and run directories hold whole runs, which inherit nothing.
    with pytest.raises(ConfigError, match="recipe"):
        parse_run("recipe: debug_tiny\n")


@pytest.mark.parametrize("name", RECIPES)
def test_what_init_writes_is_the_recipe(name: str) -> None:
    base = recipe(name)
    text = "\n".join(run_file(name, "mine", base))
    assert parse_run(text, recipe) == replace(base, name="mine")
    assert "None" not in text and max(map(len, text.splitlines())) <= 160
    assert ("REQUIRED" in text) == (base.data.train is None)


def test_init_takes_changes_and_a_name(capsys: Output, tmp_path: Path) -> None:
    assert main(["init", "debug-tiny", "--train.steps", "5", "--name", "hello"]) == 0
    path = tmp_path / "hello.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_run(path) == replace(load_run("debug_tiny", {"train.steps": 5}), name="hello")
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    assert main(["init", "debug_tiny", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recipe"] == "debug_tiny" and said["name"] == "my_debug_tiny" and set(SECTIONS) < set(said)
    assert main(["init", "debug_tiny.yaml"]) == 2


def test_comments_are_those_above_the_fields() -> None:
    comments = key_comments(DataConfig)
    assert comments["packing"].startswith("What a sample is. concat: a window") and "seq_len" not in comments
    assert comments["validation"].endswith("None: no validation.")
    sections = [type(getattr(RunConfig(), field.name)) for field in fields(RunConfig)]
    assert all(section_comment(section) for section in sections if is_dataclass(section))
