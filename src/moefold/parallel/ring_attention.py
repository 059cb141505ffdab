"""Ring attention: queries stay, keys and values go around the ring.

At each step a rank attends to the keys it has received while those of the next step are in transfer. Partial outputs
are merged by their log-sum-exp; the merged output and its log-sum-exp are saved. Backward sends the keys around again,
and the gradient for another rank's keys is sent back to it while the next block is computed. Gradients are sent in
float32, so that their sum loses no digits.

Key/value heads go around in groups, one group after the other. A transfer then holds a fraction of a rank's keys and
values, and memory per rank does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.attention.partial_attention import compact, merge_sinks_, sink_gradients
from moefold.attention.varlen import VarlenAttention
from moefold.comm.p2p import Shift, shift
from moefold.comm.process_groups import Group
from moefold.parallel.ring_plan import RingStep
from moefold.topology.folded_layout import shard_sizes, shard_starts

# A head group's keys and values have at least this many bytes: small messages are dominated by latency.
MIN_MESSAGE_BYTES = 1 << 16

# Tags: the forward of one microbatch and the backward of another may run concurrently; messages must not mix.
_FORWARD, _BACKWARD, _GRADIENTS = 1, 2, 3


class Ring(NamedTuple):
    """What forward and backward need besides tensors."""

    group: Group
    steps: tuple[RingStep, ...]
    scale: float
    # Into how many groups the key/value heads are split; the same on all ranks.
    num_head_groups: int
    attention: VarlenAttention


class _HeadGroup(NamedTuple):
    """A group of key/value heads and the query heads that attend to them."""

    q: slice
    kv: slice


def ring_attend(
    q_SHC: Tensor,
    k_SJC: Tensor,
    v_SJU: Tensor,
    sinks_H: Tensor | None,
    *,
    group: Group,
    steps: tuple[RingStep, ...],
    scale: float,
    mean_tokens: int,
    attention: VarlenAttention,
) -> Tensor:
    """[S, H, U]: attention of this rank's queries over the keys of all ranks of the ring.

    ``mean_tokens`` is the mean number of tokens per rank: all ranks must split heads alike.
    """
    num_bytes = mean_tokens * k_SJC.shape[1] * (k_SJC.shape[2] + v_SJU.shape[2]) * k_SJC.element_size()
    num_head_groups = min(max(1, k_SJC.shape[1]), max(1, num_bytes // MIN_MESSAGE_BYTES))
    ring = Ring(group, steps, scale, num_head_groups, attention)
    return _RingAttend.apply(q_SHC, k_SJC, v_SJU, sinks_H, ring)


class _RingAttend(torch.autograd.Function):
    """Saves this rank's q, k, v and output, and one number per query and head; keys of other ranks come again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
        q, k, v = (compact(x) for x in (q, k, v))
        out, lse = _forward(q, k, v, sinks, ring)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        return *_backward(grad.contiguous(), q, k, v, sinks, out, lse, ctx.ring), None


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=_acc_dtype(q))
    for heads, step, k_now, v_now in _kv_around_ring(k, v, ring, _head_groups(q, k, ring), _FORWARD):
        if step.distance == 0:
            sum_out = torch.zeros_like(out[:, heads.q], dtype=_acc_dtype(q))
            sum_lse = torch.full_like(lse[:, heads.q], -torch.inf)
        ring.attention.add_forward(sum_out, sum_lse, q[:, heads.q], k_now, v_now, step.mask, ring.scale)
        if step is ring.steps[-1]:
            if sinks is not None:
                merge_sinks_(sum_out, sum_lse, sinks[heads.q])
            out[:, heads.q], lse[:, heads.q] = sum_out, sum_lse
        del k_now, v_now  # freed before the next ones are received
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = None if sinks is None else torch.empty_like(sinks)
    grad_return: _GradReturn | None = None
    for heads, step, k_now, v_now in _kv_around_ring(k, v, ring, _head_groups(q, k, ring), _BACKWARD):
        if step.distance == 0:
            q_sum = _GradAccumulator(dq, heads.q)
            kv_grads = (_GradAccumulator(dk, heads.kv), _GradAccumulator(dv, heads.kv))
            add_k, add_v = (accumulator.total for accumulator in kv_grads)
            if sinks is not None and dsinks is not None:
                at = heads.q
                dsinks[at] = sink_gradients(grad[:, at], out[:, at], lse[:, at], sinks[at])
        else:
            their_grads = k.new_zeros(*k_now.shape[:2], k.shape[-1] + v.shape[-1], dtype=_acc_dtype(k))
            add_k, add_v = their_grads.split((k.shape[-1], v.shape[-1]), dim=-1)
        grad_now, q_now, out_now, lse_now = (x[:, heads.q] for x in (grad, q, out, lse))
        ring.attention.add_gradients(
            (q_sum.total, add_k, add_v), grad_now, q_now, k_now, v_now, out_now, lse_now, step.mask, ring.scale
        )
        last = step is ring.steps[-1]
        if step.distance > 0:
            if grad_return is not None:
                grad_return.add()
            back = shift(their_grads, step.num_sent, ring.group, distance=-step.distance, tag=_GRADIENTS)
            grad_return = _GradReturn(back, step, kv_grads, last)
            del their_grads
        if last:
            q_sum.write()
        del k_now, v_now, add_k, add_v
    if grad_return is None:
        for accumulator in kv_grads:
            accumulator.write()
    else:
        grad_return.add()
    return dq, dk, dv, dsinks


