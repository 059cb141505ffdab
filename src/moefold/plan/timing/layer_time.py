"""The time of one layer, forward and backward, on one rank: the GPU, the host, and what other ranks cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moefold.blueprint.model_shape import Layer, MoE
from moefold.blueprint.param_counts import layer_counts
from moefold.blueprint.row_bounds import bounds_rows
from moefold.plan.echo_cost import clone_seconds
from moefold.plan.memory.layer_activations import kept_by
from moefold.plan.memory.saved_activations import setting_of
from moefold.plan.memory.states import workload_reshards_per_step
from moefold.plan.op_costs import Part, Work, parts_of
from moefold.plan.op_sizes import Sizes
from moefold.plan.timing.constants import Constants
from moefold.plan.timing.launched_parts import Load, loads_of
from moefold.plan.timing.throughput import Rates, dispatch_seconds, ring, slower, sms_taken
from moefold.plan.traffic import (
    context_bytes,
    data_reach,
    dense_reach,
    dispatch_bytes,
    exchanges_of,
    expert_data_reach,
    gathered_word,
    summed_word,
    tensor_bytes,
    tensor_reach,
)
from moefold.plan.workload import Workload

# A kernel inside a recorded graph loses this share of the gap before one outside.
_GRAPHED_GAP = 0.5


@dataclass(frozen=True, slots=True)
class Seconds:
    """One pass, cause by cause; the causes add up to the pass's time. `hidden_*` run beside it and are not in it."""

    compute: float = 0.0
    moving: float = 0.0
    host: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    sharded: float = 0.0
    # Copies of activations to the host's memory and back.
    offload: float = 0.0
    hidden_tensor: float = 0.0
    hidden_expert: float = 0.0
    hidden_sharded: float = 0.0
    hidden_offload: float = 0.0

    @property
    def total(self) -> float:
        waits = self.tensor + self.expert + self.context + self.sharded + self.offload
        return self.compute + self.moving + self.host + waits

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """Written out, for a search does this a million times."""
        return Seconds(
            self.compute + times * other.compute,
            self.moving + times * other.moving,
            self.host + times * other.host,
            self.tensor + times * other.tensor,
            self.expert + times * other.expert,
            self.context + times * other.context,
            self.sharded + times * other.sharded,
            self.offload + times * other.offload,
            self.hidden_tensor + times * other.hidden_tensor,
            self.hidden_expert + times * other.hidden_expert,
            self.hidden_sharded + times * other.hidden_sharded,
            self.hidden_offload + times * other.hidden_offload,
        )


@dataclass(frozen=True, slots=True)
class Passes:
    forward: Seconds
    backward: Seconds

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        return Passes(self.forward.plus(other.forward, times), self.backward.plus(other.backward, times))

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


_SHARED, _EXPERTS = ("shared", "shared_activation"), ("experts", "activation")


@lru_cache(maxsize=10_000)
def _work_of(names: tuple[str, ...], layer: Layer, sizes: Sizes) -> tuple[Work, Work]:
    """Of these parts: forward, and backward."""
    parts = [part for part in parts_of(layer, sizes) if part.name in names]
    return sum((part.forward for part in parts), Work()), sum((part.backward for part in parts), Work())


def exposed_exchanges(exchange: float, experts: float, before: float, after: float, chunks: int) -> float:
    """Seconds of dispatch and combine, ``exchange`` each, in which a layer computes nothing.

    Their chunks follow each other on one stream, all of dispatch first. The experts compute each when it has arrived,
    ``experts`` seconds in all; something else computes for ``before`` seconds while the first chunks come, and for
    ``after`` seconds while the last ones go back.
    """
    free, sent = before, exchange
    for chunk in range(1, chunks + 1):
        free = max(free, chunk * exchange / chunks) + experts / chunks
        sent = max(sent, free) + exchange / chunks
    return max(free + after, sent) - (before + experts + after)


def hidden_in_chunks(exchange: float, matmuls: float, chunks: int) -> float:
    """Seconds in which tensor parallelism's exchanges and the matmuls between them run at once. Of whichever is shorter
    that is all but one of ``chunks`` at least: before the first chunk arrives nothing is multiplied, and nothing when
    the last one is summed."""
    return min(exchange, matmuls) * (chunks - 1) / chunks


# Between a gather of tokens and a sum over tensor-parallel ranks.
_SHARDED_MATMULS = ("qkv", "mla_up", "attention_out", "scan_in", "scan_out", "feed_forward", "shared")


def _tensor_chunks(workload: Workload) -> int:
    return workload.parallel.tp_chunks if workload.is_own and "tensor_parallel" in workload.parallel.overlap else 1


