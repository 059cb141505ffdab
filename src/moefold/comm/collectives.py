"""Collectives on tensors of rows: rank i holds ``sizes[i]`` consecutive rows of the full tensor.

An all-gather has two backwards. If the ranks do *different* work with the gathered rows, each holds a partial gradient
and backward is a reduce-scatter (``all_gather_rows``). If all ranks repeat the *same* work, each holds the full
gradient, a sum would count it once per rank, and backward is a slice (``all_gather_replicated``). An all-reduce has the
same two cases: ``all_reduce_partial`` feeds different work, ``all_reduce_replicated`` feeds replicated work.

Sums over ranks of 16-bit tensors are computed and sent in float32, so that no digits are lost, unless ``dtype`` names
another one. With a ``PartCodec`` in its place a reduce-scatter becomes an all-to-all: every part of a sum travels as
narrow numbers to the rank that owns the sum, which adds them in float32, in the order of the ranks.

``all_to_all_rows`` moves uneven numbers of rows, ``all_to_all_counts`` the counts themselves.

Rows that are moved and not summed may travel as bytes, by a ``RowCodec``: codes and scales of a narrow format. The way
there and that of the gradient have codecs of their own; without one, rows travel as they are.

``start_...`` sum or gather a flat buffer in place; the caller waits for the handles. Of n ranks each owns ``each``
consecutive elements, and the last one what is left of the buffer as well. The even part goes by one reduce-scatter or
all-gather, without copies: NCCL and gloo allow this rank's range of the buffer to be the other end of the collective.
The rest, a few elements if any, is all-reduced, or broadcast by its owner. All ranks of a group must start the same
collectives in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from moefold.comm.message_codecs import PartCodec, RowCodec, SumFormat
from moefold.comm.process_groups import Group
from moefold.errors import ExchangeError

Sizes = tuple[int, ...]

# torch 2.13 renamed both and warns about the old names; 2.11 knows only those.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_rows(
    rows: Tensor, sizes: Sizes, group: Group, dtype: SumFormat | None = None, codec: RowCodec | None = None
) -> Tensor:
    """All rows, for work that differs between ranks; backward is a reduce-scatter, which sums in ``dtype``."""
    return rows if group.alone else _AllGatherRows.apply(rows, sizes, group, dtype, codec)


def reduce_scatter_rows(
    partial: Tensor, sizes: Sizes, group: Group, dtype: SumFormat | None = None, grad_codec: RowCodec | None = None
) -> Tensor:
    """Sum the ranks' partial rows in ``dtype`` and keep this rank's shard; backward is an all-gather."""
    return partial if group.alone else _ReduceScatterRows.apply(partial, sizes, group, dtype, grad_codec)


def all_gather_replicated(rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """All rows, for work that every rank repeats; backward slices this rank's rows of the gradient."""
    return rows if group.alone else _AllGatherReplicated.apply(rows, sizes, group)