class _GradAccumulator:
    """The gradient of a head group, accumulated in float32 (or float64) and written to its slice when complete."""

    def __init__(self, whole: Tensor, heads: slice) -> None:
        self.target = whole[:, heads]
        wide = _acc_dtype(whole)
        self.total = self.target.zero_() if whole.dtype == wide else torch.zeros_like(self.target, dtype=wide)

    def write(self) -> None:
        if self.total is not self.target:
            self.target.copy_(self.total)


class _GradReturn(NamedTuple):
    """The transfer of this rank's key and value gradients from the member that has read the keys."""

    shift: Shift
    step: RingStep
    kv_grads: tuple[_GradAccumulator, _GradAccumulator]
    complete: bool

    def add(self) -> None:
        row = 0
        parts = self.shift.wait().split([accumulator.target.shape[-1] for accumulator in self.kv_grads], dim=-1)
        for start, stop in self.step.sent_spans:
            for accumulator, part in zip(self.kv_grads, parts):
                accumulator.total[start:stop] += part[row : row + stop - start]
            row += stop - start
        if self.complete:
            for accumulator in self.kv_grads:
                accumulator.write()


def _kv_around_ring(
    k: Tensor, v: Tensor, ring: Ring, head_groups: list[_HeadGroup], tag: int
) -> Iterator[tuple[_HeadGroup, RingStep, Tensor, Tensor]]:
    """For each head group and each step of the ring, the keys and values; the rank's own first.

    The next transfer runs while the caller computes.
    """
    transfers = iter([(heads, step) for heads in head_groups for step in ring.steps[1:]])

    def start_next() -> Shift | None:
        heads, step = next(transfers, (None, None))
        if heads is None or step is None:
            return None
        rows = [torch.cat((k[a:b, heads.kv], v[a:b, heads.kv]), dim=-1) for a, b in step.sent_spans]
        dim = heads.kv.stop - heads.kv.start, k.shape[-1] + v.shape[-1]
        packed = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else k.new_empty(0, *dim)
        return shift(packed, step.num_received, ring.group, distance=step.distance, tag=tag)

    pending = start_next()
    for heads in head_groups:
        yield heads, ring.steps[0], k[:, heads.kv], v[:, heads.kv]
        for step in ring.steps[1:]:
            assert pending is not None, "one transfer is started for each step"
            received = pending.wait()
            pending = start_next()
            k_now, v_now = received.split((k.shape[-1], v.shape[-1]), dim=-1)
            yield heads, step, k_now, v_now
            del received, k_now, v_now


def _head_groups(q: Tensor, k: Tensor, ring: Ring) -> list[_HeadGroup]:
    sizes = shard_sizes(k.shape[1], ring.num_head_groups)
    per_kv = q.shape[1] // k.shape[1] if k.shape[1] else 0
    starts = shard_starts(k.shape[1], ring.num_head_groups)
    return [
        _HeadGroup(slice(start * per_kv, (start + size) * per_kv), slice(start, start + size))
        for start, size in zip(starts, sizes)
    ]


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
