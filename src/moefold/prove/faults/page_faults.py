"""Faults of rows that wait in pages of a pool between forward and backward (`memory.retain.STEP: page`).

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import moefold.nn.paged_stash as paged_stash
from moefold.nn.paged_stash import PagedStash, PagePool, PageRecord
from moefold.prove.faults.parallel_faults import wrap

Stash = Callable[[PagePool, Tensor, Tensor], PageRecord]


def page_freed_twice() -> None:
    """Without the look at which pages are held, which flags it."""

    def make(free: Callable[[PagePool, PageRecord], None]) -> Callable[[PagePool, PageRecord], None]:
        def twice(self: PagePool, record: PageRecord) -> None:
            for _ in range(2):
                self.held_N.fill_(True)
                free(self, record)

        return twice

    wrap(PagePool, "free", make)


def page_used_again_before_it_is_read() -> None:
    """The head of the ring does not move: the next tensor has the same pages."""

    def make(stash: Stash) -> Stash:
        def in_place(self: PagePool, rows_PX: Tensor, num_rows: Tensor) -> PageRecord:
            record = stash(self, rows_PX, num_rows)
            self.head -= record.num_pages
            return record

        return in_place

    wrap(PagePool, "stash", make)


def rows_of_a_page_left_out() -> None:
    """The last page of a tensor is not full, and is taken for none."""

    def make(stash: Stash) -> Stash:
        def rounded_down(self: PagePool, rows_PX: Tensor, num_rows: Tensor) -> PageRecord:
            return stash(self, rows_PX, num_rows // self.page_rows * self.page_rows)

        return rounded_down

    wrap(PagePool, "stash", make)


def pages_of_another_tensor() -> None:
    def make(read: Callable[[PagePool, PageRecord, int], Tensor]) -> Callable[[PagePool, PageRecord, int], Tensor]:
        def shifted(self: PagePool, record: PageRecord, most_rows: int) -> Tensor:
            page_N = record.page_N.where(record.page_N == self.total, (record.page_N + 1) % self.total)
            return read(self, record._replace(page_N=page_N), most_rows)

        return shifted

    wrap(PagePool, "read", make)


def spilled_rows_read_on_the_device() -> None:
    def make(places: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def here(self: PagePool, record: PageRecord, most_rows: int) -> tuple[Tensor, ...]:
            place_P, spilled_P, is_spilled_P = places(self, record, most_rows)
            return place_P, spilled_P, is_spilled_P & False

        return here

    wrap(PagePool, "_places", make)


def overflow_of_pages_is_not_looked_at() -> None:
    def make(take: Callable[[PagedStash], Tensor]) -> Callable[[PagedStash], Tensor]:
        return lambda self: take(self) * 0

    wrap(paged_stash.PagedStash, "take_overflow", make)


# The function, the case it is tried on, and how it happens in real code.
FAULTS = (
    (page_freed_twice, "paged", "two views of a storage give its pages back, each"),
    (page_used_again_before_it_is_read, "paged", "pages are given back before they are read"),
    (rows_of_a_page_left_out, "paged", "the number of pages is rounded down"),
    (pages_of_another_tensor, "paged", "the table of pages is off by one"),
    (spilled_rows_read_on_the_device, "paged", "pages in the host's memory are addressed as those of the device"),
    (overflow_of_pages_is_not_looked_at, "paged, run twice", "rows for which no page is left are lost"),
)
