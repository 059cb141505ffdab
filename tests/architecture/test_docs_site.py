"""The docs site: every page is in its navigation, both builders accept it, and pages load nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.architecture.sources import ROOT, report

# An address that a browser loads by itself; the target of <a href> is loaded when a reader asks for it.
LOADED = re.compile(
    r"<(?!a\b)[a-z]+[^>]*?\b(?:src|href|srcset|data|poster)=[\"']?((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE
)
LOADED_BY_CSS = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
BUILDERS = {
    "mkdocs": ("-m", "mkdocs", "build", "--strict"),
    "zensical": ("-c", "from zensical.main import cli; cli()", "build", "--strict"),
}


def site() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8")))


def pages_of(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for child in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages_of(child)


def loaded_from_elsewhere(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text("utf-8")
            found += [
                f"{path.name}: {address}" for pattern in (LOADED, LOADED_BY_CSS) for address in pattern.findall(text)
            ]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    linked = list(pages_of(site()["nav"]))
    left_out = [pattern.removeprefix("/") for pattern in site()["not_in_nav"].split()]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    offenders = [
        f"{page}: not in the nav of mkdocs.yml"
        for page in sorted(pages - set(linked))
        if not any(fnmatch(page, pattern) for pattern in left_out)
    ]
    offenders += [f"{page}: in the nav of mkdocs.yml, but not there" for page in sorted(set(linked) - pages)]
    offenders += [
        f"{page}: twice in the nav of mkdocs.yml" for page in sorted({p for p in linked if linked.count(p) > 1})
    ]
    assert not offenders, report(offenders)


@pytest.mark.slow
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_site_builds_without_a_warning(builder: str, tmp_path: Path) -> None:
    pytest.importorskip(builder, reason="pip install 'moefold[docs]'")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    done = subprocess.run(
        [sys.executable, *BUILDERS[builder]], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING -" not in said and (builder != "zensical" or "No issues found" in said), said
    built = {str(path.relative_to(tmp_path / "site").with_suffix(".md")) for path in tmp_path.rglob("site/**/*.html")}
    named = {page.replace("README", "index") for page in pages_of(site()["nav"])}
    assert named <= built
    assert not loaded_from_elsewhere(tmp_path / "site")


@pytest.mark.slow
def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'moefold[docs]'")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](no-such-page.md)\n")
    done = subprocess.run(
        [sys.executable, *BUILDERS["mkdocs"]], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0 and "no-such-page.md" in done.stdout + done.stderr


def test_an_address_outside_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://x.org">x</a><script src="https://x.org/a.js"></script><link rel="x" href="//y.org/b.css">'
        '<img src="figures/a.svg">',
        "utf-8",
    )
    (tmp_path / "a.css").write_text("@import 'https://z.org/c.css'; i{background:url(//z.org/d.png)}", "utf-8")
    assert len(loaded_from_elsewhere(tmp_path)) == 4
