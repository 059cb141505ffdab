"""The decision log is complete, and the hooks before a commit download nothing."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs" / "decisions"
HEADINGS = ["Context", "Decision", "Tried or rejected", "Consequences", "How we would know it was wrong"]


def test_decisions_are_numbered_without_gaps_and_listed_in_the_index() -> None:
    pages = sorted(page.name for page in LOG.glob("[0-9]*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    assert re.findall(r"^\| \[\d{4}\]\((.+?)\)", (LOG / "README.md").read_text(), re.MULTILINE) == pages


def test_every_decision_answers_the_same_questions() -> None:
    for page in LOG.glob("[0-9]*.md"):
        text = page.read_text()
        assert text.startswith(f"# {page.name[:4]}: "), page.name
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS, page.name


def test_hooks_run_what_is_installed() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    assert {hook["language"] for hook in repos[0]["hooks"]} == {"system"}
