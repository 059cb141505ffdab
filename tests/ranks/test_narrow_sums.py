"""Sums over ranks from narrow parts: an all-to-all, and float32 sums in the order of the ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import on_ranks
from torch import Tensor

from moefold.blueprint.narrow_bytes import cast_bytes
from moefold.comm import collectives
from moefold.comm.collectives import all_gather_rows, reduce_scatter_rows
from moefold.comm.message_codecs import PartCodec
from moefold.comm.process_groups import Groups
from moefold.config.precision_recipes import TP_REDUCE_CASTS
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.row_messages import NarrowPartCodec

SIZES, DIM = (150, 0, 3, 130), 24  # blocks of 128 tokens, partial ones, a rank without tokens
CASTS = TP_REDUCE_CASTS["fp8_all_to_all"]


def part_of(rank: int) -> Tensor:
    """One rank's part of the sum of all tokens, of many magnitudes."""
    generator = torch.Generator().manual_seed(rank)
    part = torch.randn(sum(SIZES), DIM, generator=generator) * 10 ** torch.rand(sum(SIZES), DIM, generator=generator)
    return part.bfloat16()


def narrowed(block: Tensor) -> Tensor:
    """The equation: E4M3 of x * (448 / amax), and back."""
    amax = block.float().abs().max()
    encode = torch.tensor(448.0) / amax if amax > 0 else torch.tensor(1.0)
    return (block.float() * encode).to(torch.float8_e4m3fn).float() * (1 / encode)


def per_token(part: Tensor) -> Tensor:
    return torch.stack([narrowed(row) for row in part]) if len(part) else part.float()


def per_channel(part: Tensor) -> Tensor:
    """In groups of 128 tokens."""
    if not len(part):
        return part.float()
    return torch.cat([torch.stack([narrowed(column) for column in group.T], 1) for group in part.split(128)])


def expected(rank: int, narrow: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum that a rank owns: each rank's part, narrowed by itself, added in float32 in the order of the ranks."""
    total = torch.zeros(SIZES[rank], DIM)
    for other in range(4):
        total = total + narrow(part_of(other).split(SIZES)[rank])
    return total.bfloat16()


def sums_are_exact(groups: Groups, forward: PartCodec, backward: PartCodec) -> None:
    tp, rank = groups["tp"], groups.rank
    summed = reduce_scatter_rows(part_of(rank), SIZES, tp, forward)
    x = torch.zeros(SIZES[rank], DIM, dtype=torch.bfloat16, requires_grad=True)
    all_gather_rows(x, SIZES, tp, backward).backward(part_of(rank))
    # Compared last: a rank that stops would keep the others waiting.
    assert torch.equal(summed, expected(rank, per_token))
    assert x.grad is not None and torch.equal(x.grad, expected(rank, per_channel))


@pytest.mark.parametrize("casts", ["torch", "native"])
def test_tp_sums_are_those_of_the_equations(casts: str) -> None:
    codecs = [NarrowPartCodec(cast, QUANTIZERS[casts]) for cast in (CASTS.forward, CASTS.backward)]
    on_ranks(lambda groups: sums_are_exact(groups, *codecs), 4, tp=4)


def test_the_ledger_has_a_quarter_of_the_bytes() -> None:
    """Of float32, and scales: 4 bytes per token forward, 4 per channel and 128 tokens backward."""

    def work(groups: Groups) -> tuple[int, int, int]:
        tp = groups["tp"]
        found = []
        for codec in (NarrowPartCodec(CASTS.forward), NarrowPartCodec(CASTS.backward), None):
            before = [tp.ledger.of(name, "tp").bytes_sent for name in ("all_to_all", "reduce_scatter")]
            reduce_scatter_rows(torch.randn(512, 256).bfloat16(), (256, 256), tp, codec)
            after = [tp.ledger.of(name, "tp").bytes_sent for name in ("all_to_all", "reduce_scatter")]
            found.append(sum(after) - sum(before))
        return found[0], found[1], found[2]

    for forward, backward, wide in on_ranks(work, 2, tp=2):
        assert wide == 512 * 256 * 4
        assert forward == 512 * 256 + 512 * 4 == sum(cast_bytes(CASTS.forward, 256, 256) for _ in range(2))
        assert backward == 512 * 256 + 4 * 256 * 4 and max(forward, backward) < 0.26 * wide


class NoScales(NarrowPartCodec):
    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        ones = torch.ones((len(packed) - shape.numel()) // 4).view(torch.uint8)
        return super().unpack(torch.cat([packed[: shape.numel()], ones]), shape)


class Wide:
    """The cast is left out."""

    def __init__(self, cast: object) -> None: ...

    def pack(self, part_ND: Tensor) -> Tensor:
        return part_ND.flatten().view(torch.uint8)

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        return packed.view(torch.bfloat16).view(shape).float()


class BFloat16Sums(NarrowPartCodec):
    """The receiver adds in bfloat16."""

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        return super().unpack(packed, shape).bfloat16()


MUTANTS: dict[str, Callable[..., Any]] = {
    "scales are not sent": NoScales,
    "the cast is left out": Wide,
    "bfloat16 accumulation": BFloat16Sums,
    "scales of powers of two": lambda cast: NarrowPartCodec(replace(cast, scale="power_of_two")),
    "blocks along the other dim": lambda cast: NarrowPartCodec(
        CASTS.forward if cast is CASTS.backward else CASTS.backward
    ),
    "groups of 64 tokens": lambda cast: NarrowPartCodec(replace(cast, block=(min(cast.block[0], 64), cast.block[1]))),
}


def is_caught(make: Callable[..., Any]) -> bool:
    def work(groups: Groups) -> bool:
        try:
            sums_are_exact(groups, make(CASTS.forward), make(CASTS.backward))
        except AssertionError:
            return True
        return False

    return any(on_ranks(work, 4, tp=4))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str) -> None:
    assert is_caught(MUTANTS[mutant])


def test_another_order_of_ranks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = collectives._all_to_all

    def reversed_ranks(rows: Tensor, send: Any, recv: Any, group: Any, codec: Any = None) -> Tensor:
        received = plain(rows, send, recv, group, codec)
        return torch.cat(received.split(recv)[::-1])

    monkeypatch.setattr(collectives, "_all_to_all", reversed_ranks)
    assert is_caught(NarrowPartCodec)
