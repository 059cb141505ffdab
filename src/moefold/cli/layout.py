"""`moefold layout`: every rank's coordinates, which ranks form which group, and which groups leave an NVLink domain."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moefold.config.parallel import ParallelConfig, RankOrderConfig
from moefold.errors import LayoutError, Problem
from moefold.tables import text_table
from moefold.topology.folded_layout import GROUPS, FoldedLayout, Grid, Locality, fold, locality

if TYPE_CHECKING:
    from moefold.cli.run_argument import Subparsers

_SIZES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline stages",
    "ep": "expert parallel",
    "etp": "tensor parallel inside an expert",
    "dp_replicate": "HSDP replicas of the dense parameters",
    "edp_replicate": "HSDP replicas of the expert parameters",
}
# Beyond this, the lists of ranks do not fit in memory.
_LARGEST_WORLD = 10_000_000


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "layout",
        help="show both grids, every group, and which groups leave an NVLink domain",
        description="Fold the attention grid and the expert grid over the same ranks and show every group.",
        epilog="example: moefold layout --world 16384 --pp 16 --tp 4 --cp 2 --ep 64",
    )
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1, metavar="N", help=f"{meaning} (1)")
    for grid, usual in asdict(RankOrderConfig()).items():
        parser.add_argument(
            f"--{grid}-order",
            default=usual,
            metavar="ORDER",
            help=f"axes of the {grid} grid, innermost first ({usual})",
        )
    parser.add_argument(
        "--domain", type=int, action="append", metavar="N", help="ranks per NVLink domain; may be repeated (8 and 72)"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="show the groups of this rank (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    order = RankOrderConfig(args.dense_order, args.expert_order)
    layout = fold(ParallelConfig(rank_order=order, **{name: getattr(args, name) for name in _SIZES}), args.world)
    domains = list(dict.fromkeys(args.domain or (8, 72)))
    _refuse(layout, domains, args.rank)
    places = {name: [locality(layout, spec, domain) for domain in domains] for name, spec in GROUPS.items()}
    if args.json:
        print(json.dumps(_data(layout, places, args.rank), indent=2))
    else:
        print(_report(layout, places, domains, args.rank))
    return 0


def _refuse(layout: FoldedLayout, domains: Sequence[int], rank: int) -> None:
    problems = []
    if layout.world > _LARGEST_WORLD:
        problems.append(Problem("world", f"{layout.world:,} ranks", f"at most {_LARGEST_WORLD:,} can be shown"))
    if not 0 <= rank < layout.world:
        problems.append(Problem("rank", f"there is no rank {rank}", f"choose from 0 to {layout.world - 1}"))
    if min(domains) < 1:
        problems.append(Problem("domain", f"a domain cannot have {min(domains)} ranks", "use 1 or more"))
    if problems:
        raise LayoutError(*problems)


def _report(layout: FoldedLayout, places: dict[str, list[Locality]], domains: Sequence[int], rank: int) -> str:
    header = ["group", "ranks", "groups", f"of rank {rank}", *(f"leave a domain of {domain}" for domain in domains)]
    rows = [
        [name, layout.size(name), found[0].num_groups, _brief(layout.ranks(name, rank)), *map(_leaving, found)]
        for name, found in places.items()
    ]
    # A group of one rank has no messages.
    shared = [name for name in places if layout.size(name) > 1]
    return "\n".join(
        [
            f"{layout.world:,} ranks   dp {layout.size('dp'):,}   edp {layout.size('edp'):,}",
            "",
            _grid_table("attention", layout.attention, rank),
            "",
            _grid_table("expert", layout.expert, rank),
            "",
            text_table(header, rows),
            "",
            *(_summary(domain, {name: places[name][i] for name in shared}) for i, domain in enumerate(domains)),
        ]
    )


def _grid_table(title: str, grid: Grid, rank: int) -> str:
    header = (f"{title} grid", *(axis for axis, _ in grid.axes))
    rows = [
        ("size", *(size for _, size in grid.axes)),
        ("stride between neighbours", *(grid.stride(axis) for axis, _ in grid.axes)),
        (f"coordinates of rank {rank}", *grid.coordinates(rank).values()),
    ]
    return text_table(header, rows)


def _brief(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 5 else f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ... {ranks[-1]}"


def _leaving(found: Locality) -> str:
    if not found.num_leaving:
        return "none"
    how_many = "all" if found.num_leaving == found.num_groups else f"{found.num_leaving:,} of {found.num_groups:,}"
    few, most = found.fewest_domains, found.most_domains
    return f"{how_many}, over {most:,} domains" if few == most else f"{how_many}, over {few:,} to {most:,} domains"


def _summary(domain: int, places: dict[str, Locality]) -> str:
    stay = [name for name, found in places.items() if not found.num_leaving]
    leave = [name for name, found in places.items() if found.num_leaving]
    return f"domain of {domain}:  leave it: {', '.join(leave) or 'none'};  stay inside: {', '.join(stay) or 'none'}"


def _data(layout: FoldedLayout, places: dict[str, list[Locality]], rank: int) -> dict[str, Any]:
    grids = {"attention": layout.attention, "expert": layout.expert}
    return {
        "world": layout.world,
        "dp": layout.size("dp"),
        "edp": layout.size("edp"),
        "rank": rank,
        "grids": {name: {"sizes": dict(grid.axes), "rank": grid.coordinates(rank)} for name, grid in grids.items()},
        "groups": {
            name: {
                "grid": GROUPS[name].grid,
                "axes": GROUPS[name].axes,
                "purpose": GROUPS[name].purpose,
                "size": layout.size(name),
                "ranks": layout.ranks(name, rank),
                "domains": [asdict(place) for place in found],
            }
            for name, found in places.items()
        },
    }
