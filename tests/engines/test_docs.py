"""The table of docs/engines.md against the code's tables: settings, versions, recorded signatures, tests."""

from __future__ import annotations

from pathlib import Path

from tests.engines.test_signatures import RECORDED

from moefold.ops.backends import BACKENDS
from moefold.ops.engines import ENGINES

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "engines.md").read_text()


def rows() -> dict[str, list[str]]:
    """The cells of the first table, by setting."""
    lines = DOC[DOC.index("| setting |") :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]
    return {setting: others for setting, *others in cells}


def recorded_from(engine: str) -> str:
    """Version, and the commit with its date or the wheel, as the recorded files say."""
    found = [each for each in RECORDED.values() if each["library"] == engine]
    return ", ".join(f"{each['version']} ({origin(each)})" for each in sorted(found, key=lambda each: each["version"]))


def origin(recorded: dict[str, str]) -> str:
    if "commit" not in recorded:
        return f"wheel, sha256 {recorded['sha256'][:7]}"
    return f"{recorded['commit'][:7]}, {recorded.get('committed', 'as installed')}"


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
