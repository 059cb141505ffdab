"""Comparisons with other libraries stay outside the wheel: moefold imports neither them nor those libraries."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = {"benchmarks", "transformers", "torchtitan", "megatron", "nemo_automodel", "accelerate"}
# The extra `hf`: the check of converted weights against transformers' logits.
ALLOWED = {"checkpoint/hf/logits_check.py": {"transformers"}}


def imported(source: str) -> Iterator[str]:
    """First parts of the names of imported modules, also of those that `import_module` is given."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value.partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant))


def test_moefold_imports_no_other_training_library() -> None:
    package = ROOT / "src" / "moefold"
    found = {}
    for path in package.rglob("*.py"):
        name = str(path.relative_to(package))
        if extra := set(imported(path.read_text())) & OTHERS - ALLOWED.get(name, set()):
            found[name] = extra
    assert found == {}


def test_the_wheel_is_the_package_alone() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/moefold"]}
    assert (ROOT / "benchmarks" / "peers" / "torchtitan.py").is_file()


@pytest.mark.parametrize(
    "source", ["import transformers.models", "from megatron.core import x", "import_module('torchtitan.models')"]
)
def test_an_import_is_noticed(source: str) -> None:
    assert set(imported(source)) & OTHERS
