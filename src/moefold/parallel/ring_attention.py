"""Ring attention: queries stay, keys and values go around, and a token reads them as they pass.

T tokens on this rank, H query heads, G key/value heads, d query and key entries, v value entries.

At each step a rank attends to the keys at hand while those of the next step are under way. Parts merge by their
log-sum-exp; the whole output and its log-sum-exp are kept. Backward sends the keys around again, and what a rank adds
to the gradient of another's keys goes back to their owner while the next block is computed. Gradients travel wide: a
sum must not lose digits because it crossed a wire.

Heads go around one group after the other. What is under way at a time is then a fraction of a rank's keys and values,
and the memory of a rank does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.attention.mask_blocks import Sight, Stack, band
from moefold.attention.partial_attention import Parts, merge_, merge_sinks_, parts_for, sink_gradients
from moefold.comm.p2p import Shift, shift
from moefold.comm.process_groups import Group
from moefold.parallel.ring_plan import Step
from moefold.topology.shares import share_sizes, share_starts

# Heads are not cut further when a group's keys and values would be smaller than this: a message has a price of its own.
SMALLEST_MESSAGE = 1 << 16

# Forward of one microbatch and backward of another may be under way at once; their messages must not mix.
_FORWARD, _BACKWARD, _GRADIENTS = 1, 2, 3


class Ring(NamedTuple):
    """All that forward and backward need to know besides their tensors."""

    group: Group
    steps: tuple[Step, ...]
    scale: float
    window: int | None
    # Into how many groups the key/value heads are cut; the same on all ranks.
    num_slices: int
    parts: Parts


class _Heads(NamedTuple):
    """A group of key/value heads and the query heads that look at them."""

    q: slice
    kv: slice


def ring_attend(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    sinks_H: Tensor | None,
    *,
    group: Group,
    steps: tuple[Step, ...],
    scale: float,
    window: int | None,
    mean_tokens: int,
    parts: Parts | None = None,
) -> Tensor:
    """[T, H, v]: what the tokens of this rank read from those of all ranks of the circle.

    ``mean_tokens`` is the tokens per rank, on average: all ranks must cut heads alike.
    """
    num_bytes = mean_tokens * k_TGd.shape[1] * (k_TGd.shape[2] + v_TGv.shape[2]) * k_TGd.element_size()
    num_slices = min(max(1, k_TGd.shape[1]), max(1, num_bytes // SMALLEST_MESSAGE))
    ring = Ring(group, steps, scale, window, num_slices, parts or parts_for(q_THd.device))
    return _RingAttend.apply(q_THd, k_TGd, v_TGv, sinks_H, ring)


class _RingAttend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:
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
    lse = q.new_empty(q.shape[:2], dtype=_wide(q))
    for heads, step, k_now, v_now in _passing(k, v, ring, _slices(q, k, ring), _FORWARD):
        if step.places == 0:
            sum_out = torch.zeros_like(out[:, heads.q], dtype=_wide(q))
            sum_lse = torch.full_like(lse[:, heads.q], -torch.inf)
        for stack in step.stacks:
            q_B, k_B, v_B = _taken(stack, (q[:, heads.q],), (k_now, v_now))
            part = ring.parts.attend(q_B, k_B, v_B, **_sight(stack, ring, q.device))
            out_B, lse_B = stack.q.take(sum_out), stack.q.take(sum_lse)
            merge_(out_B, lse_B, *(x.transpose(1, 2) for x in part))
            stack.q.put(sum_out, out_B)
            stack.q.put(sum_lse, lse_B)
            del part, out_B, lse_B
        if step is ring.steps[-1]:
            if sinks is not None:
                merge_sinks_(sum_out, sum_lse, sinks[heads.q])
            out[:, heads.q], lse[:, heads.q] = sum_out, sum_lse
        del k_now, v_now  # before the next ones take their place
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = None if sinks is None else torch.empty_like(sinks)
    returning: _Returning | None = None
    for heads, step, k_now, v_now in _passing(k, v, ring, _slices(q, k, ring), _BACKWARD):
        if step.places == 0:
            q_sum, home = _Sum(dq, heads.q), (_Sum(dk, heads.kv), _Sum(dv, heads.kv))
            add_k, add_v = (own.total for own in home)
            if sinks is not None and dsinks is not None:
                at = heads.q
                dsinks[at] = sink_gradients(grad[:, at], out[:, at], lse[:, at], sinks[at])
        else:
            theirs = k.new_zeros(*k_now.shape[:2], k.shape[-1] + v.shape[-1], dtype=_wide(k))
            add_k, add_v = theirs.split((k.shape[-1], v.shape[-1]), dim=-1)
        for stack in step.stacks:
            mine = (x[:, heads.q] for x in (grad, q, out, lse))
            grad_B, q_B, out_B, lse_B, k_B, v_B = _taken(stack, mine, (k_now, v_now))
            how = _sight(stack, ring, q.device)
            dq_B, dk_B, dv_B = ring.parts.gradients(grad_B, q_B, k_B, v_B, out_B, lse_B, **how)
            stack.q.add(q_sum.total, dq_B.transpose(1, 2))
            stack.k.add(add_k, dk_B.transpose(1, 2))
            stack.k.add(add_v, dv_B.transpose(1, 2))
            del dq_B, dk_B, dv_B
        last = step is ring.steps[-1]
        if step.places > 0:
            if returning is not None:
                returning.add()
            back = shift(theirs, step.num_sent, ring.group, distance=-step.places, tag=_GRADIENTS)
            returning = _Returning(back, step, home, last)
            del theirs
        if last:
            q_sum.write()
        del k_now, v_now, add_k, add_v
    if returning is None:
        for own in home:
            own.write()
    else:
        returning.add()
    return dq, dk, dv, dsinks


class _Sum:
    """The gradient of a group of heads: added up wide, and written where it belongs when all has arrived."""

    def __init__(self, whole: Tensor, heads: slice) -> None:
        self.target = whole[:, heads]
        wide = _wide(whole)
        self.total = self.target.zero_() if whole.dtype == wide else torch.zeros_like(self.target, dtype=wide)

    def write(self) -> None:
        if self.total is not self.target:
            self.target.copy_(self.total)


class _Returning(NamedTuple):
    """Gradients of my keys and values on their way home from the member that has read them."""

    shift: Shift
    step: Step
    home: tuple[_Sum, _Sum]
    complete: bool

    def add(self) -> None:
        row = 0
        parts = self.shift.wait().split([own.target.shape[-1] for own in self.home], dim=-1)
        for start, stop in self.step.sent:
            for own, part in zip(self.home, parts):
                own.total[start:stop] += part[row : row + stop - start]
            row += stop - start
        if self.complete:
            for own in self.home:
                own.write()


def _passing(
    k: Tensor, v: Tensor, ring: Ring, slices: list[_Heads], tag: int
) -> Iterator[tuple[_Heads, Step, Tensor, Tensor]]:
    """Keys and values as they pass by: group of heads after group, each from my own on around the circle.

    While the caller works with some, the next are under way.
    """
    ahead = iter([(heads, step) for heads in slices for step in ring.steps[1:]])

    def start_next() -> Shift | None:
        heads, step = next(ahead, (None, None))
        if heads is None or step is None:
            return None
        rows = [torch.cat((k[a:b, heads.kv], v[a:b, heads.kv]), dim=-1) for a, b in step.sent]
        dim = heads.kv.stop - heads.kv.start, k.shape[-1] + v.shape[-1]
        packed = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else k.new_empty(0, *dim)
        return shift(packed, step.num_arriving, ring.group, distance=step.places, tag=tag)

    under_way = start_next()
    for heads in slices:
        yield heads, ring.steps[0], k[:, heads.kv], v[:, heads.kv]
        for step in ring.steps[1:]:
            assert under_way is not None, "one transfer is started for each step"
            arrived = under_way.wait()
            under_way = start_next()
            k_now, v_now = arrived.split((k.shape[-1], v.shape[-1]), dim=-1)
            yield heads, step, k_now, v_now
            del arrived, k_now, v_now


def _slices(q: Tensor, k: Tensor, ring: Ring) -> list[_Heads]:
    sizes = share_sizes(k.shape[1], ring.num_slices)
    per_kv = q.shape[1] // k.shape[1] if k.shape[1] else 0
    starts = share_starts(k.shape[1], ring.num_slices)
    return [
        _Heads(slice(start * per_kv, (start + size) * per_kv), slice(start, start + size))
        for start, size in zip(starts, sizes)
    ]


def _taken(stack: Stack, of_queries: Iterable[Tensor], of_keys: Iterable[Tensor]) -> list[Tensor]:
    """[B, heads, rows, ...] of each."""
    taken = [stack.q.take(x) for x in of_queries] + [stack.k.take(x) for x in of_keys]
    return [x.transpose(1, 2) for x in taken]


def _sight(stack: Stack, ring: Ring, device: torch.device) -> dict[str, Any]:
    mask = None
    if stack.sight is Sight.BAND:
        mask = band(stack.q.num, stack.k.num, stack.offset, ring.window, device)
    return {"scale": ring.scale, "causal": stack.sight is Sight.CAUSAL, "mask_nm": mask}


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
