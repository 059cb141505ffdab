"""Rules about CUDA graphs (`kernels.graphs`): what they hold must be the same kernels on the same memory every time.

A graph is launched without the host: shapes, addresses and numbers are those of its capture. So microbatches must have
one shape, weights and gradients one address, and whatever the host reads, draws, defers or sends has to stay outside.
"""

from __future__ import annotations

from moefold.blueprint.row_bounds import bounds_rows
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.schedule.graph_regions import captured_phases
from moefold.schedule.names import SCHEDULES

_PATH = "kernels.graphs"
_SCOPE = "kernels.graph_scope"
_NONE = "or use kernels.graphs none"


def _captured(run: RunConfig) -> frozenset[str]:
    return captured_phases(run.kernels.graph_scope) if run.kernels.graphs == "partial" else frozenset()


def graphs_have_a_scope(run: RunConfig) -> Problem | None:
    if run.kernels.graphs != "partial" or run.kernels.graph_scope:
        return None
    return Problem(_SCOPE, "graphs are partial, and no part of a layer is named", f"use [attn, moe_router], {_NONE}")


def graphed_weights_stay_in_place(run: RunConfig) -> Problem | None:
    if not _captured(run) or run.parallel.sharding == "flat":
        return None
    return Problem(
        _PATH,
        f"graphs read weights and add to gradients at fixed addresses, and parallel.sharding {run.parallel.sharding} "
        "frees and allocates whole weights in every step",
        f"use parallel.sharding flat, {_NONE}",
    )


def graphed_microbatches_have_one_shape(run: RunConfig) -> Problem | None:
    if not _captured(run) or run.data.packing == "concat":
        return None
    return Problem(
        _PATH,
        f"with data.packing {run.data.packing} lengths of documents differ from microbatch to microbatch, and a graph "
        "has those of its capture",
        f"use data.packing concat, {_NONE}",
    )


def graphs_defer_nothing(run: RunConfig) -> Problem | None:
    """Deferred weight gradients, and phases that run beside another microbatch's, are in no fixed order."""
    schedule = SCHEDULES.get(run.parallel.schedule)
    if not _captured(run) or schedule is None or not (schedule.overlaps or schedule.splits_backward):
        return None
    what = "runs phases beside another microbatch's" if schedule.overlaps else "defers weight gradients"
    others = [name for name, each in SCHEDULES.items() if not (each.overlaps or each.splits_backward)]
    return Problem(
        _PATH,
        f"{schedule.name} {what}, and a backward's graph computes all gradients of its phases",
        f"use parallel.schedule {', '.join(others)}, {_NONE}",
    )


def graphs_have_no_collectives(run: RunConfig) -> list[Problem]:
    captured, parallel, moe = _captured(run), run.parallel, run.model.moe
    found = []
    for axis in ("tp", "cp"):
        if captured and (size := getattr(parallel, axis)) > 1:
            found.append(
                Problem(
                    _PATH,
                    f"layers of {axis} {size} communicate inside of attention, and graphs hold no collectives",
                    f"use parallel.{axis} 1, {_NONE}",
                )
            )
    if captured and parallel.dynamic_cp:
        found.append(Problem(_PATH, "parallel.dynamic_cp changes groups from wave to wave", f"use false, {_NONE}"))
    if "route" in captured and moe is not None and moe.balance.global_batch:
        found.append(
            Problem(
                _SCOPE,
                f"model.moe.balance.global_batch {moe.balance.global_batch} sums counts over ranks inside of the "
                "router, and graphs hold no collectives",
                "use 0 and balance.microbatch, or take moe_router out of kernels.graph_scope",
            )
        )
    return found


def graphed_routers_read_nothing(run: RunConfig) -> list[Problem]:
    captured, moe = _captured(run), run.model.moe
    if "route" not in captured or moe is None:
        return []
    found = []
    if moe.router.kind not in ("topk", "balanced"):
        found.append(
            Problem(
                _SCOPE,
                f"routing by {moe.router.kind} decides on the host or over ranks",
                "use model.moe.router.kind topk, or take moe_router out of kernels.graph_scope",
            )
        )
    return found


def graphed_layers_read_no_counts(run: RunConfig) -> list[Problem]:
    """Between the exchanges, shapes must not depend on routing."""
    moe, kernels = run.model.moe, run.kernels
    if "experts" not in _captured(run) or moe is None:
        return []
    found = []
    if run.parallel.ep * run.parallel.etp == 1 or not bounds_rows(run):
        found.append(
            Problem(
                _SCOPE,
                f"moe is in it, but with parallel.ep {run.parallel.ep} and parallel.dispatcher "
                f"{run.parallel.dispatcher} the host reads how many rows each expert has",
                "use parallel.dispatcher all_to_all_bounded with ep 2 or more, or take moe out",
            )
        )
    if kernels.experts not in ("grouped", "auto"):
        found.append(
            Problem(
                _SCOPE,
                f"moe is in it, but kernels.experts {kernels.experts} reads counts on the host, or is not torch's",
                "use kernels.experts grouped, or take moe out",
            )
        )
    if run.parallel.overlap:
        found.append(
            Problem(
                _SCOPE,
                f"moe is in it, but parallel.overlap {list(run.parallel.overlap)} runs exchanges beside its phases",
                "use parallel.overlap [], or take moe out",
            )
        )
    return found


def graphs_keep_what_they_compute(run: RunConfig) -> list[Problem]:
    captured, found = _captured(run), []
    found += [
        Problem(
            _SCOPE,
            f"memory.recompute has {phase}, which is captured: what a graph saves has its memory anyway",
            f"take {phase} out of memory.recompute, or its scope out of kernels.graph_scope",
        )
        for phase in run.memory.recompute
        if phase in captured
    ]
    kept = {step: choice for step, choice in run.memory.retained().items() if choice != "keep"}
    if captured and kept:
        step, choice = next(iter(kept.items()))
        found.append(
            Problem(
                f"memory.retain.{step}",
                f"{choice}: hooks of saved tensors run on the host, and a graph saves what it saved at capture",
                f"use keep, {_NONE}",
            )
        )
    return found


def graphs_note_nothing_on_the_host(run: RunConfig) -> list[Problem]:
    kernels, recipe, bound, captured = run.kernels, run.precision.recipe, run.optim.qk_clip, _captured(run)
    found = []
    if captured and recipe not in (None, "bf16"):
        why = f"with precision.recipe {recipe} the host keeps narrow copies of weights and their scales"
        found.append(Problem(_PATH, why, f"use null, {_NONE}"))
    if "attention" in captured and bound is not None:
        why = f"optim.qk_clip {bound} notes the largest logit of every forward on the host"
        found.append(Problem(_PATH, why, "use optim.qk_clip null, or take attn out of kernels.graph_scope"))
    if captured and kernels.compile != "none":
        why = f"kernels.compile {kernels.compile}: compiled regions inside of graphs were not tried"
        found.append(Problem(_PATH, why, f"use kernels.compile none, {_NONE}"))
    if captured and kernels.backend == "native":
        why = "kernels.backend native calls C on CPUs, which no graph sees"
        found.append(Problem(_PATH, why, f"use kernels.backend torch or triton, {_NONE}"))
    return found


RULES = (
    graphs_have_a_scope,
    graphed_weights_stay_in_place,
    graphed_microbatches_have_one_shape,
    graphs_defer_nothing,
    graphs_have_no_collectives,
    graphed_routers_read_nothing,
    graphed_layers_read_no_counts,
    graphs_keep_what_they_compute,
    graphs_note_nothing_on_the_host,
)
