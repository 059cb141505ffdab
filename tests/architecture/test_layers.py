"""The import contracts of pyproject.toml hold, and would be noticed if they did not."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--config", str(config), "--no-cache"]
    return subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True)


def test_every_import_points_down() -> None:
    done = lint_imports(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_the_contracts_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    listed = "\n".join(layers).replace("(", "").replace(")", "")
    assert f"```\n{listed}\n```" in (ROOT / "docs" / "architecture.md").read_text()


def test_a_reversed_layer_list_is_noticed(tmp_path: Path) -> None:
    """A contract that cannot fail is worthless: with the layers upside down it must."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    upside_down = tmp_path / "reversed.ini"
    upside_down.write_text(
        "[importlinter]\nroot_package = moefold\n\n[importlinter:contract:reversed]\nname = reversed\ntype = layers\n"
        "containers = moefold\nlayers =\n" + "".join(f"    {layer}\n" for layer in reversed(layers))
    )
    done = lint_imports(upside_down)
    assert done.returncode == 1 and "reversed BROKEN" in done.stdout, done.stdout + done.stderr
