"""Candidates of `benchmarks.dispatch`, on one of the ranks that shard the experts.

t tokens of this rank, K experts per token, D model dim, E experts.

The lower bound of a dispatcher is torch's all-to-all of one row per assignment, there and back, with known split sizes
and preallocated buffers. A dispatcher has to find the split sizes and to permute rows as well. The lower bound of the
whole layer is the dense matmuls of as many rows as a rank has assignments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.roofline import DenseRoofline
from moefold.bench.layer_bench import batch_of, filled_layer, moe_config
from moefold.bench.layer_workload import (
    DTYPES,
    LayerShape,
    draw_input,
    draw_output_grad,
    draw_weights,
    exact_output,
    relative_error,
    route,
)
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Routing
from moefold.moe.moe_kernels import kernels_for
from moefold.nn.float32_matmul import cpu_matmul_here
from moefold.parallel.dispatchers import dispatcher_for
from moefold.parallel.parallelize import groups_of
from moefold.parallel.rank_interfaces import parallel_interfaces_of

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class ExpertRank:
    """One expert-parallel rank; the shape's tokens are those of all ranks."""

    shape: LayerShape
    dtype: str
    rank: int
    world: int

    @property
    def tokens(self) -> int:
        return self.shape.tokens // self.world

    def own(self, x_TD: Tensor) -> Tensor:
        return x_TD[self.rank * self.tokens :][: self.tokens]


class RoutedTokens(NamedTuple):
    x_tD: Tensor
    routing: Routing


class _Tokens:
    """This rank's tokens and their routing."""

    def __init__(self, at: ExpertRank) -> None:
        self.at, self.dtype = at, DTYPES[at.dtype]
        # Of the router only: all experts' weights on every rank would take too much memory.
        router_only = replace(at.shape, hidden=1, shared=0)
        self.weights = draw_weights(router_only, self.dtype)

    def draw(self, seed: int) -> RoutedTokens:
        x_tD = self.at.own(draw_input(self.at.shape, self.dtype, seed)).clone()
        prob_tK, expert_tK = route(self.at.shape, self.weights, x_tD)
        return RoutedTokens(x_tD, Routing(expert_tK, prob_tK))


class Buffers(NamedTuple):
    send: Tensor
    received: Tensor
    combined: Tensor
    send_splits: list[int]
    recv_splits: list[int]


class BareAllToAll:
    """torch's all-to-all with known split sizes, there and back."""

    def __init__(self, at: ExpertRank) -> None:
        self.tokens, self.at = _Tokens(at), at

    def prepare(self, seed: int) -> Buffers:
        drawn, at = self.tokens.draw(seed), self.at
        to_rank_N = drawn.routing.experts.flatten() // (at.shape.experts // at.world)
        sent = torch.bincount(to_rank_N, minlength=at.world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        rows = drawn.x_tD.repeat_interleave(at.shape.top_k, dim=0)
        arriving = rows.new_ones(int(received.sum()), at.shape.dim)
        return Buffers(rows, arriving, torch.ones_like(rows), sent.tolist(), received.tolist())

    def run(self, prepared: Buffers) -> None:
        b = prepared
        dist.all_to_all_single(b.received, b.send, b.recv_splits, b.send_splits)
        dist.all_to_all_single(b.combined, b.received, b.send_splits, b.recv_splits)

    def saved_bytes(self, prepared: Buffers) -> int | None:
        return None


class DispatchCombine:
    """One of moefold's dispatchers: dispatch, then combine of the rows received."""

    def __init__(self, at: ExpertRank, dispatcher: str) -> None:
        self.tokens = _Tokens(at)
        run = run_of(at, dispatcher)
        self.dispatcher = dispatcher_for(run, groups_of(run, at.world, at.rank, _TIMEOUT))

    def prepare(self, seed: int) -> RoutedTokens:
        return self.tokens.draw(seed)

    def run(self, prepared: RoutedTokens) -> None:
        arrived = self.dispatcher.dispatch(prepared.x_tD, prepared.routing)
        self.dispatcher.combine(arrived.rows_RL, arrived.ticket)

    def saved_bytes(self, prepared: RoutedTokens) -> int | None:
        return None


class ExpertParallelLayer:
    """moefold's whole layer, forward and backward, with this rank's experts."""

    def __init__(self, at: ExpertRank, dispatcher: str) -> None:
        self.at, self.dtype = at, DTYPES[at.dtype]
        self.weights = draw_weights(at.shape, self.dtype)
        run = run_of(at, dispatcher)
        groups = groups_of(run, at.world, at.rank, _TIMEOUT)
        seams = parallel_interfaces_of(
            run, groups, None, SYNC_SPLIT_SIZES, kernels_for(run, "cpu"), cpu_matmul=cpu_matmul_here(run, "cpu")
        )
        self.layer = filled_layer(at.shape, self.weights, seams)
        self._keep_own_experts()
        self.batch = batch_of(at.tokens)
        self.dy_tD = at.own(draw_output_grad(at.shape, self.dtype)).clone()

    def _keep_own_experts(self) -> None:
        experts, number = self.layer.experts, self.at.shape.experts // self.at.world
        first = self.at.rank * number
        for name in ("gate_up", "down"):
            setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[first : first + number].clone()))

    def prepare(self, seed: int) -> Tensor:
        for parameter in self.layer.parameters():
            parameter.grad = None
        return self.at.own(draw_input(self.at.shape, self.dtype, seed)).clone().requires_grad_()

    def run(self, prepared: Tensor) -> None:
        self.layer(prepared, self.batch, None)[0].backward(self.dy_tD)

    def saved_bytes(self, prepared: Tensor) -> int | None:
        return None

    @torch.no_grad()
    def relative_error(self, prepared: Tensor) -> float:
        exact_tD = exact_output(self.at.shape, self.weights, prepared)
        return relative_error(self.layer(prepared, self.batch, None)[0], exact_tD)


def dense_roofline(at: ExpertRank) -> DenseRoofline:
    """Dense matmuls of one rank; all ranks compute theirs at once, as they do in the layer."""
    return DenseRoofline({"shape": asdict(replace(at.shape, tokens=at.tokens)), "dtype": at.dtype})


def run_of(at: ExpertRank, dispatcher: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(dim=at.shape.dim, num_layers=1, moe=moe_config(at.shape)),
        parallel=ParallelConfig(ep=at.world, dispatcher=dispatcher),  # type: ignore[arg-type]
        precision=PrecisionConfig(at.dtype, at.dtype),  # type: ignore[arg-type]
        kernels=KernelsConfig("fused", "native"),
        data=DataConfig(seq_len=at.tokens, global_batch=at.world),
    )
