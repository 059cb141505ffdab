"""One MoE layer beside its matmuls and beside the layers of other libraries; one comparison per shape."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.command_line import (
    add_common_options,
    add_routing,
    check_common_options,
    names_of,
    parser_for,
    routings_of,
    run_script,
    show,
)
from benchmarks.comparison import Setting, run_comparison, threads_text
from benchmarks.layer_candidates import BASELINES, CANDIDATES, MOEFOLD, PEERS
from benchmarks.results import CandidateSpec, Comparison
from benchmarks.targets import TARGETS, Verdict, verdicts
from moefold.bench.clock import Progress
from moefold.bench.layer_workload import SHAPES, LayerShape
from moefold.cli.bench import add_shapes, progress_line, shapes_of
from moefold.errors import UnknownNameError

EXAMPLES = """  python -m benchmarks.layer                              # shapes a, b and c
  python -m benchmarks.layer b --same-allocator --out b.html
  python -m benchmarks.layer --tokens 512 --dim 256 --hidden 64 --experts 16 --top-k 4 --dtype float32 --json
  python -m benchmarks.layer a --candidates baselines,moefold --rounds 15
"""
BASES = tuple(BASELINES)
GROUPS = {"baselines": tuple(BASELINES), "moefold": tuple(MOEFOLD), "peers": tuple(PEERS)}
# Without moefold's slow references.
DEFAULT = ("baselines", "moefold fused", "peers")


def main(words: Sequence[str]) -> int:
    parser = parser_for(
        "layer",
        "Forward and backward of one MoE layer: dense matmuls of the same FLOPs, torch's grouped matmul, moefold's "
        "layer, and the layers of transformers, torchtitan, megatron-core and Automodel.",
        EXAMPLES,
    )
    add_shapes(parser)
    parser.add_argument(
        "--candidates",
        metavar="NAMES",
        help="names or groups (baselines, moefold, peers), separated by commas (default baselines,moefold fused,peers)",
    )
    parser.add_argument(
        "--same-allocator", action="store_true", help="all keep freed memory, as moefold's launcher makes malloc do"
    )
    add_routing(parser)
    add_common_options(parser)
    args = parser.parse_args(words)
    check_common_options(args)
    setting = Setting(
        args.dtype, args.threads, args.same_allocator, args.rounds, args.warm, routings_of(args), args.budget
    )
    names = selected(names_of(args.candidates) or DEFAULT)
    judged = []
    for shape in shapes_of(args):
        comparison, found = compare_layers(shape, setting, names, progress_line())
        judged.append((comparison, BASES, found))
    return show(args, judged)


def selected(words: Sequence[str]) -> list[str]:
    """Candidates by name or group, in the order of the table."""
    wanted: set[str] = set()
    for word in words:
        if word not in GROUPS and word not in CANDIDATES:
            raise UnknownNameError("candidate", word, [*GROUPS, *CANDIDATES])
        wanted |= set(GROUPS.get(word, (word,)))
    return [name for name in CANDIDATES if name in wanted]


def compare_layers(
    shape: LayerShape, setting: Setting, names: Sequence[str], progress: Progress | None = None
) -> tuple[Comparison, list[Verdict]]:
    """Verdicts where there are targets: on the three shapes, in bfloat16, with one thread."""
    known = next((name for name, each in SHAPES.items() if each == shape), None)
    title = f"layer {known or 'of own sizes'}: {shape}, {setting.dtype}, {threads_text(setting.threads)}, "
    title += f"forward and backward, allocator {setting.allocator}"
    comparison = run_comparison("layer", title, [_spec(name, shape, setting) for name in names], setting, progress)
    has_targets = setting.dtype == "bfloat16" and setting.threads == 1 and known is not None
    targets = TARGETS["layer", known or ""] if has_targets else ()
    return comparison, verdicts(comparison, targets, setting.allocator)


def _spec(name: str, shape: LayerShape, setting: Setting) -> CandidateSpec:
    role = "baseline" if name in BASELINES else "moefold" if name in MOEFOLD else "peer"
    options = {
        "shape": asdict(shape),
        "dtype": setting.dtype,
        "threads": setting.threads,
        "allocator": "kept" if setting.same_allocator or role == "moefold" else "default",
    }
    return CandidateSpec(name, role, options)


if __name__ == "__main__":
    sys.exit(run_script(main, sys.argv[1:]))
