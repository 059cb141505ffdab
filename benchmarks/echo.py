"""One MoE layer, forward and backward, with and without clones of hot experts, on four ranks with a skewed router.

    python -m benchmarks.echo [ROUNDS]

Processor time of the busiest rank, interleaved, medians. On a computer with fewer cores than ranks wall time would show
who shares a core with whom; a rank's processor time is what it has to do. The prediction is the planner's arithmetic:

    seconds of a rank = fixed + rows * seconds of a row + clones sent or received * seconds of one

Its constants come from other runs: a balanced router with two numbers of tokens gives the fixed part and a row, an
exchange of weights and gradients alone a clone. How many rows and clones a rank has is the plan's, from the counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median
from time import process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import EchoConfig, ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import Dispatcher, Routing
from moefold.moe.dispatch.expert_clones import clone_exchange
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import Experts
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.parallel.dispatchers import dispatcher_for
from moefold.plan.clone_loads import EchoSizes, loads_with, planned_clones
from moefold.topology.folded_layout import fold

RANKS, NUM_EXPERTS, TOP_K, DIM, HIDDEN, TOKENS, SKEW = 4, 16, 2, 256, 512, 2048, 1.0
MOE = MoEConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, expert_hidden_dim=HIDDEN)
RUN = RunConfig(
    model=ModelConfig(moe=MOE, dim=DIM),
    data=DataConfig(packing="bin_packed"),
    parallel=ParallelConfig(ep=RANKS),
    precision=PrecisionConfig(params="float32", compute="float32"),
)


def skewed(tokens: int, rank: int) -> Tensor:
    """The n-th most popular expert has popularity 1 / n^SKEW."""
    popularity = 1 / torch.arange(1, NUM_EXPERTS + 1).double() ** SKEW
    popularity = popularity[torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(7))]
    return torch.multinomial(popularity.expand(tokens, -1), TOP_K, generator=torch.Generator().manual_seed(rank))


def balanced(tokens: int) -> Tensor:
    return torch.arange(tokens * TOP_K).view(tokens, TOP_K) % NUM_EXPERTS


class RankLayer:
    """This rank's experts, and one forward and backward of the layer on given assignments."""

    def __init__(self, groups: Groups) -> None:
        torch.manual_seed(groups.rank)
        backend = expert_backend("sequential", ParameterMatmul())(MOE)
        self.experts = Experts(replace(MOE, num_experts=NUM_EXPERTS // RANKS), DIM, backend)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.02)

    def seconds(self, dispatcher: Dispatcher, experts_tK: Tensor) -> float:
        tokens = len(experts_tK)
        x_tL = torch.randn(tokens, DIM, requires_grad=True)
        prob_tK = torch.rand(tokens, TOP_K, requires_grad=True)
        dist.barrier()
        start = process_time()
        expert_in = dispatcher.dispatch(x_tL, Routing(experts_tK, prob_tK))
        dispatcher.combine(self.experts(expert_in), expert_in.ticket).sum().backward()
        return process_time() - start


def exchange_seconds(groups: Groups, layer: RankLayer) -> float:
    """A clone's weights and gradients, its home's sum included: from each rank to the next, and back."""
    sizes = EchoSizes(NUM_EXPERTS, RANKS, 1)
    exchange = clone_exchange([(rank - 1) % RANKS * sizes.experts_each for rank in range(RANKS)], sizes, groups["ep"])
    assert exchange is not None
    dist.barrier()
    start = process_time()
    clones = exchange((layer.experts.gate_up, layer.experts.down), torch.float32)
    torch.autograd.backward(clones, [torch.zeros_like(clone) for clone in clones])
    return process_time() - start


def measure(groups: Groups, rounds: int) -> dict[str, list[float]]:
    """Of every round, the processor seconds of this rank."""
    torch.set_num_threads(1)
    plain = dispatcher_for(RUN, groups)
    cloning = dispatcher_for(replace(RUN, parallel=replace(RUN.parallel, echo=EchoConfig(slots=1))), groups)
    layer, routed = RankLayer(groups), skewed(TOKENS, groups.rank)
    kinds: dict[str, Callable[[], float]] = {
        "without": lambda: layer.seconds(plain, routed),
        "with": lambda: layer.seconds(cloning, routed),
        "half": lambda: layer.seconds(plain, balanced(TOKENS // 2)),
        "whole": lambda: layer.seconds(plain, balanced(TOKENS)),
        "exchange": lambda: exchange_seconds(groups, layer),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 2):
        for name, run in kinds.items():
            seconds = run()
            if number >= 2:
                found[name].append(seconds)
    return found


def predicted(median_of: Callable[[str], float]) -> tuple[float, float, list[int], list[int]]:
    """Seconds of the busiest rank without and with clones, and rows of all ranks in both."""
    sizes = EchoSizes(NUM_EXPERTS, RANKS, 1)
    rows = torch.stack([skewed(TOKENS, rank).flatten().bincount(minlength=NUM_EXPERTS) for rank in range(RANKS)]).sum(0)
    clones = planned_clones(rows.tolist(), sizes)
    before, after = loads_with(rows.tolist(), [], sizes), loads_with(rows.tolist(), clones, sizes)
    row = (median_of("whole") - median_of("half")) / (TOKENS * TOP_K / 2)
    fixed = median_of("whole") - row * TOKENS * TOP_K
    ends = [clone.expert // sizes.experts_each for clone in clones] + [clone.slot // sizes.slots for clone in clones]
    # An exchange measured alone sends one clone and receives one.
    each = median_of("exchange") / 2
    with_clones = [fixed + row * load + each * ends.count(rank) for rank, load in enumerate(after)]
    return fixed + row * max(before), max(with_clones), before, after


def run_benchmark(rounds: int) -> dict[str, float]:
    layout = fold(RUN.parallel, RANKS)

    def live(rank: int) -> dict[str, list[float]]:
        return measure(Groups(layout, rank, Ledger(), timedelta(seconds=300)), rounds)

    by_rank = spawn_ranks(live, RANKS, seconds=1800)
    # The median of each rank first: the largest of four noisy numbers would be their noise.
    busiest = {name: max(median(rank[name]) for rank in by_rank) for name in by_rank[0]}
    typical = {name: median(seconds for rank in by_rank for seconds in rank[name]) for name in by_rank[0]}
    without, with_clones, before, after = predicted(lambda name: typical[name])
    mean = sum(before) / RANKS
    return {
        "max/mean without": max(before) / mean,
        "max/mean with": max(after) / mean,
        "measured without (ms)": busiest["without"] * 1e3,
        "measured with (ms)": busiest["with"] * 1e3,
        "predicted without (ms)": without * 1e3,
        "predicted with (ms)": with_clones * 1e3,
        "measured factor": busiest["without"] / busiest["with"],
        "predicted factor": without / with_clones,
    }


if __name__ == "__main__":
    for name, value in run_benchmark(int(sys.argv[1]) if len(sys.argv) > 1 else 15).items():
        print(f"{name:24s} {value:8.2f}")
