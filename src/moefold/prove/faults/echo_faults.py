"""Faults of ECHO: weights and gradients of clones, and plans that do not agree.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import moefold.moe.dispatch.expert_clones
import moefold.moe.experts
from moefold.comm.process_groups import Group
from moefold.moe.dispatch.base import CloneWeights
from moefold.moe.dispatch.expert_clones import CloneExchange
from moefold.moe.echo_plan import ClonePlan
from moefold.moe.experts import ExpertWeights
from moefold.plan.clone_loads import EchoSizes
from moefold.prove.faults.parallel_faults import put, wrap

Backward = Callable[..., tuple[Tensor | None, ...]]


def _wrap_backward(changed: Callable[[Backward, object, tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]) -> None:
    function = moefold.moe.dispatch.expert_clones._CloneWeights
    backward = function.backward
    put(function, "backward", staticmethod(lambda ctx, *grads: changed(backward, ctx, grads)))


def clone_gradient_lost() -> None:
    _wrap_backward(lambda backward, ctx, grads: tuple(None for _ in backward(ctx, *grads)))


def clone_gradient_added_twice() -> None:
    _wrap_backward(
        lambda backward, ctx, grads: tuple(None if grad is None else 2 * grad for grad in backward(ctx, *grads))
    )


def gradient_of_one_clone_only() -> None:
    """An expert with several clones gets the last one's gradient."""

    def set_rows(parts: Sequence[Tensor], row_X: Tensor) -> None:
        for part, piece in zip(parts, row_X.split([part.numel() for part in parts]), strict=True):
            part.copy_(piece.view_as(part))

    put(moefold.moe.dispatch.expert_clones, "_add_row", set_rows)


def a_slot_holds_another_expert() -> None:
    """Homes send the weights of the expert after the hot one."""

    def make(exchange_of: Callable[..., CloneExchange | None]) -> Callable[..., CloneExchange | None]:
        def shifted(expert_of_slot: list[int], sizes: EchoSizes, ep: Group) -> CloneExchange | None:
            exchange = exchange_of(expert_of_slot, sizes, ep)
            if exchange is None:
                return None
            experts = tuple((expert + 1) % sizes.experts_each for expert in exchange.sent.experts)
            return replace(exchange, sent=exchange.sent._replace(experts=experts))

        return shifted

    wrap(moefold.moe.dispatch.expert_clones, "clone_exchange", make)


def the_plan_differs_between_ranks() -> None:
    """The last rank, whose rows are the first to leave home, has another expert in each slot."""

    def make(places_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def other_plan(expert_tK: Tensor, number_tK: Tensor, plan: ClonePlan, sizes: EchoSizes) -> Tensor:
            if dist.get_rank() == dist.get_world_size() - 1:
                plan = plan._replace(expert_N=plan.expert_N.roll(1), rows_N=plan.rows_N.roll(1))
            return places_of(expert_tK, number_tK, plan, sizes)

        return other_plan

    wrap(moefold.moe.dispatch.expert_clones, "places_of_rows", make)


def clones_without_biases() -> None:
    def make(weights_of: Callable[..., ExpertWeights]) -> Callable[..., ExpertWeights]:
        def without(clones: CloneWeights, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
            return weights_of(clones, weights, dtype)._replace(bias_scale=0.0)

        return without

    wrap(moefold.moe.experts, "clone_weights", make)


# With the case that each is tried on, and how it happens in real code.
FAULTS = (
    (clone_gradient_lost, "cloned", "weights of clones are sent without autograd"),
    (clone_gradient_added_twice, "cloned", "by the exchange's backward, and again by a reduction over clones"),
    (gradient_of_one_clone_only, "cloned", "gradients of clones are written to their home instead of added"),
    (a_slot_holds_another_expert, "cloned", "homes number experts by another rule than slots"),
    (the_plan_differs_between_ranks, "cloned", "one rank plans by counts of another microbatch"),
    (clones_without_biases, "cloned", "biases are not sent with the matrices"),
)
