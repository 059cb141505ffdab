"""What of a layer runs in each pass, and how much of it the host launches itself.

Recomputation runs parts again before their backward, and recorded graphs launch many kernels at once. Both are said in
the names of parts (`op_costs.parts_of`), in tables below: a new option is a new row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from moefold.blueprint.model_shape import Layer
from moefold.config.memory import Recomputed, RetainedStep
from moefold.config.precision import Graphs, GraphScope
from moefold.plan.op_costs import Work, parts_of
from moefold.plan.op_sizes import Sizes
from moefold.plan.timing.operator_recompute import operator_shares
from moefold.plan.workload import Workload

# A kernel inside a recorded graph costs the host this share of one outside.
_GRAPHED = 0.06
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
    "moe": frozenset({"permutation", "experts", "activation", "biases", "latent", "shared", "shared_activation"}),
}
# What a recompute option runs forward once more.
_AGAIN: dict[str, frozenset[str]] = {
    "mla_up": frozenset({"mla_up"}),
    "core_attention": frozenset({"core_attention"}),
    "attention": frozenset({"qkv", "latents", "mla_up", "core_attention", "attention_out"}),
    "norms": frozenset({"norms"}),
    "activation": frozenset({"activation", "shared_activation"}),
    "feed_forward": frozenset({"feed_forward", "dense_activation"}),
    "experts": frozenset(
        {"router", "permutation", "experts", "activation", "biases", "latent", "shared", "shared_activation"}
    ),
}
# moefold's recomputation stops early: a phase's last matmul, and the routing that it keeps, run once.
_AGAIN_MOEFOLD = _AGAIN | {
    "attention": _AGAIN["attention"] - {"attention_out"},
    "experts": frozenset({"experts", "activation", "biases", "shared", "shared_activation"}),
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
    repeated_matmuls: Literal["", "second", "all"] = ""


def loads_of(workload: Workload, layer: Layer, sizes: Sizes) -> tuple[Load, Load, Load]:
    kernels, discarded = workload.run.kernels, workload.retained("discard")
    launched = Launched(
        workload.is_own,
        workload.recompute,
        kernels.graphs,
        kernels.graph_scope,
        discarded,
        workload.repeated_matmuls,
    )
    return loads(layer, sizes, launched)


# What comes after the host knows how many rows travel.
_AFTER_ROUTING = frozenset({"permutation", "experts", "activation", "biases", "latent"})


@lru_cache(maxsize=100_000)
def loads(layer: Layer, sizes: Sizes, launched: Launched) -> tuple[Load, Load, Load]:
    """Forward up to the routing, forward from there, and backward with what is recomputed."""
    shares = _recomputed(launched, layer, sizes)
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
        if full:
            work += part.forward
        elif part.name in shares:
            work += part.forward.scaled(shares[part.name])
        backward = backward.plus(work, share)
    return before, after, backward


def _recomputed(launched: Launched, layer: Layer, sizes: Sizes) -> dict[str, float]:
    """Of each part, the share that is recomputed."""
    if launched.repeated_matmuls:
        return operator_shares(layer, sizes.dim, all_matmuls=launched.repeated_matmuls == "all")
    found: dict[str, float] = {}
    for step in launched.discarded:
        for part, share in _STEPS[step].items():
            found[part] = found.get(part, 0.0) + share
    again = _AGAIN_MOEFOLD if launched.is_own else _AGAIN
    return found | {part: 1.0 for name in launched.recompute for part in again.get(name, ())}


def _graphed(launched: Launched) -> frozenset[str]:
    if launched.graphs != "partial":
        return frozenset()
    scopes = _SCOPES_MOEFOLD if launched.is_own else _SCOPES
    return frozenset().union(*(scopes.get(name, frozenset()) for name in launched.graph_scope))
