"""Every module of the brain imports on a machine that has no torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
BRAIN = (
    "errors",
    "units",
    "tables",
    "html",
    "config",
    "topology",
    "blueprint",
    "schedule",
    "batching",
    "hardware",
    "checks",
    "plan",
    "recipes",
    "api.runs",
    "api.plans",
)

IMPORT_ALL = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"the brain asked for {name}")

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def brain_modules() -> list[str]:
    found = []
    for part in BRAIN:
        package = SRC / "moefold" / part.replace(".", "/")
        for path in sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]:
            assert path.exists(), f"{part} is neither a package nor a module"
            found.append(".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"))
    return found


def test_the_list_is_the_contracts() -> None:
    """The same packages that pyproject.toml forbids to import torch."""
    contracts = tomllib.loads((SRC.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    sources = next(contract["source_modules"] for contract in contracts if contract["type"] == "forbidden")
    assert set(BRAIN) == {name.removeprefix("moefold.").removesuffix(".*") for name in sources}


def test_the_brain_imports_without_torch() -> None:
    modules = brain_modules()
    assert {"moefold.config.run", "moefold.topology.folded_layout", "moefold.batching.step_plan"} <= set(modules)
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
