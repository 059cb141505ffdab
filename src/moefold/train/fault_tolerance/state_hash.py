"""Hashes of the bits of parameters, optimizer states and buffers, and which ranks hold the same ones.

`hash_bits` reads a tensor as 64-bit words (zero bytes fill the last one) and returns

    h = sum of w[i] * m(i)  modulo 2^64,     m(i) odd for every i

Any change inside one word changes h, so any single bit flip does: the word changes by d with 0 < |d| < 2^64, and h by
d * m(i). An odd number has an inverse modulo 2^64, so d * m(i) is 0 modulo 2^64 only if d is. Changes of several words
go unseen by one chance in about 2^64, unless they were made for that: this finds faults, not attackers. Addition modulo
2^64 does not depend on the order, so a CPU and a GPU, with any number of threads, get the same h.

m(i) is c[i mod B] * d(i div B) with a table c of B odd numbers from splitmix64 and d(b) = 2 b G + 1: the table stays in
a cache, and the sums of all blocks are one matrix-vector product.

Replicas follow from the layout. A shard of a parameter and its states are the same on all ranks of its replica groups
(`ParamShard.replica_groups`: HSDP's replicas; tensor-parallel ranks, for norms and routers) and on all pipeline ranks
that have the parameter. Buffers are the same on all ranks of a stage. Under flat sharding, weights are gathered whole
on every rank, so they are replicas of each other as well. With plain FSDP, a shard of anything else exists once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moefold.blueprint.sharding import grid_of
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, local_buffers
from moefold.parallel.param_shards import DATA_GROUPS, ParamShard, local_part
from moefold.topology.folded_layout import FoldedLayout

# Words of a block; of the table of multipliers.
BLOCK = 4096
GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# Of the temporary products, where a device has no integer matrix-vector product.
_ROWS_AT_ONCE = 4096


def splitmix64(index: int) -> int:
    """The ``index``-th number of the generator splitmix64 with seed 0."""
    z = (index + 1) * GOLDEN & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def signed(word: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    word &= _MASK
    return word - 2**64 if word >> 63 else word


@cache
def multipliers() -> Tensor:
    """Odd numbers, on the host; who copies them to a device does not write to them."""
    return torch.tensor([signed(splitmix64(index) | 1) for index in range(BLOCK)])


class BitHash:
    """`hash_bits` with its table of multipliers on one device."""

    def __init__(self, device: torch.device) -> None:
        self.table = multipliers().to(device)

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        """A scalar int64 on the tensor's device. On another device than the table's, the table is copied there."""
        words = as_words(tensor)
        table = self.table.to(words.device)
        even = len(words) // BLOCK * BLOCK
        rest = words[even:]
        blocks = even // BLOCK
        total = (rest * table[: len(rest)]).sum() * signed(2 * blocks * GOLDEN + 1)
        if blocks:
            # Python's product would overflow in torch.arange; int64 products wrap.
            factor = torch.arange(blocks, device=words.device) * signed(2 * GOLDEN) + 1
            total = total + (_row_sums(words[:even].view(blocks, BLOCK), table) * factor).sum()
        return total


def _row_sums(rows: Tensor, table: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return torch.mv(rows, table)
    return torch.cat([(part * table).sum(1) for part in rows.split(_ROWS_AT_ONCE)])


def as_words(tensor: Tensor) -> Tensor:
    """The tensor's bytes in row-major order as int64; zero bytes fill the last word."""
    flat = local_part(tensor.detach()).contiguous().view(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    data = flat.view(torch.uint8)
    return torch.cat([data, data.new_zeros(-len(data) % 8)]).view(torch.int64)


# ---- what a rank holds ----


@dataclass(frozen=True)
class Held:
    """A tensor of this rank's state. ``ranks`` hold the same bits, this rank among them."""

    name: str
    tensor: Tensor
    ranks: tuple[int, ...]


def held_state(local_model: LocalModel, optimizer: ModelOptimizer) -> Iterator[Held]:
    """Parameters, the states that the optimizer keeps for them as it stores them, and buffers."""
    layout, rank = local_model.groups.layout, local_model.groups.rank
    for piece in local_model.pieces():
        ranks = replicas_of(piece.shard, layout, rank)
        yield Held(f"parameter/{piece.name}", piece.parameter, ranks)
        for kind, value in optimizer.stored_state(piece.parameter).items():
            stored = value if isinstance(value, Tensor) else torch.tensor(value)
            yield Held(f"{kind}/{piece.name}", stored, ranks)
    live, stage = dict(local_model.model.named_buffers()), layout.ranks("stage", rank)
    for spec in local_buffers(local_model.run, local_model.model):
        yield Held(f"buffer/{spec.name}", live[spec.name], tuple(sorted(stage)))
    for name, history in local_model.amax_histories.items():
        for operand, amaxes in history.named_buffers():
            yield Held(f"amax_history/{name}.{operand}", amaxes, tuple(sorted(stage)))


def gathered_weights(local_model: LocalModel) -> Iterator[Held]:
    """Under flat sharding: whole weights, gathered at the beginning of a step and used until its end."""
    if local_model.run.parallel.sharding != "flat":
        return
    layout, rank = local_model.groups.layout, local_model.groups.rank
    for name, parameter in local_model.model.named_parameters():
        shard = local_model.param_shards[name]
        _, data = DATA_GROUPS[grid_of(name)]
        yield Held(f"gathered/{name}", parameter, replicas_of(shard, layout, rank, data))


def replicas_of(shard: ParamShard, layout: FoldedLayout, rank: int, *more: str) -> tuple[int, ...]:
    """The ranks that hold the same shard: all that its replica groups, and those in ``more``, connect."""
    ranks = {rank}
    for name in (*(group.name for group in shard.replica_groups), *more):
        ranks = {other for each in ranks for other in layout.ranks(name, each)}
    if len(shard.pp_ranks) > 1:
        ranks = {layout.ranks("pp", each)[index] for each in ranks for index in shard.pp_ranks}
    return tuple(sorted(ranks))


def hashes_of(held: Sequence[Held], hash_bits: BitHash) -> list[int]:
    """One number per tensor; the host waits once, for all of them."""
    if not held:
        return []
    device = hash_bits.table.device
    return [int(word) for word in torch.stack([hash_bits(each.tensor).to(device) for each in held]).tolist()]
