"""Rows in runs, one run per expert, each followed by padding: how long runs are then, and where their rows lie.

Numbers of rows are known on the host. Sums of them stay there, which saves a GPU launches.

Shapes: N rows, P with padding, e runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def aligned(sizes: Sequence[int], multiple: int) -> list[int]:
    """Of every run with the padding that makes it a multiple of rows; a run without rows stays so.

    >>> aligned([3, 0, 8], 4)
    [4, 0, 8]
    """
    return [-(-size // multiple) * multiple for size in sizes]


def padded_places(sizes: Sequence[int], padded: Sequence[int], device: torch.device) -> Tensor:
    """[N]: where the rows of runs of these sizes lie in runs of padded sizes."""
    total, size_e = sum(sizes), torch.tensor(list(sizes), device=device)
    paddings = [more - size for size, more in zip(sizes, padded, strict=True)]
    shift_e = torch.tensor([0, *accumulate(paddings)][:-1], device=device)
    return torch.arange(total, device=device) + shift_e.repeat_interleave(size_e, output_size=total)


def move_rows(rows: Tensor, sizes: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """From runs of these sizes to runs of others: cut, or followed by zeros."""
    if list(sizes) == list(wanted):
        return rows
    if len(sizes) == 1:
        # Without numbers of places, which would have to be sent to a GPU.
        return torch.cat([rows[: wanted[0]], rows.new_zeros(max(wanted[0] - sizes[0], 0), *rows.shape[1:])])
    counts = [min(pair) for pair in zip(sizes, wanted, strict=True)]
    moved = rows.new_zeros(sum(wanted), *rows.shape[1:])
    if sum(counts):
        moved[padded_places(counts, wanted, rows.device)] = rows[padded_places(counts, sizes, rows.device)]
    return moved
