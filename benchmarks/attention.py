"""moefold's attention beside torch's fused call on the same blocks and beside its matmuls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.attention_candidates import BASELINES, CANDIDATES, AttentionShape, checked
from benchmarks.command_line import add_common_options, check_common_options, parser_for, run_script, show
from benchmarks.comparison import Setting, run_comparison, threads_text
from benchmarks.results import NO_ROUTING, CandidateSpec
from moefold.cli.bench import add_sizes, progress_line

EXAMPLES = """  python -m benchmarks.attention
  python -m benchmarks.attention --tokens 2048 --length 256 --heads 8 --kv-heads 8 --dim 128 --dtype float32
"""
SIZES = ("tokens", "length", "heads", "kv_heads", "dim")


def main(words: Sequence[str]) -> int:
    parser = parser_for(
        "attention", "Forward and backward of causal attention over packed documents of equal length.", EXAMPLES
    )
    add_sizes(parser, SIZES, "default: 4096 tokens, documents of 1024, 16 query heads, 4 KV heads, head dim 64")
    add_common_options(parser)
    args = parser.parse_args(words)
    check_common_options(args)
    own = {size: getattr(args, size) for size in SIZES if getattr(args, size) is not None}
    shape = checked(AttentionShape(**own))
    # All keep freed memory: the operation is compared, not the allocator.
    options: dict[str, object] = {
        "shape": asdict(shape),
        "dtype": args.dtype,
        "threads": args.threads,
        "allocator": "kept",
    }
    comparison = run_comparison(
        "attention",
        f"attention: {shape}, {args.dtype}, {threads_text(args.threads)}, forward and backward",
        [CandidateSpec(name, "baseline" if name in BASELINES else "moefold", options) for name in CANDIDATES],
        Setting(args.dtype, args.threads, True, args.rounds, args.warm, (NO_ROUTING,), args.budget),
        progress_line(),
    )
    return show(args, [(comparison, tuple(BASELINES), [])])


if __name__ == "__main__":
    sys.exit(run_script(main, sys.argv[1:]))
