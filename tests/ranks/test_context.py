"""Attention over ranks that share documents against naive attention on the whole microbatch: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.marks import slow_except
from tests.support import on_ranks
from torch import Tensor

from moefold.attention.partial_attention import PLAIN
from moefold.attention.sdpa import attend_reference
from moefold.attention.varlen_reference import ReferenceAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.batching.zigzag import held_spans
from moefold.comm.process_groups import Group, Groups
from moefold.parallel import ring_attention as context_ring
from moefold.parallel.context_parallel import ContextParallelCore, PerLayerCore, ring_groups, ulysses_groups
from moefold.parallel.ring_attention import ring_attend
from moefold.parallel.ring_plan import ring_steps


@dataclass(frozen=True)
class LocalModel:
    """The part of a batch that an attention core reads."""

    lengths: tuple[int, ...]
    context_size: int
    context_index: int


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    dim: int
    value_dim: int
    window: int | None
    with_sinks: bool

    def draw(self, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(sum(self.lengths))
        tokens = sum(self.lengths)
        shapes = [
            (tokens, self.num_heads, self.dim),
            (tokens, self.num_kv_heads, self.dim),
            (tokens, self.num_kv_heads, self.value_dim),
            (self.num_heads,),
            (tokens, self.num_heads, self.value_dim),
        ]
        *leaves, grad = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
        return leaves, grad


CASES = {
    "one document": Case((64,), 4, 2, 4, 4, None, False),
    "equal documents": Case((24, 24, 24), 4, 4, 4, 4, None, True),
    "bin_packed": Case((17, 1, 40, 0, 3, 40, 9), 6, 2, 4, 4, None, False),
    "packed, window, sinks": Case((17, 1, 40, 3, 2, 33), 6, 2, 4, 4, 5, True),
    "wide window": Case((50, 12), 4, 1, 4, 4, 23, False),
    "window of one": Case((9, 30), 4, 2, 4, 4, 1, True),
    "latent": Case((21, 5, 34), 4, 4, 6, 4, None, False),
    "single tokens": Case((1, 1, 1), 3, 1, 4, 4, None, True),
    "one token": Case((1,), 4, 2, 4, 4, None, True),
    "uneven heads": Case((13, 20), 6, 3, 4, 4, 7, True),
}


def held(x: Tensor, lengths: tuple[int, ...], index: int, size: int) -> Tensor:
    return torch.cat([x[:0], *(x[start:stop] for start, stop in held_spans(lengths, index, size))])


def check(core: Any, case: Case, group: Group, tolerance: float = 1e-12) -> None:
    """Mine of what one process computes; the sinks' gradient in sum over the ranks."""
    whole, grad = case.draw()
    leaves = [x.clone().requires_grad_() for x in whole]
    sinks = leaves[3] if case.with_sinks else None
    expected = attend_reference(*leaves[:3], case.lengths, 0.4, case.window, sinks)
    used = leaves[: 3 + case.with_sinks]
    expected_grads = torch.autograd.grad(expected, used, grad)

    local_model = LocalModel(case.lengths, group.size, group.index)
    mine = [held(x, case.lengths, group.index, group.size).requires_grad_() for x in whole[:3]]
    if case.with_sinks:
        mine.append(whole[3].clone().requires_grad_())
    seen = core(*mine[:3], local_model, scale=0.4, window=case.window, sinks_H=mine[3] if case.with_sinks else None)
    mine_grads = list(torch.autograd.grad(seen, mine, held(grad, case.lengths, group.index, group.size)))
    if case.with_sinks:
        dist.all_reduce(mine_grads[3], group=group.handle)

    def close(actual: Tensor, whole: Tensor) -> None:
        expected = whole if whole.dim() == 1 else held(whole, case.lengths, group.index, group.size)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    close(seen, expected)
    for actual, whole_grad in zip(mine_grads, expected_grads, strict=True):
        close(actual, whole_grad)


