"""Compile every kernel for cards that are not here, and read off what each binary uses.

`python -m moefold.ops.kernels.build` prints the table, `--markdown` as it stands in docs/kernels.md.

Triton lowers a kernel to PTX and its assembler `ptxas` turns that into a binary for one architecture. Neither needs a
card. Registers and spilled bytes are known to the assembler only, so it is asked a second time, in words. A kernel file
is found by its name, *_triton.py, and by its ``BUILDS``: nobody has to remember to add it to a list.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moefold.ops import kernels
from moefold.ops.kernels.specialization import Build
from moefold.tables import markdown_table, text_table

# Hopper (H100, H200, H800) and Blackwell (B200, GB200), by the name of the architecture and its compute capability.
TARGETS = {"sm_90a": 90, "sm_100a": 100}
THREADS_PER_WARP = 32


@dataclass(frozen=True)
class Built:
    """One binary and what it uses: registers per thread, spilled bytes per thread, shared bytes per program."""

    build: Build
    target: str
    cubin_bytes: int
    registers: int
    spilled: int
    shared: int

    @property
    def over_budget(self) -> str:
        """Empty when within its limits, else what is too much."""
        too_many = [
            f"{what} {used} > {allowed}"
            for what, used, allowed in (
                ("registers", self.registers, self.build.registers),
                ("spilled bytes", self.spilled, self.build.spill_bytes),
            )
            if used > allowed
        ]
        return f"{self.build.name} on {self.target}: {', '.join(too_many)}" if too_many else ""


def specializations() -> tuple[Build, ...]:
    """What every kernel file wants built."""
    names = sorted(found.name for found in pkgutil.iter_modules(kernels.__path__) if found.name.endswith("_triton"))
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    return tuple(build for module in modules for build in module.BUILDS)


def compile_for(build: Build, target: str) -> Built:
    source = ASTSource(build.kernel, build.types(), dict(build.constexprs), build.attributes())
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True, **build.options}
    made = triton.compile(source, target=GPUTarget("cuda", TARGETS[target], THREADS_PER_WARP), options=options)
    words = assembler_report(made.asm["ptx"], target)
    return Built(
        build,
        target,
        cubin_bytes=len(made.asm["cubin"]),
        registers=_number(r"Used (\d+) registers", words),
        spilled=_number(r"(\d+) bytes spill stores", words),
        shared=made.metadata.shared,
    )


def assembler_report(ptx: str, target: str) -> str:
    """What `ptxas -v` says, with the flags that Triton gives it."""
    assembler = triton.knobs.nvidia.ptxas_blackwell.path
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        command = [assembler, "-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={target}", str(text)]
        done = subprocess.run([*command, "-o", f"{text}.o"], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stderr


def build_all(builds: Sequence[Build], targets: Sequence[str] = tuple(TARGETS)) -> Iterator[Built]:
    for build in builds:
        for target in targets:
            yield compile_for(build, target)


def table(built: Sequence[Built]) -> tuple[tuple[str, ...], list[list[str]]]:
    """One row per specialization, the targets side by side; header and rows."""
    targets = list(dict.fromkeys(one.target for one in built))
    used = {(one.build.name, one.target): one for one in built}
    rows = []
    for build in dict.fromkeys(one.build.name for one in built):
        found = [used[build, target] for target in targets]
        rows.append(
            [
                build,
                str(found[0].build.num_warps),
                *(str(one.registers) for one in found),
                *(str(one.spilled) for one in found),
                *(str(one.shared) for one in found),
            ]
        )
    columns = [f"{what} {target}" for what in ("registers", "spilled B", "shared B") for target in targets]
    return ("kernel and size", "warps", *columns), rows


def _number(pattern: str, words: str) -> int:
    found = re.search(pattern, words)
    assert found is not None, f"the assembler did not say {pattern!r}:\n{words}"
    return int(found.group(1))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moefold.ops.kernels.build",
        description="Build every GPU kernel without a GPU; print what each uses.",
        epilog="example: python -m moefold.ops.kernels.build --only permute --target sm_90a",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="kernels with this word in their name")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all of them")
    parser.add_argument("--markdown", action="store_true", help="as in docs/kernels.md")
    args = parser.parse_args()
    builds = [build for build in specializations() if args.only in build.name]
    built = list(build_all(builds, args.target or tuple(TARGETS)))
    print((markdown_table if args.markdown else text_table)(*table(built)))
    too_much = [one.over_budget for one in built if one.over_budget]
    print("\n".join(["", *too_much]) if too_much else "", end="")
    return 1 if too_much else 0


if __name__ == "__main__":
    raise SystemExit(main())