def all_reduce_partial(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, for work that differs between them; backward is an all-reduce."""
    return x if group.alone else _AllReducePartial.apply(x, group)


def all_reduce_replicated(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, for work that every rank repeats; backward is the identity."""
    return x if group.alone else _AllReduceReplicated.apply(x, group)


def all_gather_no_grad(rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """All rows, without autograd."""
    return rows if group.alone else _all_gather(rows.detach(), sizes, group)


def reduce_scatter_no_grad(partial: Tensor, sizes: Sizes, group: Group, dtype: SumFormat | None = None) -> Tensor:
    """Sum the ranks' partial rows and keep this rank's shard, without autograd."""
    return partial if group.alone else _reduce_scatter(partial.detach(), sizes, group, dtype)


def all_reduce_no_grad(x: Tensor, group: Group, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ranks, without autograd."""
    return x if group.alone else _all_reduce(x.detach(), group, dtype)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """The largest over ranks, element by element, without autograd."""
    if group.alone:
        return x
    most = x.detach().clone()
    with group.timed("all_reduce", most):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group.handle)
    return most


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes: Sizes, group: Group, dtype: SumFormat | None, codec: RowCodec | None
    ) -> Tensor:
        ctx.sizes, ctx.group, ctx.dtype = sizes, group, dtype
        return _all_gather(rows, sizes, group, codec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _reduce_scatter(grad, ctx.sizes, ctx.group, ctx.dtype), None, None, None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial: Tensor, sizes: Sizes, group: Group, dtype: SumFormat | None, codec: RowCodec | None
    ) -> Tensor:
        ctx.sizes, ctx.group, ctx.codec = sizes, group, codec
        return _reduce_scatter(partial, sizes, group, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _all_gather(grad, ctx.sizes, ctx.group, ctx.codec), None, None, None, None


class _AllGatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
        ctx.sizes, ctx.index = sizes, group.index
        return _all_gather(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(ctx.sizes)[ctx.index], None, None


class _AllReducePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _AllReduceReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_gather(rows: Tensor, sizes: Sizes, group: Group, codec: RowCodec | None = None) -> Tensor:
    if codec is not None:
        return codec.unpack(_all_gather(codec.pack(rows), sizes, group), rows)
    mine = _pad_rows(rows, max(sizes))
    gathered = mine.new_empty(group.size * max(sizes), *mine.shape[1:])
    with group.timed("all_gather", mine):
        _all_gather_single(gathered, mine, group=group.handle)
    return _strip_padding(gathered, sizes)


def _reduce_scatter(partial: Tensor, sizes: Sizes, group: Group, dtype: SumFormat | None = None) -> Tensor:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return _sum_of_parts(partial, sizes, group, dtype)
    acc = partial.to(dtype or _sum_dtype(partial))
    if min(sizes) != max(sizes):
        acc = torch.cat([_pad_rows(part, max(sizes)) for part in acc.split(sizes)])
    mine = acc.new_empty(max(sizes), *acc.shape[1:])
    acc = acc.contiguous()
    with group.timed("reduce_scatter", acc):
        _reduce_scatter_single(mine, acc, group=group.handle)
    return mine[: sizes[group.index]].to(partial.dtype)


def _sum_of_parts(partial: Tensor, sizes: Sizes, group: Group, codec: PartCodec) -> Tensor:
    messages = [codec.pack(part) for part in partial.flatten(1).split(sizes)]
    mine = len(messages[group.index])
    received = _all_to_all(torch.cat(messages), tuple(map(len, messages)), (mine,) * group.size, group)
    shape = torch.Size((sizes[group.index], partial[:1].numel()))
    first, *others = received.split(mine)
    total = codec.unpack(first, shape)
    for message in others:
        total += codec.unpack(message, shape)
    return total.view(sizes[group.index], *partial.shape[1:]).to(partial.dtype)


def _all_reduce(x: Tensor, group: Group, dtype: torch.dtype | None = None) -> Tensor:
    acc = x.to(dtype or _sum_dtype(x), copy=True)
    with group.timed("all_reduce", acc):
        dist.all_reduce(acc, group=group.handle)
    return acc.to(x.dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def _pad_rows(rows: Tensor, size: int) -> Tensor:
    """Collectives need equal sizes, so shorter shards are padded with zero rows."""
    missing = size - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


def _strip_padding(gathered: Tensor, sizes: Sizes) -> Tensor:
    longest = max(sizes)
    if min(sizes) == longest:
        return gathered
    return torch.cat([gathered[i * longest : i * longest + size] for i, size in enumerate(sizes)])


def all_to_all_rows(
    rows: Tensor,
    *,
    send: Sizes,
    recv: Sizes,
    group: Group,
    codec: RowCodec | None = None,
    grad_codec: RowCodec | None = None,
) -> Tensor:
    """Send ``send[i]`` consecutive rows to peer i and return the ``recv[i]`` rows it sent us.

    Backward is the same all-to-all with ``send`` and ``recv`` swapped.
    """
    if sum(send) != rows.shape[0]:
        raise ExchangeError(
            f"all_to_all_rows over {group.name}: the send counts add up to {sum(send)} but there are {rows.shape[0]} "
            f"rows (send={list(send)}, group size {group.size})"
        )
    return rows if group.alone else _AllToAllRows.apply(rows, send, recv, group, codec, grad_codec)


def all_to_all_counts(counts: Tensor, group: Group) -> Tensor:
    """Peer i gets the i-th equal slice of ``counts``; returns the peers' slices in rank order."""
    if group.alone:
        return counts
    received = torch.empty_like(counts)
    each = [counts.shape[0] // group.size] * group.size
    with group.timed("all_to_all", counts):
        group.all_to_all(received, counts.contiguous(), each, each)
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: Sizes,
        recv: Sizes,
        group: Group,
        codec: RowCodec | None,
        grad_codec: RowCodec | None,
    ) -> Tensor:
        ctx.send, ctx.recv, ctx.group, ctx.codec = send, recv, group, grad_codec
        return _all_to_all(rows, send, recv, group, codec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.recv, ctx.send, ctx.group, ctx.codec), None, None, None, None, None


def _all_to_all(rows: Tensor, send: Sizes, recv: Sizes, group: Group, codec: RowCodec | None = None) -> Tensor:
    if codec is not None:
        return codec.unpack(_all_to_all(codec.pack(rows), send, recv, group), rows)
    received = rows.new_empty(sum(recv), *rows.shape[1:])
    with group.timed("all_to_all", rows):
        group.all_to_all(received, rows.contiguous(), list(recv), list(send))
    return received


# ---- flat buffers ----


def start_reduce_scatter(flat: Tensor, each: int, group: Group) -> list[Work]:
    """Sums over the ranks; afterwards this rank's range holds its sums, and the others nothing of use."""
    if group.alone:
        return []
    even, rest = flat[: each * group.size], flat[each * group.size :]
    works: list[Work] = []
    if each:
        mine = even[each * group.index : each * (group.index + 1)]
        start = partial(_reduce_scatter_single, mine, even, group=group.handle, async_op=True)
        works += group.started("reduce_scatter", even, start)
    if rest.numel():
        works += start_all_reduce(rest, group)
    return works


def start_all_gather(flat: Tensor, each: int, group: Group) -> list[Work]:
    """Every rank's range, on every rank."""
    if group.alone:
        return []
    even, rest = flat[: each * group.size], flat[each * group.size :]
    works: list[Work] = []
    if each:
        mine = even[each * group.index : each * (group.index + 1)]
        start = partial(_all_gather_single, even, mine, group=group.handle, async_op=True)
        works += group.started("all_gather", mine, start)
    if rest.numel():
        start = partial(dist.broadcast, rest, group.ranks[-1], group=group.handle, async_op=True)
        works += group.started("broadcast", rest, start)
    return works


def start_all_reduce(flat: Tensor, group: Group) -> list[Work]:
    """Sums over the ranks, on every rank."""
    return _start_all_reduce(flat, group, dist.ReduceOp.SUM)


def start_all_reduce_max(flat: Tensor, group: Group) -> list[Work]:
    """The largest over the ranks, element by element, on every rank."""
    return _start_all_reduce(flat, group, dist.ReduceOp.MAX)


def _start_all_reduce(flat: Tensor, group: Group, op: dist.ReduceOp.RedOpType) -> list[Work]:
    if group.alone or not flat.numel():
        return []
    return group.started("all_reduce", flat, partial(dist.all_reduce, flat, op=op, group=group.handle, async_op=True))


def start_reduce(flat: Tensor, to: int, group: Group) -> list[Work]:
    """Sums over the ranks, on rank ``to``; on the others nothing of use is left."""
    if group.alone or not flat.numel():
        return []
    return group.started("reduce", flat, partial(dist.reduce, flat, to, group=group.handle, async_op=True))


# ---- numbers of the host ----
#
# Counts, flags, a number of rank 0. NCCL takes tensors of GPUs only, gloo those of CPUs, so they travel on the device
# that the group's backend takes, and come back.


def all_reduce_ints(values: Sequence[int], group: Group) -> list[int]:
    """Each number summed over the ranks of the group; the host waits for the result."""
    if group.alone:
        return list(values)
    return [int(x) for x in all_reduce_no_grad(torch.tensor(values, device=device_of(group)), group).tolist()]


# Of one rank in one all-gather of bytes: bounds the memory of its result.
_BYTES_AT_ONCE = 1 << 10


def all_gather_bytes(content: bytes, group: Group) -> list[bytes]:
    """Every rank's bytes, of any length."""
    if group.alone:
        return [content]
    device = device_of(group)
    length = torch.tensor([len(content)], device=device)
    lengths = all_gather_no_grad(length, (1,) * group.size, group).tolist()
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else 0
    rounds = [
        all_gather_no_grad(part.to(device).unsqueeze(0), (1,) * group.size, group).cpu()
        for part in mine.split(_BYTES_AT_ONCE)
    ]
    whole = torch.cat(rounds, dim=1).numpy() if rounds else [b""] * group.size
    return [bytes(row[:length]) for row, length in zip(whole, lengths, strict=True)]


def broadcast_bytes(content: bytes, group: Group, source: int = 0) -> bytes:
    """The bytes of one rank (an index), on every rank, which need not know their length.

    A hash tells that they arrived whole.
    """
    if group.alone:
        return content
    device = device_of(group)
    sent = hashlib.sha256(content).digest() + content if group.index == source else b""
    buffer = torch.zeros(all_reduce_ints((len(sent),), group)[0], dtype=torch.uint8)
    if sent:
        buffer.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    buffer = buffer.to(device)
    with group.timed("broadcast", buffer):
        dist.broadcast(buffer, group.ranks[source], group=group.handle)
    received = buffer.cpu().numpy().tobytes()
    if hashlib.sha256(received[32:]).digest() != received[:32]:
        raise ExchangeError(
            f"broadcast over {group.name}: {len(received):,} bytes arrived otherwise than they were sent"
        )
    return received[32:]


def device_of(group: Group) -> torch.device:
    """Where tensors for this group's collectives must be."""
    if dist.get_backend(group.handle) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
