"""An exchange of rows beside computation of the same microbatch, in one autograd graph.

``start`` submits the exchange to the communication stream and returns; ``wait`` returns what was received. What is
computed between the two does not wait for it. The backward does the same without a schedule of its own: autograd runs
what was recorded last first, so it comes to

    wait's backward     submits the exchange's backward
    what ran between    computes its gradients meanwhile
    start's backward    waits, and returns the gradients of what was sent

The exchange is recorded in a graph of its own, as phases are (``nn/phase_autograd.py``): its backward runs on the
communication stream, and the sums of gradients have the order of the plain forward, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moefold.comm.p2p import CommStream
from moefold.moe.dispatch.base import Carried
from moefold.nn.phase import Phase, Stream
from moefold.nn.phase_autograd import Gradients, Recorded, backward_phase, iter_tensors, map_tensors, record


class PendingExchange:
    """Submitted, and not yet waited for; ``token`` joins its start and its end in the caller's graph."""

    def __init__(self, stream: CommStream, handle: object) -> None:
        self.stream, self.handle = stream, handle
        self.token: Tensor | None = None
        self.received: list[Tensor] = []
        self.recorded: Recorded | None = None
        # Of the backward, while it is under way.
        self.backward_handle: object = None

    def wait(self) -> Carried:
        result, self.recorded = self.stream.wait(self.handle, _nothing)
        self.handle = None
        if self.token is None:
            return result
        self.received = [tensor.detach() for tensor in iter_tensors(result) if tensor.requires_grad]
        joined = iter(_End.apply(self, self.token))
        self.received, self.token = [], None
        return map_tensors(result, lambda tensor: next(joined) if tensor.requires_grad else tensor)


class ExchangesBeside:
    """Starts exchanges on ``stream``."""

    def __init__(self, stream: CommStream) -> None:
        self.stream = stream

    def start(self, exchange: Callable[[Carried], Carried], sent: Carried) -> PendingExchange:
        # Modes of autograd belong to a thread.
        with_grad = torch.is_grad_enabled()
        pending = PendingExchange(self.stream, self.stream.submit(partial(_record, exchange, sent, with_grad)))
        entering = [tensor for tensor in iter_tensors(sent) if tensor.requires_grad]
        if with_grad and entering:
            pending.token = _Start.apply(pending, *entering)
        return pending


def _record(exchange: Callable[[Carried], Carried], sent: Carried, with_grad: bool) -> tuple[Carried, Recorded]:
    with torch.set_grad_enabled(with_grad):
        return record(Phase("exchange", Stream.COMM, exchange), sent)


def _nothing() -> bool:
    """To do while waiting."""
    return False


class _Kept(Protocol):
    """What a backward needs."""

    pending: PendingExchange
    token: Tensor

    def set_materialize_grads(self, value: bool) -> None: ...


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, pending: PendingExchange, *entering: Tensor) -> Tensor:
        ctx.pending = pending
        return entering[0].new_empty(0)

    @staticmethod
    def backward(ctx: _Kept, _: Tensor) -> tuple[Tensor | None, ...]:
        pending = ctx.pending
        gradients: Gradients = pending.stream.wait(pending.backward_handle, _nothing)
        pending.backward_handle = None
        return None, *gradients


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, pending: PendingExchange, token: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        # Zeros of what nobody reads would be sent all the same.
        ctx.set_materialize_grads(False)
        ctx.token = token
        return tuple(pending.received)

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor | None) -> tuple[None, Tensor]:
        pending = ctx.pending
        assert pending.recorded is not None
        pending.backward_handle = pending.stream.submit(partial(backward_phase, pending.recorded, gradients))
        return None, torch.empty_like(ctx.token)
