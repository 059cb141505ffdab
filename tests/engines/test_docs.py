"""The table of docs/engines.md against the code's tables: settings, versions, recorded signatures, tests."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.test_signatures import ADAPTERS, RECORDED

from moefold.ops.backends import BACKENDS
from moefold.ops.engines import ENGINES

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "engines.md").read_text()
FLASH = json.loads((ROOT / "tests" / "body" / "flash_attn_signatures.json").read_text())


def rows() -> dict[str, list[str]]:
    """The cells of the first table, by setting."""
    lines = DOC[DOC.index("| setting |") :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]
    return {setting: others for setting, *others in cells}


def recorded_from(engine: str) -> str:
    """Version, commit and its date, as the recorded files say."""
    if engine not in ADAPTERS:
        releases = [release.split()[1] for release in FLASH if release.split()[0] == engine]
        return ", ".join(sorted(releases, reverse=True))
    found = [RECORDED[name] for name in ADAPTERS[engine].recorded]
    return ", ".join(
        f"{each['version']} ({each['commit'][:7]}, {each.get('committed', 'as installed')})" for each in found
    )


def test_every_engine_of_the_code_has_its_row() -> None:
    named = {f"{each.setting}: {each.name}": each.engine for each in BACKENDS if each.engine in ENGINES}
    table = rows()
    assert table.keys() == named.keys()
    for setting, engine in named.items():
        assert engine is not None
        library, versions, recorded, test, ran = table[setting]
        assert library and versions == ENGINES[engine].needs, setting
        assert recorded == recorded_from(engine), setting
        assert (ROOT / test).is_file() and ran.startswith("a fake on CPU"), setting


def test_the_page_says_that_no_gpu_was_used() -> None:
    assert "**None of them was run on a GPU by us.**" in DOC


def test_every_way_to_install_is_told() -> None:
    for engine in ENGINES.values():
        if engine.extra is not None:
            assert f"moefold[{engine.extra}]" in DOC
