"""`moefold doctor`: hardware and packages of this machine, which backends can run on it, and why others cannot."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from moefold import __version__
from moefold.errors import WITHOUT_TORCH
from moefold.tables import text_table
from moefold.units import format_bytes

if TYPE_CHECKING:
    from moefold.cli.run_argument import Subparsers
    from moefold.ops.host_probe import HostInfo

EXAMPLES = """examples:
  moefold doctor
  moefold doctor --device cuda --json
  moefold doctor --gpus
  torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main doctor --gpus
  srun --ntasks-per-node 8 --gpus-per-node 8 moefold doctor --gpus --seconds 30

A backend is chosen by name in the run's configuration (kernels.backend, .experts, .attention); one that cannot run
is refused at the start, never replaced.
--gpus shows GPUs, driver, NCCL, links and settings that slow them down; under torchrun or srun it also measures the
links between all ranks, and rank 0 prints a row per rank.
Exits with 0; with --gpus and without a launcher, with 1 when something that a run on GPUs needs is missing."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show hardware, packages and which backends can run here",
        description="Show torch, devices, CPU features, the allocator and optional packages of this machine, and the "
        "backends with the reason for each that cannot run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="backends of this device (default: cuda if there is a GPU)"
    )
    parser.add_argument("--gpus", action="store_true", help="GPUs, driver, NCCL, links, and what slows them down")
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="about how long links are measured (default 30)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.ops.host_probe import CPU_FEATURES, package_rows, probe_host

    if args.gpus:
        from moefold.cli.doctor_gpus import examine_gpus

        return examine_gpus(args.seconds, args.json, args.device)
    host = probe_host()
    device = args.device or host.device
    rows = []
    if host.torch is not None:
        from moefold.ops.backends import as_rows

        rows = as_rows(device, host)
    if args.json:
        facts = asdict(host) | {"cpu_features": {name: name in host.cpu_features for name in CPU_FEATURES}}
        found = {"host": facts, "device": device, "packages": package_rows(host), "backends": rows}
        print(json.dumps({"moefold": __version__} | found, indent=2))
        return 0
    print(text_table(("what", "on this machine"), _facts(host)))
    print()
    print(
        text_table(
            ("CPU feature", "present", "used by"),
            [(n, _yes(n in host.cpu_features), f) for n, f in CPU_FEATURES.items()],
        )
    )
    print("\noptional packages, imported only where a run names them")
    columns = ("name", "package", "installed", "needs", "fits", "install")
    print(text_table(columns, [[row[column] for column in columns] for row in package_rows(host)]))
    if host.torch is None:
        print(f"\nbackends: none can run without torch; {WITHOUT_TORCH}")
        return 0
    print(f"\nbackends on {device}")
    cells = [
        (r["job"], r["backend"], _yes(r["works"]), ", ".join(r["formats"]), r["setting"], r["reason"]) for r in rows
    ]
    print(text_table(("job", "backend", "works", "formats", "chosen by", "why"), cells))
    return 0


def _facts(host: HostInfo) -> list[tuple[str, str]]:
    gpus = [
        f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {format_bytes(gpu.memory)}"
        for gpu in host.gpus
    ]
    kept = (
        "freed memory can be kept for the next step"
        if host.malloc_trim_disabled
        else "cannot be told to keep freed memory"
    )
    if host.torch is None:
        return [
            ("moefold", __version__),
            ("torch", f"not installed; {WITHOUT_TORCH}"),
            ("GPUs", "unknown without torch"),
            ("CPU", f"{host.cpu}, {host.cores} cores"),
        ]
    return [
        ("moefold", __version__),
        ("torch", f"{host.torch}, " + (f"for CUDA {host.cuda}" if host.cuda else "for CPUs only")),
        ("GPUs", "; ".join(gpus) or "none"),
        ("CPU", f"{host.cpu}, {host.cores} cores, torch uses {host.threads} threads"),
        ("allocator", f"{host.allocator}: {kept}"),
        ("collectives", f"gloo {_yes(host.gloo)}, nccl {_yes(host.nccl)}"),
    ]


def _yes(true: bool) -> str:
    return "yes" if true else "no"
