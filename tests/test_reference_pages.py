"""Reference pages are what their command writes, and every verb and key is on them."""

from __future__ import annotations

import re

import pytest

from benchmarks.concept_figures import figures
from benchmarks.reference_pages import FOLDER, _unit, pages
from moefold import load_run
from moefold.cli.main import VERBS
from moefold.schedule.names import schedule_named


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", ["cli.md", "config.md", "errors.md"])
def test_a_page_is_what_the_command_writes(written: dict[str, str], name: str) -> None:
    page = (FOLDER / name).read_text("utf-8")
    assert page == written[name], f"docs/reference/{name} is old: run `python -m benchmarks.reference_pages`"


def test_every_verb_and_the_keys_of_a_launch_are_there(written: dict[str, str]) -> None:
    for verb in VERBS:
        assert f"\n## moefold {verb}\n" in written["cli.md"]
    for key in ("`parallel.ep`", "`model.moe.top_k`", "`optim.lr_schedule.kind`", "`data.mixture`", "`memory.retain"):
        assert key in written["config.md"], key


def test_units_go_by_the_end_of_a_name() -> None:
    steps = ("train.validate_every", "train.saving.every", "optim.lr_schedule.decay")
    layers = ("model.moe_every", "model.attention.window_every", "model.linear_attention.full_attention_every")
    assert {*map(_unit, steps)} == {"steps"} and {*map(_unit, layers)} == {"layers"}
    assert (_unit("model.dim"), _unit("data.global_batch")) == ("elements", "sequences per step")
    for key in ("model.attention.kind", "model.moe.balance.global_batch", "model.rope.yarn.mscale_all_dim", "optim.lr"):
        assert _unit(key) == "", key


def test_keys_that_other_frameworks_flags_became_exist(written: dict[str, str]) -> None:
    text = (FOLDER.parent / "coming-from.md").read_text("utf-8")
    rows = [row.split("|")[1:4] for row in text.splitlines() if row.startswith("| `")]
    assert len(rows) > 50
    for _, ours, note in rows:
        for key in re.findall(r"`([a-z]+\.[a-z_0-9.]+)`", ours + note):
            assert f"`{key}`" in written["config.md"], key


def test_values_that_other_frameworks_flags_became_are_accepted() -> None:
    text = (FOLDER.parent / "coming-from.md").read_text("utf-8")
    said = sorted(set(re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+): ([a-z_0-9]+)`", text)))
    assert len(said) > 30
    latent = load_run("deepseek_v3_proxy", {"model.moe.capacity.factor": 1.0})
    grouped = load_run("mixtral_8x7b_proxy", {"model.moe.capacity.factor": 1.0})
    for key, value in said:
        start = latent if value == "mla" else grouped
        load_run(start, {key: {"true": True}.get(value, value)})
        if key == "parallel.schedule":
            schedule_named(value)


def test_quoted_messages_are_in_the_source() -> None:
    text = (FOLDER.parent / "troubleshooting.md").read_text("utf-8")
    source = "\n".join(path.read_text("utf-8") for path in (FOLDER.parents[1] / "src").rglob("*.py"))
    said = [row.split("|")[2].strip(" `") for row in text.splitlines()[7:] if row.startswith("| ")]
    assert sum(map(bool, said)) > 8
    for words in filter(None, said):
        assert words in source, words


def test_figures_are_what_their_command_draws() -> None:
    for name, drawn in figures().items():
        said = f"docs/figures/{name} is old: run `python -m benchmarks.concept_figures`"
        assert (FOLDER.parent / "figures" / name).read_text("utf-8") == drawn, said
