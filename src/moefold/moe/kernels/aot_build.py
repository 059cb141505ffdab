"""Compile every kernel for GPUs without having one, and read the resources that each binary uses.

`python -m moefold.moe.kernels.aot_build` prints the tables, `--into docs/kernels.md` or `docs/precision.md` brings
those in the page up to date.

Triton lowers a kernel to PTX and its assembler `ptxas` compiles that to a binary for one architecture. Neither needs a
GPU. Only the assembler reports registers and spilled bytes, so it runs a second time, with `-v`. A kernel file is found
by its name, *_triton.py, and lists its builds as ``BUILDS``.
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
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moefold.moe import kernels as moe_kernels
from moefold.ops import kernels as op_kernels
from moefold.ops.kernels.aot_specs import Build
from moefold.precision import cast_kernels
from moefold.private_files import replace_file
from moefold.tables import markdown_table, text_table

# Hopper (H100, H200, H800) and Blackwell (B200, GB200), by the name of the architecture and its compute capability.
TARGETS = {"sm_90a": 90, "sm_100a": 100}
# Casts are built for Blackwell's workstation cards as well (RTX PRO 6000, RTX 5090): by the page that lists a build.
CAPABILITIES = TARGETS | {"sm_120a": 120}
PAGE_TARGETS = {"kernels": tuple(TARGETS), "precision": tuple(CAPABILITIES)}
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
        """Empty when within its limits, else the figures that exceed them."""
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
    """The builds of every kernel file."""
    found = sorted(
        (module.name, package.__name__)
        for package in (moe_kernels, op_kernels, cast_kernels)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.endswith("_triton")
    )
    modules = [importlib.import_module(f"{package}.{name}") for name, package in found]
    return tuple(build for module in modules for build in module.BUILDS)


def compile_for(build: Build, target: str) -> Built:
    source = ASTSource(build.kernel, build.types(), dict(build.constexprs), build.attributes())
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True, **build.options}
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITIES[target], THREADS_PER_WARP), options=options)
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
    """The output of `ptxas -v`, with the flags that Triton uses."""
    assembler = triton.knobs.nvidia.ptxas_blackwell.path
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        command = [assembler, "-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={target}", str(text)]
        done = subprocess.run([*command, "-o", f"{text}.o"], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stderr


def build_all(builds: Sequence[Build], targets: Sequence[str] = ()) -> Iterator[Built]:
    """``targets`` empty: those of the page that lists a build."""
    for build in builds:
        for target in targets or PAGE_TARGETS[build.page]:
            yield compile_for(build, target)


def usage_table(built: Sequence[Built]) -> tuple[tuple[str, ...], list[list[str]]]:
    """One row per specialization, its figures for every target side by side; header and rows."""
    names = dict.fromkeys(one.build.name for one in built)
    rows = [usage_row([one for one in built if one.build.name == name]) for name in names]
    targets = " / ".join(dict.fromkeys(one.target for one in built))
    return ("kernel and layer", "warps", *(f"{what}, {targets}" for what in ("registers", "spilled", "shared"))), rows


def usage_row(built: Sequence[Built]) -> list[str]:
    """One specialization on every target."""
    figures = ([one.registers for one in built], [one.spilled for one in built], [one.shared for one in built])
    return [built[0].build.name, str(built[0].build.num_warps), *(" / ".join(map(str, some)) for some in figures)]


def traffic_table(builds: Sequence[Build]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Bytes per token, as a formula and as numbers; needs no compiler."""
    rows = [
        [build.name, build.traffic.formula, f"{build.traffic.moved:,.0f}", f"{build.traffic.minimum:,.0f}",
         f"{build.traffic.moved / build.traffic.minimum:.2f}"]
        for build in builds
        if build.traffic is not None
    ]  # fmt: skip
    return ("kernel and layer", "bytes per token", "moved", "least", "ratio"), rows


def with_tables(page: str, *tables: str) -> str:
    """The page with each table in the place of the one that has the same headings."""
    for table in tables:
        headings, new = re.escape(table.splitlines()[0]), f"{table}\n".replace("\\", r"\\")
        page, found = re.subn(rf"^{headings}\n(\|.*\n)*", new, page, flags=re.MULTILINE)
        assert found == 1, f"{found} tables in the page have the headings {table.splitlines()[0]}"
    return page


def _number(pattern: str, words: str) -> int:
    found = re.search(pattern, words)
    assert found is not None, f"the assembler did not report {pattern!r}:\n{words}"
    return int(found.group(1))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moefold.moe.kernels.aot_build",
        description="Build every GPU kernel without a GPU; print what each uses.",
        epilog="example: python -m moefold.moe.kernels.aot_build --only permute --target sm_90a",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="kernels with this word in their name")
    parser.add_argument("--target", choices=CAPABILITIES, action="append", help="default: all of them")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="replace the tables of this Markdown page")
    args = parser.parse_args()
    pages = PAGE_TARGETS if args.into is None else (args.into.stem,)
    builds = [build for build in specializations() if args.only in build.name and build.page in pages]
    targets = args.target or ()
    binaries = build_all(builds, targets)
    total = sum(len(targets or PAGE_TARGETS[build.page]) for build in builds)
    shown = Console(stderr=True)
    built = list(track(binaries, "building", total=total, console=shown, disable=not shown.is_terminal))
    usage = [usage_table([one for one in built if one.build.page == page]) for page in pages]
    tables = [table for table in (*usage, traffic_table(builds)) if table[1]]
    if args.into is None:
        print("\n\n".join(text_table(*table) for table in tables))
    else:
        replace_file(args.into, with_tables(args.into.read_text(), *(markdown_table(*table) for table in tables)))
    too_much = [one.over_budget for one in built if one.over_budget]
    print("\n".join(["", *too_much]) if too_much else "", end="")
    return 1 if too_much else 0


if __name__ == "__main__":
    raise SystemExit(main())
