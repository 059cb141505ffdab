"""Rules about messages between ranks: who can send narrow ones, what can go in chunks beside matmuls, and whether hosts
cut groups so that parameters are summed and gathered inside of them first. And about ECHO, whose clones of hot experts
are messages: where there is something to clone, and what can carry clones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from moefold.config.attention import MLAConfig
from moefold.config.parallel import EngineDispatcher, ParallelConfig, PlannedDispatcherName
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import FoldedLayout, ranks_inside

# Whether it is so, why it does not go with chunks, and what does.
Refusal = tuple[bool, str, str]
# Of other libraries: they send rows in formats of their own, and number experts themselves.
_OTHERS = (*get_args(EngineDispatcher), *get_args(PlannedDispatcherName))


def narrow_rows_have_our_dispatcher(run: RunConfig) -> Problem | None:
    name, dispatcher = run.precision.dispatch, run.parallel.dispatcher
    if name is None or (run.model.moe is not None and dispatcher not in _OTHERS):
        return None
    why = "the model has no experts" if run.model.moe is None else f"{dispatcher} sends rows as they are"
    fix = "use null" if run.model.moe is None else "use null, or parallel.dispatcher all_to_all"
    return Problem("precision.dispatch", f"rows in {name}, but {why}", fix)


def rounded_parts_are_of_float32(run: RunConfig) -> Problem | None:
    precision = run.precision
    if precision.reduce != "bfloat16_all_to_all" or precision.params != "float64":
        return None
    return Problem(
        "precision.reduce",
        "bfloat16 parts of float64 gradients, summed in float32",
        "use null, or precision.params: float32",
    )


def _number_of_chunks(parallel: ParallelConfig, overlap: str, key: str, without: str) -> Problem | None:
    chunks, default = getattr(parallel, key), getattr(ParallelConfig(), key)
    path = f"parallel.{key}"
    if overlap in parallel.overlap:
        message = f"is {chunks}: with one chunk there is no other to be computed beside its exchange"
        return Problem(path, message, "use 2 or more") if chunks < 2 else None
    fix = f"use {default}, or parallel.overlap [{overlap}]"
    return None if chunks == default else Problem(path, f"is {chunks}, but {without} in chunks", fix)


def _unknown_with_chunks(run: RunConfig) -> tuple[Refusal, ...]:
    return (
        (
            run.precision.recipe is not None,
            f"precision.recipe {run.precision.recipe} narrows rows together that chunks separate",
            "precision.recipe null",
        ),
        (
            run.kernels.graphs != "none",
            f"kernels.graphs {run.kernels.graphs} was never tried with exchanges on another stream",
            "kernels.graphs none",
        ),
    )


def _broken(overlap: str, rules: Iterable[Refusal]) -> list[Problem]:
    return [
        Problem("parallel.overlap", f"{overlap}: {message}", f"use [], or {fix}")
        for broken, message, fix in rules
        if broken
    ]


def tp_chunks_have_matmuls_beside_them(run: RunConfig) -> list[Problem]:
    """With parallel.overlap tensor_parallel: tokens are exchanged, in chunks that can be summed one by one, and nothing
    is recomputed, for a chunk that was sent is not sent twice."""
    parallel, attention, retained = run.parallel, run.model.attention, run.memory.retained()
    if problem := _number_of_chunks(parallel, "tensor_parallel", "tp_chunks", "tensor parallelism does not run"):
        return [problem]
    if "tensor_parallel" not in parallel.overlap:
        return []
    if parallel.tp == 1:
        return [Problem("parallel.overlap", "tensor_parallel: tp=1 exchanges no tokens", "use [], or parallel.tp of 2")]
    shared = run.model.moe is not None and run.model.moe.shared_hidden_dim > 0
    again = [name for name in run.memory.recompute if name != "experts" or shared]
    rules = (
        (
            run.precision.tp_reduce == "fp8_all_to_all",
            "precision.tp_reduce fp8_all_to_all scales the parts of a whole sum",
            "precision.tp_reduce bfloat16 or null",
        ),
        *_unknown_with_chunks(run),
        (
            bool(again),
            f"memory.recompute {', '.join(again)} would send chunks once more that the first forward has sent",
            "memory.retain, which computes steps again and sends nothing",
        ),
        (
            isinstance(attention, MLAConfig) and retained["mla_up"] != "keep",
            f"memory.retain.mla_up {retained['mla_up']}: heads are put together from chunks, and that copy is kept",
            "memory.retain.mla_up keep",
        ),
    )
    return _broken("tensor_parallel", rules)


def ulysses_chunks_have_matmuls_beside_them(run: RunConfig) -> list[Problem]:
    """With parallel.overlap ulysses: some layers exchange heads, whole attention is one computation that nothing else
    looks into, and nothing is recomputed, for a chunk that was sent is not sent twice."""
    parallel, context, retained = run.parallel, run.parallel.context, run.memory.retained()
    if problem := _number_of_chunks(parallel, "ulysses", "ulysses_chunks", "tokens are not exchanged for heads"):
        return [problem]
    if "ulysses" not in parallel.overlap:
        return []
    if (parallel.cp == 1 and not parallel.dynamic_cp) or "all_to_all" not in (context.full, context.windowed):
        message = f"ulysses: no tokens are exchanged for heads with cp={parallel.cp} and context.full {context.full}"
        fix = "use [], or parallel.cp of 2 or more with parallel.context.full all_to_all"
        return [Problem("parallel.overlap", message, fix)]
    rules = (
        *_unknown_with_chunks(run),
        (
            "attention" in run.memory.recompute,
            "memory.recompute attention would send chunks once more that the first forward has sent",
            "memory.retain, which computes steps again and sends nothing",
        ),
        (
            run.optim.qk_clip is not None,
            "optim.qk_clip looks at the keys of a whole microbatch before they are sent",
            "optim.qk_clip null",
        ),
        *(
            (
                retained[step] != "keep",
                f"memory.retain.{step} {retained[step]}: chunks are sent from where they are made",
                f"memory.retain.{step} keep",
            )
            for step in ("core", "mla_up")
        ),
    )
    return _broken("ulysses", rules)


def param_sync_has_levels(run: RunConfig) -> list[Problem]:
    """Four steps need flat buffers and hosts of several ranks; how those cut the groups is a rule with a layout."""
    parallel, path = run.parallel, "parallel.ranks_per_host"
    if parallel.param_sync == "direct":
        if parallel.ranks_per_host == 1:
            return []
        words = f"is {parallel.ranks_per_host}, but parallel.param_sync direct does not distinguish hosts"
        return [Problem(path, words, "use 1, or set parallel.param_sync to hierarchical")]
    found = []
    if parallel.sharding != "flat":
        words = f"hierarchical: {parallel.sharding} sharding sums and gathers by FSDP's own collectives"
        found.append(Problem("parallel.param_sync", words, "use direct, or parallel.sharding flat"))
    if parallel.ranks_per_host <= 1:
        words = f"is {parallel.ranks_per_host}: hierarchical parameter synchronisation sums inside of hosts first"
        found.append(
            Problem(path, words, "use how many consecutive ranks share a host, such as 8, or param_sync direct")
        )
    return found


# Ranks of hosts and racks, of which those that fit are named.
_USUAL_HOSTS = (2, 4, 8, 16, 32, 64, 72)


def hosts_cut_sharding_groups_alike(run: RunConfig, layout: FoldedLayout) -> list[Problem]:
    """Each host holds equally many ranks of every group, and some group has several on each of several hosts."""
    parallel, path = run.parallel, "parallel.ranks_per_host"
    if parallel.param_sync == "direct" or param_sync_has_levels(run):
        return []

    def inside_of(size: int) -> dict[str, int | None]:
        return {name: ranks_inside(layout, name, size) for name in ("dense_shard", "expert_shard")}

    def has_levels(inside: dict[str, int | None]) -> bool:
        return any(each is not None and 1 < each < layout.size(name) for name, each in inside.items())

    inside = inside_of(parallel.ranks_per_host)
    fits = [size for size in _USUAL_HOSTS if None not in (here := inside_of(size)).values() and has_levels(here)]
    fix = f"use {', '.join(map(str, fits))}, or param_sync direct" if fits else "set param_sync to direct"
    if sizes := ", ".join(f"{name} of {layout.size(name)} ranks" for name, each in inside.items() if each is None):
        words = f"hosts of {parallel.ranks_per_host} ranks cut groups unequally that shard parameters ({sizes})"
        return [Problem(path, words, fix)]
    if not has_levels(inside):
        words = ", ".join(f"{name}: {each} of {layout.size(name)} ranks on a host" for name, each in inside.items())
        return [Problem(path, f"no group has several ranks on each of several hosts ({words})", fix)]
    return []


_ECHO = "parallel.echo"


def clones_have_other_ranks(run: RunConfig) -> Problem | None:
    if run.parallel.echo is None or (run.model.moe is not None and run.parallel.ep > 1):
        return None
    why = "the model has no experts" if run.model.moe is None else f"parallel.ep is {run.parallel.ep}"
    return Problem(_ECHO, f"experts are cloned on other ranks of their ep group, but {why}", "use null")


def clones_have_our_dispatcher(run: RunConfig) -> Problem | None:
    if run.parallel.echo is None or run.parallel.dispatcher not in _OTHERS:
        return None
    return Problem(
        _ECHO,
        f"{run.parallel.dispatcher} sends rows to the ranks of their experts",
        "use null, or parallel.dispatcher all_to_all",
    )


def clones_have_counted_rows(run: RunConfig) -> Problem | None:
    """With a padded capacity every expert has the same rows, padding included."""
    moe = run.model.moe
    if run.parallel.echo is None or moe is None or moe.capacity is None or not moe.capacity.pad:
        return None
    return Problem(
        _ECHO,
        "model.moe.capacity.pad gives every expert the same number of rows, so that none is hot",
        "use null, or set model.moe.capacity.pad to false",
    )


def clones_are_wide(run: RunConfig) -> Problem | None:
    """Narrow copies of weights belong to parameters, and a clone is none."""
    recipe = run.precision.recipe
    if run.parallel.echo is None or recipe is None:
        return None
    return Problem(_ECHO, f"weights of clones are sent wide, but precision.recipe is {recipe}", "use null")


def clones_are_on_the_compute_stream(run: RunConfig) -> Problem | None:
    """Weights are exchanged between the phases of an MoE layer, on the group that the other stream uses."""
    schedule = SCHEDULES.get(run.parallel.schedule)
    if run.parallel.echo is None or schedule is None or not schedule.overlaps:
        return None
    others = ", ".join(name for name, other in SCHEDULES.items() if not other.overlaps)
    return Problem(_ECHO, f"{schedule.name} exchanges rows on a stream of their own", f"use null, or one of {others}")


RULES = (
    narrow_rows_have_our_dispatcher,
    rounded_parts_are_of_float32,
    tp_chunks_have_matmuls_beside_them,
    ulysses_chunks_have_matmuls_beside_them,
    param_sync_has_levels,
    clones_have_other_ranks,
    clones_have_our_dispatcher,
    clones_have_counted_rows,
    clones_are_wide,
    clones_are_on_the_compute_stream,
)
RULES_WITH_LAYOUT = (hosts_cut_sharding_groups_alike,)
