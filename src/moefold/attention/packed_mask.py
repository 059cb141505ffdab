"""Which keys each query of packed documents sees: as runs of documents, as spans of rows, and as blocks.

A query sees the keys of its own document at its own position and before, at most a window back. Rows are ordered by
document and position, for queries and for keys, also where a rank holds only some runs of each document. Then the keys
that a query sees are consecutive rows, and so are the queries that see a key:

    query i sees the keys      begin[i] .. end[i] - 1
    key j is seen by queries   q_begin[j] .. q_end[j] - 1

Neither begin nor end ever decreases. This holds for whole documents, for windows, and for the steps of ring attention,
so one kernel with these four arrays serves them all, in one launch, however many documents there are. Torch's own
attention takes rectangles instead: ``stacks`` has them (``mask_blocks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from moefold.attention.mask_blocks import Run, Stack, blocks, document_runs, stacks

Lengths = tuple[int, ...]


class KeySpans(NamedTuple):
    """int32: the span of keys that each of S queries sees, and of queries that see each of X keys."""

    begin_S: Tensor
    end_S: Tensor
    q_begin_X: Tensor
    q_end_X: Tensor


@dataclass(frozen=True)
class PackedMask:
    """The runs of documents that the rows of queries and of keys hold, in order, and the window."""

    q_runs: tuple[Run, ...]
    k_runs: tuple[Run, ...]
    window: int | None
    # Of a ring step, which plans its transfers by blocks of rows.
    planned_stacks: tuple[Stack, ...] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """What the queries see as rectangles of rows, those of one shape together."""
        if self.planned_stacks is not None:
            return self.planned_stacks
        return stacks(blocks(self.q_runs, self.k_runs, self.window))

    @property
    def num_q(self) -> int:
        return sum(run.stop - run.start for run in self.q_runs)

    @property
    def num_k(self) -> int:
        return sum(run.stop - run.start for run in self.k_runs)

    def spans(self, device: torch.device) -> KeySpans:
        """Computed once per mask and device. Fake tensors belong to the mode that made them."""
        return _spans(self, device, active_fake_mode())


@lru_cache(maxsize=256)
def whole_documents(lengths: Lengths, window: int | None) -> PackedMask:
    """Queries and keys are the same documents, one after the other."""
    runs = document_runs(lengths)
    return PackedMask(runs, runs, window)


# Few: a microbatch needs one per kind of layer and per step of a ring, and its backward keeps its own.
@lru_cache(maxsize=32)
def _spans(mask: PackedMask, device: torch.device, mode: object) -> KeySpans:
    # A number per row that ascends by document, then by position.
    reach = 1 + max((run.stop for run in (*mask.q_runs, *mask.k_runs)), default=0)
    q_place_S, k_place_X = (_places(runs, reach, device) for runs in (mask.q_runs, mask.k_runs))
    first_S = q_place_S - q_place_S % reach
    if mask.window is not None:
        first_S = torch.maximum(first_S, q_place_S - (mask.window - 1))
    begin_S = torch.searchsorted(k_place_X, first_S, out_int32=True)
    end_S = torch.searchsorted(k_place_X, q_place_S, right=True, out_int32=True)
    key_X = torch.arange(mask.num_k, dtype=torch.int32, device=device)
    return KeySpans(
        begin_S,
        end_S,
        torch.searchsorted(end_S, key_X, right=True, out_int32=True),
        torch.searchsorted(begin_S, key_X, right=True, out_int32=True),
    )


def _places(runs: Sequence[Run], reach: int, device: torch.device) -> Tensor:
    sizes = [run.stop - run.start for run in runs]
    row, shift = 0, []
    for run, size in zip(runs, sizes):
        shift.append(run.document * reach + run.start - row)
        row += size
    both = torch.tensor([shift, sizes], dtype=torch.int64, device=device)
    shift_X = both[0].repeat_interleave(both[1], output_size=row)
    return shift_X + torch.arange(row, device=device)
