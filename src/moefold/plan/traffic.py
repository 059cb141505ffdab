"""How many bytes a rank exchanges, and over which links.

Ranks are numbered with tensor parallelism fastest, then context, then data, then pipeline; on the expert side etp, ep,
edp, pp. So a group of `size` ranks that are `stride` apart keeps `inside` of them in one domain of fast links:

    inside = min(size, max(1, domain // stride))

Each accelerator has its own share of the network. A ring over a group with `inside` ranks per domain crosses
the network once per domain, with `inside` cards side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.plan.shape import Attention, Layer, Mixture
from moefold.plan.workload import Cuts, Job


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


def expert_reach(job: Job) -> Reach:
    cuts = job.cuts
    return reach(cuts.ep, cuts.etp, job.cluster.usable_domain)


def data_reach(job: Job) -> Reach:
    """Ranks over which dense gradients are added."""
    cuts = job.cuts
    return reach(cuts.dp * cuts.cp, cuts.tp, job.cluster.usable_domain)


def expert_data_reach(job: Job) -> Reach:
    cuts = job.cuts
    return reach(cuts.edp, cuts.ep * cuts.etp, job.cluster.usable_domain)


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """One dispatch or combine of one rank: bytes over fast links, bytes over the network, messages."""

    inside: float
    outside: float


def exchange_bytes(job: Job, mixture: Mixture) -> ExchangeBytes:
    """Rows to experts on other ranks, by dispatcher. Combine moves the same bytes back."""
    cuts, where = job.cuts, expert_reach(job)
    tokens = job.batch.tokens / cuts.cp / cuts.tp * job.options.imbalance
    row = job.numbers.word * (mixture.latent or job.model.width)
    kind, ep = job.options.dispatcher, cuts.ep
    if ep == 1 or kind == "local":
        return ExchangeBytes(0.0, 0.0)
    if kind == "all_gather":
        return ExchangeBytes(tokens * row * (where.inside - 1), tokens * row * (ep - where.inside) / where.inside)
    if kind == "all_to_all":
        rows = tokens * mixture.top_k
        return ExchangeBytes(rows * row * (where.inside - 1) / ep, rows * row * (ep - where.inside) / ep)
    ranks = distinct(ep, mixture.top_k)
    if kind == "deduplicated":
        # A token goes to a rank once, wherever that is.
        rows = tokens * ranks
        return ExchangeBytes(rows * row * (where.inside - 1) / ep, rows * row * (ep - where.inside) / ep)
    # In two levels a token goes to a domain once over the network, and to a rank once over fast links.
    domains = where.domains
    touched = distinct(domains, mixture.top_k)
    outside = tokens * row * touched * (domains - 1) / domains
    return ExchangeBytes(tokens * row * ranks * (1 - 1 / where.inside), outside)


def distinct(places: float, choices: int) -> float:
    """How many of `places` are hit by so many even choices, on average."""
    return float(places * (1 - (1 - 1 / places) ** choices))


def tensor_bytes(job: Job, layer: Layer) -> float:
    """Gathers and scatters of sequence shards in one forward pass; bytes received by a rank."""
    tp = job.cuts.tp
    tokens = job.batch.tokens / job.cuts.cp
    once = job.numbers.word * tokens * job.model.width * (tp - 1) / tp
    passes = 2.0 * (layer.mixer is not None)
    if isinstance(layer.feed, Mixture):
        passes += 2.0 * (layer.feed.shared_width > 0)
    elif layer.feed is not None:
        passes += 2.0
    total = passes * once
    if isinstance(layer.feed, Mixture) and job.cuts.etp > 1:
        etp = job.cuts.etp
        rows = tokens / tp * layer.feed.top_k * etp
        total += 2 * job.numbers.word * rows * (layer.feed.latent or job.model.width) * (etp - 1) / etp
    return total


def context_bytes(job: Job, layer: Layer) -> float:
    """Keys and values that travel round the ring in one forward pass."""
    if job.cuts.cp == 1 or not isinstance(layer.mixer, Attention):
        return 0.0
    a, tp = layer.mixer, job.cuts.tp
    per_token = max(1.0, a.kv_heads / tp) * (a.qk_dim + a.v_dim)
    return job.numbers.word * job.batch.tokens / job.cuts.cp * per_token * (job.cuts.cp - 1)


def stage_bytes(job: Job) -> float:
    """What one stage hands to the next for one microbatch."""
    return job.numbers.word * job.local_tokens * job.model.width


def pipeline_leaves_domain(cuts: Cuts, domain: int) -> bool:
    return cuts.dp * cuts.cp * cuts.tp * cuts.pp > domain
