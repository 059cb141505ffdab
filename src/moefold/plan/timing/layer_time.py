"""The time of one layer, forward and backward, on one rank: the GPU, the host, and what other ranks cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from moefold.blueprint.model_shape import Layer, MoE
from moefold.blueprint.param_counts import layer_counts
from moefold.blueprint.row_bounds import bounds_rows
from moefold.config.memory import Recomputed, RetainedStep
from moefold.config.precision import Graphs, GraphScope
from moefold.plan.echo_cost import clone_seconds
from moefold.plan.memory.layer_activations import kept_by
from moefold.plan.memory.saved_activations import setting_of
from moefold.plan.memory.states import workload_reshards_per_step
from moefold.plan.op_costs import Part, Sizes, Work, parts_of
from moefold.plan.timing.constants import Constants
from moefold.plan.timing.throughput import Rates, dispatch_seconds, ring, slower, sms_taken
from moefold.plan.traffic import (
    context_bytes,
    data_reach,
    dense_reach,
    dispatch_bytes,
    expert_data_reach,
    tensor_bytes,
    tensor_reach,
)
from moefold.plan.workload import Workload

# A kernel inside a recorded graph costs the host and the GPU this share of one outside.
_GRAPHED = 0.06
_GRAPHED_GAP = 0.5
# Parts that a partial graph holds, by the names frameworks give them.
_SCOPES: dict[GraphScope, frozenset[str]] = {
    "attn": frozenset({"qkv", "latents", "mla_up", "core_attention", "attention_out", "norms"}),
    "mamba": frozenset({"scan_in", "scan", "scan_out"}),
    "moe_router": frozenset({"router", "shared", "shared_activation", "latent"}),
    "moe_preprocess": frozenset({"permutation"}),
    "mlp": frozenset({"feed_forward", "dense_activation"}),
}
# moefold's router has no shared expert beside it; both are between exchanges.
_SCOPES_MOEFOLD: dict[GraphScope, frozenset[str]] = _SCOPES | {
    "moe_router": frozenset({"router"}),
    "moe": frozenset({"permutation", "experts", "activation", "latent", "shared", "shared_activation"}),
}
# What a recompute option runs forward once more.
_AGAIN: dict[str, frozenset[str]] = {
    "mla_up": frozenset({"mla_up"}),
    "core_attention": frozenset({"core_attention"}),
    "attention": frozenset({"qkv", "latents", "mla_up", "core_attention", "attention_out"}),
    "norms": frozenset({"norms"}),
    "activation": frozenset({"activation", "shared_activation"}),
    "feed_forward": frozenset({"feed_forward", "dense_activation"}),
    "experts": frozenset({"router", "permutation", "experts", "activation", "latent", "shared", "shared_activation"}),
}
# moefold's recomputation stops early: a phase's last matmul, and the routing that it keeps, run once.
_AGAIN_MOEFOLD = _AGAIN | {
    "attention": _AGAIN["attention"] - {"attention_out"},
    "experts": frozenset({"experts", "activation", "shared", "shared_activation"}),
}


# What a discarded step (`memory.retain`) runs forward once more: parts, and which share of each. A norm is two of the
# five passes over memory around one half of a block; of a feed-forward's matmuls the last is not needed again.
_STEPS: dict[str, dict[str, float]] = {
    "attention_norm": {"norms": 0.2},
    "latent_norm": {"norms": 0.05},
    "mla_up": {"mla_up": 1.0},
    "core": {"core_attention": 1.0},
    "feed_norm": {"norms": 0.2},
    "rows": {"permutation": 0.3},
    "gate_up": {"experts": 2 / 3},
    "activation": {"activation": 1.0},
    "shared": {"shared": 2 / 3, "shared_activation": 1.0},
    "dense": {"feed_forward": 2 / 3, "dense_activation": 1.0},
}


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


@dataclass(frozen=True, slots=True)
class Load:
    """Work between two moments at which the host must wait for the GPU, and what of it the host launches itself."""

    work: Work = field(default_factory=Work)
    launches: float = 0.0
    loops: float = 0.0

    def plus(self, work: Work, share: float) -> Load:
        return Load(self.work + work, self.launches + share * work.launches, self.loops + share * work.loops)


class Launched(NamedTuple):
    """What of a workload decides how often a part runs, and what of it the host launches itself."""

    is_own: bool
    recompute: frozenset[Recomputed]
    graphs: Graphs
    graph_scope: tuple[GraphScope, ...]
    discarded: frozenset[RetainedStep] = frozenset()


def loads_of(workload: Workload, layer: Layer, sizes: Sizes) -> tuple[Load, Load, Load]:
    kernels, discarded = workload.run.kernels, workload.retained("discard")
    launched = Launched(workload.is_own, workload.recompute, kernels.graphs, kernels.graph_scope, discarded)
    return loads(layer, sizes, launched)


# What comes after the host knows how many rows travel.
_AFTER_ROUTING = frozenset({"permutation", "experts", "activation", "latent"})


@lru_cache(maxsize=100_000)
def loads(layer: Layer, sizes: Sizes, launched: Launched) -> tuple[Load, Load, Load]:
    """Forward up to the routing, forward from there, and backward with what is recomputed."""
    again, steps = _recomputed(launched), _recomputed_steps(launched)
    graphed = _graphed(launched)
    full = "full" in launched.recompute
    before = after = backward = Load()
    for part in parts_of(layer, sizes):
        share = 0.0 if launched.graphs == "full" else _GRAPHED if part.name in graphed else 1.0
        if part.name in _AFTER_ROUTING:
            after = after.plus(part.forward, share)
        else:
            before = before.plus(part.forward, share)
        work = part.backward
        if full or part.name in again:
            work += part.forward
        elif part.name in steps:
            work += part.forward.scaled(steps[part.name])
        backward = backward.plus(work, share)
    return before, after, backward


def _recomputed(launched: Launched) -> frozenset[str]:
    again = _AGAIN_MOEFOLD if launched.is_own else _AGAIN
    return frozenset().union(*(again.get(name, frozenset()) for name in launched.recompute))


def _recomputed_steps(launched: Launched) -> dict[str, float]:
    """Shares of parts that discarded steps run again."""
    found: dict[str, float] = {}
    for step in launched.discarded:
        for part, share in _STEPS[step].items():
            found[part] = found.get(part, 0.0) + share
    return found


def _graphed(launched: Launched) -> frozenset[str]:
    if launched.graphs != "partial":
        return frozenset()
    scopes = _SCOPES_MOEFOLD if launched.is_own else _SCOPES
    return frozenset().union(*(scopes.get(name, frozenset()) for name in launched.graph_scope))


_SHARED, _EXPERTS = ("shared", "shared_activation"), ("experts", "activation")


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
    again = 1.0 if "full" in workload.recompute else 0.0
    moe = layer.feed if isinstance(layer.feed, MoE) else None
    one_dispatch = dispatch_seconds(dispatch_bytes(workload, moe), workload, c) if moe else 0.0
    repeated = 1.0 if again or "experts" in workload.recompute else 0.0
    hide = c.expert_hidden if workload.ep_overlap else 0.0
    chunks = workload.parallel.exchange_chunks
    shared = _work_of(_SHARED, layer, sizes) if "shared_experts" in workload.parallel.overlap else None
    experts_work = _work_of(_EXPERTS, layer, sizes)
    tensor = _tensor(workload, layer, c)
    exposed = c.tensor_hidden if workload.framework.tp_overlap else c.tensor_exposed
    tp_chunks = _tensor_chunks(workload)
    context = _context(workload, layer, c) * c.context_exposed
    sync = _sync(workload, moe, c)
    taken = sms_taken(workload) if moe else 0.0
    gap = rates.gap * (_GRAPHED_GAP if workload.run.kernels.graphs == "full" else 1.0)

    def one(load: Load, dispatches: float, gathers: float, rings: float, *, back: bool, waits: float = 0.0) -> Seconds:
        compute = rates.compute(load.work, backward=back)
        moving = rates.moving(load.work) + gap * load.work.kernels
        host = rates.launch * load.launches + rates.loop * load.loops
        expert, ring_time = dispatches * one_dispatch, gathers * tensor
        tensor_shown = exposed * ring_time
        if gathers and tp_chunks > 1:
            beside = rates.compute(_work_of(_SHARDED_MATMULS, layer, sizes)[back], backward=back)
            tensor_shown -= hidden_in_chunks(_share_in_chunks(workload, layer) * tensor_shown, beside, tp_chunks)
        hidden = hide * expert
        if dispatches and (shared is not None or chunks > 1):
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
        # After a sync the host has no lead over the GPU: launches from before the routing do not help after it.
        forward = one(before, 0, 1, 1, back=False).plus(one(after, 2, 0, 0, back=False, waits=1))
    else:
        together = Load(before.work + after.work, before.launches + after.launches, before.loops + after.loops)
        forward = one(together, 2, 1, 1, back=False)
    passes = Passes(
        forward, one(backward, 2 + 2 * repeated, 1.5 + again, 2 + again, back=True, waits=max(again, repeated))
    )
    if clones := clone_seconds(workload, moe, c):
        sent, back = Seconds(expert=clones), Seconds(expert=(1 + repeated) * clones)
        passes = Passes(passes.forward.plus(sent), passes.backward.plus(back))
    if workload.retained("offload"):
        passes = _with_offload(workload, layer, passes)
    return _with_sharding(workload, layer, passes, c) if shards_by_layer(workload) else passes


def _with_offload(workload: Workload, layer: Layer, passes: Passes) -> Passes:
    """Offloaded steps leave during the layer's forward and return during the backward of the layer after it."""
    sent = kept_by(layer, workload.model.dim, setting_of(workload)).away * workload.context_tokens
    seconds = sent / (workload.cluster.gpu.host_gb_s * 1e9)

    def one(pass_: Seconds) -> Seconds:
        shown = max(0.0, seconds - pass_.total)
        return pass_.plus(Seconds(offload=shown, hidden_offload=seconds - shown))

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
    # In bfloat16, or as codes.
    each = min(2.0, workload.gather_bytes) if workload.is_own else 2.0
    gather = ring(each * dense, dense_where, workload.cluster, c) + ring(
        each * experts, expert_where, workload.cluster, c
    )
    # FSDP2 and moefold add gradients up in float32, Megatron in the format in which it computed them.
    dim = 4.0 if workload.framework.name in ("fsdp2", "moefold") else 2.0
    scatter = ring(dim * dense, dense_where, workload.cluster, c) + ring(
        dim * experts, expert_where, workload.cluster, c
    )

    def one(seconds: Seconds, moved: float) -> Seconds:
        shown = slower(seconds.total, moved) - seconds.total + c.contention * min(moved, seconds.total)
        return seconds.plus(Seconds(sharded=shown, hidden_sharded=max(0.0, moved - shown)))

    return Passes(one(passes.forward, gather), one(passes.backward, gather + scatter))
