"""What a release carries beside code: metadata, a README that any index can show, citation and container files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import moefold
from moefold.cli.main import main

ROOT = Path(__file__).parents[1]
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


def test_the_readme_has_no_link_that_an_index_cannot_follow() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert not re.findall(r"\]\((?!https?://)[^)]*\)|<img|!\[", text)


def test_the_picture_of_the_readme_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wide enough: the command cuts what a narrow terminal cannot show.
    monkeypatch.setenv("COLUMNS", "120")
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("    $ moefold schedule ")]
    assert main(lines[at].split()[2:]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank 0 |") or " | " in line]
    assert [line.strip() for line in lines[at + 1 : at + 5]] == [line.rstrip() for line in printed[:4]]


def test_metadata_and_citation_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == moefold.__version__ and citation["license"] == project["license"]
    assert citation["authors"] == project["authors"] == [{"name": "moefold contributors"}]
    assert {"cff-version", "message", "title", "type"} <= set(citation)
    assert not any(each.startswith("License ::") for each in project["classifiers"]), "the license key says it"


def test_the_container_file_copies_what_there_is_and_drops_its_rights() -> None:
    """Not built here: no builder is installed. Its instructions are known ones, in an order that works."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text("utf-8"))
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    names = [name for name, _ in steps]
    assert names[0] == "FROM" and set(names) == INSTRUCTIONS
    copied = [source for name, words in steps if name == "COPY" for source in words.split()[:-1]]
    assert copied and all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {project["readme"], *project["license-files"], "pyproject.toml", "src"}
    assert needed <= set(copied)
    # Installed as root, run as somebody else.
    last_install = max(place for place, (name, words) in enumerate(steps) if "pip install" in words)
    assert last_install < names.index("USER") < names.index("ENTRYPOINT")
    (extras,) = re.findall(r'pip install[^"]*"\.\[([^\]]+)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert dict(map(tuple, steps))["ENTRYPOINT"] == '["moefold"]' and "moefold" in project["scripts"]
