"""Which keys a set of queries sees, as few rectangular blocks as possible.

Tokens of packed documents lie one after the other, and a rank may hold only some runs of each document. A *run* is
consecutive tokens of one document; a *block* is consecutive rows of queries against consecutive rows of keys. A block
is fully visible, or causal (queries and keys are the same tokens), or a band: a window cuts through it.

Only what is visible becomes a block. Runs that are entirely in sight of each other join into one block, whatever their
distance; a window cuts long runs of queries into pieces, and each piece gets the keys within its reach and no others,
so that the work grows with the window and not with the length. Every row of a block sees at least one of its keys.
Blocks of one shape are stacked and run as one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# A windowed run of queries is cut into pieces of the window's size, but not into smaller ones than this.
SHORTEST_PIECE = 128


class Run(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document; the first of them lies in row ``row`` of the tensor at hand."""

    document: int
    start: int
    stop: int
    row: int


class Sight(Enum):
    FULL = "every query sees every key"
    CAUSAL = "queries and keys are the same tokens, and each sees itself and those before it"
    BAND = "a query sees the keys at most a window back, itself included"


class Block(NamedTuple):
    q_row: int
    num_q: int
    k_row: int
    num_k: int
    sight: Sight
    # How far the first query stands behind the first key; of use to a band only.
    offset: int = 0


