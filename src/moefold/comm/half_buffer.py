"""Sums of float32 gradients over ranks, sent as bfloat16 and added in float32, in the memory of the gradients alone.

A reduce-scatter in bfloat16 halves the bytes, but adds in bfloat16 at every hop. Here every rank sends each other one
its part by an all-to-all, and adds what it receives in float32, in the order of the ranks: each part is rounded once,
no sum is (MegaScale-MoE, section 5).

What is sent and what is received is half as large as the float32 buffer, so both fit in it:

    bytes of n float32       0 ............ 2n ............ 4n
    cast in place            sent, bfloat16 |
    after the all-to-all     sent           | received, bfloat16
    after the sums           this rank's sums, float32, from 0 on

The cast goes from the front: elements a to b move from bytes 4a..4b to bytes 2a..2b, which do not overlap where
b <= 2a. So pieces double in size, and a buffer of n elements takes log2(n) copies and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from moefold.comm.collectives import start_all_reduce
from moefold.comm.message_codecs import sum_parts
from moefold.comm.process_groups import Group

# Elements that are cast through a copy, before there is room to cast in place.
_FIRST = 1024


def cast_to_first_half(flat: Tensor) -> Tensor:
    """Round float32 to bfloat16 inside of the same memory; returns its first half, as bfloat16."""
    narrow, size = flat.view(torch.bfloat16), flat.numel()
    done = min(_FIRST, size)
    narrow[:done] = flat[:done].clone()
    while done < size:
        stop = min(2 * done, size)
        narrow[done:stop] = flat[done:stop]
        done = stop
    return narrow[:size]


@dataclass(frozen=True)
class HalfBufferSum:
    """A sum under way; ``result`` waits for it."""

    flat: Tensor
    received: Tensor
    # What the last rank owns beyond its even part, summed by all ranks.
    rest: Tensor
    group: Group
    works: list[Work]

    def result(self) -> Tensor:
        """The sums that this rank owns, at the start of the buffer."""
        for work in self.works:
            work.wait()
        each = self.received.shape[1]
        total = self.flat[:each]
        sum_parts(self.received, total)
        if self.group.index + 1 < self.group.size:
            return total
        owned = self.flat[: each + self.rest.numel()]
        owned[each:] = self.rest
        return owned


def start_half_buffer_sum(flat: Tensor, each: int, group: Group) -> HalfBufferSum:
    """Of n ranks each owns ``each`` elements, and the last one what is left as well, which is summed in float32."""
    assert flat.dtype == torch.float32 and group.size > 1, (flat.dtype, group.size)
    even = each * group.size
    rest = flat[even:].clone()
    sent = cast_to_first_half(flat)[:even]
    received = flat.view(torch.bfloat16)[flat.numel() :][:even]
    works: list[Work] = []
    if each:
        start = partial(dist.all_to_all_single, received, sent, group=group.handle, async_op=True)
        works += group.started("all_to_all", sent, start)
    works += start_all_reduce(rest, group)
    return HalfBufferSum(flat, received.view(group.size, each), rest, group, works)
