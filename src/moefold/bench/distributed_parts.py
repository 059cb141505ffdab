"""Parts of a model that are distributed over ranks, each beside the same part on one rank.

The difference of the two times is the cost of distributing: collectives, copies, permuting what was received, merging.
Forward and backward together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from moefold.attention.sdpa import attend
from moefold.bench.calibration_shapes import CONTEXT, ROUTED
from moefold.bench.clock import Trial
from moefold.comm.process_groups import Group, Groups
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import Dispatcher, ExpertInput, Routing
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.permute import gather_probs, gather_rows, group_by_expert, unpermute_rows
from moefold.nn.batch import context_shard, whole_batch
from moefold.parallel.context_parallel import ContextParallelCore, ring_groups
from moefold.parallel.param_shards import DATA_GROUPS

# Rows of a parameter.
_ROWS = 64


def contexts(groups: Mapping[int, Group], size: int, number: int) -> dict[str, Trial]:
    """Attention over ``number`` documents per rank that ``size`` ranks shard, and over as many on one rank."""
    heads, kv_heads, dim, length = CONTEXT.heads, CONTEXT.kv_heads, CONTEXT.dim, CONTEXT.length
    tokens = torch.zeros(length * number * size, dtype=torch.int64)
    whole = whole_batch(
        tokens, tokens, (length,) * number * size, context_size=size, step_labels=1, step_tokens=1, step_sequences=1
    )
    batch, core = context_shard(whole, groups[size].index), ContextParallelCore(ring_groups(groups))
    q = torch.randn(length * number, heads, dim, requires_grad=True)
    k, v = (torch.randn(length * number, kv_heads, dim, requires_grad=True) for _ in range(2))
    own = (length,) * number

    def over_ranks() -> None:
        core(q, k, v, batch, scale=dim**-0.5, window=None, sinks_H=None).sum().backward()

    return {"context": over_ranks, "one context": lambda: attend(q, k, v, own, dim**-0.5).sum().backward()}


def experts(ep: Group, etp: Group, tokens: int) -> dict[str, Trial]:
    """Dispatch and combine with experts on other ranks, and with all experts on this rank."""
    x = torch.randn(tokens, ROUTED.dim, requires_grad=True)
    # Every expert gets the same number of assignments, from tokens all over the batch.
    chosen = torch.randperm(tokens * ROUTED.top_k).view(tokens, ROUTED.top_k) % ROUTED.experts
    weight = torch.full((tokens, ROUTED.top_k), 0.5, requires_grad=True)

    def dispatch_and_combine(dispatcher: Dispatcher) -> Trial:
        def trial() -> None:
            arrived = dispatcher.dispatch(x, Routing(chosen, weight))
            dispatcher.combine(_permute_and_scale(arrived), arrived.ticket).sum().backward()

        return trial

    return {
        "exchange": dispatch_and_combine(AllToAllDispatcher(ROUTED.experts, ep, etp)),
        "one exchange": dispatch_and_combine(LocalDispatcher(ROUTED.experts)),
    }


def _permute_and_scale(arrived: ExpertInput) -> Tensor:
    """What experts do with rows besides their matmuls."""
    groups = group_by_expert(arrived.assignments, len(arrived.rows_per_expert), sum(arrived.rows_per_expert))
    prob_R = gather_probs(arrived.assignments.probs, groups.assignment_N)
    rows_RD = gather_rows(arrived.rows_RL, groups.token_N) * prob_R[:, None]
    return unpermute_rows(rows_RD, groups.token_N, arrived.rows_RL.shape[0])


class _FixedGradients(torch.autograd.Function):
    """An identity whose backward gives the weights these gradients at no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.gradients


class _Matrices(nn.Module):
    """Two parameters, as a layer has."""

    def __init__(self, total: int) -> None:
        super().__init__()
        columns = max(1, total // 4 // _ROWS // 2)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(_ROWS, columns)) for _ in range(2))
        self.gradients = [torch.ones(_ROWS, columns) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _FixedGradients.apply(x, self.gradients, *self.weights)
        return out


def sharded(groups: Groups, total: int) -> dict[str, Trial]:
    """Unshard of ``total`` bytes of parameters; forward with backward: unshard twice and reduce_scatter gradients."""
    mesh = groups.device_mesh("cpu", *DATA_GROUPS["attention"])
    assert mesh is not None
    module = _Matrices(total)
    # FSDP keeps its root module unsharded until backward; a layer is never the root.
    outer = nn.Sequential(module)
    for each in (module, outer):
        fully_shard(each, mesh=mesh)
        each.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        each.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    x = torch.ones(4, requires_grad=True)

    def gather() -> None:
        with torch.no_grad():
            outer(x)

    return {"parameters": gather, "passes": lambda: outer(x).sum().backward()}
