"""The command that starts a planned workload, and what of it moefold cannot run.

A workload has a run, so the command is the keys in which that run differs from the one the user named. Where the
planned framework is another one, its run may have values that this trainer lacks (`checks/planned_only.py`): those are
listed by `beyond_moefold`, and the command is that of the nearest run without them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from moefold.checks.planned_only import PLANNED_ONLY, planned_only
from moefold.config.run import RunConfig
from moefold.plan.memory.saving_steps import DEFAULTS
from moefold.plan.workload import Workload
from moefold.schedule.names import SCHEDULES

# Keys that a plan may set, in the order in which a command lists them.
_PLANNED_KEYS = (
    *(f"parallel.{axis}" for axis in ("tp", "cp", "pp", "ep", "etp", "vpp", "schedule", "stages")),
    *("parallel.dp_replicate", "parallel.edp_replicate", "parallel.rank_order.dense", "parallel.rank_order.expert"),
    *("data.micro_batch", "data.global_batch", "data.seq_len", "memory.recompute"),
    *("parallel.dispatcher", "parallel.ep_inner", "precision.compute", "precision.recipe", "parallel.sharding"),
    *("parallel.param_sync", "parallel.ranks_per_host", "parallel.dispatch_sms"),
    *DEFAULTS,
)
_ROWS = {row.path: row for row in PLANNED_ONLY}


def beyond_moefold(workload: Workload) -> list[str]:
    """What this workload has that moefold cannot run, in words; empty if it can."""
    # Overlaps have a schedule of their own here, or none.
    found = [row.described(values) for row, values in planned_only(workload.run) if row.path != "parallel.overlap"]
    if order_of(workload) is None:
        found.append(f"{_traits(workload)} over {workload.parallel.vpp} stages per rank")
    return found


def order_of(workload: Workload) -> str | None:
    """The name of moefold's schedule for this workload; None if there is none."""
    parallel, wanted = workload.parallel, (workload.ep_overlap, workload.delay_wgrad)

    def suits(name: str) -> bool:
        schedule = SCHEDULES[name]
        fits = not schedule.problems(parallel.pp, parallel.vpp, workload.microbatches)
        return fits and (schedule.overlaps, schedule.splits_backward) == wanted

    if parallel.schedule in SCHEDULES and suits(parallel.schedule):
        return parallel.schedule
    return next((name for name in ("1f1b", "interleaved", *SCHEDULES) if suits(name)), None)


def _traits(workload: Workload) -> str:
    named = (
        "overlapped expert communication" * workload.ep_overlap,
        "deferred weight gradients" * workload.delay_wgrad,
    )
    return f"{workload.parallel.schedule} with {' and '.join(filter(None, named)) or 'plain passes'}"


def changes_to_run(workload: Workload, run: RunConfig) -> dict[str, str]:
    """The dotted keys in which ``run`` differs from the workload's, with the workload's values as on a command line.

    Values that cannot be trained are left out.
    """
    changes: dict[str, str] = {}
    for path in _PLANNED_KEYS:
        value = _value_at(workload.run, path)
        if path == "parallel.schedule":
            value = order_of(workload) or value
        if path in _ROWS:
            trained = _ROWS[path].trained
            if isinstance(value, tuple):
                value = tuple(item for item in value if item in trained)
            elif value not in trained:
                continue
        if value != _value_at(run, path):
            changes[path] = _word(value)
    return changes


def launch_words(workload: Workload, name: str, changes: Mapping[str, str]) -> list[str]:
    """What to type once per node, in pieces that belong together. ``name`` is the run's recipe or file."""
    cluster = workload.cluster
    per_node = min(cluster.gpu.per_node, cluster.num_gpus)
    nodes = -(-cluster.num_gpus // per_node)
    # A fixed port and no rendezvous service: torch's c10d service unpickles what reaches its port, from any host. On
    # one node too torchrun starts that service, with --standalone as without it, unless a port is given.
    meet = ["--master-port 29500"]
    if nodes > 1:
        meet = [f"--nnodes {nodes}", "--node-rank $NODE_RANK", "--master-addr $HEAD", "--master-port 29500"]
    started = [f"--nproc-per-node {per_node}", "-m moefold.cli.main", f"train {shlex.quote(name)}"]
    return ["torchrun", *meet, *started, *(f"--{path} {shlex.quote(value)}" for path, value in changes.items())]


def folded(words: Sequence[str], dim: int) -> str:
    """The command over several lines, as a shell reads it."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > dim:
            lines.append("    ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return " \\\n".join(lines)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _value_at(run: RunConfig, path: str) -> object:
    value: object = run
    for name in path.split("."):
        value = getattr(value, name)
    return value
