"""Transfers around the ring: any distance, uneven, empty, several at once, two ranks facing each other."""

from __future__ import annotations

import pytest
import torch
from tests.support import on_ranks

from moefold.comm.p2p import shift
from moefold.comm.process_groups import Groups


def _rows(rank: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(count * 3, dtype=torch.float64).view(count, 3) + 100 * rank).to(dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_arrive_from_as_far_behind(world: int, dtype: torch.dtype) -> None:
    def work(groups: Groups) -> None:
        cp = groups["cp"]
        for places in (*range(-world + 1, 0), *range(1, world)):
            behind = (cp.index - places) % world
            # Rank r has r rows: uneven, and nothing at all from rank 0.
            arrived = shift(_rows(cp.index, cp.index, dtype), behind, cp, distance=places).wait()
            torch.testing.assert_close(arrived, _rows(behind, behind, dtype))

    on_ranks(work, world, cp=world)


def test_several_under_way_do_not_mix() -> None:
    def work(groups: Groups) -> None:
        cp = groups["cp"]
        other = 1 - cp.index
        large = torch.full((1 << 18,), float(cp.index))
        first = shift(large, 1 << 18, cp)
        second = shift(large + 2, 1 << 18, cp)
        back = shift(large[:5] + 4, 5, cp, distance=-1, tag=1)
        assert back.wait().tolist() == [other + 4.0] * 5
        assert set(second.wait().tolist()) == {other + 2.0}
        assert set(first.wait().tolist()) == {float(other)}

    on_ranks(work, 2, cp=2)


def test_the_ledger_counts_what_is_sent() -> None:
    def work(groups: Groups) -> list[int]:
        cp = groups["cp"]
        shift(torch.ones(5, 2), 5, cp).wait()
        shift(torch.ones(0, 2), 0, cp).wait()
        return [*cp.ledger.of("send", "cp")]

    assert on_ranks(work, 2, cp=2) == [[1, 5 * 2 * 4]] * 2