def _share_in_chunks(workload: Workload, layer: Layer) -> float:
    """Of the bytes of tensor parallelism: not those of split experts, which dispatchers send."""
    return tensor_bytes(workload, layer, experts=False) / max(1.0, tensor_bytes(workload, layer))


def layer_passes(workload: Workload, layer: Layer, sizes: Sizes, rates: Rates, c: Constants) -> Passes:
    """One microbatch through one layer."""
    before, after, backward = loads_of(workload, layer, sizes)
    exchanges = exchanges_of(workload, layer)
    moe = layer.feed if isinstance(layer.feed, MoE) else None
    one_dispatch = dispatch_seconds(dispatch_bytes(workload, moe), workload, c) if moe else 0.0
    hide = c.expert_hidden if workload.ep_overlap else 0.0
    chunks = workload.parallel.exchange_chunks
    shared = _work_of(_SHARED, layer, sizes) if "shared_experts" in workload.parallel.overlap else None
    experts_work = _work_of(_EXPERTS, layer, sizes) if shared is not None or chunks > 1 else None
    tensor = _tensor(workload, layer, c)
    exposed = c.tensor_hidden if workload.framework.tp_overlap else c.tensor_exposed
    tp_chunks = _tensor_chunks(workload)
    context = _context(workload, layer, c) * c.context_exposed
    sync = _sync(workload, moe, c)
    taken = sms_taken(workload) if moe else 0.0
    gap = rates.gap * (_GRAPHED_GAP if workload.run.kernels.graphs == "full" else 1.0)

    def launched(load: Load) -> float:
        return rates.launch * load.launches + rates.loop * load.loops

    def one(
        load: Load,
        dispatches: float,
        gathers: float,
        rings: float,
        *,
        back: bool,
        waits: float = 0.0,
        lead: float = 0.0,
    ) -> Seconds:
        compute = rates.compute(load.work, backward=back)
        moving = rates.moving(load.work) + gap * load.work.kernels
        host = max(0.0, launched(load) - lead)
        expert, ring_time = dispatches * one_dispatch, gathers * tensor
        tensor_shown = exposed * ring_time
        if gathers and tp_chunks > 1:
            beside = rates.compute(_work_of(_SHARDED_MATMULS, layer, sizes)[back], backward=back)
            tensor_shown -= hidden_in_chunks(_share_in_chunks(workload, layer) * tensor_shown, beside, tp_chunks)
        hidden = hide * expert
        if dispatches and experts_work is not None:
            # Of a shared expert, two thirds are its first matmul and one third its second. Backward is the mirror.
            beside = 0.0 if shared is None else rates.compute(shared[back], backward=back)
            halves = (beside / 3, beside * 2 / 3) if back else (beside * 2 / 3, beside / 3)
            experts = rates.compute(experts_work[back], backward=back)
            bare = exposed_exchanges(one_dispatch, experts, *halves, chunks)
            hidden = max(hidden, c.expert_hidden * (2 * one_dispatch - bare))
        shown = expert - hidden + tensor_shown + rings * context
        lost = c.contention * (hidden + ring_time - tensor_shown) + max(-c.contention, taken) * hidden
        gpu_seconds = compute + moving + shown + lost
        return Seconds(
            compute + lost,
            moving,
            slower(gpu_seconds, host) - gpu_seconds + waits * sync,
            tensor_shown,
            expert - hidden,
            rings * context,
            hidden_tensor=ring_time - tensor_shown,
            hidden_expert=hidden,
        )

    if sync:
        # After a sync the host has no lead over the GPU: launches from before the routing do not help after it. What
        # it gains while the experts compute is its lead in the next layer.
        routed = one(after, 2, 0, 0, back=False, waits=1)
        lead = max(0.0, routed.total - sync - launched(after))
        forward = one(before, 0, 1, 1, back=False, lead=lead).plus(routed)
    else:
        together = Load(before.work + after.work, before.launches + after.launches, before.loops + after.loops)
        forward = one(together, 2, 1, 1, back=False)
    sent, gathers, rings = (ways[1] for ways in exchanges)
    passes = Passes(forward, one(backward, sent, gathers, rings, back=True, waits=float(sent > 2)))
    return _with_copies(workload, layer, bounded(passes) if workload.ep_overlap else passes, c)


def _with_copies(workload: Workload, layer: Layer, passes: Passes, c: Constants) -> Passes:
    """And what is not between the layer's own operations: clones of experts, offloaded steps, sharded parameters."""
    moe = layer.feed if isinstance(layer.feed, MoE) else None
    repeated = "full" in workload.recompute or "experts" in workload.recompute
    if clones := clone_seconds(workload, moe, c):
        sent, back = Seconds(expert=clones), Seconds(expert=(1 + repeated) * clones)
        passes = Passes(passes.forward.plus(sent), passes.backward.plus(back))
    if workload.retained("offload") or workload.run.memory.offload:
        passes = _with_offload(workload, layer, passes)
    return _with_sharding(workload, layer, passes, c) if shards_by_layer(workload) else passes


