"""Activations of a number of rows that only the device knows, kept in pages of a pool between forward and backward.

Where nothing is read back to the host, a layer computes in buffers for the most rows that may come. Kept as they are,
all layers and microbatches in flight would keep that many. Paged stashing (Megatron Core's report, section 4.3.7) keeps
the rows that are there: they are copied into pages of 64 rows, say, and back into a buffer of the worst case for
backward.

Free pages are a ring of page numbers, with its head and tail on the device: pages are taken at the head and given back
at the tail, so that chunks may go backward in any order. No shape depends on data and nothing is read back. Rows past
the count go to a page that nobody reads, and come back as zeros.

Two numbers stay on the device, to be read once per step with the loss. ``overflow``: pages ran out, and so many rows
were not kept; the step has to run again (`pipeline/step.py`). ``fault``: a page was given back that was free.

``spill_pages`` more pages lie in the host's memory, and are taken after those of the device. The device has to address
them, which torch's tensors cannot on a GPU: there the pool refuses to have any.

``nn/step_retention.py`` decides which tensors are kept so (``memory.retain.STEP: page``). Nothing of this has run on a
GPU.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.plan.memory.page_pools import PoolSize


class PageRecord(NamedTuple):
    """Of one tensor: its pages, how many of them, and how many rows there are; all on the device."""

    page_N: Tensor
    num_pages: Tensor
    num_rows: Tensor


class PagePool:
    """``num_pages`` pages on the device, then ``spill_pages`` in the host's memory, numbered one after the other."""

    def __init__(
        self,
        num_pages: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        page_rows: int = 64,
        spill_pages: int = 0,
    ) -> None:
        if spill_pages and device.type != "cpu":
            raise BackendError(f"{spill_pages} pages in the host's memory: a {device.type} tensor cannot address them")
        self.num_pages, self.spill_pages, self.page_rows = num_pages, spill_pages, page_rows
        # Of each part, the last page is nobody's.
        self.rows_NX, self.spilled_NX = (
            torch.empty((pages + 1) * page_rows, dim, dtype=dtype, device=device) for pages in (num_pages, spill_pages)
        )
        self.total = num_pages + spill_pages
        # One entry more than there are pages, for writes that are of no page.
        self.ring_N = torch.arange(self.total + 1, device=device)
        self.held_N = torch.zeros(self.total + 1, dtype=torch.bool, device=device)
        self.head, self.tail = (torch.full((1,), value, device=device) for value in (0, self.total))
        self.overflow = torch.zeros(1, dtype=torch.int64, device=device)
        self.fault = torch.zeros(1, dtype=torch.bool, device=device)
        # The most pages in use at once.
        self.most_used = torch.zeros(1, dtype=torch.int64, device=device)

    def stash(self, rows_PX: Tensor, num_rows: Tensor) -> PageRecord:
        """Of a buffer, its first ``num_rows`` rows."""
        order_N = torch.arange(-(-len(rows_PX) // self.page_rows), device=rows_PX.device)
        wanted = (num_rows.view(1) + self.page_rows - 1) // self.page_rows
        fits = self.tail - self.head >= wanted
        self.overflow += num_rows.view(1) * ~fits
        wanted = wanted * fits
        page_N = self.ring_N.gather(0, (self.head + order_N) % self.total).where(order_N < wanted, self.total)
        record = PageRecord(page_N, wanted, num_rows.view(1) * fits)
        self._copy_in(rows_PX, record)
        self.held_N.index_fill_(0, page_N, True)
        self.head += wanted
        torch.maximum(self.most_used, self.head - self.tail + self.total, out=self.most_used)
        return record

    def read(self, record: PageRecord, most_rows: int) -> Tensor:
        """The rows in a buffer of so many, with zeros behind them."""
        place_P, spilled_P, is_spilled_P = self._places(record, most_rows)
        rows_PX = self.rows_NX.index_select(0, place_P)
        if self.spill_pages:
            rows_PX = torch.where(is_spilled_P[:, None], self.spilled_NX.index_select(0, spilled_P), rows_PX)
        is_padding_P = torch.arange(most_rows, device=rows_PX.device) >= record.num_rows
        return rows_PX.masked_fill_(is_padding_P[:, None], 0)

    def free(self, record: PageRecord) -> None:
        """Give the pages back. A record whose pages are free already sets ``fault``, and gives nothing back."""
        order_N = torch.arange(len(record.page_N), device=record.page_N.device)
        is_page_N = order_N < record.num_pages
        is_free_N = ~self.held_N.gather(0, record.page_N) & is_page_N
        self.fault |= is_free_N.any()
        number = record.num_pages * ~is_free_N.any()
        is_page_N = order_N < number
        place_N = ((self.tail + order_N) % self.total).where(is_page_N, self.total)
        self.ring_N.index_copy_(0, place_N, record.page_N.where(is_page_N, self.total))
        self.held_N.index_fill_(0, record.page_N.where(is_page_N, self.total), False)
        self.tail += number

    def _copy_in(self, rows_PX: Tensor, record: PageRecord) -> None:
        place_P, spilled_P, _ = self._places(record, len(rows_PX))
        self.rows_NX.index_copy_(0, place_P, rows_PX)
        if self.spill_pages:
            self.spilled_NX.index_copy_(0, spilled_P, rows_PX)

    def _places(self, record: PageRecord, most_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row of a buffer: its place on the device and among spilled ones, nobody's in one of the two."""
        row_P = torch.arange(most_rows, device=record.page_N.device)
        page_P = record.page_N.index_select(0, row_P // self.page_rows).where(row_P < record.num_rows, self.total)
        is_spilled_P = (page_P >= self.num_pages) & (page_P < self.total)
        within_P = row_P % self.page_rows
        page_here_P = page_P.clamp(max=self.num_pages)
        spilled_P = (page_P - self.num_pages).where(is_spilled_P, self.spill_pages)
        return page_here_P * self.page_rows + within_P, spilled_P * self.page_rows + within_P, is_spilled_P


class PagedRows:
    """Stands for a saved tensor. Its pages are given back when it is read, or when nobody will."""

    def __init__(self, pool: PagePool, rows_PX: Tensor, num_rows: Tensor) -> None:
        self.pool, self.most_rows = pool, len(rows_PX)
        self.record: PageRecord | None = pool.stash(rows_PX.detach(), num_rows)
        self.rows_PX: Tensor | None = None

    def get(self) -> Tensor:
        if self.rows_PX is None:
            assert self.record is not None
            self.rows_PX = self.pool.read(self.record, self.most_rows)
            self._free()
        return self.rows_PX

    def _free(self) -> None:
        if self.record is not None:
            record, self.record = self.record, None
            self.pool.free(record)

    def __del__(self) -> None:
        self._free()


class PagedStash:
    """One pool for each dim of rows. Memory is allocated when the first tensor is stashed."""

    def __init__(
        self, sizes: tuple[PoolSize, ...], dtype: torch.dtype, device: torch.device, page_rows: int = 64
    ) -> None:
        self.sizes, self.dtype, self.device, self.page_rows = sizes, dtype, device, page_rows

    @cached_property
    def pools(self) -> dict[int, PagePool]:
        return {
            dim: PagePool(num_pages, dim, self.dtype, self.device, self.page_rows, spill_pages)
            for dim, num_pages, spill_pages in self.sizes
        }

    def keep(self, rows_PX: Tensor, num_rows: Tensor) -> PagedRows:
        """Of a buffer, its first ``num_rows`` rows."""
        return PagedRows(self.pools[rows_PX.shape[1]], rows_PX, num_rows)

    def take_overflow(self) -> Tensor:
        """Rows that no page was left for since the last call."""
        overflows = [pool.overflow for pool in self.pools.values()]
        lost = torch.stack(overflows).sum()
        for overflow in overflows:
            overflow.zero_()
        return lost
