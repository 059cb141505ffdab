"""Dispatch and combine of each dispatcher over ranks, and the whole expert-parallel layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import get_args

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
from benchmarks.comparison import Setting
from benchmarks.expert_ranks import BareAllToAll, DispatchCombine, ExpertParallelLayer, ExpertRank, dense_roofline
from benchmarks.rank_comparison import RankBuilder, run_rank_comparison
from benchmarks.results import Comparison
from benchmarks.runner import Candidate
from benchmarks.targets import AS_LAUNCHED, TARGETS, Verdict, verdicts
from moefold.bench.clock import Progress
from moefold.bench.layer_workload import SHAPES, LayerShape
from moefold.cli.bench import SIZES, add_sizes, progress_line, shapes_of
from moefold.config.parallel import NamedDispatcher
from moefold.errors import ConfigError, Problem, UnknownNameError

DISPATCHERS: tuple[str, ...] = get_args(NamedDispatcher)

EXAMPLES = """  python -m benchmarks.dispatch                           # shape b over 4 ranks
  python -m benchmarks.dispatch --world 2 --tokens 2048 --top-k 2 --dispatchers all_to_all,all_gather
  python -m benchmarks.dispatch --what dispatch --json

Ranks are forked on this machine and communicate over gloo; the slowest rank's time counts.
"""
BARE_ALL_TO_ALL, DENSE = "bare all-to-all", "dense per rank"
DISPATCH_BASES: tuple[str, ...] = (BARE_ALL_TO_ALL,)
LAYER_BASES: tuple[str, ...] = (DENSE,)


def main(words: Sequence[str]) -> int:
    parser = parser_for(
        "dispatch",
        "Dispatch and combine of each dispatcher beside torch's all-to-all of the same rows, and the whole "
        "expert-parallel layer beside the dense matmuls of each rank.",
        EXAMPLES,
    )
    parser.add_argument("--world", type=int, default=4, metavar="N", help="ranks (default 4)")
    parser.add_argument("--what", choices=("dispatch", "layer", "both"), default="both", help="default: both")
    parser.add_argument("--dispatchers", metavar="NAMES", help="separated by commas (default: all)")
    add_sizes(parser, SIZES, "tokens of all ranks; others from shape b")
    add_routing(parser)
    add_common_options(parser, threads=False)
    parser.set_defaults(shapes=["b"])
    args = parser.parse_args(words)
    check_common_options(args)
    setting = Setting(args.dtype, 1, True, args.rounds, args.warm, routings_of(args), args.budget)
    names = names_of(args.dispatchers) or list(DISPATCHERS)
    shape = shapes_of(args)[0]
    check_dispatch(shape, args.world, names)
    judged = []
    for what, compare, bases in (
        ("dispatch", compare_dispatchers, DISPATCH_BASES),
        ("layer", compare_ep_layers, LAYER_BASES),
    ):
        if args.what in (what, "both"):
            comparison, found = compare(shape, args.world, setting, names, progress_line())
            judged.append((comparison, bases, found))
    return show(args, judged)


def check_dispatch(shape: LayerShape, world: int, dispatchers: Sequence[str]) -> None:
    for name in dispatchers:
        if name not in DISPATCHERS:
            raise UnknownNameError("dispatcher", name, DISPATCHERS)
    problems = [Problem("--world", f"is {world}", "use 2 or more ranks")] if world < 2 else []
    if world >= 2 and shape.experts % world:
        problems.append(Problem("--experts", f"{shape.experts} over {world} ranks", f"use a multiple of {world}"))
    if world >= 2 and shape.tokens % world:
        problems.append(Problem("--tokens", f"{shape.tokens} over {world} ranks", f"use a multiple of {world}"))
    if problems:
        raise ConfigError(*problems)


def compare_dispatchers(
    shape: LayerShape, world: int, setting: Setting, dispatchers: Sequence[str], progress: Progress | None = None
) -> tuple[Comparison, list[Verdict]]:
    """Dispatch and combine of each dispatcher beside torch's all-to-all of one row per assignment."""
    builders: dict[str, tuple[str, RankBuilder]] = {BARE_ALL_TO_ALL: ("baseline", partial(_bare, shape, setting.dtype))}
    builders |= {name: ("moefold", partial(_dispatcher, shape, setting.dtype, name)) for name in dispatchers}
    return _compare("dispatch", "dispatch and combine", shape, world, setting, builders, progress)


def compare_ep_layers(
    shape: LayerShape, world: int, setting: Setting, dispatchers: Sequence[str], progress: Progress | None = None
) -> tuple[Comparison, list[Verdict]]:
    """The whole layer, forward and backward, beside the dense matmuls of every rank."""
    builders: dict[str, tuple[str, RankBuilder]] = {DENSE: ("baseline", partial(_dense, shape, setting.dtype))}
    builders |= {f"layer with {name}": ("moefold", partial(_layer, shape, setting.dtype, name)) for name in dispatchers}
    return _compare("ep layer", "the whole layer, forward and backward", shape, world, setting, builders, progress)


def _compare(
    kind: str,
    what: str,
    shape: LayerShape,
    world: int,
    setting: Setting,
    builders: dict[str, tuple[str, RankBuilder]],
    progress: Progress | None,
) -> tuple[Comparison, list[Verdict]]:
    title = f"{what} over {world} ranks: {shape} in all, {setting.dtype}, slowest rank"
    comparison = run_rank_comparison(title, world, builders, setting, progress)
    has_targets = shape == SHAPES["b"] and world == 4 and setting.dtype == "bfloat16"
    return comparison, verdicts(comparison, TARGETS[kind, "b"] if has_targets else (), AS_LAUNCHED)


def _bare(shape: LayerShape, dtype: str, rank: int, world: int) -> Candidate:
    return BareAllToAll(ExpertRank(shape, dtype, rank, world))


def _dispatcher(shape: LayerShape, dtype: str, name: str, rank: int, world: int) -> Candidate:
    return DispatchCombine(ExpertRank(shape, dtype, rank, world), name)


def _dense(shape: LayerShape, dtype: str, rank: int, world: int) -> Candidate:
    return dense_roofline(ExpertRank(shape, dtype, rank, world))


def _layer(shape: LayerShape, dtype: str, name: str, rank: int, world: int) -> Candidate:
    return ExpertParallelLayer(ExpertRank(shape, dtype, rank, world), name)


if __name__ == "__main__":
    sys.exit(run_script(main, sys.argv[1:]))
