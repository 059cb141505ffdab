"""Who takes part in `bench dispatch`, on one of the ranks that hold the experts together.

t tokens of this rank, K choices per token, D width, e experts of this rank, E experts in all.

The bare engine of a dispatcher is torch's all-to-all of the rows that were chosen, one for each of a token's choices,
there and back, with counts that are known and buffers that are ready. A dispatcher has to find out the counts and to
put rows in order itself. The bare engine of the whole layer is the dense products of as many rows as a rank has
choices.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.bench.layer_inputs import (
    DTYPES,
    choices,
    draw_gradient,
    draw_input,
    draw_weights,
    exact_answer,
    relative_error,
)
from moefold.bench.layer_shapes import LayerShape
from moefold.bench.our_layer import filled_layer, moe_config
from moefold.bench.roofline import DenseEngine
from moefold.config.data import DataConfig
from moefold.config.kernels import KernelsConfig
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Routing
from moefold.moe.moe_kernels import kernels_for
from moefold.nn.batch import whole_batch
from moefold.parallel.expert_parallel import dispatcher_for
from moefold.parallel.parallelize import groups_of, seams_of

_PATIENCE = timedelta(seconds=300)


@dataclass(frozen=True)
class Place:
    """One rank of those that share the experts of a shape; the shape's tokens are those of all ranks."""

    shape: LayerShape
    dtype: str
    rank: int
    world: int

    @property
    def tokens(self) -> int:
        return self.shape.tokens // self.world

    def own(self, x_TD: Tensor) -> Tensor:
        return x_TD[self.rank * self.tokens :][: self.tokens]


class Chosen(NamedTuple):
    x_tD: Tensor
    routing: Routing


class _Tokens:
    """This rank's tokens and what they choose."""

    def __init__(self, place: Place) -> None:
        self.place, self.dtype = place, DTYPES[place.dtype]
        # Only the router's; drawing the experts' too would take each rank as much memory as all of them.
        router_only = replace(place.shape, hidden=1, shared=0)
        self.weights = draw_weights(router_only, self.dtype)

    def draw(self, seed: int) -> Chosen:
        x_tD = self.place.own(draw_input(self.place.shape, self.dtype, seed)).clone()
        weight_tK, expert_tK = choices(self.place.shape, self.weights, x_tD)
        return Chosen(x_tD, Routing(expert_tK, weight_tK))


class Buffers(NamedTuple):
    leaving: Tensor
    arriving: Tensor
    home: Tensor
    sent: list[int]
    received: list[int]


class BareExchange:
    """Rows of known numbers to other ranks and back."""

    def __init__(self, place: Place) -> None:
        self.tokens, self.place = _Tokens(place), place

    def prepare(self, seed: int) -> Buffers:
        chosen, place = self.tokens.draw(seed), self.place
        to_rank_N = chosen.routing.expert_tK.flatten() // (place.shape.experts // place.world)
        sent = torch.bincount(to_rank_N, minlength=place.world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        rows = chosen.x_tD.repeat_interleave(place.shape.top_k, dim=0)
        arriving = rows.new_ones(int(received.sum()), place.shape.dim)
        return Buffers(rows, arriving, torch.ones_like(rows), sent.tolist(), received.tolist())

    def run(self, prepared: Buffers) -> None:
        there = prepared
        dist.all_to_all_single(there.arriving, there.leaving, there.received, there.sent)
        dist.all_to_all_single(there.home, there.arriving, there.sent, there.received)

    def saved_bytes(self, prepared: Buffers) -> int | None:
        return None


class Exchange:
    """One of moefold's dispatchers: dispatch, and combine of what arrived."""

    def __init__(self, place: Place, dispatcher: str) -> None:
        self.tokens = _Tokens(place)
        run = run_of(place, dispatcher)
        self.dispatcher = dispatcher_for(run, groups_of(run, place.world, place.rank, _PATIENCE))

    def prepare(self, seed: int) -> Chosen:
        return self.tokens.draw(seed)

    def run(self, prepared: Chosen) -> None:
        arrived = self.dispatcher.dispatch(prepared.x_tD, prepared.routing)
        self.dispatcher.combine(arrived.rows_SD, arrived.ticket)

    def saved_bytes(self, prepared: Chosen) -> int | None:
        return None


class ExpertParallelLayer:
    """moefold's whole layer, forward and backward, with this rank's part of the experts."""

    def __init__(self, place: Place, dispatcher: str) -> None:
        self.place, self.dtype = place, DTYPES[place.dtype]
        self.weights = draw_weights(place.shape, self.dtype)
        run = run_of(place, dispatcher)
        groups = groups_of(run, place.world, place.rank, _PATIENCE)
        seams = seams_of(run, groups, None, SYNC_SPLIT_SIZES, kernels_for(run, "cpu"))
        self.layer = filled_layer(place.shape, self.weights, seams)
        self._keep_own_experts()
        tokens = torch.zeros(place.tokens, dtype=torch.int64)
        self.batch = whole_batch(
            tokens, tokens, (place.tokens,), step_labels=place.tokens, step_tokens=place.tokens, step_sequences=1
        )
        self.dy_tD = place.own(draw_gradient(place.shape, self.dtype)).clone()

    def _keep_own_experts(self) -> None:
        experts, number = self.layer.experts, self.place.shape.experts // self.place.world
        first = self.place.rank * number
        for name in ("gate_up", "down"):
            setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[first : first + number].clone()))

    def prepare(self, seed: int) -> Tensor:
        for parameter in self.layer.parameters():
            parameter.grad = None
        return self.place.own(draw_input(self.place.shape, self.dtype, seed)).clone().requires_grad_()

    def run(self, prepared: Tensor) -> None:
        self.layer(prepared, self.batch, None)[0].backward(self.dy_tD)

    def saved_bytes(self, prepared: Tensor) -> int | None:
        return None

    @torch.no_grad()
    def relative_error(self, prepared: Tensor) -> float:
        exact_tD = exact_answer(self.place.shape, self.weights, prepared)
        return relative_error(self.layer(prepared, self.batch, None)[0], exact_tD)


def dense_of_a_rank(place: Place) -> DenseEngine:
    """All ranks' dense products run at once, as their layers do."""
    return DenseEngine({"shape": asdict(replace(place.shape, tokens=place.tokens)), "dtype": place.dtype})


def run_of(place: Place, dispatcher: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(dim=place.shape.dim, num_layers=1, moe=moe_config(place.shape)),
        parallel=ParallelConfig(ep=place.world, dispatcher=dispatcher),  # type: ignore[arg-type]
        precision=PrecisionConfig(place.dtype, place.dtype),  # type: ignore[arg-type]
        kernels=KernelsConfig("fused", "native"),
        data=DataConfig(seq_len=place.tokens, global_batch=place.world),
    )
