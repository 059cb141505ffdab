"""Cases that every adapter of a dispatcher is held to: the local dispatcher's values and gradients, to the bit.

Values are small whole numbers and probs are quarters, so that bfloat16 holds every product and sum exactly and the
order of a sum does not matter. What is compared is then the routing and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from tests.engines.rank_threads import on_rank_threads
from tests.support import multiplied
from torch import Tensor

from moefold.comm.process_groups import Group
from moefold.moe.dispatch.base import Dispatcher, LocalDispatcher, Routing

EXPERTS, CHOICES, DIM = 8, 3, 8
# One rank has nothing to send, and takes part all the same.
TOKENS_OF_RANK = (5, 1, 0, 7)
WORLD = len(TOKENS_OF_RANK)

MakeDispatcher = Callable[[Group], Dispatcher]


class Microbatch(NamedTuple):
    """Of all ranks together."""

    x: Tensor
    experts: Tensor
    probs: Tensor
    kept: Tensor | None
    # The gradient of the output.
    grad: Tensor

    def of(self, rank: int) -> Microbatch:
        start = sum(TOKENS_OF_RANK[:rank])
        mine = slice(start, start + TOKENS_OF_RANK[rank])
        kept = None if self.kept is None else self.kept[mine]
        return Microbatch(self.x[mine], self.experts[mine], self.probs[mine], kept, self.grad[mine])


def microbatch(seed: int, dropping: bool, dtype: torch.dtype = torch.bfloat16) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    total = sum(TOKENS_OF_RANK)
    # The last expert is never chosen.
    experts = torch.rand(total, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOICES]
    return Microbatch(
        torch.randint(-2, 3, (total, DIM), generator=generator).to(dtype),
        experts,
        torch.randint(1, 5, (total, CHOICES), generator=generator) / 4,
        torch.rand(total, CHOICES, generator=generator) < 0.6 if dropping else None,
        torch.randint(-1, 2, (total, DIM), generator=generator).to(dtype),
    )


class Outcome(NamedTuple):
    output: Tensor
    x_grad: Tensor
    prob_grad: Tensor


def outcome(dispatcher: Dispatcher, batch: Microbatch, first_expert: int) -> Outcome:
    (found,) = outcomes(dispatcher, [batch], first_expert)
    return found


def outcomes(dispatcher: Dispatcher, batches: list[Microbatch], first_expert: int) -> list[Outcome]:
    """All dispatched before any is combined, and their backward passes in the opposite order.

    Expert e multiplies its rows by e + 1.
    """
    leaves = [(each.x.clone().requires_grad_(), each.probs.clone().requires_grad_()) for each in batches]
    arrived = [
        dispatcher.dispatch(x, Routing(each.experts, probs, each.kept))
        for (x, probs), each in zip(leaves, batches, strict=True)
    ]
    outputs = []
    for each in arrived:
        factor_e = torch.arange(len(each.rows_per_expert_e)) + first_expert + 1
        assert each.rows_per_expert_e.tolist() == each.rows_per_expert
        scaled = multiplied(each, factor_e).to(each.rows_RL.dtype)
        outputs.append(dispatcher.combine(scaled, each.ticket))
    for output, each in reversed(list(zip(outputs, batches, strict=True))):
        output.backward(each.grad)
    found = []
    for output, (x, probs) in zip(outputs, leaves, strict=True):
        assert x.grad is not None and probs.grad is not None
        found.append(Outcome(output.detach(), x.grad, probs.grad))
    return found


def expected(batch: Microbatch) -> Outcome:
    """In float32, on one rank."""
    wide = batch._replace(x=batch.x.float(), grad=batch.grad.float())
    return outcome(LocalDispatcher(EXPERTS), wide, 0)


def assert_equals_local(make: MakeDispatcher, dropping: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    """Three microbatches in flight at once."""
    batches = [microbatch(seed, dropping, dtype) for seed in (3, 4, 5)]
    wanted = [expected(each) for each in batches]

    def work(group: Group) -> None:
        mine = [each.of(group.index) for each in batches]
        got = outcomes(make(group), mine, group.index * (EXPERTS // WORLD))
        start = sum(TOKENS_OF_RANK[: group.index])
        part = slice(start, start + TOKENS_OF_RANK[group.index])
        for ours, whole in zip(got, wanted, strict=True):
            for name, value, reference in zip(Outcome._fields, ours, whole, strict=True):
                assert torch.equal(value.float(), reference[part]), f"{name} on rank {group.index}"

    on_rank_threads(WORLD, work)
