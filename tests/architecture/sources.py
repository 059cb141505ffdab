"""The files that architecture tests read, and the identifiers in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "moefold"


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def files(*folders: str, suffixes: tuple[str, ...] = (".py", ".md")) -> list[Path]:
    """All files with these suffixes in folders of the repository that exist."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return sorted(path for path in found if "__pycache__" not in path.parts)


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def report(offenders: list[str]) -> str:
    """One message with every offender, for the assertion of a loop over files."""
    return f"{len(offenders)} found:\n" + "\n".join(offenders)


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that code defines or uses, with its line; names inside f-strings too."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name, line
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, line
            case ast.keyword(arg=str(name)):
                yield name, line
            case ast.alias(name=name, asname=other):
                yield from ((part, line) for part in name.split("."))
                if other:
                    yield other, line
            case ast.ImportFrom(module=str(name)):
                yield from ((part, line) for part in name.split("."))
