"""A dispatcher on a library that exchanges rows by handles: each token once per rank, as DeepEP does it.

``dispatch`` of such a library sends every row once to each rank that holds one of its experts and returns a handle.
The handle holds the routes, so the same rows can be sent again without counting, and ``combine`` adds up what comes
back along them. The gradient of a dispatch is a combine along the same handle, and the gradient of a combine is a
dispatch along it:

    forward     rows_RL, handle = dispatch(x_tL)          y_tL = combine(out_RL, handle)
    backward    dx_tL, dprob_tK = combine(drows_RL)       dout_RL = dispatch(dy_tL, handle)

So a handle is used at most four times and lives until the backward pass of its dispatch. It belongs to the buffer that
made it. Buffers are shared by all layers of a rank; nothing that a dispatch or combine returns lies in one.

The library sorts and sums inside its own kernels, so that all of it is the exchange; only assignments are renumbered
before and counted after.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.moe.dispatch.base import Dispatcher, ExpertInput, Routing
from moefold.moe.permute import count_assignments

# Of rows and of probs, as DeepEP takes them.
ROW_DTYPE, PROB_DTYPE = torch.bfloat16, torch.float32


class Arrived(NamedTuple):
    """Rows received, their experts numbered from this rank's first one (-1: of another rank), and their probs."""

    rows_RL: Tensor
    expert_RK: Tensor
    prob_RK: Tensor
    rows_per_expert: list[int]
    handle: object


class HandleExchange(Protocol):
    def dispatch(self, x_tL: Tensor, expert_tK: Tensor, prob_tK: Tensor) -> Arrived:
        """An expert's number is -1 where the assignment was dropped."""
        ...

    def dispatch_again(self, x_tL: Tensor, handle: object) -> Tensor:
        """[R, L]: other rows along the routes of an earlier dispatch."""
        ...

    def combine(self, rows_RL: Tensor, handle: object, prob_RK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[t, L]: each token's rows summed; and the same of values per assignment, if there are any."""
        ...


class _Sent(NamedTuple):
    x_tL: Tensor
    prob_tK: Tensor
    expert_tK: Tensor


class HandleDispatcher(Dispatcher):
    def __init__(self, num_local: int, exchange: HandleExchange) -> None:
        self.num_local, self.exchange = num_local, exchange

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: None) -> _Sent:
        require_dtypes(x_tL, routing.probs)
        expert_tK = routing.experts if routing.kept is None else routing.experts.where(routing.kept, -1)
        return _Sent(x_tL, routing.probs, expert_tK)

    def dispatch_exchange(self, sent: _Sent) -> Arrived:
        rows_RL, prob_RK, expert_RK, rows_per_expert, handle = _Dispatch.apply(*sent, self.exchange)
        return Arrived(rows_RL, expert_RK, prob_RK, rows_per_expert, handle)

    def dispatch_finish(self, received: Arrived) -> ExpertInput:
        rows_RL, expert_RK, prob_RK, rows_per_expert, handle = received
        assignments = Routing(expert_RK.long(), prob_RK, expert_RK >= 0)
        rows_per_expert_e = count_assignments(assignments, self.num_local)
        return ExpertInput(rows_RL, assignments, rows_per_expert_e, rows_per_expert, capacity=None, ticket=handle)

    def combine_exchange(self, rows_RL: Tensor, ticket: object) -> Tensor:
        combined: Tensor = _Combine.apply(rows_RL, ticket, self.exchange)
        return combined


def require_dtypes(x_tL: Tensor, prob_tK: Tensor) -> None:
    if x_tL.dtype != ROW_DTYPE or prob_tK.dtype != PROB_DTYPE:
        raise BackendError(
            f"parallel.dispatcher: DeepEP sends rows in bfloat16 with probs in float32, not {x_tL.dtype} with "
            f"{prob_tK.dtype}; use precision.compute bfloat16, or dispatcher all_to_all"
        )


class _Kept(Protocol):
    """What a backward pass needs."""

    exchange: HandleExchange
    handle: object

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, x_tL: Tensor, prob_tK: Tensor, expert_tK: Tensor, exchange: HandleExchange
    ) -> tuple[Tensor, Tensor, Tensor, list[int], object]:
        arrived = exchange.dispatch(x_tL.contiguous(), expert_tK.contiguous(), prob_tK.contiguous())
        ctx.exchange, ctx.handle = exchange, arrived.handle
        ctx.mark_non_differentiable(arrived.expert_RK)
        return arrived.rows_RL, arrived.prob_RK, arrived.expert_RK, arrived.rows_per_expert, arrived.handle

    @staticmethod
    def backward(ctx: _Kept, grad_RL: Tensor, grad_RK: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        """A prob's gradient is nonzero only on the rank that holds its expert, so the sum has one term."""
        grad_tL, grad_tK = ctx.exchange.combine(grad_RL.contiguous(), ctx.handle, grad_RK.contiguous())
        return grad_tL, grad_tK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, expert_out_RL: Tensor, handle: object, exchange: HandleExchange) -> Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        y_tL, _ = exchange.combine(expert_out_RL.contiguous(), handle, None)
        return y_tL

    @staticmethod
    def backward(ctx: _Kept, grad_tL: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.dispatch_again(grad_tL.contiguous(), ctx.handle), None, None