def bounded(passes: Passes) -> Passes:
    """Exchanges of one microbatch are hidden by another's work, and not by more than there is of it."""
    forward, backward = passes.forward, passes.backward
    hidden = forward.hidden_expert + backward.hidden_expert
    beside = forward.compute + forward.moving + backward.compute + backward.moving
    if hidden <= beside:
        return passes

    def one(pass_: Seconds) -> Seconds:
        shown = pass_.hidden_expert * (1 - beside / hidden)
        return pass_.plus(Seconds(expert=shown, hidden_expert=-shown))

    return Passes(one(forward), one(backward))


def _with_offload(workload: Workload, layer: Layer, passes: Passes) -> Passes:
    """Offloaded steps leave during the layer's forward and return during the backward of the layer after it. A copy
    takes as much of the device's memory bandwidth from what runs beside it as the link has."""
    sent = kept_by(layer, workload.model.dim, setting_of(workload)).away * workload.context_tokens
    gpu = workload.cluster.gpu
    seconds = sent / (gpu.host_gb_s * 1e9)
    taken = gpu.host_gb_s / (1e3 * gpu.memory_tb_s)

    def one(pass_: Seconds) -> Seconds:
        shown = max(0.0, seconds - pass_.total)
        hidden = seconds - shown
        return pass_.plus(Seconds(moving=taken * hidden, offload=shown, hidden_offload=hidden))

    return Passes(one(passes.forward), one(passes.backward))


def shards_by_layer(workload: Workload) -> bool:
    """Parameters are gathered for every layer and pass, and not once per step."""
    if workload.parallel.sharding != "fsdp" or workload.parallel.pp > 1:
        return False
    return not (workload.is_own and workload_reshards_per_step(workload))


def part_passes(part: Part, rates: Rates) -> Passes:
    """The embedding, the head and the like: no collectives, and their host time is hidden by the GPU's."""

    def one(work: Work, *, back: bool) -> Seconds:
        return Seconds(rates.compute(work, backward=back), rates.moving(work) + rates.gap * work.kernels)

    return Passes(one(part.forward, back=False), one(part.backward, back=True))


def _sync(workload: Workload, moe: MoE | None, c: Constants) -> float:
    """Dropless dispatch reads row counts back to the host, unless buffers or kernels need no counts there."""
    if moe is None or workload.run.kernels.graphs == "full" or workload.drops or bounds_rows(workload.run):
        return 0.0
    once = workload.framework.name == "moefold" or workload.dispatcher in ("deepep", "hybridep")
    return c.sync_us * 1e-6 * (1.0 if once else 2.0)


def _tensor(workload: Workload, layer: Layer, c: Constants) -> float:
    size = max(workload.parallel.tp, workload.parallel.etp)
    if size == 1:
        return 0.0
    where = tensor_reach(workload)
    total = tensor_bytes(workload, layer) * size / (size - 1)
    calls = 4 if layer.mixer is not None and layer.feed is not None else 2
    return calls * ring(total / calls, where, workload.cluster, c)


def _context(workload: Workload, layer: Layer, c: Constants) -> float:
    if workload.parallel.cp == 1:
        return 0.0
    where = dense_reach(workload, "cp")
    total = context_bytes(workload, layer) * workload.parallel.cp / (workload.parallel.cp - 1)
    return ring(total, where, workload.cluster, c)


def _with_sharding(workload: Workload, layer: Layer, passes: Passes, c: Constants) -> Passes:
    """Parameters are unsharded before each pass and gradients reduced after the second, overlapped with computation."""
    held = layer_counts(layer, workload.model.dim)
    parallel = workload.parallel
    dense, experts = held.on_rank(parallel.tp, parallel.ep, parallel.etp)
    dense_where, expert_where = data_reach(workload), expert_data_reach(workload)
    each, word = gathered_word(workload), summed_word(workload)
    gather = ring(each * dense, dense_where, workload.cluster, c) + ring(
        each * experts, expert_where, workload.cluster, c
    )
    scatter = ring(word * dense, dense_where, workload.cluster, c) + ring(
        word * experts, expert_where, workload.cluster, c
    )

    def one(seconds: Seconds, moved: float) -> Seconds:
        # What runs beside them is slower for it.
        beside = seconds.total + c.contention * min(moved, seconds.total)
        shown = slower(beside, moved) - seconds.total
        return seconds.plus(Seconds(sharded=shown, hidden_sharded=max(0.0, moved - shown)))

    return Passes(one(passes.forward, gather), one(passes.backward, gather + scatter))
