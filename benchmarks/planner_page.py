"""Put the planner that runs in the browser together: a folder of static files.

    python -m benchmarks.planner_page OUT

Copies docs/planner and adds what it loads: Pyodide from npm, pydantic from PyPI with its core compiled for
WebAssembly, the Python files of PyYAML and rich from this environment, and moefold without the parts that need torch.
Pyodide and pydantic_core belong together (one Python, one ABI), so both are pinned here. `OUT/manifest.json` names
every file with its size and SHA-256. Serve the folder with any web server, for example Python's `http.server`.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import rich
import yaml

import moefold
from moefold.plan.report.plan_page import CSS

PYODIDE = "pyodide@314.0.7"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PYTHON, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"
PACKAGES = ("pydantic==2.14.3", "pydantic-core==2.50.4")
# Packages and modules of moefold that the planner's page needs; none imports torch.
BRAIN = ("config", "topology", "blueprint", "schedule", "batching", "checks", "hardware", "recipes", "plan", "html")
MODULES = (
    "__init__",
    "errors",
    "redaction",
    "private_files",
    "tables",
    "units",
    "api/__init__",
    "api/plans",
    "api/runs",
)
SOURCE = Path(__file__).parents[1] / "docs" / "planner"
STATUS_CSS = """
#status{position:fixed;left:0;right:0;bottom:0;padding:10px 16px;background:var(--card);color:var(--soft);z-index:3;
border-top:1px solid var(--line);font-size:13.5px}#status.wrong{color:var(--bad)}#status[hidden]{display:none}
#status i{position:absolute;left:0;top:-1px;height:3px;background:var(--c1);transition:width .2s}
"""


def build(out: Path) -> dict[str, object]:
    """Writes the folder and returns its manifest."""
    shutil.copytree(SOURCE, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (out / "planner.css").write_text(CSS + STATUS_CSS, "utf-8")
    for folder in ("pyodide", "packages"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        _pyodide(Path(scratch), out / "pyodide")
    _wheels(out / "packages")
    for package in (yaml, rich):
        path = Path(package.__path__[0])
        _zipped(out / "packages" / f"{path.name}.zip", _files_of(path, path.name))
    _zipped(out / "packages" / "moefold.zip", _moefold_files())
    packages = sorted(path.name for path in (out / "packages").iterdir())
    files = {str(path.relative_to(out)): _described(path) for path in sorted(out.rglob("*")) if path.is_file()}
    files.pop("manifest.json", None)
    manifest: dict[str, object] = {"moefold": moefold.__version__, "packages": packages, "files": files}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    return manifest


def _pyodide(scratch: Path, out: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed; Pyodide is an npm package")
    subprocess.run([npm, "pack", "--silent", PYODIDE], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for name in PYODIDE_FILES:
            entry = tar.extractfile(f"package/{name}")
            if entry is None:
                raise RuntimeError(f"{PYODIDE} has no {name}")
            (out / name).write_bytes(entry.read())


def _wheels(out: Path) -> None:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    words += ["--only-binary=:all:", "--platform", PLATFORM, "--python-version", PYTHON, "--dest", str(out), *PACKAGES]
    subprocess.run(words, check=True)


def _files_of(folder: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Python and data files of a package, without compiled ones."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".json"):
            yield f"{name}/{path.relative_to(folder)}", path.read_bytes()


def _moefold_files() -> Iterator[tuple[str, bytes]]:
    package = Path(moefold.__file__).parent
    for name in BRAIN:
        yield from _files_of(package / name, f"moefold/{name}")
    for name in MODULES:
        yield f"moefold/{name}.py", (package / f"{name}.py").read_bytes()
    yield "browser_plan.py", (SOURCE / "browser_plan.py").read_bytes()


def _zipped(path: Path, files: Iterator[tuple[str, bytes]]) -> None:
    """Equal files give equal bytes: entries carry no time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files:
            archive.writestr(zipfile.ZipInfo(name), body, zipfile.ZIP_DEFLATED)
    path.write_bytes(buffer.getvalue())


def _described(path: Path) -> dict[str, object]:
    body = path.read_bytes()
    return {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.planner_page OUT")
    found = build(Path(sys.argv[1]))
    size = sum(path.stat().st_size for path in Path(sys.argv[1]).rglob("*") if path.is_file())
    print(f"{sys.argv[1]}: {size / 2**20:.1f} MiB")
