"""`moefold inspect`: what a checkpoint contains, whether it is intact, and how it differs from another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.cli.run_argument import Subparsers, with_progress
from moefold.errors import CheckpointError, ConfigError
from moefold.tables import text_table
from moefold.units import format_bytes, format_count

if TYPE_CHECKING:
    from moefold.checkpoint.manifest import Manifest
    from moefold.checkpoint.tensor_spec import TensorComparison

EXAMPLES = """examples:
  moefold inspect runs/debug_small
  moefold inspect runs/debug_small/checkpoints/step_00000200 --verify
  moefold inspect runs/a/checkpoints/step_00000200 --compare runs/b/checkpoints/step_00000200

DIR is a checkpoint, or a run or a directory of checkpoints, whose newest committed checkpoint is taken.
Exits with 0 when the checkpoint is intact (with --compare: and equal), 1 when not, 2 when the command is wrong."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "inspect",
        help="describe, verify and compare checkpoints",
        description="Describe a checkpoint; --verify reads every byte, --compare compares two tensor by tensor.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint, a run, or a folder of checkpoints")
    parser.add_argument("--verify", action="store_true", help="hash every file and check that every tensor is complete")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="compare with another checkpoint, bit by bit")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.checkpoint.load import Checkpoint

    path = _find(args.directory)
    checkpoint = Checkpoint(path)
    data = _describe(path, checkpoint.manifest, args.tensors)
    if args.verify:
        data["problem"] = _problem(path, checkpoint.manifest.world)
    found: list[TensorComparison] = []
    if args.compare:
        from moefold.checkpoint.tensor_spec import compare

        other = Checkpoint(_find(args.compare))
        total = len(set(checkpoint.names()) | set(other.names()))
        found = list(with_progress(compare(checkpoint, other), total, "comparing tensors"))
        data["other"] = str(other.path)
        data["compared"] = [{"name": c.name, "verdict": c.verdict, "largest": c.largest} for c in found]
    print(json.dumps(data) if args.json else _report(data, found))
    return int(bool(data.get("problem")) or not all(item.same for item in found))


def _find(directory: Path) -> Path:
    """The checkpoint in DIR, or the newest below it."""
    from moefold.checkpoint.load import latest

    if (directory / "manifest.json").exists():
        return directory
    for root in (directory, directory / "checkpoints"):
        if (path := latest(root)) is not None:
            return path
    raise CheckpointError(
        f"{directory}: neither a checkpoint nor a directory with finished ones; give runs/NAME, or one of its "
        "checkpoints/step_..."
    )


def _problem(path: Path, world: int) -> str | None:
    """The first problem that verification finds, or None."""
    from moefold.checkpoint.manifest import read_manifest
    from moefold.checkpoint.step_dirs import check_files, check_structure

    def hashed() -> Iterator[int]:
        for rank in range(world):
            check_files(path, manifest, [rank])
            yield rank

    try:
        manifest = read_manifest(path)
        for _ in with_progress(hashed(), world, "verifying ranks' files"):
            pass
        check_structure(path, manifest)
    except CheckpointError as error:
        return str(error)
    return None


def _describe(path: Path, manifest: Manifest, with_tensors: bool) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {}
    for name, entry in manifest.tensors.items():
        kind = kinds.setdefault(name.partition("/")[0], {"tensors": 0, "elements": 0, "dtypes": []})
        kind["tensors"] += 1
        kind["elements"] += prod(entry.shape)
        kind["dtypes"] = sorted({*kind["dtypes"], entry.dtype})
    data: dict[str, Any] = {
        "path": str(path),
        "step": manifest.step,
        "run": manifest.run,
        "incarnation": manifest.incarnation,
        "code": manifest.code,
        "world": manifest.world,
        "layout": manifest.layout,
        "bytes": sum(files.data.bytes + files.table.bytes for files in manifest.files),
        "kinds": kinds,
        "config": _summary(manifest.config),
        "state": manifest.state,
    }
    if with_tensors:
        data["tensors"] = {name: [entry.dtype, list(entry.shape)] for name, entry in sorted(manifest.tensors.items())}
    return data


def _summary(config: str) -> dict[str, Any]:
    """The run's main sizes. Tensors are shown even if the configuration is of another version and cannot be read."""
    from moefold.config.loading import parse_run

    if not config:
        return {}
    try:
        run = parse_run(config)
    except ConfigError as error:
        return {"unreadable": "; ".join(map(str, error.problems))}
    model, moe = run.model, run.model.moe
    sizes = {"name": run.name, "seed": run.seed, "layers": model.num_layers, "dim": model.dim}
    sizes |= {"vocabulary": model.vocab_size, "params": run.precision.params}
    return sizes | ({"experts": moe.num_experts, "top_k": moe.top_k} if moe else {})


def _report(data: dict[str, Any], found: list[TensorComparison]) -> str:
    layout = "  ".join(f"{axis} {size}" for axis, size in data["layout"].items() if size > 1) or "one rank per replica"
    lines = [
        f"{data['path']}",
        f"step {data['step']:,}   {format_bytes(data['bytes'])}   written by {data['world']} ranks ({layout})",
        f"run {data['run'] or '-'}   start {data['incarnation']}   moefold {data['code']}",
        "   ".join(f"{key} {value}" for key, value in data["config"].items()),
        "",
    ]
    rows = [
        [kind, found["tensors"], format_count(found["elements"]), ", ".join(found["dtypes"])]
        for kind, found in data["kinds"].items()
    ]
    lines.append(text_table(["kind", "tensors", "elements", "dtype"], rows))
    if "tensors" in data:
        listed = [[name, dtype, " x ".join(map(str, shape))] for name, (dtype, shape) in data["tensors"].items()]
        lines += ["", text_table(["tensor", "dtype", "shape"], listed)]
    if "problem" in data:
        problem = data["problem"]
        lines += ["", f"DAMAGED: {problem}" if problem else "every file has its hash and every tensor is complete"]
    return "\n".join(lines + (["", *_differences(data["other"], found)] if "other" in data else []))


def _differences(other: str, found: list[TensorComparison]) -> list[str]:
    different = [item for item in found if not item.same]
    if not different:
        return [f"all {len(found)} tensors are bitwise equal in {other}"]
    rows = [[c.name, c.verdict, "-" if c.largest is None else f"{c.largest:.3e}"] for c in different]
    summary = f"{len(different)} of {len(found)} tensors differ from {other}"
    return [text_table(["tensor", "verdict", "largest difference"], rows), "", summary]
