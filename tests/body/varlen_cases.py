"""Random cases of varlen attention, and a ring without processes: every member's steps, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from moefold.attention.partial_attention import merge_sinks_, sink_gradients
from moefold.attention.sdpa import attend_reference
from moefold.attention.varlen import VarlenAttention
from moefold.batching.zigzag import held_spans
from moefold.parallel.ring_plan import ring_steps

SCALE = 0.4


@dataclass(frozen=True)
class VarlenCase:
    """``size`` context ranks, ``inner`` of which make a member of the ring."""

    seed: int
    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    dim: int
    value_dim: int
    window: int | None
    with_sinks: bool
    size: int = 1
    inner: int = 1

    def draw(self, dtype: torch.dtype) -> tuple[list[Tensor | None], Tensor]:
        """q, k, v, sinks or None; and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = sum(self.lengths)
        shapes = (
            (tokens, self.num_heads, self.dim),
            (tokens, self.num_kv_heads, self.dim),
            (tokens, self.num_kv_heads, self.value_dim),
            (self.num_heads,),
            (tokens, self.num_heads, self.value_dim),
        )
        q, k, v, sinks, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        return [q, k, v, sinks if self.with_sinks else None], grad


def varlen_case(seed: int, most_tokens: int = 12, multiple: int = 1) -> VarlenCase:
    """Packed documents, some of them empty; MLA's narrow values; GQA; windows; sinks; context parallelism."""
    draw = Random(seed)
    kv_heads = draw.choice([1, 2])
    dim = multiple * draw.choice([3, 8, 16, 24])
    size = draw.choice([1, 1, 2, 3, 4])
    return VarlenCase(
        seed,
        tuple(draw.choice([0, 1, draw.randint(1, most_tokens)]) for _ in range(draw.randint(1, 6))) + (2,),
        kv_heads * draw.choice([1, 2, 3]),
        kv_heads,
        dim,
        draw.choice([dim, multiple * draw.choice([4, 16])]),
        draw.choice([None, None, 1, 3, 7]),
        draw.random() < 0.5,
        size,
        draw.choice([1, 2]) if size == 4 else 1,
    )


def exact(case: VarlenCase, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    """Output and gradients of the naive definition, in float64."""
    leaves = [None if x is None else x.double().requires_grad_() for x in inputs]
    q, k, v, sinks = leaves
    out = attend_reference(q, k, v, case.lengths, SCALE, case.window, sinks)
    used = [leaf for leaf in leaves if leaf is not None]
    return [out.detach(), *torch.autograd.grad(out, used, grad.double())]


def computed(attention: VarlenAttention, case: VarlenCase, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    if case.size > 1:
        return around_the_ring(attention, case, inputs, grad)
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    q, k, v, sinks = leaves
    out = attention.attend(q, k, v, case.lengths, SCALE, case.window, sinks)
    used = [leaf for leaf in leaves if leaf is not None]
    return [out.detach(), *torch.autograd.grad(out, used, grad)]


def around_the_ring(
    attention: VarlenAttention, case: VarlenCase, inputs: list[Tensor | None], grad: Tensor
) -> list[Tensor]:
    """What ``parallel/ring_attention.py`` computes on its ranks, with rows copied instead of sent."""
    q, k, v, sinks = inputs
    out, lse = torch.zeros_like(grad), q.new_zeros(q.shape[:2], dtype=torch.float32)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    members = [rows_of_member(case, member) for member in range(case.size // case.inner)]
    for member, mine in enumerate(members):
        steps = ring_steps(case.lengths, case.size, case.inner, member, case.window)
        sum_out = torch.zeros(len(mine), *grad.shape[1:])
        sum_lse = torch.full((len(mine), q.shape[1]), -torch.inf)
        keys = [rows_received(case, members, member, step.distance) for step in steps]
        for step, theirs in zip(steps, keys, strict=True):
            attention.add_forward(sum_out, sum_lse, q[mine], k[theirs], v[theirs], step.mask, SCALE)
        if sinks is not None:
            merge_sinks_(sum_out, sum_lse, sinks)
        out[mine], lse[mine] = sum_out.to(out.dtype), sum_lse
        for step, theirs in zip(steps, keys, strict=True):
            parts = [x[rows] for x, rows in zip(sums, (mine, theirs, theirs), strict=True)]
            before = [x.clone() for x in parts]
            attention.add_gradients(
                (parts[0], parts[1], parts[2]),
                grad[mine],
                q[mine],
                k[theirs],
                v[theirs],
                out[mine],
                lse[mine],
                step.mask,
                SCALE,
            )
            for x, rows, part, old in zip(sums, (mine, theirs, theirs), parts, before, strict=True):
                x[rows] += part - old
    grads = [x.to(q.dtype) for x in sums]
    return [out, *grads] if sinks is None else [out, *grads, sink_gradients(grad, out, lse, sinks)]


def rows_of_member(case: VarlenCase, member: int) -> Tensor:
    ranks = range(member * case.inner, (member + 1) * case.inner)
    rows = [torch.arange(*span) for rank in ranks for span in held_spans(case.lengths, rank, case.size)]
    return torch.cat([torch.arange(0), *rows]).sort().values


def rows_received(case: VarlenCase, members: list[Tensor], member: int, distance: int) -> Tensor:
    """The rows of the whole that arrive at this member in the step of that distance."""
    if distance == 0:
        return members[member]
    sender = (member - distance) % len(members)
    sent = ring_steps(case.lengths, case.size, case.inner, sender, case.window)[distance].sent_spans
    return torch.cat([torch.arange(0), *(members[sender][start:stop] for start, stop in sent)])


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, each tensor's measured by its largest entry (or 1)."""
    assert len(found) == len(wanted)
    differences = [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)).item()
        for a, b in zip(found, wanted, strict=True)
        if b.numel()
    ]
    return max(differences, default=0.0)
