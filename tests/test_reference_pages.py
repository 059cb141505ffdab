"""Reference pages are what their command writes, and every verb and key is on them."""

from __future__ import annotations

import pytest

from benchmarks.reference_pages import FOLDER, _unit, pages
from moefold.cli.main import VERBS


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
    assert (_unit("save_every"), _unit("moe_every"), _unit("dim"), _unit("kind")) == ("steps", "layers", "elements", "")