class Rows(NamedTuple):
    """Equally many consecutive rows from each of several starts."""

    starts: tuple[int, ...]
    num: int

    def take(self, x: Tensor) -> Tensor:
        """[starts, num, ...]; a view where the starts are evenly spaced, otherwise a copy."""
        step = self._step()
        if step is None:
            index = row_index(self.starts, self.num).to(x.device, non_blocking=True)
            return x.index_select(0, index).unflatten(0, (len(self.starts), self.num))
        x = x[self.starts[0] : self.starts[-1] + self.num]
        return x.unflatten(0, (-1, self.num)) if step == self.num else x.unfold(0, self.num, step).movedim(-1, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Overwrite; starts must be apart from each other. What was changed in place in a view is there already."""
        if values.untyped_storage()._cdata == x.untyped_storage()._cdata:
            return
        for start, value in zip(self.starts, values.unbind(0)):
            x[start : start + self.num] = value

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add up; rows may be named by several starts."""
        for start, value in zip(self.starts, values.unbind(0)):
            x[start : start + self.num] += value

    def _step(self) -> int | None:
        steps = {later - earlier for earlier, later in pairwise(self.starts)}
        step = steps.pop() if steps else self.num
        return None if steps or step <= 0 else step


class Stack(NamedTuple):
    """Blocks of one shape and sight."""

    q: Rows
    k: Rows
    sight: Sight
    offset: int


def document_runs(lengths: Iterable[int]) -> tuple[Run, ...]:
    """Whole documents, one after the other."""
    runs, row = [], 0
    for document, length in enumerate(lengths):
        runs.append(Run(document, 0, length, row))
        row += length
    return tuple(run for run in runs if run.start < run.stop)


def chunk_lengths(lengths: Iterable[int], chunk: int | None) -> tuple[int, ...]:
    """Documents cut into chunks, each a document of its own: attention within chunks is attention within those."""
    if chunk is None:
        return tuple(lengths)
    return tuple(min(chunk, length - start) for length in lengths for start in range(0, length, chunk))


def chunk_runs(runs: Iterable[Run], lengths: Sequence[int], chunk: int | None) -> tuple[Run, ...]:
    """The same tokens as runs of the documents of ``chunk_lengths``."""
    if chunk is None:
        return tuple(runs)
    first = [0, *accumulate(-(-length // chunk) for length in lengths)]
    found = []
    for run in runs:
        for number in range(run.start // chunk, -(-run.stop // chunk)):
            begin = number * chunk
            start, stop = max(run.start, begin), min(run.stop, begin + chunk)
            row = run.row + start - run.start
            found.append(Run(first[run.document] + number, start - begin, stop - begin, row))
    return tuple(found)


def blocks(
    q_runs: Sequence[Run], k_runs: Sequence[Run], window: int | None, shortest_piece: int = SHORTEST_PIECE
) -> list[Block]:
    """What the queries see of the keys. Runs ascend, and a run of keys holds all of a run of queries or none of it."""
    keys: dict[int, list[Run]] = {}
    for run in k_runs:
        keys.setdefault(run.document, []).append(run)
    queries: dict[int, list[Run]] = {}
    for run in q_runs:
        queries.setdefault(run.document, []).append(run)
    found: list[Block] = []
    for document, mine in queries.items():
        theirs = keys.get(document, [])
        if _same_tokens(mine, theirs) and not _cut(mine[-1].stop - mine[0].start, window):
            rows = sum(run.stop - run.start for run in mine)
            found.append(Block(mine[0].row, rows, theirs[0].row, rows, Sight.CAUSAL))
        else:
            found += _join(_pairs(mine, theirs, window, shortest_piece))
    return found


def stacks(found: Iterable[Block]) -> tuple[Stack, ...]:
    """Blocks of one shape together, so that no query row occurs twice in a stack."""
    alike: dict[tuple[int, int, Sight, int], list[list[Block]]] = {}
    for block in sorted(found, key=lambda block: block[:4]):
        heaps = alike.setdefault((block.num_q, block.num_k, block.sight, block.offset), [])
        for heap in heaps:
            if heap[-1].q_row + block.num_q <= block.q_row:
                heap.append(block)
                break
        else:
            heaps.append([block])
    return tuple(_stack(heap) for heaps in alike.values() for heap in heaps)


def band(num_q: int, num_k: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """[num_q, num_k], true where the row's query may look at the column's key."""
    back = offset + torch.arange(num_q, device=device)[:, None] - torch.arange(num_k, device=device)
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _pairs(mine: list[Run], theirs: list[Run], window: int | None, shortest_piece: int) -> list[Block]:
    found = []
    for query in _pieces(mine, window, shortest_piece):
        for key in theirs:
            block = _between(query, key, window)
            if block is not None:
                found.append(block)
    return found


def _pieces(runs: list[Run], window: int | None, shortest: int) -> Iterable[Run]:
    for run in runs:
        size = run.stop - run.start if window is None else max(window, shortest)
        for start in range(run.start, run.stop, size):
            yield Run(run.document, start, min(start + size, run.stop), run.row + start - run.start)


def _between(query: Run, key: Run, window: int | None) -> Block | None:
    """The part of the two runs where every query sees a key and every key is seen."""
    k_start, k_stop = key.start, min(key.stop, query.stop)
    q_start, q_stop = max(query.start, key.start), query.stop
    if window is not None:
        k_start = max(k_start, q_start - window + 1)
        q_stop = min(q_stop, k_stop - 1 + window)
    if k_start >= k_stop or q_start >= q_stop:
        return None
    num_q, num_k, offset = q_stop - q_start, k_stop - k_start, q_start - k_start
    in_sight = offset >= num_k - 1 and not _cut(q_stop - k_start, window)
    same = offset == 0 and num_q == num_k and not _cut(num_q, window)
    sight = Sight.FULL if in_sight else Sight.CAUSAL if same else Sight.BAND
    q_row, k_row = query.row + q_start - query.start, key.row + k_start - key.start
    return Block(q_row, num_q, k_row, num_k, sight, offset if sight is Sight.BAND else 0)


def _join(found: list[Block]) -> list[Block]:
    """Fully visible blocks that lie side by side become one: first along the keys, then along the queries."""
    wide: list[Block] = []
    for block in found:
        last = wide[-1] if wide else None
        if last and _both_full(last, block) and last[:2] == block[:2] and last.k_row + last.num_k == block.k_row:
            wide[-1] = last._replace(num_k=last.num_k + block.num_k)
        else:
            wide.append(block)
    tall: list[Block] = []
    for block in wide:
        last = tall[-1] if tall else None
        if last and _both_full(last, block) and last[2:4] == block[2:4] and last.q_row + last.num_q == block.q_row:
            tall[-1] = last._replace(num_q=last.num_q + block.num_q)
        else:
            tall.append(block)
    return tall


def _both_full(a: Block, b: Block) -> bool:
    return a.sight is Sight.FULL and b.sight is Sight.FULL


def _cut(reach: int, window: int | None) -> bool:
    """Whether a window hides the first of ``reach`` positions from the last."""
    return window is not None and window < reach


def _same_tokens(mine: list[Run], theirs: list[Run]) -> bool:
    """Both the same, and each in consecutive rows."""
    if [run[:3] for run in mine] != [run[:3] for run in theirs]:
        return False
    return all(
        earlier.row + earlier.stop - earlier.start == later.row
        for runs in (mine, theirs)
        for earlier, later in pairwise(runs)
    )


def _stack(heap: list[Block]) -> Stack:
    first = heap[0]
    q = Rows(tuple(block.q_row for block in heap), first.num_q)
    k = Rows(tuple(block.k_row for block in heap), first.num_k)
    return Stack(q, k, first.sight, first.offset)


@lru_cache(maxsize=256)
def row_index(starts: tuple[int, ...], count: int) -> Tensor:
    return (torch.tensor(starts)[:, None] + torch.arange(count)).flatten()
