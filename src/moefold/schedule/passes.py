"""Passes: functions that take an order and return a better one.

    pair_overlaps    a forward and the backward after it become one OVERLAP
    split_backward   B becomes I and a W that is put off until the rank would idle
    add_transfers    sends after, and receives before, the computations that make and use the values

`executable` is all of it: the checked order of a named schedule, ready to be carried out.
"""

from __future__ import annotations

from functools import lru_cache

from moefold.schedule.actions import Order
from moefold.schedule.names import schedule_named
from moefold.schedule.overlaps import pair_overlaps
from moefold.schedule.split import split_backward
from moefold.schedule.transfers import add_transfers
from moefold.schedule.validate import check

__all__ = ["add_transfers", "executable", "pair_overlaps", "split_backward"]


# A step may have another number of microbatches than the one before, but not many different ones.
@lru_cache(maxsize=32)
def executable(name: str, ranks: int, virtual: int, microbatches: int, *, split: bool = False) -> Order:
    """The order that pipeline ranks carry out; with ``split``, all its backwards in two."""
    order = schedule_named(name).build(ranks, virtual, microbatches)
    return check(add_transfers(split_backward(order) if split else order))
