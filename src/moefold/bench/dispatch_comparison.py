"""`bench dispatch`: rows to experts on other ranks and back, and the whole layer that is spread over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from moefold.bench.comparison import Say
from moefold.bench.expert_ranks import BareExchange, Exchange, ExpertParallelLayer, Place, dense_of_a_rank
from moefold.bench.layer_comparison import TOLERANCES, Setting
from moefold.bench.layer_shapes import SHAPES, LayerShape
from moefold.bench.rank_comparison import RankBuilder, hold_rank_contest
from moefold.bench.results import Contest
from moefold.bench.runner import Contestant
from moefold.bench.targets import AS_LAUNCHED, GOALS, Verdict, verdicts
from moefold.errors import ConfigError, Problem, UnknownNameError
from moefold.parallel.expert_parallel import DISPATCHERS

BARE_EXCHANGE, DENSE = "bare all-to-all", "dense per rank"
EXCHANGE_BASES: tuple[str, ...] = (BARE_EXCHANGE,)
LAYER_BASES: tuple[str, ...] = (DENSE,)


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


def bench_exchange(
    shape: LayerShape,
    world: int,
    setting: Setting,
    dispatchers: Sequence[str],
    say: Say = lambda what, done, total: None,
) -> tuple[Contest, list[Verdict]]:
    """Dispatch and combine of each dispatcher beside the bare all-to-all of all chosen rows."""
    builders: dict[str, tuple[str, RankBuilder]] = {BARE_EXCHANGE: ("bare", partial(_bare, shape, setting.dtype))}
    builders |= {name: ("ours", partial(_exchange, shape, setting.dtype, name)) for name in dispatchers}
    return _hold("dispatch", "dispatch and combine", shape, world, setting, builders, say)


def bench_spread_layer(
    shape: LayerShape,
    world: int,
    setting: Setting,
    dispatchers: Sequence[str],
    say: Say = lambda what, done, total: None,
) -> tuple[Contest, list[Verdict]]:
    """The whole layer, forward and backward, beside the dense products of every rank."""
    builders: dict[str, tuple[str, RankBuilder]] = {DENSE: ("bare", partial(_dense, shape, setting.dtype))}
    builders |= {f"layer with {name}": ("ours", partial(_layer, shape, setting.dtype, name)) for name in dispatchers}
    return _hold("ep layer", "the whole layer, forward and backward", shape, world, setting, builders, say)


def _hold(
    kind: str,
    what: str,
    shape: LayerShape,
    world: int,
    setting: Setting,
    builders: dict[str, tuple[str, RankBuilder]],
    say: Say,
) -> tuple[Contest, list[Verdict]]:
    contest = hold_rank_contest(
        f"{what} over {world} ranks: {shape} in all, {setting.dtype}, slowest rank",
        world,
        builders,
        rounds=setting.rounds,
        warm=setting.warm,
        routings=setting.routings,
        tolerance=TOLERANCES[setting.dtype],
        say=say,
    )
    promised = shape == SHAPES["b"] and world == 4 and setting.dtype == "bfloat16"
    goals = GOALS[kind, "b"] if promised else ()
    return contest, verdicts(contest, goals, AS_LAUNCHED)


def _bare(shape: LayerShape, dtype: str, rank: int, world: int) -> Contestant:
    return BareExchange(Place(shape, dtype, rank, world))


def _exchange(shape: LayerShape, dtype: str, name: str, rank: int, world: int) -> Contestant:
    return Exchange(Place(shape, dtype, rank, world), name)


def _dense(shape: LayerShape, dtype: str, rank: int, world: int) -> Contestant:
    return dense_of_a_rank(Place(shape, dtype, rank, world))


def _layer(shape: LayerShape, dtype: str, name: str, rank: int, world: int) -> Contestant:
    return ExpertParallelLayer(Place(shape, dtype, rank, world), name)
