"""What crosses a link between hosts: two levels send no more than one row per token and host.

Two network namespaces with two ranks each and a limited link between them. The kernel counts what leaves by the link;
beside rows that is counts, choices and the headers of packets.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.two_hosts import move_to, possible, two_hosts

from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.moe.dispatch.base import Dispatcher, Routing
from moefold.moe.dispatch.deduplicated import DeduplicatedDispatcher
from moefold.moe.dispatch.two_level import TwoLevelDispatcher
from moefold.topology.folded_layout import fold

TOKENS, WIDTH, EXPERTS, CHOICES, TURNS = 512, 512, 32, 4, 4


def left_by_the_link() -> int:
    """Bytes of this host. A process sees its own namespace there, and not in /sys."""
    for line in Path("/proc/self/net/dev").read_text("utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "cable":
            return int(numbers.split()[8])
    raise AssertionError("no link to another host")


def measure(rank: int) -> dict[str, Any]:
    parallel = ParallelConfig(ep=4, ep_inner=2)
    groups = Groups(fold(parallel, 4), rank, Ledger(), timedelta(seconds=120), ep_inner=2)
    dispatchers: dict[str, Dispatcher] = {
        "deduplicated": DeduplicatedDispatcher(EXPERTS, groups["ep"], groups["etp"]),
        "two_level": TwoLevelDispatcher(EXPERTS, groups["ep_across"], groups["ep_inside"], groups["etp"]),
    }
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    expert = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES, dim=1).indices
    routing = Routing(expert, torch.rand(TOKENS, CHOICES, generator=generator))
    found: dict[str, Any] = {}
    answers = {}
    for name, dispatcher in dispatchers.items():
        arrived = dispatcher.dispatch(x, routing)
        answers[name] = dispatcher.combine(arrived.rows_RL, arrived.ticket)
        dist.barrier()
        before = left_by_the_link()
        for _ in range(TURNS):
            arrived = dispatcher.dispatch(x, routing)
            dispatcher.combine(arrived.rows_RL, arrived.ticket)
        dist.barrier()
        found[name] = left_by_the_link() - before
    # Whoever answers with what arrived gives every token back once per rank that it met; both met the same ranks.
    torch.testing.assert_close(answers["two_level"], answers["deduplicated"])
    host, other = rank // 2, expert // (EXPERTS // 4)
    away = (other // 2 != host).any(1)
    ranks_away = sum(((other == each) & (other // 2 != host)).any(1).sum() for each in range(4))
    found["hosts"], found["ranks"] = int(away.sum()), int(ranks_away)
    return found


@pytest.mark.timeout(900)
@pytest.mark.skipif(not possible(), reason="needs the right to make network namespaces")
def test_two_levels_cross_with_fewer_bytes() -> None:
    with two_hosts("500mbit"):
        ranks = spawn_ranks(measure, 4, seconds=200, interface=lambda rank: move_to(rank // 2))
    for host in (ranks[:2], ranks[2:]):
        crossed = {name: max(rank[name] for rank in host) / TURNS for name in ("deduplicated", "two_level")}
        assert crossed["two_level"] <= 1.02 * crossed["deduplicated"]
        # A row for each of this host's tokens that has a choice there, and an answer to each of the other host's; once
        # per host or once per rank.
        for name, key in (("two_level", "hosts"), ("deduplicated", "ranks")):
            rows = sum(rank[key] for rank in ranks)
            least = rows * WIDTH * 2
            assert least <= crossed[name] <= 1.1 * least, (name, crossed, least)
        print({name: round(value) for name, value in crossed.items()})
