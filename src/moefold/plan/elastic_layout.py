"""The layout of a run that has fewer ranks than its own layout needs.

When ranks are lost for good, or a run is started again with another number of them, its global batch, the size of its
microbatches and the order of its data stay: data-parallel ranks run more microbatches, and a checkpoint is read by any
layout. What changes are the degrees. Candidates are all folds of `pp`, `tp`, `cp`, `dp`, `ep` and `etp` over at most so
many ranks in which the batch divides; `cp` and `etp` never grow. The fastest by prediction is taken, of those that
`moefold check` accepts and whose predicted memory fits; the prediction is for H100 GPUs, and orders layouts. Among
nearly equal ones the nearest to the run's own degrees is taken, since predictions err by more than that.

The result follows from the arguments alone, so every rank that asks gets the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd, isqrt, log2
from typing import NamedTuple

from moefold.checks.run_all import problems
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import LayoutError, Problem
from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import predict_memory
from moefold.plan.preflight import Device
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, workload_of_run
from moefold.topology.folded_layout import fold

_GPU = "H100"
_LARGEST_TP = 8
# Of the data-parallel sizes that fit, the largest ones are tried; a smaller one may allow what a larger one does not.
_DP_SIZES = 3
# So many candidates are predicted: those with the most ranks first, where a degree that is twice or half the run's own
# weighs as much as a tenth of the ranks.
_PREDICTED, _PER_DOUBLING = 40, 0.9
# Layouts that are predicted within this of the fastest are taken to be as fast.
_AS_FAST = 0.15


class ElasticLayout(NamedTuple):
    """The run with the degrees it goes on with, on ``world`` ranks."""

    run: RunConfig
    world: int

    def describe(self) -> str:
        """As in "pp2 ep4 dp4, 8 microbatches on each data-parallel rank"."""
        parallel, data = self.run.parallel, self.run.data
        dp = fold(parallel, self.world).size("dp")
        degrees = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep", "etp")} | {"dp": dp}
        said = " ".join(f"{axis}{size}" for axis, size in degrees.items() if size > 1) or "one rank"
        if data.packing == "bin_packed":
            return said
        count = data.global_batch // (data.micro_batch * dp)
        return f"{said}, {count} microbatch{'es' if count > 1 else ''} on each data-parallel rank"


class _Degrees(NamedTuple):
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def layout_for_world(run: RunConfig, world: int, device: Device | None = None) -> ElasticLayout:
    """The run's own degrees if they fold over all ``world`` ranks, else the fastest legal ones on at most so many.

    ``device`` is the memory that must be enough; ``run`` has no problems beside its layout. LayoutError if nothing is
    legal and fits.
    """
    if not problems(run, world) and _seconds(run, world, device) is not None:
        return ElasticLayout(run, world)
    found: list[tuple[float, float, ElasticLayout]] = []
    legal = 0
    for degrees in sorted(_folds(run, world), key=lambda each: (-_promise(each, run.parallel), each)):
        made = _with_degrees(run, degrees)
        if made is None:
            continue
        legal += 1
        if (seconds := _seconds(made, degrees.world, device)) is not None:
            found.append((seconds, _distance(degrees, run.parallel), ElasticLayout(made, degrees.world)))
        if legal >= _PREDICTED:
            break
    if not found:
        what = "would fit into memory" if legal else "is legal"
        fix = f"use more ranks, or set data.global_batch and data.micro_batch to what {world} ranks can share"
        raise LayoutError(Problem("world", f"no layout of at most {world} ranks {what}", fix))
    fastest = min(seconds for seconds, _, _ in found)
    near = [each for each in found if each[0] <= fastest * (1 + _AS_FAST)]
    return min(near, key=lambda each: (each[1], each[0], -each[2].world))[2]


def what_layouts_change(run: RunConfig) -> list[str]:
    """Keys of this run whose meaning depends on the layout, so that a step on another one is not the same step."""
    moe, found = run.model.moe, []
    if moe is not None and moe.balance.global_batch:
        found.append("model.moe.balance.global_batch counts the microbatches that have run so far, dp of them at once")
    if moe is not None and moe.capacity is not None and moe.capacity.scope == "local":
        found.append("model.moe.capacity.scope: local counts each rank's own tokens")
    if run.data.packing == "bin_packed":
        found.append("data.packing: bin_packed combines documents into other microbatches")
    return found


def _folds(run: RunConfig, world: int) -> Iterator[_Degrees]:
    """All grids over at most ``world`` ranks, by divisibility alone; none with less than half of the largest's."""
    parallel, moe = run.parallel, run.model.moe
    depth = run.model.num_layers + run.model.num_mtp + 2
    tps = [tp for tp in range(1, min(_LARGEST_TP, world) + 1) if run.model.attention.num_heads % tp == 0]
    experts = _divisors(moe.num_experts) if moe is not None else [1]
    made = set()
    for pp, tp, cp in product(range(1, min(depth, world) + 1), tps, _divisors(parallel.cp)):
        for dp in _dp_sizes(run, world // (pp * tp * cp)):
            for ep, etp in product(experts, _divisors(parallel.etp)):
                if tp * cp * dp % (ep * etp) == 0:
                    made.add(_Degrees(tp, cp, pp, dp, ep, etp))
    most = max((each.world for each in made), default=0)
    return (each for each in made if 2 * each.world >= most)


def _dp_sizes(run: RunConfig, most: int) -> list[int]:
    """Over which the batch divides; packed documents do over any."""
    if most < 1:
        return []
    if run.data.packing == "bin_packed":
        return list(range(most, max(0, most - _DP_SIZES), -1))
    microbatches = run.data.global_batch // run.data.micro_batch
    return [size for size in _divisors(microbatches) if size <= most][-_DP_SIZES:]


def _with_degrees(run: RunConfig, degrees: _Degrees) -> RunConfig | None:
    """The run with these degrees and what must follow them; None if no schedule makes it legal."""
    old = run.parallel
    same_stages = degrees.pp == old.pp
    base = replace(
        old,
        tp=degrees.tp,
        cp=degrees.cp,
        pp=degrees.pp,
        ep=degrees.ep,
        etp=degrees.etp,
        stages=old.stages if same_stages else None,
        context=replace(old.context, inner=gcd(old.context.inner, degrees.cp)),
        dp_replicate=gcd(old.dp_replicate, degrees.dp),
        edp_replicate=gcd(old.edp_replicate, degrees.tp * degrees.cp * degrees.dp // (degrees.ep * degrees.etp)),
        ep_inner=gcd(old.ep_inner, degrees.ep),
    )
    # Hosts that cut other groups may leave no level to sum in; the shards at rest are read by any layout.
    direct = replace(base, param_sync="direct", ranks_per_host=1)
    for vpp, schedule in dict.fromkeys(((old.vpp, old.schedule), (1, old.schedule), (1, "1f1b"))):
        for synced in dict.fromkeys((base, direct)):
            made = replace(run, parallel=replace(synced, vpp=vpp, schedule=schedule))
            if not problems(made, degrees.world):
                return made
    return None


def _seconds(run: RunConfig, world: int, device: Device | None) -> float | None:
    """A step's predicted time; None if its memory does not fit."""
    workload: Workload = workload_of_run(run, cluster_of(_GPU, world))
    if device is not None:
        here = replace(device, host_ranks=min(device.host_ranks, world))
        if here.needs(predict_memory(workload), world) > device.bytes:
            return None
    return predict_time(workload).step_seconds


def _promise(degrees: _Degrees, own: ParallelConfig) -> float:
    return float(degrees.world * _PER_DOUBLING ** _distance(degrees, own))


def _distance(degrees: _Degrees, own: ParallelConfig) -> float:
    """In doublings of the degrees that the run names."""
    return sum(abs(log2(getattr(degrees, axis) / getattr(own, axis))) for axis in ("tp", "cp", "pp", "ep", "etp"))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
