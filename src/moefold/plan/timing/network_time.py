"""How long collectives take by bytes, links and reach of the group, and how large a schedule's bubble is.

An order of enough microbatches has a beginning and an end that do not depend on how many there are; between them the
slowest rank never waits. So its bubble is a number of units for each order, a unit being one third of a stage's time
for one microbatch (forward, input gradient and weight gradient cost about the same). 1F1B and interleaved 1F1B wait
3 (P - 1) units, by their closed form; other orders are simulated once.
"""

from __future__ import annotations

from functools import lru_cache

from moefold.hardware.cluster import Cluster
from moefold.plan.timing.constants import Constants
from moefold.plan.traffic import DispatchBytes, Reach
from moefold.plan.workload import Workload
from moefold.schedule.names import schedule_named
from moefold.schedule.simulate import Durations, simulate


def ring(total: float, where: Reach, cluster: Cluster, c: Constants) -> float:
    """A gather or scatter of `total` bytes over a group; an all-reduce is two of them.

    Inside a domain every rank receives what it lacks over its own links. Between domains the bytes cross once per
    domain, over the GPUs of those ranks of the group that are in it.
    """
    if where.size == 1 or total == 0:
        return 0.0
    inside = total * (where.size - 1) / where.size / (cluster.gpu.link_gb_s * 1e9 * c.ring_link)
    if not where.crosses:
        return float(inside + latency(cluster, c, crosses=False))
    network = cluster.nic_gb_s * 1e9 * c.ring_nic * where.inside * _penalty(cluster, c)
    outside = total * (where.domains - 1) / where.domains / network
    return float(max(inside if where.inside > 1 else 0.0, outside) + latency(cluster, c, crosses=True))


def dispatch_seconds(sent: DispatchBytes, workload: Workload, c: Constants) -> float:
    """One dispatch or one combine. Fast links and the network work at the same time; the slower one counts."""
    if not sent.inside and not sent.outside:
        return 0.0
    cluster = workload.cluster
    fused = workload.dispatcher in ("deepep", "hybridep")
    link = cluster.gpu.link_gb_s * 1e9 * (c.dedup_link if fused else c.exchange_link)
    network = cluster.nic_gb_s * 1e9 * (c.dedup_nic if fused else c.exchange_nic) * _penalty(cluster, c, dedup=fused)
    inside, outside = sent.inside / link, sent.outside / network
    return float((inside**2 + outside**2) ** 0.5 + latency(cluster, c, crosses=sent.outside > 0))


def latency(cluster: Cluster, c: Constants, *, crosses: bool) -> float:
    if crosses and cluster.network == "efa":
        return float(c.efa_latency_us * 1e-6)
    return float(c.latency_us * 1e-6 * (1.5 if crosses else 1.0))


def _penalty(cluster: Cluster, c: Constants, *, dedup: bool = False) -> float:
    if cluster.network != "efa":
        return 1.0
    return c.efa_dedup if dedup else c.efa


_CLOSED = ("gpipe", "1f1b", "interleaved")
PARTS = 3


@lru_cache(maxsize=1024)
def bubble_units(schedule: str, ranks: int, virtual: int) -> float:
    """Thirds of a stage's time."""
    if ranks == 1:
        return 0.0
    if schedule in _CLOSED:
        return float(PARTS * (ranks - 1))
    return simulated_units(schedule, ranks, virtual, 2 * ranks)


def simulated_units(schedule: str, ranks: int, virtual: int, microbatches: int) -> float:
    """The same by simulation: the time of the order less what the busiest rank has to do."""
    order = schedule_named(schedule).build(ranks, virtual, microbatches)
    timeline = simulate(order, Durations())
    return timeline.finish - max(timeline.busy)
