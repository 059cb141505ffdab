"""How many bytes a rank communicates, and over which links.

Ranks are numbered by `parallel.rank_order`: by default with tensor parallelism fastest, then context, then data, then
pipeline; on the expert side etp, ep, edp, pp. So a group of `size` ranks that are `stride` apart has `inside` of them
in one domain of fast links:

    inside = min(size, max(1, domain // stride))

With another order other groups are near: the sums of expert gradients over edp instead of the exchanges over ep, say. A
group along two axes that a third one separates has the product of what it has along each.

Each GPU has its own share of the network. A ring over a group with `inside` ranks per domain crosses the network once
per domain, with the bandwidth of `inside` GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from moefold.blueprint.model_shape import Attention, Layer, MoE
from moefold.blueprint.row_bounds import bounds_rows
from moefold.config.memory import Recomputed
from moefold.config.precision import BYTES
from moefold.config.precision_recipes import TP_REDUCE_CASTS
from moefold.plan.dispatch_choice import sent_row_bytes
from moefold.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Reach:
    """A group's size, how many of its ranks share a domain, and over how many domains it lies."""

    size: int
    inside: int

    @property
    def domains(self) -> int:
        return -(-self.size // self.inside)

    @property
    def crosses(self) -> bool:
        return self.inside < self.size


def reach(size: int, stride: int, domain: int) -> Reach:
    return Reach(size, min(size, max(1, domain // stride)))


@lru_cache(maxsize=100_000)
def reach_along(axes: tuple[str, ...], order: str, sizes: tuple[tuple[str, int], ...], domain: int) -> Reach:
    """Of groups along some axes of a grid whose order names the innermost first."""
    lengths, stride, group, inside = dict(sizes), 1, 1, 1
    # Neighbouring axes of the group count as one: length and stride.
    length, start = 1, 1
    for axis in order.split("-")[:-1]:
        size = lengths[axis]
        if axis in axes and size > 1:
            group *= size
            if length * start != stride:
                inside *= reach(length, start, domain).inside
                length, start = 1, stride
            length *= size
        stride *= size
    return Reach(group, min(group, inside * reach(length, start, domain).inside))


def dense_reach(workload: Workload, *axes: str) -> Reach:
    """Of groups along some of tp, cp and dp."""
    parallel = workload.parallel
    sizes = (("tp", parallel.tp), ("cp", parallel.cp), ("dp", workload.dp))
    return reach_along(axes, parallel.rank_order.dense, sizes, workload.cluster.usable_domain)


def expert_grid_reach(workload: Workload, *axes: str) -> Reach:
    """Of groups along some of etp, ep and edp."""
    parallel = workload.parallel
    sizes = (("etp", parallel.etp), ("ep", parallel.ep), ("edp", workload.edp))
    return reach_along(axes, parallel.rank_order.expert, sizes, workload.cluster.usable_domain)


def expert_reach(workload: Workload) -> Reach:
    return expert_grid_reach(workload, "ep")


def data_reach(workload: Workload) -> Reach:
    """Ranks over which dense gradients are added."""
    return dense_reach(workload, "dp", "cp")


def host_reaches(workload: Workload, where: Reach, stride: int) -> tuple[Reach, Reach] | None:
    """Of a group whose gradients are summed in four steps: its ranks of one host, and one rank of each host."""
    parallel, domain = workload.parallel, workload.cluster.usable_domain
    inside = parallel.ranks_per_host // stride
    hierarchical = parallel.sharding == "flat" and parallel.param_sync == "hierarchical"
    if not hierarchical or not 1 < inside < where.size:
        return None
    return reach(inside, stride, domain), reach(where.size // inside, stride * inside, domain)


def expert_data_reach(workload: Workload) -> Reach:
    return expert_grid_reach(workload, "edp")


def tensor_reach(workload: Workload) -> Reach:
    """Of tp or etp, whichever is over more domains."""
    both = dense_reach(workload, "tp"), expert_grid_reach(workload, "etp")
    return max(both, key=lambda where: (where.domains, where.size))


@dataclass(frozen=True, slots=True)
class DispatchBytes:
    """One dispatch or combine of one rank: bytes over fast links, bytes over the network, messages."""

    inside: float
    outside: float


def dispatch_bytes(workload: Workload, moe: MoE) -> DispatchBytes:
    """Rows to experts on other ranks, by dispatcher, and back: the mean of both ways, which differ where
    `precision.dispatch` narrows rows on their way there."""
    parallel, where = workload.parallel, expert_reach(workload)
    # Of rows of zeros, those that travel.
    padding = workload.row_padding if workload.run.kernels.row_padding == "routing_map" else 1.0
    # Parts of a fixed size travel whole, however busy a rank is.
    tokens = workload.context_tokens / parallel.tp * padding
    tokens *= workload.sent_rows if bounds_rows(workload.run) else workload.busiest
    dim = moe.latent or workload.model.dim
    kind, ep = workload.dispatcher, parallel.ep
    # Sums over ranks are in float32; a row that comes back is summed where it arrives.
    back = 4.0 if kind == "all_gather" and workload.is_own else workload.word
    row = (sent_row_bytes(workload.run, dim, int(workload.word)) + dim * back) / 2
    if ep == 1 or kind == "local":
        return DispatchBytes(0.0, 0.0)
    if kind == "all_gather":
        return DispatchBytes(tokens * row * (where.inside - 1), tokens * row * (ep - where.inside) / where.inside)
    if kind == "all_to_all":
        rows = tokens * moe.top_k
        return DispatchBytes(rows * row * (where.inside - 1) / ep, rows * row * (ep - where.inside) / ep)
    ranks = distinct(ep, moe.top_k)
    if kind == "deduplicated":
        # A token goes to a rank once, wherever that is.
        rows = tokens * ranks
        return DispatchBytes(rows * row * (where.inside - 1) / ep, rows * row * (ep - where.inside) / ep)
    # In two levels a token goes to a domain once over the network, and to a rank once over fast links.
    domains = where.domains
    touched = distinct(domains, moe.top_k)
    outside = tokens * row * touched * (domains - 1) / domains
    return DispatchBytes(tokens * row * ranks * (1 - 1 / where.inside), outside)


def distinct(places: float, choices: int) -> float:
    """How many of `places` so many uniform assignments hit, on average."""
    return float(places * (1 - (1 - 1 / places) ** choices))


def tensor_bytes(workload: Workload, layer: Layer, experts: bool = True) -> float:
    """Gathers and scatters of sequence shards in one forward pass; bytes received by a rank. Those of split ``experts``
    are among them or not."""
    tp, tokens = workload.parallel.tp, workload.context_tokens
    once = sequence_bytes(workload)
    passes = 2.0 * (layer.mixer is not None)
    if isinstance(layer.feed, MoE):
        passes += 2.0 * (layer.feed.shared_hidden_dim > 0)
    elif layer.feed is not None:
        passes += 2.0
    total = passes * once
    if experts and isinstance(layer.feed, MoE) and workload.parallel.etp > 1:
        etp = workload.parallel.etp
        rows = tokens / tp * layer.feed.top_k * etp
        total += 2 * workload.word * rows * (layer.feed.latent or workload.model.dim) * (etp - 1) / etp
    return total


def sequence_bytes(workload: Workload) -> float:
    """Of one gather of all tokens, or of one sum: their mean, as there are as many of both. In moefold a sum has a
    format of its own."""
    tp = workload.parallel.tp
    each = (workload.word + _sum_bytes(workload)) / 2
    return each * workload.context_tokens * workload.model.dim * (tp - 1) / tp


class Exchanges(NamedTuple):
    """How often a microbatch sends through one layer, forward and backward: dispatches and combines, tensor
    parallelism's gathers and sums (as parts of a forward pass), and rounds of the ring of context parallelism."""

    dispatches: tuple[float, float]
    tensor: tuple[float, float]
    context: tuple[float, float]


def exchanges_of(workload: Workload, layer: Layer) -> Exchanges:
    """Recomputed layers send again. Megatron keeps a share of the tokens and gathers them again for weight gradients;
    DTensor and moefold keep what they gathered. Where operators are recomputed, sums and exchanges are kept, and
    gathers are not; nor are they of moefold's recomputed phases."""
    again = 1.0 if "full" in workload.recompute else 0.0
    repeated = 1.0 if again or "experts" in workload.recompute else 0.0
    regathered = 1.0
    if workload.is_own:
        phases = _tensor_phases(layer)
        regathered = len(workload.recompute & phases) / max(1, len(phases))
    elif workload.framework.name == "fsdp2":
        regathered = float(bool(workload.repeated_matmuls))
    gathers = regathered * workload.word / (workload.word + _sum_bytes(workload))
    return Exchanges((2.0, 2 + 2 * repeated), (1.0, 1 + gathers + again), (1.0, 2 + again))


def _tensor_phases(layer: Layer) -> frozenset[Recomputed]:
    """Those whose tokens tensor-parallel ranks gather: of an MoE layer, the shared expert's."""
    found: list[Recomputed] = ["attention"] if layer.mixer is not None else []
    if isinstance(layer.feed, MoE):
        found += ["experts"] if layer.feed.shared_hidden_dim else []
    elif layer.feed is not None:
        found.append("feed_forward")
    return frozenset(found)


def gathered_word(workload: Workload) -> float:
    """Bytes of a parameter that is gathered for every layer and pass: a word, or a code."""
    return min(2.0, workload.gather_bytes) if workload.is_own else 2.0


def summed_word(workload: Workload) -> float:
    """Bytes of its gradient: FSDP2 and moefold add up in float32, Megatron in the format in which it keeps them."""
    return 4.0 if workload.framework.name in ("fsdp2", "moefold") else workload.gradient_bytes


def synced_word(workload: Workload) -> float:
    """Bytes of a parameter and of its gradient that are gathered and summed once per step."""
    if workload.parallel.sharding == "none":
        return 2 * workload.word
    return workload.gradient_bytes + min(2.0, workload.weight_bytes)


def _sum_bytes(workload: Workload) -> float:
    """Of one value of a part of a sum over tensor-parallel ranks."""
    if not workload.is_own:
        return workload.word
    precision = workload.run.precision
    if precision.tp_reduce == "fp8_all_to_all":
        return TP_REDUCE_CASTS[precision.tp_reduce].forward.bytes_per_value
    return float(BYTES[precision.tp_reduce_format])


def context_bytes(workload: Workload, layer: Layer) -> float:
    """Keys and values that travel round the ring in one forward pass."""
    if workload.parallel.cp == 1 or not isinstance(layer.mixer, Attention):
        return 0.0
    a, tp = layer.mixer, workload.parallel.tp
    per_token = max(1.0, a.kv_heads / tp) * (a.qk_dim + a.v_dim)
    return workload.word * workload.context_tokens * per_token * (workload.parallel.cp - 1)


def stage_bytes(workload: Workload) -> float:
    """Bytes that one stage sends to the next for one microbatch."""
    return workload.word * workload.local_tokens * workload.model.dim


def pipeline_leaves_domain(workload: Workload) -> bool:
    parallel = workload.parallel
    return workload.dp * parallel.cp * parallel.tp * parallel.pp > workload.cluster.usable_domain