def sets(cp: Group, inner: int) -> tuple[Group, Group]:
    """This rank's (inner, outer) groups; every rank makes all of them, in one order."""
    rows = [cp.ranks[start : start + inner] for start in range(0, cp.size, inner)]
    made = {ranks: dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in (*rows, *zip(*rows))}
    here, near, far = cp.ranks[cp.index], rows[cp.index // inner], tuple(row[cp.index % inner] for row in rows)
    return (
        Group("cp_inner", near, near.index(here), made[near], cp.ledger),
        Group("cp_outer", far, far.index(here), made[far], cp.ledger),
    )


@pytest.mark.parametrize("world", slow_except([2, 3, 4, 8], 2, 3))
@pytest.mark.parametrize("ways", [ring_groups, ulysses_groups])
def test_ring_and_heads_equal_the_whole(ways: Any, world: int) -> None:
    def work(groups: Groups) -> None:
        cp = groups["cp"]
        for case in CASES.values():
            check(ContextParallelCore(ways({cp.size: cp})), case, cp)

    on_ranks(work, world, cp=world)


@pytest.mark.parametrize("world, inner", slow_except([(4, 2), (8, 2), (8, 4), (4, 1), (4, 4)], (4, 2)))
def test_hierarchical_equals_the_whole(world: int, inner: int) -> None:
    def work(groups: Groups) -> None:
        cp = groups["cp"]
        core = ContextParallelCore({cp.size: sets(cp, inner)})
        for case in CASES.values():
            check(core, case, cp)

    on_ranks(work, world, cp=world)


@pytest.mark.parametrize("world", slow_except([2, 4], 2))
def test_random_microbatches(world: int) -> None:
    def work(groups: Groups) -> None:
        cp = groups["cp"]
        cores = (
            ContextParallelCore(ring_groups({world: cp})),
            ContextParallelCore(ulysses_groups({world: cp})),
            ContextParallelCore({world: sets(cp, 2)}),
        )
        draw = Random(world)
        for _ in range(12):
            kv_heads = draw.choice([1, 2, 3])
            dim = draw.choice([2, 6])
            case = Case(
                tuple(draw.randint(0, 40) for _ in range(draw.randint(1, 6))) + (1,),
                kv_heads * draw.choice([1, 2, 3]),
                kv_heads,
                dim,
                draw.choice([2, dim]),
                draw.choice([None, 1, 3, 8, 20]),
                draw.random() < 0.5,
            )
            for core in cores:
                check(core, case, cp)

    on_ranks(work, world, cp=world)


def test_heads_that_go_around_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group of heads is a round of its own, long runs are cut at the window, and the answer is the same."""
    monkeypatch.setattr(context_ring, "MIN_MESSAGE_BYTES", 1)

    def work(groups: Groups) -> None:
        cp = groups["cp"]
        for case in (*CASES.values(), Case((700, 90), 4, 2, 2, 2, 130, True)):
            check(ContextParallelCore(ring_groups({2: cp})), case, cp)

    on_ranks(work, 2, cp=2)


def test_the_plain_reference_of_the_parts() -> None:
    def work(groups: Groups) -> None:
        cp = groups["cp"]

        def core(q: Tensor, k: Tensor, v: Tensor, batch: LocalModel, **how: Any) -> Tensor:
            steps = ring_steps(batch.lengths, 2, 1, cp.index, how["window"])
            sinks, scale, plain = how["sinks_H"], how["scale"], SdpaAttention(PLAIN)
            return ring_attend(q, k, v, sinks, group=cp, steps=steps, scale=scale, mean_tokens=9, attention=plain)

        for case in CASES.values():
            check(core, case, cp)

    on_ranks(work, 2, cp=2)


@pytest.mark.parametrize("ways", [ring_groups, ulysses_groups])
def test_another_backend_of_attention(ways: Any) -> None:
    """One call for all documents of a step instead of one per shape of block."""

    def work(groups: Groups) -> None:
        cp = groups["cp"]
        for case in CASES.values():
            check(ContextParallelCore(ways({cp.size: cp}), ReferenceAttention()), case, cp)

    on_ranks(work, 2, cp=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_formats(dtype: torch.dtype) -> None:
    """As far from float64 as one process in the same format is, give or take."""

    def work(groups: Groups) -> None:
        cp = groups["cp"]
        case = CASES["packed, window, sinks"]
        whole, grad = case.draw(dtype)

        def run(core: Any, leaves: list[Tensor], grad: Tensor, batch: Any) -> list[Tensor]:
            leaves = [x.clone().requires_grad_() for x in leaves]
            out = core(*leaves[:3], batch, leaves[3])
            return [out.detach(), *torch.autograd.grad(out, leaves[:3], grad)]

        def naive(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], sinks: Tensor) -> Tensor:
            return attend_reference(q, k, v, lengths, 0.4, case.window, sinks)

        exact = run(naive, [x.double() for x in whole], grad.double(), case.lengths)
        for core in (ContextParallelCore(ring_groups({2: cp})), ContextParallelCore(ulysses_groups({2: cp}))):

            def call(q: Tensor, k: Tensor, v: Tensor, batch: LocalModel, sinks: Tensor, core: Any = core) -> Tensor:
                return core(q, k, v, batch, scale=0.4, window=case.window, sinks_H=sinks)

            mine = [held(x, case.lengths, cp.index, 2) for x in whole[:3]] + [whole[3]]
            got = run(call, mine, held(grad, case.lengths, cp.index, 2), LocalModel(case.lengths, 2, cp.index))
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            for a, b in zip(got, exact, strict=True):
                assert a.dtype == dtype
                expected = held(b, case.lengths, cp.index, 2).to(dtype)
                torch.testing.assert_close(a, expected, rtol=tolerance, atol=tolerance)

    on_ranks(work, 2, cp=2)


def test_sizes_and_modes_differ_by_batch_and_layer() -> None:
    """One core serves a batch on four ranks, then one on two, then one alone; and windowed layers go another way."""

    def work(groups: Groups) -> list[int]:
        four = groups["cp"]
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        first = four.index - four.index % 2
        two = Group("cp2", (first, first + 1), four.index % 2, pairs[first // 2], four.ledger)
        one = Group("cp1", (four.index,), 0, None, four.ledger)
        contexts = {4: four, 2: two}
        core = PerLayerCore(
            full=ContextParallelCore(ulysses_groups(contexts)), windowed=ContextParallelCore(ring_groups(contexts))
        )
        for group in (four, two):
            check(core, CASES["bin_packed"], group)
            check(core, CASES["packed, window, sinks"], group)
        case = CASES["bin_packed"]
        leaves, _ = case.draw()
        alone = core(*leaves[:3], LocalModel(case.lengths, 1, one.index), scale=0.4, window=None, sinks_H=None)
        torch.testing.assert_close(alone, attend_reference(*leaves[:3], case.lengths, 0.4))
        return [four.ledger.of("send", "cp").calls, four.ledger.of("all_to_all", "cp").calls]

    for sends, exchanges in on_ranks(work, 4, cp=4):
        assert sends > 0 and exchanges == 4


def test_only_rows_that_are_read_are_sent() -> None:
    """Zigzag: a later rank reads half of an earlier one's keys. A window: no more rows than it reaches back."""

    def work(groups: Groups) -> list[int]:
        cp = groups["cp"]
        sent = []
        for window in (None, 5):
            case = Case((128,), 1, 1, 2, 2, window, False)
            whole, _ = case.draw(torch.float32)
            before = cp.ledger.of("send", "cp").bytes_sent
            mine = [held(x, case.lengths, cp.index, 4) for x in whole[:3]]
            ContextParallelCore(ring_groups({4: cp}))(
                *mine, LocalModel(case.lengths, 4, cp.index), scale=1.0, window=window, sinks_H=None
            )
            sent.append(cp.ledger.of("send", "cp").bytes_sent - before)
        return sent

    row = 4 * 4  # bytes of one key and its value
    full, windowed = zip(*on_ranks(work, 4, cp=4))
    # Rank i of 4 holds 32 rows: all of them go to the i ranks before it, half of them to those after it.
    assert full == tuple(row * (32 * i + 16 * (3 - i)) for i in range(4))
    # The window reaches 4 rows into the chunk before: 7 borders between the 8 chunks, the one in the middle is at home.
    assert sum(windowed) == row * 4 * 6
