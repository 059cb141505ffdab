"""Without torch: every module of the brain imports, verbs that need none work, and the others say what is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
BRAIN = (
    "redaction",
    "errors",
    "private_files",
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

RUN_VERB = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from moefold.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
# A command of each, in a folder where nothing is.
WITHOUT = (
    "check debug_tiny",
    "layout --world 8 --ep 4",
    "schedule 1f1b --stages 2 --microbatches 4",
    "plan debug_small --gpu H100 --gpus 8",
    "init debug_tiny",
    "doctor",
    "doctor --json",
)
NEEDS = (
    "train debug_tiny",
    "prove debug_tiny --world 1",
    "dryrun debug_tiny --world 1",
    "bench layer",
    "convert to-hf nowhere exported",
    "inspect nowhere",
    "doctor --gpus",
    "support-bundle",
)


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
    assert {"moefold.config.run", "moefold.topology.folded_layout", "moefold.batching.wave_packing"} <= set(modules)
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    done = subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def verb(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN_VERB, *words.split()]
    return subprocess.run(command, env={"PYTHONPATH": str(SRC)}, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("words", WITHOUT)
def test_verbs_that_need_no_torch(words: str, tmp_path: Path) -> None:
    done = verb(words, tmp_path)
    assert done.returncode == 0 and done.stdout, done.stderr
    if words == "doctor":
        assert 'not installed; pip install "moefold[torch]"' in done.stdout


@pytest.mark.parametrize("words", NEEDS)
def test_verbs_that_need_torch_say_so(words: str, tmp_path: Path) -> None:
    done = verb(words, tmp_path)
    said = f'moefold: moefold {words.split()[0]} needs torch, which is not installed: pip install "moefold[torch]"'
    assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_python_api_says_so() -> None:
    code = RUN_VERB.partition("from moefold")[0] + "import moefold; moefold.load_run('debug_tiny'); moefold.build_model"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "moefold.errors.MissingPackageError: moefold.build_model needs torch, which is not installed"
    )
