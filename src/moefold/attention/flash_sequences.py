"""What the flash-attn packages can be told of a mask: sequences of queries and of keys, all causal or none.

A call takes cumulative lengths of query sequences and of key sequences, one to one, and one causal flag. Rows of
queries and of keys must lie in this order without gaps. Two kinds of masks fit:

- *causal*: queries and keys are the same tokens. Runs of one document follow each other, and each row sees those before
  it. With a window a document must be one run, since the package counts rows and not positions.
- *full*: every query sees all keys of its document that are here, or none. These are the later steps of a ring.

Other masks are refused: those of a window in a ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from moefold.attention.mask_blocks import Run
from moefold.attention.packed_mask import PackedMask
from moefold.errors import BackendError


@dataclass(frozen=True)
class Sequences:
    """Lengths of sequences of queries and of keys; a sequence of queries without keys sees nothing."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    window: int | None

    @property
    def max_q(self) -> int:
        return max(self.q_lengths, default=0)

    @property
    def max_k(self) -> int:
        return max(self.k_lengths, default=0)

    @property
    def has_blind_rows(self) -> bool:
        return any(q and not k for q, k in zip(self.q_lengths, self.k_lengths))

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """int32, from 0 to the number of rows. Fake tensors belong to the mode that made them."""
        return _cu_seqlens(self, device, active_fake_mode())


@lru_cache(maxsize=256)
def sequences(mask: PackedMask) -> Sequences:
    same = [run[:3] for run in mask.q_runs] == [run[:3] for run in mask.k_runs]
    if same and (mask.window is None or len({run.document for run in mask.q_runs}) == len(mask.q_runs)):
        lengths = tuple(map(_num_rows, _by_document(mask.q_runs).values()))
        return Sequences(lengths, lengths, True, mask.window)
    return _full_sequences(mask)


def _full_sequences(mask: PackedMask) -> Sequences:
    keys = _by_document(mask.k_runs)
    pairs: list[tuple[int, int]] = []
    for number, runs in _by_document(mask.q_runs).items():
        theirs = keys.pop(number, ())
        first, stop = (theirs[0].start, theirs[-1].stop) if theirs else (0, 0)
        blind = [run for run in runs if not theirs or run.stop <= first]
        seeing = [run for run in runs if theirs and run.start >= stop]
        if len(blind) + len(seeing) < len(runs) or (theirs and not seeing) or (seeing and mask.window is not None):
            raise BackendError(
                f"kernels.attention: flash_attn has no mask for keys {first}-{stop} of a document and queries "
                f"{runs[0].start}-{runs[-1].stop} with window {mask.window}; use triton, or all_to_all for "
                "parallel.context.windowed"
            )
        pairs += [(_num_rows(blind), 0)] if blind else []
        pairs += [(_num_rows(seeing), _num_rows(theirs))] if seeing else []
    if keys:
        raise BackendError("kernels.attention: flash_attn needs a query for each document that has keys; use triton")
    return Sequences(tuple(q for q, _ in pairs), tuple(k for _, k in pairs), False, None)


@lru_cache(maxsize=32)
def _cu_seqlens(found: Sequences, device: torch.device, mode: object) -> tuple[Tensor, Tensor]:
    q, k = ([0, *accumulate(lengths)] for lengths in (found.q_lengths, found.k_lengths))
    both = torch.tensor([q, k], dtype=torch.int32, device=device)
    return both[0].contiguous(), both[1].contiguous()


def _by_document(runs: Iterable[Run]) -> dict[int, tuple[Run, ...]]:
    return {number: tuple(group) for number, group in groupby(runs, lambda run: run.document)}


def _num_rows(runs: Iterable[Run]) -> int:
    return sum(run.stop - run.start for run in runs)
