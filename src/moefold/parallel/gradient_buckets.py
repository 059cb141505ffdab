"""Sums of many gradients over data-parallel ranks in one collective.

FSDP shards every parameter along one of its dims, in chunks as ``torch.chunk``. A bucket is a matrix with a row per
rank of the shard group: row r holds rank r's chunk of each gradient of the bucket, one after the other, the last chunks
padded with zeros. A reduce-scatter of the matrix leaves each rank its row, an all-reduce over the replicas sums the
rows, and the row is cut into this rank's shards. Sums are over the same numbers as parameter by parameter; where the
backend's order of summation depends on an element's place in a message, they may round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.sharding import shard_dim
from moefold.comm.collectives import all_reduce_no_grad, reduce_scatter_no_grad
from moefold.comm.message_codecs import PartCodec
from moefold.comm.process_groups import Group


class Chunks(NamedTuple):
    """How a gradient is cut: the dim, the size of that dim, of a chunk of it, and of all other dims."""

    dim: int
    size: int
    chunk: int
    others: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Of one chunk, padded."""
        return self.chunk * prod(self.others)


def chunks_of(shape: tuple[int, ...], ranks: int) -> Chunks:
    dim = shard_dim(shape, ranks)
    return Chunks(dim, shape[dim], -(-shape[dim] // ranks), shape[:dim] + shape[dim + 1 :])


def bucket_bytes(shape: tuple[int, ...], ranks: int, dtype: torch.dtype) -> int:
    """Of a gradient in a bucket, padding included."""
    return chunks_of(shape, ranks).numel * ranks * dtype.itemsize


@torch.no_grad()
def reduce_bucket(
    gradients: Sequence[Tensor], replicate: Group, shard: Group, dtype: torch.dtype, parts: PartCodec | None = None
) -> list[Tensor]:
    """This rank's shard of each gradient, summed in ``dtype`` over both groups; ``parts``: how shards are sent."""
    if shard.alone and replicate.alone:
        return list(gradients)
    cuts = [chunks_of(tuple(gradient.shape), shard.size) for gradient in gradients]
    first = gradients[0]
    bucket = torch.empty(shard.size, sum(cut.numel for cut in cuts), dtype=dtype, device=first.device)
    sizes = [cut.numel for cut in cuts]
    for gradient, cut, part in zip(gradients, cuts, bucket.split(sizes, dim=1), strict=True):
        _fill(part.unflatten(1, (cut.chunk, *cut.others)), gradient.movedim(cut.dim, 0), cut.chunk)
    (mine,) = reduce_scatter_no_grad(bucket, (1,) * shard.size, shard, parts or dtype)
    del bucket
    mine = all_reduce_no_grad(mine, replicate, dtype)
    return [
        _shard_of(part, cut, shard.index).to(gradient.dtype)
        for gradient, cut, part in zip(gradients, cuts, mine.split(sizes), strict=True)
    ]


def _fill(part_RC: Tensor, rows_N: Tensor, chunk: int) -> None:
    """[R, chunk, ...] from [N, ...]: full chunks at once, then the one that is not, then zeros."""
    full = rows_N.shape[0] // chunk
    part_RC[:full] = rows_N[: full * chunk].unflatten(0, (full, chunk)) if full else part_RC[:0]
    if full < part_RC.shape[0]:
        rest = rows_N[full * chunk :]
        part_RC[full:].zero_()
        part_RC[full, : rest.shape[0]] = rest


def _shard_of(part: Tensor, cut: Chunks, rank: int) -> Tensor:
    rows = max(0, min(cut.chunk, cut.size - cut.chunk * rank))
    return part.view(cut.chunk, *cut.others)[:rows].movedim(0, cut.dim).contiguous()


@torch.no_grad()
def all_reduce_bucket(tensors: Sequence[Tensor], group: Group) -> None:
    """All-reduce in place, in one message."""
    if group.alone:
        return
    total = all_reduce_no_grad(torch.cat([tensor.flatten() for tensor in tensors]), group)
    for tensor, summed in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
