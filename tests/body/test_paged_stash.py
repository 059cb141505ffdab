"""Paged stash: bits of the plain backward in any order, without a host read, in little more than the actual bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.sync_free import sync_free
from torch import Tensor

from moefold.errors import BackendError
from moefold.nn.offload import HostPool, Offload
from moefold.nn.paged_stash import PagedRows, PagedStash, PagePool, PageRecord
from moefold.nn.step_retention import KEEP_ALL, Retention, StepRetention
from moefold.plan.memory.page_pools import PoolSize

MOST, DIM, LAYERS = 1024, 24, 12
CPU = torch.device("cpu")
COUNTS = [int(count) for count in torch.rand(LAYERS, generator=torch.Generator().manual_seed(3)) * 200 + 100]
# Of each layer its input and what its first matmul gave.
NEEDED = 2 * sum(-(-count // 64) for count in COUNTS)


def layers() -> list[tuple[Tensor, Tensor]]:
    """Inputs with rows of zeros behind those that are there, and weights."""
    generator, made = torch.Generator().manual_seed(0), []
    for count in COUNTS:
        x_PX = torch.randn(MOST, DIM, generator=generator)
        x_PX[count:] = 0
        made.append((x_PX.requires_grad_(), torch.randn(DIM, DIM, generator=generator).requires_grad_()))
    return made


def stash_of(pages: int, spill: int = 0) -> PagedStash:
    return PagedStash((PoolSize(DIM, pages, spill),), torch.float32, CPU)


def retention_of(stash: PagedStash) -> StepRetention:
    choices = {"rows": "page", "gate_up": "page"}
    return StepRetention(choices, Offload(HostPool(None, pinned=False), CPU), stash)  # type: ignore[arg-type]


def forward(x_PX: Tensor, weight_XX: Tensor, retain: Retention) -> Tensor:
    """The matmul saves its input, and the square its own: both halves of it, which are views of one storage."""
    rows_PX = retain.received("rows", x_PX + 0)
    y_PX = retain.step("gate_up", lambda rows_PX: rows_PX @ weight_XX, rows_PX)
    left_PY, right_PY = y_PX.chunk(2, dim=-1)
    return left_PY * right_PY


def gradients(stash: PagedStash | None, order: Callable[[range], list[int]]) -> list[Tensor]:
    retention = KEEP_ALL if stash is None else retention_of(stash)
    made, outputs = layers(), []
    for (x_PX, weight_XX), count in zip(made, COUNTS, strict=True):
        with retention.scope():
            outputs.append(forward(x_PX, weight_XX, retention.of_rows(torch.tensor([count - 2, 2]))).sum())
    for layer in order(range(LAYERS)):
        outputs[layer].backward()
    return [tensor.grad for pair in made for tensor in pair if tensor.grad is not None]


ORDERS: dict[str, Callable[[range], list[int]]] = {
    "last first": lambda layers: list(reversed(layers)),
    "first first": list,
    "mixed": lambda layers: [*layers[::2], *layers[1::2]],
}


def all_free(pool: PagePool) -> bool:
    free = pool.ring_N[: pool.total].sort().values
    return bool((pool.tail - pool.head == pool.total) and torch.equal(free, torch.arange(pool.total))) and not bool(
        pool.held_N[: pool.total].any()
    )


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("spill", [0, NEEDED // 2])
def test_gradients_are_those_of_the_plain_backward_bit_by_bit(order: Callable[[range], list[int]], spill: int) -> None:
    stash = stash_of(NEEDED - spill, spill)
    pool = stash.pools[DIM]
    for _ in range(2):
        # Twice: pages are used again, in another order.
        found = gradients(stash, order)
        expected = gradients(None, order)
        assert len(found) == 2 * LAYERS
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not pool.overflow and not pool.fault and all_free(pool)


def test_pages_take_at_most_a_quarter_more_than_the_rows() -> None:
    """A pool of just the pages that are needed, against the bytes of the rows that are there and of the worst case."""
    stash = stash_of(NEEDED)
    pool = stash.pools[DIM]
    gradients(stash, ORDERS["last first"])
    actual = 2 * sum(COUNTS) * DIM * 4
    paged = (int(pool.most_used) + 1) * pool.page_rows * DIM * 4
    assert int(pool.most_used) == NEEDED and not pool.overflow
    assert actual <= paged <= 1.25 * actual, paged / actual
    assert 4 * paged < 2 * LAYERS * MOST * DIM * 4


def test_nothing_is_read_on_the_host() -> None:
    pool = PagePool(40, DIM, torch.float32, CPU, spill_pages=4)
    rows, number = torch.randn(MOST, DIM), torch.tensor(100)
    with sync_free():
        record = pool.stash(rows, number)
        again = pool.read(record, MOST)
        pool.free(record)
    assert torch.equal(again[:100], rows[:100]) and not again[100:].any()


def test_running_out_of_pages_is_flagged_and_writes_nowhere() -> None:
    pool = PagePool(3, DIM, torch.float32, CPU)
    kept = pool.stash(torch.ones(256, DIM), torch.tensor(128))
    lost = pool.stash(torch.full((256, DIM), 2.0), torch.tensor(65))
    assert int(pool.overflow) == 65 and not pool.read(lost, 256).any()
    assert torch.equal(pool.read(kept, 256)[:128], torch.ones(128, DIM))
    pool.free(lost)
    pool.free(kept)
    assert all_free(pool) and not pool.fault


def test_a_page_that_is_freed_twice_is_flagged_and_stays_free_once() -> None:
    pool = PagePool(8, DIM, torch.float32, CPU)
    first, second = (pool.stash(torch.randn(256, DIM), torch.tensor(100)) for _ in range(2))
    pool.free(first)
    pool.free(first)
    assert pool.fault
    pool.free(second)
    assert all_free(pool)


def test_pages_of_a_graph_that_never_goes_backward_are_given_back() -> None:
    stash = stash_of(64)
    pool, retention = stash.pools[DIM], retention_of(stash)
    x_PX, weight_XX = layers()[0]
    with retention.scope():
        y_PX = forward(x_PX, weight_XX, retention.of_rows(torch.tensor([COUNTS[0]])))
    assert not all_free(pool)
    del y_PX
    assert all_free(pool) and not pool.fault


def test_overflow_is_taken_once() -> None:
    stash = stash_of(NEEDED - 1)
    gradients(stash, ORDERS["first first"])
    # The last tensor of all found no page for its rows.
    assert int(stash.take_overflow()) == COUNTS[-1] and int(stash.take_overflow()) == 0


def test_rows_that_the_host_counted_are_kept_as_they_are() -> None:
    stash = stash_of(1)
    retention, (x_PX, weight_XX) = retention_of(stash), layers()[0]
    with retention.scope():
        y_PX = forward(x_PX, weight_XX, retention)
    y_PX.sum().backward()
    assert "pools" not in vars(stash)


def test_a_gpu_has_no_pages_in_the_hosts_memory() -> None:
    with pytest.raises(BackendError, match="4 pages"):
        PagePool(4, DIM, torch.float32, torch.device("cuda"), spill_pages=4)


# ---- mutants: each must be seen ----


def freed_twice(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: PagedRows) -> Tensor:
        if self.rows_PX is None:
            assert self.record is not None
            self.rows_PX = pool.read(self.record, self.most_rows)
            pool.free(self.record)
            self._free()
        return self.rows_PX

    monkeypatch.setattr(PagedRows, "get", twice)


def reused_too_early(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are given back when they are written."""
    stash = PagePool.stash

    def stash_and_free(self: PagePool, rows_PX: Tensor, num_rows: Tensor) -> PageRecord:
        record = stash(self, rows_PX, num_rows)
        self.free(record)
        return record

    monkeypatch.setattr(PagePool, "stash", stash_and_free)


def head_not_moved(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor gets the same pages."""
    stash = PagePool.stash

    def in_place(self: PagePool, rows_PX: Tensor, num_rows: Tensor) -> PageRecord:
        record = stash(self, rows_PX, num_rows)
        self.head -= record.num_pages
        return record

    monkeypatch.setattr(PagePool, "stash", in_place)


def rows_behind_the_count_come_back(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of another layer."""
    read = PagePool.read
    monkeypatch.setattr(
        PagePool, "read", lambda self, record, most: read(self, record._replace(num_rows=record.num_rows + 7), most)
    )


@pytest.mark.parametrize("mutate", [freed_twice, reused_too_early, head_not_moved, rows_behind_the_count_come_back])
def test_a_mutant_is_seen(
    mutate: Callable[[PagePool, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bits of gradients, by a flag, or by pages that are not free."""
    stash = stash_of(NEEDED)
    pool = stash.pools[DIM]
    pool.rows_NX.fill_(1.0)
    mutate(pool, monkeypatch)
    found, expected = gradients(stash, ORDERS["last first"]), gradients(None, ORDERS["last first"])
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not same or bool(pool.fault) or bool(pool.overflow) or not all_free(pool)
