"""Paths in docstrings, comments and docs lead somewhere: a file that was moved is moved in the prose as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import PACKAGE, ROOT, files, report, shown, text_of, tree_of

# `ops/rope.py`, `tests/body/test_rope.py::test_yarn`, `runtime.py`, [the page](../proof.md).
PATH = re.compile(r"(?<![\w/.*{<~-])((?:\.\./)?(?:[\w-]+/)*[\w-]+\.(?:py|md))\b(?![\w/*])")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[)#]")
# Folders from which prose names a file.
BASES = [ROOT / name for name in ("", "src", "tests", "docs", "benchmarks", "examples")] + [PACKAGE]
# Files that Python itself looks for, and the program of Megatron-LM.
NOT_OURS = {"sitecustomize.py", "usercustomize.py", "pretrain_gpt.py"}
# A tutorial writes files: it says their names where it shows them.
SHOWN = re.compile(r"<!-- file: (\S+) -->")


def known_names() -> set[str]:
    return {path.name for path in ROOT.rglob("*") if path.suffix in (".py", ".md")}


def missing(path: Path, names: set[str]) -> Iterator[str]:
    for text in prose(path):
        known = NOT_OURS | set(SHOWN.findall(text))
        mentions = [word for word in PATH.findall(text) if word not in known and not exists(word, path, names)]
        links = LINK.findall(text) if path.suffix == ".md" else []
        mentions += [link for link in links if not (path.parent / link).exists()]
        yield from (f"{shown(path)}: {mention}" for mention in mentions)


def exists(mention: str, path: Path, names: set[str]) -> bool:
    """From the root, from a folder of code or docs, or from a folder above the file; a bare name may be anywhere."""
    if "/" not in mention:
        return mention in names
    above = [folder for folder in path.parents if ROOT in (folder, *folder.parents)]
    return any((base / mention).exists() for base in [*BASES, *above])


def prose(path: Path) -> Iterator[str]:
    """All of a page or of a source file; of tests, which make up files, the docstrings only."""
    if PACKAGE in path.parents or path.suffix in (".md", ".svg"):
        yield text_of(path)
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def test_every_path_that_is_named_exists() -> None:
    names = known_names()
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    found = {
        what
        for path in [*files("src", "docs", "tests"), *files("docs", suffixes=(".svg",)), *pages]
        for what in missing(path, names)
    }
    offenders = sorted(found)
    assert not offenders, report(offenders)


def test_a_wrong_path_is_noticed() -> None:
    names, page = known_names(), ROOT / "docs" / "proof.md"
    assert exists("moe/layer.py", page, names) and exists("moefold/moe/layer.py", page, names)
    assert exists("../README.md", page, names) and exists("layer.py", page, names)
    assert not exists("moe/no_such_file.py", page, names) and not exists("no_such_file.py", page, names)
    assert PATH.findall("see `moe/layer.py::MoELayer` and plan/*.py") == ["moe/layer.py"]
