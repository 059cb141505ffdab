"""`requirements.lock`: every package of the extra `dev` and of the build, with its version and the hashes of its files.

    python -m benchmarks.lock --constraint VERSIONS.txt --wheel torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl

`uv` resolves and hashes. It is needed only here and is in no extra. The file names no package index: whichever serves a
file with one of these hashes will do, and no other file is installed. torch has one build per kind of GPU. Its entry
has the hashes of the builds on the public index and of the wheels that are given here; one that is installed already is
kept. GPU libraries that some builds need are not locked: they belong to the build that a machine has chosen.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Versions and hashes of what CI installs, written by `python -m benchmarks.lock`; for Python {python} on Linux.
#   pip install --require-hashes --no-deps -r requirements.lock && pip install --no-build-isolation -e ".[dev]"
"""
# What an editable install of this package needs beside its build backend.
_EDITABLE = "editables"


def normalized(name: str) -> str:
    """The one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path = LOCK) -> dict[str, tuple[str, list[str]]]:
    """Package -> version and hashes."""
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in path.read_text("utf-8").splitlines():
        if begins := re.match(r"([A-Za-z0-9][\w.-]*)==([\w.+!-]+)", line):
            name = normalized(begins[1])
            found[name] = (begins[2], [])
        if digest := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            found[name][1].append(digest[1])
    return found


def resolve(torch_version: str, constraints: Sequence[Path]) -> str:
    """What uv prints for the extra `dev`, the build backend and this version of torch."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        more, settings = Path(folder) / "build.in", Path(folder) / "uv.toml"
        needed = [*pyproject["build-system"]["requires"], _EDITABLE, f"torch=={torch_version}"]
        more.write_text("".join(f"{each}\n" for each in needed))
        # As the build without a GPU says; the others add libraries of their vendor, one version for each build.
        plain = [each for each in importlib.metadata.requires("torch") or () if "extra ==" not in each]
        settings.write_text(
            f'[[dependency-metadata]]\nname = "torch"\nversion = "{torch_version}"\n'
            f"requires-dist = {json.dumps(plain)}\n"
        )
        command = ["uv", "pip", "compile", str(ROOT / "pyproject.toml"), str(more), "--extra", "dev", "--quiet"]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--python", sys.executable]
        command += ["--config-file", str(settings)]
        for path in constraints:
            command += ["--constraint", str(path)]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def with_wheels(text: str, wheels: Sequence[Path]) -> str:
    """The same with the hashes of these wheels under their package's name."""
    for wheel in wheels:
        name = normalized(wheel.name.split("-")[0])
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        text, count = re.subn(rf"(?m)^({re.escape(name)}==\S+) ", rf"\1 \\\n    --hash=sha256:{digest} ", text)
        if count != 1:
            raise SystemExit(f"{wheel.name}: the lock has no package {name}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="of torch (2.13.0)")
    parser.add_argument("--constraint", type=Path, action="append", default=[], help="versions to keep, one per line")
    parser.add_argument("--wheel", type=Path, action="append", default=[], help="a wheel that no index has")
    args = parser.parse_args()
    text = with_wheels(resolve(args.torch, args.constraint), args.wheel)
    LOCK.write_text(HEADER.format(python=f"{sys.version_info[0]}.{sys.version_info[1]}") + text, "utf-8")
    print(f"{LOCK.name}: {len(read_lock())} packages")


if __name__ == "__main__":
    main()
