"""A place where an order goes wrong, and how to show it.

    rank 0 |  SF1@0   RB0@0   B0@0   F2@0   SF2@0
    rank 1 |  RF0@1    F0@1  [B0@1]  SB0@1  RF1@1
                              ^^^^ position 2: ...

Rows are ranks, columns are places in their lists. Numbers after the letter are the microbatch, after @ the stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.schedule.actions import Order

# How many ranks and positions to each side are shown.
_RANKS, _POSITIONS = 2, 4


@dataclass(frozen=True)
class Fault:
    """What is wrong, at which place in which rank's list; ``position`` is None if something is not there at all."""

    rank: int
    position: int | None
    message: str
    # Other cells to point out: (rank, position).
    marks: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        where = f"rank {self.rank}" + ("" if self.position is None else f", position {self.position}")
        return f"{where}: {self.message}"


def surroundings(order: Order, fault: Fault) -> str:
    """The part of the order around a fault, its cell in brackets. A row that has a mark is centred on it."""
    marks = dict(fault.marks)
    if fault.position is not None:
        marks[fault.rank] = fault.position
    # Of something missing only the row is known; its end is as good a place as any.
    focus = fault.position if fault.position is not None else len(order.actions[fault.rank])
    ranks = range(max(0, fault.rank - _RANKS), min(order.num_ranks, fault.rank + _RANKS + 1))
    rows = [(rank, _row(order, rank, marks.get(rank, focus), rank in marks)) for rank in ranks]
    widths = [max(len(row[column]) for _, row in rows) for column in range(2 * _POSITIONS + 1)]
    lines = []
    for rank, row in rows:
        head = f"rank {rank}".rjust(len(f"rank {ranks[-1]}")) + " |"
        lines.append(" ".join([head, *(cell.center(width) for cell, width in zip(row, widths))]).rstrip())
        if rank == fault.rank:
            lines.append(_pointer(len(head), widths, fault))
    return "\n".join(lines)


def _row(order: Order, rank: int, centre: int, marked: bool) -> list[str]:
    actions = order.actions[rank]
    cells = []
    for position in range(centre - _POSITIONS, centre + _POSITIONS + 1):
        cell = str(actions[position]) if 0 <= position < len(actions) else ""
        cells.append(f"[{cell}]" if marked and position == centre else f" {cell} ")
    return cells


def _pointer(head: int, widths: list[int], fault: Fault) -> str:
    if fault.position is None:
        return " " * (head + 1) + "^ nowhere in this row"
    before = head + 1 + sum(width + 1 for width in widths[:_POSITIONS])
    return " " * before + "^" * widths[_POSITIONS] + f" position {fault.position}"
