"""`moefold doctor`: what this machine has, which backends can run on it, and why the others cannot."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moefold import __version__
from moefold.tables import text_table
from moefold.units import format_bytes

if TYPE_CHECKING:
    from moefold.ops.host_probe import HostInfo

EXAMPLES = """examples:
  moefold doctor
  moefold doctor --device cuda --json

A backend is chosen by name in the run's configuration; one that cannot run is refused at the start, never replaced.
Exits with 0: whatever a machine lacks, looking at it worked."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, and which backends can run on it",
        description="Look at this machine: torch, devices, what its CPU can do, the allocator, optional packages, and "
        "the table of backends with the reason for every one that cannot run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="ask about this device (default: the best one here)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.ops.backends import as_rows
    from moefold.ops.host_probe import CPU_FEATURES, PACKAGES, probe_host

    here = probe_host()
    device = args.device or here.device
    rows = as_rows(device, here)
    if args.json:
        facts = asdict(here) | {"cpu_features": {name: name in here.cpu_features for name in CPU_FEATURES}}
        print(json.dumps({"moefold": __version__, "here": facts, "device": device, "backends": rows}, indent=2))
        return 0
    print(text_table(("what", "here"), _facts(here, PACKAGES)))
    print()
    print(
        text_table(
            ("CPU feature", "here", "for"), [(n, _yes(n in here.cpu_features), f) for n, f in CPU_FEATURES.items()]
        )
    )
    print(f"\nbackends on {device}")
    cells = [
        (r["job"], r["backend"], _yes(r["works"]), ", ".join(r["formats"]), r["setting"], r["reason"]) for r in rows
    ]
    print(text_table(("job", "backend", "works", "formats", "chosen by", "why"), cells))
    return 0


def _facts(here: HostInfo, packages: tuple[str, ...]) -> list[tuple[str, str]]:
    cards = [
        f"{card.name}, capability {card.capability[0]}.{card.capability[1]}, {format_bytes(card.memory)}"
        for card in here.gpus
    ]
    kept = (
        "freed memory can be kept for the next step"
        if here.malloc_trim_disabled
        else "cannot be told to keep freed memory"
    )
    return [
        ("moefold", __version__),
        ("torch", f"{here.torch}, " + (f"for CUDA {here.cuda}" if here.cuda else "for CPUs only")),
        ("GPUs", "; ".join(cards) or "none"),
        ("CPU", f"{here.cpu}, {here.cores} cores, torch uses {here.threads} threads"),
        ("allocator", f"{here.allocator}: {kept}"),
        ("messages", f"gloo {_yes(here.gloo)}, nccl {_yes(here.nccl)}"),
        *((name, here.packages.get(name, "not installed")) for name in packages),
    ]


def _yes(true: bool) -> str:
    return "yes" if true else "no"
